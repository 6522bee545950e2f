"""Split CUDA C++ in two: what is for the GPU, which NVRTC compiles, and what launches it, which a C++ compiler does.

As for nvcc, a function is for the GPU if it is marked so, and else for the host. The host's part has a function of the same
parameters in place of each kernel: it passes their addresses on. A launch says before which kernel is meant, by a number, and of
what grid; NVRTC finds the kernel by what is written before ``<<<``. All lines stay where they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from opkit.kernels.cc import scanner

_ON_GPU = {"__global__", "__device__", "__constant__", "__shared__", "__managed__"}
_SCOPE = re.compile(r'\s*(?:(?:inline\s+)?namespace\b\s*(?P<name>[\w:]*)|extern\s*"C(?:\+\+)?")\s*\Z')
_TEMPLATE = re.compile(r"\btemplate\s*<(?:[^<>()]|<[^<>]*>|\([^()]*\))*>")
_FUNCTION = re.compile(r"\)\s*(?:\b(?:const|noexcept|override|final)\b\s*|->[\w:<>,\s*&]+)*\Z")
_TYPE = re.compile(r"\s*(?:\b(?:typedef|static|const|constexpr)\b\s*)*\b(?:struct|class|union|enum)\b")
_NO_VARIABLE = re.compile(
    r"\s*(?:typedef|using|template|static_assert|friend|struct|class|union|enum|namespace)\b|.*\bconstexpr\b", re.DOTALL
)
_TOOLKIT = re.compile(
    r"cuda\w*\.h|cuComplex\.h|device_launch_parameters\.h|math_constants\.h|mma\.h|cooperative_groups\S*|curand_kernel\.h"
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\r?\n|[^\n])*", re.MULTILINE)
_LINE = re.compile(r'^[ \t]*#[ \t]*line[ \t]+(\d+)(?:[ \t]+"((?:[^"\\]|\\.)*)")?')
_ATTRIBUTE_CALL = re.compile(r"\bcudaFuncSetAttribute\s*\(")
_POINTER_CAST = re.compile(r"\s*\(\s*(?:const\s+)?void\s*\*\s*\)\s*|\s*&\s*|\s+")
_NAMED = re.compile(r"[A-Za-z_][\w:]*\s*(?:<.*>)?\Z", re.DOTALL)


class CannotSplit(Exception):
    """A text that has to be compiled by nvcc; the message says where, and why."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The two parts; and what NVRTC is to find of the device's: the expressions that name kernels, by number."""

    device: str
    host: str
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Item:
    """A declaration or definition: offsets of its beginning, of its body's brace, and of its end; its scope's names."""

    kind: str  # "function", "type" or "other"
    start: int
    opening: int
    end: int
    head: str
    scope: tuple[str, ...]

    @property
    def words(self) -> set[str]:
        return set(re.findall(r"\w+", self.head))

    @property
    def on_gpu(self) -> bool:
        return bool(_ON_GPU & self.words)

    @property
    def on_host(self) -> bool:
        return not self.on_gpu or "__host__" in self.words

    @property
    def name(self) -> str:
        """The name of a function."""
        found = re.search(r"(\w+)\s*(?:<[^()]*>\s*)?\(", _TEMPLATE.sub("", self.head))
        return found[1] if found else ""


def split(text: str, name: str = "<source>") -> Split:
    """Split a translation unit; ``name`` is its own in messages, up to the first ``#line`` directive.

    Raises:
        CannotSplit: it launches kernels in a way that only nvcc follows.
    """
    return _Splitter(text, name).split()


def place_of(text: str, offset: int, name: str = "<source>") -> str:
    """Return "file:line" of an offset, by the ``#line`` directives before it.

    >>> place_of('#line 7 "a.cu"\\nint x;', 16)
    'a.cu:7'
    """
    file, line = name, 1
    for each in text[:offset].split("\n")[:-1]:
        found = _LINE.match(each)
        line = int(found[1]) if found else line + 1
        file = found[2] if found and found[2] is not None else file
    return f"{file}:{line}"


class _Splitter:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.bare = scanner.without_directives(scanner.without_literals(text), every_branch=True)
        self.code = scanner.plain(text, every_branch=True)  # without attributes too
        self.items = list(self._items(0, len(text), ()))
        self.kernels = {
            item.name: item for item in self.items if item.kind == "function" and "__global__" in item.words
        }
        self.names: list[str] = []
        self.device: list[tuple[int, int, str]] = []  # what replaces what, from offset to offset
        self.host: list[tuple[int, int, str]] = []

    def split(self) -> Split:
        self._check_directives()
        for item in self.items:
            self._place(item)
        for include in _INCLUDE.finditer(self.text):
            if _TOOLKIT.fullmatch(include[1]):
                self.host.append((*include.span(), ""))
        if not self.names:
            self.device.clear()
        return Split(self._edited(self.device), self._edited(self.host), tuple(self.names))

    def _refuse(self, offset: int, reason: str) -> CannotSplit:
        return CannotSplit(f"{place_of(self.text, offset, self.name)}: {reason}")

    def _check_directives(self) -> None:
        for directive in _DIRECTIVE.finditer(scanner.without_literals(self.text)):
            for word, reason in (("<<<", "a macro launches a kernel"), ("__global__", "a macro declares a kernel")):
                if word in directive[0]:
                    raise self._refuse(directive.start(), reason)

    # ---- what is at file scope ---------------------------------------------------------------------------------------

    def _items(self, start: int, end: int, scope: tuple[str, ...]) -> Iterator[_Item]:
        position, opened, kind = start, -1, "other"
        mark = re.compile(r"[{};]")
        while (match := mark.search(self.code, position, end)) is not None:
            position = match.end()
            head = self.code[start : match.start()]
            inner = _SCOPE.match(head) if match[0] == "{" else None
            if match[0] == "{":
                position = scanner.closing(self.code, match.start())
            if inner is not None:
                names = (*scope, inner["name"]) if inner["name"] else scope
                yield from self._items(match.end(), position - 1, names)
            elif match[0] == "{" and not _is_function(head):
                if opened < 0:
                    opened, kind = match.start(), "type" if _TYPE.match(_TEMPLATE.sub("", head)) else "other"
                continue  # up to its semicolon
            elif head.strip():
                function = match[0] == "{"
                opening = match.start() if function or opened < 0 else opened
                head = self.code[start:opening]
                begin = start + len(self.bare[start:position]) - len(self.bare[start:position].lstrip())
                yield _Item("function" if function else kind, begin, opening, position, head, scope)
            start, opened, kind = position, -1, "other"

    def _place(self, item: _Item) -> None:
        """Decide which part gets an item."""
        if item.kind == "function":
            if not item.on_gpu and "constexpr" not in item.words:
                self._blank(self.device, item.start, item.end)
            if "__global__" in item.words:
                self.host.append((item.opening, item.end, self._stub(item)))
            elif not item.on_host:
                self._blank(self.host, item.start, item.end)
            self._add_launches(item)
        elif item.kind == "type":
            self._without_device_methods(item)
        elif item.on_gpu:
            if "__global__" not in item.words and item.on_host is False:
                self._blank(self.host, item.start, item.end)
        elif _is_variable(item.head, braced=self.code[item.opening] == "{"):
            self._blank(self.device, item.start, item.end)

    def _without_device_methods(self, item: _Item) -> None:
        inside = self._items(item.opening + 1, scanner.closing(self.code, item.opening) - 1, item.scope)
        for each in inside:
            if each.kind == "type":
                self._without_device_methods(each)
            elif not each.on_host:
                self._blank(self.host, each.start, each.end)

    def _stub(self, item: _Item) -> str:
        """Return what a kernel's body is on the host, with as many lines."""
        names = [_name_of(each) for each in _parameters(item.head)]
        addresses = ", ".join(f"(void*)&{name}" for name in names if name)
        lines = "\n" * self.text.count("\n", item.opening, item.end)
        return f"{{ void* opk_arguments[] = {{{addresses or 'nullptr'}}}; ::opk_launch(opk_arguments); {lines}}}"

    # ---- launches ----------------------------------------------------------------------------------------------------

    def _add_launches(self, item: _Item) -> None:
        body = self.code[item.opening : item.end]
        for found in re.finditer("<<<", body):
            at = item.opening + found.start()
            if not item.on_host or "__global__" in item.words:
                raise self._refuse(at, "a kernel launches another one")
            start = _expression_start(self.code, at)
            end = _closing_of_launch(self.code, at, item.end)
            if start is None or end is None:
                raise self._refuse(at, "it is not clear which kernel is launched")
            given = re.compile(r"\s*\(").match(self.code, end + 3)
            after = scanner.closing(self.code, given.end() - 1) if given else end
            arguments = _listed(self.code[given.end() : after - 1]) if given else []
            number = self._number(item, start, self.code[start:at], arguments)
            config = self.text[at + 3 : end]
            self.host.append((start, end + 3, f"::opk_configure({number}, {config}), {self.text[start:at].strip()}"))
        for found in _ATTRIBUTE_CALL.finditer(body):
            start = item.opening + found.end()
            given = _listed(self.code[start : scanner.closing(self.code, start - 1) - 1])[0]
            cast = 0
            while (skipped := _POINTER_CAST.match(given, cast)) is not None and skipped.end() > cast:
                cast = skipped.end()
            if not _NAMED.match(given[cast:]):
                raise self._refuse(start, f"cudaFuncSetAttribute of {given.strip()!r}, which names no kernel")
            number = self._number(item, start, given[cast:])
            self.host.append((item.opening + found.start(), start + len(given), f"::opk_set_attribute({number}"))

    def _number(self, item: _Item, offset: int, expression: str, arguments: Sequence[str] = ()) -> int:
        """Return the number of a kernel that a function of the host names, or calls with some arguments."""
        expression = self._resolved(self.code[item.opening : offset], " ".join(expression.split()))
        name = re.match(r"[\w:]*", expression)
        base = name[0].rpartition("::")[2] if name else ""
        if base in self.kernels and "<" not in expression:
            expression += _deduced(self.kernels[base].head, arguments, item.head, self.code[item.opening : offset])
        parameters = "".join(_TEMPLATE.findall(item.head))
        depends = [each for each in re.findall(r"\w+", expression) if re.search(rf"\b{each}\b", parameters)]
        kernel = self.kernels.get(base)
        if depends:
            raise self._refuse(
                offset, f"a function template launches {expression!r}, which depends on its {depends[0]!r}"
            )
        if kernel is None:
            raise self._refuse(offset, f"{expression!r} is no kernel of this source")
        if _TEMPLATE.search(kernel.head) and "<" not in expression:
            raise self._refuse(
                offset, f"{expression!r} is a template: write its arguments, as in {expression}<T><<<...>>>"
            )
        if name and "::" not in name[0]:
            renamed = re.search(rf"^#define {base} (\w+)$", self.text, re.MULTILINE)
            known = renamed[1] if renamed and '"C"' in kernel.head else base
            expression = "::".join((*kernel.scope, known + expression[len(base) :]))
        if expression not in self.names:
            self.names.append(expression)
        return self.names.index(expression)

    @staticmethod
    def _resolved(before: str, expression: str) -> str:
        """Return an expression with constants and types of the function in place of their names."""
        constants = re.findall(r"\b(?:constexpr|const)\s+[\w:\s]*?\b(\w+)\s*=\s*([^;{}]+);", before)
        types = re.findall(r"\busing\s+(\w+)\s*=\s*([^;{}]+);", before)
        values = {name: f"({value.strip()})" for name, value in constants} | {
            name: value.strip() for name, value in types
        }
        for _ in range(len(values)):
            expression = re.sub(r"\w+", lambda word: values.get(word[0], word[0]), expression)
        return expression

    # ---- texts -------------------------------------------------------------------------------------------------------

    def _blank(self, edits: list[tuple[int, int, str]], start: int, end: int) -> None:
        """Leave a part out, but for directives, which count for what follows."""
        kept = "".join(
            each if each.lstrip().startswith("#") else "\n" if each.endswith("\n") else ""
            for each in self.text[start:end].splitlines(keepends=True)
        )
        edits.append((start, end, kept))

    def _edited(self, edits: list[tuple[int, int, str]]) -> str:
        pieces, position = [], 0
        for start, end, replacement in sorted(edits):
            pieces += [self.text[position:start], replacement]
            position = end
        return "".join((*pieces, self.text[position:]))


def _deduced(kernel: str, arguments: Sequence[str], function: str, before: str) -> str:
    """Return the arguments of a kernel template that a call deduces, "<float>"; "" for others, and where it takes a compiler.

    Types are deduced of parameters ``const V* x`` and ``V x``, from parameters and variables of the function and from casts.
    """
    template = _TEMPLATE.search(kernel)
    if template is None:
        return ""
    names = [
        re.fullmatch(r"\s*(?:class|typename)\s+(\w+)\s*", each) for each in _listed(template[0].partition("<")[2][:-1])
    ]
    types: dict[str, str] = {}
    for parameter, argument in zip(_parameters(kernel), arguments, strict=False):
        found = re.fullmatch(rf"\s*{_CONST}(\w+)\s*{_CONST}(\*?)\s*{_CONST}\w+\s*", parameter)
        of_argument = _type_of(argument.strip(), function, before)
        if found is not None and of_argument is not None and of_argument.endswith("*") == bool(found[2]):
            types.setdefault(found[1], of_argument.rstrip("* "))
    known = [types.get(each[1]) if each else None for each in names]
    return f"<{', '.join(map(str, known))}>" if None not in known else ""


def _type_of(argument: str, function: str, before: str) -> str | None:
    """Return the type of a variable or a cast, without ``const``: "float*"; None if it is not that plain."""
    cast = re.fullmatch(
        r"(?:reinterpret|static)_cast\s*<([^<>]*)>\s*\([^()]*\)|\(([\w:\s]+\*?\s*)\)\s*[\w.]+", argument
    )
    declared = (
        rf"(?:^|[(,;{{}}])\s*({_CONST}[A-Za-z_][\w:]*\s*{_CONST}\*?\s*{_CONST})\b{re.escape(argument)}\s*(?=[,)=;]|\Z)"
    )
    texts = [cast[1] or cast[2]] if cast else re.findall(declared, function + before) if argument.isidentifier() else []
    words = (re.sub(r"\b(?:const|__restrict(?:__)?)\b", " ", text).replace("*", " *").split() for text in texts)
    found = {" ".join(each).replace(" *", "*") for each in words}
    (only,) = found if len(found) == 1 else ("",)  # variables of one name may be of several types
    return only if only and not re.search(r"\b(?:auto|return|else)\b", only) else None


_CONST = r"(?:\bconst\b\s*|\b__restrict(?:__)?\b\s*)*"


def _parameters(head: str) -> list[str]:
    """Return the parameters of a function."""
    end = head.rstrip().rfind(")")
    return _listed(head[scanner.opening_of(head, end + 1) + 1 : end])


def _is_function(head: str) -> bool:
    plain = re.sub(r"\boperator\s*[^\w\s(]+", "operator_", _TEMPLATE.sub("", head))
    return bool(_FUNCTION.search(plain)) and "=" not in re.sub(r"\([^()]*\)", "", plain)


def _is_variable(head: str, braced: bool) -> bool:
    """Return whether it is a variable of the host; of constants that are numbers both parts have a copy."""
    if _NO_VARIABLE.match(head) or re.match(r'\s*extern\s*"C"', head) or ("(" in head.partition("=")[0]):
        return False
    return braced or not (
        re.search(r"\bconst\b", head) and not re.search(r"[*\[&]", head.partition("=")[0]) and "=" in head
    )


def _listed(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth = [""], 0
    for each in text:
        depth += (each in "(<[{") - (each in ")>]}")
        if each == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += each
    return parts


def _name_of(parameter: str) -> str:
    """Return a parameter's name.

    >>> _name_of("const T* __restrict__ x"), _name_of("Args... rest"), _name_of("int n = 3"), _name_of("void")
    ('x', 'rest...', 'n', '')
    """
    found = re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*\Z", parameter.partition("=")[0])
    if found is None or parameter.strip() == "void":
        return ""
    return f"{found[1]}..." if "..." in parameter else found[1]


def _expression_start(code: str, end: int) -> int | None:
    """Return where the name before a launch begins; None if there is none."""
    position = len(code[:end].rstrip())
    if code[position - 1] == ">":
        depth = 0
        while position > 0:
            position -= 1
            depth += (code[position] in ">)") - (code[position] in "<(")
            if depth == 0:
                break
            if code[position] in ";{}":
                return None
        position = len(code[:position].rstrip())
    found = re.search(r"[A-Za-z_][\w:]*\Z", code[:position])
    return None if found is None else found.start()


def _closing_of_launch(code: str, at: int, end: int) -> int | None:
    """Return where the ``>>>`` of a launch begins."""
    depth = 0
    for position in range(at + 3, end):
        depth += (code[position] in "([{") - (code[position] in ")]}")
        if depth == 0 and code.startswith(">>>", position):
            return position
    return None
