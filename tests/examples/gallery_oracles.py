"""What the operators of examples/gallery compute, element by element in Python, for float64 arguments of a few elements.

Each function has the name of an operator and takes its arguments, without leading batch sizes unless it names them.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    d = x.shape[-1]
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(d)] for i in range(d)]
    return x @ torch.tensor(signs, dtype=x.dtype) / math.sqrt(d)


def linear_scan(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros_like(b)
    for i, t, j in np.ndindex(*b.shape):
        out[i, t, j] = b[i, t, j] + (a[i, t, j] * out[i, t - 1, j] if t else 0)
    return out


def edit_distance(a: Tensor, b: Tensor, a_len: Tensor, b_len: Tensor) -> Tensor:
    def distance(x: Sequence[int], y: Sequence[int]) -> int:
        if not x or not y:
            return len(x) + len(y)
        if x[0] == y[0]:
            return distance(x[1:], y[1:])
        return 1 + min(distance(x[1:], y), distance(x, y[1:]), distance(x[1:], y[1:]))

    pairs = zip(a.tolist(), b.tolist(), a_len.tolist(), b_len.tolist(), strict=True)
    return torch.tensor([distance(x[: max(n, 0)], y[: max(m, 0)]) for x, y, n, m in pairs])


def connected_components(mask: Tensor, diagonal: bool = False) -> Tensor:
    h, w = mask.shape
    labels = torch.zeros(h, w, dtype=torch.int64)
    for y, x in np.ndindex(h, w):
        stack = [(y, x)] if mask[y, x] and not labels[y, x] else []
        while stack:
            v, u = stack.pop()
            labels[v, u] = y * w + x + 1
            for dv, du in itertools.product((-1, 0, 1), repeat=2):
                near = 0 <= v + dv < h and 0 <= u + du < w and (diagonal or not dv or not du)
                if near and mask[v + dv, u + du] and not labels[v + dv, u + du]:
                    stack.append((v + dv, u + du))
    return labels


def nms(boxes: Tensor, scores: Tensor, threshold: float = 0.5) -> Tensor:
    kept: list[int] = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i].item()):
        if all(_overlap(boxes[i].tolist(), boxes[j].tolist()) <= threshold for j in kept):
            kept.append(i)
    return torch.tensor([i in kept for i in range(len(scores))], dtype=torch.bool)


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    width, height = (max(0.0, min(a[c + 2], b[c + 2]) - max(a[c], b[c])) for c in (0, 1))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    union = sum(areas) - width * height
    return width * height / union if union else 0.0


def ball_query(centers: Tensor, points: Tensor, radius: float, k: int) -> Tensor:
    rows = []
    for center in centers:
        near = [i for i, point in enumerate(points) if math.dist(center.tolist(), point.tolist()) < radius]
        rows.append((near + [-1] * k)[:k])
    return torch.tensor(rows, dtype=torch.int64).view(len(centers), k)


def chamfer_distance(x: Tensor, y: Tensor) -> Tensor:
    def one_way(a: Tensor, b: Tensor) -> float:
        return sum(min(math.dist(p, q) ** 2 for q in b.tolist()) for p in a.tolist()) / len(a)

    return torch.tensor(one_way(x, y) + one_way(y, x), dtype=x.dtype)


def farthest_points(points: Tensor, k: int) -> Tensor:
    chosen = [0]
    while len(chosen) < k:
        distances = [min(math.dist(p, points[c].tolist()) for c in chosen) for p in points.tolist()]
        chosen.append(distances.index(max(distances)))
    return torch.tensor(chosen[:k], dtype=torch.int64)


def rnnt_loss(blank: Tensor, emit: Tensor, frame_len: Tensor, token_len: Tensor) -> Tensor:
    losses = []
    for i, (frames, tokens) in enumerate(zip(frame_len.tolist(), token_len.tolist(), strict=True)):
        total = 0.0
        for places in itertools.combinations(
            range(frames - 1 + tokens), tokens
        ):  # the steps that emit; the last is blank
            t, u, score = 0, 0, 0.0
            for step in range(frames - 1 + tokens):
                score += (emit if step in places else blank)[i, t, u].item()
                t, u = (t, u + 1) if step in places else (t + 1, u)
            total += math.exp(score + blank[i, t, u].item())
        losses.append(-math.log(total))
    return torch.tensor(losses, dtype=blank.dtype)


def segment_softmax(x: Tensor, segment: Tensor, count: int) -> Tensor:
    out = torch.zeros_like(x)
    for each in range(count):
        out[segment == each] = x[segment == each].softmax(0)
    return out


def top_p_sample(logits: Tensor, uniform: Tensor, p: float, k: int) -> Tensor:
    tokens = []
    for row, u in zip(logits, uniform.tolist(), strict=True):
        probability = row.softmax(0).tolist()
        kept: list[int] = []
        for i in sorted(range(len(probability)), key=lambda i: -probability[i])[:k]:
            if kept and sum(probability[j] for j in kept) >= p:
                break
            kept.append(i)
        left = u * sum(probability[j] for j in kept)
        for i in kept:
            left -= probability[i]
            if left < 0:
                break
        tokens.append(i)
    return torch.tensor(tokens)


def deformable_attention(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    batch, h, w, _, d = value.shape
    out = value.new_zeros(batch, *locations.shape[1:3], d)
    for b, q, head, p in np.ndindex(*weights.shape):
        x, y = locations[b, q, head, p, 0].item() * w - 0.5, locations[b, q, head, p, 1].item() * h - 0.5
        for row, column in np.ndindex(h, w):
            share = max(0, 1 - abs(x - column)) * max(0, 1 - abs(y - row))
            out[b, q, head] += weights[b, q, head, p] * share * value[b, row, column, head]
    return out


def selective_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i, j in np.ndindex(x.shape[0], x.shape[2]):
        h = [0.0] * a.shape[1]
        for t in range(x.shape[1]):
            step, value = delta[i, t, j].item(), x[i, t, j].item()
            h = [math.exp(step * a[j, k]) * h[k] + step * value * b[i, t, k].item() for k in range(len(h))]
            out[i, t, j] = sum(h[k] * c[i, t, k].item() for k in range(len(h)))
    return out


def splat(positions: Tensor, values: Tensor, h: int, w: int) -> Tensor:
    out = values.new_zeros(values.shape[0], h, w, values.shape[2])
    for b, i, row, column in np.ndindex(*values.shape[:2], h, w):
        x, y = positions[b, i].tolist()
        out[b, row, column] += max(0, 1 - abs(x - column)) * max(0, 1 - abs(y - row)) * values[b, i]
    return out


def moe_permute(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    flat = experts.flatten().tolist()
    offsets = [sum(e < each for e in flat) for each in range(count + 1)]
    return torch.tensor(sorted(range(len(flat)), key=lambda i: (flat[i], i)), dtype=torch.int64), torch.tensor(offsets)


def run_length(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, lengths = torch.zeros_like(x), torch.zeros_like(x)
    runs = [(value, len(list(group))) for value, group in itertools.groupby(x.tolist())]
    for i, (value, length) in enumerate(runs):
        values[i], lengths[i] = value, length
    return values, lengths, torch.tensor(len(runs))


def fft_convolution(x: Tensor, filters: Tensor) -> Tensor:
    n = x.shape[-1]
    rows = [np.convolve(row, each)[:n] for row, each in zip(x.numpy(), filters.numpy(), strict=True)]
    return torch.tensor(np.stack(rows))


def int4_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    group = x.shape[-1] // scale.shape[1]
    out = x.new_zeros(*x.shape[:-1], packed.shape[0])
    for o, i in np.ndindex(packed.shape[0], x.shape[-1]):
        number = int(packed[o, i // 2]) >> 4 * (i % 2) & 15
        out[..., o] += x[..., i] * (number - 8) * scale[o, i // group]
    return out


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out = x.new_zeros(*x.shape[:-1], weight.shape[0])
    for o, i in np.ndindex(*weight.shape):
        out[..., o] += x[..., i] * int(weight[o, i]) * scale[o]
    return out


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for e, i in np.ndindex(weight.shape[0], x.shape[0]):
        if offsets[e] <= i < offsets[e + 1]:
            for j, k in np.ndindex(*weight.shape[1:]):
                out[i, k] += x[i, j] * weight[e, j, k]
    return out


def sparsemax(x: Tensor) -> Tensor:
    low, high = x.amax(-1, keepdim=True) - 1, x.amax(-1, keepdim=True)
    for _ in range(200):
        middle = (low + high) / 2
        enough = (x - middle).clamp(min=0).sum(-1, keepdim=True) > 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return (x - low).clamp(min=0)


def _alignments(n: int, m: int) -> Iterator[list[tuple[int, int]]]:
    if (n, m) == (1, 1):
        yield [(0, 0)]
        return
    for di, dj in ((1, 0), (0, 1), (1, 1)):
        if n > di and m > dj:
            for path in _alignments(n - di, m - dj):
                yield [*path, (n - 1, m - 1)]


def soft_dtw(cost: Tensor, gamma: float = 1.0) -> Tensor:
    totals = []
    for each in cost:
        costs = [sum(each[i, j].item() for i, j in path) for path in _alignments(*each.shape)]
        totals.append(-gamma * math.log(sum(math.exp(-c / gamma) for c in costs)))
    return torch.tensor(totals, dtype=cost.dtype)


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    taps = weight.shape[0]
    for i, t, j in np.ndindex(*x.shape):
        y = bias[j].item() + sum(
            (weight[s, j] * x[i, t - taps + 1 + s, j]).item() for s in range(taps) if t - taps + 1 + s >= 0
        )
        out[i, t, j] = y / (1 + math.exp(-y))
    return out


def forced_alignment(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    paths, best = [], []
    for rows, target in zip(scores.tolist(), targets.tolist(), strict=True):
        tokens = [0, *itertools.chain.from_iterable((token, 0) for token in target)]
        found = max(
            (sum(row[tokens[s]] for row, s in zip(rows, states, strict=True)), states)
            for states in itertools.product(range(len(tokens)), repeat=len(rows))
            if _is_path(states, tokens)
        )
        best.append(found[0])
        paths.append([s // 2 if s % 2 else -1 for s in found[1]])
    return torch.tensor(paths), torch.tensor(best, dtype=scores.dtype)


def _is_path(states: Sequence[int], tokens: Sequence[int]) -> bool:
    moves = [(b - a, b) for a, b in itertools.pairwise(states)]
    allowed = (move in (0, 1) or (move == 2 and s % 2 and tokens[s] != tokens[s - 2]) for move, s in moves)
    return states[0] < 2 and states[-1] >= len(tokens) - 2 and all(allowed)


def color_lookup(image: Tensor, table: Tensor) -> Tensor:
    out = image.new_zeros(*image.shape[:-1], table.shape[-1])
    for pixel in np.ndindex(*image.shape[:-1]):
        at = [min(max(image[pixel][c].item(), 0), 1) * (table.shape[c] - 1) for c in range(3)]
        for cell in np.ndindex(*table.shape[:3]):
            share = math.prod(max(0, 1 - abs(a - i)) for a, i in zip(at, cell, strict=True))
            out[pixel] += share * table[cell]
    return out


def sparse_convolution(features: Tensor, neighbors: Tensor, weight: Tensor) -> Tensor:
    out = features.new_zeros(neighbors.shape[0], weight.shape[2])
    for i, k in np.ndindex(*neighbors.shape):
        if neighbors[i, k] >= 0:
            out[i] += features[neighbors[i, k]] @ weight[k]
    return out


def distance_transform(mask: Tensor) -> Tensor:
    h, w = mask.shape
    background = [at for at in np.ndindex(h, w) if not mask[at]]
    out = torch.zeros(h, w, dtype=torch.int64)
    for y, x in np.ndindex(h, w):
        out[y, x] = min(((y - v) ** 2 + (x - u) ** 2 for v, u in background), default=(h + w) ** 2)
    return out


def embedding_bag(table: Tensor, indices: Tensor, weights: Tensor, mean: bool = False) -> Tensor:
    out = table.new_zeros(len(indices), table.shape[1])
    for b, row in enumerate(indices.tolist()):
        places = [i for i, index in enumerate(row) if index >= 0]
        for i in places:
            out[b] += weights[b, i] * table[row[i]] / (len(places) if mean else 1)
    return out


def adamw_step(param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: int) -> None:
    for i, g in enumerate(grad.tolist()):
        mean[i] = m = 0.9 * mean[i].item() + 0.1 * g
        square[i] = v = 0.999 * square[i].item() + 0.001 * g * g
        update = m / (1 - 0.9**step) / (math.sqrt(v / (1 - 0.999**step)) + 1e-8)
        param[i] -= 1e-3 * (update + 1e-2 * param[i].item())
