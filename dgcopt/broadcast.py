"""Start alike: one rank's parameters or optimizer state on every rank. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .collectives import Broadcast
from .comm import Comm, current_comm
from .errors import ConfigError

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root_rank: int = 0, comm: Comm | None = None
) -> None:
    """Overwrite tensors in place with rank `root_rank`'s, typically `model.state_dict()` before training.

    `params` maps names to tensors, or lists pairs; values that are no tensors are passed over. All ranks must give the
    same names and shapes in the same order. Raises CommError if they do not come, or differ.
    """
    comm = current_comm() if comm is None else comm
    pairs = params.items() if isinstance(params, Mapping) else params
    tensors = [(name, value.detach()) for name, value in pairs if isinstance(value, Tensor)]
    started = [
        comm.start(Broadcast(comm.to_wire(tensor.clone()), root=root_rank, label=f"parameter {name}"))
        for name, tensor in tensors
    ]
    for handle, (_, tensor) in zip(started, tensors, strict=True):
        tensor.copy_(comm.wait(handle))


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, comm: Comm | None = None) -> None:
    """Load rank `root_rank`'s optimizer state on every rank: buffers, step counts, learning rates.

    What each rank keeps for itself (residuals) is not touched. Raises ConfigError for state that is neither tensor
    nor number, text, list or dict.
    """
    comm = current_comm() if comm is None else comm
    if comm.size == 1:
        return
    tensors: list[Tensor] = []
    state = {key: value for key, value in optimizer.state_dict().items() if key in ("state", "param_groups")}
    text = json.dumps(_encode(state, tensors)).encode() if comm.rank == root_rank else b""
    length = int(_from_root(torch.tensor([len(text)]), root_rank, comm, "length of optimizer state"))
    tree = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)
    received = json.loads(bytes(_from_root(tree, root_rank, comm, "optimizer state").tolist()))
    values: list[Tensor] = []
    for place, (dtype, shape) in enumerate(_tensors_in(received)):
        mine = tensors[place] if comm.rank == root_rank else torch.empty(shape, dtype=getattr(torch, dtype))
        values.append(_from_root(mine, root_rank, comm, f"optimizer state tensor {place}"))
    # on the root too: load_state_dict may change dtypes, and all ranks must end up with the same
    optimizer.load_state_dict(_decode(received, values))


def _from_root(tensor: Tensor, root: int, comm: Comm, label: str) -> Tensor:
    return comm.run(Broadcast(comm.to_wire(tensor.clone()), root=root, label=label)).cpu()


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    """The tree in JSON's types, every node a tagged pair; tensors become their dtype, shape and place."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return ["tensor", len(tensors) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        return ["dict", [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_encode(v, tensors) for v in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise ConfigError(f"optimizer state holds a {type(value).__name__}, which cannot be sent to other ranks: {value!r}")


def _tensors_in(node: Any) -> list[tuple[str, list[int]]]:
    """Dtype and shape of every tensor of an encoded tree, by place."""
    found: dict[int, tuple[str, list[int]]] = {}

    def visit(node: Any) -> None:
        kind, content = node[0], node[1]
        if kind == "tensor":
            found[content] = (node[2], node[3])
        elif kind == "dict":
            for key, value in content:
                visit(key)
                visit(value)
        elif kind in ("list", "tuple"):
            for value in content:
                visit(value)

    visit(node)
    return [found[place] for place in sorted(found)]


def _decode(node: Any, values: list[Tensor]) -> Any:
    kind, content = node[0], node[1]
    if kind == "tensor":
        return values[content]
    if kind == "dict":
        return {_decode(key, values): _decode(value, values) for key, value in content}
    if kind in ("list", "tuple"):
        items = [_decode(value, values) for value in content]
        return items if kind == "list" else tuple(items)
    return content
