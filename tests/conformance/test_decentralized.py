"""Bagua's decentralized SGD does what an independent, naive implementation of its rules does, also in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dgcopt.averaging.decentralized import Decentralized, LowPrecisionDecentralized
from dgcopt.checkpoint import reshare
from dgcopt.errors import ConfigError
from tests.conformance import naive_gossip as naive
from tests.conformance.gossip import (
    ADAM,
    MOMENTUM,
    PLAIN,
    SIZES,
    assert_alike,
    assert_resumes,
    assert_uneven,
    assert_warms_up,
    average,
    averaged,
    flat_numel,
    lr_at,
    sent,
    sent_in_step,
    two_buckets,
)
from tests.conformance.naive_gossip import Replicas

MIX = {"all": naive.mean, "shift_one": naive.graph(naive.even(naive.shift_one))}
NUMEL = 5 * 13 + 3 + 70


class TestDecentralized:
    @pytest.mark.parametrize("peers", MIX)
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize(("every", "make"), [(1, MOMENTUM), (2, ADAM), (3, MOMENTUM)])
    def test_it_is_the_algorithm(self, peers: Any, size: int, every: int, make: Callable) -> None:
        ours = averaged(Decentralized(peers, every), size, make)
        assert_alike(ours, naive.Mixed(Replicas(size, make), MIX[peers], every), steps=8)

    @pytest.mark.parametrize("peers", MIX)
    @pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 3), (2, 2), (3, 1), (3, 2), (4, 2)])
    @pytest.mark.parametrize(("every", "make"), [(1, two_buckets), (2, MOMENTUM)])
    def test_hierarchical(self, peers: Any, nodes: int, per_node: int, every: int, make: Callable) -> None:
        ours = averaged(Decentralized(peers, every, hierarchical=True), nodes * per_node, make, nodes)
        mix = naive.between_nodes(MIX[peers], per_node)
        assert_alike(ours, naive.Mixed(Replicas(nodes * per_node, make), mix, every), steps=7)

    def test_one_rank_is_left_alone(self) -> None:
        for peers in MIX:
            for hierarchical in (False, True):
                ours, theirs = averaged(Decentralized(peers, 1, hierarchical), 1, ADAM), Replicas(1, ADAM)
                for t in range(5):
                    ours.train(t, lr_at(t))
                    theirs.train(t, lr_at(t))
                    assert torch.equal(ours.read(), theirs.read())

    @pytest.mark.parametrize("peers", MIX)
    def test_all_peers_agree_after_one_round_and_pairs_after_many(self, peers: Any) -> None:
        ranks = averaged(Decentralized(peers), 6)
        ranks.train(0, 0.1)
        mean = ranks.read().mean(0).expand(6, -1)
        ranks.train(1, 0.0)  # lands before the step
        assert (peers == "all") == torch.allclose(ranks.read(), mean, rtol=0, atol=1e-12)
        for t in range(2, 40):
            ranks.train(t, 0.0)
        torch.testing.assert_close(ranks.read(), mean, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("peers", MIX)
    @pytest.mark.parametrize("every", [1, 3])
    @pytest.mark.parametrize("nodes", [1, 3])
    def test_saved_and_loaded_it_goes_on(self, peers: Any, every: int, nodes: int) -> None:
        assert_resumes(Decentralized(peers, every, nodes > 1), 6, nodes)

    def test_bytes(self) -> None:
        vote = 2 * 44 * 3 // 4
        for peers, hierarchical, messages, control in (
            ("shift_one", False, [1.0] * 4, 0),
            ("all", False, [1.5] * 4, vote),
            ("shift_one", True, [2.5, 1.5, 2.5, 1.5], 0),  # 1 of an allreduce, 0.5 of a broadcast, 1 between machines
            ("all", True, [2.5, 1.5, 2.5, 1.5], 2 * vote),  # a broadcast inside one machine is seen by that one only
        ):
            ranks = averaged(Decentralized(peers, 2, hierarchical), 4, nodes=2)
            ranks.train(0, lr_at(0))
            weights = 8 * flat_numel(ranks.models[0])
            for t in (1, 3):
                # what is sent after one step, and when the next one begins
                found = [sum(bytes) for bytes in zip(sent_in_step(ranks, t), sent_in_step(ranks, t + 1), strict=True)]
                assert found == [weights * times + control for times in messages], (peers, hierarchical)

    @pytest.mark.parametrize(("peers", "nodes"), [("shift_one", 1), ("shift_one", 2), ("all", 2)])
    def test_ranks_without_data_take_part(self, peers: Any, nodes: int) -> None:
        mix = MIX[peers] if nodes == 1 else naive.between_nodes(MIX[peers], 4 // nodes)
        theirs = naive.MixedAfter(Replicas(4, PLAIN), mix)
        assert_uneven(Decentralized(peers, hierarchical=nodes > 1), theirs, (6, 5, 3, 6), nodes)

    @pytest.mark.parametrize("peers", MIX)
    def test_after_a_warm_up(self, peers: Any) -> None:
        rule = Decentralized(peers, 2, warmup_steps=2)
        assert_warms_up(rule, 3, lambda ranks: naive.Mixed(ranks, MIX[peers], 2))

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"peers": "ring"}, "peers must be .* not 'ring'"),
            ({"every": 0}, "every .* not 0"),
            ({"every": 1.5}, "every .* not 1.5"),
            ({"warmup_steps": -1}, "warmup_steps .* not -1"),
        ],
    )
    def test_bad_settings(self, settings: dict, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            Decentralized(**settings)
        if "peers" not in settings:
            with pytest.raises(ConfigError, match=reason):
                LowPrecisionDecentralized(**settings)


def replicas(ranks: Replicas) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Own, left and right of each rank that holds them."""
    contexts = [ctx for optimizer in ranks.optimizers for ctx in optimizer.averaging.buckets().values()]
    return [(ctx.memory["own"], *ctx.scratch["replicas"]) for ctx in contexts if "replicas" in ctx.scratch]


def assert_known_to_the_bit(held: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    for place, (_, left, right) in enumerate(held):
        assert torch.equal(left, held[place - 1][0])
        assert torch.equal(right, held[(place + 1) % len(held)][0])


class TestLowPrecision:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize(("every", "make"), [(1, MOMENTUM), (2, ADAM), (3, MOMENTUM)])
    def test_it_is_the_algorithm(self, size: int, every: int, make: Callable) -> None:
        ours = averaged(LowPrecisionDecentralized(every), size, make)
        assert_alike(ours, naive.LowPrecision(Replicas(size, make), every), steps=8)

    @pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (2, 2), (3, 1), (3, 2), (4, 2)])
    @pytest.mark.parametrize(("every", "make"), [(1, ADAM), (2, MOMENTUM)])
    def test_hierarchical(self, nodes: int, per_node: int, every: int, make: Callable) -> None:
        size = nodes * per_node
        ours = averaged(LowPrecisionDecentralized(every, hierarchical=True), size, make, nodes)
        assert_alike(ours, naive.LowPrecision(Replicas(size, make), every, per_node), steps=7)
        assert len(replicas(ours)) == nodes
        assert_known_to_the_bit(replicas(ours))

    @pytest.mark.parametrize(("size", "nodes"), [(1, 1), (2, 1), (3, 1), (8, 1), (4, 2), (6, 3)])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_neighbours_know_each_other_to_the_bit(self, size: int, nodes: int, dtype: torch.dtype) -> None:
        ranks = Replicas(size, MOMENTUM)
        for model in ranks.models:
            model.to(dtype)
        average(ranks, LowPrecisionDecentralized(hierarchical=nodes > 1), nodes)
        per_place = size // nodes if nodes > 1 else 1
        for t in range(8):
            ranks.train(t, lr_at(t))
            held = replicas(ranks)
            assert len(held) == size // per_place
            assert_known_to_the_bit(held)
            for rank, model in enumerate(ranks.models):
                own = held[rank // per_place][0]
                assert own.dtype == torch.promote_types(dtype, torch.float32)
                assert torch.equal(model[1].detach(), own[128 : 128 + 3].to(dtype))
        assert size == 1 or not torch.equal(held[0][0], held[1][0])

    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_without_steps_ranks_come_together_up_to_rounding(self, size: int) -> None:
        ranks = averaged(LowPrecisionDecentralized(), size)
        ranks.train(0, 0.1)
        apart = (ranks.read() - ranks.read().mean(0)).abs().max()
        for t in range(1, 30):
            ranks.train(t, 0.0)
        assert (ranks.read() - ranks.read().mean(0)).abs().max() < 1e-4 * apart

    @pytest.mark.parametrize("every", [1, 3])
    @pytest.mark.parametrize("nodes", [1, 3])
    def test_saved_and_loaded_it_goes_on(self, every: int, nodes: int) -> None:
        assert_resumes(LowPrecisionDecentralized(every, nodes > 1), 6, nodes)

    @pytest.mark.parametrize(("size", "nodes"), [(2, 1), (3, 1), (6, 1), (6, 3)])
    def test_another_number_of_ranks_goes_on_from_the_mean(self, size: int, nodes: int) -> None:
        rule = LowPrecisionDecentralized(2, nodes > 1)
        before, after = averaged(rule, 4, nodes=2 if nodes > 1 else 1), averaged(rule, size, nodes=nodes)
        for t in range(4):
            before.train(t, lr_at(t))
        states = [{"optimizer": optimizer.state_dict()} for optimizer in before.optimizers]
        for rank, optimizer in enumerate(after.optimizers):
            optimizer.load_state_dict(reshare(states, rank, size)["optimizer"])
        after.backward(4)
        mean = before.read().mean(0)
        for optimizer in after.optimizers:
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
        torch.testing.assert_close(after.read().mean(0), mean, rtol=0, atol=1e-2)
        for t in range(5, 12):
            after.train(t, lr_at(t))
            assert_known_to_the_bit(replicas(after))

    def test_the_same_ranks_on_other_machines_go_on(self) -> None:
        rule = LowPrecisionDecentralized(hierarchical=True)
        before, after = averaged(rule, 4, nodes=2), averaged(rule, 4, nodes=4)
        for t in range(3):
            before.train(t, lr_at(t))
        for old, new in zip(before.optimizers, after.optimizers, strict=True):
            new.load_state_dict(old.state_dict())
        after.write(before.read())
        flat = Replicas(4, PLAIN)
        flat.write(before.read())
        naively = naive.LowPrecision(flat, 1)
        for t in range(3, 6):
            after.train(t, lr_at(t))
            naively.train(t, lr_at(t))
            torch.testing.assert_close(after.read(), flat.read(), rtol=1e-12, atol=1e-12)
            assert_known_to_the_bit(replicas(after))

    def test_bytes(self) -> None:
        for size, neighbours in ((1, 0), (2, 1), (3, 2), (5, 2)):
            ranks = averaged(LowPrecisionDecentralized(), size)
            message, weights = 8 + NUMEL, 8 * flat_numel(ranks.models[0])
            nothing_yet = averaged(Decentralized("shift_one", 2), size)
            for both in (nothing_yet, ranks):
                both.train(0, lr_at(0))
            assert sent(ranks) == [before + neighbours * (weights + message) for before in sent(nothing_yet)]
            for t in (1, 2):
                assert sent_in_step(ranks, t) == [neighbours * message] * size

    @pytest.mark.parametrize("every", [1, 2])
    def test_ranks_without_data_take_part(self, every: int) -> None:
        rule = LowPrecisionDecentralized(every)
        assert_uneven(rule, naive.LowPrecision(Replicas(4, PLAIN), every), (5, 4, 2, 5))

    def test_after_a_warm_up(self) -> None:
        assert_warms_up(LowPrecisionDecentralized(2, warmup_steps=2), 3, lambda ranks: naive.LowPrecision(ranks, 2))
