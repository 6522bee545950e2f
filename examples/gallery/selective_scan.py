"""Selective scan, the recurrence of Mamba: a state of ``n`` numbers for each channel, whose decay depends on the input.

``h[t] = exp(delta[t] * a) * h[t-1] + delta[t] * b[t] * x[t]`` and ``y[t] = <c[t], h[t]>`` (Gu and Dao,
https://arxiv.org/abs/2312.00752). ``h`` has ``d * n`` numbers at each time, which torch writes to memory; the kernel goes
through time with 16 channels, whose states stay in the cache. The gradient computes these again, and goes backwards in time::

    python examples/gallery/selective_scan.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor

Channels = Float[Tensor, "batch time d"]
States = Float[Tensor, "batch time n"]
Decay = Float[Tensor, "d n"]


@opkit.custom_op("gallery::selective_scan")
def selective_scan(x: Channels, delta: Channels, a: Decay, b: States, c: States) -> Channels:
    """Return ``y``; ``a`` is not above 0, and ``delta`` not below."""
    h = x.new_zeros(x.shape[0], *a.shape)
    y = []
    for t in range(x.shape[1]):
        step = delta[:, t].unsqueeze(-1)
        h = (step * a).exp() * h + step * x[:, t].unsqueeze(-1) * b[:, t].unsqueeze(1)
        y.append((h * c[:, t].unsqueeze(1)).sum(-1))
    return torch.stack(y, 1) if y else torch.zeros_like(x, memory_format=torch.contiguous_format)


selective_scan.register_fake(lambda x, delta, a, b, c: x.new_empty(x.shape))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradient(ctx, grad):
    return selective_scan_backward(grad, *ctx.saved_tensors)


@opkit.custom_op("gallery::selective_scan_backward")
def selective_scan_backward(
    grad: Channels, x: Channels, delta: Channels, a: Decay, b: States, c: States
) -> tuple[Channels, Channels, Decay, States, States]:
    """Return the gradients of all arguments from that of ``y``."""
    inputs = [each.detach().requires_grad_() for each in (x, delta, a, b, c)]
    with torch.enable_grad():
        y = selective_scan.reference(*inputs)
    if not y.requires_grad:
        return tuple(torch.zeros_like(each, memory_format=torch.contiguous_format) for each in inputs)
    return tuple(each.contiguous() for each in torch.autograd.grad(y, inputs, grad))


selective_scan_backward.register_fake(
    lambda grad, x, delta, a, b, c: tuple(each.new_empty(each.shape) for each in (x, delta, a, b, c))
)
selective_scan.register_autograd(_gradient, setup_context=_save)

# exp is a polynomial without a call here, so that loops over channels are vectorised.
COMMON = """
enum { WIDE = 16 };

#if T_is_float32
static inline float exponential(float x) {
    const float scaled = x * 1.44269504f, power = scaled < -126 ? -126 : scaled > 127 ? 127 : scaled;
    const float whole = floorf(power + 0.5f), part = power - whole;
    const float y = 1 + part * (0.69314718f + part * (0.24022651f + part * (0.05550411f + part * (0.009618129f +
                    part * (0.0013333558f + part * 0.00015403530f)))));
    union { int32_t bits; float value; } scale = {((int32_t)whole + 127) << 23};
    return y * scale.value;
}
#else
static inline double exponential(double x) { return exp(x); }
#endif

static void load(T* to, const T* x, int64_t count) { for (int j = 0; j < WIDE; j++) to[j] = j < count ? x[j] : 0; }

static void load_decay(T* to, const T* a, int64_t count, int64_t n) {
    for (int64_t k = 0; k < n; k++)
        for (int j = 0; j < WIDE; j++) to[k * WIDE + j] = j < count ? a[j * n + k] : 0;
}

static void advance(T* h, const T* before, const T* x, const T* delta, const T* a, const T* b, int64_t n) {
    for (int64_t k = 0; k < n; k++)
        for (int j = 0; j < WIDE; j++) {
            const int64_t at = k * WIDE + j;
            h[at] = exponential(delta[j] * a[at]) * before[at] + delta[j] * x[j] * b[k];
        }
}
"""
FORWARD = """
static void channels(const T* x, const T* delta, const T* a, const T* b, const T* c, T* out, int64_t time, int64_t d,
                     int64_t n, int64_t count, T* work) {
    T *decay = work, *h = work + n * WIDE, x_now[WIDE], delta_now[WIDE];
    load_decay(decay, a, count, n);
    memset(h, 0, n * WIDE * sizeof(T));
    for (int64_t t = 0; t < time; t++) {
        T y[WIDE] = {0};
        load(x_now, x + t * d, count);
        load(delta_now, delta + t * d, count);
        advance(h, h, x_now, delta_now, decay, b + t * n, n);
        for (int64_t k = 0; k < n; k++)
            for (int j = 0; j < WIDE; j++) y[j] += h[k * WIDE + j] * c[t * n + k];
        for (int j = 0; j < count; j++) out[t * d + j] = y[j];
    }
}

void selective_scan(const T* x, const T* delta, const T* a, const T* b, const T* c, T* out, int64_t batch, int64_t time,
                    int64_t d, int64_t n) {
    #pragma omp parallel if (batch * time * d * n > 1 << 14)
    {
        T* work = (T*)malloc((2 * n * WIDE + 1) * sizeof(T));
        #pragma omp for collapse(2)
        for (int64_t i = 0; i < batch; i++)
            for (int64_t first = 0; first < d; first += WIDE) {
                const int64_t at = i * time * d + first, state = i * time * n, count = d - first < WIDE ? d - first : WIDE;
                channels(x + at, delta + at, a + first * n, b + state, c + state, out + at, time, d, n, count, work);
            }
        free(work);
    }
}
"""
BACKWARD = """
static void channels(const T* grad, const T* x, const T* delta, const T* a, const T* b, const T* c, T* grad_x,
                     T* grad_delta, T* grad_a, T* grad_b, T* grad_c, int64_t time, int64_t d, int64_t n, int64_t count,
                     T* work) {
    const int64_t all = n * WIDE;
    T *decay = work, *grad_decay = work + all, *grad_h = work + 2 * all, *h = work + 3 * all; /* h: of each time, from 0 */
    T x_now[WIDE], delta_now[WIDE], grad_now[WIDE];
    load_decay(decay, a, count, n);
    memset(grad_decay, 0, 3 * all * sizeof(T)); /* and grad_h, and the state before the first step */
    for (int64_t t = 0; t < time; t++) {
        load(x_now, x + t * d, count);
        load(delta_now, delta + t * d, count);
        advance(h + (t + 1) * all, h + t * all, x_now, delta_now, decay, b + t * n, n);
    }
    for (int64_t t = time - 1; t >= 0; t--) {
        T to_x[WIDE] = {0}, to_delta[WIDE] = {0};
        load(x_now, x + t * d, count);
        load(delta_now, delta + t * d, count);
        load(grad_now, grad + t * d, count);
        for (int64_t k = 0; k < n; k++) {
            const T b_now = b[t * n + k], c_now = c[t * n + k];
            T to_b = 0, to_c = 0;
            #pragma omp simd reduction(+ : to_b, to_c)
            for (int j = 0; j < WIDE; j++) {
                const int64_t at = k * WIDE + j;
                const T flow = grad_h[at] + c_now * grad_now[j], kept = exponential(delta_now[j] * decay[at]);
                const T to_power = flow * kept * h[t * all + at];
                to_c += grad_now[j] * h[(t + 1) * all + at];
                to_b += flow * delta_now[j] * x_now[j];
                to_x[j] += flow * delta_now[j] * b_now;
                to_delta[j] += to_power * decay[at] + flow * x_now[j] * b_now;
                grad_decay[at] += to_power * delta_now[j];
                grad_h[at] = flow * kept;
            }
            grad_b[t * n + k] += to_b;
            grad_c[t * n + k] += to_c;
        }
        for (int j = 0; j < count; j++) grad_x[t * d + j] = to_x[j], grad_delta[t * d + j] = to_delta[j];
    }
    for (int j = 0; j < count; j++)
        for (int64_t k = 0; k < n; k++) grad_a[j * n + k] += grad_decay[k * WIDE + j];
}

void selective_scan_backward(const T* grad, const T* x, const T* delta, const T* a, const T* b, const T* c, T* out0, T* out1,
                             T* out2, T* out3, T* out4, int64_t batch, int64_t time, int64_t d, int64_t n) {
    T* work = (T*)malloc(((time + 4) * n * WIDE + 1) * sizeof(T));
    memset(out2, 0, d * n * sizeof(T));
    memset(out3, 0, batch * time * n * sizeof(T));
    memset(out4, 0, batch * time * n * sizeof(T));
    for (int64_t i = 0; i < batch; i++)
        for (int64_t first = 0; first < d; first += WIDE) { /* all add to the gradients of b and c: on one thread */
            const int64_t at = i * time * d + first, state = i * time * n, count = d - first < WIDE ? d - first : WIDE;
            channels(grad + at, x + at, delta + at, a + first * n, b + state, c + state, out0 + at, out1 + at,
                     out2 + first * n, out3 + state, out4 + state, time, d, n, count, work);
        }
    free(work);
}
"""
_FLAGS = ["-fno-trapping-math"]  # else GCC vectorises no floorf
selective_scan.register_kernel("cpu", opkit.c_kernel(COMMON + FORWARD, flags=_FLAGS))
selective_scan_backward.register_kernel("cpu", opkit.c_kernel(COMMON + BACKWARD, flags=_FLAGS))


# A program goes through time with some channels of one sequence, whose states stay in registers, and computes in float32.
# Elements of later steps are fetched meanwhile, which needs at least 4 bytes for each of the 32 threads.
@triton.jit
def _selective_scan(x, delta, a, b, c, out, time, d, n, CHANNELS: tl.constexpr, STATES: tl.constexpr):
    channel, state = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)
    inside, used = channel < d, state < n
    every = inside[:, None] & used[None, :]
    decay = tl.load(a + channel[:, None] * n + state[None, :], every, other=0.0).to(tl.float32)
    sequence = tl.program_id(0).to(tl.int64) * time
    at, at_state = sequence * d + channel, sequence * n + state
    h = tl.zeros([CHANNELS, STATES], tl.float32)
    for _ in tl.range(time, num_stages=8):
        step = tl.load(delta + at, inside, other=0.0).to(tl.float32)
        added = step * tl.load(x + at, inside, other=0.0).to(tl.float32)
        b_now = tl.load(b + at_state, used, other=0.0).to(tl.float32)
        c_now = tl.load(c + at_state, used, other=0.0).to(tl.float32)
        h = tl.exp(step[:, None] * decay) * h + added[:, None] * b_now[None, :]
        y = tl.sum(tl.where(used[None, :], h * c_now[None, :], 0.0), 1)  # 0 * infinity is NaN
        tl.store(out + at, y, inside)
        at += d
        at_state += n


TRITON = opkit.triton_kernel(
    _selective_scan,
    grid=lambda batch, d, CHANNELS: (batch, triton.cdiv(d, CHANNELS)),
    CHANNELS=lambda x: 32 if x.dtype == "float32" else 64,
    STATES=lambda n: max(triton.next_power_of_2(n), 1),
    num_warps=lambda STATES: min(max(STATES // 16, 1), 8),
    examples=[
        {
            **dict.fromkeys(("x", "delta"), "bf16[8, 4096, 5120]"),
            "a": "bf16[5120, 16]",
            **dict.fromkeys(("b", "c"), "bf16[8, 4096, 16]"),
        }
    ],
)
selective_scan.register_kernel(
    "cuda", TRITON, when=lambda a: a.shape[1] <= 128, dtypes=[torch.float32, torch.bfloat16, torch.float16]
)

_DTYPES, _NUMBERS = (torch.float32, torch.float64), ("normal", "integers", "ones")
_CHANNELS, _STATES = (
    tensor(f"batch time {size}", _DTYPES, fills=_NUMBERS, largest=33)  # the reference is a loop over time
    for size in ("d", "n")
)
_STEP = tensor("batch time d", _DTYPES, low=0, high=1, fills=("normal", "positive"))
_DECAY = tensor("d n", _DTYPES, low=-3, high=0, fills=("normal", "integers"))
OPKIT_CHECKS = {
    "gallery::selective_scan": {"args": (_CHANNELS, _STEP, _DECAY, _STATES, _STATES)},
    "gallery::selective_scan_backward": {"args": (_CHANNELS, _CHANNELS, _STEP, _DECAY, _STATES, _STATES)},
}
SIZES = [(1, 512, 256), (2, 256, 1024)]
GPU_SIZES = [(8, 2048, 2048), (1, 4096, 5120)]


def arguments(batch: int, time: int, d: int) -> tuple[Tensor, ...]:
    """Return inputs of a layer of Mamba, with states of 16 numbers."""
    delta = torch.nn.functional.softplus(torch.randn(batch, time, d) - 2)
    a = -torch.arange(1.0, 17).expand(d, 16).contiguous()
    return torch.randn(batch, time, d), delta, a, torch.randn(batch, time, 16), torch.randn(batch, time, 16)


def alternative(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A loop over time in torch, with all factors computed before it, as Mamba's own reference."""
    decay = (delta.unsqueeze(-1) * a).exp()
    added = (delta * x).unsqueeze(-1) * b.unsqueeze(2)
    h, states = torch.zeros_like(added[:, 0]), []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + added[:, t]
        states.append(h)
    return torch.einsum("btdn,btn->btd", torch.stack(states, 1), c)


def main() -> None:
    """Compare with the loop, gradients too."""
    inputs = [each.requires_grad_() for each in arguments(2, 20, 37)]
    results = selective_scan(*inputs), alternative(*inputs)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    ours, expected = (torch.autograd.grad(each.square().sum(), inputs) for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
