"""Mutations of kernels in C: each rule finds places in the source and gives the source with one of them made wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Found = tuple[str, str]  # what was done, and the whole source after it
Rule = Callable[[str], Iterator[Found]]

_HEADER = re.compile(r"for \((?P<init>[^;]*); (?P<condition>[^;]*); (?P<step>[^)]*)\)")
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_INDEX = r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]"
_TERM = rf"(?:\((?:T|opk_acc|double|int64_t)\))?(?:{_PARENTHESES}|\b\w+(?:->\w+)*(?:{_INDEX})*(?:{_PARENTHESES})?(?![\w(\[]))"


def _at(source: str, start: int, end: int, new: str) -> Found:
    line = source.count("\n", 0, start)
    return f"line {line}: `{source[start:end]}` became `{new}`", source[:start] + new + source[end:]


def _each(source: str, pattern: str, new: str | Callable[[re.Match[str]], str]) -> Iterator[Found]:
    for match in re.finditer(pattern, source):
        made = new(match) if callable(new) else match.expand(new)
        if made != match[0]:
            yield _at(source, match.start(), match.end(), made)


def _bounds(source: str) -> Iterator[Found]:
    for match in _HEADER.finditer(source):
        begin, end = match.span("condition")
        condition = match["condition"]
        yield _at(source, begin, end, f"{condition} - 1")
        yield _at(
            source, begin, end, condition.replace("<=", "<") if "<=" in condition else condition.replace("<", "<=")
        )
        if match["init"].endswith("= 0"):
            yield _at(source, *match.span("init"), match["init"][:-1] + "1")
    yield from _each(source, r"(\w\[)([^\[\]]+)(\])(?! \+?=|;)(?!\s*=)", r"\1\2 + 1\3")


def _strides(source: str) -> Iterator[Found]:
    yield from _each(source, r"\[(\w+) \* (\w+) \+ (\w+)\]", r"[\3 * \2 + \1]")
    yield from _each(source, r"\[(\w+) \* (\w+) \+ (\w+)\]", r"[\1 * (\2 - 1) + \3]")
    yield from _each(source, r"x->strides\[0\]", "x->strides[1]")
    yield from _each(source, r"x->strides\[(\d)\]", "1")
    yield from _each(source, r"(\w+) \+= d\b", r"\1 += d - 1")


def _accumulators(source: str) -> Iterator[Found]:
    yield from _each(source, r"opk_acc (\w+) = 0;", r"T \1 = (T)0;")
    yield from _each(source, r"opk_acc (\w+) =", r"float \1 =")
    yield from _each(source, r"\(double\)", "(float)")


def _masks(source: str) -> Iterator[Found]:
    yield from _each(source, r"for \(; [^;]*; (\w+\+\+)\)", r"for (; 0; \1)")
    yield from _each(source, r"if \((?!1\))([^{}]*?)\)(?= \{|\n| out)", "if (1)")
    yield from _each(source, r"if \(([^{}]*?)\)(?= \{\s+opk_fail)", "if (0)")


def _operands(source: str) -> Iterator[Found]:
    yield from _each(source, rf"({_TERM}) (/|-) ({_TERM})", r"\3 \2 \1")


def _terms(source: str) -> Iterator[Found]:
    yield from _each(source, rf"({_TERM}) (\*|\+|/|-) ({_TERM})(?![^;{{]*; \w)", r"\1")
    yield from _each(source, rf"\b({_TERM}) (\*|\+) ({_TERM})(?=[;)])", r"\3")
    yield from _each(source, r" \+= ", " = ")


def _constants(source: str) -> Iterator[Found]:
    for match in re.finditer(r"(?<![\w.\[])(?<!= )(\d+)(?![\w.\]])", source):
        if not any(header.start() <= match.start() < header.end() for header in _HEADER.finditer(source)):
            yield _at(source, *match.span(), str(int(match[0]) + 1))


def _comparisons(source: str) -> Iterator[Found]:
    spans = [match.span() for match in _HEADER.finditer(source)]
    flip = {" < ": " > ", " >= ": " > ", " > ": " < ", " <= ": " < ", " || ": " && ", " && ": " || "}
    for match in re.finditer("|".join(re.escape(each) for each in flip), source):
        if not any(begin <= match.start() < end for begin, end in spans):
            yield _at(source, *match.span(), flip[match[0]])


def _initialisations(source: str) -> Iterator[Found]:
    yield from _each(source, r"\b(opk_acc|int64_t|float|T) (\w+) = 0;(?! )", r"\1 \2;")
    yield from _each(source, r"\w+\[\w+\] = 0;", ";")
    yield from _each(source, r"\w+\[(\w+)\] = \(T\)sum;", r"if (sum != 0) \g<0>")


def _end(source: str, statement: str) -> Iterator[Found]:
    """The kernel with a statement at its end, before the last brace."""
    at = source.rindex("}")
    yield f"`{statement}` at the end", f"{source[:at]}    {statement}\n{source[at:]}"


def _count(source: str) -> str:
    found = re.findall(r"int64_t (\w+)[,)]", source)
    return " && ".join(f"{name} > 0" for name in found)


def _arguments(source: str) -> Iterator[Found]:
    for kind, name in re.findall(r"const (T|int64_t)\* (\w+)[,)]", source):
        yield from _end(source, f"if ({_count(source)}) (({kind}*){name})[0] += ({kind})1;")
    for name in re.findall(r"const opk_tensor_of\(T\)\* (\w+)[,)]", source):
        yield from _end(source, f"if ({_count(source)}) ((T*){name}->data)[0] += (T)1;")


def _states(source: str) -> Iterator[Found]:
    yield from _each(source, r"(\s)(opk_acc|int64_t) (\w+) = 0;(?! )", r"\1static \2 \3 = 0;")
    kind = re.findall(r" (T|int64_t)\* out[,)]", source)[0]
    yield from _end(source, f"static int opk_calls = 0; if (++opk_calls > 2 && {_count(source)}) out[0] = ({kind})3;")


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
    "argument": _arguments,
    "state": _states,
}
"""What is made wrong, by class of defect."""


def mutants(source: str) -> Iterator[tuple[str, str, str]]:
    """``(class, what was done, the source after it)`` of every mutation."""
    for name, rule in RULES.items():
        seen = {source}
        for what, made in rule(source):
            if made not in seen:
                seen.add(made)
                yield name, what, made
