"""Momentum, unsent gradient, weight decay and mixtures: C and Triton give the bits of the specification."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgcopt import kernels
from dgcopt.kernels import Groups, Mixture, Momentum
from dgcopt.kernels.reductions.torch import block_maxima
from tests.support.oracle import (
    EXAMPLES,
    KINDS,
    Sizes,
    all_implementations,
    assert_same_bits,
    built,
    halves_and_wholes,
    momenta,
    native,
    numbers,
    numels,
    specification,
)


@all_implementations(
    numel=Sizes(numels.filter(lambda n: n < 6000), numels),
    memory=halves_and_wholes,
    gradient=halves_and_wholes,
    rule=momenta,
    scale=st.sampled_from([1.0, 0.37]),
    has_gradient=st.booleans(),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_accumulate_and_its_previews(of, numel, memory, gradient, rule, scale, has_gradient, kind, shift, seed):
    def operands() -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        # not aligned to anything but their own elements
        v = numbers(numel + shift, memory, kind, seed)[shift:]
        u = numbers(numel + shift, memory, kind, seed + 1)[shift:]
        g = numbers(numel + shift, gradient, kind, seed + 2)[shift:] if has_gradient else None
        return v, u, g, torch.zeros(-(-numel // 64), dtype=memory)

    number = -(-numel // 64)
    blocks = torch.arange(number)[torch.rand(number, generator=torch.Generator().manual_seed(seed)) < 0.5]
    rows = [torch.full((len(blocks), 64), 7.0, dtype=memory) for _ in range(2)]
    ours, theirs, untouched = operands(), operands(), operands()
    of.preview_blocks(*ours[:3], blocks, rows[0], rule, scale)
    specification.preview_blocks(*theirs[:3], blocks, rows[1], rule, scale)
    of.preview_block_maxima(*ours, rule, scale)
    specification.preview_block_maxima(*theirs, rule, scale)
    beside = [torch.full((numel + shift,), 7.0, dtype=memory)[shift:] for _ in range(2)]
    of.preview_block_maxima(*ours, rule, scale, beside[0])
    specification.preview_block_maxima(*theirs, rule, scale, beside[1])
    for mine, other, before in zip(ours[:3], theirs[:3], untouched[:3], strict=True):
        assert_same_bits(mine, before)
        assert_same_bits(other, before)
    looked = ours[3].clone()
    assert_same_bits(looked, theirs[3])
    moved = [operands()[1:3] for _ in range(2)]
    of.update_momentum(*moved[0], rule or Momentum(0.0), scale)
    specification.update_momentum(*moved[1], rule or Momentum(0.0), scale)

    of.accumulate(*ours, rule, scale)
    specification.accumulate(*theirs, rule, scale)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_bits(mine, other)
    v, u, g, maxima = ours
    padded = torch.nn.functional.pad(v, (0, -numel % 64))
    assert_same_bits(maxima, block_maxima(padded))
    assert_same_bits(maxima, looked)
    for made in rows:
        assert_same_bits(made, padded.view(-1, 64)[blocks])
    for new, rest in zip(beside, moved, strict=True):
        assert_same_bits(new, v)
        assert_same_bits(rest[0], u)
        assert_same_bits(rest[1], g)
    assert g is None or not g.any()
    if rule is None or rule.momentum == 0:
        assert_same_bits(u, untouched[1])


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(1, 300), st.just(140_001)), min_size=1, max_size=4),
    missing=st.sets(st.integers(0, 3)),
    memory=halves_and_wholes,
    gradient=halves_and_wholes,
    rule=momenta,
    kind=st.sampled_from(KINDS),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**20),
)
def test_a_gradient_whose_parts_lie_apart(sizes, missing, memory, gradient, rule, kind, threads, seed):
    starts = torch.tensor([0, *(-(-size // 64) * 64 for size in sizes)]).cumsum(0)
    numel = int(starts[-1])
    spans = (starts[:-1], starts[:-1] + torch.tensor(sizes))

    def operands() -> tuple[Tensor, Tensor, kernels.Parts, Tensor]:
        v, u = (numbers(numel, memory, kind, seed + place) for place in range(2))
        parts = [
            None if p in missing else numbers(n + 1, gradient, kind, seed + 2 + p)[1:] for p, n in enumerate(sizes)
        ]
        return v, u, kernels.Parts(parts, *spans), torch.zeros(numel // 64, dtype=memory)

    ours, theirs, apart = operands(), operands(), operands()
    blocks = torch.arange(numel // 64)[torch.rand(numel // 64, generator=torch.Generator().manual_seed(seed)) < 0.5]
    rows = [torch.full((len(blocks), 64), 7.0, dtype=memory) for _ in range(2)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        native.preview_blocks(*ours[:3], blocks, rows[0], rule, 0.37)
        beside = ours[0].clone()  # what lies between parts stays
        native.preview_block_maxima(*ours, rule, 0.37, beside)
        looked = ours[3].clone()
        rest = operands()[1:3]
        native.update_momentum(*rest, rule or Momentum(0.0), 0.37)
        native.accumulate(*ours, rule, 0.37)
    finally:
        torch.set_num_threads(before)
    specification.preview_blocks(*theirs[:3], blocks, rows[1], rule, 0.37)
    specified = theirs[0].clone()
    specification.preview_block_maxima(*theirs, rule, 0.37, specified)
    assert_same_bits(looked, theirs[3])
    specified_rest = operands()[1:3]
    specification.update_momentum(*specified_rest, rule or Momentum(0.0), 0.37)
    specification.accumulate(*theirs, rule, 0.37)
    v, u, grads, maxima = apart
    for start, stop, g in grads.spans:
        native.accumulate(v[start:stop], u[start:stop], g, maxima[start // 64 : -(-stop // 64)], rule, 0.37)
    for other in (theirs, apart):
        for at in (0, 1, 3):
            assert_same_bits(ours[at], other[at])
        for mine, part in zip(ours[2].tensors, other[2].tensors, strict=True):
            assert (mine is None) == (part is None) and (mine is None or not (mine.any() or part.any()))
    for new, (momentum, left) in ((beside, rest), (specified, specified_rest)):
        assert_same_bits(new, v)
        assert_same_bits(momentum, u)
        assert not any(part is not None and part.any() for part in left.tensors)
    assert_same_bits(looked, maxima)
    assert_same_bits(*rows)
    whole = v.clone()
    for stop, after in zip(spans[1].tolist(), starts[1:].tolist(), strict=True):
        whole[stop:after] = 0  # as behind every part
    assert_same_bits(rows[0], whole.view(-1, 64)[blocks])


@all_implementations(
    sizes=Sizes(*(st.lists(each, min_size=1, max_size=4) for each in (numels.filter(lambda n: n < 6000), numels))),
    rule=momenta,
    rate=st.sampled_from([(1e-4, 0.1), (0.0, 0.1), (0.3, 1e-8)]),
    dtype=halves_and_wholes,
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**20),
)
def test_decay(of, sizes, rule, rate, dtype, kind, shift, threads, seed):
    def pairs() -> list[list[Tensor]]:
        seeds = [[seed + i + 2 * j for j in range(len(sizes))] for i in range(2)]
        return [[numbers(n + shift, dtype, kind, s)[shift:] for n, s in zip(sizes, row, strict=True)] for row in seeds]

    ours, theirs = pairs(), pairs()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        of.decay(*ours, rule or Momentum(0.5), *rate)
    finally:
        torch.set_num_threads(before)
    specification.decay(*theirs, rule or Momentum(0.5), *rate)
    for mine, other in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        assert_same_bits(mine, other)


def test_accumulate_by_hand():
    v, u, g = torch.tensor([1.0, -4.0]), torch.tensor([10.0, 10.0]), torch.tensor([2.0, -1.0])
    maxima = torch.zeros(1)
    kernels.accumulate(v, u, g, maxima, Momentum(0.5, 0.0, nesterov=True), scale=2.0)
    # u <- 0.5 u + 2 g; v <- v + 2 g + 0.5 u
    assert u.tolist() == [9.0, 3.0] and v.tolist() == [9.5, -4.5] and g.tolist() == [0.0, 0.0]
    assert maxima.tolist() == [9.5]


@built
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bits(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        v, u, g = (numbers(2**18 + 77, torch.float32, "of all sizes", seed) for seed in range(3))
        ours, theirs = [v.clone(), u.clone(), g.clone()], [v.clone(), u.clone(), g.clone()]
        for of, (a, b, c) in ((native, ours), (specification, theirs)):
            maxima = torch.zeros(-(-len(v) // 64))
            of.accumulate(a, b, c, maxima, Momentum(0.9))
        for mine, other in zip(ours, theirs, strict=True):
            assert_same_bits(mine, other)
    finally:
        torch.set_num_threads(before)


@built
@pytest.mark.parametrize("of", [native, specification], ids=["native", "torch"])
def test_autograd_notices_what_is_changed_in_place(of):
    """As a gradient that was cleared: who goes back through it is told, and gets no wrong result."""
    v, u, g, maxima = torch.zeros(3), torch.zeros(3), torch.ones(3), torch.zeros(1)
    weight = torch.ones(3, requires_grad=True)
    product = (weight * g).sum()
    of.accumulate(v, u, g, maxima, Momentum(0.9))
    assert all(tensor._version > 0 for tensor in (v, u, g))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@built
def test_operands_that_do_not_fit_are_refused_before_any_loop_runs():
    v, maxima = torch.zeros(100), torch.zeros(2)
    with pytest.raises(ValueError, match="flat tensor of 100"):
        native.accumulate(v, None, torch.zeros(99), maxima, None)
    with pytest.raises(ValueError, match="a tensor of torch"):
        native.accumulate(v, torch.zeros(100).bfloat16(), v.clone(), maxima, Momentum(0.9))
    with pytest.raises(ValueError, match="block maxima"):
        native.accumulate(v, None, v.clone(), torch.zeros(1), None)
    with pytest.raises(ValueError, match="blocks must lie within"):
        native.preview_blocks(v, None, None, torch.tensor([2]), torch.zeros(1, 64), None)
    for starts, stops in (([0, 32], [32, 60]), ([0, 64], [65, 100]), ([0, 64], [64, 129])):
        parts = kernels.Parts([None, None], torch.tensor(starts), torch.tensor(stops))
        with pytest.raises(ValueError, match="does not fit"):
            native.preview_block_maxima(v, None, parts, maxima, None)
    with pytest.raises(ValueError, match="as many rows"):
        native.preview_blocks(v, None, None, torch.tensor([1]), torch.zeros(2, 64), None)
    with pytest.raises(ValueError, match="beyond"):
        native.select(torch.zeros(64), torch.zeros(1), Groups([[(0, 65)]], [1], v.device))
    with pytest.raises(ValueError, match="bytes are needed"):
        native.unpack_small(torch.zeros(3, dtype=torch.uint8), 100, 2)


def lists_of(large):
    return st.lists(st.integers(0, 200) | large, max_size=4)


weights = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1 - 0.9, 0.999, 1.0, 3.0])


@all_implementations(
    lengths=Sizes(lists_of(st.just(5000)), lists_of(st.just(140_001))),
    gap=st.integers(0, 3),
    keep=weights,
    add=weights,
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**20),
)
def test_mix(of, lengths, gap, keep, add, kind, seed):
    starts = [gap + sum(lengths[:place]) + gap * place for place in range(len(lengths))]
    parts = [numbers(length + gap, torch.float32, kind, seed + length)[gap:] for length in lengths]
    ours = numbers(2 * gap + sum(lengths) + gap * len(lengths), torch.float32, kind, seed)
    theirs = ours.clone()
    for each, flat in ((of, ours), (specification, theirs)):
        each.mix(flat, Mixture(keep, add, starts, parts))
    assert_same_bits(ours, theirs)


def test_mixtures_by_hand():
    flat, mixture = (
        torch.tensor([1.0, 2.0, 3.0]),
        Mixture(2.0, 0.5, [0, 2], [torch.tensor([4.0]), torch.tensor([-4.0])]),
    )
    kernels.mix(flat, mixture)
    assert flat.tolist() == [4, 2, 4]
    kernels.mix(flat, mixture.inverse)
    assert flat.tolist() == [1, 2, 3]


@built
def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="4 elements from 0 on are not among those from 0 to 3"):
        native.mix(torch.zeros(3), Mixture(1.0, 1.0, [0], [torch.zeros(4)]))
    with pytest.raises(ValueError, match="from -1 on"):
        native.mix(torch.zeros(3), Mixture(1.0, 1.0, [-1], [torch.zeros(1)]))
    with pytest.raises(ValueError, match="from 1 on are not among those from 2 to 3"):
        native.mix(torch.zeros(3), Mixture(1.0, 1.0, [0, 1], [torch.zeros(2), torch.zeros(1)]))
