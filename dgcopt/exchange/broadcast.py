"""Equal starts: one rank's parameters, optimizer state or plain values on every rank. Nothing is pickled."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..collectives import Broadcast, Collective, in_memory
from ..comm import Comm, current_comm
from ..errors import CommError, ConfigError
from ..flat.optimizer_state import STATE_KEY, unmarked
from .agreement import compare
from .parameters import check_not_sharded, check_optimizer, named_tensors
from .pieces import in_pieces

__all__ = ["broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

log = logging.getLogger("dgcopt")

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root_rank: int = 0, comm: Comm | None = None
) -> None:
    """Overwrite tensors in place with rank `root_rank`'s, typically `model.state_dict()` before training.

    `params` maps names to tensors, or lists pairs; values other than tensors are ignored. All ranks must give the
    same names, shapes and dtypes in the same order. `comm` is the wire; None is that of `dgcopt.init()`. Raises
    MismatchError, on every rank, if they differ, CommError if some do not come, and ConfigError for another argument.
    """
    comm = current_comm(comm)
    tensors = named_tensors(params)
    lines = [f"{name}: {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in tensors]
    comm.drive(compare([f"root rank: {root_rank}", *lines], comm.rank, "parameters to broadcast"))
    broadcasts = [
        Broadcast(comm.to_wire(tensor.clone()), root=root_rank, label=f"parameter {name}") for name, tensor in tensors
    ]
    if comm.checksums:
        received = map(comm.run, broadcasts)  # verified one after the other
    else:
        received = map(comm.wait, [comm.start(broadcast) for broadcast in broadcasts])
    for result, (_, tensor) in zip(received, tensors, strict=True):
        tensor.copy_(result)


def broadcast_object(value: Any, root_rank: int = 0, comm: Comm | None = None) -> Any:
    """Return rank `root_rank`'s value on every rank, such as settings that one rank has read.

    Tensors, None, bool, int, float and str, and dicts, lists and tuples of them, at any depth; the result is a
    copy, on the root too, with its tensors on the CPU. Subclasses arrive as their base classes. Nothing is
    pickled, so no message can run code. `comm` is the wire; None is that of `dgcopt.init()`. Raises ConfigError, on
    every rank, for anything else, CommError if some do not come, or a message is damaged.
    """
    comm = current_comm(comm)
    return comm.drive(_sent(value, root_rank, comm, "object"))


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, comm: Comm | None = None) -> None:
    """Load rank `root_rank`'s optimizer state on every rank, for example if only that rank has read a checkpoint.

    Sends buffers, step counts and learning rates; for a DistributedOptimizer also its step and all memory that is equal
    on all ranks. `comm` is the wire; None is that of `dgcopt.init()`.

    A rank at the root's step keeps its residual; on any other rank the residual belongs to other steps and starts from
    zero, with a log line. Raises, on every rank, ConfigError for state that `broadcast_object` cannot send, and
    MismatchError for optimizers of other kinds or groups.
    """
    check_optimizer(optimizer)
    comm = current_comm(comm)
    if comm.size == 1:
        return
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    lines = [
        f"root rank: {root_rank}",
        f"optimizer: {type(optimizer).__name__}",
        f"parameters of its groups: {lengths}",
    ]
    comm.drive(compare(lines, comm.rank, "optimizers whose state is broadcast"))
    state = optimizer.state_dict()
    mine = state.get(STATE_KEY)
    sent = {key: state[key] for key in ("state", "param_groups")}
    if mine is not None:
        sent["param_groups"] = [unmarked(group) for group in sent["param_groups"]]
        sent[STATE_KEY] = {key: mine[key] for key in ("step", "order", "shared")}
    received = comm.drive(_sent(sent if comm.rank == root_rank else None, root_rank, comm, "optimizer state"))
    theirs = received.pop(STATE_KEY, None)
    if mine is not None and theirs is not None:
        received[STATE_KEY] = {**mine, **theirs}
        if mine["step"] != theirs["step"]:
            received[STATE_KEY]["memory"] = {}
            log.info(
                "dgcopt: rank %s goes on from step %d of rank %s, with nothing held back",
                *(comm.rank, theirs["step"], root_rank),
            )
    # on the root too: load_state_dict may change dtypes, and all ranks must end up with the same
    optimizer.load_state_dict(received)


def _sent(value: Any, root: int, comm: Comm, what: str) -> Generator[Collective, Tensor, Any]:
    """Send text that describes the tree, then the bytes of its tensors; or, if that fails, text with the reason."""
    tensors: list[Tensor] = []
    text = b""
    if comm.rank == root:
        try:
            tree = _encode(value, tensors)
            text = json.dumps({"tree": tree, "bytes": [tensor.numel() for tensor in tensors]}).encode()
        except Exception as error:  # of any kind: the other ranks wait for this one's answer
            text = json.dumps({"problem": f"{what} of rank {root} cannot be sent: {error}"}).encode()
    length = torch.tensor([len(text)])
    (told,) = (yield Broadcast(comm.to_wire(length), root=root, label=f"length of {what}")).tolist()
    if told < 0 or (comm.rank == root and told != len(text)):
        raise _damaged(what, root, comm, f"its length is {told}")
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8) if comm.rank == root else None
    received = yield from _from_root(mine, told, root, comm, what)
    try:
        if comm.rank == root and received != text:
            raise ValueError("it has come back otherwise")
        problem, tree, sizes = _read(received)
    except _MALFORMED as error:
        raise _damaged(what, root, comm, f"its text is {bytes(received[:80])!r}") from error
    if problem:
        raise ConfigError(problem)
    values: list[Tensor] = []
    for place, size in enumerate(sizes):
        mine = tensors[place] if comm.rank == root else None
        data = yield from _from_root(mine, size, root, comm, f"{what}, tensor {place}")
        values.append(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))
    try:
        return _decode(tree, values)
    except _MALFORMED as error:
        raise _damaged(what, root, comm, f"its text is {bytes(received[:80])!r}") from error


def _from_root(
    data: Tensor | None, nbytes: int, root: int, comm: Comm, label: str
) -> Generator[Collective, Tensor, bytearray]:
    """Return the root's `data`, of a length that all ranks know."""

    def send(start: int, stop: int) -> Broadcast:
        piece = torch.empty(stop - start, dtype=torch.uint8) if data is None else data[start:stop].clone()
        return Broadcast(comm.to_wire(piece), root=root, label=label)

    (received,) = yield from in_pieces(nbytes, 1, send)
    return received


_MALFORMED = (ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError, RecursionError, MemoryError)
"""Errors of reading text that another program may have written."""


def _damaged(what: str, root: int, comm: Comm, received: str) -> CommError:
    return CommError(
        f"rank {comm.rank}: {what} from rank {root} cannot be read: {received}. It was damaged on the way, or that "
        f"rank runs another version; dgcopt.init(checksums=True) tells which"
    )


def _read(text: bytearray) -> tuple[str, Any, list[int]]:
    """Return the message of `_sent`: the problem, if there is one, the tree, and the bytes of each tensor."""
    received = json.loads(text)
    if "problem" in received:
        return str(received["problem"]), None, []
    sizes = received["bytes"]
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("tensors of no such length")
    return "", received["tree"], sizes


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    """Encode the tree in JSON's types, every node a tagged pair; tensors become place, dtype and shape."""
    if isinstance(value, Tensor):
        check_not_sharded("a tensor in it", value)
        # as bytes, because not every wire has every dtype
        tensors.append(in_memory(value.detach().cpu()).view(torch.uint8))
        return ["tensor", [len(tensors) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]]
    if isinstance(value, dict):
        return ["dict", [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [_encode(v, tensors) for v in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    if isinstance(value, ConfigError):  # in place of a value that its rank could not make
        raise value
    raise ConfigError(
        f"it holds a {type(value).__name__} ({value!r:.80}), and only tensors, numbers, text, None, and dicts, lists "
        f"and tuples of them can be"
    )


def _decode(node: Any, tensors: list[Tensor]) -> Any:
    kind, content = node
    if kind == "tensor":
        place, dtype, shape = content
        if place < 0 or any(length < 0 for length in shape):
            raise ValueError("no such tensor")
        return tensors[place].view(_DTYPES[dtype]).reshape(shape)
    if kind == "dict":
        return {_decode(key, tensors): _decode(value, tensors) for key, value in content}
    if kind in ("list", "tuple"):
        items = [_decode(value, tensors) for value in content]
        return items if kind == "list" else tuple(items)
    if kind != "value" or not (content is None or isinstance(content, bool | int | float | str)):
        raise ValueError("no such value")
    return content
