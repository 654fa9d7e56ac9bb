"""The inner loops in Triton, for CUDA tensors; imported when first used, so that Triton need not be installed."""

from .memory import accumulate, ahead, look

__all__ = ["accumulate", "ahead", "look"]
