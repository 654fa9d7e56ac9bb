"""Several backward passes before a step."""

from __future__ import annotations

import itertools

from dgcopt import DGC, Comm
from tests.support.wires import share

from .pair import COMPRESSIONS, Loop, Pair


def passes_vary(comm: Comm) -> Loop:
    """One, two or three backward passes before a step, announced or not, and a short last window."""
    announcements = ((1, [1, 2, 2, 3, 1, 3, 2]), (3, [3, 3, 2, 3, 1]))
    cases = itertools.product(("dense", "DGC at ratio 1"), announcements, (True, False))
    for compression, (announced, windows), set_to_none in share(comm, cases):
        pair = Pair(comm, compression=COMPRESSIONS[compression], backward_passes_per_step=announced)
        for step, passes in enumerate(windows):
            for which, _, optimizer in pair.both():
                optimizer.zero_grad(set_to_none=set_to_none)
                for micro in range(passes):
                    pair.loss(which, step, micro).backward()
            yield
            for optimizer in pair.optimizers:
                optimizer.step()
            yield
        pair.assert_equal(f"{compression}, {announced} announced, set_to_none={set_to_none}")
        telemetry = pair.ours.telemetry
        assert telemetry.steps == len(windows) * (comm.size > 1), "not one exchange per step"
        assert telemetry.repeated <= 2 * (announced == 1), f"{telemetry.repeated} exchanges were repeated"


def backward_in_evaluation(comm: Comm) -> Loop:
    """A backward pass whose gradients are thrown away, between two steps."""
    pair = Pair(comm, compression=DGC(1.0, overlap=True))
    for step in range(6):
        for which, _, optimizer in pair.both():
            if step in (2, 4):
                pair.loss(which, step, 5).backward()
            optimizer.zero_grad()
            pair.loss(which, step).backward()
        yield
        for optimizer in pair.optimizers:
            optimizer.step()
        yield
    pair.assert_equal("a backward pass in evaluation")
    assert pair.ours.telemetry.repeated == 1 * (comm.size > 1), "the second one should have found it careful"


def a_count_that_is_wrong(comm: Comm) -> Loop:
    """Said to be 2, but a third pass comes: refused with the name, the count and the fix, on every rank alike."""
    pair = Pair(comm, backward_passes_per_step=2)
    for micro in (0, 1):
        pair.loss(1, 0, micro).backward()
    try:
        pair.loss(1, 0, 2).backward()
    except RuntimeError as error:
        for words in (f"rank {comm.rank}", "computed 3 times", "backward_passes_per_step is 2", "no_sync()", "'4."):
            assert words in str(error), f"does not say {words!r}: {error}"
    else:
        raise AssertionError("a third pass was accepted")
    yield
