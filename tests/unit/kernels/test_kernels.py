"""Every implementation of an inner loop gives the bits of the specification in torch."""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgcopt import kernels
from dgcopt.errors import ConfigError
from dgcopt.kernels import Groups, Momentum
from dgcopt.kernels.native import library
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

KERNELS = Path(kernels.__file__).parent


@built
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    numel=numels,
    memory=halves_and_wholes,
    gradient=halves_and_wholes,
    rule=momenta,
    scale=st.sampled_from([1.0, 0.37]),
    has_gradient=st.booleans(),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_accumulate_look_and_ahead(numel, memory, gradient, rule, scale, has_gradient, kind, shift, seed):
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
    native.preview_blocks(*ours[:3], blocks, rows[0], rule, scale)
    specification.preview_blocks(*theirs[:3], blocks, rows[1], rule, scale)
    native.preview_block_maxima(*ours, rule, scale)
    specification.preview_block_maxima(*theirs, rule, scale)
    beside = [torch.full((numel + shift,), 7.0, dtype=memory)[shift:] for _ in range(2)]
    native.preview_block_maxima(*ours, rule, scale, beside[0])
    specification.preview_block_maxima(*theirs, rule, scale, beside[1])
    for mine, other, before in zip(ours[:3], theirs[:3], untouched[:3], strict=True):
        assert_same_bits(mine, before)
        assert_same_bits(other, before)
    looked = ours[3].clone()
    assert_same_bits(looked, theirs[3])
    moved = [operands()[1:3] for _ in range(2)]
    native.update_momentum(*moved[0], rule or Momentum(0.0), scale)
    specification.update_momentum(*moved[1], rule or Momentum(0.0), scale)

    native.accumulate(*ours, rule, scale)
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


def test_what_accumulate_means():
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
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_what_is_not_cut_by_blocks(threads, monkeypatch):
    """Tiles, chunks and rows: each is worked on once, by one thread."""
    cuts: list[int] = []
    pool = library._pool
    monkeypatch.setattr(library, "_pool", lambda *args: cuts.append(args[1]) or pool(*args))
    shapes = [(0, 70, 2000), (140_032, 500, 700), (490_048, 3, 5)]
    flat, other = (numbers(490_112, torch.float32, "normal", seed) for seed in range(2))
    spans = [(first, min(first + 4096, stop)) for first in range(0, 490_112, 4096) for stop in [490_112]]
    chunks, matrices = kernels.Chunks(spans, [7] * len(spans), flat.device), kernels.Matrices(shapes)
    left, right = (
        numbers(3000, torch.float32, "normal", 2).view(-1, 3),
        numbers(1500, torch.float32, "normal", 3).view(-1, 3),
    )
    results = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for of in (native, specification):
            frequencies, again, sums, product = (torch.zeros(n) for n in (490_112, 490_112, 490_112, 500_000))
            of.dct(flat, matrices, frequencies)
            of.inverse_dct(frequencies, matrices, again, "set")
            found = of.add_and_select_chunks(flat, other, 0.9, sums, chunks)
            of.put_product(left, right, product, None)
            results.append((frequencies, again, sums, product, found[1]))
            assert torch.equal(sums[found[0]], found[1])
    finally:
        torch.set_num_threads(before)
    for mine, specified in zip(*results, strict=True):
        assert_same_bits(mine, specified)
    assert len(cuts) == (0 if threads == 1 else 2 * 4)  # two helpers of each loop


@all_implementations(
    sizes=Sizes(*(st.lists(each, min_size=1, max_size=3) for each in (numels.filter(lambda n: n < 6000), numels))),
    dtype=halves_and_wholes,
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**20),
)
def test_copy_scaled(of, sizes, dtype, scale, kind, shift, threads, seed):
    grads = [numbers(size + shift, dtype, kind, seed + place)[shift:] for place, size in enumerate(sizes)]
    ours, theirs = ([torch.ones(len(g) + 5, dtype=dtype) for g in grads] for _ in range(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        peaks = of.copy_scaled(grads, ours, scale)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(peaks, specification.copy_scaled(grads, theirs, scale))
    for g, mine, other, peak in zip(grads, ours, theirs, peaks, strict=True):
        assert_same_bits(mine, other)
        assert_same_bits(mine[: len(g)], g * scale)
        assert not mine[len(g) :].any()
        assert_same_bits(peak[None], g.float().abs().amax()[None] if len(g) else torch.zeros(1))


@all_implementations(
    sizes=Sizes(*(st.lists(each, min_size=1, max_size=5) for each in (numels.filter(lambda n: n < 5000), numels))),
    dtype=halves_and_wholes,
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**20),
)
def test_peaks(of, sizes, dtype, kind, shift, threads, seed):
    tensors = [numbers(size + shift, dtype, kind, seed + place)[shift:] for place, size in enumerate(sizes)]
    images = torch.ones(2, 3, 5, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
    images[1, 2, 4, 4] = -7
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = of.peaks([*tensors, images])
    finally:
        torch.set_num_threads(before)
    assert_same_bits(found, specification.peaks([*tensors, images]))
    expected = [x.float().abs().amax() if x.numel() else torch.zeros(()) for x in tensors]
    assert_same_bits(found, torch.stack([*expected, torch.tensor(7.0)]))


@built
def test_peaks_are_not_looked_for_between_elements():
    sliced = torch.ones(4, 4)[:, :2]
    with pytest.raises(ValueError, match="in one piece"):
        native.peaks([sliced])
    assert kernels.peaks([sliced]).tolist() == [1.0]
    assert kernels.peaks([torch.ones(3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)]).tolist() == [1, 0]


@built
def test_copies_do_not_leave_their_place():
    g, out = torch.ones(100), torch.ones(90)
    with pytest.raises(ValueError, match="100 elements do not fit into 90"):
        native.copy_scaled([g], [out], 1.0)
    odd = (torch.ones(40)[::2], torch.ones(20, dtype=torch.bfloat16))
    for g, to in [*((x, g[:20]) for x in odd), *((g[:20], x) for x in odd)]:
        with pytest.raises(ValueError, match="of one dtype are needed, each in one piece"):
            native.copy_scaled([g], [to], 1.0)
        assert kernels.copy_scaled.implementation([g], [to], 1.0) is kernels.copy_scaled.specification
    assert kernels.copy_scaled.implementation([out], [out], 1.0) is kernels.copy_scaled.native


@all_implementations(
    sizes=Sizes(
        st.lists(st.integers(1, 700), min_size=1, max_size=3),
        st.lists(st.integers(1, 700) | st.just(5000), min_size=1, max_size=6),
    ),
    large=Sizes(st.sampled_from([0, 0, 5000]), st.sampled_from([0] * 6 + [280_000])),
    dtype=halves_and_wholes,
    kind=st.sampled_from(KINDS),
    ratio=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]),
    together=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_select(of, sizes, large, dtype, kind, ratio, together, seed):
    spans, start = [], 0
    for size in [*sizes, *([large] if large else [])]:
        spans.append((start, start + size))
        start += -(-size // 64) * 64
    flat = torch.zeros(start, dtype=dtype)
    for place, (first, last) in enumerate(spans):
        flat[first:last] = numbers(last - first, dtype, kind, seed + place)
    pieces = [spans] if together else [[span] for span in spans]
    counts = [math.ceil(ratio * sum(last - first for first, last in group)) for group in pieces]
    groups = Groups(pieces, counts, flat.device)
    assert_same_bits(of.block_maxima(flat), block_maxima(flat))
    chosen = of.select(flat, block_maxima(flat), groups)
    assert torch.equal(chosen, specification.select(flat, block_maxima(flat), groups))
    asked: list[Tensor] = []

    def rows_of(blocks: Tensor) -> Tensor:
        asked.append(blocks)
        return flat.to(blocks.device).view(-1, 64)[blocks]

    ahead, values = of.select_ahead(rows_of, block_maxima(flat), groups)
    assert torch.equal(ahead, chosen)
    assert_same_bits(values, flat[chosen])
    assert all(torch.equal(blocks, blocks.unique()) for blocks in asked)
    assert_same_bits(specification.select_ahead(rows_of, block_maxima(flat), groups)[1], values)
    # and both are right: the largest of each group, of equal ones the first
    width = {2: torch.int16, 4: torch.int32}[flat.element_size()]
    magnitudes = (flat.view(width) & torch.iinfo(width).max).tolist()
    expected: list[int] = []
    for group, count in zip(pieces, counts, strict=True):
        owned = [position for first, last in group for position in range(first, last)]
        expected += sorted(sorted(owned, key=lambda position: -magnitudes[position])[:count])
    assert chosen.tolist() == expected


@all_implementations(numel=st.integers(0, 300), width=st.integers(0, 7), seed=st.integers(0, 2**20))
def test_pack_small(of, numel, width, seed):
    fields = torch.randint(2**width, (numel,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = of.pack_small(fields, width)
    assert torch.equal(packed, specification.pack_small(fields, width))
    assert torch.equal(of.unpack_small(packed, numel, width), fields)


@all_implementations(
    rows=Sizes(
        *(
            st.lists(st.lists(st.integers(0, 5) | st.integers(0, gap), max_size=most), min_size=1, max_size=4)
            for gap, most in ((700, 12), (3000, 100))
        )
    ),
    b=st.integers(0, 20),
    seed=st.integers(0, 2**20),
)
def test_rice(of, rows, b, seed):
    counts = torch.tensor([len(gaps) for gaps in rows])
    length = int(counts.amax()) + seed % 3
    lists = [(torch.tensor(gaps, dtype=torch.int64) + 1).cumsum(0) - 1 for gaps in rows]
    last = torch.tensor([int(row[-1]) if len(row) else -1 for row in lists])
    indices = last.unsqueeze(1).repeat(1, length)  # behind each row's own, the last of them
    for row, mine in zip(indices, lists, strict=True):
        row[: len(mine)] = mine
    numel = max(1, int(last.amax()) + 1)
    room = numel + seed % 5 - 2
    smallest, quotients = of.rice_measure(indices, counts, b, room)
    assert smallest.tolist() == [min([*gaps, room - sum(gaps) - len(gaps)]) if gaps else 0 for gaps in rows]
    assert quotients.tolist() == [sum(gap >> b for gap in gaps) for gaps in rows]
    for mine, other in zip((smallest, quotients), specification.rice_measure(indices, counts, b, room), strict=True):
        assert torch.equal(mine, other)

    unary = [len(gaps) * (b // 8) + -(-len(gaps) // 8) * (b % 8) for gaps in rows]
    needed = [u - (-sum((gap >> b) + 1 for gap in gaps) // 8) for u, gaps in zip(unary, rows, strict=True)]
    packed = of.rice_pack(indices, counts, b, max(needed) + 3)
    assert torch.equal(packed, specification.rice_pack(indices, counts, b, max(needed) + 3))
    for each in (of, specification):
        arrived, wrong = each.rice_unpack(packed, counts, b, numel, length)
        assert not wrong.any() and torch.equal(arrived, indices)
        if counts.any():
            _, wrong = each.rice_unpack(packed, counts, b, numel - 1, length)
            assert torch.equal(wrong, last == numel - 1)
            try:
                short = each.rice_pack(indices, counts, b, max(needed) - 1)
            except ValueError as error:
                assert each is native and "do not fit" in str(error)
            else:  # nobody waits for that on a device, but who reads finds out
                _, wrong = each.rice_unpack(short, counts, b, numel, length)
                assert torch.equal(wrong, torch.tensor(needed) == max(needed))
    damaged = packed ^ torch.randint(256, packed.shape, generator=torch.Generator().manual_seed(seed)).byte()
    for message in (damaged, torch.zeros_like(packed), torch.full_like(packed, 255)):
        ours, wrong = of.rice_unpack(message, counts, b, numel, length)
        theirs, wrong_too = specification.rice_unpack(message, counts, b, numel, length)
        assert torch.equal(wrong, wrong_too) and torch.equal(ours[~wrong], theirs[~wrong])


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


def run(code: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_environment_chooses(tmp_path):
    show = "from dgcopt import kernels; print(repr(kernels.instructions()))"
    assert run(show, DGCOPT_KERNELS="torch") == "''"
    with pytest.raises(AssertionError, match="DGCOPT_KERNELS must be"):
        run(show, DGCOPT_KERNELS="fast")


def test_without_the_library_everything_runs_in_torch(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("DGCOPT_KERNELS", raising=False)
    monkeypatch.setattr(library, "_LIBRARY", tmp_path / "missing.so")
    library._library.cache_clear()
    try:
        with caplog.at_level("INFO", "dgcopt"):
            assert kernels.instructions() == "" and kernels.instructions() == ""
            assert kernels.pack_small(torch.ones(8, dtype=torch.uint8), 1).tolist() == [255]
        told = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert [level for level, _ in told] == ["WARNING"], "once in a process"
        assert f"compiled loops are missing ({tmp_path / 'missing.so'})" in told[0][1]
        assert "`python setup.py build_ext --inplace --force`" in told[0][1]
        monkeypatch.setenv("DGCOPT_KERNELS", "native")
        library._library.cache_clear()
        with pytest.raises(ConfigError, match="loops are missing"):
            kernels.instructions()
    finally:
        library._library.cache_clear()


@pytest.mark.parametrize("why", ["processor", "platform"])
def test_where_no_library_is_expected_nothing_warns(why, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("DGCOPT_KERNELS", raising=False)
    if why == "platform":
        monkeypatch.setattr(library, "_LIBRARY", tmp_path / "missing.so")
        monkeypatch.setattr(library.sys, "platform", "darwin")
    else:
        monkeypatch.setattr(library.ctypes, "CDLL", lambda _: None)
        monkeypatch.setattr(library, "_text", lambda *_: "")
    library._library.cache_clear()
    try:
        with caplog.at_level("INFO", "dgcopt"):
            assert kernels.instructions() == ""
        words = {"platform": "are for Linux only", "processor": "need a processor with"}[why]
        assert [record.levelname for record in caplog.records] == ["INFO"] and words in caplog.text
    finally:
        library._library.cache_clear()


@built
def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch, caplog):
    """As after an update of an editable install: what is missing in it would end training with an AttributeError."""
    monkeypatch.delenv("DGCOPT_KERNELS", raising=False)
    elsewhere = tmp_path / "kernels"
    shutil.copytree(KERNELS, elsewhere, ignore=shutil.ignore_patterns("*.so", "*.py"))
    monkeypatch.setattr(library, "__file__", str(elsewhere / "native" / "library.py"))
    library._library.cache_clear()
    try:
        assert kernels.instructions()
        (elsewhere / "memory" / "native.h").write_text("/* newer */")
        library._library.cache_clear()
        with caplog.at_level("INFO", "dgcopt"):
            assert kernels.instructions() == ""
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "are older than their sources" in caplog.text and "install dgcopt again" in caplog.text
    finally:
        library._library.cache_clear()


@built
def test_under_sanitizers(tmp_path):
    """The loops read and write nothing but what they are given, and do nothing that C leaves undefined."""
    compiler = shutil.which("gcc") or pytest.skip("no gcc, whose sanitizers this uses")
    sanitized = tmp_path / "libdgcopt.so"
    flags = ["-g1", "-O0", "-ffp-contract=off", "-shared", "-fPIC", "-fsanitize=address,undefined"]
    flags.append("-fno-sanitize-recover=all")
    # of the instruction sets only the one that this processor runs: each takes a quarter of a minute
    sets = re.compile(r"#define TARGET.*?#define SET (\w+)\n.*?#undef SET\n", re.DOTALL)
    whole = (KERNELS / "native" / "native.c").read_text()
    source = tmp_path / "native.c"
    source.write_text(sets.sub(lambda found: found[0] * (found[1] == kernels.instructions()), whole))
    assert len(source.read_text()) < len(whole)
    build = subprocess.run(
        [compiler, *flags, f"-I{KERNELS / 'native'}", source, "-o", sanitized], capture_output=True, text=True
    )
    if build.returncode:
        pytest.skip(f"gcc has no sanitizers here: {build.stderr[-200:]}")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    code = f"""
import importlib, pathlib, sys
from dgcopt.kernels.native import library
library._LIBRARY = pathlib.Path({str(sanitized)!r})
here = pathlib.Path({str(Path(__file__).parent)!r})
sys.path.insert(0, str(here.parents[2]))
for path in sorted(here.glob("test_*.py")):
    for name, test in vars(importlib.import_module("tests.unit.kernels." + path.stem)).items():
        if name.startswith("test_") and getattr(test, "in_c", test).__dict__.get("is_hypothesis_test"):
            getattr(test, "in_c", test)()
print("clean", library.instructions())
"""
    env = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "DGCOPT_TEST_EXAMPLES": "30"}
    assert run(code, DGCOPT_KERNELS="native", **env) == f"clean {kernels.instructions()}"
