"""Membership: survivors agree on who is left and on the interrupted step, whenever ranks die or stand still."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcopt.comm.membership import LATEST, Epoch, Rules, Status, agree, found, gone_key, join, noticed_key
from dgcopt.errors import QuorumLost, VotedOut
from tests.support.simulated_store import Simulation
from tests.support.survivors import Run

RULES = Rules(grace=0.2, notice=0.5, deadline=3.0)


@settings(max_examples=1200, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32),
    st.integers(2, 7),
    st.lists(st.floats(0.0, 3.0), max_size=6),
    st.sampled_from([None, 0.3]),
    st.booleans(),
)
def test_survivors_agree(seed: int, size: int, kills: list[float], restart: float | None, agents: bool) -> None:
    """After any kills: one membership per epoch, the same commits on all, dead ranks included, and an end."""
    run = Run(seed, size, goal=20, rules=RULES, agents=agents, restart_after=restart)
    for second in kills:
        run.at(second, run.kill)
    run.sim.run(until=300)
    run.check()
    for process in run.sim.processes.values():
        if isinstance(process.error, QuorumLost):
            # before the first epoch all are needed; without testimony, more than half may be lost at once
            assert not run.epochs or not agents or restart or len(run.killed) >= size, process.error
        elif process.error is not None and not isinstance(process.error, VotedOut):
            raise process.error
    assert len(run.epochs) <= 1 + 2 * (len(run.killed) + run.restarted + size)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32),
    st.integers(3, 6),
    st.lists(st.tuples(st.floats(0.4, 2.0), st.floats(0.1, 12.0)), min_size=1, max_size=4),
)
def test_a_frozen_rank_is_voted_out_or_goes_on(seed: int, size: int, freezes: list[tuple[float, float]]) -> None:
    """A rank that stands still for longer than the deadline ends with VotedOut; never do two halves go on."""
    run = Run(seed, size, goal=20, rules=RULES)
    for second, long in freezes:
        run.at(second, lambda process, long=long: run.freeze(process, long))
    run.sim.run(until=300)
    run.check()
    for process in run.sim.processes.values():
        if process.error is not None:
            assert isinstance(process.error, VotedOut | QuorumLost), process.error
            if isinstance(process.error, VotedOut) and len(freezes) == 1:
                assert process.name in run.frozen, f"{process.name} was voted out, but {run.frozen} stood still"
    ended = [process for process in run.sim.processes.values() if process.result == 20]
    if len(freezes) == 1:
        assert len(ended) >= size - 1


def settle(members: int, statuses: dict[int, Status], rules: Rules = RULES, gone: tuple[int, ...] = ()) -> Simulation:
    """The survivors of epoch 0 negotiate."""
    sim = Simulation(random.Random(0))
    names = tuple(f"m{rank}" for rank in range(members))
    last = Epoch(0, names, ("",) * members, 5)
    for rank in gone:
        sim.data[gone_key(f"m{rank}")] = "killed"
    for rank, status in statuses.items():
        sim.start(f"m{rank}", agree(status, last, rules, sim.now))
    sim.run(until=100)
    return sim


def status(rank: int, commits: int, prepared: bool = False) -> Status:
    return Status(f"m{rank}", rank, "", commits, prepared)


@pytest.mark.parametrize(
    ("statuses", "commits"),
    [
        ([status(0, 5), status(1, 5)], 5),
        ([status(0, 5, True), status(1, 5)], 5),
        ([status(0, 5, True), status(1, 5, True)], 6),
        ([status(0, 6), status(1, 5, True)], 6),
        ([status(0, 5, True), status(1, 6)], 6),
    ],
)
def test_the_interrupted_step(statuses: list[Status], commits: int) -> None:
    """It is committed if a survivor has done so or all have prepared; else all abort."""
    sim = settle(3, dict(enumerate(statuses)), gone=(2,))
    assert {process.result.commits for process in sim.processes.values()} == {commits}


@pytest.mark.parametrize("admits", [True, False])
def test_a_process_without_state_waits_for_a_rank_that_can_give_it(admits: bool) -> None:
    """One that has asked for state again is voted out if the others are past the place at which they give it."""
    ranks = {0: status(0, 5), 1: replace(status(1, 5), admits=admits), 2: status(2, -1)}
    sim = settle(3, ranks)
    members = sim.processes["m0"].result.members
    assert members == (("m0", "m1", "m2") if admits else ("m0", "m1"))
    assert isinstance(sim.processes["m2"].error, VotedOut) is not admits


def test_known_deaths_need_no_patience() -> None:
    """An agent's testimony ends the wait, and takes the dead out of the count: one of four goes on."""
    sim = settle(4, {3: status(3, 5)}, gone=(0, 1, 2))
    assert sim.processes["m3"].result.members == ("m3",)
    assert sim.time < 2 * RULES.deadline
    waited = settle(4, {0: status(0, 5), 1: status(1, 5), 2: status(2, 5)})
    assert waited.processes["m0"].result.members == ("m0", "m1", "m2")


@pytest.mark.parametrize("noticed", [True, False])
def test_a_busy_rank_is_waited_for(noticed: bool) -> None:
    """After a deadline has passed, a rank that has noticed it goes on, however late it announces itself."""
    sim = Simulation(random.Random(3))
    last = Epoch(0, ("m0", "m1", "m2"), ("",) * 3, 5)
    for rank in (0, 1):
        sim.start(f"m{rank}", agree(status(rank, 5), last, RULES, sim.now, patience=RULES.notice))
    if noticed:
        sim.data[noticed_key(0, "m2")] = ""
    sim.after(2.0, lambda: sim.start("m2", agree(status(2, 5), last, RULES, sim.now)))
    sim.run(until=100)
    members = sim.processes["m0"].result.members
    assert members == (("m0", "m1", "m2") if noticed else ("m0", "m1"))
    assert isinstance(sim.processes["m2"].error, VotedOut) is not noticed


@pytest.mark.parametrize(
    ("there", "rules"), [([0], Rules(deadline=3.0)), ([0, 1, 2], Rules(min_ranks=4, deadline=3.0))]
)
def test_too_few_are_an_error(there: list[int], rules: Rules) -> None:
    """Fewer than half without testimony, or fewer than min_ranks: a sentence after the deadline, not a wait."""
    sim = settle(4, {rank: status(rank, 5) for rank in there}, rules)
    for process in sim.processes.values():
        assert isinstance(process.error, QuorumLost)
        assert "answered" in str(process.error)


def test_a_straggler_asks_again() -> None:
    """A late rank is not waited for although it has noticed the end; it joins an epoch after the one without it."""
    sim = Simulation(random.Random(5))
    last = Epoch(0, ("m0", "m1", "m2"), ("",) * 3, 5)
    sim.data[noticed_key(0, "m2")] = sim.data[LATEST] = "0"
    for rank in (0, 1):
        sim.start(f"m{rank}", agree(status(rank, 5), last, RULES, sim.now, 0.4, waits_for_busy=False))
    sim.run(until=2)
    epoch = sim.processes["m0"].result
    assert epoch.members == ("m0", "m1")
    for member in ("m0", "m1"):  # whose next epoch takes in all that ask
        sim.start(f"{member} again", agree(replace(status(int(member[1]), 6)), epoch, RULES, sim.now))
    sim.data["dgcopt/ask/0"] = status(2, -1).text()  # its request of before the first epoch
    sim.data[LATEST] = "0"  # the proposer has not written the newer number yet
    asking = replace(status(2, -1), returns=1)
    sim.start("m2", join(asking, RULES, sim.now, first=2))
    sim.run(until=10)
    assert sim.processes["m2"].result.number >= 2
    assert "m2" in sim.processes["m2"].result.members


def test_half_against_half() -> None:
    """Two halves that cannot see each other's announcements: the store decides, and the other half ends."""
    sim = Simulation(random.Random(1))
    last = Epoch(0, ("m0", "m1", "m2", "m3"), ("",) * 4, 5)
    for rank in range(4):
        sim.start(f"m{rank}", agree(status(rank, 5), last, RULES, sim.now, patience=0.2))
    for rank in (2, 3):  # their announcements come after the others have decided
        sim.freeze(sim.processes[f"m{rank}"], 2.0)
    sim.run(until=100)
    assert [sim.processes[f"m{rank}"].result.members for rank in (0, 1)] == [("m0", "m1")] * 2
    assert all(isinstance(sim.processes[f"m{rank}"].error, VotedOut) for rank in (2, 3))


@pytest.mark.parametrize("moment", [place / 1000 for place in range(0, 60, 2)])
def test_a_proposer_that_freezes(moment: float) -> None:
    """In whichever of its operations: others take over, and it learns of their offer in place of making its own."""
    sim = Simulation(random.Random(4))
    last = Epoch(0, ("m0", "m1", "m2", "m3"), ("",) * 4, 5)
    sim.data[gone_key("m3")] = "killed"
    for rank in range(3):
        sim.start(f"m{rank}", agree(status(rank, 5), last, RULES, sim.now, patience=0.2))
    sim.after(moment, lambda: sim.freeze(sim.processes["m0"], 10.0))
    sim.run(until=100)
    outcomes = [process.result or process.error for process in sim.processes.values()]
    assert outcomes[1] == outcomes[2]
    assert isinstance(outcomes[0], VotedOut) or outcomes[0] == outcomes[1], outcomes


def test_the_first_epoch_is_in_order_of_hints() -> None:
    sim = Simulation(random.Random(2))
    for rank in (2, 0, 1):
        sim.start(f"m{rank}", found(status(rank, -1), 3, RULES, sim.now))
    sim.run(until=10)
    assert {process.result.members for process in sim.processes.values()} == {("m0", "m1", "m2")}
