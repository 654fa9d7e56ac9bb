"""Values in few bits each, with a step, levels or means per block: the values beside selected positions."""

from ..kernel import Kernel
from . import native, torch
from .torch import SPAN, in_blocks

__all__ = ["SPAN", "in_blocks", "means", "nearest_levels", "of_levels", "of_steps", "round_steps"]

means = Kernel(torch.means, native.means)
nearest_levels = Kernel(torch.nearest_levels, native.nearest_levels)
of_levels = Kernel(torch.of_levels, native.of_levels)
of_steps = Kernel(torch.of_steps, native.of_steps)
round_steps = Kernel(torch.round_steps, native.round_steps)
