"""The check for a usable Triton, which itself is imported with the first CUDA tensor."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os

__all__ = ["has_triton"]

_OLDEST = (3, 6)
"""Triton before that makes zero of denormal quotients; and before 3.4 it knows no histogram of some elements."""

log = logging.getLogger("dgcopt")


@functools.cache
def has_triton() -> bool:
    """True if a Triton is installed that can compile the kernels; if not, one warning says why."""
    if os.environ.get("DGCOPT_KERNELS", "") == "torch":
        return False
    needed = ".".join(map(str, _OLDEST))
    if importlib.util.find_spec("triton") is None:
        problem = "it is not installed"
    else:
        version = importlib.import_module("triton").__version__
        if tuple(map(int, version.split(".")[:2])) >= _OLDEST:
            return True
        problem = f"version {version} is installed"
    log.warning(
        "dgcopt: on CUDA compression runs in torch: its kernels need Triton %s or later, and %s", needed, problem
    )
    return False
