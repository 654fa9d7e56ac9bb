"""Recorded costs: bytes are those of the telemetry, seconds are attributed to the phase in which they were spent."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dgcopt import BF16, DGC, ByteGrad, Compressor, ConfigError, DistributedOptimizer, NoCompression, PowerSGD
from dgcopt.collectives import AllReduce
from dgcopt.comm import simulated_world
from dgcopt.tuning import costs
from dgcopt.tuning.advise import recipes_of
from dgcopt.tuning.costs import Recipe, Recording, load_recipes, record, record_recipe, save_recipes
from dgcopt.tuning.timeline import Round
from dgcopt.tuning.wire import HALF

SHAPES = {"first": (300, 200), "bias": (300,), "second": (100, 300)}


def payload_of(compressor: Compressor, size: int) -> int:
    """Return the bytes of rank 0's messages in one step of simulated ranks."""
    optimizers = []
    for comm in simulated_world(size, nodes=size):
        params = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
        made = DistributedOptimizer(torch.optim.SGD([p for _, p in params], lr=0.1), params, compressor, comm=comm)
        optimizers.append((made, params))
    before = [0]
    for _ in range(3):
        before = [optimizer.telemetry.payload_bytes for optimizer, _ in optimizers]
        for _, params in optimizers:
            for _, param in reversed(params):
                param.grad = None
                (param * torch.ones(param.shape)).sum().backward()
        for optimizer, _ in optimizers:
            optimizer.step()
    return optimizers[0][0].telemetry.payload_bytes - before[0]


@pytest.mark.parametrize(
    ("compressor", "kinds"),
    [
        (NoCompression(), [["AllReduce"]]),
        (BF16(), [[HALF]]),
        (ByteGrad(), [["AllToAll"], ["AllGather"]]),
        (PowerSGD(rank=2, start_step=0), [["AllReduce"], ["AllReduce"]]),
        (DGC(ratio=0.01, warmup=None), [["AllGather", "AllReduce"]]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Compressor) else "",
)
def test_rounds_and_bytes_are_those_of_a_real_step(compressor: Compressor, kinds: list[list[str]]) -> None:
    found = record(SHAPES, compressor, 4)
    assert [sorted(one.kind for one in place) for place in found.rounds] == kinds
    assert found.votes >= 1
    sent = sum(one.nbytes for place in found.rounds for one in place)
    control = payload_of(compressor, 4) - sent
    assert 0 <= control < 400, "all but votes is data"


def test_bytes_of_all_buckets_are_added() -> None:
    whole = record(SHAPES, ByteGrad(), 2)
    parts = record(SHAPES, ByteGrad(), 2, bucket_mb=0.05, first_bucket_mb=0.05)
    for one, other in zip(whole.rounds, parts.rounds, strict=True):
        assert [each.kind for each in one] == [each.kind for each in other]
        assert other[0].nbytes == pytest.approx(one[0].nbytes, rel=0.01)


class Slow(Compressor):
    """Takes known seconds in each phase."""

    def exchange(self, grad: torch.Tensor, ctx: object) -> Iterator[AllReduce]:  # type: ignore[override]
        time.sleep(0.03)
        once = yield AllReduce(grad, op="average")
        time.sleep(0.06)
        twice = yield AllReduce(once, op="average")
        time.sleep(0.12)
        return twice  # type: ignore[return-value]


def test_seconds_belong_to_the_phase_in_which_they_were_spent(clock: Callable[[], float]) -> None:
    found = record(SHAPES, Slow(), 2, clock=clock)
    assert found.encode == pytest.approx(0.03)
    assert found.decode == [pytest.approx(0.06), pytest.approx(0.12)]
    assert len(found.rounds) == 2


def test_a_clock_of_the_process_leaves_out_waiting() -> None:
    assert record(SHAPES, Slow(), 2, clock=time.process_time).seconds < 0.06


def recipe_of(low: Recording, high: Recording) -> Recipe:
    return Recipe("some", "delayed", False, False, 100.0, 100.0, low, high)


def test_bytes_shared_by_owners_fall_and_seconds_of_all_messages_grow_with_ranks() -> None:
    low = Recording(2, [[Round("AllGather", 100.0)]], 1.0, [2.0], 1)
    high = Recording(4, [[Round("AllGather", 50.0)]], 1.0, [4.0], 1)
    method = recipe_of(low, high).method(8)
    ((one,),) = method.rounds
    assert one.nbytes == pytest.approx(25.0)
    assert method.decode == (pytest.approx(8.0),)
    faster = recipe_of(low, high).method(8, speed=4.0)
    assert (faster.encode, *faster.decode) == (pytest.approx(0.25), pytest.approx(2.0))
    assert recipe_of(low, high).method(2).rounds == ((Round("AllGather", 100.0),),)


def test_recipes_survive_a_file(tmp_path: Path) -> None:
    recipe = record_recipe("BF16()", "rounded", SHAPES, BF16(), (2, 4))
    assert recipe.overlap
    assert (recipe.bucket_mb, recipe.first_bucket_mb) == (25.0, 1.0)
    save_recipes({"toy": [recipe]}, tmp_path / "costs.json")
    assert load_recipes(tmp_path / "costs.json") == {"toy": [recipe]}
    (tmp_path / "costs.json").write_text(json.dumps([1, 2]))
    with pytest.raises(ConfigError, match="holds no costs of `dgcopt advise --save-costs`"):
        load_recipes(tmp_path / "costs.json")
    with pytest.raises(ConfigError, match="cannot read"):
        load_recipes(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"encode": "x"}, "must be real number, not str"),
        ({"decode": [None]}, "must be real number, not NoneType"),
        ({"step": float("nan")}, "numbers of BF16\\(\\) are not finite"),
        ({"rounds": [[{"kind": "AllReduce", "nbytes": float("inf")}]]}, "numbers of BF16\\(\\) are not finite"),
        ({"rounds": [[{"kind": "AllReduce"}]]}, "missing 1 required positional argument: 'nbytes'"),
        ({"rounds": 3}, "not iterable"),
        ({"more": 3}, "unexpected keyword argument 'more'"),
    ],
    ids=str,
)
def test_costs_with_wrong_numbers_are_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    recording = Recording(2, [[Round("AllReduce", 60.0)]], 1.0, [1.0])
    path = tmp_path / "costs.json"
    save_recipes({"toy": [Recipe("BF16()", "rounded", True, False, 25.0, 1.0, recording, recording)]}, path)
    content = json.loads(path.read_text())
    content["toy"][0]["low"] |= wrong
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"costs.json holds no costs of `dgcopt advise --save-costs`: .*{said}"):
        load_recipes(path)


def test_backward_is_not_counted_as_work_of_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a recorded step take 5 s to arrive; nothing else takes any time."""
    now, arrive = [0.0], costs._arrive

    def slowly(params: Any, gradients: Any) -> None:
        now[0] += 5.0
        arrive(params, gradients)

    monkeypatch.setattr(costs, "_arrive", slowly)
    recording = record({"weight": (64, 64)}, NoCompression(), 2, clock=lambda: now[0])
    assert (recording.encode, recording.seconds) == (0.0, 0.0)


def test_an_unknown_candidate_is_refused_before_anything_is_recorded() -> None:
    recorded: list[str] = []
    with pytest.raises(ConfigError, match=r"unknown candidate 'DGC': choose from"):
        recipes_of({"weight": (4, 4)}, ["BF16()", "DGC"], before=recorded.append)
    assert not recorded


def test_recording_leaves_no_memory_behind_and_searches_no_older_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    def noted(*args: Any, **settings: Any) -> Any:
        optimizer = DistributedOptimizer(*args, **settings)
        made.append(weakref.ref(optimizer))
        return optimizer

    monkeypatch.setattr(costs, "DistributedOptimizer", noted)
    frozen = gc.get_freeze_count() > 0  # by the start of the tests, see tests/support/startup
    gc.unfreeze()
    gc.disable()
    try:
        older = weakref.ref(Cycle())
        record(SHAPES, NoCompression(), 2, steps=1)
        assert made[0]() is None
        assert older() is not None and gc.get_freeze_count() == 0
        gc.freeze()
        record(SHAPES, NoCompression(), 2, steps=1)
        assert made[1]() is None
        assert gc.get_freeze_count() > 0, "the user's objects stay frozen"
    finally:
        gc.enable()
        if not frozen:
            gc.unfreeze()
