"""What the examples of Horovod's loop share: data, a network, its accuracy over ranks, and a last line."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dgcopt.hvd as hvd

TESTS = 360


def digits(batch_size: int) -> tuple[DataLoader, DistributedSampler, TensorDataset]:
    """This rank's training batches and their sampler, and this rank's part of the test set."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.as_tensor(pixels, dtype=torch.float32) / 16, torch.as_tensor(labels)
    train = TensorDataset(images[TESTS:], targets[TESTS:])
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    mine = slice(hvd.rank(), TESTS, hvd.size())
    return DataLoader(train, batch_size, sampler=sampler), sampler, TensorDataset(images[mine], targets[mine])


def classifier() -> nn.Module:
    """A small network for digits, different on every rank until parameters are broadcast."""
    torch.manual_seed(10 + hvd.rank())
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def accuracy(model: nn.Module, tests: TensorDataset) -> tuple[float, float]:
    """Loss and accuracy, averaged over the ranks' parts of the test set."""
    images, targets = tests.tensors
    with torch.no_grad():
        scores = model(images)
    loss = nn.functional.cross_entropy(scores, targets)
    right = (scores.argmax(1) == targets).float().mean()
    return tuple(float(hvd.allreduce(value, name=name)) for name, value in (("loss", loss), ("accuracy", right)))


def report(model: nn.Module, **results: Any) -> None:
    """A line of JSON on rank 0. Raises RuntimeError if the ranks have ended with different parameters."""
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    bits = hashlib.sha256(bytes(flat.view(torch.uint8).tolist())).hexdigest()
    everyone = hvd.allgather_object(bits)
    if len(set(everyone)) > 1:
        raise RuntimeError(f"replicas differ: {everyone}")
    if hvd.rank() == 0:
        name = " ".join([Path(sys.argv[0]).stem, *sys.argv[1:]])
        print(json.dumps({"example": name, "parameters": bits, **results}), flush=True)
