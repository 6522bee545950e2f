"""The process in which Triton interprets: it imports a module of operators and runs their calls until its input ends."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from typing import Any


def main() -> None:
    """Serve the calls on standard input; what operators print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from opkit.op.triton.messages import receive, send

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
    chosen = "__opkit_interpreted__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(chosen, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[chosen] = module
    spec.loader.exec_module(module)


def _call(request: dict[str, Any]) -> Any:
    from opkit.op import registry
    from opkit.op.operator import use_kernel

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
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves((request["args"], request["kwargs"]))
    tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    before = {number: tensor._version for number, tensor in tensors.items()}
    result = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, _call(request))
    written = {number: tensor for number, tensor in tensors.items() if tensor._version != before[number]}
    return {"result": result, "written": written}


def _differentiate(request: dict[str, Any]) -> Any:
    """Return the result of a call, and the gradients of its tensors that require them, for given cotangents."""
    import torch
    from torch.utils import _pytree as pytree

    result = _call(request)
    outputs = [out for out in pytree.tree_leaves(result) if isinstance(out, torch.Tensor) and out.requires_grad]
    leaves = pytree.tree_leaves((request["args"], request["kwargs"]))
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, request["cotangents"], allow_unused=True)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (result, list(grads)))


_HANDLERS = {"load": _load, "call": _run, "differentiate": _differentiate}

if __name__ == "__main__":
    main()
