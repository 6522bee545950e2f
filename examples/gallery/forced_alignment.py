"""Forced alignment by CTC: the most probable frame-by-frame path that spells a target, by Viterbi's algorithm.

The path goes through ``blank, target[0], blank, target[1], ..., blank``; each frame stays, moves on by one, or skips a blank
between two different tokens (Kurzinger et al., https://arxiv.org/abs/2007.09127). It says when each token is spoken, for
subtitles and training data. In torch each frame takes a dozen small operators::

    python examples/gallery/forced_alignment.py
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::forced_alignment")
def forced_alignment(
    scores: Float[Tensor, "batch frames vocab"], targets: Int64[Tensor, "batch n"]
) -> tuple[Int64[Tensor, "batch frames"], Float[Tensor, "batch"]]:
    """Return the place of each frame's token in the target, -1 for a blank, and the score of the path.

    Args:
        scores: log probabilities; token 0 is the blank.
        targets: tokens above 0.

    Of equal scores, a path that stays is preferred, then one that moves by one. A path that does not fit has a score of -1e30
    or less.
    """
    scores = scores.detach()
    batch, frames, vocab = scores.shape
    n = targets.shape[1]
    if frames == 0 or vocab == 0:
        raise ValueError("gallery::forced_alignment: at least one frame and one token are expected.")
    state = torch.arange(2 * n + 1, device=scores.device)
    token = torch.zeros(batch, 2 * n + 1, dtype=torch.int64, device=scores.device)
    token[:, 1::2] = targets
    skips = torch.zeros_like(token, dtype=torch.bool)
    skips[:, 3::2] = targets[:, 1:] != targets[:, :-1]
    emitted = scores.gather(2, token.unsqueeze(1).expand(-1, frames, -1))
    best = torch.where(state < 2, emitted[:, 0], -1e30)
    moves = []
    for t in range(1, frames):
        one = torch.nn.functional.pad(best, (1, 0), value=-1e30)[:, :-1]
        two = torch.where(skips, torch.nn.functional.pad(best, (2, 0), value=-1e30)[:, :-2], -1e30)
        best, move = torch.stack((best, one, two)).max(0)
        best = best + emitted[:, t]
        moves.append(move)
    at = torch.where((best[:, -2:-1] > best[:, -1:]), 2 * n - 1, 2 * n) if n else token[:, :1]
    score = best.gather(1, at).squeeze(1)
    path = [at]
    for move in reversed(moves):
        at = at - move.gather(1, at)
        path.append(at)
    states = torch.cat(path[::-1], 1)
    return torch.where(states % 2 == 1, states // 2, -1), score


forced_alignment.register_fake(
    lambda scores, targets: (targets.new_empty(scores.shape[:2]), scores.new_empty(scores.shape[0]))
)

SOURCE = """
static void one(const T* scores, const int64_t* targets, int64_t* path, T* score, T* best, unsigned char* moves,
                int64_t frames, int64_t vocab, int64_t n) {
    const int64_t states = 2 * n + 1;
    for (int64_t s = 0; s < states; s++) best[s] = s > 1 ? (T)-1e30 : scores[s == 1 ? targets[0] : 0];
    for (int64_t t = 1; t < frames; t++)
        for (int64_t s = states - 1; s >= 0; s--) {
            T most = best[s];
            unsigned char move = 0;
            if (s > 0 && best[s - 1] > most) most = best[s - 1], move = 1;
            if (s > 2 && s % 2 && targets[s / 2] != targets[s / 2 - 1] && best[s - 2] > most) most = best[s - 2], move = 2;
            best[s] = most + scores[t * vocab + (s % 2 ? targets[s / 2] : 0)];
            moves[t * states + s] = move;
        }
    int64_t at = n > 0 && best[states - 2] > best[states - 1] ? states - 2 : states - 1;
    *score = best[at];
    for (int64_t t = frames - 1; t >= 0; t--) {
        path[t] = at % 2 ? at / 2 : -1;
        at -= t > 0 ? moves[t * states + at] : 0;
    }
}

void forced_alignment(const T* scores, const int64_t* targets, int64_t* out0, T* out1, int64_t batch, int64_t frames,
                      int64_t vocab, int64_t n) {
    if (frames == 0 || vocab == 0) {
        opk_fail("at least one frame and one token are expected");
        return;
    }
    for (int64_t i = 0; i < batch * n; i++)
        if (targets[i] < 0 || targets[i] >= vocab) {
            opk_fail("there is a target %lld, and 0 to %lld are expected", (long long)targets[i], (long long)vocab - 1);
            return;
        }
    #pragma omp parallel if (batch > 1)
    {
        T* best = (T*)malloc((2 * n + 1) * sizeof(T));
        unsigned char* moves = (unsigned char*)malloc(frames * (2 * n + 1));
        #pragma omp for
        for (int64_t i = 0; i < batch; i++)
            one(scores + i * frames * vocab, targets + i * n, out0 + i * frames, out1 + i, best, moves, frames, vocab, n);
        free(best);
        free(moves);
    }
}
"""
forced_alignment.register_kernel("cpu", opkit.c_kernel(SOURCE))

_FILLS = ("normal", "distinct")
OPKIT_CHECKS = {
    "gallery::forced_alignment": {
        "args": (
            tensor("batch frames vocab", (torch.float32, torch.float64), differentiable=False, fills=_FILLS),
            tensor("batch n", torch.int64, low=0, high="vocab-1"),
        )
    }
}
SIZES = [(1, 500, 60), (8, 200, 30)]


def arguments(batch: int, frames: int, n: int) -> tuple[Tensor, Tensor]:
    """Return log probabilities of 32 tokens, and targets of ``n``."""
    return torch.randn(batch, frames, 32).log_softmax(-1), torch.randint(1, 32, (batch, n))


def alternative(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: a loop over frames."""
    return forced_alignment.reference(scores, targets)


def main() -> None:
    """Align "aab" with six frames that spell it, and compare with the reference."""
    spoken = torch.nn.functional.one_hot(torch.tensor([[1, 0, 1, 1, 2, 0]]), 3).double().log().clamp(min=-9)
    places, score = forced_alignment(spoken, torch.tensor([[1, 1, 2]]))
    assert places.tolist() == [[0, -1, 1, 1, 2, -1]]
    assert score.item() == 0
    scores, targets = arguments(3, 40, 8)
    torch.testing.assert_close(forced_alignment(scores, targets), alternative(scores, targets))


if __name__ == "__main__":
    main()
