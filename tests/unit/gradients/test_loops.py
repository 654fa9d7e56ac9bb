"""Every training loop of `scenarios.loops`, on simulated ranks that take turns."""

import itertools

import pytest

import dgcopt
from tests.distributed.scenarios.loops import LOOPS
from tests.support.wires import is_for

NEEDS_OTHERS = (
    "a_count_that_is_wrong",
    "a_step_without_finite_gradients",
    "loss_scaling",
    "what_nobody_used_is_left_alone",
    "replicas_come_apart",
)


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name, loop in LOOPS.items() for size in (1, 2, 4) if is_for(loop, "simulated", size)],
)
def test_loop(name: str, size: int) -> None:
    """All ranks go on from one place where they wait for each other to the next."""
    if size == 1 and name in NEEDS_OTHERS:
        pytest.skip("a world of one is the bare optimizer")
    ranks = [LOOPS[name](comm) for comm in dgcopt.simulated_world(size)]
    for _ in itertools.count():
        going = [next(rank, "done") != "done" for rank in ranks]
        assert len(set(going)) == 1, "some ranks end before others do"
        if not any(going):
            break
