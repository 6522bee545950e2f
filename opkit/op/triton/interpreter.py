"""Run Triton kernels on CPU tensors, in a process in which Triton interprets them.

``TRITON_INTERPRET=1`` works if it is set before the kernels are decorated, so each module of operators gets a process of
its own with the variable set, which imports the module again and serves further calls. Calls travel as JSON, and tensors as
bytes, each with its length before it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils import _pytree as pytree

import opkit.config
from opkit.errors import ArgumentError, ArgumentTypeError, InterpreterError
from opkit.op import registry
from opkit.op.forcing import use_kernel

_SECONDS = 300.0
_MARK = "OPKIT_INTERPRETER_OF"  # set in the child: what it imports must not start another


class Interpreter:
    """A process that interprets the Triton kernels of one module's operators; a context manager, and callable.

    Args:
        module: the module's name.
        file: its file, for a module that cannot be imported by its name.
        seconds: how long to wait for an answer.

    Raises:
        InterpreterError: the module cannot be imported; or, at a call, as :func:`interpret`.

    >>> # with Interpreter("my_ops") as run:
    >>> #     y = run("my::rms_norm", x, weight, eps=1e-6)
    """

    def __init__(self, module: str, file: str | Path | None = None, seconds: float = _SECONDS) -> None:
        _check_outermost(module)
        self.module = module
        self.seconds = seconds
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._lock = threading.Lock()
        command = [sys.executable, "-P", "-c", "from opkit.op.triton.interpreter import main; main()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=_environment(module)
        )
        try:
            load = {"do": "load", "module": module, "file": None if file is None else str(file), "path": sys.path}
            self._request(load, module)
        except BaseException:
            self.close()
            raise

    def __call__(self, op: Any, *args: Any, kernel: str | None = None, **kwargs: Any) -> Any:
        """Return the result of one call of an operator (or its name), made by its Triton kernel; it records no gradients.

        Raises:
            InterpreterError: the operator raised, no Triton kernel takes the call, or the process died.
        """
        request = {"do": "call", "op": _name(op), "args": args, "kwargs": kwargs, "kernel": kernel}
        answer = self._request(request, _name(op))
        leaves = pytree.tree_leaves((args, kwargs))
        with torch.no_grad():
            for number, written in answer["written"].items():
                leaves[number].copy_(written)
        return answer["result"]

    def differentiate(
        self, op: Any, cotangents: Sequence[Any], *args: Any, kernel: str | None = None, **kwargs: Any
    ) -> Any:
        """Return the result, and the gradient of each tensor argument that requires one, in order.

        ``cotangents`` are those of the outputs that depend differentiably on such arguments.
        """
        request = {"do": "differentiate", "op": _name(op), "args": args, "kwargs": kwargs, "kernel": kernel}
        return self._request({**request, "cotangents": list(cotangents)}, _name(op))

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, request: dict[str, Any], about: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                send(self._process.stdin, request)
                self._wait(about)
                answer = receive(self._process.stdout)
            except (EOFError, BrokenPipeError) as error:
                raise InterpreterError(f"{about}: the interpreter's process ended: {self._said()}") from error
        if "error" not in answer:
            return answer["result"]
        failure = InterpreterError(f"{about}, in Triton's interpreter: {answer['error']}: {answer['message']}")
        failure.add_note(answer["trace"])
        raise failure

    def _wait(self, about: str) -> None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self.seconds)
        if not ready:
            self._process.kill()
            raise InterpreterError(f"{about}: the interpreter did not answer within {self.seconds:.0f} s.")

    def _said(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f"status {status}. {' | '.join(lines[-5:])}"


def _check_outermost(module: str) -> None:
    above = os.environ.get(_MARK)
    if above is not None:
        raise InterpreterError(
            f"{module} was to be interpreted while {above} was imported for the interpreter. Define operators at the top of "
            'the file, and put what calls them under `if __name__ == "__main__":`.'
        )


def _environment(module: str) -> dict[str, str]:
    above = str(Path(opkit.config.__file__).parents[1])
    paths = [above, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        _MARK: module,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def _name(op: Any) -> str:
    return op if isinstance(op, str) else str(op.name)


_processes: dict[tuple[str, str], Interpreter] = {}
_lock = threading.Lock()


def interpreter_of(op: Any) -> Interpreter:
    """The interpreter of the module that defines an operator; it is started at the first call and ends with this process.

    Raises:
        ArgumentError: the operator is defined in no file.
    """
    function = op._operator.function  # pyright: ignore[reportPrivateUsage]
    module, file = str(function.__module__), function.__code__.co_filename
    if not os.path.isfile(file):
        raise ArgumentError(f"{op.name} is defined in {file}, which is no file that another process could import.")
    with _lock:
        found = _processes.get((module, file))
        if found is None or found._process.poll() is not None:  # pyright: ignore[reportPrivateUsage]
            found = _processes[module, file] = Interpreter(module, file)
            atexit.register(found.close)
        return found


def interpret(op: Any, *, kernel: str | None = None) -> Callable[..., Any]:
    """Return the operator as a function that runs its Triton kernel in the interpreter, on CPU tensors.

    It runs in a child process, in which ``TRITON_INTERPRET=1`` is set and the module that defines the operator is imported
    again; the process serves further calls. Gluon kernels cannot be interpreted.

    Args:
        op: made by ``opkit.custom_op``, in a file.
        kernel: which one, of several.

    Raises:
        ArgumentError: the operator is not defined in a file.
        InterpreterError: (by the function) the kernel failed, or no Triton kernel takes the call.

    >>> from opkit.testing import interpret
    >>> from examples.kernels.softmax import softmax               # doctest: +SKIP
    >>> interpret(softmax)(torch.randn(4, 10))                     # doctest: +SKIP
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return interpreter_of(op)(op, *args, kernel=kernel, **kwargs)

    return run


# ---- messages --------------------------------------------------------------------------------------------------------


_LENGTH = struct.Struct("<q")


def send(stream: IO[bytes], value: Any) -> None:
    """Write one message."""
    blobs: list[bytes] = []
    header = json.dumps(_encoded(value, blobs)).encode()
    for part in (header, *blobs):
        stream.write(_LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message.

    Raises:
        EOFError: the other side is gone.
    """
    return _decoded(json.loads(_read(stream)), stream)


def _read(stream: IO[bytes]) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return _exactly(stream, length)


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _encoded(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, blobs)
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_encoded(item, blobs) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(item, blobs)] for key, item in value.items()]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArgumentTypeError(f"{value!r} of type {type(value).__name__} cannot be passed to the interpreter's process.")


def _tensor(value: torch.Tensor, blobs: list[bytes]) -> dict[str, Any]:
    """Append a tensor's elements to ``blobs``, without what is between them; return its shape, strides and dtype."""
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    blobs.append(dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    described = {"shape": list(value.shape), "strides": list(value.stride()), "grad": value.requires_grad}
    return {"tensor": {**described, "dtype": str(value.dtype).removeprefix("torch."), "offset": value.storage_offset()}}


def _decoded(value: Any, stream: IO[bytes]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return _restored(content, _read(stream))
    if kind in ("list", "tuple"):
        items = [_decoded(item, stream) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: _decoded(item, stream) for key, item in content}
    return getattr(torch, content) if kind == "dtype" else torch.device(content)


def _restored(content: dict[str, Any], data: bytes) -> torch.Tensor:
    dtype, shape, strides, offset = (
        getattr(torch, content["dtype"]),
        content["shape"],
        content["strides"],
        content["offset"],
    )
    extent = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    storage = torch.empty(max(extent, offset + 1), dtype=dtype)
    result = torch.as_strided(storage, shape, strides, offset)
    once = tuple(slice(0, 1 if stride == 0 else None) for stride in strides)  # of what is expanded, each element
    if data:
        result[once].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)[once])
    return result.requires_grad_(content["grad"])


# ---- the process that interprets -------------------------------------------------------------------------------------


def main() -> None:
    """Serve the calls on standard input; what operators print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            return
        send(answers, _answered(request))


def _answered(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": _HANDLERS[request["do"]](request)}
    except Exception as error:  # whatever an operator raises is the caller's to see
        return {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}


def _load(request: dict[str, Any]) -> None:
    """Import the module by its name where that finds the same file, and else from the file."""
    sys.path[:] = request["path"]
    name, file = request["module"], request["file"]
    warnings.simplefilter("ignore")
    spec = None if name == "__main__" else importlib.util.find_spec(name)
    if spec is not None and (not file or (spec.origin and os.path.samefile(spec.origin, file))):
        importlib.import_module(name)
        return
    if file is None:
        raise ImportError(f"there is no module {name!r}, and no file= was given")
    chosen = "__opkit_interpreted__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(chosen, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[chosen] = module
    spec.loader.exec_module(module)


def _call(request: dict[str, Any]) -> Any:
    op = registry.get(request["op"])
    args, kwargs = request["args"], request["kwargs"]
    if not request["kernel"]:
        return _checked(op, op(*args, **kwargs), args, kwargs)
    with use_kernel(op, request["kernel"]):
        return op(*args, **kwargs)


def _checked(op: Any, result: Any, args: Any, kwargs: Any) -> Any:
    """Return the result, unless it was the reference's: what is to be tested are kernels."""
    selection = op.select(*args, **kwargs)
    if selection.kernel == "reference":
        reasons = "; ".join(f"{name}: {reason}" for name, reason in selection.refused.items()) or "it has none"
        raise LookupError(f"no Triton kernel takes this call ({reasons})")
    return result


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call, and the tensors among the arguments, by number, that it wrote to."""
    leaves = pytree.tree_leaves((request["args"], request["kwargs"]))
    tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    before = {number: tensor._version for number, tensor in tensors.items()}
    result = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, _call(request))
    written = {number: tensor for number, tensor in tensors.items() if tensor._version != before[number]}
    return {"result": result, "written": written}


def _differentiate(request: dict[str, Any]) -> Any:
    """Return the result of a call, and the gradients of its tensors that require them, for given cotangents."""
    result = _call(request)
    outputs = [out for out in pytree.tree_leaves(result) if isinstance(out, torch.Tensor) and out.requires_grad]
    leaves = pytree.tree_leaves((request["args"], request["kwargs"]))
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, request["cotangents"], allow_unused=True)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (result, list(grads)))


_HANDLERS = {"load": _load, "call": _run, "differentiate": _differentiate}
