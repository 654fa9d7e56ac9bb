"""Every compressor that comes with dgcopt keeps what `check_compressor` asks, and what it asks can be broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

import dgcopt
from dgcopt.__main__ import library
from dgcopt.compressors import Compressor
from dgcopt.testing import ConformanceError, check_compressor
from tests.support.library import FIRST_OF_A_KIND, SETTINGS
from tests.support.worlds import Ranks

CONFIGS = Path(__file__).parents[3] / "configs" / "compressors"

REFUSED_BY_DESIGN = {"Noop": "another result than rank 0", "Adasum": "the sum differs"}
"""Ranks without an exchange come apart, which is what it is for; Adasum neither sums nor averages."""


@pytest.mark.parametrize(("compressor", "given"), SETTINGS, ids=[repr(c)[:80] for c, _ in SETTINGS])
def test_it_keeps_what_every_compressor_must(compressor: Compressor, given: dict) -> None:
    """The first of a kind also among many ranks."""
    first = any(compressor is other for other, _ in FIRST_OF_A_KIND)
    report = check_compressor(compressor, sizes=(1, 3, 8) if first else (1, 3), **given)
    assert not report.failures and len(report.lines) == 13


OUT_OF_RANGE = {(dgcopt.PowerSGD, dgcopt.FP16): "the result for huge gradients holds NaN"}
"""Products of gradients beyond float16, which is what BF16 is for."""


@pytest.mark.parametrize("wrapper", [dgcopt.Hierarchical, dgcopt.FP16, dgcopt.BF16])
@pytest.mark.parametrize(("compressor", "given"), FIRST_OF_A_KIND, ids=[type(c).__name__ for c, _ in FIRST_OF_A_KIND])
def test_it_keeps_it_inside_another(compressor: Compressor, given: dict, wrapper: type[Compressor]) -> None:
    outcome = OUT_OF_RANGE.get((type(compressor), wrapper))
    if outcome is None:
        assert not check_compressor(wrapper(compressor), sizes=(2,), **given).failures
    else:
        with pytest.raises(ConformanceError, match=outcome):
            check_compressor(wrapper(compressor), sizes=(2,), **given)


def test_none_is_left_out() -> None:
    checked = {type(part).__name__ for compressor, _ in SETTINGS for part in compressor.parts()}
    assert {kind.__name__ for kind in library()} - checked == set(REFUSED_BY_DESIGN)
    for name, reason in REFUSED_BY_DESIGN.items():
        with pytest.raises(ConformanceError, match=reason):
            check_compressor(getattr(dgcopt, name)(), sizes=(2,))


@pytest.mark.parametrize("kind", library(), ids=lambda kind: kind.__name__)
def test_it_is_public_documented_and_has_a_config(kind: type[Compressor]) -> None:
    assert kind.__name__ in dgcopt.__all__
    words = kind.__doc__ or ""
    assert "Costs" in words and len(words.split("\n\n")) > 1, "what it is, how it works and what it costs"
    configs = [yaml.safe_load(path.read_text())["compressor"] for path in CONFIGS.glob("*.yaml")]
    chosen = {c if isinstance(c, str) else c["class_path"] for c in configs}
    assert f"dgcopt.{kind.__name__}" in chosen or kind.__name__ in REFUSED_BY_DESIGN


# -- each check can fail ---------------------------------------------------------------------------------------------


# -- the command -----------------------------------------------------------------------------------------------------


# -- what travels of an optimizer that is not SGD ---------------------------------------------------------------------


def test_updates_are_what_travels_unless_the_optimizer_is_sgd() -> None:
    expected = [
        (lambda p: SGD(p, lr=0.1, momentum=0.9), "gradient"),
        (lambda p: SGD(p, lr=0.1), "gradient"),
        (lambda p: torch.optim.LBFGS(p), "gradient"),
        (lambda p: torch.optim.AdamW(p), "update"),
        (lambda p: torch.optim.RMSprop(p), "update"),
    ]
    for make, source in expected:
        for compressor in (dgcopt.TopK(0.1), dgcopt.DGC(0.1), dgcopt.FP16(dgcopt.TopK(0.1))):
            settings = repr(compressor)
            compressor.attach(make([torch.nn.Parameter(torch.zeros(3))]))
            assert compressor.sends == source
            assert repr(compressor) == settings, "by which a rank that comes later compares itself"
    dense = dgcopt.DGC(1.0)
    dense.attach(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))]))
    assert dense.sends == "gradient", "at ratio 1 it is dense training"


def test_wrong_settings_are_refused_at_once() -> None:
    for make in (dgcopt.TopK, dgcopt.DGC):
        with pytest.raises(dgcopt.ConfigError, match=r"source must be .*not 'updates'"):
            make(0.1, source="updates").attach(SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(dgcopt.ConfigError, match="FP16 goes around a compressor, such as"):
        dgcopt.FP16("fp16")


@pytest.mark.parametrize("compressor", [dgcopt.Signum(), dgcopt.DeMo()], ids=["Signum", "DeMo"])
def test_momentum_that_a_scheduler_sets_is_refused(compressor: Compressor) -> None:
    ranks = Ranks(2, lambda params: SGD(params, lr=0.1), compression=compressor)
    for optimizer in ranks.optimizers:
        OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    with pytest.raises(dgcopt.ConfigError, match="cycle_momentum=False"):
        ranks.step()


@pytest.mark.parametrize("wrapper", [dgcopt.FP16, dgcopt.BF16])
def test_adasum_is_not_rounded_from_outside(wrapper: type[Compressor]) -> None:
    with pytest.raises(dgcopt.ConfigError, match=r"replicas would diverge. Use Adasum\(torch\.b?float16\)"):
        dgcopt.Hierarchical(wrapper(dgcopt.Adasum()))
