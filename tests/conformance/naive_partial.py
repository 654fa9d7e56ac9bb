"""Partial averaging, written independently and naively: Python floats, one rank and one coordinate after another.

Weights of all ranks are `[rank][tensor]`. `rule` is a dict of the settings: fraction, choose, every, budgets, seed.
"""

import fnmatch
import math
import zlib

import torch


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def fraction_of(name, rule):
    for pattern in rule["budgets"]:
        if fnmatch.fnmatchcase(name, pattern):
            return rule["budgets"][pattern]
    return rule["fraction"]


def buckets(names, rule):
    """(fraction, numbers of its tensors), the bucket that is complete first, first."""
    members = {}
    for number, name in enumerate(names):
        members.setdefault(fraction_of(name, rule), []).append(number)
    return sorted(members.items(), key=lambda bucket: bucket[1][-1])


def layout(numels):
    """What lies where: (tensor, element), or None in the gap up to the next multiple of 64."""
    flat = []
    for tensor, numel in enumerate(numels):
        flat += [(tensor, element) for element in range(numel)]
        flat += [None] * (-numel % 64)
    return flat


def random_coordinates(flat, fraction, seed, step, bucket):
    """One of each of k spans of the coordinates, gaps left out, in a ring that is turned by the last number."""
    real = [place for place, owner in enumerate(flat) if owner is not None]
    n = len(real)
    k = math.ceil(fraction * n)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step} {bucket} all".encode()))
    *draws, turn = torch.randint(2**62, (k + 1,), generator=generator).tolist()
    chosen = []
    for span, draw in enumerate(draws):
        first, end = span * n // k, (span + 1) * n // k
        chosen.append(real[(first + draw % (end - first) + turn) % n])
    return chosen


def strided_coordinates(flat, fraction, exchange):
    """`exchange` counts from 0."""
    period = min(round(1 / fraction), len(flat))
    return [place for place in range(len(flat)) if place % period == exchange % period]


def drifted_coordinates(weights, anchor, fraction):
    """The k patches of 512 with the largest mean over ranks of the squared distance from the anchor."""
    drifts = []
    for first in range(0, len(anchor), 512):
        patch = range(first, min(first + 512, len(anchor)))
        total = sum(sum((x[place] - anchor[place]) ** 2 for place in patch) for x in weights)
        drifts.append((-total / len(weights), patch))
    drifts.sort(key=lambda entry: entry[0])
    return [place for _, patch in drifts[: math.ceil(fraction * len(drifts))] for place in patch]


def exchange(weights, names, anchors, step, rule):
    """The weights of all ranks after the exchange that follows step `step`, counted from 1; changes `anchors`."""
    results = [copies(mine) for mine in weights]
    for bucket, (fraction, members) in enumerate(buckets(names, rule)):
        if fraction == 0:
            continue
        flat = layout([weights[0][member].numel() for member in members])
        values = []
        for mine in weights:
            lists = [mine[member].flatten().tolist() for member in members]
            values.append([0.0 if owner is None else lists[owner[0]][owner[1]] for owner in flat])
        if rule["choose"] == "random":
            chosen = random_coordinates(flat, fraction, rule["seed"], step, bucket)
        elif rule["choose"] == "strided":
            chosen = strided_coordinates(flat, fraction, step // rule["every"] - 1)
        else:
            chosen = drifted_coordinates(values, anchors[bucket], fraction)
        for place in chosen:
            mean = sum(x[place] for x in values) / len(values)
            for x in values:
                x[place] = mean
            anchors[bucket][place] = mean
        for x, result in zip(values, results, strict=True):
            parts = [[] for _ in members]
            for value, owner in zip(x, flat, strict=True):
                if owner is not None:
                    parts[owner[0]].append(value)
            for member, part in zip(members, parts, strict=True):
                result[member] = torch.tensor(part, dtype=torch.float64).view(result[member].shape)
    return results


def train(start, names, losses, make, lrs, rule, overlap=False):
    """The weights of all ranks after each step; `losses[step][rank](tensors)`, one learning rate per step."""
    ranks = len(losses[0])
    weights = [[torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(ranks)]
    optimizers = [make(mine) for mine in weights]
    anchors = []
    for _, members in buckets(names, rule):
        flat = layout([start[member].numel() for member in members])
        lists = [start[member].flatten().tolist() for member in members]
        anchors.append([0.0 if owner is None else lists[owner[0]][owner[1]] for owner in flat])
    history, pending = [], None
    for step, lr in enumerate(lrs, 1):
        for rank, mine in enumerate(weights):
            optimizers[rank].zero_grad()
            losses[step - 1][rank](mine).backward()
        if pending is not None:
            write(weights, pending)
            pending = None
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        if step % rule["every"] == 0:
            pending = exchange(weights, names, anchors, step, rule)
            if not overlap:
                write(weights, pending)
                pending = None
        history.append([copies(mine) for mine in weights])
    return history


def write(weights, results):
    with torch.no_grad():
        for mine, result in zip(weights, results, strict=True):
            for tensor, value in zip(mine, result, strict=True):
                tensor.copy_(value)
