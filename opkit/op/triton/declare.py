"""Kernels in Triton: ``opkit.triton_kernel``.

What it returns is a description. It is bound to an operator's names by :meth:`opkit.CustomOp.register_kernel`, and compiled
for the arguments of a call when they are first seen.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opkit.errors import DeclarationError
from opkit.kernels.triton import environment
from opkit.kernels.triton.named import Named
from opkit.kernels.tuning.configs import Config
from opkit.op.triton.kernel import TritonKernel, parameters_of
from opkit.op.triton.launch import launch

OPTIONS = frozenset(
    {
        "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid", "launch_pdl",
        "default_dot_input_precision", "allowed_dot_input_precisions", "extern_libs", "debug", "sanitize_overflow",
        "ir_override", "supported_fp8_dtypes", "max_num_imprecise_acc_default",
        "waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint", "instruction_sched_variant",
    }
)  # fmt: skip
"""The options of Triton's compilers that a kernel may set."""


def triton_kernel(
    function: Any,
    *,
    grid: Any,
    outputs: Sequence[str] = (),
    bind: Mapping[str, str] | None = None,
    configs: Sequence[Any] = (),
    prune: Callable[..., Any] | None = None,
    reset_to_zero: Sequence[str] = (),
    pre_hook: Callable[..., Any] | None = None,
    targets: Sequence[str] = (),
    examples: Sequence[Mapping[str, Any]] = (),
    **values: Any,
) -> TritonKernel:
    """Return a kernel written in Triton or Gluon, for ``register_kernel``.

    The function's parameters are bound by name: to the operator's arguments (``x`` or ``x_ptr``), to its output ``out``
    (``out0``, ``out1``, ... where there are several), to the sizes that its annotations name, and to ``x_numel``,
    ``x_rank``, ``x_size_0``, ``x_stride_0`` (``x_stride_m1`` counts from the end) of a tensor ``x``. A tensor whose strides
    the kernel takes may have any; any other is made contiguous.

    Grid, constexprs and options are constants, or functions that take the same things by their parameters' names: named
    sizes, scalars, tensors (as ``TensorInfo``), other constexprs, or ``meta``, all of
    them in a dict. They are called once for each set of values that they take.

    Args:
        function: decorated with ``@triton.jit``, ``@triton.autotune``, ``@triton.heuristics`` or Gluon's ``@gluon.jit``; or
            a ``Named`` one, which is imported when it must be.
        grid: the number of programs: an int, up to three of them, or a function.
        outputs: the names by which the kernel knows the operator's outputs.
        bind: other names for parameters: ``{"x_ptr": "input"}``.
        configs: choices of constexprs and options, such as ``{"BLOCK": 128, "num_warps": 4}`` or ``triton.Config``; the
            fastest is found once for each device and bucket of shapes, and recorded.
        prune: takes the configs as dicts and the named values, returns those worth timing.
        reset_to_zero: tensors that are zeroed before each launch.
        pre_hook: is called with the kernel's arguments by name before each launch.
        targets: the architectures that the kernel is for ("sm_90"); by default it is portable.
        examples: arguments to compile, build and tune for, such as ``{"x": "bf16[4096, 1024]", "eps": 1e-6}``.
        values: constexprs, other parameters and the compiler's options (num_warps, num_stages, ...) by name.

    Raises:
        DeclarationError: something is named that the function does not have.

    >>> import opkit, torch, triton
    >>> import triton.language as tl
    >>> @triton.jit
    ... def _double(x, out, n, BLOCK: tl.constexpr):
    ...     at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ...     tl.store(out + at, 2 * tl.load(x + at, at < n), at < n)
    >>> opkit.triton_kernel(_double, grid=lambda n, BLOCK: triton.cdiv(n, BLOCK), n=lambda x: x.numel, BLOCK=1024).name
    '_double'
    """
    inner, inherited = _unwound(_settled(function))
    names = [parameter.name for parameter in parameters_of(inner)]
    kernel = TritonKernel(
        inner,
        grid,
        {k: v for k, v in {**inherited.pop("values", {}), **values}.items() if k not in OPTIONS},
        {k: v for k, v in values.items() if k in OPTIONS},
        tuple(Config.parse(config, names) for config in configs or inherited.get("configs", ())),
        prune or inherited.get("prune"),
        tuple(outputs),
        dict(bind or {}),
        tuple(reset_to_zero) or tuple(inherited.get("reset_to_zero", ())),
        pre_hook or inherited.get("pre_hook"),
        tuple(targets),
        tuple(dict(example) for example in examples),
        launch,
    )
    _check(kernel)
    _check_configs(kernel, values)
    return kernel


def _settled(function: Any) -> Any:
    """Return a named function as it is if its file says enough and nothing is interpreted; else import the function."""
    if not isinstance(function, Named):
        return function
    return function.loaded() if function.header is None or environment.interprets() else function


def _unwound(function: Any) -> tuple[Any, dict[str, Any]]:
    """Return the ``triton.jit`` object under ``triton.autotune`` and ``triton.heuristics``, and the options that those set."""
    options: dict[str, Any] = {}
    while (reader := _DECORATORS.get(type(function).__name__)) is not None:
        for name, value in reader(function).items():
            options[name] = {**value, **options.get(name, {})} if isinstance(value, dict) else value
        function = function.fn
    return function, options


def _autotuner(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"configs": tuple(function.configs), "reset_to_zero": tuple(function.reset_to_zero or ())}
    if getattr(function, "user_defined_pre_hook", False):
        found["pre_hook"] = function.pre_hook
    if getattr(function, "user_defined_post_hook", False):
        name = getattr(function, "base_fn", function).__name__
        raise DeclarationError(
            f"{name}: triton.autotune was given a post_hook, which opkit does not call. What the operator writes to "
            "(mutates_args) is restored after each measurement; leave the hook out."
        )
    if function.early_config_prune is not None:
        found["prune"] = function.early_config_prune
    return found


def _heuristics(function: Any) -> dict[str, Any]:
    return {"values": {name: _of_meta(value) for name, value in function.values.items()}}


def _of_meta(heuristic: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
    def value(meta: Mapping[str, Any]) -> Any:
        return heuristic(meta)

    return value


_DECORATORS = {"Autotuner": _autotuner, "Heuristics": _heuristics}


def _check(kernel: TritonKernel) -> None:
    names = [parameter.name for parameter in kernel.parameters]
    for what, passed in (("", kernel.values), ("bind=: ", kernel.bind)):
        for name in passed:
            if name not in names:
                near = difflib.get_close_matches(name, [*names, *OPTIONS], 3)
                hint = f" Nearest: {', '.join(near)}." if near else ""
                raise DeclarationError(
                    f"{kernel!r}: {what}{name!r} is neither a parameter ({', '.join(names)}) nor an option of Triton's "
                    f"compiler.{hint}"
                )
    if not (callable(kernel.grid) or isinstance(kernel.grid, (int, tuple, list))):
        raise DeclarationError(f"{kernel!r}: grid={kernel.grid!r} is neither a number, a tuple nor a function.")


def _check_configs(kernel: TritonKernel, values: Mapping[str, Any]) -> None:
    """Check that a value next to configs is used: some config must leave it out."""
    for name in values:
        if kernel.configs and all(name in config.constexprs for config in kernel.configs):
            raise DeclarationError(
                f"{kernel!r}: {name} has a value, and the config {kernel.configs[0].label} gives it another."
            )
