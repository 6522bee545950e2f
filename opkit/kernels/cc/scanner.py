"""Find functions, variables and includes at file scope of C, C++ or CUDA text, without a compiler.

Comments, literals and directives are first replaced by spaces, so every offset and line number stays the same.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

_LITERAL = re.compile(
    r"""//(?:\\\r?\n|[^\n])*|/\*.*?(?:\*/|\Z)|(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"
    |"(?:\\.|[^"\\\n])*"?|\b[0-9](?:'?[\w.])*|[A-Za-z_]\w*|'(?:\\.|[^'\\\n])*'?""",
    re.S | re.X,
)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?P<word>\w*)(?P<rest>(?:\\\r?\n|[^\n])*)", re.M)
_ATTRIBUTE = re.compile(
    r"\b(?:__attribute__|__attribute|__declspec|alignas|_Alignas|__launch_bounds__|noexcept|asm|__asm__|_Pragma)\s*(?=\()"
)
_BRACKETED = re.compile(r"\[\[.*?\]\]", re.S)
_MARK = re.compile(r'\bextern\s*"C"\s*\{|[{};]')
_PAIRS = {"{": "}", "(": ")"}
_TRAILING = re.compile(r"(?:\s|\b(?:const|noexcept|override|final|try)\b)*\Z")
_NAME = re.compile(r"(?P<scope>::\s*)?\b(?P<name>[A-Za-z_]\w*)\s*\Z")


def _spaces(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _blank_literal(match: re.Match[str]) -> str:
    token = match.group()
    is_code = token in ('"C"', '"C++"') or not (token[0] in "\"'/" or token.endswith('"'))
    return token if is_code else _spaces(token)


@functools.lru_cache(maxsize=8)
def without_literals(text: str) -> str:
    """Return the text with its comments and literals blanked."""
    return _LITERAL.sub(_blank_literal, text)


def _update_branches(match: re.Match[str], stack: list[tuple[bool, bool]]) -> None:
    """Update the stack for one directive. Each entry: (this branch is read, an earlier or this branch is read)."""
    word, rest = match["word"], match["rest"].strip()
    if word in ("if", "ifdef", "ifndef"):
        taken = not (word == "if" and rest == "0")
        stack.append((taken, taken))
    elif word in ("elif", "else", "elifdef", "elifndef") and stack:
        before = stack.pop()[1]
        taken = not before and not (word == "elif" and rest == "0")
        stack.append((taken, taken or before))
    elif word == "endif" and stack:
        stack.pop()


def without_directives(code: str, every_branch: bool = False) -> str:
    """Blank directives and, unless ``every_branch``, all branches but the first of each ``#if``."""
    pieces: list[str] = []
    stack: list[tuple[bool, bool]] = []
    position = 0
    for match in _DIRECTIVE.finditer(code):
        piece = code[position : match.start()]
        pieces += [piece if every_branch or all(read for read, _ in stack) else _spaces(piece), _spaces(match.group())]
        _update_branches(match, stack)
        position = match.end()
    return "".join((*pieces, code[position:]))


def closing(code: str, opening: int) -> int:
    """Return the offset after the bracket that closes the one at ``opening``, or the end of the text."""
    mark, depth = code[opening], 0
    for match in re.compile(rf"[{re.escape(mark + _PAIRS[mark])}]").finditer(code, opening):
        depth += 1 if match.group() == mark else -1
        if depth == 0:
            return match.end()
    return len(code)


def _without_attributes(code: str) -> str:
    code = _BRACKETED.sub(lambda match: _spaces(match.group()), code)
    pieces, position = [], 0
    for match in _ATTRIBUTE.finditer(code):
        if match.start() >= position:
            end = closing(code, match.end())
            pieces += [code[position : match.start()], _spaces(code[match.start() : end])]
            position = end
    return "".join((*pieces, code[position:]))


@functools.lru_cache(maxsize=8)
def plain(text: str, every_branch: bool = False) -> str:
    """Blank comments, literals, directives and attributes; every other character keeps its offset."""
    return _without_attributes(without_directives(without_literals(text), every_branch))


@dataclasses.dataclass(frozen=True)
class TopLevelItem:
    """A declaration or definition at file scope; ``head`` is its text up to a function's body, or all of it."""

    start: int
    head: str
    body: bool
    c_linkage: bool


def _is_function(head: str) -> bool:
    bare = _TRAILING.sub("", head)
    if not bare.endswith(")"):
        return False
    return "=" not in re.sub(r"\([^()]*\)", "", bare)


def top_level_items(code: str) -> Iterator[TopLevelItem]:
    """Yield each item at file scope, or within ``extern "C" {}``, of code from :func:`plain`."""
    start = position = scopes = 0
    while match := _MARK.search(code, position):
        mark, opening, position = match.group()[-1], match.start(), match.end()
        head = code[start:opening]
        if mark == "{" and match.group() != "{" and not head.strip():
            scopes, start = scopes + 1, position
        elif mark == "{":
            position = closing(code, position - 1)
            head = code[start : match.end() - 1]
            if _is_function(head) or re.match(r"\s*(?:inline\s+)?namespace\b", head):
                yield TopLevelItem(start, head, True, scopes > 0 or '"C"' in head)
                start = position
        else:
            if mark == ";" and head.strip():
                yield TopLevelItem(start, head, False, scopes > 0 or '"C"' in head)
            scopes, start = max(0, scopes - (mark == "}")), position
    if code[start:].strip():
        yield TopLevelItem(start, code[start:], False, scopes > 0 or '"C"' in code[start:])


@dataclasses.dataclass(frozen=True)
class ScannedFunction:
    """A function at file scope. Offsets are into the whole text; ``parameters`` is the text in its parentheses."""

    name: str
    start: int
    prefix: str
    parameters: str
    parameters_start: int
    body: bool
    c_linkage: bool

    @property
    def words(self) -> frozenset[str]:
        """The words before the name: ``static``, the type, ..."""
        return frozenset(re.findall(r"\w+", self.prefix))


def opening_of(head: str, end: int) -> int:
    """Return the offset of the parenthesis that the one before ``end`` closes, or -1."""
    depth = 0
    for place in range(end - 1, -1, -1):
        depth += (head[place] == ")") - (head[place] == "(")
        if depth == 0:
            return place
    return -1


def as_function(item: TopLevelItem) -> ScannedFunction | None:
    """Return the item as a function; None if it is none."""
    end = len(_TRAILING.sub("", item.head))
    opening = opening_of(item.head, end) if item.head[:end].endswith(")") else -1
    named = _NAME.search(item.head[: max(opening, 0)])
    if named is None or named["scope"]:
        return None
    prefix = item.head[: named.start("name")]
    cut = max((prefix.rfind(mark) for mark in ");}"), default=-1) + 1
    shown = prefix[cut:] if "template" not in prefix else prefix
    shown = re.sub(r'\bextern\s*(?:"C(?:\+\+)?")?', " ", shown)
    if not shown.strip() or {"return", "typedef", "using", "operator"} & set(re.findall(r"\w+", shown)):
        return None
    start = item.start + named.start("name") - len(prefix[cut:].lstrip())
    inside = item.head[opening + 1 : end - 1]
    return ScannedFunction(
        named["name"], start, shown.strip(), inside, item.start + opening + 1, item.body, item.c_linkage
    )


_VARIABLE = re.compile(r"\b([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*(?:\Z|(?=[,=;{]))")
_NO_VARIABLE = {"static", "extern", "typedef", "using", "template", "namespace", "constexpr", "friend", "static_assert"}


def variables(item: TopLevelItem) -> tuple[str, ...]:
    """Return the names of the variables with external linkage that an item defines."""
    text = re.sub(r"=[^,]*", " ", _without_braces(item.head))
    words = re.findall(r"\w+", text)
    if item.body or _NO_VARIABLE & set(words) or "(" in text or len(words) < 2:
        return ()
    if words[0] in ("struct", "union", "enum", "class") and len(words) == 2:
        return ()
    names = [_VARIABLE.search(part.strip()) for part in text.split(",")]
    return tuple(match[1] for match in names if match is not None)


def _without_braces(text: str) -> str:
    while (opening := text.find("{")) >= 0:
        text = text[:opening] + " " + text[closing(text, opening) :]
    return text


def _scopes(code: str) -> tuple[int, int]:
    """Count the braces that are open at the end of the code: of ``extern "C"``, and others."""
    stack: list[bool] = []
    for match in _MARK.finditer(code):
        if match.group().endswith("{"):
            stack.append(match.group() != "{")
        elif match.group() == "}" and stack:
            stack.pop()
    return sum(stack), len(stack) - sum(stack)


def includes(text: str) -> list[tuple[int, int, int]]:
    """Return each ``#include`` at file scope: start and end of its line, and its depth of ``extern "C" {``."""
    code = plain(text)
    found = []
    for match in _DIRECTIVE.finditer(without_literals(text)):
        if match["word"] in ("include", "include_next", "import"):
            linked, others = _scopes(code[: match.start()])
            found += [(match.start(), match.end(), linked)] if others == 0 else []
    return found
