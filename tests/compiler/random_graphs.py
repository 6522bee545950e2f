"""Programs of torch operators as source text, so that one that fails can be printed and run; :mod:`random_lines` draws them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = {
    "F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "BOOL": torch.bool,
}  # fmt: skip
"""The names that programs use: in the exact run, the floats all mean float64."""

_STRANGE = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "every other row")


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of a program: its sizes, the name of its dtype, how it lies in memory, and what numbers are in it."""

    shape: tuple[int, ...]
    dtype: str
    layout: str = "contiguous"
    numbers: str = "grid"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.layout} {self.numbers} {self.seed}"

    def tensor(self, grad: bool = False, device: str = "cpu") -> Tensor:
        """The argument itself, the same on every call and every device."""
        made = _laid_out(self._numbers(_before(self.shape, self.layout)).to(device), self.shape, self.layout)
        return made.requires_grad_(grad and made.is_floating_point())

    def _numbers(self, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        dtype = DTYPES[self.dtype]
        if self.numbers == "normal":
            return torch.randn(shape, generator=generator).to(dtype)
        grid = torch.randint(-12, 13, shape, generator=generator)
        if self.numbers == "special":
            return torch.where(grid > 8, _STRANGE[grid % 4], grid / 4).to(dtype)
        return (grid / 4 if dtype.is_floating_point else grid % 2 if dtype == torch.bool else grid).to(dtype)


def _before(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The sizes of the contiguous tensor that an argument is a view of."""
    if not shape or layout == "contiguous":
        return shape
    changed = {
        "transposed": shape[::-1],
        "sliced": (*shape[:-1], 2 * shape[-1] + 1),
        "expanded": (1, *shape[1:]),
        "every other row": (shape[0] * 2 + 1, *shape[1:]),
    }
    return changed[layout]


def _laid_out(base: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    if not shape or layout == "contiguous":
        return base
    if layout == "transposed":
        return base.permute(*reversed(range(base.ndim)))
    if layout == "expanded":
        return base.expand(shape)
    return base[..., 1::2] if layout == "sliced" else base[1::2]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of tensors as text: its arguments, its lines, and the names that it returns."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]

    def source(self) -> str:
        """The function's text."""
        names = ", ".join(f"t{at}" for at in range(len(self.inputs)))
        body = [f"def f({names}):", *self.lines, f"return ({', '.join(self.outputs)},)"]
        return "\n    ".join(body) + "\n"

    def function(self, exact: bool = False) -> Callable[..., tuple[Tensor, ...]]:
        """The function; ``exact`` computes in float64 whatever floats the text names."""
        scope = namespace(exact)
        exec(self.source(), scope)
        return scope["f"]

    def script(self, backend: str, device: str = "cpu") -> str:
        """A program of its own that shows eager's results and the compiled function's."""
        floats = "\n".join(f"{name} = {dtype}" for name, dtype in DTYPES.items())
        made = "\n".join(f"t{at} = {spelled(each, device)}" for at, each in enumerate(self.inputs))
        names = ", ".join(f"t{at}" for at in range(len(self.inputs)))
        return (
            f"import torch\nimport torch.nn.functional as F\nnan, inf = float('nan'), float('inf')\n{floats}\n\n"
            f"{self.source()}\n{made}\nargs = [{names}]\n"
            f"print(f(*[t.detach().clone() for t in args]))\n"
            f"print(torch.compile(f, backend={backend!r})({names}))\n"
        )


def spelled(given: Input, device: str = "cpu") -> str:
    """An argument as an expression, with its strides."""
    tensor, on = given.tensor(), "" if device == "cpu" else f", device={device!r}"
    dtype, whole = given.dtype, tensor.contiguous().flatten().tolist()
    return (
        f"torch.empty_strided({tuple(tensor.shape)}, {tensor.stride()}, dtype={dtype}{on})"
        f".copy_(torch.tensor({whole}, dtype={dtype}).reshape({tuple(tensor.shape)}))"
    )


def namespace(exact: bool = False) -> dict[str, Any]:
    """What a program's text can name."""
    dtypes = {name: torch.float64 if exact and dtype.is_floating_point else dtype for name, dtype in DTYPES.items()}
    return {"torch": torch, "F": functional, **dtypes}


def arguments(program: Program, exact: bool = False, grad: bool = False, device: str = "cpu") -> list[Tensor]:
    """The arguments of a program, new each time; ``exact`` makes floats float64, ``grad`` asks for their gradients."""
    made = [each.tensor(device=device) for each in program.inputs]
    wide = [each.double() if exact and each.is_floating_point() else each for each in made]
    return [each.requires_grad_(grad and each.is_floating_point()) for each in wide]
