"""The vote of a step: ballots survive their 16 bytes, and ranks conclude what their ballots say, in few bytes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dgcopt
from dgcopt.collectives import watched
from dgcopt.exchange.agreement import compare
from dgcopt.exchange.vote import Ballot, Touch, fingerprint, in_whole_replica, used_anywhere, vote

BALLOT = Ballot(active=True, finite=True, step=7, trained=0xDEADBEEF, launched=3)
flags, words = st.booleans(), st.integers(0, 2**32 - 1)
ballots = st.builds(
    Ballot,
    step=words,
    trained=words,
    settings=words,
    own=st.sampled_from(Touch),
    averaged=st.sampled_from(Touch),
    launched=st.integers(0, 2**16 - 1),
    **dict.fromkeys(("active", "finite", "stale", "prepared", "complete", "final", "by_active", "here"), flags),
)


def run(exchanges):
    """Drive one exchange per rank in lockstep, whatever they return."""
    return dgcopt.simulate(exchanges)


def verdict_on(*changes: dict):
    cast = [dataclasses.replace(BALLOT, **change) for change in changes]
    return verdict_of(cast)


def verdict_of(cast):
    verdicts = run([vote(ballot, range(len(cast)), "vote") for ballot in cast])
    assert all(verdict == verdicts[0] for verdict in verdicts)
    return verdicts[0]


@given(ballots)
def test_sixteen_bytes(ballot):
    packed = ballot.pack()
    assert packed.numel() == 16 and Ballot.unpack(packed) == ballot


def test_one_rank_decides_for_all():
    calm = verdict_on({}, {}, {})
    assert (calm.active_ranks, calm.void, calm.launched) == (3, [], 3)
    assert not calm.stale and calm.prepared and calm.complete and calm.final and calm.alike
    assert verdict_on({}, {"finite": False}, {}).void == [1]
    assert verdict_on({}, {"stale": True}, {}).stale
    assert not verdict_on({}, {"prepared": False}, {}).prepared
    assert not verdict_on({}, {"complete": False}, {}).complete
    assert verdict_on({}, {"complete": False, "active": False}, {}).complete, "a rank without data misses nothing"
    assert verdict_on({}, {"active": False}, {}).active_ranks == 2
    assert verdict_on({}, {"here": False}, {"active": False}).absent == [1]
    assert not verdict_on({}, {"final": False}, {}).final
    assert not verdict_on({}, {"trained": 1}, {}).alike
    apart = verdict_on({}, {"settings": 1}, {})
    assert calm.same_settings and apart.alike and not apart.same_settings
    assert verdict_on({}, {"settings": 1, "active": False}, {}).same_settings, "a rank without data takes them over"
    assert verdict_on({}, {"launched": 9}, {"launched": 0}).launched == 9
    assert verdict_on({"used": 2**40}, {"used": 2**40}).used_alike and not verdict_on({}, {"finite": False}).used_alike
    assert verdict_on({}, {"by_active": True}).by_active
    kept, changed = Touch.KEPT, Touch.CHANGED
    either = verdict_on({"own": changed, "averaged": kept}, {"own": kept, "averaged": changed})
    assert either.own_changed == [0] and either.averaged_changed == [1]
    assert not verdict_on({}, {"used": 1}, {}).used_alike and not verdict_on({}, {}, {"used": 1 << 32}).used_alike


def at_one_step(ballot):
    return dataclasses.replace(ballot, step=7)


@given(st.lists(ballots.map(at_one_step), min_size=1, max_size=4))
def test_one_verdict_in_brief_and_in_detail(cast):
    """What the allreduce concludes is what all the ballots say."""
    verdict = verdict_of(cast)
    assert verdict.active_ranks == sum(ballot.active for ballot in cast)
    assert verdict.absent == [rank for rank, ballot in enumerate(cast) if not ballot.here]
    assert verdict.void == [rank for rank, ballot in enumerate(cast) if not ballot.finite]
    assert verdict.stale == any(ballot.stale for ballot in cast)
    assert verdict.prepared == all(ballot.prepared for ballot in cast)
    assert verdict.complete == all(ballot.complete for ballot in cast if ballot.active)
    assert verdict.final == all(ballot.final for ballot in cast)
    assert verdict.alike == (len({ballot.trained for ballot in cast}) == 1)
    assert verdict.same_settings == (len({ballot.settings for ballot in cast if ballot.active}) <= 1)
    for which in ("own", "averaged"):
        touches = [getattr(ballot, which) if ballot.active else Touch.UNKNOWN for ballot in cast]
        changed = [rank for rank, touch in enumerate(touches) if touch is Touch.CHANGED]
        assert getattr(verdict, f"{which}_changed") == (changed if Touch.KEPT in touches else [])
    assert verdict.launched == max(ballot.launched for ballot in cast)
    assert verdict.by_active == any(ballot.by_active for ballot in cast)


@given(st.integers(0, 2**33), st.integers(0, 2**33))
def test_any_two_steps(one, other):
    """Whatever the numbers, ranks notice that they differ; beyond 32 bits only the lowest count."""
    if (one - other) % 2**32:
        with pytest.raises(dgcopt.MismatchError):
            verdict_on({"step": one}, {"step": other})
    else:
        verdict_on({"step": one}, {"step": other})


def test_bytes_do_not_grow_with_the_ranks():
    for size in (2, 16, 128):
        told = []
        incomplete = dataclasses.replace(BALLOT, complete=False, used=fingerprint([True, False]))
        dgcopt.simulate([watched(vote(incomplete, range(size), "vote"), told.append) for _ in range(size)])
        assert len(told) == size and max(collective.sent(size) for collective in told) < 100


def test_other_steps():
    with pytest.raises(dgcopt.MismatchError, match="rank 0 is at step 7, rank 1 is at step 8"):
        verdict_on({}, {"step": 8})


def in_replica(change: dict):
    """The answers of two ranks that hold shards of one replica, of two, if the second one's ballot differs."""
    comms = [comm.across_replicas([(0, 1), (2, 3)]) for comm in dgcopt.simulated_world(4)]
    cast = [dataclasses.replace(BALLOT, **change) if rank == 1 else BALLOT for rank in range(4)]
    pairs = zip(cast, comms, strict=True)
    answers = dgcopt.simulate([in_whole_replica(mine.finite, comm, "shards", mine) for mine, comm in pairs], comms)
    assert answers[2:] == [True, True]
    return answers[:2]


def test_ranks_of_one_replica_compare_findings_steps_and_settings():
    assert in_replica({}) == [True, True] and in_replica({"finite": False}) == [False, False]
    for different in ({"step": 8}, {"settings": 1}):
        with pytest.raises(dgcopt.MismatchError, match=r"ranks \[0, 1\] hold shards of one replica"):
            in_replica(different)
    assert in_replica({"settings": 1, "here": False}) == [True, True], "a rank without data takes them over"


@given(st.lists(st.lists(st.booleans(), min_size=19, max_size=19), min_size=1, max_size=4))
def test_used_anywhere(used):
    for result in run([used_anywhere(mine, "used") for mine in used]):
        assert result == [any(column) for column in zip(*used, strict=True)]


def test_words_only_if_they_differ():
    comms = dgcopt.simulated_world(3)
    started = []
    for comm in comms:
        comm.start = lambda collective, start=comm.start: (started.append(collective.label), start(collective))[1]
    run_on(comms, [["a", "b"]] * 3)
    assert started == ["hash of settings"] * 3
    with pytest.raises(dgcopt.MismatchError, match=r"rank 0 has \[b\], rank 2 has \[\(nothing\)\]"):
        run_on(comms, [["a", "b"], ["a", "b"], ["a"]])


def run_on(comms, lines):
    return dgcopt.simulate([compare(mine, rank, "settings") for rank, mine in enumerate(lines)], comms)
