"""This module writes a stand-alone script that reproduces a failure, with code that defines the operator again."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy
from torch._library import simple_registry  # read in torch 2.13

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.calls.specs import TensorArgument
from opkit.contract.prop import Property
from opkit.contract.report.extraction import Extraction, literal
from opkit.contract.subject import Subject
from opkit.op import torch_private as private

_FEW = 16  # elements that are written out, in a comment
_ALWAYS = ("torch", "torch.nn.functional", "torch.special", "torch.linalg", "torch.fft", "builtins", "math", "operator")
_BUILT_IN = ("aten", "prims", "prim", "quantized")
_TORCH = str(Path(torch.__file__).parent)
_OPKIT = str(Path(__file__).parents[2])


def script(subject: Subject, prop: Property, case: Case) -> str:
    """Return a script that calls the operator with ``case``, checks the property, and shows how it fails.

    The script's exit status is 1 if the property fails, 0 if it holds, and 2 if it cannot be checked. Where the source of the
    operator was not found, a comment says what to fill in.
    """
    extraction = Extraction()
    try:
        op = origin(subject.target, "op", extraction)
        reference = _reference(subject, extraction)
    except Exception as error:  # odd source text must not cost the report
        op, reference = Origin((), "op", f"op = ...  # {type(error).__name__}: {error}"), Origin((), "None")
    text = _written(subject, prop, case, op, reference, extraction)
    try:
        compile(text, "repro", "exec")
    except SyntaxError:
        op = Origin((), "op", "op = ...  # its source could not be copied; import or define it here")
        text = _written(subject, prop, case, op, Origin((), "None"), Extraction())
    return text


def _reference(subject: Subject, extraction: Extraction) -> Origin:
    own = subject.operator is not None and subject.reference is subject.operator.reference
    if subject.reference is None or own:
        return Origin((), "None")
    return origin(subject.reference, "reference", extraction)


def _written(
    subject: Subject, prop: Property, case: Case, op: Origin, reference: Origin, extraction: Extraction
) -> str:
    copied = extraction.lines()
    names = sorted({"Case", "TensorCase", type(case).__name__, "load", "replay", "tensor"})
    future = [line for line in copied if line.startswith("from __future__")]
    missing = [text for text in (op.missing, reference.missing) if text]
    missing += [f"{name} = ...  # not found: give it its value here" for name in extraction.unknown]
    blocks = [
        f'"""{_safe(prop.name)} does not hold for {_safe(subject.name)}: {_safe(prop.rule)}\n\n'
        'Found by opkit.check. The script ends with 1 if it still fails, with 0 if it holds.\n"""',
        "\n".join(future),
        f"import torch\n\nfrom opkit.testing import {', '.join(names)}",
        "\n".join(dict.fromkeys((*op.lines, *reference.lines))),
        _fill_in(missing),
        "\n\n".join(line for line in copied if line not in future),
        f"op = {op.expression}" if op.expression != "op" else "",
        f"case = {written(case)}\n{_numbers(case)}",
        _replay(subject, prop, case, reference),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _safe(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _fill_in(missing: list[str]) -> str:
    if not missing:
        return ""
    comments = [f"# TO FILL IN: {text}" for text in missing]
    stop = 'raise SystemExit("fill in what the comments above say, and take this line out")'
    return "\n".join(["import sys", *comments, 'print("The source of the operator was not found:", file=sys.stderr)',
                      f"print({missing!r}, file=sys.stderr)", f"sys.exit(2)  # {stop}"])  # fmt: skip


def _replay(subject: Subject, prop: Property, case: Case, reference: Origin) -> str:
    specs = [_spec(item, value) for item, value in zip(subject.spec.args, case.args, strict=False)]
    named = dict(case.kwargs)
    kwargs = [f"{name!r}: {_spec(item, named.get(name))}" for name, item in subject.spec.kwargs]
    arguments = [f"args=[{', '.join(specs)}]"]
    arguments += [f"kwargs={{{', '.join(kwargs)}}}"] if kwargs else []
    arguments += [f"reference={reference.expression}"] if reference.expression != "None" else []
    arguments += [f"device={subject.device!r}"] if subject.device != "cpu" else []
    return f'if __name__ == "__main__":\n    raise SystemExit(replay(op, {prop.name!r}, case, {", ".join(arguments)}))'


def _spec(item: Any, value: Any) -> str:
    """Write the argument's spec, for properties that draw more cases; a strategy becomes the value that it drew."""
    if isinstance(item, TensorArgument):
        return _tensor(item)
    if isinstance(item, list) and isinstance(value, (list, tuple)):
        return f"[{', '.join(_spec(each, one) for each, one in zip(item, value, strict=False))}]"
    return written(value if isinstance(item, SearchStrategy) else item)


def _tensor(item: TensorArgument) -> str:
    fields = {"optional": False, "low": None, "high": None, "layouts": None, "fills": None, "differentiable": True}
    rest = [f"{name}={getattr(item, name)!r}" for name, usual in fields.items() if getattr(item, name) != usual]
    dtypes = [] if item.dtypes is None else [f"dtypes={item.dtypes!r}"]
    shape = item.pattern.text  # without dtypes, which an annotation's pattern contains too
    return f"tensor({', '.join([repr(shape), *dtypes, *rest])})"


def written(value: Any) -> str:
    """Write a case, or a value of one, as a readable expression."""
    if isinstance(value, (Case, TensorCase)):
        return _dataclass(value)
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(written, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, enum.Enum):
        return f"load({type(value).__module__!r}, '').{type(value).__qualname__}.{value.name}"
    return literal(value) or repr(value)


def _dataclass(value: Any) -> str:
    fields = dataclasses.fields(value)
    changed = [f for f in fields if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{f.name}={written(getattr(value, f.name))}' for f in changed)})"


def _numbers(case: Case) -> str:
    """Write the numbers in small tensors as comments."""
    lines = [
        f"# tensor {number}: {tensor}, {_values(tensor)}"
        for number, tensor in enumerate(case.tensors())
        if torch.Size(tensor.shape).numel() <= _FEW
    ]
    return "\n".join(lines)


def _values(tensor: TensorCase) -> str:
    try:
        return str(tensor.make().detach().tolist())
    except Exception as error:  # a comment is not worth a failure
        return f"not shown: {error}"


# ---- the code that defines an operator again ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Origin:
    """Statements that define an object, and the expression for the object.

    Attributes:
        lines: the statements; they may use ``torch`` and ``load`` of ``opkit.testing``.
        expression: the object.
        missing: what could not be found, for the reader to fill in; "" where nothing is missing.
    """

    lines: tuple[str, ...]
    expression: str
    missing: str = ""


def origin(target: Any, name: str, extraction: Extraction) -> Origin:
    """Return the code that defines ``target`` again.

    Args:
        target: an operator or a callable.
        name: the variable for it, if it has no name of its own.
        extraction: collects the source text that has to be copied, for all objects of one script.
    """
    found = _attribute(target) or _overload(target, extraction) or _copied(target, extraction)
    return found or Origin((), name, f"{name} = ...  # {target!r}: its source was not found; import or define it here")


def function_of(target: Any) -> Any:
    """Return the Python function behind an operator, a partial or a wrapper, or None."""
    function = getattr(target, "_init_fn", None) or target
    if isinstance(function, types.MethodType):
        return None
    return function if isinstance(function, types.FunctionType) else None


def _attribute(target: Any) -> Origin | None:
    """Find the target as an attribute of a module, which is imported by name or loaded by path."""
    for module in _modules(target):
        path = _path_in(module, target)
        if path is not None:
            variable = module.__name__ if _installed(module) else _identifier(module.__name__)
            return Origin(tuple(_import(module)), f"{variable}.{path}")
    return None


def _modules(target: Any) -> Iterator[types.ModuleType]:
    function = function_of(target)
    for owner in (target, function):
        name = getattr(owner, "__module__", None)
        if isinstance(name, str) and name in sys.modules:
            yield sys.modules[name]
    if isinstance(target, torch._ops.OpOverload):
        return
    yield from (sys.modules[name] for name in _ALWAYS if name in sys.modules)


def _path_in(module: types.ModuleType, target: Any) -> str | None:
    """Return the dotted name of the object in a module."""
    qualified = getattr(target, "__qualname__", "")
    for path in (qualified, getattr(target, "__name__", "")):
        if isinstance(path, str) and path and "<" not in path and _follow(module, path) is target:
            return path
    return next((name for name, value in list(vars(module).items()) if value is target and name.isidentifier()), None)


def _follow(module: types.ModuleType, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _identifier(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name).strip("_")


def _import(module: types.ModuleType) -> list[str]:
    if _installed(module):
        return [f"import {module.__name__}"]
    return [load_statement(module)]


def load_statement(module: types.ModuleType) -> str:
    """Return a statement that loads a module from its file, under its present name if that leads to the same file."""
    return f"{_identifier(module.__name__)} = load({module.__name__!r}, {str(Path(module.__file__ or '').resolve())!r})"


def _installed(module: types.ModuleType) -> bool:
    """Whether every process finds the module by its name."""
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ in sys.builtin_module_names
    if module.__name__.split(".")[0] in ("torch", "opkit"):
        return True
    inside = any(part in ("site-packages", "dist-packages") for part in Path(file).parts)
    return inside or module.__name__.split(".")[0] in sys.stdlib_module_names


def _overload(target: Any, extraction: Extraction) -> Origin | None:
    """Return an expression of ``torch.ops`` and the code that registers the operator."""
    if not isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    name = target.name() if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
    namespace, rest = name.split("::")
    default = ".default" if "." not in rest and isinstance(target, torch._ops.OpOverload) else ""
    expression = f"torch.ops.{namespace}.{rest}{default}"
    if namespace in _BUILT_IN:
        return Origin((), expression)
    definition = private.custom_ops.OPDEFS.get(name.split(".")[0])
    if definition is not None:
        found = _attribute(definition) or _copied(definition, extraction)
        return None if found is None else dataclasses.replace(found, expression=expression)
    for file, line in registrations(name):
        module = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file), None)
        if module is not None and not extraction.local(file, line):
            return Origin(tuple(_import(module)), expression)
        if extraction.around(file, line, rest.split(".")[0]):
            return Origin((), expression)
    return Origin((), expression, f"# run here what defines {name}")


def registrations(name: str) -> list[tuple[str, int]]:
    """Return the files and lines of an operator's registrations outside torch and opkit, as the dispatcher recorded them."""
    text = torch._C._dispatch_dump(name)  # torch 2.13: "CPU: registered at FILE:LINE :: ..."
    kernel = simple_registry.singleton.find(name).fake_impl.kernel
    text += f" registered at {kernel.source}" if kernel is not None else ""
    found = [(file, int(line)) for file, line in re.findall(r"registered at (\S+?\.py):(\d+)", text)]
    return [(file, line) for file, line in dict.fromkeys(found) if not file.startswith((_TORCH, _OPKIT))]


def _copied(target: Any, extraction: Extraction) -> Origin | None:
    """Copy the source text of a function, and what it uses."""
    function = function_of(target) or inspect.unwrap(target) if callable(target) else None
    if not isinstance(function, types.FunctionType):
        return None
    expression = extraction.function(function, target)
    return None if expression is None else Origin((), expression)
