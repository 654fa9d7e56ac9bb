"""Two ranks that train in each framework: with its own DDP, with dgcopt attached, and resumed from a checkpoint.

Prints a line per framework and method, and one per framework about its further loads and loops.
`torchrun --nproc-per-node 2 integrations.py FOLDER FRAMEWORK ...`
"""

import copy
import gc
import json
import logging
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
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


def trainer_arguments(folder: Path) -> Any:
    import transformers

    return transformers.TrainingArguments(
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


def in_trainer(method: Any, folder: Path, start: int = 0) -> tuple[Tensor, Any]:
    import transformers

    model = Model()
    arguments = trainer_arguments(folder)
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


# -- one function per framework: loads again, trains again, and tests; returns whether each went as it should ---------


def compressor() -> dgcopt.Compressor:
    return dgcopt.DGC(0.05, warmup=None)


@contextmanager
def warnings_of_dgcopt() -> Iterator[list[str]]:
    """The warnings that dgcopt logs on this rank."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dgcopt")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def memory(optimizer: Any) -> Tensor:
    """Everything that is kept for the gradients of an optimizer."""
    kept = optimizer.state_dict()["dgcopt"]["memory"]
    tensors = [kept[kind][name] for kind in sorted(kept) for name in sorted(kept[kind])]
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).clone()


def further_in_trainer(folder: Path) -> dict[str, bool]:
    import transformers

    def made(method: Any, where: Path) -> tuple[transformers.Trainer, Model]:
        model = Model()
        arguments = trainer_arguments(where)
        optimizer = sgd(model)
        trainer = transformers.Trainer(model, arguments, train_dataset=samples(), optimizers=(optimizer, None))
        if method is not None:
            dgcopt.integrations.trainer.attach(trainer, method)
        return trainer, model

    found: dict[str, bool] = {}
    for method in (compressor(), dgcopt.LocalSGD(every=4)):
        label = type(method).__name__
        trainer, model = made(method, folder / label)
        trainer.train()
        first = flat(model)
        with warnings_of_dgcopt() as lines:
            trainer.train(resume_from_checkpoint=str(folder / label / f"checkpoint-{HALF}"))
        found |= {f"{label} resumed": torch.equal(first, flat(model)), f"{label} without a warning": not lines}
        for missing in ("optimizer.pt", "dgcopt"):  # a Trainer that has trained resumes as a new one does
            checkpoint = folder / label / f"checkpoint-{HALF}"
            torch.distributed.barrier()
            if trainer.args.process_index == 0:
                (checkpoint / missing).rename(folder / f"{missing} of {label}")
            torch.distributed.barrier()
            ends = []
            for each in (trainer, made(method, folder / label)[0]):
                try:
                    each.train(resume_from_checkpoint=str(checkpoint))
                    ends.append(flat(each.model))
                except dgcopt.CheckpointError as error:
                    found[f"{label}: {missing} is needed"] = "has trained with LocalSGD" in str(error)
            found[f"{label} without {missing}"] = torch.equal(ends[0], ends[-1])
    ends = []
    for number, dense in enumerate((None, dgcopt.NoCompression())):
        trainer, model = made(dense, folder / str(number))
        trainer.train()
        trainer.train()
        ends.append(flat(model))
    return {**found, "trains on": bool((ends[0] - ends[1]).abs().max() < 1e-6)}


def further_in_lightning(folder: Path) -> dict[str, bool]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()
            self.own = sgd(self)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.inner(**batch)["loss"]

        test_step = training_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.own

    data: DataLoader[Any] = DataLoader(samples()[: HALF * BATCH * 2], batch_size=BATCH)  # type: ignore[arg-type]

    def fit(where: Path, epochs: int, loaded: Path | None = None) -> tuple[lightning.Trainer, Module]:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=dgcopt.integrations.lightning.DGCStrategy(compressor(), process_group_backend="gloo"),
            max_epochs=epochs,
            logger=False,
            callbacks=[ModelCheckpoint(where, save_last="link", save_top_k=1)],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module()
        trainer.fit(module, data, ckpt_path=None if loaded is None else str(loaded))
        return trainer, module

    through, module = fit(folder / "through", 3)
    end = flat(module)
    through.test(module, data, verbose=False)
    again, module = fit(folder / "again", 1)
    again.fit_loop.max_epochs = 3
    again.fit(module, data)
    found = {"tested": True, "trains on": torch.equal(end, flat(module))}
    symlink = os.symlink
    for kind in ("link", "copy"):
        where = folder / kind
        if kind == "copy":
            os.symlink = refused
        fit(where, 2)
        os.symlink = symlink
        kept = sorted(path.name for path in where.iterdir())
        found[f"one {kind}"] = (where / "last.ckpt").is_symlink() == (kind == "link") and len(kept) == 3
        with warnings_of_dgcopt() as lines:
            _, module = fit(folder / f"from {kind}", 3, where / "last.ckpt")
        found[kind] = torch.equal(end, flat(module)) and not lines
    return found


def refused(*args: Any, **kwargs: Any) -> None:
    raise OSError("this file system has no symbolic links")


def further_in_fabric(folder: Path) -> dict[str, bool]:
    import lightning

    strategy = dgcopt.integrations.fabric.DGCStrategy(compressor(), process_group_backend="gloo")
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    bare = Model()
    model, optimizer = fabric.setup(bare, sgd(bare))
    state = {"optimizer": optimizer, "model": model}
    kept = []
    for step, batch in enumerate(islice(loader(fabric.global_rank, 2), HALF)):
        optimizer.zero_grad()
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
        if step in (1, HALF - 1):
            fabric.save(folder / f"{step}.ckpt", state)
            kept.append((memory(optimizer), copy.deepcopy(optimizer.state_dict())))
    return loads_each(optimizer, kept, lambda number: fabric.load(folder / f"{(1, HALF - 1)[number]}.ckpt", state))


def further_in_accelerate(folder: Path) -> dict[str, bool]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare = Model()
    model, optimizer = accelerator.prepare(bare, sgd(bare))
    dgcopt.integrations.accelerate.attach(accelerator, model, optimizer, compressor())
    kept = []
    for step, batch in enumerate(islice(loader(accelerator.process_index, 2), HALF)):
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        if step in (1, HALF - 1):
            accelerator.save_state(str(folder / str(step)))
            kept.append((memory(optimizer), copy.deepcopy(optimizer.state_dict())))
    found = loads_each(optimizer, kept, lambda number: accelerator.load_state(str(folder / str((1, HALF - 1)[number]))))
    former = weakref.ref(bare)
    del model, optimizer, bare, batch
    accelerator.free_memory()
    gc.collect()
    found["memory is free"] = former() is None
    bare = Model()
    model, optimizer = accelerator.prepare(bare, sgd(bare))  # as a retry with smaller batches does
    dgcopt.integrations.accelerate.attach(accelerator, model, optimizer, compressor())
    accelerator.save_state(str(folder / "retry"))
    found["one exchange"] = [path.name for path in (folder / "retry").glob("dgcopt*")] == ["dgcopt"]
    accelerator.free_memory()
    return found | overflows_alike()


def overflows_alike() -> dict[str, bool]:
    """Overflow on one rank, where gradients are clipped: all skip the step, halve the scale and keep their schedule."""
    from accelerate import Accelerator

    class Scaling(Accelerator):
        """Accelerate refuses float16 without a GPU, though torch's scaler works."""

        mixed_precision = "fp16"

    accelerator = Scaling(cpu=True)
    accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=1024.0), True
    bare = Model()
    own = sgd(bare)
    falling = torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.1, STEPS * 2)
    model, optimizer, schedule = accelerator.prepare(bare, own, falling)
    dgcopt.integrations.accelerate.attach(accelerator, model, optimizer, dgcopt.NoCompression())
    weights = []
    try:
        for step, batch in enumerate(islice(loader(accelerator.process_index, 2), HALF)):
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            accelerator.backward(loss * torch.inf if (step, accelerator.process_index) == (2, 1) else loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            weights.append(flat(bare))
    except dgcopt.MismatchError:
        return {"overflow is alike": False}
    finally:
        accelerator.free_memory()
    skipped = [torch.equal(before, after) for before, after in pairwise(weights)]
    alike = accelerator.scaler.get_scale() == 512.0 and falling.last_epoch == 2 * (HALF - 1)
    return {"overflow is alike": alike and skipped == [False, True, False, False, False]}


def loads_each(optimizer: Any, kept: list[tuple[Tensor, Any]], load: Callable[[int], Any]) -> dict[str, bool]:
    """Load two checkpoints by the framework, and then states by the optimizer; each must bring its own memory."""
    found = {"differ": not torch.equal(kept[0][0], kept[1][0])}
    for number in (0, 1, 0):
        load(number)
        found[f"checkpoint {number}"] = torch.equal(memory(optimizer), kept[number][0])
    for number in (1, 0):
        optimizer.load_state_dict(copy.deepcopy(kept[number][1]))
        found[f"state {number}"] = torch.equal(memory(optimizer), kept[number][0])
    return found


def switched(name: str, folder: Path) -> dict[str, bool]:
    """A checkpoint of LocalSGD resumes with DGC, from rank 0's weights on all ranks."""
    with warnings_of_dgcopt() as lines:
        weights, _ = FRAMEWORKS[name](compressor(), folder / "LocalSGD", HALF)
    sums = torch.empty(2, dtype=torch.float64)
    torch.distributed.all_gather_into_tensor(sums, weights.double().sum().reshape(1))
    return {"switched": bool(sums[0] == sums[1]), "told": len(lines) == 1 and "of rank 0" in lines[0]}


def without_parts(name: str, folder: Path) -> dict[str, bool]:
    """A checkpoint of LocalSGD whose ranks' parts were left behind resumes from rank 0's weights and state."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for path in [*(folder / "LocalSGD").rglob("*dgcopt")]:
            shutil.rmtree(path)
    torch.distributed.barrier()
    with warnings_of_dgcopt() as lines:
        weights, _ = FRAMEWORKS[name](dgcopt.LocalSGD(every=2), folder / "LocalSGD", HALF)
    sums = torch.empty(2, dtype=torch.float64)
    torch.distributed.all_gather_into_tensor(sums, weights.double().sum().reshape(1))
    return {"without parts": bool(sums[0] == sums[1]), "parts are missed": "there is no" in lines[0]}


FURTHER = {
    "trainer": further_in_trainer,
    "lightning": further_in_lightning,
    "fabric": further_in_fabric,
    "accelerate": further_in_accelerate,
}
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
        folder = Path(sys.argv[1]) / framework
        for line in told(framework, folder):
            print(json.dumps(line), flush=True)
        found = {
            **FURTHER[framework](folder / "further"),
            **switched(framework, folder),
            **without_parts(framework, folder),
        }
        print(json.dumps({"further": framework, **found}), flush=True)
