"""The choice among exchanges, and the command that prints it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dgcopt import ConfigError
from dgcopt.__main__ import main
from dgcopt.tuning.advise import Prediction, Setting, in_words, local_steps, predict, rate, recommend, table
from dgcopt.tuning.commands import bytes_per_second, seconds_of
from dgcopt.tuning.costs import Recipe, Recording, load_recipes, save_recipes
from dgcopt.tuning.models import Model, known_models, model_on_paper
from dgcopt.tuning.timeline import Round
from dgcopt.tuning.wire import HALF, KINDS, Fitted, Network, fit

FP32 = Prediction("DDP fp32", "exact", 2.0, 1.0, 100.0)
BF16 = Prediction("DDP bf16", "rounded", 1.0, 0.5, 50.0)
SPARSE = Prediction("DGC(ratio=0.01)", "delayed", 0.5, 0.1, 1.0, 1.25e9)


def toy(seconds: float = 0.1) -> Model:
    return Model("toy", {"a": (1000, 1000), "b": (1000, 1000)}, [1.0, 1.0], seconds, 0.5)


def recipe(name: str, kind: str, nbytes: float, work: float, accuracy: str = "rounded", overlap: bool = True) -> Recipe:
    recording = Recording(2, [[Round(kind, nbytes)]], work, [0.0], 0 if name.startswith("DDP") else 1)
    return Recipe(name, accuracy, overlap, False, 25.0, 1.0, recording, recording)


RECIPES = [
    recipe("DDP fp32", "AllReduce", 8e6, 0.0, "exact"),
    recipe("DDP bf16", HALF, 4e6, 0.0),
    recipe("small", "AllReduce", 4e4, 0.02, "delayed"),
]


def test_the_fastest_is_recommended_with_the_rate_below_which_it_pays() -> None:
    best, line = recommend([SPARSE, BF16, FP32])
    assert best is SPARSE
    assert line == "use DGC(ratio=0.01) (delayed): 500 ms a step, 2.00 times as fast as DDP bf16; pays below 10 Gbit/s."


def test_a_gain_within_the_error_of_predictions_does_not_pay() -> None:
    close = Prediction("some", "rounded", 0.96, 0.4, 10.0, 3.125e9)
    less = Prediction("less", "rounded", 0.97, 0.4, 10.0, 1.0e9)
    best, line = recommend([close, less, BF16, FP32])
    assert best is BF16
    assert line.startswith(
        "does not pay: 25 Gbit/s is enough for this model; DDP bf16 takes 1 s a step, 500 ms exposed"
    )
    assert "some 960 ms" in line


def test_only_allowed_accuracy_classes_are_recommended() -> None:
    assert recommend([SPARSE, BF16, FP32], ["exact", "rounded"])[0] is BF16
    assert recommend([SPARSE, BF16, FP32], ["exact"])[0] is FP32
    with pytest.raises(ConfigError, match="no dense exchange is allowed"):
        recommend([SPARSE, BF16, FP32], ["delayed"])
    with pytest.raises(ConfigError, match="unknown accuracy class 'fine'"):
        recommend([SPARSE, BF16, FP32], ["fine"])


def test_compression_pays_below_its_break_even_bandwidth_and_loses_above() -> None:
    slow = Setting(toy(), 4, Network(1e-4, 12.5e6))
    (first, *_), below = predict(slow, RECIPES), predict(slow, RECIPES)[0].pays_below
    assert first.name == "small"
    assert below is not None and 12.5e6 < below < math.inf
    for factor, wins in ((0.9, True), (1.1, False)):
        there = predict(Setting(toy(), 4, Network(1e-4, factor * below)), RECIPES, limits=False)
        seconds = {one.name: one.seconds for one in there}
        assert (seconds["small"] < 0.95 * seconds["DDP bf16"]) is wins
    fast = predict(Setting(toy(), 4, Network(1e-6, 1e12)), RECIPES)
    assert recommend(fast)[0].name.startswith("DDP")
    assert all(one.pays_below is None for one in predict(slow, RECIPES, limits=False))


def test_no_exchange_pays_above_the_rate_of_a_measured_link_on_which_it_loses() -> None:
    """On paper an allgather waits for one message and an allreduce for six; here it takes longer."""
    sizes = (64.0, 1e6, 1e7)
    fits = {(kind, "world"): fit(sizes, [1e-3 + size / 1e9 for size in sizes], 4) for kind in KINDS}
    fits["AllGather", "world"] = fit(sizes, [2e-2 + size / 1e9 for size in sizes], 4)
    wire = Fitted(fits)
    setting = Setting(toy(1e-3), 4, wire)
    small = recipe("small", "AllGather", 64.0, 0.0, "delayed")
    assert setting.step(small).seconds > setting.step(RECIPES[1]).seconds
    (found,) = [one for one in predict(setting, [*RECIPES[:2], small]) if one.name == "small"]
    assert found.pays_below == wire.fastest("world")
    fits["AllGather", "world"] = fit(sizes, [1e-5 + size / 1e9 for size in sizes], 4)
    (found,) = [one for one in predict(setting, [*RECIPES[:2], small]) if one.name == "small"]
    assert found.pays_below is not None and found.pays_below > wire.fastest("world")


def test_the_sentence_the_table_and_the_limit_compare_with_the_fastest_dense_exchange_that_is_allowed() -> None:
    """8 MB in float32 take twice as long as in bfloat16, so more bandwidths lie below the limit against them."""
    slow = Setting(toy(), 4, Network(1e-4, 12.5e6))
    small = replace(recipe("small", "AllReduce", 4e4, 0.0, "delayed"))
    recipes = [*RECIPES[:2], small]
    limits = {}
    for allow, dense in ((("exact", "delayed"), "DDP fp32"), (("rounded", "delayed"), "DDP bf16")):
        found = predict(slow, recipes, allow=allow)
        seconds = {one.name: one.seconds for one in found}
        ratio = seconds["small"] / seconds[dense]
        (limits[dense],) = [one.pays_below for one in found if one.name == "small"]
        line = recommend(found, allow)[1]
        assert f"{1 / ratio:.2f} times as fast as {dense}; pays below {rate(limits[dense])}." in line
        lines = table(found, allow).splitlines()
        assert f" vs {dense} " in lines[0] and f" {ratio:.2f}x " in lines[1]
        there = Setting(toy(), 4, Network(1e-4, 0.99 * limits[dense]))
        seconds = {one.name: one.seconds for one in predict(there, recipes, limits=False)}
        assert seconds["small"] == pytest.approx(0.95 * seconds[dense], rel=0.01)
    assert limits["DDP fp32"] > 1.5 * limits["DDP bf16"]
    (both,) = [one.pays_below for one in predict(slow, recipes) if one.name == "small"]
    assert both == pytest.approx(limits["DDP bf16"])


def test_on_one_machine_nothing_is_exchanged_among_machines() -> None:
    recipes = [*RECIPES, recipe("Hierarchical(BF16())", HALF, 4e6, 0.0)]
    for size, has_it in ((2, False), (4, False), (8, True)):
        found = predict(Setting(toy(), size, Network(1e-4, 12.5e6, 4), 4), recipes, limits=False)
        assert ("Hierarchical(BF16())" in {one.name for one in found}) is has_it


def test_local_steps_pay_an_exchange_that_overlaps_nothing_once_in_a_round() -> None:
    """Three quarters of 8 MB at 12.5 MB/s there and back are 0.96 s, and 6 messages of a bucket take 0.1 ms each."""
    setting = Setting(toy(0.1), 4, Network(1e-4, 12.5e6))
    whole = setting.step(replace(RECIPES[0], overlap=False)).seconds
    assert whole == pytest.approx(0.1 + 0.96, rel=0.01)
    line = local_steps(setting, RECIPES, (1, 10))
    assert line.startswith(f"local steps: LocalSGD(every=1) {in_words(whole)}, LocalSGD(every=10) 196 ms a step")
    with pytest.raises(ConfigError, match="compared with 'DDP fp32', whose costs are missing"):
        local_steps(setting, RECIPES[1:])


def test_a_faster_processor_takes_less_for_the_same_exchange() -> None:
    network = Network(1e-6, 1e12)
    one, ten = (Setting(toy(), 2, network, speed=speed).step(RECIPES[2]).seconds for speed in (1.0, 10.0))
    assert one - ten == pytest.approx(0.018, rel=0.01)


def test_predictions_need_the_dense_exchange() -> None:
    with pytest.raises(ConfigError, match="compared with 'DDP bf16', whose costs are missing"):
        predict(Setting(toy(), 2, Network(1e-4, 1e8)), RECIPES[:1])


def test_the_table_says_never_and_any_rate() -> None:
    rows = [Prediction("a", "exact", 1.0, 0.5, 1.0, None), Prediction("b", "exact", 1.0, 0.5, 1.0, math.inf), BF16]
    lines = table(rows).splitlines()
    assert lines[1].endswith("never") and lines[2].endswith("any rate") and lines[3].rstrip().endswith("50")


@pytest.mark.parametrize(("text", "value"), [("100mbit", 12.5e6), ("2.5gbit", 312.5e6), ("800KBIT", 1e5)])
def test_rates(text: str, value: float) -> None:
    assert bytes_per_second(text) == pytest.approx(value)
    assert rate(value).split()[1] in ("Mbit/s", "Gbit/s")


@pytest.mark.parametrize(("text", "value"), [("100us", 1e-4), ("2ms", 2e-3), ("0.5s", 0.5)])
def test_times(text: str, value: float) -> None:
    assert seconds_of(text) == pytest.approx(value)


PARAMETERS = {"resnet50": 25_557_032, "vgg16": 138_357_544, "bert_base": 109_514_298, "gpt2_small": 124_439_808,
              "vit_s": 22_050_664}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_models_have_their_real_size_and_a_source(name: str) -> None:
    model = known_models()[name]
    assert model.numel == PARAMETERS[name]
    assert "RTX 3090" in model.source and "https://" in model.source
    assert 0.02 < model.seconds < 0.5 and 0.2 < model.forward < 0.45
    ready = [parameter.ready for parameter in model.parameters()]
    assert ready == sorted(ready)
    assert ready[0] > model.forward * model.seconds
    assert ready[-1] == pytest.approx(model.seconds)
    assert sum(parameter.numel for parameter in model.parameters()) == model.numel


def test_a_models_backward_reaches_its_last_parameter_first() -> None:
    first, last = toy(1.0).parameters()
    assert (first.ready, last.ready) == (pytest.approx(0.75), pytest.approx(1.0))
    uneven = Model("toy", {"a": (10,), "b": (20,)}, [3.0, 1.0], 1.0, 0.0).parameters()
    assert [(one.numel, one.ready) for one in uneven] == [(20, pytest.approx(0.25)), (10, pytest.approx(1.0))]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("resnet51", "model 'resnet51' is not known: write "),
        ("no_such_module:net", "cannot import 'no_such_module'"),
        ("torch.nn:NoSuchLayer", "'torch.nn' has no 'NoSuchLayer'"),
        ("torch:pi", "'pi' is not callable"),
        ("torch.nn:Linear", "Linear raised TypeError"),
        ("builtins:dict", "returns dict, not a torch.nn.Module"),
        ("torch.nn:ReLU", "has no parameter to train"),
        ("torch.nn:LazyLinear(4)", "has lazy layers, whose shapes follow from an input"),
        ("torch.nn:Linear(4, 2)", "give --step, seconds of forward and backward"),
    ],
)
def test_bad_models_are_told_in_one_sentence(spec: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        model_on_paper(spec)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "raise RuntimeError('no\\nGPU')",
            "cannot import 'user_model': RuntimeError: no GPU. Install it, or correct the name",
        ),
        ("raise SystemExit(3)", "cannot import 'user_model': SystemExit: 3. "),
        ("def net(:", "cannot import 'user_model': SyntaxError: invalid syntax"),
        ("def net(): raise SystemExit(3)", "net raised SystemExit: 3"),
        ("def net(): raise ValueError('no\\nweights')", "net raised ValueError: no weights"),
    ],
)
def test_modules_that_raise_are_told_in_one_sentence(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_model", raising=False)
    test_bad_models_are_told_in_one_sentence("user_model:net", f"model 'user_model:net': {said}")


def test_a_module_in_this_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command `dgcopt` too, for which Python searches the folder of the command alone."""
    (tmp_path / "model_in_this_folder.py").write_text("from torch.nn import Flatten\nnet = Flatten\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != ""])
    assert advise("--ranks", "2", "--link", "1gbit", "--model", "model_in_this_folder:net", "--step", "1") == 2
    assert "model 'model_in_this_folder:net' has no parameter to train" in capsys.readouterr().err


def test_a_model_by_its_path_costs_no_memory() -> None:
    model = model_on_paper("torch.nn:Linear(1000000, 100000)", 0.5)
    assert model.numel == 100_000_100_000
    assert model.parameters()[-1].ready == pytest.approx(0.5)


def advise(*words: str) -> int:
    argv, sys.argv = sys.argv, ["dgcopt", "advise", *words]
    try:
        return main()
    finally:
        sys.argv = argv


def test_the_command_prints_a_table_a_choice_and_a_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = "torch.nn:Linear(2000, 1000)"
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "map.png")]
    words = ["--ranks", "16", "--latency", "100us", "--model", spec, "--step", "0.05"]
    candidates = ["--candidates", "BF16()", "DGC.compact(warmup=None)", "--save-costs", str(tmp_path / "costs.json")]
    assert advise(*words, "--link", "10mbit", *files, *candidates) == 0
    out = capsys.readouterr().out
    assert f"{spec}: 2,001,000 parameters in 2 tensors; 16 ranks" in out
    assert "use DGC.compact(warmup=None) (delayed)" in out.splitlines()[-1]
    predictions = {one["name"]: one for one in json.loads((tmp_path / "out.json").read_text())}
    assert set(predictions) == {"DDP fp32", "DDP bf16", "BF16()", "DGC.compact(warmup=None)"}
    assert predictions["DDP fp32"]["sent"] == pytest.approx(2 * 4 * 2_001_000 * 15 / 16)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    measured = json.loads((tmp_path / "costs.json").read_text())
    for one in (each for each in measured[spec] if "DGC" in each["name"]):
        one["low"]["encode"] = one["high"]["encode"] = 10.0  # however busy the machine was with the others
    (tmp_path / "costs.json").write_text(json.dumps(measured))
    costs = ["--costs", str(tmp_path / "costs.json")]
    assert advise(*words, "--link", "100gbit", *costs) == 0
    assert "does not pay" in capsys.readouterr().out.splitlines()[-1]
    assert advise(*words, "--link", "10mbit", "--allow", "exact", *costs) == 0
    assert "DDP fp32 takes" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "1"), "--ranks must be two or more, not 1"),
        (("--step", "-1"), "--step must be positive and finite, not -1"),
        (("--step", "nan"), "--step must be positive and finite, not nan"),
        (("--speed", "0"), "--speed must be positive and finite, not 0"),
        (("--speed", "inf"), "--speed must be positive and finite, not inf"),
        (("--candidates", "DGCC()"), "unknown candidate 'DGCC()': choose from DDP fp32"),
        (("--model", "resnet51"), "model 'resnet51' is not known"),
        (("--candidates", "Hierarchical"), "unknown candidate 'Hierarchical'"),
        (("--costs", "/nowhere/costs.json"), "cannot read /nowhere/costs.json"),
        (("--allow", "lossy"), "no dense exchange is allowed to compare with: allow 'exact' or 'rounded' too"),
        (("--local-ranks", "0"), "--ranks 4 cannot be on machines of --local-ranks 0 each: give a divisor of --ranks"),
        (("--local-ranks", "3"), "--ranks 4 cannot be on machines of --local-ranks 3 each"),
        (("--local-ranks", "8"), "--ranks 4 cannot be on machines of --local-ranks 8 each"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--ranks": "4", "--link": "1gbit", "--model": "resnet50"} | {words[0]: words[1]}
    assert advise(*(word for pair in given.items() for word in pair)) == 2
    assert f"dgcopt advise: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--link", "fast"), ("--latency", "soon")])
def test_a_bad_unit_is_told_by_the_parser(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--ranks": "4", "--link": "1gbit", "--model": "resnet50"} | {words[0]: words[1]}
    with pytest.raises(SystemExit):
        advise(*(word for pair in given.items() for word in pair))
    assert f"{words[1]!r} is not a " in capsys.readouterr().err


def test_costs_of_another_model_are_refused(tmp_path: Path) -> None:
    save_recipes({"toy": RECIPES}, tmp_path / "costs.json")
    words = ["--ranks", "4", "--link", "1gbit", "--model", "resnet50", "--costs", str(tmp_path / "costs.json")]
    done = subprocess.run(
        [sys.executable, "-m", "dgcopt", "advise", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "has the costs of toy, not of resnet50" in done.stderr


def test_costs_of_other_conditions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is known by its name alone, which says nothing of its parameters."""
    (tmp_path / "costed_model.py").write_text(
        "from torch import nn\nnet = lambda: nn.Linear(*sizes)\nsizes = [30, 20]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "costs.json"
    words = ["--ranks", "8", "--link", "1gbit", "--model", "costed_model:net", "--step", "0.05"]
    some = ["--candidates", "BF16()", "Hierarchical(BF16())"]
    assert advise(*words, "--local-ranks", "2", *some, "--save-costs", str(path)) == 0
    costs = ["--costs", str(path)]
    assert advise(*words, "--local-ranks", "2", *costs) == 0
    capsys.readouterr()

    def refused(said: str, *more: str) -> None:
        assert advise(*words, *costs, *(more or ("--local-ranks", "2"))) == 2
        err = capsys.readouterr().err
        assert said in err and "Record them anew, with --save-costs in place of --costs" in err, err

    refused("conditions: --local-ranks is 2 there and 4 here. Record", "--local-ranks", "4")
    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads + 1)
        refused(f"conditions: the device is a CPU with {threads} thread(s) there and ")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["costed_model"], "sizes", [60, 10])  # as many elements
        refused("conditions: names, shapes or order of parameters differ. Record")
    content = json.loads(path.read_text())
    for one in content["costed_model:net"]:
        del one["conditions"]
    path.write_text(json.dumps(content))
    refused(
        "costs.json does not say with which parameters, --local-ranks and device the costs of costed_model:net were"
    )


def test_costs_of_other_models_stay_in_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were overwritten; a file that cannot be written, or is another one, is told before anything is recorded."""
    save_recipes({"toy": RECIPES}, tmp_path / "costs.json")
    words = ["--ranks", "4", "--link", "1gbit", "--model", "torch.nn:Linear(20, 10)", "--step", "1"]
    words += ["--candidates", "BF16()", "--save-costs"]
    assert advise(*words, str(tmp_path / "costs.json")) == 0
    known = load_recipes(tmp_path / "costs.json")
    assert known["toy"] == RECIPES and {*known} == {"toy", "torch.nn:Linear(20, 10)"}
    (tmp_path / "other.json").write_text('{"a": 1}')
    for name, said in (("none/costs.json", "cannot write "), ("other.json", "other.json holds no costs")):
        capsys.readouterr()
        assert advise(*words, str(tmp_path / name)) == 2
        err = capsys.readouterr().err
        assert said in err and "recording" not in err
    assert (tmp_path / "other.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_recorded(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--ranks", "4", "--link", "1gbit", "--model", "torch.nn:Linear(20, 10)", "--step", "1", option]
    assert advise(*words, str(tmp_path / "none" / "file.png")) == 2
    err = capsys.readouterr().err
    assert "cannot write" in err and "No such file" in err and "recording" not in err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    if option == "--plot":
        assert advise(*words, str(tmp_path / "file.png")) == 2
        err = capsys.readouterr().err
        assert "--plot needs matplotlib" in err and "recording" not in err and not [*tmp_path.iterdir()]


def test_a_single_machine_records_nothing_that_machines_exchange(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--ranks",
        "2",
        "--local-ranks",
        "2",
        "--link",
        "1gbit",
        "--model",
        "torch.nn:Linear(20, 10)",
        "--step",
        "1",
    ]
    monkeypatch.setattr("dgcopt.tuning.commands.CANDIDATES", ["BF16()"])
    assert advise(*words) == 0
    done = capsys.readouterr()
    assert "BF16()" in done.out and "Hierarchical" not in done.out + done.err
    assert advise(*words, "--candidates", "Hierarchical(BF16())") == 2
    assert "needs several machines, and all --ranks 2 are on one of --local-ranks 2" in capsys.readouterr().err


def test_an_unknown_candidate_is_refused_with_recorded_costs_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_recipes({"resnet50": RECIPES}, tmp_path / "costs.json")
    words = ["--ranks", "4", "--link", "1gbit", "--model", "resnet50", "--costs", str(tmp_path / "costs.json")]
    assert advise(*words, "--candidates", "DGCC()") == 2
    assert "unknown candidate 'DGCC()': choose from" in capsys.readouterr().err
    assert advise(*words, "--candidates", "BF16()", "OneBit()") == 2
    assert "costs.json has no costs of BF16(), OneBit(): it has " in capsys.readouterr().err
    assert advise(*words, "--save-costs", str(tmp_path / "more.json")) == 2
    assert "give one of them" in capsys.readouterr().err
