"""The errors of dgcopt, under one base class."""

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DGCError",
    "DivergenceError",
    "InterruptedStep",
    "MismatchError",
    "OutOfData",
    "PayloadError",
    "QuorumLost",
    "TimeoutExceeded",
    "VotedOut",
]


class DGCError(Exception):
    """Base class of every error that dgcopt raises on purpose."""


class ConfigError(DGCError, ValueError):
    """A setting that cannot work: says which one and what to change."""


class CommError(DGCError, RuntimeError):
    """A collective failed: says on which rank, which collective, and what is known of the cause."""


class TimeoutExceeded(CommError):
    """A collective did not finish within its deadline: says which rank waited for what, and for how long."""


class QuorumLost(CommError):
    """Too few ranks are left to go on: says how many there are and how many it takes."""


class VotedOut(CommError):
    """The other ranks have gone on without this one: says since when, and how it rejoins."""


class MismatchError(DGCError, RuntimeError):
    """Ranks disagree on their parameters, settings or order of collectives."""


class DivergenceError(DGCError, RuntimeError):
    """Replicas that should be equal are not: says which parameter, on which ranks."""


class InterruptedStep(DGCError, RuntimeError):
    """A step was interrupted while memory and weights took their new values: says on which rank, and to restore."""


class OutOfData(DGCError, RuntimeError):
    """Some ranks have run out of data before others, where that was to be an error: says which."""


class PayloadError(DGCError, RuntimeError):
    """A message from another rank that cannot be decoded, with the rank it came from."""


class CheckpointError(DGCError, RuntimeError):
    """A checkpoint that is missing, half-written, damaged or made by another set-up."""
