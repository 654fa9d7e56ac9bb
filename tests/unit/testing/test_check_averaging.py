"""The kit for averaging algorithms passes those that come with dgcopt, and says what is wrong with broken ones."""

from __future__ import annotations

import functools

import pytest
import torch

import dgcopt
from dgcopt.averaging import (
    SGP,
    SPARTA,
    Averaging,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    Ring,
    SlowMo,
    SparseLoCo,
)
from dgcopt.collectives import AllReduce, Broadcast
from dgcopt.testing import ConformanceError, Report, check_averaging


@pytest.mark.parametrize(
    "rule",
    [
        LocalSGD(2, overlap=True),
        SlowMo(4, base=LocalSGD(2)),
        SGP(Ring(), overlap=True),
        Decentralized("shift_one"),
        LowPrecisionDecentralized(),
        SPARTA(0.1),
        DiLoCo(4, fragments=2, delay=1, alpha=0.5),
        DiLoCo(2, compression=dgcopt.TopK(0.1), unsent="local"),
        SparseLoCo(2, 0.1, 64),
    ],
    ids=repr,
)
def test_those_that_there_are(rule: Averaging) -> None:
    report = check_averaging(rule, sizes=(3,))
    assert isinstance(report, Report) and not report.failures and len(report.lines) == 12


class Mean(Averaging):
    """Right, at every second step; the ones below are not."""

    def __init__(self, every: int = 2) -> None:
        self.every = every

    def due(self, step):
        return step % self.every == 0

    def exchange(self, x, ctx):
        return (yield AllReduce(x))

    def identical(self, step):
        return True


class Grows(Mean):
    def exchange(self, x, ctx):
        return 1.01 * (yield AllReduce(x))


class Spoils(Mean):
    def exchange(self, x, ctx):
        return (yield AllReduce(x)) / (0 if ctx.step > 2 else 1)


class Halfway(Mean):
    def exchange(self, x, ctx):
        return (x + (yield AllReduce(x.clone()))) / 2


class Keeps(Mean):
    def exchange(self, x, ctx):
        yield AllReduce(x.clone())
        return x

    def identical(self, step):
        return False


class TakesTheFirst(Mean):
    """Rank's weights only."""

    def exchange(self, x, ctx):
        return (yield Broadcast(x, root=0))


class StartsAgain(Mean):
    """From the first weights."""

    def start(self, x, ctx):
        if "first" not in ctx.memory:
            ctx.memory.put("first", x.clone())

    def exchange(self, x, ctx):
        yield AllReduce(x)
        return ctx.memory["first"].clone()


class Remembers(Mean):
    """A heavy ball of its own, where no checkpoint finds it."""

    def exchange(self, x, ctx):
        mean = yield AllReduce(x)
        self.before = mean.clone()
        return mean


class RemembersInPlace(Mean):
    def __init__(self) -> None:
        super().__init__()
        self._seen: dict = {}

    def exchange(self, x, ctx):
        mean = yield AllReduce(x)
        kept = self._seen.get(ctx.index, mean)
        self._seen[ctx.index] = mean.clone()
        return mean + 0.1 * (mean - kept)


class OfItsSize(Mean):
    """What it keeps is for so many ranks."""

    def start(self, x, ctx):
        if "ranks" not in ctx.memory:
            ctx.memory.put("ranks", torch.full_like(x, ctx.size))
        ranks = ctx.memory["ranks"]
        if int(ranks[0]) != ctx.size:
            raise ValueError("other ranks")


class Impatient(Mean):
    """Takes no account of ranks that have run out of data."""

    def exchange(self, x, ctx):
        if ctx.weight != 1:
            raise ValueError("where are you?")
        return (yield AllReduce(x))


class Throws(Mean):
    """Dice."""

    def exchange(self, x, ctx):
        x *= 1 + 1e-9 * torch.rand((), dtype=torch.float64)
        return (yield AllReduce(x))


class Never(Mean):
    """After its first exchange."""

    def due(self, step):
        return step == 2


class ReachesNobody(Mean):
    def reaches_all(self, step):
        return False


class ChangesAtOnce(Mean):
    """Memory that a skipped round must leave."""

    def start(self, x, ctx):
        if "sum" not in ctx.memory:
            ctx.memory.put("sum", torch.zeros_like(x))

    def exchange(self, x, ctx):
        ctx.memory["sum"].add_(x)
        return (yield AllReduce(x))


class TrustsTheWire(Mean):
    """To overwrite the weights with their mean."""

    def exchange(self, x, ctx):
        yield AllReduce(x)
        return x


class Seeds(Mean):
    """The random numbers of everybody."""

    def exchange(self, x, ctx):
        torch.manual_seed(ctx.step)
        return (yield AllReduce(x))


class Unequal(Mean):
    def __repr__(self) -> str:
        return f"Unequal at {id(self)}"


@pytest.mark.parametrize(
    ("rule", "failure", "words"),
    [
        (Grows(), "at rest and alike, nothing moves", "were moved by"),
        (Spoils(), "weights are finite, in four dtypes", "are not finite"),
        (Halfway(), "the same bits if it is identical", "but identical(2) is true"),
        (Keeps(), "at rest and apart, ranks come together", "after 24 exchanges"),
        (
            TakesTheFirst(),
            "each rank's steps reach the others",
            "weights of rank(s) [0, 1] do not depend on the",
        ),
        (
            StartsAgain(),
            "each rank's steps reach the others",
            "weights of rank(s) [0, 1] do not depend on the",
        ),
        (Remembers(), "memory is in ctx, none in itself", "attribute(s) before: keep memory in ctx"),
        (
            RemembersInPlace(),
            "a checkpoint goes on bit for bit",
            "after an exchange and loaded, it continues differently",
        ),
        (OfItsSize(), "other numbers of ranks go on from the mean", "other ranks"),
        (Impatient(), "ranks may run out of data", "where are you?"),
        (Never(), "ranks may run out of data", "has no round in the next"),
        (ReachesNobody(), "ranks may run out of data", "serves the others' rounds for ever"),
        (ChangesAtOnce(), "an exchange changes nothing by itself", "ctx.memory['sum'] changes before the round"),
        (TrustsTheWire(), "an exchange changes nothing by itself", "reads a message after the reduction"),
        (Seeds(), "an exchange changes nothing by itself", "has changed torch's random numbers"),
        (Throws(), "another run has the same bits", "derive random numbers from ctx.step"),
        (Unequal(), "settings can be compared and copied", "a copy has another repr"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Averaging) else "",
)
def test_a_broken_one_is_caught(rule: Averaging, failure: str, words: str) -> None:
    with pytest.raises(ConformanceError) as told:
        check_averaging(rule, sizes=(1,) if isinstance(rule, Unequal) else (2,))
    wrong = [line.strip() for line in str(told.value).splitlines() if " rank(s): " in line]
    assert any(line.startswith(failure) and words in line for line in wrong), told.value


def test_a_right_one_passes_and_names_its_settings() -> None:
    assert str(check_averaging(Mean(), sizes=(1, 2))).startswith("Mean(every=2)\n  weights are finite")


def test_rules_that_cannot_be_checked_are_refused() -> None:
    with pytest.raises(dgcopt.ConfigError, match="no exchange within 50 steps"):
        check_averaging(LocalSGD(100))
    with pytest.raises(dgcopt.ConfigError, match="in a thread"):
        check_averaging(dgcopt.AsyncAverage())


def test_another_optimizer() -> None:
    adam = functools.partial(torch.optim.Adam, lr=0.01, eps=1e-4)
    check_averaging(Mean(), adam, sizes=(2,))
