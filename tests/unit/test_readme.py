"""Links, commands and names on the pages exist, and blocks have the effect that their page claims.

tests/test_pages.py runs the blocks of all pages.
"""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

import dgcopt
from dgcopt.collectives import AllReduce
from tests.support.worlds import Ranks

ROOT = Path(__file__).resolve().parents[2]


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


PAGES = [
    *sorted(path.name for path in ROOT.glob("*.md")),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        assert there.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_what_exists(page, monkeypatch):
    """Scripts, configs, options. What they do when they are run, scripts/test.sh and tests/test_train.py try."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for words in filter(None, lines):
        names = [word for word in words if word.endswith((".py", ".sh"))]
        assert all((ROOT / name).exists() for name in names), words
        if "train.py" in names:
            after = words[words.index("train.py") + 1 :]
            importlib.import_module("train").make_parser().parse_args(after)
        elif names and names[0].endswith(".py") and names[0] != "setup.py":
            source = (ROOT / names[0]).read_text()
            options = [word for word in words[words.index(names[0]) :] if word.startswith("--")]
            assert all(f'"{option}"' in source for option in options), words
        elif words[:2] == ["pip", "install"] and words[2].startswith("."):
            known = (ROOT / "setup.cfg").read_text()
            for extra in filter(None, words[2].strip(".[]").split(",")):
                assert f"\n{extra} =\n" in known, words


@pytest.mark.parametrize("name", ["data", "elastic", "hvd", "testing"])
def test_modules_are_there_when_they_are_asked_for(name, monkeypatch):
    """`import dgcopt` alone does not import them, and pages say `dgcopt.elastic.State` and the like."""
    monkeypatch.delattr(dgcopt, name, raising=False)
    assert getattr(dgcopt, name).__name__ == f"dgcopt.{name}"
    with pytest.raises(AttributeError, match="no attribute 'elastics'"):
        _ = dgcopt.elastics


def test_a_compressor_of_your_own():
    (code,) = code_of("docs/design.md")
    names: dict = {}
    exec(code, names)
    ranks = Ranks(3, lambda p: torch.optim.SGD(p, lr=0.01), compression=names["SignMean"](), bucket_mb=0.001)
    for seed in range(4):
        ranks.step(seed)
        ranks.assert_replicas_equal()
    assert ranks.optimizers[0].telemetry.payload_bytes > 0


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_training_loop(page):
    (code,) = code_of(page)
    model = nn.Linear(4, 3)
    batches = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]
    before = model.weight.detach().clone()
    try:
        exec(code, {"torch": torch, "model": model, "loader": batches, "loss_fn": nn.functional.cross_entropy})
    finally:
        dgcopt.shutdown()
    assert not torch.equal(model.weight, before)


def test_a_compressor_in_twenty_lines(capsys):
    _, compressor, used, checked, declared = code_of("docs/compressors.md")
    body = compressor[compressor.index("@dataclass") :].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 20
    names: dict = {}
    exec(compressor, names)
    model = nn.Linear(4, 3)
    exec(used, names | {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "model": model})
    dgcopt.shutdown()
    exec(checked, names)
    printed = capsys.readouterr().out.strip()
    assert printed in (ROOT / "docs/compressors.md").read_text(), (
        f"the page shows another report than this one:\n{printed}"
    )
    with pytest.raises(dgcopt.ConfigError, match=r"decay must be a number, not '0\.9'"):
        names["LargestOfBlock"](decay="0.9")
    exec(declared, names)
    report = names["check_compressor"](names["Declared"]())
    assert all(outcome == "ok" for _, outcome in report.lines), report


def test_rules_by_name_as_the_page_shows_them():
    code, *_ = code_of("docs/compressors.md")

    class Net(nn.Sequential):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(nn.Linear(30, 20), nn.Tanh())
            self.head = nn.Linear(20, 10)

    model = Net()
    names = {"dgcopt": dgcopt, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    exec(code, names)
    dgcopt.shutdown()
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1), Net, compression=names["compressor"])
    for rank in range(2):
        ranks.models[rank](torch.randn(4, 30)).square().sum().backward()
    for optimizer in ranks.optimizers:
        optimizer.step()
    ranks.assert_replicas_equal()
    moved = {
        n: (p != q).sum() for (n, p), q in zip(ranks.models[0].named_parameters(), Net().parameters(), strict=True)
    }
    assert moved["0.bias"] == 20 and moved["head.bias"] == 10, "whole"
    assert 0 < moved["0.weight"] <= 2 * 1 and 0 < moved["head.weight"] <= 2 * 2, "so many of each rank"


def test_clipping_as_the_page_shows_it():
    (code,) = code_of("docs/loops.md")
    model = nn.Linear(4, 3)
    names = {"dgcopt": dgcopt, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    exec(code, names)
    dgcopt.shutdown()
    assert names["optimizer"].compressor.clip == dgcopt.LocalClip(1.0)


def test_averaging_as_the_page_shows_it():
    line, used, own = code_of("docs/averaging.md")
    model = nn.Linear(4, 3)
    names: dict = {"torch": torch, "dgcopt": dgcopt, "AllReduce": AllReduce, "model": nn.Linear(4, 3)}
    exec(line, names)
    dgcopt.shutdown()
    assert names["optimizer"].averaging.rule.every == 48
    names["model"] = model
    exec(used, names)
    dgcopt.shutdown()
    model(torch.randn(5, 4)).sum().backward()
    names["optimizer"].step()
    assert names["optimizer"].averaging.step == 1
    exec(own, names)
    models = [nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    start = models[0].weight.detach().clone()
    optimizers = [
        names["Halfway"]().attach(torch.optim.SGD(model.parameters(), lr=1.0), comm=comm)
        for model, comm in zip(models, dgcopt.simulated_world(2), strict=True)
    ]
    for _ in range(2):
        for rank, model in enumerate(models):
            model.weight.grad = torch.full_like(model.weight, float(rank))
        for optimizer in optimizers:
            optimizer.step()
    # rank 1 has gone two steps of 1, and both went half the way to the middle
    torch.testing.assert_close(models[0].weight, start - 0.5, rtol=0, atol=1e-6)
    torch.testing.assert_close(models[1].weight, start - 1.5, rtol=0, atol=1e-6)


def test_the_loops_of_the_data_page(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dataset = [(torch.zeros(length),) for length in (3, 1, 2)]
    for code in code_of("docs/data.md"):
        exec(code, {"dataset": dataset, "DataLoader": torch.utils.data.DataLoader, "epochs": 2, "pad": list})
    dgcopt.shutdown()


def test_the_fused_step():
    (code,) = code_of("docs/fuse.md")
    names = {"dgcopt": dgcopt, "torch": torch, "model": nn.Linear(2, 2)}
    exec(code, names)
    dgcopt.shutdown()
    names["model"](torch.ones(1, 2)).sum().backward()
    names["optimizer"].step()
