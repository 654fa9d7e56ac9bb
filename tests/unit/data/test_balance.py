"""Samplers that give all ranks samples of like cost at the same step."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import dgcopt
from dgcopt.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

LENGTHS = [(place * 37) % 101 + 1 for place in range(50)]
"""50 different numbers."""


def samplers(ranks: int, count: int = 50, **settings: Any) -> list[LoadBalancingDistributedSampler]:
    return [
        LoadBalancingDistributedSampler(range(count), lambda place: LENGTHS[place], ranks, rank, **settings)
        for rank in range(ranks)
    ]


def rows_of(each: list[LoadBalancingDistributedSampler]) -> list[tuple[int, ...]]:
    return list(zip(*each, strict=True))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_each_row_is_of_neighbours_in_cost(ranks: int, shuffle: bool) -> None:
    place = {length: at for at, length in enumerate(sorted(LENGTHS))}
    for row in rows_of(samplers(ranks, shuffle=shuffle)):
        places = sorted(place[LENGTHS[sample]] for sample in row)
        assert places == list(range(places[0], places[0] + ranks)), "not neighbours"


@pytest.mark.parametrize(("ranks", "count"), [(1, 50), (2, 50), (3, 50), (7, 50), (8, 5), (4, 1)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_is_dealt_once(ranks: int, count: int, shuffle: bool) -> None:
    for epoch, level in itertools.product((0, 1, 2), (0.0, 1.0)):
        settings = {"count": count, "shuffle": shuffle, "random_level": level}
        padded, dropped, uneven = (
            samplers(ranks, **settings, **more) for more in ({}, {"drop_last": True}, {"uneven": True})
        )
        for each in (padded, dropped, uneven):
            for sampler in each:
                sampler.set_epoch(epoch)
                assert len(sampler) == len(list(sampler))
        counts = Counter(itertools.chain(*padded))
        assert counts.keys() == set(range(count)) and counts.total() == -(-count // ranks) * ranks
        assert max(Counter(itertools.chain(*dropped)).values(), default=1) == 1
        assert {len(sampler) for sampler in dropped} == {count // ranks}
        assert sorted(itertools.chain(*uneven)) == list(range(count)), "a sample is missing or came twice"
        assert {len(sampler) for sampler in uneven} <= {count // ranks, -(-count // ranks)}


def test_no_rank_has_all_of_the_longest() -> None:
    totals = [sum(LENGTHS[sample] for sample in sampler) for sampler in samplers(2)]
    assert max(totals) / min(totals) < 1.02


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def order(seed: int, epoch: int, **more: Any) -> list[int]:
        (sampler,) = samplers(1, seed=seed, **more)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0) != order(0, 1)
    assert order(0, 0) != order(5, 0)
    assert order(0, 0, shuffle=False) == order(0, 1, shuffle=False)


def test_equal_costs_meet_others_in_every_epoch() -> None:
    sampler = LoadBalancingDistributedSampler(range(64), [1] * 64, 2, 0)
    other = LoadBalancingDistributedSampler(range(64), [1] * 64, 2, 1)
    pairs = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        other.set_epoch(epoch)
        pairs.append({frozenset(pair) for pair in zip(sampler, other, strict=True)})
    assert len(pairs[0] & pairs[1]) < 8


def test_random_level_blurs() -> None:
    def spread(level: float) -> float:
        rows = rows_of(samplers(2, random_level=level))
        return sum(abs(LENGTHS[a] - LENGTHS[b]) for a, b in rows) / len(rows)

    assert spread(0.0) < spread(0.3) < spread(1.0)


@pytest.mark.parametrize("stop", [0, 1, 7, 12, 25])
@pytest.mark.parametrize("uneven", [False, True])
def test_resumes_in_the_middle(stop: int, uneven: bool) -> None:
    for rank in (0, 1, 2):
        whole, part, later = (samplers(3, uneven=uneven)[rank] for _ in range(3))
        for each in (whole, part):
            each.set_epoch(4)
        expected = list(whole)
        begun = iter(part)
        taken = list(itertools.islice(begun, stop))
        later.load_state_dict(part.state_dict())
        assert later.epoch == 4
        later.set_epoch(4)  # as the loop does that goes on
        assert taken + list(later) == expected
        assert list(later) == expected, "the next iteration is a whole one"
        later.set_epoch(5)
        whole.set_epoch(5)
        assert list(later) == list(whole)


def test_resumes_a_loader_that_reads_ahead() -> None:
    (sampler,), (again,) = samplers(1), samplers(1)
    batches = iter(DataLoader(range(50), batch_size=4, sampler=sampler, num_workers=1, prefetch_factor=3))  # type: ignore[arg-type]
    used = [next(batches) for _ in range(3)]
    rest = [batch.tolist() for batch in batches]
    again.load_state_dict(sampler.state_dict(done=sum(len(batch) for batch in used)))
    assert [batch.tolist() for batch in DataLoader(range(50), batch_size=4, sampler=again)] == rest  # type: ignore[arg-type]


def test_a_state_of_another_order_is_refused() -> None:
    state = samplers(2)[0].state_dict()
    for other in (
        samplers(3)[0],
        samplers(2, seed=1)[0],
        samplers(2, count=49)[0],
        samplers(2, random_level=0.5)[0],
        LoadBalancingDistributedSampler(range(50), [1.0] * 50, 2, 0),
    ):
        with pytest.raises(dgcopt.CheckpointError, match=r"was .* and is "):
            other.load_state_dict(state)
    samplers(2)[1].load_state_dict(state)
    samplers(2)[1].load_state_dict({name: value for name, value in state.items() if name != "checksum_of_costs"})


def by_words(budget: int) -> Any:
    def batches(samples: list[int]) -> list[list[int]]:
        made: list[list[int]] = [[]]
        for sample in samples:
            if made[-1] and sum(LENGTHS[each] for each in made[-1]) + LENGTHS[sample] > budget:
                made.append([])
            made[-1].append(sample)
        return made

    return batches


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches(ranks: int) -> None:
    made = by_words(120)
    for epoch in (0, 1):
        by_way: dict[str, list[list[list[int]]]] = {"pad": [], "drop_last": [], "uneven": []}
        for way, got in by_way.items():
            for sampler in samplers(ranks, uneven=True):
                each = LoadBalancingDistributedBatchSampler(sampler, made, **({} if way == "pad" else {way: True}))
                each.set_epoch(epoch)
                got.append(list(each))
                assert len(each) == len(got[-1])
        own = by_way["uneven"]
        assert sorted(sample for rank in own for batch in rank for sample in batch) == list(range(50))
        counts = [len(rank) for rank in own]
        assert [len(rank) for rank in by_way["pad"]] == [max(counts)] * ranks
        assert by_way["drop_last"] == [rank[: min(counts)] for rank in own]
        assert [rank[: len(mine)] for rank, mine in zip(by_way["pad"], own, strict=True)] == own


def test_few_batches_are_repeated_as_often_as_it_takes() -> None:
    sampler = samplers(2)[0]
    first = sampler.of_rank(0)
    each = LoadBalancingDistributedBatchSampler(
        sampler, lambda samples: [samples] if samples == first else [[sample] for sample in samples]
    )
    assert list(each) == [first] * 25


def test_batches_resume_in_the_middle() -> None:
    def make() -> LoadBalancingDistributedBatchSampler:
        return LoadBalancingDistributedBatchSampler(samplers(2)[1], by_words(120))

    part, later = make(), make()
    part.set_epoch(2)
    begun = iter(part)
    taken = list(itertools.islice(begun, 4))
    later.load_state_dict(part.state_dict())
    expected = make()
    expected.set_epoch(2)
    assert taken + list(later) == list(expected)


@pytest.mark.parametrize("uneven", [False, True])
def test_a_state_of_other_batches_is_refused(uneven: bool) -> None:
    """Its position counts batches. The state is the same on all ranks, though their batches are not."""
    both = [LoadBalancingDistributedBatchSampler(each, by_words(120), uneven=uneven) for each in samplers(2)]
    for each in both:
        each.set_epoch(2)
    state = both[0].state_dict(3)
    assert state == both[1].state_dict(3)
    other = LoadBalancingDistributedBatchSampler(samplers(2)[1], by_words(60), uneven=uneven)
    with pytest.raises(dgcopt.CheckpointError, match=r"batch_fn makes other batches .* so position 3 is another"):
        other.load_state_dict(state)
    other.load_state_dict({name: value for name, value in state.items() if name != "checksum_of_batches"})


def test_batches_follow_an_epoch_that_is_set_on_the_sampler() -> None:
    """Lightning sets that of `batch_sampler.sampler`: it trained on the first epoch's batches in every epoch."""
    direct, through = (LoadBalancingDistributedBatchSampler(samplers(2)[1], by_words(120)) for _ in range(2))
    first = list(through)
    for epoch in (1, 2):
        direct.set_epoch(epoch)
        through.sampler.set_epoch(epoch)
        assert through.state_dict() == direct.state_dict() and through.state_dict()["done"] == 0
        assert first != list(through) == list(direct)


def test_a_default_device_is_not_followed() -> None:
    (sampler,) = samplers(1)
    with torch.device("meta"):
        assert list(samplers(1)[0]) == list(sampler)


def test_rank_and_size_come_from_the_wire() -> None:
    sampler = LoadBalancingDistributedSampler(range(5), [1, 2, 3, 4, 5])
    dgcopt.shutdown()
    assert (sampler.num_replicas, sampler.rank) == (1, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_replicas": 2, "rank": 2}, "rank must be below num_replicas, which is 2, not 2"),
        ({"num_replicas": 0}, "num_replicas must be a whole number of at least 1"),
        ({"random_level": 1.5}, "random_level must be from 0 to 1, not 1.5"),
        ({"shuffle": 1}, "shuffle must be True or False"),
        ({"drop_last": True, "uneven": True}, "set one of them"),
        ({"complexity_fn": lambda sample: float("nan")}, "for sample 0 it is nan"),
        ({"complexity_fn": lambda sample: None if sample == 3 else 1}, "for sample 3 it is None"),
        ({"complexity_fn": [1, 2]}, "2 costs, but the dataset has 5 samples"),
        ({"dataset": []}, "empty"),
    ],
)
def test_refuses(settings: dict[str, Any], words: str) -> None:
    given = {"dataset": range(5), "complexity_fn": lambda sample: sample, "num_replicas": 1, "rank": 0, **settings}
    with pytest.raises(dgcopt.ConfigError, match=words):
        LoadBalancingDistributedSampler(**given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LoadBalancingDistributedBatchSampler([1, 2], list), "not list"),
        (lambda: LoadBalancingDistributedBatchSampler(samplers(1, drop_last=True)[0], list), "must be False"),
        (lambda: LoadBalancingDistributedBatchSampler(samplers(1)[0], None), "batch_fn must be a function"),
        (lambda: len(LoadBalancingDistributedBatchSampler(samplers(1)[0], lambda s: [s, []])), "batch 1 of rank 0"),
        (lambda: len(LoadBalancingDistributedBatchSampler(samplers(1)[0], lambda s: [])), "made no batch"),
    ],
)
def test_refuses_batches(make: Any, words: str) -> None:
    with pytest.raises(dgcopt.ConfigError, match=words):
        make()


class World:
    """A wire whose ranks survive the loss of others."""

    survives = True
    elastic = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("batched", [False, True])
def test_after_a_loss_the_next_epoch_is_of_the_ranks_that_are_left(
    batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch under way stays in its order, a restored one too."""
    worlds = [World(rank, 4) for rank in range(4)]
    made: list[Any] = []
    for world in worlds:
        monkeypatch.setattr("dgcopt.data.balance.current_comm", lambda world=world: world)
        sampler = LoadBalancingDistributedSampler(range(12), range(1, 13), uneven=True)
        batches = LoadBalancingDistributedBatchSampler(sampler, lambda own: [[one] for one in own], uneven=True)
        made.append(batches if batched else sampler)
    everything = [[one] for one in range(12)] if batched else [*range(12)]
    assert sorted(itertools.chain(*made)) == everything
    under_way = iter(made[0])
    next(under_way)
    for rank, world in enumerate(worlds[:3]):
        world.rank, world.size = rank, 3
    assert len([*under_way]) == 2 and made[0].state_dict()["num_replicas"] == 4
    for sampler in made[:3]:
        sampler.set_epoch(1)
    assert sorted(itertools.chain(*made[:3])) == everything
    assert [len(sampler) for sampler in made[:3]] == [4, 4, 4]

    worlds[1].size = 2
    made[1].load_state_dict({**made[1].state_dict(), "epoch": 2, "done": 1})
    made[1].set_epoch(2)
    assert len([*made[1]]) == 3
    made[1].set_epoch(3)
    assert len([*made[1]]) == 6


def test_a_rank_that_comes_back_knows_its_place_before_its_first_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes its sampler while it is alone, and even looks at its batches."""
    world = World(0, 1)
    monkeypatch.setattr("dgcopt.data.balance.current_comm", lambda: world)
    sampler = LoadBalancingDistributedSampler(range(12), range(1, 13))
    batches = LoadBalancingDistributedBatchSampler(sampler, lambda own: [[one] for one in own])
    assert len(batches) == 12
    world.rank, world.size = 2, 3
    batches.set_epoch(0)
    assert len(batches) == len(sampler) == 4


def test_each_epoch_is_of_the_current_ranks_of_horovod_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of 3 becomes rank 1 of 2, on another wire. It kept its samples, and those of a lost rank were not read."""
    world = World(2, 3)
    world.survives, world.elastic = False, True
    monkeypatch.setattr("dgcopt.data.balance.current_comm", lambda: world)
    sampler = LoadBalancingDistributedSampler(range(12), range(1, 13))
    later = World(1, 2)
    later.elastic = True
    monkeypatch.setattr("dgcopt.data.balance.current_comm", lambda: later)
    sampler.set_epoch(1)
    assert (sampler.num_replicas, sampler.rank, len(sampler)) == (2, 1, 6)


def test_ranks_that_were_given_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgcopt.data.balance.current_comm", lambda: World(0, 1))
    sampler = LoadBalancingDistributedSampler(range(12), range(1, 13), num_replicas=4)
    sampler.set_epoch(1)
    assert (sampler.num_replicas, sampler.rank) == (4, 0)
