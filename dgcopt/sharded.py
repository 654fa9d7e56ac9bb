"""Sharded parameters: checkpoints through `torch.distributed.checkpoint`, and a compressed reduce-scatter.

    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state | {"dgcopt": dgcopt.sharded.state(optimizer)}, checkpoint_id=path)

    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    dgcopt.sharded.load(optimizer, path)

torch saves one replica's tensors for all. Residuals and momenta of `DistributedOptimizer` differ between replicas, and
so do Adam's moments if updates are sent: they have their own entry, which any mesh can load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .coding import decode_values, encode_values
from .errors import CheckpointError, CommError, ConfigError
from .flat.local_shard import LocalShard, as_dtensor, as_stepped, local
from .flat.optimizer_state import kept_by
from .flat.store import check_format
from .gradients.engine import Engine
from .gradients.optimizer import Synchronised, synchronised

__all__ = ["CompressedReduceScatter", "compress_reduce_scatter", "load", "state"]

CODES = ("fp16", "bf16", "int8")
"""Codes of every value of a gradient; int4 and int2 are for selected values, and cannot say zero."""

MEMORY, OWN, SHARED, SETTINGS = "memory of replica ", "own state of replica ", "shared of shard ", "settings of shard "
"""Beginnings of the keys, each followed by a number."""


def state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the memory of sharded parameters of a DistributedOptimizer, for `torch.distributed.checkpoint.save`.

    Every rank gives its own; tensors are DTensors of the parameters' placements, under a key of the replica. Raises
    ConfigError for an optimizer of whole parameters.
    """
    steps = _sharded(optimizer)
    kept = _engine_of(steps).state()
    params = _by_name(steps)
    replicas = {"replicas": steps.comm.size, "shards": steps.comm.place_in_replica()["size"]}
    settings = replicas | {key: kept[key] for key in ("format", "step", "order", "made_of")}
    memory = {
        kind: {name: as_dtensor(tensor, params[name]) for name, tensor in by_name.items()}
        for kind, by_name in kept["memory"].items()
    }
    told = torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)
    replica = str(int(steps.comm.rank))
    entries = {MEMORY + replica: memory, OWN + replica: _own(steps), SHARED + _shard(steps): kept["shared"]}
    return {SETTINGS + _shard(steps): told, **{key: entry for key, entry in entries.items() if any(entry.values())}}


def load(optimizer: Optimizer, checkpoint_id: Any = None, key: str = "dgcopt", storage_reader: Any = None) -> None:
    """Load a `state` that was saved under `key` onto this mesh; collective, after `set_optimizer_state_dict`.

    Args:
        optimizer: wrapped by `DistributedOptimizer`, of sharded parameters.
        checkpoint_id: the checkpoint, as for `torch.distributed.checkpoint.load`.
        key: key of `state(optimizer)` in the saved dict.
        storage_reader: reads the checkpoint; None reads files in the folder `checkpoint_id`.

    Onto as many replicas and shards as saved it, training goes on with the same bits. Another size of shard groups cuts
    memory anew. Among other numbers of replicas, replica r of n takes the sum of the saved replicas r, r + n, ..., or
    zeros if there are none, so the sum of residuals stays. Adam's moments are those of one saved replica.

    Raises CheckpointError if the checkpoint has no such entry, ConfigError for other parameters.
    """
    import torch.distributed.checkpoint as dcp

    steps = _sharded(optimizer)
    reader = dcp.FileSystemReader(checkpoint_id) if storage_reader is None else storage_reader
    metadata = reader.read_metadata()
    found: dict[tuple[str, ...], Any] = {
        tuple(map(str, path[1:])): metadata.state_dict_metadata[fqn]
        for fqn, path in (metadata.planner_data or {}).items()
        if path[0] == key
    }
    saved = {path[0]: torch.zeros(one.size, dtype=torch.uint8) for path, one in found.items() if len(path) == 1}
    if not any(top.startswith(SETTINGS) for top in saved):
        raise CheckpointError(
            f"the checkpoint {checkpoint_id or reader} has no dgcopt.sharded.state(optimizer) under {key!r}. Give the "
            f"key under which it was saved, or go on without it: residuals start from zero then"
        )
    dcp.load({key: saved}, checkpoint_id=checkpoint_id, storage_reader=storage_reader)
    settings = {top: json.loads(bytes(told.tolist())) for top, told in saved.items()}
    any_of = next(iter(settings.values()))
    check_format(any_of)
    replicas = [MEMORY + str(replica) for replica in range(steps.comm.rank, any_of["replicas"], steps.comm.size)]
    own_entry, own = OWN + str(steps.comm.rank % any_of["replicas"]), _own(steps)
    is_cut_alike = any_of["shards"] == steps.comm.place_in_replica()["size"]
    shared = SHARED + _shard(steps) if is_cut_alike else ""
    params, wanted = _by_name(steps), dict[str, Any]([next(iter(saved.items()))])  # never empty, which torch refuses
    for path, one in found.items():
        if path[0] not in (*replicas, own_entry, shared):
            continue
        top, kind, name = path
        if top == shared:
            empty = torch.zeros(one.size, dtype=one.properties.dtype)
        elif top == own_entry and name not in own.get(kind, {}):
            continue  # of an optimizer that keeps less
        elif top == own_entry:
            empty = own[kind][name].clone()
        else:
            _check_fits(kind, name, one.size, params)
            empty = as_dtensor(torch.zeros_like(params[name], dtype=one.properties.dtype), params[name])
        wanted.setdefault(top, {}).setdefault(kind, {})[name] = empty
    dcp.load({key: wanted}, checkpoint_id=checkpoint_id, storage_reader=storage_reader)
    for kind, by_name in wanted.get(own_entry, {}).items():
        for name, tensor in by_name.items():
            own[kind][name].copy_(tensor)
    steps.restore_apart(
        kept_by(
            steps.comm.rank,
            steps.comm.size,
            any_of["step"],
            settings[SETTINGS + _shard(steps)]["order"] if is_cut_alike else [],
            _summed([wanted[top] for top in replicas if top in wanted]),
            shared=wanted.get(shared, {}),
            made_of={name: of for told in settings.values() for name, of in told["made_of"].items()},
        )
    )


def compress_reduce_scatter(model: nn.Module, code: str = "int8") -> None:
    """Let the reduce-scatter of every `fully_shard` group of `model` send gradients in a code; on all ranks alike.

    Raises ConfigError for a model without such groups, and for an unknown code. See `CompressedReduceScatter`.
    """
    from torch.distributed.fsdp import FSDPModule

    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not groups:
        raise ConfigError("the model has no module that fully_shard has sharded: call fully_shard first")
    for module in groups:
        module.set_custom_reduce_scatter(CompressedReduceScatter(code))  # type: ignore[arg-type]  # by its calls


class CompressedReduceScatter:
    """A reduce-scatter within a replica whose messages are coded; for `FSDPModule.set_custom_reduce_scatter`.

    Each rank codes its gradient once for every other rank, and adds up what it has received in rank order, in float32.
    Lossy: values are rounded to the nearest that the code has, and the error is not kept. NaN or Inf in a message makes
    all of the shard NaN, so that the step is skipped.

    Args:
        code: "bf16" or "fp16", 2 bytes a value; "int8", a byte in steps of the largest of 256 neighbours / 127, which
            rounds more: by up to 1/254 of that largest value.

    Costs an alltoall of the code's bytes in place of a reduce-scatter of 4 bytes a value. Raises ConfigError for other
    codes, and for a reduction other than a sum or mean; PayloadError for a damaged message; CommError where a
    rank is lost.
    """

    def __init__(self, code: str = "int8") -> None:
        if code not in CODES:
            raise ConfigError(f"code must be one of {', '.join(CODES)}, not {code!r}")
        self.code = code

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code!r})"

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP2's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce `input_tensor`, a row for each rank, to this rank's `output_tensor`; done when it returns."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ConfigError(f"{self!r} adds up or averages gradients, and FSDP2 asks for {op}: leave it out")
        rows = input_tensor.view(group.size(), -1)
        messages = torch.stack([self._coded(row) for row in rows])
        arrived = torch.empty_like(messages)
        try:
            dist.all_to_all_single(arrived, messages, group=group)
        except RuntimeError as error:
            raise CommError(
                f"rank {dist.get_rank()}: gradients were not reduced among ranks "
                f"{dist.get_process_group_ranks(group)}, which hold shards of one replica: "
                f"{str(error).splitlines()[0]} Look for a rank of these that died."
            ) from error
        total = torch.zeros(rows.shape[1], device=rows.device)
        for rank, message in enumerate(arrived):
            total += decode_values(message[1:], len(total), self.code, rank)
        total.masked_fill_(arrived[:, 0].ne(0).any(), torch.nan)
        output_tensor.copy_(total if op == dist.ReduceOp.SUM else total / len(rows))

    def _coded(self, row: Tensor) -> Tensor:
        """Return a message: whether it holds NaN or Inf, which no code keeps, and the values."""
        is_spoiled = ~row.isfinite().all()
        return torch.cat([is_spoiled.view(1).to(torch.uint8), encode_values(row, self.code)])


def _sharded(optimizer: Optimizer) -> Synchronised:
    steps = synchronised(optimizer)
    if steps is None or not steps.is_sharded:
        raise ConfigError(
            "dgcopt.sharded is for an optimizer that DistributedOptimizer has wrapped and whose parameters are "
            "sharded: use dgcopt.checkpoint for all others"
        )
    return steps


def _by_name(steps: Synchronised) -> dict[str, LocalShard]:
    return {name: param for param, name in steps.names.items() if isinstance(param, LocalShard)}


def _engine_of(steps: Synchronised) -> Engine:
    assert steps.engine is not None  # a replicate group of one is refused
    return steps.engine


def _own(steps: Synchronised) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that the optimizer itself keeps, by kind and name, if each replica's are its own."""
    own: dict[str, dict[str, Tensor]] = {}
    for param, name in steps.names.items() if steps.compressor.sends == "update" else ():
        for kind, value in steps.optimizer.state.get(as_stepped(param), {}).items():
            if isinstance(value, Tensor):
                own.setdefault(kind, {})[name] = value
    return own


def _shard(steps: Synchronised) -> str:
    return str(steps.comm.place_in_replica()["rank"])


def _check_fits(kind: str, name: str, size: torch.Size, params: dict[str, LocalShard]) -> None:
    if name not in params or params[name].dtensor.shape != size:
        there = f"has shape {tuple(params[name].dtensor.shape)}" if name in params else "this optimizer does not have"
        raise ConfigError(f"the checkpoint holds {kind} of shape {tuple(size)} for parameter {name!r}, which {there}")


def _summed(replicas: list[dict[str, dict[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Return this rank's shards of the memory of several replicas, added up."""
    sums: dict[str, dict[str, Tensor]] = {}
    for memory in replicas:
        for kind, by_name in memory.items():
            for name, tensor in by_name.items():
                into = sums.setdefault(kind, {})
                into[name] = into[name] + local(tensor) if name in into else local(tensor)
    return sums
