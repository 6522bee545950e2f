"""Sampling of tokens among the ``k`` most probable ones that make up probability ``p`` (nucleus sampling).

Of each row of logits, tokens in the order of falling probability are taken until their sum reaches ``p``, at most ``k``, and
one is drawn in proportion (Holtzman et al., https://arxiv.org/abs/1904.09751). The random numbers are an argument, so that a
draw can be repeated. torch sorts the vocabulary; the kernel sorts only the tokens near the largest logit::

    python examples/gallery/top_p_sample.py
"""

import torch
from hypothesis import strategies as st
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::top_p_sample")
def top_p_sample(
    logits: Float[Tensor, "*batch vocab"], uniform: Float[Tensor, "*batch"], p: float = 0.9, k: int = 50
) -> Int64[Tensor, "*batch"]:
    """Return a token for each row.

    Args:
        logits: finite numbers or -inf, which is never drawn next to finite ones.
        uniform: numbers in ``[0, 1)``.
        p: the probability that the tokens make up; the most probable one is always among them.
        k: the largest number of tokens, at least 1.
    """
    if logits.shape[-1] == 0 or k < 1:
        raise ValueError("gallery::top_p_sample: at least one token and k >= 1 are expected.")
    value, index = logits.sort(dim=-1, descending=True, stable=True)
    probability = value.softmax(-1)
    before = probability.cumsum(-1) - probability
    kept = torch.where(before < p, probability, 0)[..., :k]
    total = kept.cumsum(-1)
    passed = (total <= uniform.unsqueeze(-1) * total[..., -1:]).sum(-1, keepdim=True)
    last = (kept > 0).sum(-1, keepdim=True) - 1
    return index.gather(-1, torch.minimum(passed, last).clamp(min=0)).squeeze(-1)


@top_p_sample.register_fake
def _(logits, uniform, p=0.9, k=50):
    return torch.empty(uniform.shape, dtype=torch.int64, device=logits.device)


SOURCE = """
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

struct Token { T logit; int64_t index; };

static bool before(const Token& a, const Token& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.index < b.index);
}

// To a few units in the last place, for x <= 0, without a call, so that loops are vectorised: 2 ** whole * 2 ** part.
static inline float exponential(float x) {
    const float scaled = x * 1.44269504f, power = scaled < -126 ? -126 : scaled;
    const float whole = std::floor(power + 0.5f), part = power - whole;
    const float y = 1 + part * (0.69314718f + part * (0.24022651f + part * (0.05550411f + part * (0.009618129f +
                    part * (0.0013333558f + part * 0.00015403530f)))));
    const int32_t bits = ((int32_t)whole + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return y * scale;
}

static inline double exponential(double x) { return std::exp(x); }

enum { WIDE = 32 };

static T most_of(const T* x, int64_t n) {
    T most[WIDE], found = x[0];
    for (int j = 0; j < WIDE; j++) most[j] = x[0];
    for (int64_t i = 0; i + WIDE <= n; i += WIDE)
        for (int j = 0; j < WIDE; j++) most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
    for (int j = 0; j < WIDE; j++) found = most[j] > found ? most[j] : found;
    for (int64_t i = n - n % WIDE; i < n; i++) found = x[i] > found ? x[i] : found;
    return found;
}

static double sum_of_exponentials(const T* x, int64_t n, T shift) {
    T sums[WIDE] = {0};
    double total = 0;
    for (int64_t i = 0; i < n; i += WIDE) {
        T part[WIDE];
        for (int j = 0; j < WIDE; j++) part[j] = i + j < n ? x[i + j] : (T)-INFINITY;
        for (int j = 0; j < WIDE; j++) sums[j] += exponential(part[j] - shift);
    }
    for (T sum : sums) total += sum;
    return total;
}

static int64_t draw(const T* logits, int64_t vocab, double uniform, double p, int64_t k, std::vector<Token>& tokens) {
    const T largest = most_of(logits, vocab);
    const double total = sum_of_exponentials(logits, vocab, largest);
    double kept = 0;
    for (double depth = 2;; depth *= 2) {  // most often, few tokens are within depth of the largest logit, and enough
        tokens.clear();
        const T least = largest - (T)depth;
        for (int64_t first = 0; first < vocab; first += WIDE) {
            const int64_t end = std::min<int64_t>(first + WIDE, vocab);
            int found = 0;
            for (int64_t i = first; i < end; i++) found |= logits[i] > least;
            for (int64_t i = first; found && i < end; i++)
                if (logits[i] > least) tokens.push_back({logits[i], i});
        }
        kept = 0;
        for (const Token& token : tokens) kept += exponential(token.logit - largest);
        if (kept >= p * total || (int64_t)tokens.size() >= k || depth > 1000) break;
    }
    const int64_t limit = std::min<int64_t>(tokens.size(), k);
    std::partial_sort(tokens.begin(), tokens.begin() + limit, tokens.end(), before);
    int64_t count = 0;
    for (kept = 0; count < limit && (count == 0 || kept < p * total); count++) kept += exponential(tokens[count].logit - largest);
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        if ((sum += exponential(tokens[i].logit - largest)) > uniform * kept) return tokens[i].index;
    return count > 0 ? tokens[count - 1].index : 0;
}

extern "C" void top_p_sample(const T* logits, const T* uniform, double p, int64_t k, int64_t* out, int64_t batch,
                             int64_t vocab) {
    if (vocab == 0 || k < 1) {
        opk_fail("at least one token and k >= 1 are expected");
        return;
    }
    #pragma omp parallel
    {
        std::vector<Token> tokens;
        #pragma omp for
        for (int64_t i = 0; i < batch; i++) out[i] = draw(logits + i * vocab, vocab, uniform[i], p, k, tokens);
    }
}
"""
top_p_sample.register_kernel(
    "cpu", opkit.cpp_kernel(SOURCE, flags=["-fno-trapping-math"])
)  # else GCC vectorises no floor

_DTYPES = (torch.float32, torch.float64)
OPKIT_CHECKS = {
    "gallery::top_p_sample": {
        "args": (
            tensor("*batch vocab", _DTYPES, fills=("normal", "integers", "ones", "large", "distinct")),
            tensor("*batch", _DTYPES, low=0, high=0.999),
            st.sampled_from([0.37, 0.83, 1.0]),
            st.integers(1, 40),
        )
    }
}
SIZES = [(1, 128_256), (16, 32_000)]


def arguments(batch: int, vocab: int) -> tuple[Tensor, Tensor, float, int]:
    """Return logits of a language model, about as spread."""
    return 3 * torch.randn(batch, vocab), torch.rand(batch), 0.9, 50


def alternative(logits: Tensor, uniform: Tensor, p: float, k: int) -> Tensor:
    """``topk`` of the logits in place of a whole sort, and the same steps on these."""
    value, index = logits.topk(k)
    probability = (value - logits.logsumexp(-1, keepdim=True)).exp()
    before = probability.cumsum(-1) - probability
    total = torch.where(before < p, probability, 0).cumsum(-1)
    passed = (total <= uniform.unsqueeze(-1) * total[..., -1:]).sum(-1, keepdim=True)
    return index.gather(-1, passed).squeeze(-1)


def main() -> None:
    """Compare with the reference, and count many draws of one row."""
    logits, uniform, p, k = arguments(8, 1000)
    assert torch.equal(top_p_sample(logits, uniform, p, k), top_p_sample.reference(logits, uniform, p, k))
    probability = torch.tensor([0.5, 0.1, 0.3, 0.1])
    drawn = top_p_sample(probability.log().expand(10_000, 4), torch.rand(10_000), 0.75, 4)
    torch.testing.assert_close(
        drawn.bincount(minlength=4) / 10_000, torch.tensor([0.625, 0, 0.375, 0]), atol=0.03, rtol=0
    )


if __name__ == "__main__":
    main()
