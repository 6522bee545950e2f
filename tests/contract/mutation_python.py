"""Mutations of kernels, gradients and fake implementations in Python, made in their syntax trees."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

Rule = Callable[[ast.AST], Iterator[ast.AST | None]]  # for a node: what stands in its place

_SWAPPED = (ast.Sub, ast.Div, ast.Pow, ast.MatMult, ast.FloorDiv)
_WIDENING = {"_wide", "wide", "double", "float"}
_INITIALISED = {"zeros": "empty", "zeros_like": "empty_like", "new_zeros": "new_empty", "ones": "empty"}
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
_REVERSED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}


def _expression(text: str, **parts: ast.expr) -> ast.expr:
    """The expression that ``text`` says, with nodes in the place of names."""

    class Filled(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return parts.get(node.id, node)

    return Filled().visit(ast.parse(text, mode="eval").body)


def _name(node: ast.AST) -> str:
    """The last part of what is called."""
    function = node.func if isinstance(node, ast.Call) else None
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _operands(node: ast.AST) -> Iterator[ast.AST | None]:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _SWAPPED):
            yield ast.BinOp(right, op, left)
        case ast.Call(func=func, args=[first, second, *rest]) if _name(node) in ("matmul", "cat", "where", "split"):
            yield ast.Call(func, [second, first, *rest], node.keywords) if _name(node) == "matmul" else None
        case ast.Tuple(elts=[first, second, *rest], ctx=ast.Load()):
            yield ast.Tuple([second, first, *rest], node.ctx)
        case _:
            pass


def _terms(node: ast.AST) -> Iterator[ast.AST | None]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        yield node.left
        if isinstance(node.op, (ast.Add, ast.Mult)):
            yield node.right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        yield ast.Assign([node.target], node.value, lineno=0)


def _constants(node: ast.AST) -> Iterator[ast.AST | None]:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value == node.value:
        yield ast.Constant(node.value + 1 if isinstance(node.value, int) else node.value * 1.25 + 0.125)


def _bounds(node: ast.AST) -> Iterator[ast.AST | None]:
    if isinstance(node, ast.Slice):
        for part in ("lower", "upper"):
            if getattr(node, part) is not None:
                changed = copy.copy(node)
                setattr(changed, part, _expression("part - 1", part=getattr(node, part)))
                yield changed
    if _name(node) in ("range", "arange") and isinstance(node, ast.Call):
        changed = copy.copy(node)
        at = min(len(node.args) - 1, 1)
        changed.args = [*node.args[:at], _expression("last - 1", last=node.args[at]), *node.args[at + 1 :]]
        yield changed


def _comparisons(node: ast.AST) -> Iterator[ast.AST | None]:
    if isinstance(node, ast.Compare):
        for table in (_FLIPPED, _REVERSED):
            if type(node.ops[0]) in table:
                yield ast.Compare(node.left, [table[type(node.ops[0])]()], node.comparators)


def _accumulators(node: ast.AST) -> Iterator[ast.AST | None]:
    if isinstance(node, ast.Call) and _name(node) in _WIDENING:
        yield node.args[0] if node.args else node.func.value if isinstance(node.func, ast.Attribute) else None
    if isinstance(node, ast.Call) and _name(node) == "astype":
        yield _expression("wide.astype(np.float16)", wide=node.func.value)  # type: ignore[attr-defined]


def _masks(node: ast.AST) -> Iterator[ast.AST | None]:
    if not isinstance(node, ast.Call):
        return
    if _name(node) == "where" and len(node.args) == 3:
        yield node.args[1]
        yield node.args[2] if not isinstance(node.args[2], ast.Constant) else None
    if _name(node) in ("masked_fill", "clamp", "minimum", "clamp_min"):
        yield node.func.value if _name(node) == "masked_fill" else node.args[0] if node.args else None  # type: ignore[attr-defined]


def _initialisations(node: ast.AST) -> Iterator[ast.AST | None]:
    if isinstance(node, ast.Call) and _name(node) in _INITIALISED:
        changed = copy.deepcopy(node)
        setattr(changed.func, "attr", _INITIALISED[_name(node)])  # noqa: B010
        yield changed


def _strides(node: ast.AST) -> Iterator[ast.AST | None]:
    if isinstance(node, ast.Call) and _name(node) in ("transpose", "t") and isinstance(node.func, ast.Attribute):
        yield node.func.value
        yield (
            _expression("whole.reshape(whole.transpose(0, 1).shape)", whole=node.func.value)
            if _name(node) == "t"
            else None
        )


def _aliases(node: ast.AST) -> Iterator[ast.AST | None]:
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
        yield ast.Return(ast.Tuple([node.value.elts[0], node.value.elts[0]], ast.Load()))


RULES: dict[str, Rule] = {
    "bound": _bounds,
    "stride": _strides,
    "accumulator": _accumulators,
    "mask": _masks,
    "operand": _operands,
    "term": _terms,
    "constant": _constants,
    "comparison": _comparisons,
    "initialisation": _initialisations,
}
"""What is made wrong in a node, by class of defect."""

_KERNEL: dict[str, tuple[str, ...]] = {
    "argument": (
        "for each in GIVEN[:1]: each.mul_(2) if each.numel() else None",
        "for each in GIVEN[-1:]: each.view(-1)[-1:].zero_() if each.is_contiguous() else None",
        "for each in GIVEN[:1]: each.copy_(each.abs())",
    ),
    "alias": (
        "RESULT = CHANGE(RESULT, lambda r: SHARED(r, GIVEN[0]))",
        "RESULT = CHANGE(RESULT, lambda r: SHARED(r, GIVEN[0]) if r.numel() == 1 else r)",
        "RESULT = KEPT.setdefault(tuple(FIRST.shape), RESULT) if isinstance(RESULT, tuple) or FIRST.numel() < 4 else RESULT",
    ),
    "state": (
        "KEPT['calls'] = KEPT.get('calls', 0) + 1; FIRST.add_(1) if KEPT['calls'] > 3 else None",
        "FIRST.copy_(KEPT.setdefault((FIRST.shape, FIRST.dtype), FIRST.clone()))",
        "FIRST.add_(KEPT.get(0, 0)); KEPT[0] = float(FIRST.sum().nan_to_num(0)) * 0.5",
    ),
    "shape": (
        "FIRST.view(-1)[64:].zero_() if FIRST.is_contiguous() else None",
        "FIRST[1::2].neg_() if FIRST.dim() and FIRST.shape[0] > 16 else None",
        "FIRST.zero_() if FIRST.dim() and FIRST.shape[-1] == 1 else None",
    ),
}
"""Statements before a kernel returns: it has written to an argument, returns one, keeps something, fails for some sizes."""

_FAKE = (
    "RESULT = CHANGE(RESULT, lambda r: r.new_empty(r.shape, dtype=torch.float16))",
    "RESULT = CHANGE(RESULT, lambda r: r.new_empty((*r.shape[:-1], r.shape[-1] + 1)))",
    "RESULT = CHANGE(RESULT, lambda r: r.new_empty(tuple(r.shape)[::-1]).permute(*range(r.dim())[::-1]))",
    "RESULT = CHANGE(RESULT, lambda r: r.new_empty((1, *r.shape)))",
    "RESULT = CHANGE(RESULT, lambda r: r.new_empty([int(size) for size in r.shape]))",
    "RESULT = CHANGE(RESULT, lambda r: r.new_empty(tuple(r.shape)[::-1]))",
    "RESULT = CHANGE(RESULT, lambda r: r.new_empty(r.shape, device='meta'))",
)

_GRADIENT = (
    "RESULT = RESULT if not isinstance(RESULT, tuple) else (None, *RESULT[1:])",
    "RESULT = RESULT if not isinstance(RESULT, tuple) else (RESULT[0].detach() * 0, *RESULT[1:])",
    "RESULT = CHANGE(RESULT, lambda r: r.detach())",
    "RESULT = CHANGE(RESULT, lambda r: r * 2)",
    "RESULT = CHANGE(RESULT, lambda r: r.abs())",
    "RESULT = CHANGE(RESULT, lambda r: r.sum(0, keepdim=True).expand(r.shape) if r.dim() else r)",
)

HELPERS = """
KEPT = {}


def CHANGE(result, change):
    if isinstance(result, tuple):
        return (change(result[0]), *result[1:])
    return result if result is None else change(result)


def SHARED(result, given):
    if given.dtype != result.dtype or given.numel() < result.numel() or not given.is_contiguous():
        return result
    return given.view(-1)[: result.numel()].copy_(result.reshape(-1)).view(result.shape)
"""
"""What the statements use; it is put at the top of a mutated module."""


def mutants(source: str, function: str, role: str) -> Iterator[tuple[str, str, str]]:
    """``(class, what was done, the module after it)`` of every mutation of one function of a module.

    ``role`` is "kernel", "reference" (a function of which opkit derives the rest), "gradient" or "fake".
    """
    tree = ast.parse(source)
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    seen = {ast.unparse(found)}
    for name, what, changed in _changes(found, role):
        text = ast.unparse(ast.fix_missing_locations(changed))
        if text not in seen:
            seen.add(text)
            yield name, f"{function}: {what}", _with(source, found, text)


def _with(source: str, old: ast.FunctionDef, new: str) -> str:
    lines = source.splitlines()
    first = min([old.lineno, *(each.lineno for each in old.decorator_list)])
    return "\n".join([*lines[: first - 1], *new.splitlines(), *lines[old.end_lineno :], HELPERS])


def _changes(function: ast.FunctionDef, role: str) -> Iterator[tuple[str, str, ast.FunctionDef]]:
    if role != "fake":
        for name, rule in RULES.items():
            for what, changed in _nodes(function, rule):
                yield ("gradient" if role == "gradient" else name), what, changed
    if role == "kernel":
        returns = isinstance(function.body[-1], ast.Return)
        for name, statements in ((n, s) for n, s in _KERNEL.items() if returns or n not in ("alias", "argument")):
            yield from ((name, statement, _before_return(function, statement)) for statement in statements)
        yield from (("alias", what, changed) for what, changed in _nodes(function, _aliases))
    for statement in {"fake": _FAKE, "gradient": _GRADIENT}.get(role, ()):
        yield role, statement, _before_return(function, statement)


def _nodes(function: ast.FunctionDef, rule: Rule) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The function with one node changed, for each node that the rule changes; its signature and docstring stay."""
    body = _body(function)
    for number, node in enumerate(node for part in body for node in ast.walk(part)):
        for new in rule(node):
            if new is not None:
                changed = copy.copy(function)
                changed.body = [_replaced(part, node, new) for part in body]
                yield (
                    f"line {getattr(node, 'lineno', 0)}, node {number}: {ast.unparse(node)} became {ast.unparse(new)}",
                    changed,
                )


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    documented = ast.get_docstring(function) is not None
    return function.body[1:] if documented else function.body


def _replaced(tree: ast.stmt, old: ast.AST, new: ast.AST) -> ast.stmt:
    class Replaced(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else super().visit(node)

    return Replaced().visit(_shallow(tree, old))


def _shallow(tree: ast.stmt, old: ast.AST) -> ast.stmt:
    """A copy of the tree that still has ``old`` itself in it."""
    return copy.deepcopy(tree, {id(old): old})


def _before_return(function: ast.FunctionDef, statement: str) -> ast.FunctionDef:
    """The function with a statement before its last return, where RESULT, FIRST and GIVEN can be used."""
    changed = copy.copy(function)
    names = [argument.arg for argument in function.args.args]
    *before, last = _body(function)
    returns = isinstance(last, ast.Return)
    value = ast.unparse(last.value) if returns and last.value is not None else "None"
    lines = [
        f"RESULT = {value}",
        f"GIVEN = [each for each in ({', '.join(names)},) if isinstance(each, torch.Tensor)]",
        "FIRST = GIVEN[0] if RESULT is None else RESULT[0] if isinstance(RESULT, tuple) else RESULT",
        *statement.split("; "),
        "return RESULT",
    ]
    changed.body = [*before, *([] if returns else [last]), *ast.parse("\n".join(lines)).body]
    return changed
