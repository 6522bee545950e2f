"""Right operators of ``torch.library`` with kernels in Python and numpy; mutants are made of these functions.

What is called ``<name>_kernel``, ``<name>_fake``, ``<name>_backward`` and ``<name>_save`` is what mutations go into.
"""

import numpy as np
import torch
import torch.nn.functional as F

from opkit.testing import tensor

FLOATING = (torch.float32, torch.float64)
_LIBRARY = "mutants"


def _operator(name, kernel, schema, fake, backward=None, save=None, mutates=()):
    op = torch.library.custom_op(f"{_LIBRARY}::{name}", kernel, mutates_args=mutates, schema=schema)
    op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=save)
    return op


# ---- softplus: numpy, elementwise ----


def softplus_kernel(x, beta):
    a = x.numpy().astype(np.float64)
    scaled = beta * a
    result = np.where(scaled > 20, a, np.log1p(np.exp(np.minimum(scaled, 20))) / beta)
    return torch.from_numpy(np.asarray(result, order="C")).to(x.dtype)


def softplus_fake(x, beta):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def softplus_save(ctx, inputs, output):
    x, ctx.beta = inputs
    ctx.save_for_backward(x)


def softplus_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * torch.sigmoid(x * ctx.beta), None


def build_softplus():
    op = _operator(
        "softplus", softplus_kernel, "(Tensor x, float beta) -> Tensor", softplus_fake, softplus_backward, softplus_save
    )
    return {"op": op, "args": (tensor("*shape", FLOATING), 1.5), "reference": lambda x, beta: F.softplus(x, beta)}


# ---- window_mean: a loop over windows, with a tail ----


def window_mean_kernel(x, window):
    count = (x.shape[1] + window - 1) // window
    result = torch.zeros(x.shape[0], count, dtype=x.dtype)
    for at in range(count):
        part = x[:, at * window : (at + 1) * window]
        result[:, at] = part.sum(1) / part.shape[1]
    return result


def window_mean_fake(x, window):
    return x.new_empty(x.shape[0], (x.shape[1] + window - 1) // window)


def window_mean_save(ctx, inputs, output):
    x, ctx.window = inputs
    ctx.length = x.shape[1]


def window_mean_backward(ctx, grad):
    spread = grad.repeat_interleave(ctx.window, dim=1)[:, : ctx.length]
    at = torch.arange(ctx.length) // ctx.window * ctx.window
    sizes = torch.clamp(ctx.length - at, max=ctx.window)
    return spread / sizes, None


def _window_mean(x, window):
    parts = [part.mean(1) for part in x.split(window, 1)]
    return torch.stack(parts, 1) if x.shape[1] else x.new_zeros(x.shape[0], 0)


def build_window_mean():
    op = _operator(
        "window_mean", window_mean_kernel, "(Tensor x, int window) -> Tensor", window_mean_fake, window_mean_backward,
        window_mean_save,
    )  # fmt: skip
    return {"op": op, "args": (tensor("m n", FLOATING), 4), "reference": _window_mean}


# ---- attention_scores: a product, a scale, a causal mask ----


def scores_kernel(q, k, scale):
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    causal = torch.arange(k.shape[-2])[None, :] > torch.arange(q.shape[-2])[:, None]
    return scores.masked_fill(causal, float("-inf"))


def scores_fake(q, k, scale):
    return q.new_empty(q.shape[0], q.shape[1], k.shape[1])


def scores_save(ctx, inputs, output):
    q, k, ctx.scale = inputs
    ctx.save_for_backward(q, k)


def scores_backward(ctx, grad):
    q, k = ctx.saved_tensors
    causal = torch.arange(k.shape[-2])[None, :] > torch.arange(q.shape[-2])[:, None]
    kept = grad.masked_fill(causal, 0.0) * ctx.scale
    return torch.matmul(kept, k), torch.matmul(kept.transpose(-1, -2), q), None


def _scores(q, k, scale):
    causal = torch.ones(q.shape[-2], k.shape[-2]).tril() == 0
    return torch.where(causal, float("-inf"), torch.einsum("bid,bjd->bij", q, k) * scale)


def build_scores():
    op = _operator(
        "scores",
        scores_kernel,
        "(Tensor q, Tensor k, float scale) -> Tensor",
        scores_fake,
        scores_backward,
        scores_save,
    )
    specs = (tensor("b i d", FLOATING), tensor("b j d", FLOATING), 0.25)
    return {"op": op, "args": specs, "reference": _scores}


# ---- ema_: two tensors, one written to ----


def ema_kernel(average, x, decay):
    average.mul_(decay).add_(x, alpha=1 - decay)


def ema_fake(average, x, decay):
    return None


def _ema(average, x, decay):
    average.copy_(average * decay + x * (1 - decay))


def build_ema():
    op = _operator(
        "ema_", ema_kernel, "(Tensor(a!) average, Tensor x, float decay) -> ()", ema_fake, mutates=("average",)
    )
    return {"op": op, "args": (tensor("*shape", FLOATING), tensor("*shape", FLOATING), 0.75), "reference": _ema}


# ---- moments: two results ----


def moments_kernel(x):
    wide = x.double()
    mean = wide.sum(0) / x.shape[0]
    centred = wide - mean
    return mean.to(x.dtype), ((centred * centred).sum(0) / x.shape[0]).to(x.dtype)


def moments_fake(x):
    return x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:])


def moments_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def moments_backward(ctx, grad_mean, grad_variance):
    (x,) = ctx.saved_tensors
    centred = x - x.mean(0)
    return (grad_mean + 2 * centred * grad_variance) / x.shape[0]


def build_moments():
    op = _operator(
        "moments", moments_kernel, "(Tensor x) -> (Tensor, Tensor)", moments_fake, moments_backward, moments_save
    )
    reference = lambda x: (x.mean(0), x.var(0, correction=0))  # noqa: E731
    return {"op": op, "args": (tensor("n d", FLOATING),), "reference": reference}


# ---- swapped: a result that is not contiguous, and what is copied ----


def swapped_kernel(x, y):
    joined = torch.cat((x.clone(), y * 2 - x), dim=1)
    return joined.transpose(0, 1)


def swapped_fake(x, y):
    return x.new_empty(x.shape[0], 2 * x.shape[1]).transpose(0, 1)


def swapped_save(ctx, inputs, output):
    ctx.width = inputs[0].shape[1]


def swapped_backward(ctx, grad):
    first, second = grad.transpose(0, 1).split((ctx.width, ctx.width), dim=1)
    return first - second, 2 * second


def build_swapped():
    op = _operator(
        "swapped", swapped_kernel, "(Tensor x, Tensor y) -> Tensor", swapped_fake, swapped_backward, swapped_save
    )
    reference = lambda x, y: torch.cat((x.t(), (y + y - x).t()), 0)  # noqa: E731
    return {"op": op, "args": (tensor("m n", FLOATING), tensor("m n", FLOATING)), "reference": reference}


# ---- segments: sums by a sorted index ----


def segments_kernel(x, index, count):
    result = torch.zeros(count, x.shape[1], dtype=x.dtype)
    for row in range(x.shape[0]):
        result[index[row]] += x[row]
    return result


def segments_fake(x, index, count):
    return x.new_empty(count, x.shape[1])


def segments_save(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def segments_backward(ctx, grad):
    (index,) = ctx.saved_tensors
    return grad[index], None, None


def build_segments():
    op = _operator(
        "segments", segments_kernel, "(Tensor x, Tensor index, int count) -> Tensor", segments_fake, segments_backward,
        segments_save,
    )  # fmt: skip

    def reference(x, index, count):
        return x.new_zeros(count, x.shape[1]).index_add(0, index, x)

    return {
        "op": op,
        "args": (tensor("n d", FLOATING), tensor("n", torch.int64, low=0, high=4), 5),
        "reference": reference,
    }
