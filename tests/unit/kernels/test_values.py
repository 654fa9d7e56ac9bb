"""Values in few bits: the same bits in C as in torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import strategies as st

from tests.support.oracle import KINDS, all_implementations, assert_same_bits, built, native, numbers, specification

numels = st.one_of(st.integers(0, 300), st.sampled_from([512, 1000, 5000]))
blocks = st.sampled_from([64, 128, 256, 512])


@all_implementations(
    numel=numels,
    block=blocks,
    most=st.sampled_from([1, 7, 127]),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_steps(of, numel, block, most, kind, shift, seed):
    values = numbers(numel + shift, torch.float32, kind, seed)[shift:]
    (steps, multiples), theirs = of.round_steps(values, block, most), specification.round_steps(values, block, most)
    assert_same_bits(steps, theirs[0])
    assert torch.equal(multiples, theirs[1])
    mine, other = (each.of_steps(multiples, steps.float(), block) for each in (of, specification))
    assert_same_bits(mine, other)


@all_implementations(
    numel=numels,
    block=blocks,
    count=st.sampled_from([1, 2, 8]),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_levels(of, numel, block, count, kind, shift, seed):
    values = numbers(numel + shift, torch.float32, kind, seed)[shift:]
    levels = numbers(-(-numel // block) * count, torch.float32, "normal", seed).abs().view(-1, count).sort(1).values
    fields = of.nearest_levels(values, levels, block)
    assert torch.equal(fields, specification.nearest_levels(values, levels, block))
    assert_same_bits(of.of_levels(fields, levels, block), specification.of_levels(fields, levels, block))
    for how_many in (1, 2):
        mine, other = (each.means(values, block, how_many) for each in (of, specification))
        assert_same_bits(mine[0], other[0])
        assert_same_bits(mine[1], other[1])


@all_implementations(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=20),
    kind=st.sampled_from(KINDS),
    count=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 2**20),
)
def test_blocks_of_several_lengths(of, lengths, kind, count, seed):
    """Each is coded as if it were alone."""
    cuts = torch.tensor([0, *itertools.accumulate(lengths)])
    values = numbers(sum(lengths), torch.float32, kind, seed)
    levels = numbers(len(lengths) * count, torch.float32, "normal", seed).abs().view(-1, count).sort(1).values
    steps = numbers(len(lengths), torch.float32, "normal", seed)
    alone = list(zip(values.split(lengths), levels.split(1), steps.split(1), strict=True))
    for each in (of, specification):
        fields = each.nearest_levels(values, levels, 64, cuts)
        multiples = each.round_steps(values, 64, 7, cuts)[1]
        results = (
            (each.round_steps(values, 64, 7, cuts), [specification.round_steps(v, 64, 7) for v, _, _ in alone]),
            (each.means(values, 64, 2, cuts), [specification.means(v, 64, 2) for v, _, _ in alone]),
            ((fields,), [(specification.nearest_levels(v, level, 64),) for v, level, _ in alone]),
            (
                (each.of_levels(fields, levels, 64, cuts), each.of_steps(multiples, steps, 64, cuts)),
                [
                    (specification.of_levels(f, level, 64), specification.of_steps(m, step, 64))
                    for (_, level, step), f, m in zip(
                        alone, fields.split(lengths), multiples.split(lengths), strict=True
                    )
                ],
            ),
        )
        for together, parts in results:
            for place, mine in enumerate(together):
                whole = torch.cat([part[place] for part in parts]) if parts else mine
                assert_same_bits(mine, whole) if mine.is_floating_point() else assert_equal(mine, whole)


def assert_equal(mine, other):
    assert torch.equal(mine, other)


def test_values_by_hand():
    values, levels = torch.tensor([1.0, -2.0, 4.0, -0.0]), torch.tensor([[1.0, 4.0]])
    steps, multiples = specification.round_steps(values, 64, 2)
    assert steps.tolist() == [2] and multiples.tolist() == [0, -1, 2, 0]  # 1/2 goes to the even one
    assert specification.nearest_levels(values, levels, 64).tolist() == [0, 1, 2, 0]
    assert specification.of_levels(torch.tensor([0, 1, 2, 3]).byte(), levels, 64).tolist() == [1, -1, 4, -4]
    assert [mean.tolist() for mean in specification.means(values, 64, 1)] == [[1.75], [1.75]]
    assert [mean.tolist() for mean in specification.means(values, 64, 2)] == [[0.5], [3.0]]


@built
def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="not 3"):
        native.of_levels(torch.zeros(4, dtype=torch.uint8), torch.zeros(1, 3), 64)
    with pytest.raises(ValueError, match="flat tensor of 1"):
        native.of_steps(torch.zeros(4, dtype=torch.int8), torch.zeros(2), 64)
    with pytest.raises(ValueError, match="power of two"):
        native.means(torch.zeros(4), 100, 2)
    for cuts in ([0, 2, 3], [1, 4], [0, 0, 4], [0, 4, 3, 4]):
        with pytest.raises(ValueError, match="follow one another up to 4"):
            native.means(torch.zeros(4), 64, 2, torch.tensor(cuts))


@built
def test_equal_magnitudes_have_one_mean_on_whichever_side_of_the_split_they_come_to_lie():
    for value in torch.linspace(1, 4, 100).tolist():
        values = torch.tensor([value, -value, value, -value])
        for of in (native, specification):
            assert [mean.tolist() for mean in of.means(values, 64, 2)] == [values[:1].tolist()] * 2
