"""The README's code runs as it stands there."""

import re
from pathlib import Path

import torch
from torch import nn
from worlds import Ranks

import dgcopt
from dgcopt.collectives import AllReduce

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


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
