"""The IPython extension: ``%load_ext opkit`` adds the cell magic ``%%c_kernel``, which registers a cell of C as a kernel."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from opkit.errors import ArgumentError
from opkit.kernels.cc.native import c_kernel
from opkit.op import registry
from opkit.op.native.function import NativeFunction
from opkit.op.operator import CustomOp


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{self.prog}: {message}\n{self.format_usage()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "%%c_kernel", description="Register the C in this cell as a kernel of an operator.", add_help=False
    )
    parser.add_argument("operator", help="namespace::name, or a variable that holds the operator")
    parser.add_argument("--dtypes", help="of the type variable T, separated by commas: float32,bfloat16")
    parser.add_argument("--name", help="the function, if the cell has several")
    parser.add_argument("--flags", default="", help="options for the compiler: --flags='-O3 -ffast-math'")
    parser.add_argument("--libraries", default="", help="libraries to link with, separated by commas")
    parser.add_argument("--isa", default="native", help="native, baseline, avx2, avx512, neon")
    parser.add_argument("--elementwise", action="store_true", help="elements depend on those at their index alone")
    parser.add_argument("--debug", action="store_true", help="build with sanitizers, and run in a child process")
    return parser


def load_ipython_extension(shell: Any) -> None:
    """Add ``%%c_kernel`` to a shell of IPython; ``%load_ext opkit`` calls it.

    The cell's first line names the operator, and may have the options of :func:`opkit.c_kernel`. The kernel is compiled at once,
    so that errors are reported below the cell, and replaces one of the same name::

        %%c_kernel demo::twice --dtypes float32,float64
        void twice(const T* x, T* out, int64_t x_numel) {
            for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i];
        }

    """

    def cell_magic(line: str, cell: str) -> CustomOp[Any, Any]:
        return register_cell(line, cell, shell.user_ns)

    cell_magic.__doc__ = _parser().format_help()
    shell.register_magic_function(cell_magic, "cell", "c_kernel")


def register_cell(line: str, cell: str, variables: Mapping[str, Any]) -> CustomOp[Any, Any]:
    """Register and compile the kernel of a cell, and return the operator.

    Args:
        line: what follows ``%%c_kernel``: an operator and options.
        cell: the C.
        variables: those of the notebook, one of which may hold the operator.

    Raises:
        ArgumentError: the options cannot be parsed, or the variable holds no operator.
        UnknownOperatorError: there is no operator of that name.
        CompileError, DeclarationError, KernelError, ToolchainError: as by :func:`opkit.c_kernel` and ``register_kernel``.
    """
    options = _parser().parse_args(shlex.split(line))
    found = variables.get(options.operator)
    op = registry.get(options.operator) if found is None else found
    if not isinstance(op, CustomOp):
        raise ArgumentError(f"%%c_kernel: {options.operator} is {op!r}, which is no operator of opkit.custom_op")
    declared = c_kernel(
        cell,
        dtypes=options.dtypes.split(",") if options.dtypes else None,
        name=options.name,
        flags=shlex.split(options.flags),
        libraries=[each for each in options.libraries.split(",") if each],
        isa=options.isa.split(","),
        elementwise=options.elementwise,
        debug=options.debug,
    )
    native = dataclasses.replace(
        declared, file=f"<cell of {options.operator}>", line=2
    )  # the first line is the magic's
    op.register_kernel("cpu", native)
    for kernel in op._operator.kernels.kernels:  # pyright: ignore[reportPrivateUsage]
        if isinstance(kernel.function, NativeFunction) and kernel.function.native is native:
            kernel.function.build()
    return op
