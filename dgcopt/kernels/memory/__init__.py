"""Memory of gradients from step to step: momentum and unsent gradient."""

from ..kernel import HALVES, Kernel
from ..parts import Parts
from . import native, torch
from .torch import Momentum

__all__ = [
    "Momentum",
    "accumulate",
    "decay",
    "mix",
    "preview_block_maxima",
    "preview_blocks",
    "update_momentum",
]


def _in_one_tensor(*arguments: object) -> bool:
    return not any(isinstance(x, Parts) for x in arguments)


accumulate = Kernel(torch.accumulate, native.accumulate, floats=HALVES, triton=_in_one_tensor)
decay = Kernel(torch.decay, native.decay, floats=HALVES)
mix = Kernel(torch.mix, native.mix)
preview_block_maxima = Kernel(
    torch.preview_block_maxima, native.preview_block_maxima, floats=HALVES, triton=_in_one_tensor
)
preview_blocks = Kernel(torch.preview_blocks, native.preview_blocks, floats=HALVES, triton=_in_one_tensor)
update_momentum = Kernel(torch.update_momentum, native.update_momentum, floats=HALVES, triton=_in_one_tensor)
