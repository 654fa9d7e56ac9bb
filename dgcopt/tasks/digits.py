"""Scikit-learn's bundled handwritten digits and a small network for them: the task that needs no download."""

from typing import Literal

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


class Digits(TensorDataset):
    """The 1,797 scanned digits that ship with scikit-learn, 8x8 pixels each, as ``(image, label)``.

    Images are float32 of shape (1, 8, 8) with values in [0, 1], labels int64 in 0..9. One digit in five, drawn
    by a fixed seed, is the test split: 1,438 to train, 359 to test, the same ones on every machine.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository, 1998 (test part).
    """

    def __init__(self, split: Literal["train", "test"] = "train") -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        tests = len(images) // 5
        chosen = order[:tests] if split == "test" else order[tests:]
        super().__init__(images[chosen], torch.as_tensor(labels, dtype=torch.int64)[chosen])


class DigitsCNN(nn.Sequential):
    """Two 3x3 convolutions, one pooling and two linear layers: (N, 1, 8, 8) to the logits (N, 10).

    With the default ``width`` 151,306 parameters, nearly all in the first linear layer.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, 10),
        )
