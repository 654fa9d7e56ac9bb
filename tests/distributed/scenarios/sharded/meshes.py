"""The replicate group is found; wrong meshes, wrong models and ranks that differ are refused."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

import dgcopt
from dgcopt import DGC, Comm, ConfigError, NoCompression
from dgcopt.gradients.synchronised import synchronised

from ..collectives import regrouped
from ..training import refused
from .setup import Net, Wide, loss_of, mesh_of, scenarios_of, sharded, wrap


def the_replicate_group_is_found(comm: Comm) -> None:
    """The shards' mesh, `process_set="across"` and an explicit mesh lead to the same ranks."""
    for replicas in (2, comm.size):
        mesh = mesh_of(comm, replicas)
        shards = comm.size // replicas
        model = sharded(mesh["shard"])
        machines = regrouped(comm, [rank // shards for rank in range(comm.size)])
        ways: list[dict[str, Any]] = [{}, {"mesh": mesh["replicate"]}, {"process_set": "across", "comm": machines}]
        for settings in ways:
            optimizer = dgcopt.DistributedOptimizer(
                SGD(model.parameters(), lr=0.1), model.named_parameters(), **{"comm": comm, **settings}
            )
            made = synchronised(optimizer).comm  # type: ignore[union-attr]
            assert (made.rank, made.size) == (comm.rank // shards, replicas), f"{settings}: {made}"
            row = comm.rank // shards * shards
            assert made.ranks("replica") == tuple(range(row, row + shards))


def wrong_meshes(comm: Comm) -> None:
    """All ranks refuse each one before anything is exchanged; the wire stays usable."""
    mesh = mesh_of(comm, 2)
    half = mesh["shard"]

    def refuse(model: nn.Module, *words: str, named: Any = None, optimizer: Any = None, **settings: Any) -> None:
        optimizer = SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
        with refused(comm, ConfigError, *words):
            dgcopt.DistributedOptimizer(optimizer, named or model.named_parameters(), **{"comm": comm, **settings})

    def every_step(model: nn.Module, optimizer: Any) -> Any:
        return dgcopt.LocalSGD(every=1).attach(optimizer, model.named_parameters(), mesh=mesh["replicate"])

    model = sharded(half)
    refuse(model, "mesh has 2 dimensions ('replicate', 'shard')", "mesh['replicate']", mesh=mesh)
    refuse(model, "mesh must be a torch DeviceMesh", mesh="replicate")
    refuse(model, "are in both", "fully_shard(module, mesh=mesh['shard'])", mesh=half)
    refuse(model, "give mesh=mesh['replicate'] in place of process_set", process_set=[0, 1])
    refuse(model, "give mesh=mesh['replicate'] in place of", process_set="across", mesh=mesh["replicate"])
    refuse(model, "over the wire simulated", "torchrun", comm=dgcopt.simulated_world(2)[0])
    halves = regrouped(comm, [rank // 2 for rank in range(comm.size)])
    refuse(model, "over some of the ranks only", comm=halves.among("node"))
    crossed = init_device_mesh("cpu", (comm.size,), mesh_dim_names=("all",))
    refuse(model, "are in both", mesh=crossed)
    refuse(
        sharded(mesh), "sharded over all 4 ranks, a replicate group of one", "fully_shard(module, mesh=mesh['shard'])"
    )
    refuse(sharded(mesh), "are in both", mesh=mesh["replicate"])
    alone = mesh_of(comm, 1)
    refuse(sharded(alone["shard"]), "a replicate group of one", mesh=alone["replicate"])
    refuse(sharded(alone["shard"]), "a replicate group of one", "step the bare optimizer")

    partly = Net()
    fully_shard(partly.first, mesh=half)
    refuse(partly, "parameter 'second.weight' is outside the mesh", "fully_shard on the whole model")
    several = Wide()
    fully_shard(several[0], mesh=half)
    fully_shard(several, mesh=mesh["replicate"])
    refuse(several, "over several meshes ('0.", "the replicate group is ambiguous")
    refuse(several, "sharded over ranks [0, 1, 2]", "are in both", mesh=mesh["replicate"])
    refuse(Net(), "mesh is for sharded parameters", "before the optimizer is made", mesh=mesh["replicate"])

    late = Wide()
    early = SGD(late.parameters(), lr=0.1)
    fully_shard(late, mesh=half)
    refuse(late, "make the optimizer after fully_shard", optimizer=early, mesh=mesh["replicate"])

    grown = wrap(model, SGD(model.parameters(), lr=0.1), mesh)
    with refused(comm, ConfigError, "is outside the mesh"):
        grown.add_param_group({"params": list(Wide().parameters())})
    with refused(comm, ConfigError, "cannot rejoin"):
        grown.rejoin()
    for wrapped in (functools.partial(wrap, mesh=mesh), every_step):
        thawed = Wide()
        thawed[4].requires_grad_(False)
        fully_shard(thawed, mesh=half, ignored_params={*thawed[4].parameters()})
        stepped = wrapped(thawed, SGD(thawed.parameters(), lr=0.1))
        loss_of(thawed, comm, 0).backward()
        stepped.step()
        thawed[4].requires_grad_(True)
        loss_of(thawed, comm, 1).backward()
        with refused(comm, ConfigError, "parameter '4.weight' is outside the mesh"):
            stepped.step()
    some = dgcopt.PerParameter({"first": DGC(0.1, clip=dgcopt.LocalClip(1.0)), "*": NoCompression()})
    refuse(model, "clips the norm of some parameters", "clip per='tensor'", compression=some)


def wrapped_before_it_is_sharded(comm: Comm) -> None:
    """All ranks refuse to step an optimizer whose parameters fully_shard has replaced."""
    model = Wide()
    optimizer = dgcopt.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters(), comm=comm)
    fully_shard(model, mesh=mesh_of(comm, 2)["shard"])
    loss_of(model, comm, 0).backward()
    with refused(comm, ConfigError, "after the optimizer was wrapped", "Call fully_shard first"):
        optimizer.step()


def errors_name_global_ranks(comm: Comm) -> None:
    """Errors name global ranks and replicas, if replicas differ and if shards of one replica differ."""
    mesh = mesh_of(comm, 2)

    def step(changes: bool, **settings: Any) -> None:
        model = sharded(mesh["shard"], Wide())
        optimizer = wrap(model, SGD(model.parameters(), lr=0.1), mesh, DGC(0.3), **settings)
        optimizer.param_groups[0]["lr"] *= 1 + changes
        for at in range(3):  # shards compare 8 bits in each
            optimizer.zero_grad()
            loss_of(model, comm, at).backward()
            optimizer.step()

    mine, pair = f"rank {comm.rank} (replica {comm.rank // 2})", f"rank {comm.rank % 2 + 2} (replica 1)"
    with refused(comm, dgcopt.MismatchError, f"seen on {mine}", f"{pair} has [bucket_mb: 0.001]"):
        step(False, **({"bucket_mb": 0.001} if comm.rank > 1 else {}))
    with refused(comm, dgcopt.MismatchError, mine, "hold shards of one replica", "such as the learning rate"):
        step(comm.rank % 2 == 1)


SCENARIOS = scenarios_of(
    the_replicate_group_is_found,
    wrong_meshes,
    wrapped_before_it_is_sharded,
    errors_name_global_ranks,
)
