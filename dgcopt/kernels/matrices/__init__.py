"""Matrices in flat tensors: the discrete cosine transform of tiles (DeMo), and low-rank products (PowerSGD)."""

from ..kernel import Kernel
from . import native, torch
from .torch import Matrices

__all__ = ["Matrices", "dct", "inverse_dct", "put_product"]

dct = Kernel(torch.dct, native.dct)
inverse_dct = Kernel(torch.inverse_dct, native.inverse_dct)
put_product = Kernel(torch.put_product, native.put_product)
