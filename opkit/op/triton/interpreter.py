"""Run Triton kernels on CPU tensors, in a process in which Triton interprets them.

``TRITON_INTERPRET=1`` works if it is set before the kernels are decorated, so each module of operators gets a process of
its own with the variable set, which imports the module again and serves further calls.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import opkit.config
from opkit.errors import ArgumentError, InterpreterError
from opkit.op.triton.messages import receive, send

_SECONDS = 300.0
_MARK = "OPKIT_INTERPRETER_OF"  # set in the child: what it imports must not start another


class Interpreter:
    """A process that interprets the Triton kernels of one module's operators; a context manager, and callable.

    >>> # with Interpreter("my_ops") as run:
    >>> #     y = run("my::rms_norm", x, weight, eps=1e-6)
    """

    def __init__(self, module: str, file: str | Path | None = None, seconds: float = _SECONDS) -> None:
        _check_outermost(module)
        self.module = module
        self.seconds = seconds
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._lock = threading.Lock()
        command = [sys.executable, "-P", "-c", "from opkit.op.triton.interpreted_child import main; main()"]
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
