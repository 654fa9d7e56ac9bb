"""Models on paper: the shapes of their parameters, and the time when each gradient is ready."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ConfigError
from .timeline import Parameter

__all__ = ["FORWARD", "MODELS", "Model", "known_models", "load_model", "model_on_paper", "tensors_of"]

FORWARD = 1 / 3
"""The share of a step's arithmetic that is forward: backward computes two products for each one of forward."""

MODELS = Path(__file__).with_name("models.json")
"""Real shapes and step times of some models; scripts/tuning_models.py writes it."""


@dataclass(frozen=True)
class Model:
    """A model's parameters and its step on one rank, without any exchange.

    Attributes:
        name: as the user wrote it.
        shapes: trained parameters by name, in the order of the model.
        shares: of each parameter in the time of backward.
        seconds: of forward and backward; `forward`, the share of them before backward.
        source: where `seconds` is from; "" if the user gave it.
        device: that they are measured on, and `memory`, its bytes per second; "" and 0.0 if the user gave them.
        batch: samples of the step; 0 if the user gave its time.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    shares: Sequence[float]
    seconds: float
    forward: float = FORWARD
    source: str = ""
    device: str = ""
    memory: float = 0.0
    batch: int = 0

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def parameters(self) -> list[Parameter]:
        """Return the parameters with the times when their gradients are ready; backward reaches the last one first."""
        total = sum(self.shares) or 1.0
        ready, arranged = self.seconds * self.forward, []
        backward = self.seconds - ready
        for shape, share in reversed([*zip(self.shapes.values(), self.shares, strict=True)]):
            ready += backward * share / total
            arranged.append(Parameter(torch.Size(shape).numel(), min(ready, self.seconds)))
        return arranged


def known_models() -> dict[str, Model]:
    """Return the models whose shapes and step times come with dgcopt, by name."""
    found = {}
    for name, entry in json.loads(MODELS.read_text()).items():
        shapes = {one: tuple(shape) for one, shape, _ in entry["parameters"]}
        shares = [share for _, _, share in entry["parameters"]]
        source = f"{entry['batch']} on one {entry['device']}: {entry['source']}"
        found[name] = Model(
            *(name, shapes, shares, entry["seconds"], entry["forward"], source, entry["device"], entry["memory"]),
            batch=int(entry["batch"].split()[0]),
        )
    return found


def model_on_paper(spec: str, seconds: float | None = None) -> Model:
    """Return a model by name, or by `module:callable` that builds it.

    Args:
        spec: a name of `known_models`, or as for `load_model`.
        seconds: of forward and backward. None takes those of a known model.

    Backward of a model that is not known is shared equally among its layers, each a parameter of two or more dimensions
    with the vectors behind it. Raises ConfigError without `seconds` for it, and as `load_model`.
    """
    known = known_models()
    if spec in known:
        model = known[spec]
        return model if seconds is None else Model(spec, model.shapes, model.shares, seconds, model.forward)
    if ":" not in spec:
        raise ConfigError(
            f"model {spec!r} is not known: write {', '.join(known)}, or module:callable, such as "
            f"torchvision.models:resnet50"
        )
    made = load_model(spec)
    if any(map(is_lazy, made.parameters())):
        raise ConfigError(
            f"model {spec!r} has lazy layers, whose shapes follow from an input: build it with their sizes"
        )
    shapes = {name: tuple(p.shape) for name, p in made.named_parameters() if p.requires_grad}
    if seconds is None:
        raise ConfigError(f"the time of a step of {spec} is not known: give --step, seconds of forward and backward")
    return Model(spec, shapes, [float(len(shape) > 1) for shape in shapes.values()], seconds)


def load_model(spec: str, device: str = "meta") -> nn.Module:
    """Build the model that `module:callable` returns; on the device "meta" without memory for its parameters.

    Arguments may follow in parentheses: `torchvision.models:resnet50(num_classes=10)`. They are Python, so take only
    specs that you trust. Raises ConfigError for a module or callable that does not exist, or returns no model.
    """
    path, _, arguments = spec.partition("(")
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"model {spec!r} must be module:callable, such as torchvision.models:resnet50")
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module may end with any
        raise ConfigError(
            f"model {spec!r}: cannot import {module!r}: {_in_a_line(error)}. Install it, or correct the name"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"model {spec!r}: {module!r} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"model {spec!r}: {name!r} is not callable")
    call: Callable[[], Any] = found
    made = (lambda: eval(f"call({arguments}", {"call": call, "module": found})) if arguments else call
    try:
        try:
            with torch.device(device):
                model = made()
        except Exception:  # some models, and some imports, compute with numbers that the device "meta" does not have
            model = made()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model {spec!r}: {name} raised {_in_a_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {spec!r} returns {type(model).__name__}, not a torch.nn.Module")
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(f"model {spec!r} has no parameter to train")
    return model.to(device)


def _in_a_line(error: BaseException) -> str:
    return " ".join([f"{type(error).__name__}:", *str(error).split()])


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output: a tensor, or a mapping, sequence or dataclass of them."""
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output):
        output = [getattr(output, field.name) for field in fields(output)]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_of(value)]
