"""Settings that change after wrapping: they take effect, or the error names them on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt import ConfigError, MismatchError
from dgcopt.exchange import group_settings
from dgcopt.exchange.group_settings import GroupSettings
from tests.support.worlds import Ranks, momentum_sgd, same


@pytest.mark.parametrize("kind", [dgcopt.TopK, dgcopt.DGC], ids=["sent during backward", "sent after the vote"])
def test_settings_that_one_rank_has_changed(kind: Any) -> None:
    ranks = Ranks(2, momentum_sgd, compression=kind(0.5))
    for seed in range(3):
        ranks.step(seed)
    ranks.optimizers[1].compressor.ratio = 0.1
    ranks.backward()
    with pytest.raises(MismatchError, match=r"rank 0 has \[compression: .*ratio=0\.5.*rank 1 has .*ratio=0\.1"):
        ranks.optimizers[0].step()


@pytest.mark.parametrize("kind", [dgcopt.TopK, dgcopt.DGC])
def test_settings_that_all_ranks_have_changed(kind: Any) -> None:
    ranks = Ranks(2, momentum_sgd, compression=kind(0.5, warmup=dgcopt.Warmup((0.7, 0.6))))
    for optimizer in ranks.optimizers:
        optimizer.compressor.set_steps_per_epoch(2)
    for seed in range(3):
        ranks.step(seed)
    for optimizer in ranks.optimizers:
        optimizer.compressor.set_steps_per_epoch(3)
    for seed in range(3, 8):
        ranks.step(seed)
        ranks.assert_replicas_equal()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": list(params)}], lr=torch.tensor(0.1), betas=(0.9, 0.99))


OF_A_GROUP: list[tuple[Any, str, Any, str]] = [
    (
        momentum_sgd,
        "lr",
        0.05,
        r"rank 0 has \[lr of parameter group 0: 0\.1\], rank 1 has \[lr of parameter group 0: 0\.05\]",
    ),
    (momentum_sgd, "weight_decay", 0.01, r"weight_decay of parameter group 0: 0\], rank 1 has .*: 0\.01"),
    (momentum_sgd, "momentum", 0.8, r"momentum of parameter group 0: 0\.9\], rank 1 has .*: 0\.8"),
    (momentum_sgd, "nesterov", True, r"nesterov of parameter group 0: False\], rank 1 has .*: True"),
    (adam, "betas", (0.9, 0.98), r"betas of parameter group 0: 0\.9, 0\.99\], rank 1 has .*: 0\.9, 0\.98"),
    (adam, "lr", torch.tensor(0.2), r"lr of parameter group 0: 0\.1\d*\], rank 1 has .*: 0\.2"),
]


@pytest.mark.parametrize(("make", "name", "value", "words"), OF_A_GROUP, ids=[case[1] for case in OF_A_GROUP])
@pytest.mark.parametrize("kind", [dgcopt.TopK, dgcopt.DGC], ids=["sent during backward", "sent after the vote"])
def test_a_number_in_a_parameter_group_that_one_rank_changes(
    kind: Any, make: Any, name: str, value: Any, words: str
) -> None:
    """Told before weights or memory move; once ranks agree again, they go on as if it had never been."""
    ranks, untouched = (Ranks(3, make, compression=kind(0.5)) for _ in range(2))
    for seed in range(3):
        ranks.step(seed)
        untouched.step(seed)
    group = ranks.optimizers[1].param_groups[0]
    before, told = group[name], [optimizer.state_dict()["dgcopt"] for optimizer in ranks.optimizers]
    group[name] = value
    ranks.backward(3)
    for optimizer in ranks.optimizers:
        with pytest.raises(MismatchError, match=words):
            optimizer.step()
    assert same([optimizer.state_dict()["dgcopt"] for optimizer in ranks.optimizers], told)
    assert all(same(ranks.weights(rank), untouched.weights()) for rank in range(3))
    group[name] = before
    for seed in range(4, 6):
        ranks.step(seed)
        untouched.step(seed)
    assert all(same(ranks.weights(rank), untouched.weights()) for rank in range(3))


def test_a_tensor_that_one_rank_changes_in_place() -> None:
    ranks = Ranks(2, adam)
    ranks.step()
    ranks.optimizers[1].param_groups[0]["lr"].mul_(0.5)
    ranks.backward()
    with pytest.raises(MismatchError, match=r"lr of parameter group 0: 0\.1\d*\], rank 1 has .*: 0\.05"):
        ranks.optimizers[0].step()


def test_settings_that_differ_on_purpose() -> None:
    """From the start, and later; what is not named is still compared."""
    lrs = iter((0.1, 0.2))
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, next(lrs), momentum=0.9), may_differ=("lr",))
    ranks.step()
    ranks.optimizers[1].param_groups[0]["lr"] = 0.3
    ranks.step()
    assert [optimizer.param_groups[0]["lr"] for optimizer in ranks.optimizers] == [0.1, 0.3]
    ranks.optimizers[1].param_groups[0]["momentum"] = 0.5
    ranks.backward()
    with pytest.raises(MismatchError, match=r"momentum of parameter group 0"):
        ranks.optimizers[0].step()
    for wrong in ("lr", ("rate",), None):
        with pytest.raises(ConfigError, match=r'such as \("lr",\).*there are .*lr.*weight_decay'):
            Ranks(1, momentum_sgd, may_differ=wrong)


def test_settings_are_taken_over_from_rank_0_where_divergence_is_mended(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2, momentum_sgd, on_divergence="resync")
    for seed, lr in enumerate((0.1, 0.05, 0.1, 0.02)):
        ranks.optimizers[1].param_groups[0]["lr"] = lr
        ranks.step(seed)
        assert ranks.optimizers[1].param_groups[0]["lr"] == 0.1
        ranks.assert_replicas_equal()
    told = [record.getMessage() for record in caplog.records if "lr of parameter group 0: 0.02" in record.getMessage()]
    assert len(told) == 2, "on each rank"


def test_exchanges_launched_by_settings_that_are_mended_are_launched_again() -> None:
    ranks, untouched = (
        Ranks(2, momentum_sgd, compression=dgcopt.DGC(0.5, overlap=True), on_divergence="resync") for _ in range(2)
    )
    for seed in range(3):
        if seed == 2:
            ranks.optimizers[1].param_groups[0]["momentum"] = 0.5
        for each in (ranks, untouched):
            each.step(seed)
    for rank in range(2):
        assert same(ranks.weights(rank), untouched.weights(rank))
        assert same(*(each.optimizers[rank].state_dict()["dgcopt"]["memory"] for each in (ranks, untouched)))
        assert ranks.optimizers[rank].telemetry.repeated == 1


def test_settings_are_not_read_anew_until_one_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step compares them by few operations, whatever their number."""
    optimizer = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], "lr": place} for place in range(50)])
    settings = GroupSettings(optimizer)
    read: list[Any] = []
    numbers = group_settings._numbers
    monkeypatch.setattr(group_settings, "_numbers", lambda value: (read.append(value), numbers(value))[1])
    first = settings.checksum()
    once = len(read)
    read.clear()
    assert settings.checksum() == first and len(read) < once / 2
    optimizer.param_groups[7]["weight_decay"] = 1
    assert settings.checksum() != first
    twin = GroupSettings(copy.deepcopy(optimizer))
    twin._optimizer.param_groups[7] = dict(reversed(twin._optimizer.param_groups[7].items()))
    twin._optimizer.param_groups[7]["weight_decay"] = 1.0
    assert twin.checksum() == settings.checksum(), "neither their order nor their type matters"


def test_a_tensor_on_an_accelerator_is_not_read_in_a_step() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1)
    settings = GroupSettings(optimizer)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")  # a read raises
    settings.checksum()
