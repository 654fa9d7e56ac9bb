"""Deep Gradient Compression as its authors' code computes it: what dgcopt is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["NaiveDGC"]


class NaiveDGC(Optimizer):
    """Deep Gradient Compression as its authors' code computes it, at 0.1%, but with a single message for all tensors.

    Per tensor: momentum correction; a threshold from the top of a strided 1% sample, adapted until 0.8 to 1.3 times as
    many as wanted pass, of which the first are sent; 64-bit indices. Vectors travel whole. Nothing overlaps.
    """

    def __init__(self, params: Any, lr: float, momentum: float, ratio: float = 0.001) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.params = self.param_groups[0]["params"]
        self.matrices = [param for param in self.params if param.dim() > 1]
        self.vectors = [param for param in self.params if param.dim() <= 1]
        self.wanted = [math.ceil(ratio * param.numel()) for param in self.matrices]
        self.ratio = ratio
        for param in self.params:
            self.state[param] = {name: torch.zeros(param.numel(), device=param.device) for name in ("u", "v")}

    def _select(self, importance: Tensor, wanted: int) -> Tensor:
        size = importance.numel()
        stride = max(1, size // math.ceil(max(size / 100, 2 / self.ratio)))
        sample = importance[int(torch.randint(stride, ())) :: stride]
        threshold = float(sample.topk(math.ceil(self.ratio * len(sample))).values.min())
        indices = (importance >= threshold).nonzero().view(-1)
        for _ in range(10):
            if len(indices) > 1.3 * wanted:
                indices = indices[importance[indices].topk(wanted).indices]
            elif len(indices) < 0.8 * wanted:
                threshold *= 0.8
                indices = (importance >= threshold).nonzero().view(-1)
            else:
                break
        return indices[:wanted]

    @torch.no_grad()
    def compress(self) -> tuple[Tensor, Tensor]:
        """This rank's message, to be gathered, and its vectors, to be added up. Both are of a fixed length."""
        momentum = self.param_groups[0]["momentum"]
        # a place for every index that may be sent; those not needed add a zero to the first coordinate
        device = self.params[0].device
        indices = torch.zeros(sum(self.wanted), dtype=torch.int64, device=device)
        values = torch.zeros(sum(self.wanted), device=device)
        slots = list(zip(self.matrices, indices.split(self.wanted), values.split(self.wanted), strict=True))
        for param, to_indices, to_values in slots:
            u, v = self.state[param]["u"], self.state[param]["v"]
            v.add_(u.mul_(momentum).add_(param.grad.view(-1)))
            chosen = self._select(v.abs(), len(to_indices))
            to_indices[: len(chosen)] = chosen
            to_values[: len(chosen)] = v[chosen]
            u.index_fill_(0, chosen, 0)
            v.index_fill_(0, chosen, 0)
        message = torch.cat([indices.view(torch.uint8), values.view(torch.uint8)])
        return message, torch.cat([param.grad for param in self.vectors])

    @torch.no_grad()
    def decompress(self, messages: Sequence[Tensor], vectors: Tensor) -> None:
        """Make every gradient the update that all ranks' messages and the sum of their vectors come to."""
        count = sum(self.wanted)
        arrived = [message.split([8 * count, 4 * count]) for message in messages]
        theirs = [
            (i.view(torch.int64).split(self.wanted), v.view(torch.float32).split(self.wanted)) for i, v in arrived
        ]
        for place, param in enumerate(self.matrices):
            update = param.grad.view(-1).zero_()
            for each_indices, each_values in theirs:
                update.index_put_((each_indices[place],), each_values[place], accumulate=True)
            update.div_(len(messages))
        vectors.div_(len(messages))
        momentum = self.param_groups[0]["momentum"]
        for param, mean in zip(self.vectors, vectors.split([len(param) for param in self.vectors]), strict=True):
            param.grad.copy_(self.state[param]["u"].mul_(momentum).add_(mean))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        message, vectors = self.compress()
        messages = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        works = [dist.all_gather(messages, message, async_op=True), dist.all_reduce(vectors, async_op=True)]
        for work in works:
            work.wait()
        self.decompress(messages, vectors)
        for param in self.params:
            param.add_(param.grad, alpha=-self.param_groups[0]["lr"])
