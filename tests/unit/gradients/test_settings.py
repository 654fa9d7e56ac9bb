"""Wrapping: settings and parameters that are refused, and ranks that disagree, each with the words that say so."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD

import dgcopt
from dgcopt.compressors import Compressor
from dgcopt.errors import ConfigError, MismatchError
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, small_model


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
