"""Generate the C, C++ or CUDA text of a kernel: its author's source, once for each choice of dtypes, and its trampolines.

One choice of dtypes is one unit. Several choices are a unit each, so that only names with external linkage can clash; those
get a suffix (``rms_norm__float32``). One more unit then holds the descriptor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from opkit.errors import DeclarationError
from opkit.kernels.binding import Bound, Slot
from opkit.kernels.cc import boilerplate, scanner
from opkit.kernels.cc.boilerplate import descriptor, quoted
from opkit.kernels.cc.dtypes import C_TYPES, DTYPES, CType, Dtype
from opkit.kernels.cc.request import Unit

INCLUDE = Path(__file__).parents[1] / "include"
_OPKIT_LINES = '#line 1 "<opkit>"\n'
_AS_CPP = ", compiled as C++ (where `a ? x : 0` is `a ? x : (T)0`)"
_HELPERS = """\
#ifdef __cplusplus
#define OPK_C extern "C" __attribute__((visibility("hidden")))
#define OPK_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define OPK_C __attribute__((visibility("hidden")))
#define OPK_EXPORT __attribute__((visibility("default")))
#endif
__attribute__((unused)) static void* opk_p(const opk_value* values, int number) { return values[number].p; }
__attribute__((unused)) static int64_t opk_i(const opk_value* values, int number) { return values[number].i; }
__attribute__((unused)) static double opk_f(const opk_value* values, int number) { return values[number].f; }
__attribute__((unused)) static void opk_call_boxed(const opk_runtime* runtime, const opk_kernel* kernel, uint64_t* stack,
                                                   uint64_t inputs, uint64_t outputs, int32_t has_layout) {
    runtime->boxed(kernel, stack, inputs, outputs, has_layout);
}
"""


@dataclasses.dataclass(frozen=True)
class _Instance:
    """A choice of dtypes. It is compiled as ``language``; ``plain_c``: its author wrote C; ``alone``: the only choice."""

    number: int
    types: Mapping[str, Dtype]
    language: str
    plain_c: bool
    alone: bool

    @property
    def label(self) -> str:
        return "_".join(dtype.name for dtype in self.types.values()) or "opk"

    @property
    def as_cpp(self) -> bool:
        return self.plain_c and self.language != "c"

    def spelled(self, dtype: Dtype) -> str:
        return {"c": dtype.c, "c++": dtype.cpp, "cuda": dtype.cuda}[self.language]


@dataclasses.dataclass(frozen=True)
class _AuthorSource:
    """The author's source and its location."""

    text: str
    filename: str
    first_line: int
    preamble: str


@functools.cache
def _header(name: str) -> str:
    return f"#line 1 {quoted(name)}\n{(INCLUDE / name).read_text(encoding='utf-8')}\n"


def _types(instance: _Instance) -> str:
    """Define the type variables by typedefs, not macros: headers may use the names for something else."""
    lines: list[str] = []
    for number, (name, dtype) in enumerate(instance.types.items()):
        element = instance.spelled(dtype)
        accumulator = dtype.accumulator or element
        lines += [f"typedef {element} {name};", f"typedef {accumulator} opk_acc_{name};"]
        lines += [f"typedef {accumulator} opk_acc;"] if number == 0 else []
        lines.append(f"#define {name}_is_{dtype.name} 1")
    return "".join(f"{line}\n" for line in lines)


_CUDA_HEADERS = {
    "float16": "cuda_fp16.h",
    "bfloat16": "cuda_bf16.h",
    "complex64": "cuComplex.h",
    "complex128": "cuComplex.h",
}


def _cuda_headers(instance: _Instance) -> str:
    names = [_CUDA_HEADERS[dtype.name] for dtype in instance.types.values() if dtype.name in _CUDA_HEADERS]
    return "".join(f"#include <{name}>\n" for name in dict.fromkeys(names)) if instance.language == "cuda" else ""


def _views(text: str) -> list[list[scanner.TopLevelItem]]:
    return [list(scanner.top_level_items(scanner.plain(text, every_branch))) for every_branch in (False, True)]


@functools.lru_cache(maxsize=8)
def _external(text: str, plain_c: bool) -> tuple[str, ...]:
    """Return the names that the source defines for the linker; in C++ only those with C linkage: others get a namespace."""
    names: list[str] = []
    for item in itertools.chain.from_iterable(_views(text)):
        function = scanner.as_function(item)
        if function is not None and function.body and "static" not in function.words and (plain_c or item.c_linkage):
            names.append(function.name)
        if function is None and (plain_c or item.c_linkage):
            names += scanner.variables(item)
    return tuple(dict.fromkeys(names))


@functools.lru_cache(maxsize=8)
def _defined(text: str) -> frozenset[str]:
    """Return the functions and variables at file scope, static ones too."""
    found = [item for items in _views(text) for item in items]
    functions = [function.name for function in map(scanner.as_function, found) if function is not None]
    heads = [re.sub(r"\b(?:static|extern)\b", "", item.head) for item in found]
    variables = [
        scanner.variables(dataclasses.replace(item, head=head)) for item, head in zip(found, heads, strict=True)
    ]
    return frozenset((*functions, *itertools.chain.from_iterable(variables)))


def _library(author: _AuthorSource, instance: _Instance) -> tuple[str, dict[str, str]]:
    """Return declarations of the C library's functions that C source uses, and macros for those that are macros there."""
    if not instance.plain_c:
        return "", {}
    text = f"{author.preamble}\n{author.text}"
    shown, defined = scanner.without_literals(text), _defined(text)
    return boilerplate.declarations(shown, defined, instance.as_cpp), boilerplate.macros(shown, defined)


def _renamed(name: str, instance: _Instance) -> str:
    return f"{name}__{instance.label}"


def _opening(bound: Bound, author: _AuthorSource, instance: _Instance) -> tuple[str, str]:
    """Return the text before and after the author's; each of its includes gets them in the opposite order around it."""
    others = () if instance.alone else _external(author.text, instance.plain_c)
    macros = {name: _renamed(name, instance) for name in dict.fromkeys([bound.function.name, *others])}
    macros |= {"restrict": "__restrict__"} if instance.language != "c" else {}
    scope = 'extern "C" {\n' if instance.as_cpp else f"namespace opk_{instance.label} {{\n"
    scope = "" if instance.language == "c" or (instance.alone and not instance.as_cpp) else scope
    tests = {name: f"{name}(x) {text}" for name, text in _library(author, instance)[1].items()}
    defines = [f"#define {name} {text}\n" for name, text in macros.items()]
    defines += [f"#ifndef {name}\n#define {text}\n#endif\n" for name, text in tests.items()]
    undefines = [f"#undef {name}\n" for name in (*macros, *tests)]
    return "".join((*defines, scope)), "".join(("}\n" if scope else "", *undefines))


def _include_outside(author: _AuthorSource, position: tuple[int, int, int], opening: str, closing: str) -> str:
    """Return an include with everything around it closed before and opened after, the author's ``extern "C" {`` too."""
    start, end, depth = position
    file, line = quoted(author.filename), author.first_line + author.text.count("\n", 0, start)
    inner, outer = ('extern "C" {\n' * depth, "}\n" * depth) if "{" in opening else ("", "")
    directive = f"#line {line} {file}\n{author.text[start:end]}\n"
    after = f"#line {line + author.text.count(chr(10), start, end)} {file}\n"
    return f"\n{outer}{closing}{inner}{directive}{outer}{opening}{inner}{after}"


def _placed(author: _AuthorSource, opening: str, closing: str) -> str:
    """Return the author's text behind ``opening``, its includes outside of that; every line has its own number."""
    pieces, position = [], 0
    for include in scanner.includes(author.text):
        pieces += [author.text[position : include[0]], _include_outside(author, include, opening, closing)]
        position = include[1]
    text = "".join((*pieces, author.text[position:]))
    return f"{opening}#line {author.first_line} {quoted(author.filename)}\n{text}\n\n{_OPKIT_LINES}"


def _preamble(author: _AuthorSource, instance: _Instance) -> str:
    if not author.preamble:
        return ""
    scope = ('#define restrict __restrict__\nextern "C" {\n', "}\n#undef restrict\n") if instance.as_cpp else ("", "")
    preamble = dataclasses.replace(author, text=author.preamble, filename="<preamble>", first_line=1)
    return f"{_placed(preamble, *scope)}{scope[1]}"


def _c_type(slot: Slot, instance: _Instance) -> CType | None:
    dtype = instance.types.get(slot.c_type)
    return C_TYPES.get(f"{dtype.name}_t" if dtype else slot.c_type)


def _limit(number: int) -> str:
    return f"(-{2**63 - 1}ll - 1)" if number == -(2**63) else f"{number}ll"


def _check(number: int, slot: Slot, instance: _Instance) -> str:
    """Return a test that an integer fits its parameter's type; "" where every integer fits."""
    known = _c_type(slot, instance)
    if slot.member != "i" or slot.kind == "bool" or slot.source == "INT_CONSTANT" or known is None:
        return ""
    value, (low, high) = f"opk_i(opk_values, {number})", known.limits
    tests = [f"{value} < {_limit(low)}"] if low is not None else []
    tests += [f"{value} > {_limit(high)}"] if high is not None else []
    message = quoted(f"{slot.name} does not fit into {slot.c_type}")
    return f"    if ({' || '.join(tests)}) {{ *opk_text = {message}; return -1; }}\n" if tests else ""


_RETURNING = {
    "void": "    {call};\n    return 0;\n",
    "const char*": "    *opk_text = {call};\n    return *opk_text != 0;\n",
}
_LAUNCHED = """\
OPK_C int32_t opk_call_<n>(const opk_value* opk_values, const char** opk_text);
int32_t opk_call_<n>(const opk_value* opk_values, const char** opk_text) {
    const int32_t opk_code = opk_launch_<n>(opk_values, opk_text);
    const cudaError_t opk_error = cudaGetLastError();  // of a launch; errors on the GPU are reported later
    if (opk_error == cudaSuccess || *opk_text != 0 || opk_code != 0) return opk_code;
    *opk_text = cudaGetErrorString(opk_error);
    return -1;
}
"""
_RETURNING_CODE = "    return (int32_t){call};\n"


def _trampoline(bound: Bound, instance: _Instance) -> str:
    function, slots = bound.function, list(enumerate(bound.slots))
    values = ", ".join(f"({slot.c_type})opk_{slot.member}(opk_values, {number})" for number, slot in slots)
    returning = _RETURNING.get(function.returns, _RETURNING_CODE)
    body = returning.format(call=f"{_renamed(function.name, instance)}({values})")
    checks = "".join(_check(number, slot, instance) for number, slot in slots)
    name = f"opk_{'launch' if instance.language == 'cuda' else 'call'}_{instance.number}"
    head = f"int32_t {name}(const opk_value* opk_values, const char** opk_text)"
    text = f"OPK_C {head};\n{head} {{\n    (void)opk_values;\n    (void)opk_text;\n{checks}{body}}}\n"
    return text + (_LAUNCHED.replace("<n>", str(instance.number)) if instance.language == "cuda" else "")


def _instance_text(bound: Bound, author: _AuthorSource, instance: _Instance) -> str:
    opening, closing = _opening(bound, author, instance)
    return "".join((
        "#define OPK_C_SOURCE 1\n" if instance.plain_c else "",
        _header("opkit.h"), _header("opkit_types.h"), _OPKIT_LINES, _HELPERS, _cuda_headers(instance), _types(instance),
        _library(author, instance)[0], _preamble(author, instance),
        _placed(author, opening, closing), _trampoline(bound, instance), closing,
    ))  # fmt: skip


def _unit_name(kernel: str, instance: _Instance) -> str:
    chosen = ", ".join(dtype.name for dtype in instance.types.values())
    return f"{kernel}{f' for {chosen}' if chosen else ''}{_AS_CPP if instance.as_cpp else ''}"


def _error(bound: Bound, kernel: str, message: str) -> DeclarationError:
    return DeclarationError(f"{bound.facts.operator}, kernel {kernel!r}: {message}")


def _choices(bound: Bound, text: str, dtypes: Mapping[str, Sequence[str]], kernel: str) -> dict[str, tuple[str, ...]]:
    """Return the dtypes of the variables that calls decide, and of those with one dtype that the text uses."""
    words = set(re.findall(r"\w+", scanner.without_literals(text)))
    missing = [name for name in bound.variables if not dtypes.get(name)]
    if missing:
        raise _error(bound, kernel, f"{', '.join(missing)} has no dtypes. Name them in dtypes=.")
    for name, listed in dtypes.items():
        unknown = [dtype for dtype in listed if dtype not in DTYPES]
        if unknown:
            raise _error(bound, kernel, f"{name} cannot be {', '.join(unknown)}. Known dtypes: {', '.join(DTYPES)}.")
        if name not in bound.variables and name in words and len(set(listed)) > 1:
            raise _error(
                bound, kernel, f"{name} has several dtypes, but no tensor parameter decides which. Make one a `{name}*`, or "
                f"give {name} one dtype.",
            )  # fmt: skip
    used = [
        *bound.variables,
        *(name for name in dtypes if name not in bound.variables and name in words and dtypes[name]),
    ]
    return {name: tuple(dict.fromkeys(dtypes[name])) for name in used}


def _instances(choices: Mapping[str, tuple[str, ...]], language: str) -> list[_Instance]:
    combinations = list(itertools.product(*choices.values()))
    found = []
    for number, names in enumerate(combinations):
        types = {name: DTYPES[dtype] for name, dtype in zip(choices, names, strict=True)}
        compiled = "c++" if language == "c" and any(not dtype.c for dtype in types.values()) else language
        found.append(_Instance(number, types, compiled, language == "c", len(combinations) == 1))
    return found


def _check_scalars(bound: Bound, instances: Sequence[_Instance], kernel: str) -> None:
    for instance, slot in itertools.product(instances, bound.slots):
        dtype = instance.types.get(slot.c_type)
        integral = dtype is not None and dtype.kind in ("int", "bool")
        if dtype and integral and (slot.kind == "float" or slot.source == "FLOAT_CONSTANT"):
            raise _error(
                bound, kernel, f"parameter {slot.name!r} is a {slot.c_type}, here {dtype.name}, and would cut a float off. "
                "Take a double.",
            )  # fmt: skip


def generate(
    bound: Bound,
    text: str,
    dtypes: Mapping[str, Sequence[str]],
    kernel_name: str,
    filename: str = "<kernel>",
    first_line: int = 1,
    language: str = "c",
    cuda: bool = False,
    preamble: str = "",
) -> tuple[Unit, ...]:
    """Generate the units of one shared library; compile them with ``-fexceptions``: the runtime throws through them.

    ``dtypes`` names the element types of each type variable. ``filename`` and ``first_line`` locate the text for compile
    errors. ``preamble`` precedes the text, for example with the declarations of a library.

    In addition to its own names the text may use each type variable, ``opk_acc`` (the accumulator type of the first one;
    ``opk_acc_U`` of U), ``#if T_is_bfloat16`` and the like, and the part of ``opkit.h`` for authors. C needs no headers; see
    :mod:`opkit.kernels.cc.boilerplate`. If there are several choices of dtypes, all C++ but ``extern "C"`` functions is in a
    namespace; definitions in included headers must not depend on a type variable unless they are static.
    """
    instances = _instances(_choices(bound, f"{preamble}\n{text}", dtypes, kernel_name), language)
    _check_scalars(bound, instances, kernel_name)
    author = _AuthorSource(text, filename, first_line, preamble)
    texts = [_instance_text(bound, author, instance) for instance in instances]
    numbers = [tuple(instance.types[name].number for name in bound.variables) for instance in instances]
    shown = descriptor(bound, kernel_name, cuda or language == "cuda", numbers)
    units = [
        Unit(_unit_name(kernel_name, instance), text, instance.language)
        for instance, text in zip(instances, texts, strict=True)
    ]
    if len(units) == 1:
        return (dataclasses.replace(units[0], text=f"{units[0].text}{shown}"),)
    calls = "".join(f"OPK_C int32_t opk_call_{n}(const opk_value*, const char**);\n" for n in range(len(units)))
    stub = f"{_header('opkit.h')}{_OPKIT_LINES}{_HELPERS}{calls}{shown}"
    return (*units, Unit(f"{kernel_name}, its description", stub, language))


def instance_number(
    bound: Bound, text: str, dtypes: Mapping[str, Sequence[str]], kernel_name: str, chosen: Mapping[str, str]
) -> int:
    """Return the index in ``opk_instances`` of a choice of dtypes, by the names of the variables."""
    choices = _choices(bound, text, dtypes, kernel_name)
    listed = _instances(choices, "c")
    return next(
        each.number
        for each in listed
        if all(each.types[name].name == chosen[name] for name in chosen if name in choices)
    )
