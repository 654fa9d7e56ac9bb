"""What ranks start from: compared before the first step; and state that one rank saved for all, or that came late."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt import DGC, ConfigError, DivergenceError, LocalSGD, MismatchError, Warmup
from dgcopt.exchange.agreement import compare
from tests.support.worlds import Ranks, small_model, together

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WARM = DGC(0.01, warmup=Warmup(ratios=(0.5, 0.25, 0.1), steps=2))


# -- in words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"ratio": (0.1, 0.2)}, "DGC(ratio=0.1, ...", "DGC(ratio=0.2, ..."),
        ({"values": ("fp32", "int8")}, "DGC(..., values='fp32', ...", "DGC(..., values='int8', ..."),
        (
            {"reduce": ("owner", "auto"), "keep": (1.0, 2.0)},
            "reduce='owner', keep=1.0, ...",
            "reduce='auto', keep=2.0, ...",
        ),
    ],
)
def test_of_long_settings_those_are_shown_that_differ(settings: dict[str, Any], first: str, second: str) -> None:
    def exchange(comm: dgcopt.Comm) -> Any:
        rule = DGC(**{name: values[comm.rank] for name, values in settings.items()})
        return compare([f"compression: {rule!r}"], comm.rank, "settings")

    for error in together(2, exchange, MismatchError):
        shown = str(error)
        assert f"{first}]" in shown and f"{second}]" in shown and "momentum_masking" not in shown, shown


# -- compared before the first step ----------------------------------------------------------------------------------


def spoil(ranks: Ranks, name: str = "2.bias", rank: int = 1) -> None:
    with torch.no_grad():
        dict(ranks.models[rank].named_parameters())[name][0] += 1e-9


@pytest.mark.parametrize("compression", [None, DGC(0.1), dgcopt.TopK(0.1, source="update")])
@pytest.mark.parametrize("frozen", [False, True])
def test_different_weights_are_noticed_at_the_first_step(compression, frozen: bool):
    ranks = Ranks(3, sgd, compression=compression)
    if frozen:
        for model in ranks.models:
            model[2].bias.requires_grad_(False)
    spoil(ranks)
    words = (
        r"before the first step: parameter '2.bias' is not the same on rank\(s\) \[1\] as on rank 0 \(1 of 6 .*"
        r"dgcopt\.broadcast_parameters\(model\.state_dict\(\), root_rank=0\)"
    )
    before = ranks.weights()
    ranks.backward()
    for optimizer in ranks.optimizers:
        with pytest.raises(DivergenceError, match=words):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ranks.weights(), strict=True)), "a step was taken"
    for model in ranks.models:
        model.load_state_dict(ranks.models[0].state_dict())
    ranks.step()
    ranks.assert_replicas_equal()


def test_resync_takes_the_weights_of_rank_0():
    ranks = Ranks(3, sgd, compression=DGC(0.1), on_divergence="resync")
    spoil(ranks)
    first = ranks.weights()[3].clone()
    ranks.step()
    ranks.assert_replicas_equal()
    assert not torch.equal(first, ranks.weights()[3])


@pytest.mark.parametrize(
    ("setting", "value"), [("lr", 0.2), ("lr", torch.tensor(0.2)), ("betas", (0.8, 0.999)), ("weight_decay", 1e-3)]
)
def test_different_settings_are_noticed_at_the_first_step(setting: str, value: Any):
    ranks = Ranks(2, functools.partial(torch.optim.Adam, lr=0.1), compression=dgcopt.TopK(0.1))
    ranks.optimizers[1].param_groups[0][setting] = value
    ranks.backward()
    words = rf"rank 0 has \[{setting} of parameter group 0: .*rank 1 has \[{setting} .*broadcast_optimizer_state"
    for optimizer in ranks.optimizers:
        with pytest.raises(MismatchError, match=words):
            optimizer.step()


def test_different_state_is_noticed_at_the_first_step():
    """As when rank 0 alone has loaded a bare optimizer's state, and only weights were broadcast."""
    ranks = Ranks(2, functools.partial(torch.optim.Adam, lr=0.1))
    bare = torch.optim.Adam(ranks.models[0].parameters(), lr=0.1)
    for param in ranks.models[0].parameters():
        param.grad = torch.zeros_like(param)
    bare.step()
    ranks.optimizers[0].load_state_dict(bare.state_dict())
    ranks.backward()
    with pytest.raises(MismatchError, match=r"state of parameter 0.weight: .*broadcast_optimizer_state"):
        ranks.optimizers[0].step()


def test_sparse_state_is_compared_and_mended_too():
    """SGD's momentum of an embedding's sparse gradient."""

    def step(tables: list[nn.Embedding], optimizers: list[Any]) -> None:
        for rank, table in enumerate(tables):
            table(torch.tensor([1, 3 + rank])).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def world(states: list[Any], **settings: Any) -> tuple[list[nn.Embedding], list[Any]]:
        tables = [nn.Embedding.from_pretrained(torch.ones(6, 2), freeze=False, sparse=True) for _ in range(2)]
        optimizers: list[Any] = []
        for table, comm, state in zip(tables, dgcopt.simulated_world(2), states, strict=True):
            mine = sgd(table.parameters())
            mine.load_state_dict(copy.deepcopy(state) if state else mine.state_dict())
            optimizers.append(dgcopt.DistributedOptimizer(mine, table.named_parameters(), comm=comm, **settings))
        return tables, optimizers

    tables, optimizers = world([None, None])
    step(tables, optimizers)
    saved = {key: optimizers[0].state_dict()[key] for key in ("state", "param_groups")}
    assert saved["state"][0]["momentum_buffer"].is_sparse
    tables, optimizers = world([saved, saved], check_replicas_every=1)
    step(tables, optimizers)
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=0, atol=0)
    optimizers[1].state[tables[1].weight]["momentum_buffer"].mul_(2)
    with pytest.raises(DivergenceError, match="parameter 'weight' is not the same on rank"):
        step(tables, optimizers)
    other = copy.deepcopy(saved)
    other["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"] * 2
    with pytest.raises(MismatchError, match="state of parameter weight"):
        step(*world([saved, other]))
    tables, optimizers = world([saved, saved], check_replicas_every=1, on_divergence="resync")
    step(tables, optimizers)
    optimizers[1].state[tables[1].weight]["momentum_buffer"].mul_(2)
    step(tables, optimizers)
    one, two = (opt.state[table.weight]["momentum_buffer"] for opt, table in zip(optimizers, tables, strict=True))
    assert one.is_sparse and two.is_sparse
    torch.testing.assert_close(one.to_dense(), two.to_dense(), rtol=0, atol=0)


@pytest.mark.parametrize("on_divergence", ["raise", "resync"])
def test_weights_of_one_rank_that_make_every_step_void_are_noticed(on_divergence) -> None:
    """Its gradients hold NaN, so that all ranks skip the step, and would skip all later ones without a word.

    Each rank raises, also the one that another has moved through the vote before its own step.
    """
    ranks = Ranks(2, sgd, compression=DGC(0.1), check_replicas_every=1, on_divergence=on_divergence)
    ranks.step(0)
    with torch.no_grad():
        ranks.models[1][2].bias[0] = torch.nan
    if on_divergence == "raise":
        ranks.backward(1)
        for optimizer in ranks.optimizers:
            with pytest.raises(DivergenceError, match=r"parameter '2\.bias' is not the same on rank"):
                optimizer.step()
        return
    ranks.step(1)
    ranks.step(2)
    ranks.assert_replicas_equal()
    assert [optimizer.telemetry.skipped for optimizer in ranks.optimizers] == [1, 1]


def test_only_the_ranks_of_a_process_set_are_compared():
    model = [small_model() for _ in range(3)]
    optimizers = [
        dgcopt.DistributedOptimizer(sgd(m.parameters()), m.named_parameters(), process_set=[0, 2], comm=comm)
        for m, comm in zip(model, dgcopt.simulated_world(3), strict=True)
    ]
    with torch.no_grad():
        model[1][0].weight.zero_()
    for m in model:
        m(torch.ones(2, 12, dtype=torch.float64)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(model[0][0].weight, model[2][0].weight)


def test_compared_once_and_again_on_another_wire(monkeypatch):
    """Later on `check_replicas_every` does it, for those who want it."""
    ranks = Ranks(2, sgd, compression=DGC(0.1))
    ranks.step()
    spoil(ranks)
    ranks.step()
    for optimizer, comm in zip(ranks.optimizers, dgcopt.simulated_world(2), strict=True):
        optimizer.rejoin(comm)
    ranks.backward()
    with pytest.raises(DivergenceError, match="before the first step"):
        ranks.optimizers[0].step()


def test_a_rank_without_data_is_compared_too():
    ranks = Ranks(2, sgd)
    spoil(ranks)
    ranks.backward()
    for param in ranks.models[1].parameters():
        param.grad = None
    with pytest.raises(DivergenceError, match=r"2\.bias"), dgcopt.join(ranks.optimizers[1]):
        pass  # no batch at all
    with pytest.raises(DivergenceError, match=r"2\.bias"):
        ranks.optimizers[0].step()


# -- state that rank 0 has saved for all ------------------------------------------------------------------------------


def trained(size: int = 2, steps: int = 3, **settings) -> Ranks:
    ranks = Ranks(size, sgd, **{"compression": WARM, **settings})
    for seed in range(steps):
        ranks.step(seed)
    return ranks


def load_everywhere(ranks: Ranks, source: Ranks) -> None:
    """What frameworks do: rank 0's file, on every rank."""
    for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
        model.load_state_dict(source.models[0].state_dict())
        optimizer.load_state_dict(copy.deepcopy(source.optimizers[0].state_dict()))


def memory(optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return optimizer.state_dict()["dgcopt"]["memory"]


def sent_in_a_step(ranks: Ranks, seed: int) -> int:
    before = ranks.optimizers[0].telemetry.payload_bytes
    ranks.step(seed)
    return ranks.optimizers[0].telemetry.payload_bytes - before


def test_a_checkpoint_of_rank_0_is_loaded_by_every_rank(caplog):
    whole = trained()
    ranks = Ranks(2, sgd, compression=WARM)
    with caplog.at_level(logging.WARNING, "dgcopt"):
        load_everywhere(ranks, whole)
    (said,) = caplog.messages
    for words in ("rank 1 of 2", "rank 0 of 2", "momentum, residual", "dgcopt.checkpoint.save", "checkpoint.load"):
        assert words in said, said
    kept, there = memory(ranks.optimizers[0]), memory(whole.optimizers[0])
    assert all(torch.equal(kept[kind][name], there[kind][name]) for kind in there for name in there[kind])
    assert memory(ranks.optimizers[1]) == {}
    assert [o.state_dict()["dgcopt"]["step"] for o in ranks.optimizers] == [3, 3]
    for seed in (3, 4, 5, 6):
        both = sent_in_a_step(ranks, seed), sent_in_a_step(whole, seed)
        assert seed == 3 or both[0] == both[1], "the warm-up did not go on"  # before the first step, ranks compare
    ranks.assert_replicas_equal()


@pytest.mark.parametrize("size", [1, 3])
def test_by_another_number_of_ranks_it_is_loaded_without_memory(size: int, caplog):
    whole = trained()
    ranks = Ranks(size, sgd, compression=WARM)
    load_everywhere(ranks, whole)
    assert len(caplog.messages) == size and f"rank 0 of {size} loads the state of rank 0 of 2" in caplog.messages[0]
    for seed in (3, 4):
        ranks.step(seed)
    ranks.assert_replicas_equal()
    if size > 1:
        assert ranks.optimizers[2].state_dict()["dgcopt"]["step"] == 5


def test_shared_state_of_rank_0_goes_on(caplog):
    """PowerSGD starts from what it had last, the same on all ranks."""
    whole = trained(compression=dgcopt.PowerSGD(rank=1, start_step=0))
    ranks = Ranks(2, sgd, compression=dgcopt.PowerSGD(rank=1, start_step=0))
    load_everywhere(ranks, whole)
    shared = [o.state_dict()["dgcopt"]["shared"] for o in (whole.optimizers[0], *ranks.optimizers)]
    assert shared[0] and all(
        torch.equal(shared[0][kind][name], other[kind][name])
        for other in shared[1:]
        for kind in shared[0]
        for name in shared[0][kind]
    )
    ranks.step(3)
    ranks.assert_replicas_equal()


def test_nothing_is_said_where_nothing_is_lost(caplog):
    whole = trained(compression=None)
    ranks = Ranks(2, sgd)
    load_everywhere(ranks, whole)
    assert not caplog.messages
    whole.step(3)
    ranks.step(3)
    assert all(torch.equal(a, b) for a, b in zip(ranks.weights(), whole.weights(), strict=True))


# -- state that was loaded before the optimizer was wrapped -----------------------------------------------------------


def loaded_then_wrapped(source: Ranks) -> Ranks:
    state, weights = source.optimizers[0].state_dict(), source.models[0].state_dict()

    def model() -> nn.Module:
        made = small_model()
        made.load_state_dict(weights)
        return made

    def bare(params):
        optimizer = sgd(params)
        optimizer.load_state_dict(copy.deepcopy(state))
        return optimizer

    return Ranks(len(source.optimizers), bare, model, compression=WARM)


def test_state_loaded_before_wrapping_goes_on_at_its_step(caplog):
    whole = trained()
    ranks = loaded_then_wrapped(whole)
    assert len(caplog.messages) == 2
    for words in ("step 3", "loaded before the optimizer was wrapped", "dgcopt.checkpoint.save"):
        assert words in caplog.messages[0], caplog.messages
    assert [o.state_dict()["dgcopt"]["step"] for o in ranks.optimizers] == [3, 3]
    for seed in (3, 4, 5, 6):
        both = sent_in_a_step(ranks, seed), sent_in_a_step(whole, seed)
        assert seed == 3 or both[0] == both[1], "the warm-up did not go on"  # before the first step, ranks compare
    ranks.assert_replicas_equal()


def test_state_without_our_entry_goes_on_at_its_step(caplog):
    """Some libraries store only what torch's optimizers have."""
    whole = trained()
    ranks = Ranks(2, sgd, compression=WARM)
    for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
        model.load_state_dict(whole.models[0].state_dict())
        state = copy.deepcopy(whole.optimizers[0].state_dict())
        optimizer.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    assert "lost its entry 'dgcopt'" in caplog.messages[0]
    assert [o.state_dict()["dgcopt"]["step"] for o in ranks.optimizers] == [3, 3]
    ranks.step(3)
    ranks.assert_replicas_equal()


def test_the_mark_is_in_saved_state_alone():
    whole = trained()
    saved = whole.optimizers[0].state_dict()["param_groups"][0]
    assert saved["dgcopt_step"] == 3 and all(type(saved[key]) is int for key in saved if key.startswith("dgcopt"))
    ranks = loaded_then_wrapped(whole)
    load_everywhere(whole, ranks)
    for optimizer in (*whole.optimizers, *ranks.optimizers):
        assert not [key for group in optimizer.param_groups for key in group if key.startswith("dgcopt")]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_bare_optimizers_take_marked_state(kind):
    whole = Ranks(2, functools.partial(kind, lr=0.01), compression=dgcopt.TopK(0.1))
    whole.step()
    model = small_model()
    bare = kind(model.parameters(), lr=0.01)
    bare.load_state_dict(whole.optimizers[0].state_dict())
    schedule = torch.optim.lr_scheduler.ExponentialLR(bare, 0.9)
    model(torch.ones(2, 12, dtype=torch.float64)).sum().backward()
    bare.step()
    schedule.step()
    copy.deepcopy(bare).load_state_dict(bare.state_dict())


def test_torchs_distributed_checkpoint_takes_marked_state(caplog):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    whole = Ranks(2, functools.partial(torch.optim.Adam, lr=0.01), compression=dgcopt.TopK(0.1))
    whole.step()
    state = get_optimizer_state_dict(whole.models[0], whole.optimizers[0])
    model = small_model()
    bare = torch.optim.Adam(model.parameters(), lr=0.01)
    set_optimizer_state_dict(model, bare, state)
    (comm, _) = dgcopt.simulated_world(2)
    optimizer = dgcopt.DistributedOptimizer(bare, model.named_parameters(), dgcopt.TopK(0.1), comm=comm)
    assert optimizer.state_dict()["dgcopt"]["step"] == 1


def test_torchs_distributed_checkpoint_sends_nothing():
    """It calls step() with zeros as gradients, at lr=0, where an optimizer keeps nothing, as SGD does."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    ranks = Ranks(2, functools.partial(torch.optim.SGD, lr=0.1), compression=dgcopt.TopK(0.1))
    for seed in range(3):
        ranks.step(seed)
    held = [optimizer.residual_norm() for optimizer in ranks.optimizers]
    for model, optimizer in zip(ranks.models, ranks.optimizers, strict=True):
        optimizer.zero_grad()
        get_optimizer_state_dict(model, optimizer)
    assert [optimizer.residual_norm() for optimizer in ranks.optimizers] == held and all(held)
    assert [optimizer.telemetry.steps for optimizer in ranks.optimizers] == [3, 3]


# -- compositions that make no sense ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_what_is_averaged_now_and_then_are_not_averaged_too(size: int):
    model = small_model()
    comm = dgcopt.simulated_world(size)[0]
    averaged = LocalSGD(sgd(model.parameters()), every=4, comm=comm)
    with pytest.raises(ConfigError, match=r"weights are averaged by LocalSGD\(every=4.* a process_set of fewer"):
        dgcopt.DistributedOptimizer(averaged, comm=comm)
