"""The kernels of opkit's operators that an exported graph calls: which kernel each call runs, and its library, for a file.

Whoever runs the file has no Python, or does not know the operators. So the choice of a kernel must hold for all sizes that the
graph takes, and programs compute the sizes of the kernel's outputs.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import fx

from opkit.kernels.cc import compilation
from opkit.op.aot import torch_private as private
from opkit.op.aot.package import with_programs
from opkit.op.core import Operator
from opkit.op.dispatch import planning
from opkit.op.dispatch.selection import RegisteredKernel
from opkit.op.layout.derivation import LayoutRefusal, derive
from opkit.op.native.function import NativeFunction

_MAX_SYMBOLS = 4  # of which each combination may be 1


class NeedsPython(Exception):
    """A call needs Python; the message says why."""


def kernel_of(node: fx.Node, operator: Operator) -> tuple[RegisteredKernel | None, Mapping[str, str]]:
    """Return the kernel that a call runs, None for the reference, and why kernels refused it.

    Raises:
        NeedsPython: the choice depends on a condition in Python and on sizes that may change.
    """
    args, kwargs = private.example_call(node)
    accepted, refused = planning.eligible(operator, args, kwargs)
    kernel = accepted[0] if accepted else None
    if private.symbols(node) and not operator.forced:
        kernels, device = operator.kernels.kernels, operator.device(args, kwargs)
        for each in kernels if kernel is None else kernels[: kernels.index(kernel) + 1]:
            if each.when is not None and each.device in (None, device):
                raise NeedsPython(
                    f"whether its kernel {each.name} takes it depends on {each.condition}, for sizes that may change"
                )
    return kernel, refused


def compiled(kernel: RegisteredKernel) -> NativeFunction:
    """Return the function of a kernel in C, C++ or CUDA.

    Raises:
        NeedsPython: it is another one, or a debug build.
    """
    if not isinstance(kernel.function, NativeFunction) or kernel.function.native.debug:
        raise NeedsPython(f"its kernel {kernel.name} is called from Python")
    return kernel.function


def size_programs(node: fx.Node, operator: Operator) -> list[tuple[int, ...]]:
    """Return the programs of output sizes for a call: one holds for all sizes but 1, and sizes of 1 have their own.

    Raises:
        NeedsPython: there is none for the sizes that the graph was exported with.
    """
    symbols = private.symbols(node)
    counts = range(len(symbols) + 1) if len(symbols) <= _MAX_SYMBOLS else (0, 1, len(symbols))
    found: dict[tuple[int, ...], None] = {}
    for ones in (each for count in counts for each in itertools.combinations(symbols, count)):
        program = derive(operator, *private.example_call(node, ones))
        if not isinstance(program, LayoutRefusal):
            found[program.words] = None
        elif not ones:
            hint = "; call .contiguous() on it in the model" if "row-major" in program.reason else ""
            raise NeedsPython(f"{program.reason}{hint}")
    return [*found]


def library(nodes: Sequence[fx.Node], operator: Operator, isa: str, sized: bool) -> Path:
    """Build the library of the one kernel that all of an operator's calls in a graph run.

    Args:
        nodes: the calls.
        operator: the operator.
        isa: the instruction set.
        sized: whether it is to have programs of its outputs' sizes, for callers that do not know them.

    Raises:
        NeedsPython: they run several kernels, the reference, or one that needs Python.
        CompileError, ToolchainError: the kernel cannot be compiled.
    """
    kernels = {kernel_of(node, operator)[0] for node in nodes}
    kernel = next(iter(kernels), None)
    if len(kernels) != 1 or kernel is None:
        raise NeedsPython("its calls do not run one kernel")
    words = dict.fromkeys(program for node in nodes if sized for program in size_programs(node, operator))
    return compilation.build(with_programs(compiled(kernel), isa, [*words]))
