"""This rank's shard of a DTensor parameter, as a plain tensor with a plain gradient.

FSDP2's `fully_shard` and tensor parallelism make parameters DTensors: each rank has a part of them. A rank exchanges,
keeps and steps that part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["LocalShard", "as_dtensor", "as_stepped", "is_sharded", "local", "local_shards"]


def is_sharded(param: Tensor) -> bool:
    """True for a DTensor; told by its mesh, since the import of torch.distributed.tensor is slow."""
    return hasattr(param, "device_mesh")


class LocalShard(Tensor):
    """This rank's shard of the DTensor `dtensor`: the same memory, and its gradient is the shard of `dtensor.grad`.

    It stands for the parameter wherever one rank's share counts: in buckets, in memory, on the wire.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as Parameter's

    dtensor: Any

    @staticmethod
    def of(param: Tensor) -> LocalShard:
        """Return the shard of a DTensor."""
        shard = _data_of(param).as_subclass(LocalShard)
        shard.dtensor = param
        return shard

    def follow(self) -> None:
        """Alias the memory of `dtensor` again if torch replaced it, as `fully_shard` may before a forward pass."""
        data = _data_of(self.dtensor)
        if data.data_ptr() != self.data_ptr() or data.dtype != self.dtype or data.shape != self.shape:
            self.data = data

    def place(self) -> dict[str, list[int]]:
        """Return the shape of the whole parameter, and the offset of this shard in it, for checkpoints."""
        (chunk,) = self.dtensor.__create_chunk_list__()  # as torch.distributed.checkpoint asks for it
        return {"shape": [*self.dtensor.shape], "offset": [*chunk.offsets], "size": [*chunk.sizes]}

    def copies(self, ranks: int) -> int:
        """Return the number of a replica's `ranks` that hold the same shard; above 1 for tensor parallelism."""
        mesh = self.dtensor.device_mesh
        placed = enumerate(self.dtensor.placements)
        return ranks // mesh.size() * math.prod(mesh.size(dim) for dim, where in placed if where.is_replicate())

    @property
    def grad(self) -> Tensor | None:
        """The local gradient: the same object as long as that of `dtensor` is."""
        grad = self.dtensor.grad
        return None if grad is None else local(grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None or value is not self.grad:
            self.dtensor.grad = None if value is None else as_dtensor(value, self)

    @property
    def requires_grad(self) -> bool:
        """That of `dtensor`, which may be toggled."""
        return bool(self.dtensor.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.dtensor.requires_grad = value

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call `hook` with this shard after its gradient was added to: after FSDP2's reduce-scatter.

        Without FSDP2 the gradient of a whole parameter in sequence parallelism is a sum that is still to be made over
        the ranks of the tensor group: it is made first, as other code than torch's takes the addend for the gradient.
        """

        def arrived(param: Any) -> None:
            if param.grad is not None and param.grad.placements != param.placements:
                with torch.no_grad():
                    param.grad = param.grad.redistribute(placements=param.placements)
            hook(self)

        return self.dtensor.register_post_accumulate_grad_hook(arrived)


def _data_of(param: Any) -> Tensor:
    with torch.no_grad():
        data: Tensor = param.to_local()
    return data.detach()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor that is no parameter; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # else to_local returns a new tensor at each call
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def as_stepped(param: Tensor) -> Tensor:
    """Return the parameter that the optimizer steps: the DTensor of a shard, any other parameter as it is."""
    return param.dtensor if isinstance(param, LocalShard) else param


def as_dtensor(tensor: Tensor, param: Tensor) -> Tensor:
    """Return a tensor of a shard's shape as the DTensor of which it is the shard; as it is for any other `param`."""
    if not isinstance(param, LocalShard):
        return tensor
    from torch.distributed.tensor import DTensor

    like = param.dtensor
    layout = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    with torch.no_grad():
        return DTensor.from_local(tensor, like.device_mesh, like.placements, **layout)


def local_shards(names: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return names by parameter with each DTensor replaced by its local shard."""
    return {LocalShard.of(param) if is_sharded(param) else param: name for param, name in names.items()}
