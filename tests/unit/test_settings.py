"""Settings: what is refused, and in which words."""

import inspect
import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.optim import SGD

import dgcopt
from dgcopt.__main__ import library
from dgcopt.compressors import Compressor
from dgcopt.errors import ConfigError, MismatchError
from dgcopt.gradients.optimizer import synchronised
from tests.support.worlds import Ranks, bucket_of, context_of, small_model


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


@pytest.mark.parametrize("config, preset", [("dgc", dgcopt.DGC.faithful), ("dgc_compact", dgcopt.DGC.compact)])
def test_presets_are_the_configs(config, preset):
    root = Path(__file__).resolve().parents[2]
    settings = yaml.safe_load((root / f"configs/compressors/{config}.yaml").read_text())["compressor"]["init_args"]
    settings["warmup"] = dgcopt.Warmup(**settings["warmup"])
    assert repr(dgcopt.DGC(**settings)) == repr(preset())
    assert preset(0.01, warmup=None, values="int8").values == "int8" and preset(0.01, warmup=None).ratio == 0.01


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


@pytest.mark.parametrize(("kind", "setting"), SETTINGS, ids=lambda value: getattr(value, "__name__", value))
def test_config_files_know_the_type_of_every_setting(kind, setting, capsys):
    """Else a warm-up would stay the dictionary that it is in the file, and a number a word."""
    parser = pytest.importorskip("dgcopt.config").Parser()
    parser.add_argument("--compressor", type=Compressor)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--compressor=dgcopt.{kind.__name__}", f"--compressor.{setting}=no such thing"])
    assert setting in capsys.readouterr().err


@pytest.mark.parametrize("kind", WARM_UP)
def test_a_warm_up_from_a_config_file_is_one(kind):
    parser = pytest.importorskip("dgcopt.config").Parser()
    parser.add_argument("--compressor", type=Compressor)
    config = parser.parse_args([f"--compressor=dgcopt.{kind.__name__}", "--compressor.warmup.ratios=[0.5]"])
    assert parser.instantiate(config).compressor.warmup == dgcopt.Warmup((0.5,))


def test_clip_threshold_of_the_paper():
    """Averaged undivided gradients: T sqrt(N). Summed ones, as the paper's, which were divided by N: T / sqrt(N)."""
    assert dgcopt.LocalClip(3.0).local_threshold(16, "average") == 12.0
    assert dgcopt.LocalClip(3.0).local_threshold(16, "sum") == 0.75


def wrap(params, names=None, comm=None, **settings):
    comm = comm or dgcopt.simulated_world(2)[0]
    return dgcopt.DistributedOptimizer(SGD(params, lr=0.1), names, comm=comm, **settings)


def test_names():
    model = small_model()
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"duplicates: 0\.weight"):
        wrap(model.parameters(), [*named, named[0]])
    with pytest.raises(ValueError, match=r"1 parameter.*group0\.parameter0"):
        wrap(model.parameters(), named[1:])
    with pytest.raises(ValueError, match="tuples"):
        wrap(model.parameters(), model.parameters())
    assert list(synchronised(wrap(model.parameters(), named)).names.values()) == [name for name, _ in named]
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    names = list(synchronised(wrap(groups)).names.values())
    assert names == ["group0.parameter0", "group0.parameter1", "group1.parameter0", "group1.parameter1"]


def test_parameters_that_cannot_be_trained():
    waves = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"'waves' has dtype complex64.*Freeze it"):
        wrap([waves], [("waves", waves)])
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(ConfigError, match="requires a gradient"):
        wrap([frozen])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"backward_passes_per_step": 1.5}, "backward_passes_per_step"),
        ({"op": "median"}, "op"),
        ({"op": True}, "op must be"),  # which is 1 to Python, and so Horovod's Sum
        ({"bucket_mb": 0}, "bucket_mb"),
        ({"bucket_mb": "25"}, "bucket_mb"),
        ({"first_bucket_mb": math.nan}, "first_bucket_mb"),
        ({"gradient_predivide_factor": math.inf}, "gradient_predivide_factor"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "gradient_predivide_factor"),
        ({"num_groups": -1}, "num_groups"),
        ({"groups": -1}, "groups must be a whole number"),
        ({"groups": True}, "groups must be a whole number"),
        ({"groups": "two"}, "groups should be a number or a list of lists of parameters"),
        ({"groups": 2, "num_groups": 2}, "not both"),
        ({"check_replicas_every": 1.5}, "check_replicas_every"),
        ({"check_replicas_every": "often"}, "check_replicas_every"),
        ({"on_divergence": "ignore"}, "on_divergence"),
        ({"compression": "dgc"}, "dgcopt.Compressor"),
    ],
)
def test_settings_out_of_range(settings, words):
    with pytest.raises(ConfigError, match=words):
        wrap(small_model().parameters(), **settings)


def test_groups_of_parameters_that_are_not_there_or_twice():
    first, *others = small_model().parameters()
    for groups, words in (
        ([[first], [torch.zeros(3)]], r"groups\[1\] holds something that is no parameter"),
        ([["0.weight"]], r"groups\[0\] holds something that is no parameter"),
        ([[first], [first]], "parameter 'group0.parameter0' is in groups twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            wrap([first, *others], groups=groups)


def test_a_number_of_groups_is_one_of_parameters_that_are_trained():
    model = small_model()
    for param in (model[0].weight, model[0].bias):
        param.requires_grad_(False)
    groups = synchronised(wrap(model.parameters(), model.named_parameters(), groups=2)).settings.groups
    assert groups == {"2.weight": 0, "2.bias": 0, "4.weight": 1, "4.bias": 1}


def test_wrapping_twice():
    optimizer = wrap(small_model().parameters())
    with pytest.raises(ConfigError, match="already"):
        dgcopt.DistributedOptimizer(optimizer, comm=dgcopt.simulated_world(2)[0])


def test_the_object_and_its_class_stay():
    optimizer = SGD(small_model().parameters(), lr=0.1)
    wrapped = dgcopt.DistributedOptimizer(optimizer, comm=dgcopt.simulated_world(2)[0])
    assert wrapped is optimizer and isinstance(wrapped, SGD) and type(wrapped).__name__ == "SGD"


def test_ranks_with_different_settings():
    comms = dgcopt.simulated_world(2)
    models = [small_model() for _ in comms]
    optimizers = [
        wrap(model.parameters(), model.named_parameters(), comm, compression=dgcopt.DGC(ratio))
        for model, comm, ratio in zip(models, comms, (0.1, 0.2), strict=True)
    ]
    for model in models:
        model(torch.randn(3, 12, dtype=torch.float64)).sum().backward()
    with pytest.raises(MismatchError, match=r"rank 0 has \[.*ratio=0\.1.*rank 1 has \[.*ratio=0\.2"):
        optimizers[0].step()


def test_more_backward_passes_than_were_announced():
    ranks = Ranks(2, lambda p: SGD(p, lr=0.1), backward_passes_per_step=2)
    ranks.backward()
    ranks.backward()
    with pytest.raises(RuntimeError, match=r"rank 0.*'4\.(weight|bias)' was computed 3 times.*is 2.*no_sync"):
        ranks.backward()


def test_step_after_synchronize_warns_and_sends_nothing():
    ranks = Ranks(2, lambda p: SGD(p, lr=0.1))
    ranks.backward()
    for optimizer in ranks.optimizers:
        optimizer.synchronize()
        optimizer.synchronize()
    sent = ranks.optimizers[0].telemetry.sent_bytes
    with pytest.warns(UserWarning, match="skip_synchronize") as caught:
        ranks.optimizers[0].step()
    assert len(caught) == 1
    assert ranks.optimizers[0].telemetry.sent_bytes == sent


def test_a_rank_that_has_not_run_backward_is_named():
    ranks = Ranks(3, lambda p: SGD(p, lr=0.1))
    inputs = torch.randn(3, 12, dtype=torch.float64)
    for rank in (0, 2):
        ranks.models[rank](inputs).sum().backward()
    with pytest.raises(dgcopt.CommError, match=r"rank\(s\) 1 did not start.*dgcopt\.join\(optimizer\)"):
        ranks.optimizers[0].step()


def test_a_compressor_that_returns_the_wrong_thing():
    class Nothing(Compressor):
        def exchange(self, grad, ctx):
            yield from ()
            return None

    class Short(Compressor):
        def exchange(self, grad, ctx):
            yield from ()
            return grad[:3]

    for compressor, error, words in (
        (Nothing(), ConfigError, "NoneType"),
        (Short(), ConfigError, r"shape \(3,\)"),
    ):
        ranks = Ranks(2, lambda p: SGD(p, lr=0.1), compression=compressor)
        ranks.backward()
        with pytest.raises(error, match=words):
            ranks.optimizers[0].step()


def test_a_closure_while_a_rank_has_run_out_of_data():
    """Its loss cannot be averaged, and nobody is waited for."""
    ranks = Ranks(2, lambda p: SGD(p, lr=0.1))
    with dgcopt.join(ranks.optimizers[0]):
        pass

    def closure():
        ranks.optimizers[1].zero_grad()
        loss = ranks.models[1](torch.randn(3, 12, dtype=torch.float64)).sum()
        loss.backward()
        return loss

    with (
        pytest.raises(MismatchError, match="exchanged and not taken"),  # rank 0 has taken it by then
        dgcopt.join(ranks.optimizers[1]),
        pytest.raises(ConfigError, match="run out of data"),
    ):
        ranks.optimizers[1].step(closure)
