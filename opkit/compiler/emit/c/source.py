"""This module writes the kernels of a schedule as C: one translation unit, or a few that are compiled in parallel.

The program's steps are runs of kernels between calls of torch's operators. Each run is a segment, an exported function::

    int64_t opkit_segment_<i>(void *const *buffers, const int64_t *sizes, struct opkit_runtime *runtime);

    struct opkit_runtime {
      void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
      int (*thread)(void);
      int64_t threads;
      int64_t error[3];
      void *const *functions;
    };

``buffers`` points at the first element of each buffer and ``sizes`` holds the symbolic sizes, in the orders that
:func:`source` takes. ``parallel`` is GOMP_parallel and ``thread`` omp_get_thread_num of the OpenMP that torch has
loaded, so that a process has one pool of threads; where either is NULL, all runs in the calling thread. ``threads`` is how
many may be used. ``functions`` are the library functions that kernels call, in the order of ``schedule.called_functions``. A
segment returns 0, or the code of what went wrong, which is then in ``error`` (zeros before; one ``opkit_runtime`` for each call
that runs at the same time) with two numbers:

    1   an index that was read from memory is out of range: the index, the extent
    2   there is no memory for scratch: the bytes, 0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opkit.compiler.emit.c import blocks, expressions, prelude
from opkit.compiler.emit.c.expressions import TYPEDEFS
from opkit.compiler.emit.c.kernel import function
from opkit.compiler.ir.expr import Callee
from opkit.compiler.ir.index import Atom, Div, Mod, Symbol, product
from opkit.compiler.ir.kernel import Kernel, KernelLaunch, batches, called_functions, parallel

# The pragma is written by a macro, so that it is only what "-fopenmp-simd" makes of it, and no OpenMP is linked.
_WORTH_A_UNIT = 12_000  # characters of kernels: gcc takes some 0.2 s for them, and 0.05 s to start and to link
_SIMD = "#define SIMD(text) _Pragma(#text)"


def source(
    launches: Sequence[Sequence[KernelLaunch]], buffers: Sequence[str], sizes: Sequence[str], units: int = 1
) -> tuple[str, ...]:
    """Return the units: each distinct kernel once, and in the first of them a function for each segment.

    Args:
        launches: the segments.
        buffers: the program's buffers, in the order of the table of pointers.
        sizes: its symbolic sizes, in the order of theirs.
        units: their maximum number; kernels are distributed if that saves more time than another compiler process costs.
    """
    names = _names(launch.kernel for segment in launches for launch in segment)
    shared = {
        launch.kernel for segment in launches for launch in segment if len(set(launch.buffers)) < len(launch.buffers)
    }
    order = {
        callee: i for i, callee in enumerate(called_functions(launch for segment in launches for launch in segment))
    }
    code = {name: _kernel(kernel, name, kernel not in shared, order) for kernel, name in names.items()}
    tables = ({name: i for i, name in enumerate(buffers)}, {name: i for i, name in enumerate(sizes)})
    segments = [_segment(number, segment, names, *tables) for number, segment in enumerate(launches)]
    first, *others = _shared_out(code, units)
    declared = [f"{_range(name)};" for part in others for name in part]
    bodies = [[*first.values(), *declared, *segments], *(list(part.values()) for part in others)]
    return tuple(_unit("\n\n".join(body)) for body in bodies)


def _unit(body: str) -> str:
    return "\n".join([TYPEDEFS, _SIMD, prelude.RUNTIME, prelude.text(body), "", body, ""])


def _shared_out(code: Mapping[str, str], units: int) -> list[dict[str, str]]:
    """Return the kernels by unit: the longest first, each in the shortest unit."""
    count = max(1, min(units, sum(map(len, code.values())) // _WORTH_A_UNIT))
    parts: list[dict[str, str]] = [{} for _ in range(count)]
    for name, text in sorted(code.items(), key=lambda item: -len(item[1])):
        min(parts, key=lambda part: sum(map(len, part.values())))[name] = text
    return [{name: code[name] for name in code if name in part} for part in parts]


def _names(kernels: Iterable[Kernel]) -> dict[Kernel, str]:
    names: dict[Kernel, str] = {}
    taken: set[str] = set()
    for kernel in kernels:
        if kernel not in names:
            name = f"k_{kernel.name}"
            names[kernel] = name if name not in taken else f"{name}_{len(names)}_"
            taken.add(names[kernel])
    return names


def _kernel(kernel: Kernel, name: str, exclusive: bool, order: Mapping[Callee, int]) -> str:
    """Return the function, and one that takes its arguments from a call."""
    parameters = [f"call->buffers[{i}]" for i in range(len(kernel.arguments))]
    parameters += [f"call->sizes[{i}]" for i in range(len(kernel.sizes))]
    arguments = f"({', '.join([*parameters, 'call->runtime', 'begin', 'end'])})"
    types = blocks.near_types(kernel, exclusive)
    first = [function(kernel, f"{name}_near", exclusive, types, order)] if types else []
    call = f"if ({name}_near{arguments}) {name}{arguments};" if types else f"{name}{arguments};"
    # a user's line may end in a backslash, which would continue the comment
    origins = [f"// {', '.join(kernel.origins)}".rstrip("\\")] if kernel.origins else []
    return "\n".join([*origins, *first, function(kernel, name, exclusive, order=order), f"{_range(name)} {{ {call} }}"])


def _range(name: str) -> str:
    return f"void {name}_range(const struct opkit_call *call, int64_t begin, int64_t end)"


def _segment(
    number: int,
    segment: Sequence[KernelLaunch],
    names: Mapping[Kernel, str],
    buffers: Mapping[str, int],
    sizes: Mapping[str, int],
) -> str:
    lines = [
        f'__attribute__((visibility("default"))) int64_t opkit_segment_{number}'
        "(void *const *buffers, const int64_t *sizes, struct opkit_runtime *runtime) {"
    ]
    for batch in batches(segment):
        calls = [_call(launch, names[launch.kernel], buffers, sizes) for launch in batch]
        lines.append(f"  opkit_launch({_array('const struct opkit_call', calls)}, {len(calls)}, runtime);")
        lines.append("  if (runtime->error[0]) return runtime->error[0];")
    return "\n".join([*lines, "  return 0;", "}"])


def _call(launch: KernelLaunch, name: str, buffers: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    pointers = _array("void *const", [f"buffers[{buffers[each]}]" for each in launch.buffers])
    numbers = _array("const int64_t", [f"sizes[{sizes[each]}]" for each in launch.sizes])
    places = dict(zip(launch.kernel.sizes, launch.sizes, strict=True))

    def spell(atom: Atom) -> str:
        assert isinstance(atom, Symbol | Div | Mod), atom
        return f"sizes[{sizes[places[atom.name]]}]" if isinstance(atom, Symbol) else expressions.division(atom, spell)

    count = expressions.index_text(product(loop.axis.extent for loop in parallel(launch.kernel)[0]), spell)
    return f"{{{name}_range, {pointers}, {numbers}, runtime, {count}, {max(1, launch.kernel.grain)}}}"


def _array(ctype: str, elements: Sequence[str]) -> str:
    return f"({ctype}[]){{{', '.join(elements)}}}" if elements else "0"
