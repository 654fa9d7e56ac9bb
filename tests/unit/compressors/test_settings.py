"""Settings of compressors: refusals in plain words, warm-ups and the clipping threshold."""

import inspect
import math

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt.__main__ import library
from dgcopt.errors import ConfigError
from tests.support.worlds import bucket_of, context_of


@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.5, math.nan, math.inf, "0.1", None, True])
def test_a_ratio_is_a_density(ratio):
    with pytest.raises(ConfigError, match="ratio"):
        dgcopt.DGC(ratio)
    with pytest.raises(ConfigError, match="ratio"):
        dgcopt.Warmup(ratios=(0.5, ratio))


def test_other_compressor_settings():
    with pytest.raises(ConfigError, match='"fp64", "fp32", "fp16", "bf16"'):
        dgcopt.DGC(values="int3")
    for bad in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="max_norm"):
            dgcopt.LocalClip(bad)
        with pytest.raises(ConfigError, match="value must be"):
            dgcopt.LocalClip(value=bad)
    with pytest.raises(ConfigError, match="not none"):
        dgcopt.LocalClip()
    with pytest.raises(ConfigError, match="not max_norm and value"):
        dgcopt.LocalClip(1.0, value=1.0)
    with pytest.raises(ConfigError, match="model"):
        dgcopt.LocalClip(1.0, per="layer")
    with pytest.raises(ConfigError, match="a warm-up's steps must be a whole number of at least 1"):
        dgcopt.Warmup(steps=0)

    for setting in ("granularity", "residual", "vectors"):
        with pytest.raises(ConfigError, match=f"{setting} must be"):
            dgcopt.DGC(**{setting: "other"})


@pytest.mark.parametrize("setting", ["overlap", "momentum_masking"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_yes_or_no(setting, value):
    with pytest.raises(ConfigError, match=f"{setting} must be True or False"):
        dgcopt.DGC(**{setting: value})


WARM_UP = [dgcopt.DGC, dgcopt.TopK, dgcopt.ChunkedTopK, dgcopt.RandomK, dgcopt.CLTK, dgcopt.CSC]


@pytest.mark.parametrize("kind", WARM_UP)
def test_warmup_schedule(kind):
    compressor = kind(0.001, warmup=dgcopt.Warmup(steps=3))
    ratios = [compressor.ratio_at(step) for step in range(14)]
    assert ratios == [0.25] * 3 + [0.0625] * 3 + [0.015625] * 3 + [0.004] * 3 + [0.001] * 2
    by_epoch = kind(0.001, warmup=dgcopt.Warmup(epochs=2))
    with pytest.raises(ConfigError, match="set_steps_per_epoch"):
        by_epoch.ratio_at(0)
    by_epoch.set_steps_per_epoch(10)
    assert [by_epoch.ratio_at(step) for step in (0, 19, 20, 79, 80)] == [0.25, 0.25, 0.0625, 0.004, 0.001]
    assert "epochs=2, steps_per_epoch=10" in repr(by_epoch), "ranks compare it"


@pytest.mark.parametrize("kind", WARM_UP)
def test_a_warm_up_sends_fewer_bytes_from_stage_to_stage(kind):
    compressor = kind(0.01, warmup=dgcopt.Warmup((1.0, 0.1), steps=2))
    bucket = bucket_of([nn.Parameter(torch.zeros(300, 700))], "matrix")
    context = context_of(bucket, 0, 2)
    sent = []
    for step in range(6):
        context.begin(step)
        sent.append(compressor.payload_bytes(context))
    assert sent[::2] == sent[1::2] and sent[0] > 4 * sent[2] and sent[2] > 4 * sent[4]


SETTINGS = [(kind, name) for kind in library() for name in list(inspect.signature(kind.__init__).parameters)[1:]]


@pytest.mark.parametrize("kind", WARM_UP)
@pytest.mark.parametrize("warmup", [4, 0.25, (0.25, 0.0625), True])
def test_a_warm_up_is_no_number(kind, warmup):
    """As the original DGC has `warmup_epochs`: told when it is given, not by an AttributeError in the first step."""
    with pytest.raises(ConfigError, match=r"warmup must be a dgcopt.Warmup, .* Warmup\(epochs=1\)"):
        kind(0.01, warmup=warmup)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"ratios": 0.25}, "ratios must be"), ({"steps": 1.5}, "steps must be"), ({"steps": "2"}, "steps must be")],
)
def test_stages_of_a_warm_up(settings, words):
    with pytest.raises(ConfigError, match=words):
        dgcopt.Warmup(**settings)


def test_clip_threshold_of_the_paper():
    """Averaged undivided gradients: T sqrt(N). Summed ones, as the paper's, which were divided by N: T / sqrt(N)."""
    assert dgcopt.LocalClip(3.0).local_threshold(16, "average") == 12.0
    assert dgcopt.LocalClip(3.0).local_threshold(16, "sum") == 0.75
