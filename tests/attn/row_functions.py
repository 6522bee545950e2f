"""Functions of rows, calls of them, and what they compute row by row."""

import torch
import torch.nn.functional as F

B, H, SHARED, QUERIES, KEYS, D = 2, 4, 2, 5, 7, 8
ANGLES = torch.outer(torch.arange(64.0, dtype=torch.float64), 10.0 ** -torch.arange(0.0, 1, 2 / D, dtype=torch.float64))
COS, SIN = torch.cat((ANGLES, ANGLES), -1).cos(), torch.cat((ANGLES, ANGLES), -1).sin()
LEARNED = {
    "weight": torch.linspace(0.5, 1.5, D, dtype=torch.float64),
    "gate": torch.linspace(-3, 3, B * H * QUERIES * D, dtype=torch.float64).reshape(B, H, QUERIES, D).sin(),
    "scales": torch.linspace(0.5, 2, H, dtype=torch.float64),
    "table": torch.linspace(-1, 1, KEYS * D, dtype=torch.float64).reshape(KEYS, D).cos(),
}


def rotated(x):
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def rotary(x, b, h, at):
    return x * COS[at] + rotated(x) * SIN[at]


def interleaved(x, b, h, at):
    cos, sin = COS[at, : D // 2], SIN[at, : D // 2]
    even, odd = x[::2], x[1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten()


def partial(x, b, h, at):
    first, rest = x[: D // 2], x[D // 2 :]
    return torch.cat((first * COS[at, : D // 2] + rotated(first) * SIN[at, : D // 2], rest))


def normed(weight):
    return lambda x, b, h, at: x * torch.rsqrt(x.square().mean() + 1e-6) * weight


def normed_and_rotated(weight):
    return lambda x, b, h, at: rotary(F.rms_norm(x, (D,), weight, 1e-6), b, h, at)


def row_by_row(function, x, layout="bhsd"):
    """What a function makes of each row, one call after another."""
    if function is None:
        return x
    sizes = dict(zip(layout[:-1].replace("t", "s"), x.shape, strict=False))
    order = [list("bhs").index(letter) for letter in sizes]
    rows = []
    for place in torch.cartesian_prod(*(torch.arange(n) for n in sizes.values())):
        numbers = [torch.tensor(0)] * 3
        for number, at in zip(order, place, strict=True):
            numbers[number] = at
        rows.append(function(x[tuple(place)], *numbers))
    return torch.stack(rows).reshape(*x.shape[:-1], -1)


def formula(q, k, v, query=None, key=None, output=None):
    """Causal attention in torch operations, between functions that are called row by row."""
    q, k = row_by_row(query, q), row_by_row(key, k)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]).logical_not()
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return row_by_row(output, logits.softmax(-1) @ v)


def inputs(dtype=torch.float64, batch=B, queries=QUERIES, keys=KEYS):
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, H, queries, D), (batch, SHARED, keys, D), (batch, SHARED, keys, D)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
