"""Gossip and decentralized SGD, written independently and naively: plain torch in float64, one rank after another.

`ranks` have a model, an optimizer and data each. A rule is a function of them, called once per training step t = 0, 1,
..., which does all of it: gradients, what ranks send each other, and the optimizers' steps.
"""

import functools

import torch
from torch import nn

from tests.conformance.naive_quantizers import minmax_codes

SHAPES = ((5, 13), (3,), (70,))


@functools.cache
def noise(t, rank):
    generator = torch.Generator().manual_seed(100 * t + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


class Replicas:
    def __init__(self, size, make):
        self.models = [nn.ParameterList(tensor.clone() for tensor in noise(99, 99)) for _ in range(size)]
        self.optimizers = [make(replica.parameters()) for replica in self.models]

    def __len__(self):
        return len(self.models)

    def backward(self, t):
        """Gradients of wavy losses, which differ from rank to rank."""
        for rank, replica in enumerate(self.models):
            replica.zero_grad()
            shifts = (shift.to(param.dtype) for param, shift in zip(replica, noise(t, rank), strict=True))
            grads = [(2 * p.detach()).sin() + shift for p, shift in zip(replica, shifts, strict=True)]
            torch.autograd.backward(list(replica), grads)

    def step(self, lr, active=None):
        """Of all ranks, or of those that have data."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        for rank, optimizer in enumerate(self.optimizers):
            if active is None or rank in active:
                optimizer.step()

    def train(self, t, lr, active=None):
        self.backward(t)
        self.step(lr, active)

    def train_densely(self, t, lr):
        self.backward(t)
        for params in zip(*self.models, strict=True):
            mean = sum(param.grad for param in params) / len(params)
            for param in params:
                param.grad = mean.clone()
        self.step(lr)

    def read(self):
        """All ranks' weights, `[ranks, weights]`."""
        return torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in self.models])

    def write(self, rows):
        for replica, row in zip(self.models, rows, strict=True):
            nn.utils.vector_to_parameters(row.clone(), replica.parameters())


# -- graphs: the peers to which `rank` of `size` sends in a round, and what share it keeps ---------------------------


def exponential(peers):
    def send_to(rank, size, round):
        hops = []
        power = 1
        while power < size:
            hops.append([power * j for j in range(1, peers + 1) if power * j < size])
            power *= peers + 1
        return [(rank + hop) % size for hop in hops[round % len(hops)]] if hops else []

    return send_to


def ring(rank, size, round):
    return sorted({(rank + 1) % size, (rank + size - 1) % size} - {rank})


def directed_ring(rank, size, round):
    return [(rank + 1) % size] if size > 1 else []


def shift_one(rank, size, round):
    if size % 2:
        for peer in range(size):
            if (rank + peer) % size == round % size and peer != rank:
                return [peer]
        return []
    half = size // 2
    return [(round + rank) % half + half if rank < half else (rank - half - round) % half]


def bipartite(rank, size, round):
    """Phone books as in the code of Assran et al."""
    if size == 1:
        return []
    book = []
    i = 0
    while 2**i <= size - 1:
        hop = 1 if i == 0 else 1 + 2**i
        ahead, behind = (rank + hop) % size, (rank - hop) % size
        for peer in (behind, ahead) if rank % 2 == 0 else (ahead, behind):
            if peer not in book:
                book.append(peer)
        i += 1
    return [book[round % len(book)]]


def even(send_to):
    """Equal shares for all peers and oneself."""

    def shares(rank, size, round):
        peers = send_to(rank, size, round)
        return {peer: 1 / (len(peers) + 1) for peer in peers}

    return shares


def matrix(shares, size, round):
    """p[j, i], the share of i's weights that is j's afterwards."""
    p = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        p[i, i] = 1
        for j, share in shares(i, size, round).items():
            p[j, i] += share
            p[i, i] -= share
    return p


# -- rules -----------------------------------------------------------------------------------------------------------


class Push:
    """Stochastic gradient push: x and w are sent, z is where gradients are taken; between the means of machines."""

    def __init__(self, ranks, shares, every, per_node=1):
        self.ranks, self.shares, self.every, self.per_node = ranks, shares, every, per_node
        self.x = ranks.read()
        self.w = torch.ones(len(ranks), dtype=torch.float64)
        self.rounds = 0

    def train(self, t, lr, active=None):
        z = self.ranks.read()
        self.ranks.train(t, lr, active)
        self.x = self.x + (self.ranks.read() - z)
        if (t + 1) % self.every == 0:
            machines = matrix(self.shares, len(self.ranks) // self.per_node, self.rounds)
            mean = torch.full((self.per_node, self.per_node), 1 / self.per_node, dtype=torch.float64)
            p = torch.kron(machines, mean)
            self.x, self.w = p @ self.x, p @ self.w
            self.rounds += 1
        self.ranks.write(self.x / self.w.unsqueeze(1))


class Mixed:
    """Gradients of the weights as they are, applied to mixed ones; `mix(rows, s)` is the s-th time, from 0."""

    def __init__(self, ranks, mix, interval, first=True):
        self.ranks, self.mix, self.interval, self.first = ranks, mix, interval, first
        self.made = 0

    def train(self, t, lr):
        self.ranks.backward(t)
        if t % self.interval == 0 and (t > 0 or self.first):
            self.ranks.write(self.mix(self.ranks.read(), self.made))
            self.made += 1
        self.ranks.step(lr)


class MixedAfter:
    """The same among ranks that may run out of data: every step is followed by its exchange, the first one by s = 1."""

    def __init__(self, ranks, mix):
        self.ranks, self.mix = ranks, mix

    def train(self, t, lr, active):
        self.ranks.train(t, lr, active)
        self.ranks.write(self.mix(self.ranks.read(), t + 1))


def mean(rows, s):
    return rows.mean(0).expand_as(rows)


def graph(shares):
    return lambda rows, s: matrix(shares, len(rows), s) @ rows


def between_nodes(mix, per_node):
    """`mix` among the means of every `per_node` ranks, handed back to each of them."""

    def mixed(rows, s):
        means = rows.view(-1, per_node, rows.shape[1]).mean(1)
        return mix(means, s).repeat_interleave(per_node, 0)

    return mixed


def quantised(row):
    return torch.from_numpy(minmax_codes(row.float().numpy())[1]).double()


class LowPrecision:
    """Bagua's ring: w, L and R of every rank, or of every node."""

    def __init__(self, ranks, interval, per_node=1):
        self.ranks, self.interval, self.per_node = ranks, interval, per_node
        self.w = ranks.read()[::per_node].clone()
        self.left, self.right = self.w.roll(1, 0), self.w.roll(-1, 0)

    def train(self, t, lr, active=None):
        self.ranks.train(t, lr, active)
        if t % self.interval:
            return
        x = self.ranks.read().view(-1, self.per_node, self.w.shape[1]).mean(1)
        size = len(x)
        q = [quantised(x[i] + self.left[i] / 3 + self.right[i] / 3 - 5 / 3 * self.w[i]) for i in range(size)]
        for i in range(size):
            self.w[i] += q[i]
            self.left[i] += q[(i - 1) % size]
            self.right[i] += q[(i + 1) % size]
        self.ranks.write(self.w.repeat_interleave(self.per_node, 0))
