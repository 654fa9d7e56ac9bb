"""The rules of sparsifiers, written independently and naively: loops over ranks and tensors in plain torch.

Gradients are given by step, rank and tensor. Each rule returns what is applied, by step and tensor, and what every rank
has left at the end, by tensor.
"""

import math

import torch


def largest(x, k):
    """A mask of the k elements of largest magnitude."""
    flat = x.reshape(-1).abs().tolist()
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[sorted(range(len(flat)), key=lambda j: -flat[j])[:k]] = True
    return mask.view(x.shape)


def sparsified(grads, choose, decay=1.0, beta=1.0, keep=True):
    """v = decay e + g; `choose(step, v)` gives masks by rank and tensor; e = (1 - beta) e + beta (v - sent)."""
    ranks, tensors = range(len(grads[0])), range(len(grads[0][0]))
    e = [[torch.zeros_like(g) for g in mine] for mine in grads[0]]
    applied = []
    for step, given in enumerate(grads):
        v = [[decay * e[r][i] + given[r][i] for i in tensors] for r in ranks]
        masks = choose(step, v)
        sent = [[v[r][i] * masks[r][i] for i in tensors] for r in ranks]
        if keep:
            e = [[(1 - beta) * e[r][i] + beta * (v[r][i] - sent[r][i]) for i in tensors] for r in ranks]
        applied.append([sum(sent[r][i] for r in ranks) / len(ranks) for i in tensors])
    return applied, e


def top_k(ratio):
    return lambda step, v: [[largest(x, math.ceil(ratio * x.numel())) for x in mine] for mine in v]


def in_turn(*rules):
    """A rule for each step, the last one for all that follow."""
    return lambda step, v: rules[min(step, len(rules) - 1)](step, v)


def chunked_top_k(ratio, chunk):
    def mask(x):
        parts = [x.reshape(-1)[start : start + chunk] for start in range(0, x.numel(), chunk)]
        return torch.cat([largest(part, math.ceil(ratio * len(part))) for part in parts]).view(x.shape)

    return lambda step, v: [[mask(x) for x in mine] for mine in v]


def threshold(bound, at_most):
    def masks(mine):
        together = torch.cat([x.reshape(-1) for x in mine])
        chosen = largest(together, math.ceil(at_most * len(together))) & (together.abs() >= bound)
        return [part.view(x.shape) for part, x in zip(chosen.split([x.numel() for x in mine]), mine, strict=True)]

    return lambda step, v: [masks(mine) for mine in v]


def leaders_top_k(ratio):
    def choose(step, v):
        leader = v[step % len(v)]
        return [[largest(x, math.ceil(ratio * x.numel())) for x in leader]] * len(v)

    return choose


def coarse_chunks(grads, ratios, count, length, momentum=0.0, nesterov=False):
    """GradientFlow's CSC on a vector of all tensors, each padded to a multiple of 64: `count` chunks of `length`.

    `ratios` are those of each step.
    """
    ranks = range(len(grads[0]))
    sizes = [g.numel() for g in grads[0][0]]
    padded = [-(-n // 64) * 64 for n in sizes]

    def joined(tensors):
        flat = torch.zeros(count * length, dtype=torch.float64)
        for g, start in zip(tensors, [sum(padded[:i]) for i in range(len(padded))], strict=True):
            flat[start : start + g.numel()] = g.reshape(-1)
        return flat

    def parted(flat):
        starts = [sum(padded[:i]) for i in range(len(padded))]
        return [flat[start : start + n] for start, n in zip(starts, sizes, strict=True)]

    u, e = ([torch.zeros(count * length, dtype=torch.float64) for _ in ranks] for _ in range(2))
    applied = []
    for ratio, given in zip(ratios, grads, strict=True):
        for r in ranks:
            g = joined(given[r])
            u[r] = momentum * u[r] + g
            e[r] = e[r] + (g + momentum * u[r] if nesterov else u[r])
        norms = [sum(float(e[r][c * length : (c + 1) * length].abs().sum()) for r in ranks) for c in range(count)]
        total = torch.zeros(count * length, dtype=torch.float64)
        for c in sorted(range(count), key=lambda c: -norms[c])[: math.ceil(ratio * count)]:
            for r in ranks:
                total[c * length : (c + 1) * length] += e[r][c * length : (c + 1) * length]
                e[r][c * length : (c + 1) * length] = 0
        applied.append(parted(total / len(ranks)))
    return applied, [parted(x) for x in e]


def cosines(x):
    """The orthonormal DCT-II along the last dimension, one coefficient at a time."""
    n = x.shape[-1]
    out = torch.zeros_like(x)
    for k in range(n):
        wave = torch.tensor([math.cos(math.pi * (j + 0.5) * k / n) for j in range(n)], dtype=x.dtype)
        out[..., k] = (x * wave).sum(-1) * math.sqrt((1 if k == 0 else 2) / n)
    return out


def back(x):
    """The inverse of `cosines`: the sum of all waves."""
    n = x.shape[-1]
    out = torch.zeros_like(x)
    for k in range(n):
        wave = torch.tensor([math.cos(math.pi * (j + 0.5) * k / n) for j in range(n)], dtype=x.dtype)
        out += x[..., k : k + 1] * wave * math.sqrt((1 if k == 0 else 2) / n)
    return out


def decoupled_momentum(grads, ratio, decay, sign):
    """DeMo, tile by tile of 64 by 64 and what is left at the edges."""
    ranks, tensors = range(len(grads[0])), range(len(grads[0][0]))
    shapes = [(g.shape[0] if g.dim() > 1 else 1, -1) for g in grads[0][0]]
    m = [[torch.zeros_like(g).reshape(s) for g, s in zip(mine, shapes, strict=True)] for mine in grads[0]]
    applied = []
    for given in grads:
        results = []
        for i in tensors:
            total = torch.zeros_like(m[0][i])
            for r in ranks:
                m[r][i] = decay * m[r][i] + given[r][i].reshape(shapes[i])
            for top in range(0, total.shape[0], 64):
                for left in range(0, total.shape[1], 64):
                    tile = slice(top, top + 64), slice(left, left + 64)
                    for r in ranks:
                        frequencies = cosines(cosines(m[r][i][tile]).T).T
                        sent = frequencies * largest(frequencies, math.ceil(ratio * frequencies.numel()))
                        sent = back(back(sent).T).T
                        m[r][i][tile] -= sent
                        total[tile] += sent / len(ranks)
            if sign:  # but of what is zero but for rounding
                total = total.sign() * (total.abs() > 1e-12)
            results.append(total.view(given[0][i].shape))
        applied.append(results)
    return applied, [[x.view(g.shape) for x, g in zip(mine, grads[0][0], strict=True)] for mine in m]


def local_adamw(weights, gradients_of, ranks, steps, ratio, lr, betas, eps, weight_decay):
    """Every rank's own Adam update, top-k with error feedback; decoupled weight decay is applied by all alike."""
    w = [x.clone() for x in weights]
    m, s, e = ([[torch.zeros_like(x) for x in w] for _ in range(ranks)] for _ in range(3))
    for step in range(steps):
        total = [torch.zeros_like(x) for x in w]
        for r in range(ranks):
            for i, g in enumerate(gradients_of(w, r, step)):
                m[r][i] = betas[0] * m[r][i] + (1 - betas[0]) * g
                s[r][i] = betas[1] * s[r][i] + (1 - betas[1]) * g * g
                first, second = m[r][i] / (1 - betas[0] ** (step + 1)), s[r][i] / (1 - betas[1] ** (step + 1))
                v = e[r][i] - lr * first / (second.sqrt() + eps)
                mask = largest(v, math.ceil(ratio * v.numel()))
                total[i] += v * mask / ranks
                e[r][i] = v * ~mask
        w = [(1 - lr * weight_decay) * x + change for x, change in zip(w, total, strict=True)]
    return w, e
