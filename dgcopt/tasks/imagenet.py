"""ImageNet from class folders, and the networks for it, through torchvision, which is imported only when used."""

from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.data import Dataset


def import_torchvision() -> Any:
    """Import torchvision; raise ImportError with the remedy if it is missing or built for another torch."""
    try:
        import torchvision
    except (ImportError, RuntimeError, OSError) as error:  # the last two: its binary part does not fit
        raise ImportError(
            f"ImageNet needs torchvision, which does not load here ({error}); install the build that matches this torch"
        ) from error
    return torchvision


class ImageNet(Dataset[tuple[Tensor, int]]):
    """The ILSVRC-2012 images in ``root/train/<class>/`` and ``root/val/<class>/`` as ``(image, label)``.

    Images are float32 of shape (3, size, size), normalised per channel; labels number the class folders in sorted
    order. Training images are a random crop of 8-100 % of the area, mirrored every other time; validation images
    are the central crop after the shorter side was scaled to size * 256 / 224 pixels.

    Raises FileNotFoundError when ``root`` lacks the split's folder or it has no class folders, and ImportError
    without torchvision.

    Source: Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, IJCV 2015.
    """

    def __init__(self, root: str = "data/imagenet", split: Literal["train", "val"] = "train", size: int = 224) -> None:
        folder = Path(root, split)
        if not folder.is_dir() or not any(entry.is_dir() for entry in folder.iterdir()):
            raise FileNotFoundError(
                f"no ImageNet in {root}: expected {folder} with one folder of images per class, such as n01440764/; "
                "set --train_data.init_args.root and --test_data.init_args.root"
            )
        torchvision = import_torchvision()
        from torchvision import transforms

        crop = (
            [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
            if split == "train"
            else [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
        )
        normalise = transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        transform = transforms.Compose([*crop, transforms.ToTensor(), normalise])
        self.images = torchvision.datasets.ImageFolder(str(folder), transform)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index]


def network(name: str = "resnet50", classes: int = 1000) -> nn.Module:
    """Return an untrained classification network of torchvision by its name there: "resnet50", "vgg16_bn" and the like.

    ``torchvision.models.resnet50`` as class_path is the same; this one needs torchvision only when it is built.
    Raises ValueError for a name that torchvision does not have, and ImportError without torchvision.
    """
    return import_torchvision().models.get_model(name, num_classes=classes)
