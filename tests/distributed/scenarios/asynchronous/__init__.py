"""Averaging in a background thread: promises that hold however steps and exchanges interleave."""

from . import errors, thread, updates, weights

SCENARIOS = {**updates.SCENARIOS, **thread.SCENARIOS, **weights.SCENARIOS, **errors.SCENARIOS}
