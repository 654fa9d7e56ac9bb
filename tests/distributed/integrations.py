"""Two ranks that train in each framework: with its own DDP, with dgcopt attached, and resumed from a checkpoint.

Prints a line per framework and method. `torchrun --nproc-per-node 2 integrations.py FOLDER FRAMEWORK ...`
"""

import json
import logging
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dgcopt.integrations

STEPS, HALF, BATCH = 12, 6, 8

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def samples() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS * BATCH * 2, 12, generator=draw)
    labels = (images @ torch.randn(12, 4, generator=draw)).argmax(1)
    return [{"inputs": image, "labels": label} for image, label in zip(images, labels, strict=True)]


class Model(nn.Module):
    """As Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.network = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.network(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader(rank: int, size: int) -> DataLoader[Any]:
    """Every rank's own samples, in the order of steps."""
    return DataLoader(samples()[rank::size], batch_size=BATCH)  # type: ignore[arg-type]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).clone()


# -- one function per framework: trains from step `start`, saves after HALF steps, returns weights and optimizer -----


def in_trainer(method: Any, folder: Path, start: int = 0) -> tuple[Tensor, Any]:
    import transformers

    model = Model()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=HALF,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=samples(),  # type: ignore[arg-type]
        optimizers=(sgd(model), None),
    )
    if method is not None:
        dgcopt.integrations.trainer.attach(trainer, method)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{start}") if start else None)
    return flat(model), trainer.optimizer


def in_lightning(method: Any, folder: Path, start: int = 0) -> tuple[Tensor, Any]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    def fit(epochs: int, loaded: str | None = None) -> tuple[lightning.Trainer, Module]:
        settings = {"process_group_backend": "gloo"}
        made = None if method is None else dgcopt.integrations.lightning.DGCStrategy(method, **settings)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=made or DDPStrategy(**settings),
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module()
        half = DataLoader(samples()[: HALF * BATCH * 2], batch_size=BATCH)  # type: ignore[arg-type]
        trainer.fit(module, half, ckpt_path=loaded)
        return trainer, module

    saved = str(folder / "half.ckpt")
    if not start:
        fit(1)[0].save_checkpoint(saved)
    trainer, module = fit(2, saved if start else None)
    return flat(module), trainer.optimizers[0]


def in_fabric(method: Any, folder: Path, start: int = 0) -> tuple[Tensor, Any]:
    import lightning
    from lightning.fabric.strategies import DDPStrategy

    settings = {"process_group_backend": "gloo"}
    made = dgcopt.integrations.fabric.DGCStrategy(method, **settings) if method is not None else None
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=made or DDPStrategy(**settings))
    fabric.launch()
    bare = Model()
    model, optimizer = fabric.setup(bare, sgd(bare))
    state = {"optimizer": optimizer, "model": model}
    if start:
        fabric.load(folder / "half.ckpt", state)
    for step, batch in enumerate(islice(loader(fabric.global_rank, 2), start, STEPS), start + 1):
        optimizer.zero_grad()
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
        if step == HALF:
            fabric.save(folder / "half.ckpt", state)
    return flat(bare), optimizer


def in_accelerate(method: Any, folder: Path, start: int = 0) -> tuple[Tensor, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare = Model()
    model, optimizer = accelerator.prepare(bare, sgd(bare))
    if method is not None:
        dgcopt.integrations.accelerate.attach(accelerator, model, optimizer, method)
    if start:
        accelerator.load_state(str(folder / "half"))
    for step, batch in enumerate(islice(loader(accelerator.process_index, 2), start, STEPS), start + 1):
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        if step == HALF:
            accelerator.save_state(str(folder / "half"))
    accelerator.free_memory()
    return flat(bare), optimizer


FRAMEWORKS = {"trainer": in_trainer, "lightning": in_lightning, "fabric": in_fabric, "accelerate": in_accelerate}


def told(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """How each method ends, and ends when resumed."""
    train = FRAMEWORKS[name]
    own, _ = train(None, folder / "own")
    for method in (dgcopt.NoCompression(), dgcopt.DGC(0.05, warmup=None), dgcopt.LocalSGD(every=4)):
        label = type(method).__name__
        weights, optimizer = train(method, folder / label)
        bare = getattr(optimizer, "optimizer", optimizer)
        telemetry = bare.averaging.telemetry if hasattr(bare, "averaging") else bare.telemetry
        resumed, _ = train(method, folder / label, HALF)
        yield {
            "framework": name,
            "method": label,
            "from_own": (weights - own).abs().max().item(),
            "resumed": torch.equal(weights, resumed),
            "weights": weights.double().sum().item(),
            "sent": telemetry.sent_bytes,
        }


if __name__ == "__main__":
    for framework in sys.argv[2:]:
        for line in told(framework, Path(sys.argv[1]) / framework):
            print(json.dumps(line), flush=True)
