"""What holds for every averaging algorithm: alone in the world, its settings, its words, and where it is found."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import io
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

import dgcopt
from dgcopt import ConfigError, averaging
from dgcopt.averaging import Averaging
from dgcopt.averaging.graphs import BipartiteExponential, Exponential, Graph, Ring, ShiftOne
from dgcopt.comm import LocalComm
from tests.support.worlds import small_batch, small_model

MODULES = [
    importlib.import_module(f"dgcopt.averaging.{module.name}") for module in pkgutil.iter_modules(averaging.__path__)
]


def subclasses(base: type) -> dict[str, type]:
    """All that dgcopt.averaging defines, by name."""
    found = {name: value for module in MODULES for name, value in vars(module).items() if inspect.isclass(value)}
    return {n: k for n, k in sorted(found.items()) if issubclass(k, base) and k is not base and n == k.__name__}


KINDS: dict[str, Any] = subclasses(Averaging)
GRAPHS: dict[str, Any] = subclasses(Graph)
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "SGD": functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": functools.partial(Adam, lr=0.01),
}


def settings_of(kind: Any) -> dict[str, inspect.Parameter]:
    return {name: value for name, value in inspect.signature(kind.__init__).parameters.items() if name != "self"}


# -- alone in the world ----------------------------------------------------------------------------------------------


def trained(
    make: Callable[[Iterable[Tensor]], Optimizer], rule: Averaging | None, comm: Any = None
) -> tuple[Tensor, Any]:
    """Weights after seven steps of a single rank, and its optimizer."""
    model = small_model()
    optimizer: Any = make(model.parameters())
    if rule is not None:
        rule.attach(optimizer, model.named_parameters(), LocalComm() if comm is None else comm)
    for seed in range(7):
        inputs, targets = small_batch(seed=seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    if rule is not None:
        optimizer.averaging.average()
    return torch.cat([param.detach().flatten() for param in model.parameters()]), optimizer


def alone(name: str, **settings: Any) -> list[Averaging]:
    """As it is, and with whatever a single rank might stumble over."""
    kind = KINDS[name]
    can = settings_of(kind)
    found = [kind(**settings)]
    for more in ({"overlap": True}, {"warmup_steps": 2}, {"hierarchical": True}, {"every": 3}, {"interval": 2}):
        if set(more) <= set(can):
            found.append(kind(**{**settings, **more}))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["LocalSGD", "SGP", "Decentralized", "SPARTA", "AsyncAverage"])
def test_a_single_rank_has_the_bare_optimizer(name: str, optimizer: str):
    """To the bit."""
    make = OPTIMIZERS[optimizer]
    bare, _ = trained(make, None)
    rules = alone(name)
    if name == "SPARTA":
        rules += [averaging.SPARTA(0.1, "strided"), averaging.SPARTA(0.1, "drift")]
    for rule in rules:
        comms = [LocalComm()] if name == "AsyncAverage" else [LocalComm(), *dgcopt.simulated_world(1)]
        for comm in comms:
            ours, wrapped = trained(make, rule, comm)
            assert torch.equal(ours, bare), f"{rule} over {comm}"
            assert wrapped.averaging.step == 7 and wrapped.averaging.telemetry.sent_bytes == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_some_rules_change_the_training_of_a_single_rank(optimizer: str):
    """Those that say so in their docstrings, and when they do leave it."""
    make = OPTIMIZERS[optimizer]
    bare, _ = trained(make, None)
    spread = float(bare.max() - bare.min())
    cases: dict[str, tuple[str, list[Averaging], list[Averaging], float]] = {  # words, which differ, which do not
        "SlowMo": (
            "On a single rank it is Lookahead with momentum",
            [averaging.SlowMo(2), averaging.SlowMo(3, sharded=False)],
            [averaging.SlowMo(2, momentum=0.0), averaging.SlowMo(2, momentum=0.0, sharded=False)],
            0.0,
        ),
        "DiLoCo": (
            "With H = 1, outer SGD",
            [averaging.DiLoCo(2), averaging.DiLoCo(2, functools.partial(SGD, lr=0.5))],
            [averaging.DiLoCo(every, functools.partial(SGD, lr=1.0)) for every in (1, 2)],
            1e-14,
        ),
        "LowPrecisionDecentralized": (
            "A single rank's steps are rounded too",
            alone("LowPrecisionDecentralized"),
            alone("LowPrecisionDecentralized"),
            spread / 20,  # seven roundings, each of up to 1/510 of the range of a difference, and what comes of them
        ),
    }
    for name, (words, different, alike, tolerance) in cases.items():
        assert words in " ".join((KINDS[name].__doc__ or "").split()), f"the docstring of {name} does not say so"
        for rule in different:
            assert not torch.equal(trained(make, rule)[0], bare), f"{rule}"
        for rule in alike:
            ours, _ = trained(make, rule)
            assert float((ours - bare).abs().max()) <= tolerance, f"{rule}"
    assert set(KINDS) == {*cases, "SparseLoCo", "LocalSGD", "SGP", "Decentralized", "SPARTA", "AsyncAverage"}


# -- settings --------------------------------------------------------------------------------------------------------

NO_WHOLE_NUMBERS = (-1, True, 1.5, "2", math.nan)
NO_NUMBERS = (math.nan, math.inf, -0.5, True, "0.1")


def bad_settings() -> Iterator[Any]:
    """Every whole number and every number of every algorithm, out of range or of another type."""
    for name, kind in KINDS.items():
        for setting, parameter in settings_of(kind).items():
            annotation = str(parameter.annotation)
            if annotation in ("int", "int | None"):
                positive = setting not in ("warmup_steps", "delay", "seed")
                for value in (*NO_WHOLE_NUMBERS, *((0,) if positive else ()), *(() if "|" in annotation else (None,))):
                    yield pytest.param(name, setting, value, id=f"{name}-{setting}-{value}")
            elif annotation == "float":
                for value in (*NO_NUMBERS, None):
                    yield pytest.param(name, setting, value, id=f"{name}-{setting}-{value}")


@pytest.mark.parametrize(("name", "setting", "value"), [*bad_settings()])
def test_numbers_out_of_range_are_refused(name: str, setting: str, value: Any):
    with pytest.raises(ConfigError, match=rf"(?s){setting}.*{re.escape(repr(value))}"):
        KINDS[name](**{setting: value})


def sgd(lr: float) -> Callable[..., SGD]:
    return functools.partial(SGD, lr=lr)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("LocalSGD", {"every": 8, "node_every": 3}, "node_every 3 must divide every 8"),
        ("LocalSGD", {"every": 2, "node_every": 4}, "node_every 4 must divide every 2"),
        ("SlowMo", {"momentum": 1.0}, "at least 0 and below 1, not 1.0"),
        ("SlowMo", {"slow_lr": 0.0}, "slow_lr must be a positive number, not 0.0"),
        ("SlowMo", {"base": dgcopt.DGC()}, "base must be an algorithm that only exchanges weights"),
        ("SlowMo", {"base": averaging.SlowMo()}, "base must be an algorithm that only exchanges weights"),
        ("SlowMo", {"base": averaging.DiLoCo()}, "base must be an algorithm that only exchanges weights"),
        ("SlowMo", {"base": averaging.LocalSGD(overlap=True)}, "base must not overlap"),
        ("SlowMo", {"base": averaging.LocalSGD(warmup_steps=1)}, "has warmup_steps. Give them to SlowMo instead"),
        ("SlowMo", {"exact": False}, "exact=False needs sharded=False"),
        ("SlowMo", {"faithful": True, "sharded": False}, "faithful=True needs sharded=True or exact=False"),
        ("SGP", {"graph": "ring"}, "graph must be a Graph, such as Exponential.* not 'ring'"),
        ("SGP", {"graph": Ring}, "graph must be a Graph"),
        ("Decentralized", {"peers": "some"}, 'peers must be "all" or "shift_one", not \'some\''),
        ("SPARTA", {"fraction": 0.0}, "fraction must be above 0 and at most 1, not 0.0"),
        ("SPARTA", {"fraction": 1.1}, "fraction must be above 0 and at most 1, not 1.1"),
        ("SPARTA", {"choose": "best"}, 'choose must be "random", "strided" or "drift", not \'best\''),
        ("SPARTA", {"budgets": [("*", 1.0)]}, "budgets must be fractions by pattern"),
        ("SPARTA", {"budgets": {"*": 1.5}}, "must be a number from 0 to 1, not 1.5"),
        ("DiLoCo", {"every": 10, "fragments": 3}, "every must be a multiple of fragments: every is 10, fragments 3"),
        ("DiLoCo", {"every": 10, "fragments": 2, "delay": 5}, "delay must be less than every / fragments = 5.*it is 5"),
        ("DiLoCo", {"alpha": 1.5}, "alpha must be a number from 0 to 1, not 1.5"),
        ("DiLoCo", {"outer": 0.7}, "outer must be a factory of optimizers.* not 0.7"),
        ("DiLoCo", {"compression": dgcopt.OneBitAdam()}, "OneBitAdam learns Adam's second moments"),
        *(
            (name, {"overlap": "no"}, "overlap must be True or False, not 'no'")
            for name in ("LocalSGD", "SGP", "SPARTA")
        ),
        *(
            (name, {"hierarchical": 1}, "hierarchical must be")
            for name in ("Decentralized", "LowPrecisionDecentralized")
        ),
        *(("SlowMo", {name: None}, f"{name} must be True or False") for name in ("sharded", "exact", "faithful")),
        ("AsyncAverage", {"interval": 0.0}, "interval must be a positive number, not 0.0"),
    ],
)
def test_settings_at_odds_are_refused(name: str, settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        KINDS[name](**settings)


@pytest.mark.parametrize(
    ("rule", "size", "words"),
    [
        (averaging.SGP(BipartiteExponential()), 3, "3 is an odd number of ranks. Use Exponential or ShiftOne."),
        (averaging.SlowMo(base=averaging.SGP(BipartiteExponential())), 5, "5 is an odd number of ranks"),
        (averaging.DiLoCo(outer=LBFGS), 2, "outer must return an optimizer that steps without a closure"),
        (averaging.DiLoCo(outer=lambda params: None), 2, "outer must return an optimizer"),
        (averaging.DiLoCo(outer=functools.partial(SGD, lr=math.nan)), 2, "outer: lr is nan, and must be finite"),
        (averaging.DiLoCo(outer=functools.partial(SGD, lr=0.7, momentum=math.inf)), 2, "outer: momentum is inf"),
        (averaging.DiLoCo(outer=functools.partial(SGD, lr=True)), 2, "outer: lr is True"),
        (averaging.DiLoCo(outer=functools.partial(SGD, lr=-0.7)), 2, "outer: Invalid learning rate"),
        (averaging.DiLoCo(100, fragments=50), 2, "6 parameters cannot be split into 50 fragments"),
        (averaging.SPARTA(budgets={"nowhere.*": 1.0}), 2, "no parameter's name matches 'nowhere"),
        (averaging.AsyncAverage(), 2, "simulated ranks take turns"),
    ],
)
def test_rules_that_do_not_fit_the_ranks_or_parameters_are_refused(rule: Averaging, size: int, words: str):
    model = small_model()
    for comm in dgcopt.simulated_world(size):
        optimizer = SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=words):
            rule.attach(optimizer, model.named_parameters(), comm)
        assert not hasattr(optimizer, "averaging"), "the optimizer can be wrapped otherwise"


# -- words -----------------------------------------------------------------------------------------------------------

OTHERS: dict[str, list[Any]] = {
    "int": [7, 64],
    "int | None": [2],
    "float": [0.31],
    "bool": [True, False],
    "str": ["shift_one", "drift", "local"],
    "Averaging | None": [averaging.LocalSGD(5)],
    "Graph | None": [Ring()],
    "Outer | None": [sgd(0.3)],
    "Compressor | None": [dgcopt.DGC(0.25)],
    "dict[str, float] | None": [{"*.bias": 0.5}],
    "dict[str, int] | None": [{"exp_avg": 4}],
    "Sequence[float]": [(), (0.5, 0.25)],
}
"""Other values than the defaults, by type."""


@pytest.mark.parametrize("name", KINDS)
def test_repr_tells_settings_apart(name: str):
    """It is what ranks compare."""
    kind = KINDS[name]
    assert repr(kind()) == repr(kind()) == repr(copy.deepcopy(kind())) and repr(kind()).startswith(f"{name}(")
    different = set()
    for setting, parameter in settings_of(kind).items():
        annotation = re.sub(r"^Literal.*", "str", str(parameter.annotation))
        for value in OTHERS[annotation]:
            fits: dict[str, Any] = {"sharded": {"exact": True}, "exact": {"sharded": False}}.get(setting, {})
            fits |= {"fragments": {"every": 21}, "delay": {"every": 21}}.get(setting, {})
            fits |= {"compression": dgcopt.TopK(0.5)} if setting == "unsent" else {}
            try:
                rule = kind(**{**fits, setting: value})
            except ConfigError:
                continue  # one of two fits
            assert f"{setting}=" in repr(rule) or name == "SparseLoCo"
            if value != parameter.default:
                different.add(setting)
                assert repr(rule) != repr(kind(**fits)), f"{setting} is not seen"
    assert different == set(settings_of(kind))


@pytest.mark.parametrize("name", KINDS)
def test_docstrings(name: str):
    """The first line says what it is; then every setting, what it costs, what it raises and where it is from."""
    words = inspect.getdoc(KINDS[name]) or ""
    first, _, rest = words.partition("\n")
    assert first.endswith(".") and len(first) < 120
    assert "Args:" in rest and "Costs" in rest and "Source" in rest
    described = rest.partition("Args:")[2].partition("Costs")[0]
    for setting in settings_of(KINDS[name]):
        assert re.search(rf"^\s*(\w+, )*{setting}(, \w+)*: ", described, re.MULTILINE), f"{setting} is not explained"
    raises_itself = "__init__" in vars(KINDS[name]) and name != "SparseLoCo"
    assert "Raises" in words or not raises_itself


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_have_docstrings(name: str):
    words = inspect.getdoc(GRAPHS[name]) or ""
    assert words.partition("\n")[0].endswith(".") and "alanced" in words


def test_all_of_them_are_exported():
    for name, value in {**KINDS, **GRAPHS}.items():
        assert getattr(averaging, name, None) is value, f"dgcopt.averaging does not export {name}"
        assert name in averaging.__all__
    for name in KINDS:
        assert getattr(dgcopt, name, None) is KINDS[name] and name in dgcopt.__all__, f"dgcopt does not export {name}"
    assert set(averaging.__all__) == {n for n in vars(averaging) if n in averaging.__all__}, "exports what is not there"
    assert set(GRAPHS) == {"BipartiteExponential", "Exponential", "Ring", "ShiftOne"}
    assert all(issubclass(graph, Graph) for graph in (Exponential, ShiftOne))


# -- as objects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_settings_outlive_what_they_are_attached_to(name: str):
    """One object serves several optimizers, is not changed by any, and is the same as settings given in one call."""
    kind = KINDS[name]
    rule = kind()
    before = repr(rule)
    first, second = (trained(OPTIMIZERS["SGD"], rule)[1] for _ in range(2))
    assert repr(rule) == before and first.averaging.rule is not second.averaging.rule is not rule
    for here, there in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        assert torch.equal(here, there)
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert kind(optimizer, comm=LocalComm()) is optimizer and repr(optimizer.averaging.rule) == before


@pytest.mark.parametrize("name", KINDS)
def test_its_state_is_saved_and_goes_on(name: str):
    """In a file that is read without unpickling; a single rank's, as all ranks' are tested elsewhere."""
    kind = KINDS[name]
    rule = kind(**{"every" if "every" in settings_of(kind) else "interval": 2})
    expected, optimizer = trained(OPTIMIZERS["Adam"], rule)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    model = small_model()
    other = OPTIMIZERS["Adam"](model.parameters())
    rule.attach(other, model.named_parameters(), LocalComm())
    with torch.no_grad():
        for param, saved in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True):
            param.copy_(saved)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.averaging.step == 7
    for which, params in ((optimizer, optimizer.param_groups[0]["params"]), (other, list(model.parameters()))):
        for _ in range(3):
            for place, param in enumerate(params):
                param.grad = torch.full_like(param, 0.1 * (place + 1))
            which.step()
    for here, there in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(here, there)
    assert not torch.equal(expected, torch.cat([param.detach().flatten() for param in model.parameters()]))


def test_named_parameters_may_come_second_as_for_the_other_wrapper() -> None:
    model = nn.Linear(3, 2)
    one = dgcopt.LocalSGD(SGD(model.parameters(), lr=0.1), model.named_parameters(), every=3, comm=LocalComm())
    other = dgcopt.Decentralized(SGD(model.parameters(), lr=0.1), "all", named_parameters=model.named_parameters())
    for optimizer in (one, other):
        assert list(optimizer.averaging.names.values()) == ["weight", "bias"]
    assert one.averaging.rule.every == 3 and "all" in repr(other.averaging.rule)
