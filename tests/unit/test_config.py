"""Config files and the command line: each setting keeps its type, and presets are the shipped files."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml

import dgcopt
from dgcopt import Averaging
from dgcopt.__main__ import library
from dgcopt.compressors import Compressor


@pytest.mark.parametrize("config, preset", [("dgc", dgcopt.DGC.faithful), ("dgc_compact", dgcopt.DGC.compact)])
def test_presets_are_the_configs(config, preset):
    root = Path(__file__).resolve().parents[2]
    settings = yaml.safe_load((root / f"configs/compressors/{config}.yaml").read_text())["compressor"]["init_args"]
    settings["warmup"] = dgcopt.Warmup(**settings["warmup"])
    assert repr(dgcopt.DGC(**settings)) == repr(preset())
    assert preset(0.01, warmup=None, values="int8").values == "int8" and preset(0.01, warmup=None).ratio == 0.01


def test_the_compact_preset_has_no_warm_up_below_its_ratio():
    warm_ups = [dgcopt.DGC.compact(ratio).warmup for ratio in (0.001, 0.004, 0.01, 0.1)]
    assert [warm_up and warm_up.ratios for warm_up in warm_ups] == [(1 / 64, 0.004), (1 / 64,), (1 / 64,), None]


WARM_UP = [dgcopt.DGC, dgcopt.TopK, dgcopt.ChunkedTopK, dgcopt.RandomK, dgcopt.CLTK, dgcopt.CSC]


SETTINGS = [(kind, name) for kind in library() for name in list(inspect.signature(kind.__init__).parameters)[1:]]


@pytest.mark.parametrize(("kind", "setting"), SETTINGS, ids=lambda value: getattr(value, "__name__", value))
def test_config_files_know_the_type_of_every_setting(kind, setting, capsys):
    """Else a warm-up would stay the dictionary that it is in the file, and a number a word."""
    parser = pytest.importorskip("dgcopt.tasks.config").Parser()
    parser.add_argument("--compressor", type=Compressor)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--compressor=dgcopt.{kind.__name__}", f"--compressor.{setting}=no such thing"])
    assert setting in capsys.readouterr().err


@pytest.mark.parametrize("kind", WARM_UP)
def test_a_warm_up_from_a_config_file_is_one(kind):
    parser = pytest.importorskip("dgcopt.tasks.config").Parser()
    parser.add_argument("--compressor", type=Compressor)
    config = parser.parse_args([f"--compressor=dgcopt.{kind.__name__}", "--compressor.warmup.ratios=[0.5]"])
    assert parser.instantiate(config).compressor.warmup == dgcopt.Warmup((0.5,))


def chosen(name: str, **settings: object) -> dict[str, object]:
    return {"class_path": name, "init_args": settings}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"op": "most"}, "\"op\" is 'most', and must be one of 'average', 'sum'"),
        ({"amp": "fp8"}, "\"amp\" is 'fp8', and must be one of 'bf16', 'fp16'"),
        (
            {"averaging": chosen("dgcopt.DiLoCo", unsent="far")},
            "\"averaging.unsent\" is 'far', and must be one of 'apart', 'local'",
        ),
        (
            {"averaging": chosen("dgcopt.DiLoCo", compression=chosen("dgcopt.DGC", source="all"))},
            "\"averaging.compression.source\" is 'all', and must be one of 'auto', 'gradient', 'update'",
        ),
        ({"averaging": chosen("dgcopt.LocalSGD", every="often")}, "\"averaging.every\" is 'often', and must be int"),
        ({"bucket_mb": -1}, "\"bucket_mb\" is '-1', and must be PositiveFloat"),
        *(
            (
                {"averaging": chosen("dgcopt.DiLoCo", compression=chosen(name))},
                f'"averaging.compression" is {name}, which cannot be imported ({why}): give module.Class; '
                f"`dgcopt compressors` and `dgcopt averaging` list those of dgcopt",
            )
            for name, why in (
                ("dgcopt.Nope", "module 'dgcopt' has no attribute 'Nope'"),
                ("nothing.Nope", "No module named 'nothing'"),
            )
        ),
        ({"optimizer": chosen("torch.optim.SGD", lr="fast")}, "\"optimizer.lr\" is 'fast', and must be float"),
    ],
)
def test_a_wrong_value_is_told_with_the_valid_ones(given, words, tmp_path, capsys):
    """In one line that begins with the file and the setting, not with the types around it."""
    parser = pytest.importorskip("dgcopt.tasks.config").Parser(prog="train.py")
    parser.add_argument("--config", action="config")
    parser.add_argument("--op", type=Literal["average", "sum"])
    parser.add_argument("--amp", type=Literal["bf16", "fp16"] | None)
    parser.add_argument("--averaging", type=Averaging | None)
    parser.add_argument("--bucket_mb", type=pytest.importorskip("jsonargparse.typing").PositiveFloat | None)
    parser.add_argument("--optimizer", type=Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer])
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(given))
    with pytest.raises(SystemExit):
        parser.parse_args([f"--config={path}"])
    assert capsys.readouterr().err == f"train.py: {path}: {words}\n"


def test_a_setting_that_a_class_refuses_is_told_in_its_own_words():
    """Also where the class is one of several types, as a warm-up or None."""
    parser = pytest.importorskip("dgcopt.tasks.config").Parser(prog="train.py")
    parser.add_argument("--compressor", type=Compressor)
    config = parser.parse_args(["--compressor=dgcopt.DGC", "--compressor.warmup.epochs=-1"])
    with pytest.raises(dgcopt.ConfigError, match=r"^a warm-up's epochs must be a positive number, not -1\.0$"):
        parser.instantiate(config)
