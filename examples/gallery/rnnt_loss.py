"""Transducer loss (RNN-T): minus the log probability of a target sequence, summed over all its alignments with the frames.

From frame ``t`` with ``u`` tokens emitted, the model emits a blank, which moves to frame ``t + 1``, or the next token. With
the log probabilities of both, ``alpha[t, u] = logaddexp(alpha[t-1, u] + blank[t-1, u], alpha[t, u-1] + emit[t, u-1])``
(Graves, https://arxiv.org/abs/1211.3711). The operators take the two log probabilities, ``(frames, tokens + 1)`` each, and
not the whole vocabulary, which ``log_softmax`` and ``gather`` reduce before. The reference goes along antidiagonals; the
kernel along rows. The gradient needs the probabilities from the end as well, and has an operator and a kernel of its own::

    python examples/gallery/rnnt_loss.py
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor

LogProbabilities = Float[Tensor, "batch frames tokens"]
Lengths = Int64[Tensor, "batch"]
_NEVER = -1e30  # instead of -inf, of which logaddexp has no gradient


def _clamped(blank: Tensor, frame_len: Tensor, token_len: Tensor) -> tuple[Tensor, Tensor]:
    _, frames, tokens = blank.shape
    if frames == 0 or tokens == 0:
        raise ValueError("gallery::rnnt_loss: at least one frame, and the place before the first token, are expected.")
    return frame_len.clamp(1, frames) - 1, token_len.clamp(0, tokens - 1)


@opkit.custom_op("gallery::rnnt_loss")
def rnnt_loss(
    blank: LogProbabilities, emit: LogProbabilities, frame_len: Lengths, token_len: Lengths
) -> Float[Tensor, "batch"]:
    """Return the loss of each sequence.

    Args:
        blank: log probabilities of the blank, at each frame and number of emitted tokens; ``tokens`` is 1 more than the length
            of the longest target.
        emit: log probabilities of the next token, likewise; those after all tokens do not count.
        frame_len: numbers of frames; those out of ``1 .. frames`` count as the nearest.
        token_len: lengths of targets; those out of ``0 .. tokens - 1`` count as the nearest.
    """
    last_frame, last_token = _clamped(blank, frame_len, token_len)
    batch, frames, tokens = blank.shape
    u = torch.arange(tokens, device=blank.device)
    alpha = torch.where(u == 0, 0.0, _NEVER).to(blank.dtype).expand(batch, tokens)
    diagonals = [alpha]
    for k in range(1, frames + tokens - 1):
        moved = alpha + blank[:, (k - 1 - u).clamp(0, frames - 1), u]
        emitted = (alpha + emit[:, (k - 1 - u).clamp(0, frames - 1), u])[:, :-1]
        emitted = torch.nn.functional.pad(emitted, (1, 0), value=_NEVER)
        inside = (u <= k) & (k - u < frames)
        alpha = torch.where(inside, torch.logaddexp(moved, emitted), _NEVER)
        diagonals.append(alpha)
    after = (
        torch.stack(diagonals, 1).flatten(1).gather(1, ((last_frame + last_token) * tokens + last_token).unsqueeze(1))
    )
    end = blank.flatten(1).gather(1, (last_frame * tokens + last_token).unsqueeze(1))
    return -(after + end).squeeze(1)


@opkit.custom_op("gallery::rnnt_loss_backward")
def rnnt_loss_backward(
    grad: Float[Tensor, "batch"],
    blank: LogProbabilities,
    emit: LogProbabilities,
    frame_len: Lengths,
    token_len: Lengths,
) -> tuple[LogProbabilities, LogProbabilities]:
    """Return the gradients of ``blank`` and ``emit`` from that of the loss."""
    with torch.enable_grad():
        blank, emit = blank.detach().requires_grad_(), emit.detach().requires_grad_()
        loss = rnnt_loss.reference(blank, emit, frame_len, token_len)
    found = torch.autograd.grad(loss, (blank, emit), grad, allow_unused=True, materialize_grads=True)
    return found[0].contiguous(), found[1].contiguous()


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradient(ctx, grad):
    return *rnnt_loss_backward(grad, *ctx.saved_tensors), None, None


rnnt_loss.register_fake(lambda blank, emit, frame_len, token_len: blank.new_empty(blank.shape[0]))
rnnt_loss_backward.register_fake(
    lambda grad, blank, emit, frame_len, token_len: (blank.new_empty(blank.shape), emit.new_empty(emit.shape))
)
rnnt_loss.register_autograd(_gradient, setup_context=_save)

COMMON = """
static T logaddexp(T a, T b) {
    const T most = a > b ? a : b, least = a > b ? b : a;
    if (sizeof(T) == sizeof(float)) return least == -INFINITY ? most : most + log1pf(expf(least - most));
    return least == -INFINITY ? most : most + log1p(exp(least - most));
}

static int64_t clamped(int64_t x, int64_t low, int64_t high) { return x < low ? low : x < high ? x : high; }

static void forward(const T* blank, const T* emit, T* alpha, int64_t frames, int64_t tokens, int64_t width) {
    for (int64_t t = 0; t < frames; t++)
        for (int64_t u = 0; u < tokens; u++) {
            const int64_t at = t * width + u;
            const T moved = t > 0 ? alpha[at - width] + blank[at - width] : u > 0 ? -INFINITY : 0;
            alpha[at] = u > 0 ? logaddexp(moved, alpha[at - 1] + emit[at - 1]) : moved;
        }
}
"""
FORWARD = """
void rnnt_loss(const T* blank, const T* emit, const int64_t* frame_len, const int64_t* token_len, T* out,
               int64_t batch, int64_t frames, int64_t tokens) {
    if (frames == 0 || tokens == 0) {
        opk_fail("at least one frame, and the place before the first token, are expected");
        return;
    }
    #pragma omp parallel if (batch > 1)
    {
        T* alpha = (T*)malloc(frames * tokens * sizeof(T));
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < batch; i++) {
            const int64_t t = clamped(frame_len[i], 1, frames) - 1, u = clamped(token_len[i], 0, tokens - 1);
            const int64_t first = i * frames * tokens, last = t * tokens + u;
            forward(blank + first, emit + first, alpha, t + 1, u + 1, tokens);
            out[i] = -(alpha[last] + blank[first + last]);
        }
        free(alpha);
    }
}
"""
BACKWARD = """
static T probability(T x) { return sizeof(T) == sizeof(float) ? expf(x) : exp(x); }

static void one(T grad, const T* blank, const T* emit, T* grad_blank, T* grad_emit, T* alpha, T* beta, int64_t frames,
                int64_t tokens, int64_t width) {
    forward(blank, emit, alpha, frames, tokens, width);
    const T total = alpha[(frames - 1) * width + tokens - 1] + blank[(frames - 1) * width + tokens - 1];
    for (int64_t t = frames - 1; t >= 0; t--) /* beta[u] is of the frame after t until it is set */
        for (int64_t u = tokens - 1; u >= 0; u--) {
            const int64_t at = t * width + u;
            const T next = t < frames - 1 ? beta[u] : u < tokens - 1 ? -INFINITY : 0;
            if (t < frames - 1 || u == tokens - 1) /* else no alignment has it, whatever grad is */
                grad_blank[at] = -grad * probability(alpha[at] + blank[at] + next - total);
            beta[u] = blank[at] + next;
            if (u == tokens - 1) continue;
            grad_emit[at] = -grad * probability(alpha[at] + emit[at] + beta[u + 1] - total);
            beta[u] = logaddexp(beta[u], emit[at] + beta[u + 1]);
        }
}

void rnnt_loss_backward(const T* grad, const T* blank, const T* emit, const int64_t* frame_len, const int64_t* token_len,
                        T* out0, T* out1, int64_t batch, int64_t frames, int64_t tokens) {
    const int64_t each = frames * tokens;
    if (each == 0) {
        opk_fail("at least one frame, and the place before the first token, are expected");
        return;
    }
    memset(out0, 0, batch * each * sizeof(T));
    memset(out1, 0, batch * each * sizeof(T));
    #pragma omp parallel if (batch > 1)
    {
        T* alpha = (T*)malloc((each + tokens) * sizeof(T));
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < batch; i++)
            one(grad[i], blank + i * each, emit + i * each, out0 + i * each, out1 + i * each, alpha, alpha + each,
                clamped(frame_len[i], 1, frames), clamped(token_len[i], 0, tokens - 1) + 1, tokens);
        free(alpha);
    }
}
"""
rnnt_loss.register_kernel("cpu", opkit.c_kernel(COMMON + FORWARD))
rnnt_loss_backward.register_kernel("cpu", opkit.c_kernel(COMMON + BACKWARD))

_DTYPES, _NUMBERS = (torch.float32, torch.float64), ("normal", "integers", "ones")
_LOGS = tensor(
    "batch frames tokens", _DTYPES, low=-9, high=0, fills=_NUMBERS, largest=17
)  # the reference is a loop over frames + tokens
_LENGTHS = tensor("batch", torch.int64, low=0, high=12)
OPKIT_CHECKS = {
    "gallery::rnnt_loss": {"args": (_LOGS, _LOGS, _LENGTHS, _LENGTHS)},
    "gallery::rnnt_loss_backward": {"args": (tensor("batch", _DTYPES), _LOGS, _LOGS, _LENGTHS, _LENGTHS)},
}
SIZES = [(4, 200, 50), (16, 100, 20)]


def arguments(batch: int, frames: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log probabilities, with targets up to ``tokens - 1`` long."""
    logits = torch.randn(3, batch, frames, tokens).log_softmax(0)
    frame_len, token_len = torch.randint(frames // 2, frames + 1, (batch,)), torch.randint(1, tokens, (batch,))
    return logits[0].contiguous(), logits[1].contiguous(), frame_len, token_len


def alternative(blank: Tensor, emit: Tensor, frame_len: Tensor, token_len: Tensor) -> Tensor:
    """The reference: a loop over antidiagonals."""
    return rnnt_loss.reference(blank, emit, frame_len, token_len)


def main() -> None:
    """Compare with the sum over all alignments of two frames and one token, and gradients with the reference's."""
    blank, emit = (torch.rand(1, 2, 2).log().requires_grad_() for _ in range(2))
    loss = rnnt_loss(blank, emit, torch.tensor([2]), torch.tensor([1]))
    b, e = blank[0].exp(), emit[0].exp()
    alignments = e[0, 0] * b[0, 1] * b[1, 1] + b[0, 0] * e[1, 0] * b[1, 1]
    torch.testing.assert_close(loss[0], -alignments.log())
    arguments_ = [each.requires_grad_() if each.is_floating_point() else each for each in arguments(3, 12, 5)]
    losses = rnnt_loss(*arguments_), alternative(*arguments_)
    ours, expected = (torch.autograd.grad(each.sum(), arguments_[:2]) for each in losses)
    torch.testing.assert_close(ours, expected)


if __name__ == "__main__":
    main()
