"""Translate expressions of sizes and integer arguments, such as ``bind={"lda": "max(1, k)"}``, to C.

An expression has integers, names, ``+ - * // %``, parentheses, ``min`` and ``max``, with Python's meaning. What does not
fit into 64 bits, and a division by zero, make the call fail.
"""

from __future__ import annotations

import ast
import dataclasses

from opkit.errors import DeclarationError

HELPERS = """\
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


def parse(text: str) -> Expression:
    """Translate an expression to C.

    >>> parse("max(1, k)")
    Expression(c='opk_max(1ll, opk_k, &opk_wrong)', names=('k',))

    Raises:
        DeclarationError: it is not such an expression.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _refused(text) from error
    names: dict[str, None] = {}
    return Expression(_c(tree, text, names), tuple(names))


def _c(node: ast.expr, text: str, names: dict[str, None]) -> str:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 2**63:
        return f"{node.value}ll"
    if isinstance(node, ast.Name):
        names[node.id] = None
        return f"opk_{node.id}"
    function, operands = _called(node)
    if not function:
        raise _refused(text)
    first, *others = [_c(operand, text, names) for operand in operands]
    for other in others:
        first = f"{function}({first}, {other}, &opk_wrong)"
    return first


def _called(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return the C function of an operation ("" where there is none) and its operands."""
    if isinstance(node, ast.BinOp):
        return _OPERATIONS.get(type(node.op), ""), [node.left, node.right]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return "opk_subtract", [ast.Constant(0), node.operand]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args and not node.keywords:
        return _FUNCTIONS.get(node.func.id, ""), node.args
    return "", []


def _refused(text: str) -> DeclarationError:
    return DeclarationError(
        f"{text!r} is neither a name nor an expression of integers, names, + - * // %, min(...) and max(...)."
    )
