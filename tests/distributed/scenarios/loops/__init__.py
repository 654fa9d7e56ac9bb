"""Every training loop that people write, against the same loop in one process on the whole batch.

A loop is a generator. In a simulated world every rank must reach a `yield` before any rank may go on; real ranks run
straight through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dgcopt import Comm

from . import accumulation, buffers, clipping, divergence, loss_scaling, optimizers, parameters, torch_join, uneven_data
from .pair import Loop

LOOPS: dict[str, Callable[[Comm], Loop]] = {
    function.__name__: function
    for function in (
        accumulation.passes_vary,
        accumulation.backward_in_evaluation,
        accumulation.a_count_that_is_wrong,
        optimizers.a_hook_written_for_ddp,
        optimizers.two_players,
        optimizers.two_optimizers_of_one_model,
        optimizers.what_the_script_reduces_itself,
        optimizers.fused_steps,
        clipping.clipped,
        clipping.clipped_locally,
        loss_scaling.a_step_without_finite_gradients,
        loss_scaling.loss_scaling,
        parameters.parameters_come_and_go,
        parameters.what_nobody_used_is_left_alone,
        uneven_data.uneven_data,
        uneven_data.uneven_data_of_two,
        uneven_data.uneven_data_is_an_error,
        torch_join.join_with_one_of_torchs,
        buffers.buffers_are_shared,
        uneven_data.samples_of_like_cost,
        torch_join.torch_join,
        torch_join.torch_join_elsewhere,
        divergence.replicas_come_apart,
    )
}


def straight_through(loop: Callable[[Comm], Loop]) -> Callable[[Comm], None]:
    @functools.wraps(loop)
    def scenario(comm: Comm) -> None:
        for _ in loop(comm):
            pass

    return scenario


SCENARIOS: dict[str, Callable[[Comm], Any]] = {f"loop: {name}": straight_through(loop) for name, loop in LOOPS.items()}
