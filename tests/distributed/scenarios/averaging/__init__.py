"""Averaged weights: real ranks do what simulated ones do, and every rank reports what goes wrong on any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dgcopt import Comm

from . import algorithms, buffers, checkpoints, errors, gradients, uneven_data
from .member import AVERAGED

RULES: dict[str, Callable[[Comm], Any]] = {
    f"averaging: {name}": functools.partial(algorithms.as_simulated_ranks, name) for name in AVERAGED
}

IN_TRAINING: dict[str, Callable[[Comm], Any]] = {
    f"averaging: {function.__name__}": function
    for function in (
        algorithms.can_be_looked_at,
        buffers.buffers_come_along,
        buffers.buffers_of_the_last,
        checkpoints.training_continues,
        errors.schedules_differ,
        errors.weights_differ_at_the_start,
        errors.weights_are_not_finite,
        uneven_data.uneven_data,
        uneven_data.uneven_data_is_an_error,
        uneven_data.uneven_data_of_others,
        gradients.loss_scaling,
        gradients.gradients_within_a_machine_and_weights_over_all,
        algorithms.as_torchs_averager,
        checkpoints.ranks_come_and_go,
        errors.ranks_train_different_parameters,
    )
}

SCENARIOS = RULES | IN_TRAINING
