"""The replicas of a sharded model: ranks that hold the same shard, found from the meshes of DTensor parameters.

`fully_shard` averages gradients over the ranks of its mesh, one replica of the model. Each shard is then averaged
over the replicas: among the ranks of the replicate dimension.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllGather, AllReduce
from ..comm import Comm
from ..compressors import Compressor
from ..errors import ConfigError
from ..flat.local_shard import LocalShard, as_stepped, is_sharded, local

__all__ = ["check_on_mesh", "check_shards", "comm_of_replicas", "gather_in_replica", "shard_of"]

SHARD_ONLY = "Give fully_shard the shard dimension alone: fully_shard(module, mesh=mesh['shard'])"

Ranks = tuple[int, ...]


def comm_of_replicas(comm: Comm, names: Mapping[Tensor, str], compressor: Compressor, mesh: Any, across: bool) -> Comm:
    """Return the comm over which each shard is averaged: one rank of each replica.

    Args:
        comm: the wire of all ranks, or one that this function has made already.
        names: the optimizer's parameters with their names, at least one of them a DTensor.
        compressor: the compressor of gradients.
        mesh: the replicate dimension of the device mesh; None to derive it from the parameters' own mesh.
        across: True if the user asks for the ranks of this local rank on all machines.

    Raises ConfigError, on all ranks, for parameters that no rank would average, and where the ranks that hold the same
    shard are not one of each replica.
    """
    sharded = {param: name for param, name in names.items() if is_sharded(param)}
    name = next(iter(sharded.values()))
    if comm.joins_replicas:
        check_shards(names, comm)
        return comm
    _check_wire(comm, name)
    clips = any(each.clips_model for each in compressor.parts())
    if clips and not compressor.clips_model:
        raise ConfigError(
            f"LocalClip(per='model') in {compressor!r} clips the norm of some parameters before the exchange, and each "
            f"rank has shards of them: clip per='tensor', or all parameters by one DGC(clip=...)"
        )
    mine = _asked_for(comm, mesh) if mesh is not None else comm.ranks("across") if across else ()
    check_shards(names, None)
    meshes = {ranks_of(each): each_name for each, each_name in sharded.items()}
    if len(meshes) > 1 and not mine:
        listed = "; ".join(f"{each_name!r} over ranks {[*ranks]}" for ranks, each_name in [*meshes.items()][:3])
        raise ConfigError(
            f"parameters are sharded over several meshes ({listed}), so the replicate group is ambiguous. Give it: "
            f"DistributedOptimizer(..., mesh=mesh['replicate'])"
        )
    shard = tuple(sorted({rank for ranks in meshes for rank in ranks})) if mine else next(iter(meshes))
    told = _gather(comm, shard, mine, sharded)
    replicas = _replicas_asked_for(comm, told, name) if mine else _replicas_found(comm, told, name)
    made = comm.across_replicas(replicas)
    check_shards(names, made)
    return made


def check_on_mesh(names: Mapping[Tensor, str], mesh: Any) -> None:
    """Raise ConfigError for a `mesh` without parameters that are sharded."""
    if mesh is not None and not any(map(is_sharded, names)):
        raise ConfigError(
            "mesh is for sharded parameters, and the optimizer has none: call fully_shard(module, mesh=mesh['shard']) "
            "before the optimizer is made of model.parameters(), and wrap it then"
        )


def check_shards(names: Mapping[Tensor, str], comm: Comm | None) -> None:
    """Raise ConfigError for a trained parameter that is not sharded within this rank's replica, once that is known."""
    replica = None if comm is None else comm.ranks("replica")
    for param, name in zip(map(as_stepped, names), names.values(), strict=True):
        if not param.requires_grad:
            continue
        if not is_sharded(param):
            raise ConfigError(
                f"parameter {name!r} is outside the mesh of the sharded parameters: no rank averages its gradient over "
                f"the shard group. Shard it too (fully_shard on the whole model), or freeze it (requires_grad=False)"
            )
        if replica is not None and not set(replica).issuperset(ranks_of(param)):
            raise ConfigError(
                f"parameter {name!r} is sharded over ranks {[*ranks_of(param)]}, but this replica of the model is "
                f"ranks {[*replica]}: fully_shard averages its gradient over other replicas already. {SHARD_ONLY}"
            )


def gather_in_replica(comm: Comm, words: str, label: str) -> list[str]:
    """Return the words of each rank of this replica; a collective call of them."""
    text = bytearray(words.encode())
    length = comm.run(AllReduce(torch.tensor([len(text)]), "max", group="replica", label=f"length of {label}"))
    row = torch.frombuffer(text.ljust(int(length)), dtype=torch.uint8)
    rows = comm.run(AllGather(row, group="replica", label=label))
    return [bytes(told.tolist()).decode() for told in rows]


def shard_of(names: Mapping[Tensor, str], comm: Comm) -> dict[str, Any]:
    """Return which shards this rank holds, as a checkpoint records it, by the names of its LocalShards."""
    place = {name: param.place() for param, name in names.items() if isinstance(param, LocalShard)}
    return {**comm.place_in_replica(), "place": place}


def ranks_of(param: Any) -> Ranks:
    """Return the ranks of a DTensor's mesh, in the order of their shards."""
    return tuple(param.device_mesh.mesh.flatten().tolist())


def _check_wire(comm: Comm, name: str) -> None:
    if comm.wire != "torch" or comm.is_part:
        wire = "some of the ranks only" if comm.is_part else f"the wire {comm.wire}"
        raise ConfigError(
            f"parameter {name!r} is a DTensor, and this optimizer exchanges over {wire}: sharded parameters need "
            f"dgcopt.init() over torch.distributed (torchrun), with the comm of all ranks"
        )


def _asked_for(comm: Comm, mesh: Any) -> Ranks:
    """Return the ranks of the mesh given by the user."""
    if not hasattr(mesh, "mesh") or not hasattr(mesh, "mesh_dim_names"):
        raise ConfigError(
            f"rank {comm.rank}: mesh must be a torch DeviceMesh of one dimension, mesh['replicate'], not {mesh!r:.80}"
        )
    if mesh.ndim != 1:
        raise ConfigError(
            f"rank {comm.rank}: mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}: give the one over which "
            f"the model is replicated, mesh['replicate']"
        )
    ranks = tuple(mesh.mesh.tolist())
    if comm.rank not in ranks:
        raise ConfigError(f"mesh has ranks {[*ranks]}, and this is rank {comm.rank}: give each rank its own submesh")
    return ranks


def _gather(comm: Comm, shard: Ranks, asked: Ranks, sharded: Mapping[Tensor, str]) -> list[tuple[Ranks, Ranks, int]]:
    """Return every rank's shard group, the replicate group that it asks for, and a checksum of its shards' shapes."""
    told = "\n".join(f"{name} {tuple(local(param.detach()).shape)}" for param, name in sharded.items())
    row = torch.full((2 * comm.size + 1,), -1, dtype=torch.int64)
    row[: len(shard)] = torch.tensor(shard)
    row[comm.size : comm.size + len(asked)] = torch.tensor(asked, dtype=torch.int64)
    row[-1] = zlib.crc32(told.encode())
    rows = comm.run(AllGather(comm.to_wire(row), group="agreement", label="meshes of parameters")).tolist()
    size = comm.size
    return [(_ranks(row[:size]), _ranks(row[size:-1]), row[-1]) for row in rows]


def _ranks(row: Sequence[int]) -> Ranks:
    return tuple(rank for rank in row if rank >= 0)


def _replicas_found(comm: Comm, told: Sequence[tuple[Ranks, Ranks, int]], name: str) -> list[Ranks]:
    """Return the shard groups as replicas, if shards at the same place have the same shapes."""
    groups = sorted({shard for shard, _, _ in told})
    if len(groups) == 1:
        raise ConfigError(
            f"parameter {name!r} is sharded over all {len(groups[0])} ranks, a replicate group of one: there is "
            f"nobody to exchange with. {SHARD_ONLY} of a mesh with two dimensions, or step the bare optimizer"
        )
    is_partition = sorted(rank for group in groups for rank in group) == [*range(comm.size)]
    alike = is_partition and all(
        len({told[group[place]][2] for group in groups if place < len(group)}) == 1
        for place in range(max(map(len, groups)))
    )
    if not alike or len({*map(len, groups)}) > 1:
        raise ConfigError(
            f"the replicate group is ambiguous: parameters are sharded over {', '.join(map(str, groups[:4]))}, which "
            f"do not hold equal shards of one model. Give it: DistributedOptimizer(..., mesh=mesh['replicate'])"
        )
    return groups


def _replicas_asked_for(comm: Comm, told: Sequence[tuple[Ranks, Ranks, int]], name: str) -> list[Ranks]:
    """Return the replicas that follow from every rank's replicate group."""
    sets = sorted({asked for _, asked, _ in told})
    if all(len(ranks) <= 1 for ranks in sets):
        raise ConfigError(
            "the mesh is a replicate group of one: there is nobody to exchange with. Give the dimension over which the "
            "model is replicated, or step the bare optimizer"
        )
    is_partition = sorted(rank for ranks in sets for rank in ranks) == [*range(comm.size)]
    if (
        not is_partition
        or len({*map(len, sets)}) > 1
        or any(told[rank][1] != ranks for ranks in sets for rank in ranks)
    ):
        raise ConfigError(
            f"ranks give different replicate groups ({', '.join(map(str, sets[:4]))}), which should divide all "
            f"{comm.size} ranks into groups of one size: give mesh['replicate'] of one mesh of all ranks everywhere"
        )
    replicas = [*zip(*sets, strict=True)]
    replica_of = {rank: place for place, replica in enumerate(replicas) for rank in replica}
    for rank, (shard, asked, _) in enumerate(told):
        if len({replica_of[other] for other in shard}) > 1:
            both = sorted({*shard} & {*asked})
            why = f"ranks {both} are in both" if len(both) > 1 else f"its replica is {replicas[replica_of[rank]]}"
            raise ConfigError(
                f"rank {rank}: the replicate group is ranks {[*asked]}, and parameter {name!r} is sharded over ranks "
                f"{[*shard]}; {why}. {SHARD_ONLY} and DistributedOptimizer(..., mesh=mesh['replicate'])"
            )
    for ranks in sets:
        if len({told[rank][2] for rank in ranks}) > 1:
            raise ConfigError(
                f"ranks {[*ranks]} are a replicate group, but hold shards of different shapes: give mesh['replicate'] "
                f"of the mesh whose ['shard'] fully_shard was given"
            )
    return replicas
