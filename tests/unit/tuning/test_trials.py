"""A choice among exchanges as a pure state machine."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dgcopt.tuning.trials import DRIFT, MEASURED, PAUSE, SETTLING, TOO_SLOW, Phase, Trials

TURN = SETTLING + MEASURED


def run(trials: Trials, seconds: Mapping[str, float], steps: int = TURN) -> Trials:
    """Time steps, each of which takes the seconds of the candidate in use; 9 s while it settles."""
    for _ in range(steps):
        trials = trials.timed(9.0 if trials.settling else seconds[trials.running])
    return trials


def chosen(seconds: Mapping[str, float], held: str = "plain") -> Trials:
    watched = run(Trials("plain", held), {held: seconds[held]})
    assert watched.phase is Phase.PREDICT
    return run(watched.shortlisted([*seconds], {}), seconds, 2 * TURN * len(seconds))


def test_candidates_take_turns_and_then_in_reverse() -> None:
    trials = run(Trials("plain", "plain"), {"plain": 1.0}).shortlisted(["a", "b"], {})
    order = []
    for _ in range(6):
        order.append(trials.running)
        trials = run(trials, {"plain": 1.0, "a": 0.5, "b": 0.7})
    assert order == ["plain", "a", "b", "b", "a", "plain"]
    assert (trials.phase, trials.chosen, trials.level) == (Phase.KEEP, "a", 0.5)
    assert trials.seconds() == {"plain": 1.0, "a": 0.5, "b": 0.7}, "steps that settle do not count"


@pytest.mark.parametrize(
    "seconds, held, best",
    [
        ({"plain": 1.0, "a": 0.94, "b": 0.95}, "plain", "a"),
        ({"plain": 1.0, "a": 0.96}, "plain", "plain"),  # not 5% faster
        ({"plain": 1.0, "a": 0.8, "b": 0.77}, "a", "a"),  # not 5% faster than the one in use
        ({"plain": 1.0, "a": 0.8, "b": 0.7}, "a", "b"),
        ({"plain": 1.0, "a": 0.97, "b": 0.94}, "a", "b"),  # the one in use does not pay any more
        ({"plain": 1.0, "a": 1.5}, "a", "plain"),
    ],
)
def test_the_fastest_is_chosen_with_hysteresis(seconds: Mapping[str, float], held: str, best: str) -> None:
    trials = chosen(seconds, held)
    assert (trials.phase, trials.chosen) == (Phase.KEEP, best)
    assert trials.level == pytest.approx(seconds[best])


def test_other_work_on_a_machine_is_no_change_of_the_link() -> None:
    """Three steps of four take twice as long in the second turn, and one as long as before."""
    trials = run(Trials("plain", "plain"), {"plain": 1.0}).shortlisted(["a"], {})
    for seconds in (
        (1.0,) * MEASURED,
        (0.5,) * MEASURED,
        (1.0, *(1.1,) * (MEASURED - 1)),
        (1.0, *(2.0,) * (MEASURED - 1)),
    ):
        for one in (*(9.0,) * SETTLING, *seconds):
            trials = trials.timed(one)
    assert (trials.phase, trials.restarts) == (Phase.WATCH, 1), "each step with a was slower than before"
    trials = run(trials, {"plain": 1.0}).shortlisted(["a"], {})
    for seconds in (
        (1.0,) * MEASURED,
        (0.5,) * MEASURED,
        (0.5, *(1.1,) * (MEASURED - 1)),
        (1.0, *(2.0,) * (MEASURED - 1)),
    ):
        for one in (*(9.0,) * SETTLING, *seconds):
            trials = trials.timed(one)
    assert (trials.phase, trials.chosen) == (Phase.KEEP, "a")


def test_a_turn_that_is_far_too_slow_ends_early() -> None:
    trials = run(Trials("plain", "plain"), {"plain": 1.0}).shortlisted(["a"], {})
    trials = run(trials, {"plain": 1.0})
    slow = {"a": TOO_SLOW + 0.1}
    trials = run(trials, slow, SETTLING + 1)
    assert trials.turns[1] == (TOO_SLOW + 0.1,) and trials.turns[2] == (), "one step was enough"
    trials = run(trials, slow, SETTLING)
    assert trials.turns[2] == ()


def test_a_link_that_changes_during_trials_starts_them_anew_and_at_last_the_later_turns_count() -> None:
    trials = Trials("plain", "plain")
    for restart in range(3):
        trials = run(trials, {"plain": 1.0}).shortlisted(["a"], {})
        trials = run(trials, {"plain": 1.0, "a": 2.0}, 2 * TURN)
        trials = run(trials, {"plain": 1.0, "a": 0.5}, 2 * TURN)
        assert trials.restarts == (restart + 1 if restart < 2 else 0)
    assert (trials.phase, trials.chosen, trials.level) == (Phase.KEEP, "a", 0.5)


def test_nothing_is_tried_if_nothing_is_predicted_to_be_faster() -> None:
    trials = run(Trials("plain", "plain"), {"plain": 1.0}).shortlisted([], {"plain": 0.9})
    assert (trials.phase, trials.chosen, trials.order) == (Phase.KEEP, "plain", ())
    trials = trials.window(1.2)
    assert trials.level == 1.2, "the first window sets the level, not the prediction"


def test_drift_must_last_two_windows_and_tunings_come_ever_more_rarely() -> None:
    trials = chosen({"plain": 1.0, "a": 0.5})
    off = 0.5 * DRIFT + 0.01
    for _ in range(PAUSE):
        trials = trials.window(off).window(0.5)
    assert trials.phase is Phase.KEEP, "one window at a time was off"
    assert trials.window(off).window(0.5 * DRIFT).phase is Phase.KEEP
    again = trials.window(off).window(off)
    assert (again.phase, again.running, again.pause) == (Phase.WATCH, "a", 2 * PAUSE)
    assert trials.window(0.5 / DRIFT - 0.01).window(0.5 / DRIFT - 0.01).phase is Phase.WATCH, "a faster link counts too"
    fresh = chosen({"plain": 1.0, "a": 0.5})
    for number in range(1, PAUSE + 1):
        fresh = fresh.window(off)
        assert (fresh.phase is Phase.WATCH) == (number == PAUSE)


def test_the_fallback_and_the_one_in_use_are_always_tried() -> None:
    trials = Trials("plain", "held").shortlisted(["a"], {})
    assert trials.order == ("plain", "held", "a", "a", "held", "plain")


def test_a_restored_choice_is_kept_at_its_level() -> None:
    trials = Trials("plain", "a").kept(0.5, 16)
    assert (trials.phase, trials.running, trials.level, trials.pause) == (Phase.KEEP, "a", 0.5, 16)
    assert trials.window(0.7).level == 0.5
