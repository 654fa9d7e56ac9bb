"""The quantisers' rules, written independently and naively: NumPy, one tensor and one rank after another.

A gradient is a list of one-dimensional float32 arrays, one for each tensor; `grads` is one such list for each rank.
`draws[rank][tensor]` are the random numbers that a rank draws for a tensor. Every function returns what is applied.
"""

import numpy as np

F = np.float32


def mean_of(messages):
    """The mean over ranks, added up in rank order."""
    return [sum((rank[i] for rank in messages), F(0)) / F(len(messages)) for i in range(len(messages[0]))]


def majority_vote(grads, step):
    """sign(sum of signs), counted coordinate by coordinate; zeros vote - where rank + step is odd."""
    applied = []
    for i in range(len(grads[0])):
        result = []
        for j in range(len(grads[0][i])):
            votes = 0
            for rank, grad in enumerate(grads):
                g = grad[i][j]
                votes += -1 if g < 0 or (g == 0 and (rank + step) % 2 == 1) else 1
            result.append((votes > 0) - (votes < 0))
        applied.append(np.array(result, F))
    return applied


def signum(grads, momenta, beta, step):
    for grad, m in zip(grads, momenta, strict=True):
        for i, g in enumerate(grad):
            m[i] = F(beta) * m[i] + F(1 - beta) * g
    return majority_vote(momenta, step)


def with_error_feedback(grads, errors, quantise):
    messages = []
    for grad, error in zip(grads, errors, strict=True):
        messages.append([])
        for i, g in enumerate(grad):
            v = error[i] + g
            messages[-1].append(quantise(v))
            error[i] = v - messages[-1][-1]
    return mean_of(messages)


def scaled_sign(v):
    return np.where(v < 0, F(-1), F(1)) * F(np.abs(v).sum(dtype=np.float64) / len(v))


def two_means(v):
    sent = np.empty_like(v)
    for side in (v >= 0, v < 0):
        if side.any():
            sent[side] = v[side].mean(dtype=np.float64)
    return sent


def ternary(g, draws, clip):
    s = np.abs(g).max()
    if clip is not None:
        s = min(s, F(clip * np.sqrt(np.mean(g.astype(np.float64) ** 2))))
    return np.where(draws * s < np.abs(g), np.sign(g) * s, F(0))


def qsgd(v, draws, levels, block, norm):
    sent = np.zeros_like(v)
    for start in range(0, len(v), block or len(v)):
        part = slice(start, start + (block or len(v)))
        x = v[part].astype(np.float64)
        size = np.abs(x).max() if norm == "max" else np.sqrt((x * x).sum())
        if size == 0:
            continue
        position = np.abs(x) / size * levels
        level = np.floor(position) + (draws[part] < position - np.floor(position))
        sent[part] = np.sign(x) * level * size / levels
    return sent


def natural(x, draws):
    """`draws` are whole numbers below 2^23."""
    sent = np.zeros_like(x)
    for i, value in enumerate(x.tolist()):
        if value == 0:
            continue
        mantissa, exponent = np.frexp(abs(value))  # |value| = mantissa * 2^exponent with mantissa in [0.5, 1)
        low, share = 2.0 ** (exponent - 1), 2 * mantissa - 1
        if exponent - 1 < -126:  # too small for a power of two of its own: between zero and the smallest
            low, share = 0.0, abs(value) / 2.0**-126
        high = 2 * low if low else 2.0**-126
        sent[i] = np.sign(value) * (high if draws[i] + share * 2**23 >= 2**23 else low)
    return sent


def minmax_codes(x):
    """MinMaxUInt8 by the letter, of one chunk: codes as whole numbers, and what a receiver makes of them."""
    scale = F(255) / (x.max() - x.min() + F(1e-7))
    upper = np.rint(x.max() * scale)
    lower = upper - F(255)
    codes = np.minimum(np.rint(x * scale), upper) - lower
    return codes, (codes + lower) / scale


def bytegrad(grads, errors=None):
    """Scatter, reduce, gather; with error feedback if there are `errors`, one flat array for each rank."""
    ranks = len(grads)
    whole = [np.concatenate(grad) for grad in grads]
    if errors is not None:
        whole = [w + e for w, e in zip(whole, errors, strict=True)]
    cuts = range(0, len(whole[0]), -(-len(whole[0]) // ranks))
    applied = np.zeros_like(whole[0])
    for owner, cut in enumerate(cuts):
        part = slice(cut, cut + -(-len(whole[0]) // ranks))
        decoded = [minmax_codes(w[part])[1] for w in whole]
        mean = sum(decoded, F(0)) / F(ranks)
        applied[part] = minmax_codes(mean)[1]
        if errors is not None:
            for rank in range(ranks):
                errors[rank][part] = whole[rank][part] - decoded[rank]
            errors[owner][part] += (mean - applied[part]) * F(ranks)
    ends = np.cumsum([len(g) for g in grads[0]])[:-1]
    return np.split(applied, ends)
