"""What the examples of frameworks share: data, a network, and a word for all of its bits."""

import hashlib

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TESTS = 360


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Training data, and the images and targets of the test set."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.as_tensor(pixels, dtype=torch.float32) / 16, torch.as_tensor(labels)
    return TensorDataset(images[TESTS:], targets[TESTS:]), images[:TESTS], targets[:TESTS]


def classifier() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(10)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def replicas_digest(model: nn.Module) -> str:
    """Of the parameters: ranks whose replicas are equal say the same."""
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    return hashlib.sha256(bytes(flat.view(torch.uint8).tolist())).hexdigest()
