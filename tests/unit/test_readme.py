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


def test_weights_in_place_of_gradients():
    (code,) = [block for block in CODE if "dgcopt.SlowMo" in block]
    names = {"torch": torch, "dgcopt": dgcopt, "model": nn.Linear(4, 3)}
    exec(code, names)
    dgcopt.shutdown()
    assert names["optimizer"].averaging.rule.frequency == 48


def test_averaging_as_the_page_shows_it():
    used, own = code_of("docs/averaging.md")
    model = nn.Linear(4, 3)
    names: dict = {"dgcopt": dgcopt, "AllReduce": AllReduce, "model": model}
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
    assert torch.allclose(models[0].weight, start - 0.5) and torch.allclose(models[1].weight, start - 1.5)
