"""What a user gives to DistributedOptimizer, checked before anything is joined or sent."""

from __future__ import annotations

import collections
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ConfigError

__all__ = [
    "Op",
    "check_flag",
    "check_groups",
    "check_op",
    "check_optimizer",
    "check_passes",
    "check_positive",
    "check_predivide",
    "check_trainable",
    "check_whole",
    "describe",
    "describe_groups",
    "given_names",
    "inner_optimizer",
    "number",
    "split",
    "unique_names",
]

Op: TypeAlias = Literal["average", "sum", "adasum"]

_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Whose wrappers of optimizers call `step` of the one inside, `.optimizer`, and so run its step hooks."""


def check_optimizer(optimizer: Any) -> None:
    """Raises ConfigError for what is no torch optimizer, or only looks like one: its step would run no hooks."""
    # looked up in the object itself, because wrappers hand on what they are asked for
    if isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer):
        return
    inner = getattr(optimizer, "optimizer", None)
    remedy = "give the optimizer of the model's parameters"
    if isinstance(inner, Optimizer):
        remedy = (
            f"it goes around {type(inner).__name__}. Give that one (optimizer.optimizer) before it is put there; or, "
            f"where a framework has the model in DistributedDataParallel, use dgcopt.ddp_hook"
        )
    raise ConfigError(f"{type(optimizer).__name__} is no torch.optim.Optimizer with step hooks of its own: {remedy}")


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside what Accelerate, Lightning or Fabric put around it; any other as it is.

    Raises ConfigError if that is no torch optimizer whose step runs hooks.
    """
    if type(optimizer).__module__.partition(".")[0] in _FRAMEWORKS:
        optimizer = getattr(optimizer, "optimizer", optimizer)
    check_optimizer(optimizer)
    return optimizer


def check_op(op: Any) -> Op:
    """Ours, or Horovod's `Average`, `Sum` and `Adasum`, which are numbers. Raises ConfigError for others."""
    if op in ("average", "sum", "adasum"):
        return op
    # horovod.common.basics: Average = 0, Sum = 1, Adasum = 2 in all versions that have process sets
    if isinstance(op, int) and not isinstance(op, bool) and op in (0, 1, 2):
        return ("average", "sum", "adasum")[op]
    raise ConfigError(f'op must be "average", "sum" or "adasum", or Horovod\'s Average, Sum or Adasum, not {op!r}')


def check_whole(value: Any, name: str, least: int) -> int:
    """A whole number of at least `least`. Raises ConfigError for others."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def check_flag(value: Any, name: str) -> bool:
    """True or False. Raises ConfigError for others."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return value


def check_passes(passes: Any) -> int:
    """How many backward passes make a step. Raises ConfigError for what cannot be."""
    return check_whole(passes, "backward_passes_per_step", 1)


def check_positive(value: Any, name: str) -> float:
    """A positive, finite number. Raises ConfigError for others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, not {value!r}")
    return float(value)


def check_predivide(factor: Any, op: Op) -> float:
    """Part of the division by the number of ranks, done before the sum. Raises ConfigError where nothing is divided."""
    factor = check_positive(factor, "gradient_predivide_factor")
    if factor != 1 and op != "average":
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    return factor


def number(group: int, place: int) -> str:
    """The name of a parameter that the user gave none."""
    return f"group{group}.parameter{place}"


def given_names(named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str] | None:
    """The user's names by parameter; those of parameters that the optimizer gets later are welcome.

    Raises ConfigError (a ValueError) if they are no pairs, or two have one name.
    """
    if named_parameters is None:
        return None
    is_pairs = isinstance(named_parameters, Iterable) and not isinstance(named_parameters, nn.Module | type)
    given = list(named_parameters) if is_pairs else []
    if not is_pairs or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in given):
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


def _in_short(given: Any) -> str:
    """What was given, in a few words."""
    return f"the class {given.__name__}" if isinstance(given, type) else f"an object of type {type(given).__name__}"


def unique_names(optimizer: Optimizer, given: dict[Tensor, str] | None) -> dict[Tensor, str]:
    """Every parameter of the optimizer with its name, in the optimizer's order. Raises ConfigError if one has none."""
    own = [
        (number(group, place), param)
        for group, settings in enumerate(optimizer.param_groups)
        for place, param in enumerate(settings["params"])
    ]
    if not given:
        return {param: name for name, param in own}
    unnamed = [(place, param) for place, param in own if param not in given]
    if unnamed:
        raise ConfigError(
            f"named_parameters was specified, but {len(unnamed)} parameter(s) of the optimizer were not named: "
            + ", ".join(f"{place} of shape {tuple(param.shape)}" for place, param in unnamed[:5])
            + ". Pass the names of all parameters given to the optimizer, or none."
        )
    return {param: given[param] for _, param in own}


def check_trainable(names: dict[Tensor, str]) -> None:
    """Raises ConfigError for parameters that cannot be averaged, or if none can be trained."""
    for param, name in names.items():
        _check_whole_on_each_rank(param, name)
        if param.requires_grad and not param.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} has dtype {str(param.dtype).removeprefix('torch.')}: only floating-point "
                f"gradients can be averaged. Freeze it, or do not give it to the optimizer."
            )
        if param.numel() >= 2**31:
            raise ConfigError(f"parameter {name!r} has {param.numel()} elements; at most 2^31 - 1 can be indexed")
    if names and not any(param.requires_grad for param in names):
        raise ConfigError("none of the optimizer's parameters requires a gradient: there is nothing to train")


def _check_whole_on_each_rank(param: Tensor, name: str) -> None:
    """Raises ConfigError for what torch has cut up or laid over a mesh of ranks, told by the marks that it leaves."""
    of_mesh, of_fsdp = hasattr(param, "device_mesh"), hasattr(param, "_fsdp_flattened")
    if of_mesh or of_fsdp:
        kind = "a DTensor (fully_shard, tensor parallelism)" if of_mesh else "part of a FullyShardedDataParallel module"
        raise ConfigError(
            f"parameter {name!r} is {kind}: sharded parameters are not supported yet. Train the plain module, whole on "
            f"every rank, with DistributedOptimizer, or in DistributedDataParallel with ddp_hook"
        )


def check_groups(
    names: dict[Tensor, str], groups: int | Sequence[Sequence[Tensor]] | None, num_groups: int
) -> dict[str, int] | None:
    """Which group each parameter's name is in, from lists, or by splitting all parameters in a number of groups.

    `num_groups` is what Horovod called that number before 0.23. Raises ConfigError for both at once, unknown
    parameters, one in two groups, or a negative number.
    """
    if check_whole(num_groups, "num_groups", 0):
        if groups is not None:
            raise ConfigError("give groups or num_groups, not both")
        warnings.warn(f"num_groups is deprecated: say groups={num_groups}", DeprecationWarning, stacklevel=3)
        groups = num_groups
    if groups is None or isinstance(groups, int):
        if not check_whole(groups or 0, "groups", 0):
            return None
        trained = [name for param, name in names.items() if param.requires_grad]
        return {name: group for group, members in enumerate(split(trained, groups or 0)) for name in members}
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise ConfigError(
            f"groups should be a number or a list of lists of parameters, which share one bucket, not {groups!r:.80}"
        )
    group_of: dict[str, int] = {}
    for group, members in enumerate(groups):
        for param in members:
            if not isinstance(param, Tensor) or param not in names:
                raise ConfigError(f"groups[{group}] holds something that is no parameter of this optimizer")
            if names[param] in group_of:
                raise ConfigError(f"parameter {names[param]!r} is in groups twice")
            group_of[names[param]] = group
    return group_of


def split(items: Sequence[str], parts: int) -> list[Sequence[str]]:
    """`items` cut into at most `parts` runs whose lengths differ by one at most."""
    parts = min(parts, max(1, len(items)))
    short, longer = divmod(len(items), parts)
    bounds = [place * short + min(place, longer) for place in range(parts + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


def describe_groups(optimizer: Optimizer) -> list[str]:
    """The numbers in the optimizer's parameter groups, learning rates and the like, a line each."""
    lines = []
    for place, group in enumerate(optimizer.param_groups):
        for name, value in sorted(group.items()):
            plain = value.tolist() if isinstance(value, Tensor) else value
            parts = plain if isinstance(plain, tuple | list) else [plain]
            how = name in ("params", "foreach", "fused")  # how a step is made does not change what it is
            if not how and all(isinstance(part, int | float) for part in parts):
                lines.append(f"{name} of parameter group {place}: {plain}")
    return lines


def describe(optimizer: Optimizer, names: dict[Tensor, str], settings: dict[str, Any], version: str) -> list[str]:
    """Everything that must be equal on all ranks, a line each."""
    return [
        f"versions: dgcopt {version}, torch {torch.__version__}",
        f"optimizer: {type(optimizer).__name__}",
        *(f"{name}: {re.sub(' at 0x[0-9a-f]+', '', str(value))}" for name, value in settings.items()),
        f"number of parameters: {len(names)}",
        *(
            f"parameter {name}: {str(param.dtype).removeprefix('torch.')} {tuple(param.shape)} strides "
            f"{param.stride()}{'' if param.requires_grad else ', frozen'}"
            for param, name in names.items()
        ),
    ]
