"""Make the kernel that calls a function of an installed library, from the function's C declaration.

The kernel is C: the declaration, and a function that takes the operator's arguments and calls the library's function. That is
declared under a name of opkit's own, with its real name for the linker, so that a header of the library in ``preamble``
cannot contradict the declaration. Values in ``bind`` may be expressions of sizes and integer arguments.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Collection, Mapping, Sequence

from opkit.errors import DeclarationError
from opkit.kernels.binding import Constant
from opkit.kernels.cc import declaration
from opkit.kernels.cc.declaration import CFunction, CParameter
from opkit.kernels.cc.dtypes import C_TYPES, CType
from opkit.kernels.cc.native import NativeKernel
from opkit.kernels.libraries.shared_library import SharedLibrary

RETURNS = ("code", "ignore")
_LEADING = re.compile(r"ld\w{0,2}\Z", re.IGNORECASE)
_UNKNOWN = CType("unknown", None)


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A declared function of a library. ``text`` is the author's declaration."""

    function: CFunction
    text: str

    @property
    def symbol(self) -> str:
        """The name of the function in the library."""
        return self.function.name

    @property
    def of_numbers(self) -> bool:
        """Whether all parameters and the result are numbers."""
        function = self.function
        values = all(not parameter.pointer and is_number(parameter.type) for parameter in function.parameters)
        return values and bool(function.parameters) and is_number(function.returns)

    def error(self, message: str) -> DeclarationError:
        """Return the error to raise about the declaration."""
        return DeclarationError(f"`{' '.join(self.text.split())}`: {message}")

    def parameter_error(self, parameter: CParameter, message: str) -> DeclarationError:
        """Return the error to raise about one of its parameters."""
        return DeclarationError(f"{self.symbol}, parameter `{parameter.text}`: {message}")


def is_number(c_type: str) -> bool:
    """Return whether a C type is that of a number."""
    return c_type.startswith("enum ") or C_TYPES.get(c_type, _UNKNOWN).kind in ("int", "float", "complex", "bool")


def parse(text: str, preamble: str = "") -> Foreign:
    """Read a declaration.

    Raises:
        DeclarationError: it is not the declaration of one function, or has types of unknown size.
    """
    if not isinstance(text, str) or not text.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(
            f"declaration={text!r}: give the C declaration of the function, such as 'double tgamma(double x)'."
        )
    listed = declaration.functions(text)
    if len(listed) != 1 or listed[0].body:
        found = ", ".join(each.name for each in listed) or "none"
        what = f"the body of {found} is in the library: leave it out" if len(listed) == 1 else f"it declares {found}"
        raise DeclarationError(f"declaration={text!r}: give the declaration of one function alone; {what}.")
    foreign = Foreign(declaration.parse(text, listed[0].name, returns=None), text)
    for parameter in foreign.function.parameters:
        _check_type(foreign, parameter, preamble)
    names = [parameter.name for parameter in foreign.function.parameters]
    if len(set(names)) != len(names):
        raise foreign.error("two parameters have one name. Give each its own.")
    return foreign


def _check_type(foreign: Foreign, parameter: CParameter, preamble: str) -> None:
    if parameter.type in C_TYPES or parameter.type.startswith("enum ") or parameter.pointer:
        return
    if parameter.type.startswith(("struct ", "union ", "array")):
        raise foreign.parameter_error(
            parameter, "a structure or an array of arrays cannot be passed. Declare a pointer."
        )
    if not preamble:
        raise foreign.parameter_error(
            parameter, f"{parameter.type} is no C type. Write the one that it stands for, such as int or int64_t, or "
            "say what it is in preamble=.",
        )  # fmt: skip


# ---- the declaration for the compiler --------------------------------------------------------------------------------


def prototype(foreign: Foreign) -> str:
    """Return the declaration of the library's function as ``opk_foreign``."""
    function = foreign.function
    label = f"{'_' if sys.platform == 'darwin' else ''}{function.name}"
    listed = ", ".join(_spelled(parameter) for parameter in function.parameters) or "void"
    return f'{_returned(foreign)} opk_foreign({listed}) __asm__("{label}");\n'


def _spelled(parameter: CParameter) -> str:
    if parameter.pointer and (parameter.type not in C_TYPES):
        return "const void*" if parameter.const else "void*"
    return numeric(parameter.type) if not parameter.pointer else parameter.spelling


def numeric(c_type: str) -> str:
    """Return the type in which a number of this type is passed: int for an enumeration."""
    return "int" if c_type.startswith("enum ") else c_type


def _returned(foreign: Foreign) -> str:
    text = foreign.function.returns
    return "void*" if text.endswith("*") else numeric(text)


# ---- a function of pointers ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Passed:
    """The kernel's parameters for one parameter of the library's function, and the C expression that it receives."""

    parameters: tuple[CParameter, ...]
    bind: Mapping[str, Constant]
    argument: str
    before: str = ""


def kernel(
    foreign: Foreign,
    library: SharedLibrary,
    bind: Mapping[str, Constant],
    names: Collection[str],
    returns: str = "code",
    preamble: str = "",
    flags: Sequence[str] = (),
) -> NativeKernel:
    """Make the kernel that calls a function of pointers and numbers; ``names`` are those of the operator's arguments.

    Raises:
        DeclarationError: ``bind`` or ``returns`` does not fit the declaration.
    """
    check_bind(foreign, bind)
    passed = [_passed(foreign, parameter, bind, names) for parameter in foreign.function.parameters]
    parameters = {parameter.name: parameter for each in passed for parameter in each.parameters}
    meanings = {name: value for each in passed for name, value in each.bind.items()}
    function = CFunction(f"call_{foreign.symbol}", "int", tuple(parameters.values()), 1)
    call = f"opk_foreign({', '.join(each.argument for each in passed)})"
    before = "".join(each.before for each in passed)
    helpers = CHECKED_ARITHMETIC if before else ""
    text = f"{preamble}\n{helpers}{prototype(foreign)}{_entry(function, before, _ending(foreign, returns, call))}"
    return native(foreign, library, text, function, meanings, flags)


def native(
    foreign: Foreign,
    library: SharedLibrary,
    text: str,
    function: CFunction,
    bind: Mapping[str, Constant],
    flags: Sequence[str] = (),
) -> NativeKernel:
    """Make the kernel of this text, linked with the library."""
    return NativeKernel(
        "c", text, f"<{foreign.symbol} of {library.path}>", 1, function, {}, dict(bind), tuple(flags),
        library_dirs=library.folders, libraries=(library.path,),
    )  # fmt: skip


def check_bind(foreign: Foreign, bind: Mapping[str, Constant]) -> None:
    """Raise a DeclarationError where ``bind`` has a name that no parameter has, or a value that is no number or name."""
    names = [parameter.name for parameter in foreign.function.parameters]
    for name, value in bind.items():
        if name not in names:
            raise DeclarationError(
                f"bind= names {name!r}, but {foreign.symbol} has no such parameter. It has {', '.join(names)}."
            )
        if not isinstance(value, (int, float, str, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(
                f"bind={{{name!r}: {value!r}}}: a parameter takes a number, a name, an expression, or None."
            )


def _entry(function: CFunction, before: str, ending: str) -> str:
    listed = ", ".join(f"{parameter.spelling} {parameter.name}" for parameter in function.parameters) or "void"
    return f"int {function.name}({listed}) {{\n{before}{ending}}}\n"


def _ending(foreign: Foreign, returns: str, call: str) -> str:
    """Return the call and the handling of its result."""
    result = foreign.function.returns
    if returns not in RETURNS:
        raise DeclarationError(f'returns={returns!r}: "code" (an error code, 0: none) or "ignore".')
    if result == "void" or returns == "ignore":
        return f"    (void){call};\n    return 0;\n"
    if not (result.startswith("enum ") or C_TYPES.get(result, _UNKNOWN).kind == "int"):
        raise foreign.error(f'it returns {result}, which is no error code. Say returns="ignore", or write a C kernel.')
    code = f"    const {numeric(result)} opk_code = {call};\n"
    return f"{code}    return opk_code == ({numeric(result)})(int)opk_code ? (int)opk_code : -1;\n"


def _passed(foreign: Foreign, parameter: CParameter, bind: Mapping[str, Constant], names: Collection[str]) -> _Passed:
    own = _taken(parameter)
    value = bind.get(own.name, own.name)
    if _is_letter(own, value, names):
        value = ord(str(value))
    if not isinstance(value, str):
        return _Passed((own,), {own.name: value}, own.name)
    if own.pointer and not value.isidentifier():
        raise foreign.parameter_error(
            own, f"bind gives it {value!r}, but it is a pointer. Give it a tensor by its name, or None."
        )
    if own.pointer or (value.isidentifier() and own.type in C_TYPES and not _LEADING.match(own.name)):
        return _Passed((own,), {own.name: value} if own.name in bind else {}, own.name)
    return _computed(foreign, own, value)


def _taken(parameter: CParameter) -> CParameter:
    """Return a parameter of the library's function as the kernel takes it, in types that need no header."""
    if parameter.pointer and parameter.type not in C_TYPES:
        return dataclasses.replace(parameter, type="void")
    return dataclasses.replace(parameter, type=numeric(parameter.type))


def _is_letter(parameter: CParameter, value: Constant, names: Collection[str]) -> bool:
    """Return whether a value is a letter for a ``char``: ``bind={"trans": "N"}``."""
    return (
        (parameter.type, parameter.pointer) == ("char", 0)
        and isinstance(value, str) and len(value) == 1 and value not in names
    )  # fmt: skip


def _computed(foreign: Foreign, parameter: CParameter, text: str) -> _Passed:
    """Pass the value of an expression. A leading dimension is at least 1, even of empty matrices."""
    known = C_TYPES.get(parameter.type, _UNKNOWN)
    if known.kind not in ("int", "unknown"):
        raise foreign.parameter_error(
            parameter, f"bind gives it {text!r}, but it is no integer. Give it a number or a name."
        )
    found = parse_expression(text)
    value = f"opk_max(1ll, {found.c}, &opk_wrong)" if _LEADING.match(parameter.name) else found.c
    parameters = [CParameter(f"opk_{name}", "int64_t", 0, False, parameter.text) for name in found.names]
    bind = {f"opk_{name}": name for name in found.names}
    result = f"opk_of_{parameter.name}"
    return _Passed(tuple(parameters), bind, f"({parameter.type}){result}", _assigned(parameter, result, value, text))


def _assigned(parameter: CParameter, result: str, value: str, text: str) -> str:
    """Return the C statements that compute a value, and fail where the parameter's type is too narrow for it."""
    shown = " ".join(text.split()).replace("%", "%%")
    message = f"{parameter.name}, which is {shown}, does not fit into {parameter.type}"
    return (
        f"    int64_t {result};\n    {{\n        int opk_wrong = 0;\n        {result} = {value};\n"
        f'        if (opk_wrong || {_outside(parameter, result)}) {{ opk_fail("{message}"); return -1; }}\n    }}\n'
    )


def _outside(parameter: CParameter, result: str) -> str:
    """Return the C test that the parameter's type, which maybe only the compiler knows, would change the number."""
    unsigned = f"({parameter.type})-1 > 0 && {result} < 0"
    return f"(int64_t)({parameter.type}){result} != {result} || ({unsigned})"


# ---- expressions -----------------------------------------------------------------------------------------------------


CHECKED_ARITHMETIC = """\
__attribute__((unused)) static int64_t opk_add(int64_t a, int64_t b, int* wrong) {
    int64_t result;
    *wrong |= __builtin_add_overflow(a, b, &result);
    return result;
}
__attribute__((unused)) static int64_t opk_subtract(int64_t a, int64_t b, int* wrong) {
    int64_t result;
    *wrong |= __builtin_sub_overflow(a, b, &result);
    return result;
}
__attribute__((unused)) static int64_t opk_multiply(int64_t a, int64_t b, int* wrong) {
    int64_t result;
    *wrong |= __builtin_mul_overflow(a, b, &result);
    return result;
}
__attribute__((unused)) static int64_t opk_floor_divide(int64_t a, int64_t b, int* wrong) {
    if (b == 0 || (b == -1 && a < -9223372036854775807ll)) {
        *wrong = 1;
        return 0;
    }
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
__attribute__((unused)) static int64_t opk_modulo(int64_t a, int64_t b, int* wrong) {
    if (b == 0 || b == -1) {
        *wrong |= b == 0;
        return 0;
    }
    const int64_t rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__attribute__((unused)) static int64_t opk_min(int64_t a, int64_t b, int* wrong) { (void)wrong; return a < b ? a : b; }
__attribute__((unused)) static int64_t opk_max(int64_t a, int64_t b, int* wrong) { (void)wrong; return a > b ? a : b; }
"""

_OPERATIONS: dict[type[ast.operator], str] = {
    ast.Add: "opk_add",
    ast.Sub: "opk_subtract",
    ast.Mult: "opk_multiply",
    ast.FloorDiv: "opk_floor_divide",
    ast.Mod: "opk_modulo",
}
_FUNCTIONS = {"min": "opk_min", "max": "opk_max"}


@dataclasses.dataclass(frozen=True)
class Expression:
    """An expression in C: ``c`` uses an ``int64_t opk_<name>`` for each of ``names``, and sets ``int opk_wrong`` on failure."""

    c: str
    names: tuple[str, ...]


def parse_expression(text: str) -> Expression:
    """Translate an expression to C.

    >>> parse_expression("max(1, k)")
    Expression(c='opk_max(1ll, opk_k, &opk_wrong)', names=('k',))

    Raises:
        DeclarationError: it is not such an expression.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _not_an_expression(text) from error
    names: dict[str, None] = {}
    return Expression(_in_c(tree, text, names), tuple(names))


def _in_c(node: ast.expr, text: str, names: dict[str, None]) -> str:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 2**63:
        return f"{node.value}ll"
    if isinstance(node, ast.Name):
        names[node.id] = None
        return f"opk_{node.id}"
    function, operands = _operation(node)
    if not function:
        raise _not_an_expression(text)
    first, *others = [_in_c(operand, text, names) for operand in operands]
    for other in others:
        first = f"{function}({first}, {other}, &opk_wrong)"
    return first


def _operation(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return the C function of an operation ("" where there is none) and its operands."""
    if isinstance(node, ast.BinOp):
        return _OPERATIONS.get(type(node.op), ""), [node.left, node.right]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return "opk_subtract", [ast.Constant(0), node.operand]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args and not node.keywords:
        return _FUNCTIONS.get(node.func.id, ""), node.args
    return "", []


def _not_an_expression(text: str) -> DeclarationError:
    return DeclarationError(
        f"{text!r} is neither a name nor an expression of integers, names, + - * // %, min(...) and max(...)."
    )
