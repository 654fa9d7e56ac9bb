"""The parameters given by a user: their names, checks, and the lines that must be equal on all ranks."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..flat.local_shard import as_stepped, is_sharded, local
from ..version import __version__
from .held import unwrapped
from .vote import plain

__all__ = [
    "LOAD_SHARDS",
    "check_not_sharded",
    "check_optimizer",
    "check_real",
    "check_trainable",
    "describe",
    "given_names",
    "inner_optimizer",
    "named_tensors",
    "names_of_new",
    "number",
    "split",
    "unique_names",
]


_HOOKS = frozenset(
    f"_optimizer_{which}_{when}_hooks"
    for which in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
"""Attributes of torch's optimizers; a wrapper that skips `Optimizer.__init__` lacks some."""


LOAD_SHARDS = (
    "load them by set_model_state_dict or set_optimizer_state_dict of torch.distributed.checkpoint.state_dict, with "
    "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)"
)
"""The broadcast of sharded parameters and of their optimizer's state."""


def check_optimizer(optimizer: Any) -> None:
    """Raise ConfigError for an object that is no torch optimizer, or whose step runs no hooks."""
    # looked up on the object itself, because wrappers forward lookups to the optimizer inside
    if isinstance(optimizer, Optimizer) and _HOOKS.issubset(vars(optimizer)):
        return
    name, remedy = type(optimizer).__name__, "give the optimizer of the model's parameters"
    own = {"optimizer": getattr(optimizer, "optimizer", None), **getattr(optimizer, "__dict__", {})}
    inside = [key for key, value in own.items() if isinstance(value, Optimizer)]
    if inside:
        remedy = (
            f"it goes around {type(own[inside[0]]).__name__}. Wrap that one (optimizer.{inside[0]}) before {name} is "
            f"put around it. If {name} reads or changes gradients or weights itself, call synchronize() of the one "
            f"inside before each step, and step within its skip_synchronize(). Where a framework has the model in "
            f"DistributedDataParallel, use dgcopt.ddp_hook"
        )
    raise ConfigError(f"{name} is no torch.optim.Optimizer with step hooks of its own: {remedy}")


def inner_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside the wrapper of Accelerate, Lightning or Fabric; any other as it is.

    Raises ConfigError if that is no torch optimizer whose step runs hooks.
    """
    inner: Optimizer = unwrapped(optimizer)
    check_optimizer(inner)
    return inner


def number(group: int, place: int) -> str:
    """Return the name of a parameter without a user's name."""
    return f"group{group}.parameter{place}"


def names_of_new(
    optimizer: Optimizer, names: Mapping[Tensor, str], given: Mapping[Tensor, str], rank: int
) -> dict[Tensor, str]:
    """Return the parameters that the optimizer's groups have beside `names`, with names: those `given`, or numbers.

    Raises ConfigError for parameters that were removed, and for new ones that would have the names of others.
    """
    known = {*map(as_stepped, names)}
    new = {
        param: given.get(param, number(group, place))
        for group, settings in enumerate(optimizer.param_groups)
        for place, param in enumerate(settings["params"])
        if param not in known
    }
    left = {param for group in optimizer.param_groups for param in group["params"]}
    removed = [name for param, name in names.items() if as_stepped(param) not in left]
    if removed:
        raise ConfigError(
            f"rank {rank}: parameter {removed[0]!r} ({len(removed)} of {len(names)}) was removed from "
            f"optimizer.param_groups after the optimizer was wrapped. Freeze it instead (requires_grad=False), or make "
            f"and wrap an optimizer of the new parameters."
        )
    if taken := {*names.values()}.intersection(new.values()):
        raise ConfigError(
            f"rank {rank}: a new parameter in optimizer.param_groups would have the name of another, {min(taken)!r}. "
            f"Append new parameters behind the others, by optimizer.add_param_group()."
        )
    return new


def given_names(named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str] | None:
    """Return the user's names by parameter, including parameters that the optimizer will get later.

    Raises ConfigError (a ValueError) if they are no pairs, or two have one name.
    """
    if named_parameters is None:
        return None
    is_pairs = isinstance(named_parameters, Iterable) and not isinstance(named_parameters, nn.Module | type)
    given = list(named_parameters) if is_pairs else []
    if not is_pairs or not all(_is_named(pair) and isinstance(pair[1], Tensor) for pair in given):
        raise ConfigError(
            f"named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            f"model.named_parameters(), not {_in_short(named_parameters)}. It is the second argument of "
            f"DistributedOptimizer and the compressor the third: "
            f"DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.DGC())"
        )
    counts = collections.Counter(name for name, _ in given)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise ConfigError(
            f"parameter names in named_parameters must be unique; found duplicates: {', '.join(duplicates)}. Prefix "
            f"the names when you chain the parameters of several modules."
        )
    return {param: name for name, param in given}


def named_tensors(given: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a `state_dict()`, or of pairs of a name and a value; other values are passed over.

    Raises ConfigError for anything else, where there are values but no tensor among them, for the meta device, and for
    DTensors.
    """
    is_pairs = isinstance(given, Iterable) and not isinstance(given, nn.Module | type)
    pairs = list(given.items() if isinstance(given, Mapping) else given) if is_pairs else []
    tensors = [(pair[0], pair[1].detach()) for pair in pairs if _is_named(pair) and isinstance(pair[1], Tensor)]
    if not is_pairs or not all(map(_is_named, pairs)) or (pairs and not tensors):
        raise ConfigError(
            f"model.state_dict(), or pairs of names and tensors such as model.named_parameters(), are needed, and not "
            f"{_in_short(given)}{' without any tensor in it' if pairs and all(map(_is_named, pairs)) else ''}"
        )
    check_real(tensors)
    for name, tensor in tensors:
        check_not_sharded(name, tensor)
    return tensors


def check_not_sharded(name: str, tensor: Tensor) -> None:
    """Raise ConfigError for a DTensor, of which ranks may hold different shards."""
    if is_sharded(tensor):
        raise ConfigError(
            f"{name} is a DTensor (fully_shard, tensor parallelism), of which this rank may hold a shard. To compare "
            f"ranks, give its full_tensor(). To give all ranks the values of rank 0, {LOAD_SHARDS}"
        )


def check_real(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ConfigError for tensors on the meta device."""
    unreal = [name for name, tensor in named if tensor.is_meta]
    if unreal:
        raise ConfigError(
            f"parameter {unreal[0]!r} is on the meta device and has no values ({len(unreal)} such parameters). "
            f"Materialise the model first, on all ranks: to_empty() and load_state_dict(assign=True) give it new "
            f"parameters, of which the optimizer must be made."
        )


def _is_named(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)


def _in_short(given: Any) -> str:
    """Describe an argument in a few words."""
    return f"the class {given.__name__}" if isinstance(given, type) else f"an object of type {type(given).__name__}"


FOREIGN = (
    " Those that were named are none of the optimizer's: are they another model's? fully_shard gives a model new "
    "parameters: make the optimizer after fully_shard"
)


def unique_names(optimizer: Optimizer, given: dict[Tensor, str] | None) -> dict[Tensor, str]:
    """Return all parameters and their names, in the optimizer's order. Raises ConfigError if one has no name."""
    own = [
        (number(group, place), param)
        for group, settings in enumerate(optimizer.param_groups)
        for place, param in enumerate(settings["params"])
    ]
    if not given:
        return {param: name for name, param in own}
    unnamed = [(place, param) for place, param in own if param not in given]
    if unnamed:
        foreign = len(unnamed) == len(own)
        raise ConfigError(
            f"named_parameters was specified, but {len(unnamed)} parameter(s) of the optimizer were not named: "
            + ", ".join(f"{place} of shape {tuple(param.shape)}" for place, param in unnamed[:5])
            + ". Pass the names of all parameters given to the optimizer, or none."
            + FOREIGN * foreign
        )
    return {param: given[param] for _, param in own}


def check_trainable(names: dict[Tensor, str], may_be_sharded: bool = False) -> None:
    """Raise ConfigError for parameters that cannot be averaged, or if none can be trained."""
    for param, name in names.items():
        _check_whole_on_each_rank(param, name, may_be_sharded)
        if isinstance(param, nn.UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} is a lazy layer's and has no shape yet: run the model on one batch before the "
                f"optimizer is wrapped, on all ranks"
            )
        if param.requires_grad and not param.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} has dtype {str(param.dtype).removeprefix('torch.')}: only floating-point "
                f"gradients can be averaged. Freeze it, or do not give it to the optimizer."
            )
        numel = local(param.detach()).numel()
        if numel >= 2**31:
            raise ConfigError(f"parameter {name!r} has {numel} elements; at most 2^31 - 1 can be indexed")
    if names and not any(param.requires_grad for param in names):
        raise ConfigError("none of the optimizer's parameters requires a gradient: there is nothing to train")


def _check_whole_on_each_rank(param: Tensor, name: str, may_be_sharded: bool) -> None:
    """Raise ConfigError for part of an FSDP1 module, and for a DTensor unless parameters `may_be_sharded`."""
    if hasattr(param, "_fsdp_flattened"):
        raise ConfigError(
            f"parameter {name!r} is part of a FullyShardedDataParallel module, which sends gradients by itself. Two "
            f"lines migrate: mesh = init_device_mesh('cuda', (replicas, shards), mesh_dim_names=('replicate', "
            f"'shard')), then fully_shard(model, mesh=mesh['shard']) in place of FullyShardedDataParallel(model)"
        )
    if is_sharded(param) and not may_be_sharded:
        raise ConfigError(
            f"parameter {name!r} is a DTensor (fully_shard, tensor parallelism): only DistributedOptimizer and "
            f"averaging take it: DistributedOptimizer(optimizer, model.named_parameters(), compressor, "
            f"mesh=mesh['replicate'])"
        )


def split(items: Sequence[str], parts: int) -> list[Sequence[str]]:
    """Cut `items` into at most `parts` runs with lengths that differ by at most one."""
    parts = min(parts, max(1, len(items)))
    short, longer = divmod(len(items), parts)
    bounds = [place * short + min(place, longer) for place in range(parts + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


def describe(
    optimizer: Optimizer,
    names: dict[Tensor, str],
    settings: dict[str, Any],
    trained: Collection[Tensor] | None = None,
) -> list[str]:
    """Return the lines that must be equal on all ranks. `trained` are those that require a gradient if None."""
    trained = {param for param in names if param.requires_grad} if trained is None else trained
    return [
        f"versions: dgcopt {__version__}, torch {torch.__version__}",
        f"optimizer: {type(optimizer).__name__}",
        *(f"{name}: {plain(value)}" for name, value in settings.items()),
        f"number of parameters: {len(names)}",
        *(
            f"parameter {name}: {str(param.dtype).removeprefix('torch.')} {tuple(param.shape)} strides "
            f"{param.stride()}{'' if param in trained or not param.numel() else ', frozen'}"
            for param, name in names.items()
        ),
    ]
