"""CIFAR-10 in its binary format, and the residual networks that He et al. trained on it."""

import tarfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

_FOLDER, _ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
_FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes, row by row
_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)  # of the 50,000 training images
_STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


def read_files(root: str, names: list[str]) -> list[bytes]:
    """Return the named files of the binary version, from ``root/cifar-10-batches-bin`` or
    ``root/cifar-10-binary.tar.gz``.

    Raises FileNotFoundError, with the files expected and the setting, when neither holds all of them,
    and ValueError when the archive is damaged.
    """
    folder, archive = Path(root, _FOLDER), Path(root, _ARCHIVE)
    if all((folder / name).is_file() for name in names):
        return [(folder / name).read_bytes() for name in names]
    if archive.is_file():
        try:
            with tarfile.open(archive) as tar:
                members = {Path(member.name).name: member for member in tar if member.isfile()}
                streams = [tar.extractfile(members[name]) for name in names if name in members]
                found = [stream.read() for stream in streams if stream]
        except (tarfile.TarError, zlib.error, EOFError) as error:
            raise ValueError(f"{archive} is damaged: {error}") from error
        if len(found) == len(names):
            return found
    raise FileNotFoundError(
        f"no CIFAR-10 in {root}: expected {_FOLDER}/ with {', '.join(names)}, or {_ARCHIVE} (the 'binary version' of "
        "https://www.cs.toronto.edu/~kriz/cifar.html); set --train_data.init_args.root and --test_data.init_args.root"
    )


class CIFAR10(Dataset[tuple[Tensor, int]]):
    """The 60,000 32x32 colour images in ten classes, read from the binary version, as ``(image, label)``.

    Images are float32 of shape (3, 32, 32), normalised per channel. In the training split each is padded by four
    zeros on every side, cropped at random to 32x32 and mirrored every other time (He et al., section 4.2), drawing
    from torch's global generator.

    Raises FileNotFoundError when ``root`` does not hold the files and ValueError when one of them is damaged.

    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """

    def __init__(self, root: str = "data/cifar10", split: Literal["train", "test"] = "train") -> None:
        self.augment = split == "train"
        batches = []
        for name, content in zip(_FILES[split], read_files(root, _FILES[split]), strict=True):
            if not content or len(content) % _RECORD:
                raise ValueError(f"{name} in {root} is damaged: {len(content)} bytes, not a multiple of {_RECORD}")
            batches.append(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, _RECORD))
        records = torch.cat(batches)
        self.labels = records[:, 0].tolist()
        if max(self.labels) > 9:
            raise ValueError(f"CIFAR-10 in {root} is damaged: it holds the label {max(self.labels)}, expected 0 to 9")
        self.images = records[:, 1:].unflatten(1, (3, 32, 32)).contiguous()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = (self.images[index] / 255 - _MEAN) / _STD
        if self.augment:
            top, left = torch.randint(9, (2,)).tolist()
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        return image, self.labels[index]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation around the shortcut without parameters (option A).

    If the number of channels grows, the block halves the image and the shortcut fills the new channels with zeros.
    """

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.stride = 1 if channels == channels_in else 2
        self.new_channels = channels - channels_in
        self.conv1 = nn.Conv2d(channels_in, channels, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(y + F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels)))


class ResNet(nn.Sequential):
    """The CIFAR residual network of 6n + 2 layers: three stages of ``n`` blocks, (N, 3, 32, 32) to logits (N, 10).

    Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2, with option A shortcuts.
    """

    def __init__(self, n: int) -> None:
        channels = [16] + [16] * n + [32] * n + [64] * n
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            *(BasicBlock(before, after) for before, after in pairwise(channels)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet20() -> ResNet:
    """ResNet-20, 269,722 parameters."""
    return ResNet(3)


def resnet110() -> ResNet:
    """ResNet-110, 1,727,962 parameters."""
    return ResNet(18)
