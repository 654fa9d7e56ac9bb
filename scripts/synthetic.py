"""ResNet-50's parameters with gradients that cost next to nothing: made once, heavy-tailed, different on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Layer", "Synthetic", "resnet50_shapes"]


def resnet50_shapes() -> Iterator[tuple[int, ...]]:
    """The shapes of ResNet-50's 161 parameters (25,557,032 values), in the order of the model."""

    def convolution(out: int, into: int, size: int) -> Iterator[tuple[int, ...]]:
        yield from ((out, into, size, size), (out,), (out,))  # and the weight and bias of its BatchNorm

    yield from convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(width, into, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, into, 1)
            into = 4 * width
    yield from ((1000, into), (1000,))


class Layer(torch.autograd.Function):
    """One parameter: forward does nothing, backward returns the gradient that `give` does."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, param: Tensor, give: Callable[[], Tensor]) -> Tensor:
        ctx.give = give
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor, Tensor, None]:
        return signal, ctx.give(), None


class Synthetic(nn.Module):
    """ResNet-50's parameters, whose gradients become ready one after the other, from the last to the first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        shapes = list(resnet50_shapes())
        self.params = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        random = torch.Generator().manual_seed(rank)
        # N(0, 1) cubed has the heavy tails of real gradients; tensors differ in scale, as they do in a network
        scales = (torch.rand(len(shapes), generator=random) * 4 - 5).exp()
        self.gradients = [
            torch.randn(shape, generator=random).pow_(3).mul_(scale)
            for shape, scale in zip(shapes, scales.tolist(), strict=True)
        ]

    def forward(self) -> Tensor:
        signal = torch.zeros(())
        for param, gradient in zip(self.params, self.gradients, strict=True):
            signal = Layer.apply(signal, param, lambda gradient=gradient: gradient)
        return signal
