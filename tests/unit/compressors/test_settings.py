"""Settings of compressors: refusals in plain words, warm-ups and the clipping threshold."""

import inspect
import math

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt.__main__ import library
from dgcopt.errors import ConfigError
from tests.support.worlds import Ranks, bucket_of, context_of


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


@pytest.mark.parametrize("elements", [100, 400_000])  # for the second, 1 / norm is zero in float16
@pytest.mark.parametrize("per", ["model", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_beyond_float16_clip_and_lose_nothing(dtype, per, elements):
    compressor = dgcopt.DGC(1.0, clip=dgcopt.LocalClip(5.0, per=per), source="gradient")
    grads = [torch.full((elements,), 6e4, dtype=dtype)]
    compressor.prepare(grads, [context_of(bucket_of(grads), 0, 1)])
    assert float(grads[0].float().norm()) == pytest.approx(5.0, rel=1e-2)


@pytest.mark.parametrize("per", ["model", "tensor"])
@pytest.mark.parametrize("value", [1e25, 1e37])
def test_norms_whose_squares_exceed_float32_clip_and_lose_nothing(value, per):
    grads = [torch.full((2**18,), value)]
    clip = dgcopt.LocalClip(5.0, per=per)
    if per == "model":
        clip.clip_model(grads, 1, "average")
    else:
        clip.clip_each(grads)
    assert float(grads[0].norm()) == pytest.approx(5.0, rel=1e-4)


def test_a_value_beyond_the_dtype_clips_nothing():
    grads = [torch.tensor([6e4, -1.0], dtype=torch.float16)]
    dgcopt.LocalClip(value=1e6).clip_each(grads)
    assert grads[0].tolist() == [60_000.0, -1.0]


def padded_model(dtype: torch.dtype) -> nn.Module:
    """Its bucket of 47 * 3 and 3 elements is padded with zeros."""
    torch.manual_seed(0)
    return nn.Linear(47, 3).to(dtype)


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("threshold", [1e-50, 1e-9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_threshold_below_all_numbers_of_the_dtype_sends_all_but_zeros(dtype, threshold, error_feedback, flushes):
    compressor = dgcopt.Threshold(threshold, at_most=1.0, error_feedback=error_feedback)
    ranks = Ranks(
        2, lambda params: torch.optim.SGD(params, lr=1.0), lambda: padded_model(dtype), compression=compressor
    )
    dense = padded_model(dtype)
    count = 0
    torch.set_flush_denormal(flushes)
    try:
        for seed in range(2):
            means = []
            for param in dense.parameters():
                grads = torch.randn(2, *param.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
                grads.view(-1)[::3] = 0
                means.append(grads.mean(0))
                count += int(grads[0].count_nonzero())
                for model, grad in zip(ranks.models, grads, strict=True):
                    own = model.weight if param.dim() == 2 else model.bias
                    own.grad = None
                    (own * grad).sum().backward()
            for optimizer in ranks.optimizers:
                optimizer.step()
            with torch.no_grad():
                for param, mean in zip(dense.parameters(), means, strict=True):
                    param -= mean
    finally:
        torch.set_flush_denormal(False)
    ranks.assert_replicas_equal()
    torch.testing.assert_close(ranks.weights(), [*map(torch.Tensor.detach, dense.parameters())], rtol=0.02, atol=0.02)
    assert ranks.optimizers[0].telemetry.selected == count
