"""One run of bench_frontier.py: a small GPT on simulated ranks, its losses and bytes.

All ranks train in one process and one thread, their weights stacked for the forward and backward pass. Everything else
is the library's own code: one optimizer per rank, wrapped for a simulated wire, whose telemetry counts the bytes. The
same seed gives all methods the same weights and batches, and a rank's batches do not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from functools import cache, partial
from typing import Any

import torch
from frontier.plan import Run
from frontier.stacked_gpt import backward, loss_of
from torch import Tensor, nn

import dgcopt
from dgcopt.tasks.stdlib_gpt import CharGPT, StdlibText

__all__ = ["task_id", "train"]

TASK = {"layers": 2, "heads": 2, "width": 64, "context": 64, "batch": 4, "text": 10_000_000, "version": 2}
"""Shape of the model, samples per rank and step, and bytes of text; raise `version` if training itself changes."""

WARMUP = 0.2
"""Fraction of the steps during which the learning rate rises; then it falls to zero along a cosine.

Dense AdamW wants it: at a learning rate of 0.004 its loss was 1.867 with 5% and 1.679 with 20% (docs/frontier.md).
"""

CLIP = 1.0
"""Largest norm of a rank's own gradient."""

OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    "adamw0": partial(torch.optim.AdamW, betas=(0.0, 0.95), weight_decay=0.1, fused=True),
    "sgd": partial(torch.optim.SGD, weight_decay=0.1),
    "muon": partial(dgcopt.MuonAdamW, betas=(0.9, 0.95), weight_decay=0.1),
}


def outer(lr: float, momentum: float) -> partial[torch.optim.SGD]:
    """The outer optimizer of DiLoCo."""
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


@cache
def texts() -> dict[str, Tensor]:
    """The training and the validation text."""
    return {
        "train": StdlibText("train", TASK["context"], TASK["text"]).text,
        "validation": StdlibText("validation", TASK["context"], TASK["text"]).text,
    }


@cache
def task_id() -> str:
    """The version of the task: its settings and the text, which depends on the version of Python."""
    digest = hashlib.sha256(json.dumps(TASK, sort_keys=True).encode())
    for text in texts().values():
        digest.update(text.numpy().tobytes())
    return digest.hexdigest()[:12]


def model_of(seed: int) -> CharGPT:
    """The model with GPT-2's initialisation: N(0, 0.02), less by the square root of the depth for what is added up."""
    torch.manual_seed(seed)
    model = CharGPT(TASK["layers"], TASK["heads"], TASK["width"], TASK["context"])
    for name, param in model.named_parameters():
        if param.dim() == 2:
            added = name.endswith(("project.weight", "mlp.2.weight"))
            nn.init.normal_(param, std=0.02 / math.sqrt(2 * TASK["layers"]) if added else 0.02)
    return model


def batch(text: Tensor, random: torch.Generator, count: int) -> Tensor:
    """Windows of text from anywhere, with one character more than the context: `[count, context + 1]`."""
    starts = torch.randint(len(text) - TASK["context"], (count, 1), generator=random)
    return text[starts + torch.arange(TASK["context"] + 1)].long()


@torch.no_grad()
def validation(weights: dict[str, Tensor], count: int) -> float:
    """The loss of one replica on the same windows each time."""
    windows = batch(texts()["validation"], torch.Generator().manual_seed(1), count)
    one = {name: tensor[None] for name, tensor in weights.items()}
    return statistics.mean(float(loss_of(one, part[None], TASK["heads"])) for part in windows.split(256))


def rate(step: int, run: Run) -> float:
    """The learning rate of a step, counted from 0."""
    warm = max(1, round(WARMUP * run.steps))
    if step < warm:
        return run.lr * (step + 1) / warm
    return run.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / (run.steps - warm)))


def wrapped(run: Run, replicas: list[dict[str, nn.Parameter]]) -> list[Any]:
    """Return each rank's optimizer with the exchange of the run."""
    chosen = eval(run.exchange, {**vars(dgcopt), "outer": outer})
    optimizers: list[Any] = []
    for replica, comm in zip(replicas, dgcopt.simulated_world(run.ranks), strict=True):
        given = replica.items() if run.optimizer == "muon" else replica.values()
        optimizer = OPTIMIZERS[run.optimizer](given, lr=run.lr)
        if isinstance(chosen, dgcopt.Averaging):
            optimizers.append(chosen.attach(optimizer, replica.items(), comm))
        else:
            optimizers.append(dgcopt.DistributedOptimizer(optimizer, replica.items(), chosen, comm=comm))
    return optimizers


def train(run: Run) -> dict[str, Any]:
    """Train one run; return its losses, bytes and seconds."""
    started, cpu = time.time(), time.process_time()
    model = model_of(run.seed)
    replicas = [
        {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
        for _ in range(run.ranks)
    ]
    optimizers = wrapped(run, replicas)
    randoms = [torch.Generator().manual_seed(1000 * run.seed + rank + 1) for rank in range(run.ranks)]
    curve, recent = [], 0.0
    every = run.steps // 10
    for step in range(run.steps):
        windows = torch.stack([batch(texts()["train"], random, TASK["batch"]) for random in randoms])
        found = backward(replicas, windows, TASK["heads"], CLIP)
        if not math.isfinite(found):
            return {"loss": None, "error": f"the training loss is {found} at step {step}"}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, run)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        recent += found / every
        if (step + 1) % every == 0:
            curve.append([step + 1, round(recent, 4), round(validation(mean_of(replicas), 256), 4)])
            recent = 0.0
    sender = getattr(optimizers[0], "averaging", optimizers[0])
    sent = sender.telemetry.sent_bytes if run.ranks > 1 else 0
    elements = sum(param.numel() for param in model.parameters())
    return {
        "loss": validation(mean_of(replicas), 2048),
        "loss_of_rank_0": validation(replicas[0], 2048),
        "distance": distance(replicas),
        "bytes_per_sample": sent / run.steps / TASK["batch"],
        "dense_bytes_per_sample": 2 * 4 * elements * (run.ranks - 1) / run.ranks / TASK["batch"],
        "parameters": elements,
        "curve": curve,
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "seconds": round(time.time() - started, 1),
    }


def mean_of(replicas: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the ranks' weights, which every method trains for: most hold it on every rank."""
    return {name: torch.stack([replica[name].detach() for replica in replicas]).mean(0) for name in replicas[0]}


def distance(replicas: list[dict[str, Tensor]]) -> float:
    """The distance of the ranks' weights from their mean, root mean square, as a fraction of the mean's norm."""
    mean = torch.cat([tensor.flatten() for tensor in mean_of(replicas).values()])
    each = [torch.cat([tensor.detach().flatten() for tensor in replica.values()]) for replica in replicas]
    return float(torch.stack([(one - mean).norm() for one in each]).square().mean().sqrt() / mean.norm())
