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
    """A setting that cannot work; names it and the change to make."""


class CommError(DGCError, RuntimeError):
    """A failed collective; names the rank, the collective and the known cause."""


class TimeoutExceeded(CommError):
    """A collective that did not finish by its deadline; names the waiting rank, the collective and the time."""


class QuorumLost(CommError):
    """Too few ranks are left to continue; names their number and the number needed."""


class VotedOut(CommError):
    """The other ranks have continued without this one; names the step, and how to rejoin."""


class MismatchError(DGCError, RuntimeError):
    """Ranks disagree on their parameters, settings or order of collectives."""


class DivergenceError(DGCError, RuntimeError):
    """Replicas that differ but should be equal; names the parameter and the ranks."""


class InterruptedStep(DGCError, RuntimeError):
    """A step that was interrupted during its commit; names the rank. Restore a checkpoint."""


class OutOfData(DGCError, RuntimeError):
    """Some ranks ran out of data before others, and the user asked for an error; names them."""


class PayloadError(DGCError, RuntimeError):
    """A message from another rank that cannot be decoded, with the rank it came from."""


class CheckpointError(DGCError, RuntimeError):
    """A checkpoint that is missing, half-written, damaged or made by another set-up."""
