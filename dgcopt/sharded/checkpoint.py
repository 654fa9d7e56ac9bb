"""Checkpoints of sharded parameters' memory through `torch.distributed.checkpoint`, which any mesh can load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import CheckpointError, ConfigError
from ..flat.local_shard import LocalShard, as_dtensor, as_stepped, is_sharded, local
from ..flat.optimizer_state import SHARD, STATE_KEY, kept_by, unmarked
from ..flat.store import NamedTensors, check_format
from ..gradients.replicas import gather_in_replica
from ..gradients.synchronised import Synchronised, synchronised

__all__ = ["load", "state"]

MEMORY, OWN, ALIKE = "memory of replica ", "own state of replica ", "equal on all replicas"
SHARED, SETTINGS = "shared of shard ", "settings of shard "
"""Keys of a part, or their beginnings before a number."""

GRADIENTS, AVERAGING, OUTER = "gradients", "averaging", "outer optimizer "
"""Names of parts; an outer optimizer's ends in its number."""


@dataclass
class Part:
    """One part of an optimizer's state on one rank: of its gradients, of averaging, or of an outer optimizer.

    Attributes:
        name: its key in `state`.
        comm: one rank of each replica.
        params: this rank's shards by name.
        kept: the part's `STATE_KEY` entry: memory of this replica, shared tensors, settings.
        own: tensors of the optimizer itself that are this replica's, by kind and name.
        alike: tensors of the parameters that are equal on all replicas, by kind and name.
        groups: settings of the parameter groups, where torch does not save them.
    """

    name: str
    comm: Any
    params: dict[str, LocalShard]
    kept: dict[str, Any]
    own: NamedTensors = field(default_factory=dict)
    alike: NamedTensors = field(default_factory=dict)
    groups: Sequence[dict[str, Any]] = ()

    @property
    def shard(self) -> str:
        """The number of this rank's shard."""
        return str(self.comm.place_in_replica()["rank"])

    @property
    def shards(self) -> int:
        """The number of shards of a replica."""
        return int(self.comm.place_in_replica()["size"])

    def saved(self) -> dict[str, Any]:
        """Return the part for `torch.distributed.checkpoint.save`."""
        apart = ("memory", "shared", SHARD, "rank", "world_size")
        settings = {key: value for key, value in self.kept.items() if key not in apart}
        settings |= {"replicas": self.comm.size, "shards": self.shards, "groups": [*map(_numbers, self.groups)]}
        told = torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)
        replica = str(int(self.comm.rank))
        entries = {
            MEMORY + replica: self._on_mesh(self._whole_memory()),
            OWN + replica: self._on_mesh(self.own),
            ALIKE: self._on_mesh(self.alike),
            SHARED + self.shard: self.kept["shared"],
        }
        return {SETTINGS + self.shard: told, **{key: entry for key, entry in entries.items() if any(entry.values())}}

    def _whole_memory(self) -> NamedTensors:
        """Return the memory, zero where only other shards of the replica keep some: torch saves whole tensors only."""
        memory = {kind: dict(by_name) for kind, by_name in self.kept["memory"].items()}
        kinds = {kind: {n: str(one.dtype) for n, one in by_name.items()} for kind, by_name in memory.items()}
        for words in gather_in_replica(self.comm, json.dumps(kinds), "kinds of memory"):
            for kind, by_name in json.loads(words).items():
                for name, dtype in by_name.items():
                    if name not in memory.setdefault(kind, {}):
                        of = self.params[name].detach()
                        memory[kind][name] = torch.zeros_like(of, dtype=getattr(torch, dtype.removeprefix("torch.")))
        return memory

    def _on_mesh(self, tensors: NamedTensors) -> NamedTensors:
        """Return tensors of the parameters as DTensors; all others as they are."""

        def on_mesh(name: str, tensor: Tensor) -> Tensor:
            param = self.params[name]
            return as_dtensor(tensor, param) if not is_sharded(tensor) and tensor.shape == param.shape else tensor

        return {kind: {n: on_mesh(n, one) for n, one in by_name.items()} for kind, by_name in tensors.items()}

    def replicas_of(self, settings: Mapping[str, Any]) -> list[int]:
        """Return the saved replicas whose memory this one takes; none if it starts from zeros of all that they kept."""
        return [*range(self.comm.rank, settings["replicas"], self.comm.size)]

    def own_of(self, settings: Mapping[str, Any]) -> int:
        """Return the saved replica whose optimizer's own state this one takes."""
        return int(self.comm.rank) % int(settings["replicas"])

    def wanted(self, found: Mapping[tuple[str, ...], Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return empty tensors for all that this rank takes from a checkpoint."""
        own = self.own_of(settings)
        tops = [ALIKE, f"{OWN}{own}", *(f"{MEMORY}{replica}" for replica in self.replicas_of(settings) or [own])]
        if settings["shards"] == self.shards:
            tops.append(SHARED + self.shard)
        wanted: dict[str, Any] = {}
        for path, one in found.items():
            if len(path) > 1 and path[0] in tops:
                top, kind, name = path
                wanted.setdefault(top, {}).setdefault(kind, {})[name] = self._empty(top, kind, name, one)
        return wanted

    def _empty(self, top: str, kind: str, name: str, saved: Any) -> Tensor:
        is_of_a_shape = len(saved.size) > 0 and top.startswith((MEMORY, ALIKE))  # unlike Adam's count of steps
        if is_of_a_shape or (top.startswith(OWN) and name in self.params and self._fits(name, saved)):
            if name not in self.params or not self._fits(name, saved):
                of = self.params.get(name)
                there = "this optimizer does not have" if of is None else f"has shape {tuple(of.dtensor.shape)}"
                raise ConfigError(
                    f"the checkpoint holds {kind} of shape {tuple(saved.size)} for parameter {name!r}, which {there}"
                )
            param = self.params[name]
            return as_dtensor(torch.zeros_like(param, dtype=saved.properties.dtype), param)
        return torch.zeros(saved.size, dtype=saved.properties.dtype)

    def _fits(self, name: str, saved: Any) -> bool:
        return bool(self.params[name].dtensor.shape == saved.size)

    def load(self, loaded: Mapping[str, Any], all_settings: Mapping[str, dict[str, Any]]) -> None:
        """Take on the tensors of a checkpoint, and the settings with which each shard saved it."""
        settings = next(iter(all_settings.values()))
        is_cut_alike = settings["shards"] == self.shards
        memory = [loaded[top] for top in sorted(loaded) if top.startswith(MEMORY)]
        sums = _summed(memory)
        if not self.replicas_of(settings):
            sums = {kind: {n: torch.zeros_like(one) for n, one in by_name.items()} for kind, by_name in sums.items()}
        kept = {key: value for key, value in settings.items() if key not in ("replicas", "shards", "groups")}
        self.kept = kept_by(
            self.comm.rank,
            self.comm.size,
            **kept
            | {
                "order": all_settings[SETTINGS + self.shard]["order"] if is_cut_alike else [],
                "made_of": {name: of for told in all_settings.values() for name, of in told["made_of"].items()},
                "memory": sums,
                "shared": loaded.get(SHARED + self.shard, {}) if is_cut_alike else {},
            },
        )
        self.own = loaded.get(OWN + str(self.own_of(settings)), {})
        self.alike = loaded.get(ALIKE, {})
        self.groups = settings["groups"]


def state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the memory of sharded parameters of an optimizer, for `torch.distributed.checkpoint.save`.

    It is that of `DistributedOptimizer`, and of averaging (`LocalSGD`, `SlowMo`, `DiLoCo`). Every rank gives its own,
    and must call this; tensors are DTensors of the parameters' placements, under a key of the replica where replicas
    differ. Raises ConfigError for an optimizer of whole parameters.
    """
    return {part.name: part.saved() for part in _parts_of(optimizer)}


def load(optimizer: Optimizer, checkpoint_id: Any = None, key: str = "dgcopt", storage_reader: Any = None) -> None:
    """Load a `state` that was saved under `key` onto this mesh; collective, after `set_optimizer_state_dict`.

    Args:
        optimizer: wrapped by `DistributedOptimizer` or an averaging algorithm, of sharded parameters.
        checkpoint_id: the checkpoint, as for `torch.distributed.checkpoint.load`.
        key: key of `state(optimizer)` in the saved dict.
        storage_reader: reads the checkpoint; None reads files in the folder `checkpoint_id`.

    Onto as many replicas and shards as saved it, training goes on with the same bits. Another size of shard groups cuts
    memory anew. Among other numbers of replicas, replica r of n takes the sum of the saved replicas r, r + n, ..., or
    zeros if there are none, so the sum of residuals stays. Adam's moments are those of one saved replica. Averaging
    starts from the mean of the saved weights, anchors stay, and the mean of outer residuals stays.

    Raises CheckpointError if the checkpoint has no such entry, or one of other algorithms; ConfigError for other
    parameters.
    """
    import torch.distributed.checkpoint as dcp

    parts = _parts_of(optimizer)
    reader = dcp.FileSystemReader(checkpoint_id) if storage_reader is None else storage_reader
    metadata = reader.read_metadata()
    found: dict[str, dict[tuple[str, ...], Any]] = {}
    for fqn, path in (metadata.planner_data or {}).items():
        if path[0] == key and len(path) > 2:
            found.setdefault(str(path[1]), {})[tuple(map(str, path[2:]))] = metadata.state_dict_metadata[fqn]
    if not found:
        raise CheckpointError(
            f"the checkpoint {checkpoint_id or reader} has no dgcopt.sharded.state(optimizer) under {key!r}. Give the "
            f"key under which it was saved, or go on without it: residuals start from zero then"
        )
    if {*found} != (mine := {part.name for part in parts}):
        raise CheckpointError(
            f"the checkpoint holds the state of {_listed(found)}, and this optimizer has {_listed(mine)}: load it into "
            f"the algorithm that saved it, or go on without it"
        )
    told: dict[str, Any] = {
        part.name: {
            path[0]: torch.zeros(one.size, dtype=torch.uint8)
            for path, one in found[part.name].items()
            if len(path) == 1
        }
        for part in parts
    }
    dcp.load({key: told}, checkpoint_id=checkpoint_id, storage_reader=storage_reader)
    settings = {
        name: {top: json.loads(bytes(one.tolist())) for top, one in by_shard.items()} for name, by_shard in told.items()
    }
    wanted: dict[str, Any] = {}
    for part in parts:
        any_of = next(iter(settings[part.name].values()))
        check_format(any_of)
        # settings once more, so that it is never empty, which torch refuses
        wanted[part.name] = {**told[part.name], **part.wanted(found[part.name], any_of)}
    dcp.load({key: wanted}, checkpoint_id=checkpoint_id, storage_reader=storage_reader)
    for part in parts:
        part.load(wanted[part.name], settings[part.name])
    _restore(optimizer, {part.name: part for part in parts})


def _parts_of(optimizer: Optimizer) -> list[Part]:
    """Return the parts of an optimizer's state, as they are now."""
    steps, rounds, parts = synchronised(optimizer), _rounds_of(optimizer), list[Part]()
    if steps is not None and steps.is_sharded:
        own = _own(optimizer, steps.names) if rounds is None and steps.compressor.sends == "update" else {}
        assert steps.engine is not None  # a replicate group of one is refused
        parts.append(Part(GRADIENTS, steps.comm, _shards(steps.names), steps.engine.state(), own))
    if rounds is not None:
        entry, of = rounds.entry(), rounds.names
        kept, anchors = {**entry[STATE_KEY], "shared": {}}, entry[STATE_KEY]["shared"]
        parts.append(Part(AVERAGING, rounds.comm, _shards(of), kept, _own(optimizer, of), anchors))
        for place, saved in enumerate(entry.get("outers", ())):
            outer: Any = synchronised(rounds.outers[place])
            names = _names_in(saved, outer)
            tensors: NamedTensors = {}
            for index, values in saved["state"].items():
                for kind, value in values.items():
                    if isinstance(value, Tensor):
                        tensors.setdefault(kind, {})[names[index]] = value
            differs = outer.compressor.sends == "update"
            parts.append(
                Part(
                    f"{OUTER}{place}",
                    rounds.comm,
                    {name: param for name, param in _shards(of).items() if name in names.values()},
                    saved[STATE_KEY],
                    tensors if differs else {},
                    {} if differs else tensors,
                    saved["param_groups"],
                )
            )
    if not parts:
        raise ConfigError(
            "dgcopt.sharded is for an optimizer that DistributedOptimizer or averaging has wrapped and whose "
            "parameters are sharded: use dgcopt.checkpoint for all others"
        )
    return parts


def _restore(optimizer: Optimizer, parts: Mapping[str, Part]) -> None:
    """Restore parts that a checkpoint was loaded into."""
    steps, rounds = synchronised(optimizer), _rounds_of(optimizer)
    for name in (GRADIENTS, AVERAGING):
        if name in parts:
            names = steps.names if rounds is None and steps is not None else rounds.names if rounds else {}
            _copy_own(_own(optimizer, names), parts[name].own)
    if steps is not None and GRADIENTS in parts:
        steps.restore_apart(parts[GRADIENTS].kept)
    if rounds is not None:
        part = parts[AVERAGING]
        entry: dict[str, Any] = {STATE_KEY: {**part.kept, "shared": _summed([part.alike])}}
        if rounds.outers:
            entry["outers"] = [
                _outer_state(outer, parts[f"{OUTER}{place}"]) for place, outer in enumerate(rounds.outers)
            ]
        if part.kept["saved_by"] == part.comm.size:  # else all take the mean
            with torch.no_grad():
                for name, weights in part.kept["memory"].get("weights", {}).items():
                    part.params[name].copy_(weights)
        rounds.restore_entry(entry)


def _outer_state(outer: Optimizer, part: Part) -> dict[str, Any]:
    """Return an outer optimizer's `state_dict()` with the state of a part."""
    saved = outer.state_dict()
    names, steps = _names_in(saved, synchronised(outer)), dict[Any, dict[str, Any]]()
    for kind, by_name in (part.own | part.alike).items():
        for index, name in names.items():
            if name in by_name:
                steps.setdefault(index, {})[kind] = local(by_name[name])
    last = len(part.groups) - 1  # their number depends on when parameters were added
    groups = [{**now, **part.groups[min(place, last)]} for place, now in enumerate(saved["param_groups"])]
    return {**saved, "state": steps, "param_groups": groups, STATE_KEY: part.kept}


def _names_in(saved: Mapping[str, Any], steps: Synchronised | None) -> dict[Any, str]:
    """Return the names of an outer optimizer's parameters by their numbers in its `state_dict()`."""
    assert steps is not None
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    params = [param for group in steps.optimizer.param_groups for param in group["params"]]
    return {number: steps.names[param] for number, param in zip(numbers, params, strict=True)}


def _rounds_of(optimizer: Any) -> Any:
    """Return the averaging of an optimizer's shards, its attribute `averaging`; None without any."""
    rounds = getattr(optimizer, "averaging", None)
    return rounds if rounds is not None and rounds.comm.joins_replicas else None


def _shards(names: Mapping[Tensor, str]) -> dict[str, LocalShard]:
    return {name: param for param, name in names.items() if isinstance(param, LocalShard)}


def _own(optimizer: Optimizer, names: Mapping[Tensor, str]) -> NamedTensors:
    """Return the tensors that the optimizer itself keeps, by kind and name."""
    own: NamedTensors = {}
    for param, name in names.items():
        for kind, value in optimizer.state.get(as_stepped(param), {}).items():
            if isinstance(value, Tensor):
                own.setdefault(kind, {})[name] = value
    return own


def _copy_own(own: NamedTensors, loaded: NamedTensors) -> None:
    """Write a replica's tensors into those of its optimizer, which may keep less."""
    for kind, by_name in loaded.items():
        for name, tensor in by_name.items():
            if name in own.get(kind, {}):
                own[kind][name].copy_(tensor)


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings of a parameter group that are numbers, such as lr."""
    return {key: value for key, value in unmarked(dict(group)).items() if isinstance(value, int | float)}


def _summed(replicas: Sequence[NamedTensors]) -> NamedTensors:
    """Return this rank's shards of the memory of several replicas, added up."""
    sums: NamedTensors = {}
    for memory in replicas:
        for kind, by_name in memory.items():
            for name, tensor in by_name.items():
                into = sums.setdefault(kind, {})
                into[name] = into[name] + local(tensor) if name in into else local(tensor)
    return sums


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
