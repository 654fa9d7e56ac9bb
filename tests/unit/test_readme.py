"""The code of the README and of the page on compressors runs as it stands there."""

import re
from pathlib import Path

import torch
from torch import nn
from worlds import Ranks

import dgcopt
from dgcopt.collectives import AllReduce

ROOT = Path(__file__).resolve().parents[2]


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


CODE = code_of("README.md")


def test_a_compressor_of_your_own():
    (code,) = [block for block in CODE if "class SignMean" in block]
    names = {"dgcopt": dgcopt, "AllReduce": AllReduce}
    exec(code, names)
    ranks = Ranks(3, lambda p: torch.optim.SGD(p, lr=0.01), compression=names["SignMean"](), bucket_mb=0.001)
    for seed in range(4):
        ranks.step(seed)
        ranks.assert_replicas_equal()
    assert ranks.optimizers[0].telemetry.payload_bytes > 0


def test_the_training_loop():
    (code,) = [block for block in CODE if "for inputs, targets" in block]
    model = nn.Linear(4, 3)
    batches = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]
    before = model.weight.detach().clone()
    try:
        exec(code, {"torch": torch, "model": model, "loader": batches, "loss_fn": nn.functional.cross_entropy})
    finally:
        dgcopt.shutdown()
    assert not torch.equal(model.weight, before)


def test_a_compressor_in_twenty_lines(capsys):
    compressor, used, checked, declared = code_of("docs/compressors.md")
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
    exec(declared, names)
    report = names["check_compressor"](names["Declared"]())
    assert all(outcome == "ok" for _, outcome in report.lines), report
