"""The optimizer that a hook is attached to: replaced, shared by two models, or used beside DDP."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import dgcopt

from .registry import Scenario, registered_in
from .training import RATIO, Training, assert_close, assert_same_on_all_ranks, batch, flat, plain, sgd, small_model

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


@scenario
def an_optimizer_made_anew_is_noticed() -> None:
    """The hook has taken over the momentum of the one that it was given, which another would apply once more."""
    training = Training(dgcopt.DGC(1.0))
    training.optimizer = sgd(training.model.parameters())
    training.backward(0)
    with pytest.raises(
        dgcopt.ConfigError, match=r"never stepped.* would be applied twice.* state\.attach\(optimizer\)"
    ):
        training.optimizer.step()
    again = Training(dgcopt.DGC(1.0))
    again.optimizer = sgd(again.model.parameters())
    again.state.attach(again.optimizer)
    assert_close(again.run(4).weights(), Training().run(4).weights())


@scenario
def one_optimizer_of_more_than_a_model_in_ddp() -> None:
    """Its momentum is taken over for all that it steps: of what no hook exchanges, too, where it would be lost."""

    def run(first: Any, second: Any) -> Tensor:
        parts = small_model()
        front, back = parts[:4], parts[4:]
        optimizer, models = sgd(parts.parameters()), [DDP(front), DDP(back)]
        for model, compressor in zip(models, (first, second), strict=True):
            if compressor is not None:
                model.register_comm_hook(*dgcopt.ddp_hook(compressor, optimizer, parts.named_parameters()))
        for step in range(4):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(models[1](models[0](inputs)), targets).backward()
            optimizer.step()
        return flat(parts.parameters())

    dense = run(None, None)
    assert_close(run(dgcopt.DGC(1.0), dgcopt.DGC(1.0)), dense)
    assert_close(run(dgcopt.NoCompression(), None), dense)
    with pytest.raises(
        dgcopt.ConfigError, match=r"steps parameter '4\.weight'.* no ddp_hook averages.* optimizer of its own"
    ):
        run(dgcopt.DGC(RATIO), None)


@scenario
def a_group_added_for_a_thawed_layer_is_averaged() -> None:
    """DDP is made anew for it, with the same hook."""

    def run(compressor: Any, named: bool = False, first: int = 0) -> Tensor:
        parts = small_model()
        frozen = parts[2].requires_grad_(False)
        optimizer = sgd(param for param in parts.parameters() if param.requires_grad)
        if compressor is not None:
            hook = dgcopt.ddp_hook(compressor, optimizer, parts.named_parameters() if named else None)
        for step in range(6):
            if step == first:
                optimizer.zero_grad()
                optimizer.add_param_group({"params": list(frozen.requires_grad_(True).parameters()), "lr": 0.05})
            if step in (0, first):
                model = DDP(parts, bucket_cap_mb=0.01)
                if compressor is not None:
                    model.register_comm_hook(*hook)
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        assert_same_on_all_ranks(flat(parts.parameters()))
        return flat(parts.parameters())

    for first in (0, 3):
        dense = run(None, first=first)
        for named in (True, False):
            assert_close(run(dgcopt.DGC(1.0), named, first), dense)
            assert_close(run(dgcopt.NoCompression(), named, first), dense)


@scenario
def gradients_exchanged_without_a_step_are_noticed() -> None:
    """What DGC keeps counts all of them, also where the next pass, or nothing, is made of them."""

    def said(compressor: Any, passes: int, quietly: bool = False) -> list[str]:
        training, records = Training(compressor), logging.Handler()
        texts: list[str] = []
        records.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("dgcopt").addHandler(records)
        for step in range(3):
            training.optimizer.zero_grad()
            for _ in range(passes - 1):
                with training.ddp.no_sync() if quietly else contextlib.nullcontext():
                    training.backward(step)
            training.backward(step)
            training.optimizer.step()
        logging.getLogger("dgcopt").removeHandler(records)
        return texts

    (text,) = said(dgcopt.DGC(RATIO), 2)
    assert "has not stepped" in text and "no_sync()" in text
    assert not said(dgcopt.DGC(RATIO), 1) and not said(dgcopt.DGC(RATIO), 2, quietly=True)
    assert not said(dgcopt.NoCompression(), 2), "which keeps nothing"


@scenario
def other_optimizers_and_loaded_weights_are_no_mistake() -> None:
    """Steps of another model; weights loaded after a backward pass; a wrapper that is an optimizer itself."""
    training = Training(dgcopt.DGC(1.0))
    training.backward(0)
    training.model.load_state_dict(small_model().state_dict())
    other = nn.Parameter(torch.ones(2, requires_grad=True))
    other.grad = torch.ones(2)
    plain(iter([other])).step()

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step(closure)

    training.optimizer = Wrapper(training.optimizer)
    training.run(2, first=1)


@scenario
def a_distributed_optimizer_beside_ddp_is_noticed() -> None:
    """DDP's dense gradients would travel beside ours; not with a hook of the user's, no_sync, or DDP of some ranks."""

    class Subclass(DDP):
        pass

    def warnings_of(step: Callable[[DDP], None], kind: type[DDP] = DDP, **settings) -> list[str]:
        model, records = small_model(), logging.Handler()
        said: list[str] = []
        records.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        ddp = kind(model, **settings)
        optimizer = dgcopt.DistributedOptimizer(sgd(model.parameters()), compression=dgcopt.DGC(RATIO))
        logging.getLogger("dgcopt").addHandler(records)
        step(ddp)
        optimizer.step()
        logging.getLogger("dgcopt").removeHandler(records)
        assert_same_on_all_ranks(flat(model.parameters()))
        return [text for text in said if "DistributedDataParallel averages" in text]

    def backward(ddp: nn.Module) -> None:
        inputs, targets = batch(0)
        nn.functional.cross_entropy(ddp(inputs), targets).backward()

    def quiet(ddp: DDP) -> None:
        with ddp.no_sync():
            backward(ddp)

    def hooked(ddp: DDP) -> None:
        ddp.register_comm_hook(None, noop_hook)
        backward(ddp)

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    first = dist.get_rank() == 0
    assert len(warnings_of(backward)) == len(warnings_of(backward, Subclass)) == first
    assert not warnings_of(quiet) and not warnings_of(hooked) and not warnings_of(backward, process_group=alone)
