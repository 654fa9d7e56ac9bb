"""The tasks that train.py can be pointed at: what they read, how they split it, and the size of their models."""

import importlib
import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from dgcopt import ConfigError
from dgcopt.tasks import checks, cifar10, imagenet, stdlib_gpt

TRAIN_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def digits() -> ModuleType:
    pytest.importorskip("sklearn")
    return importlib.import_module("dgcopt.tasks.digits")


class TestDigits:
    def test_splits_are_disjoint_complete_and_repeatable(self, digits: ModuleType) -> None:
        train, test = digits.Digits("train"), digits.Digits("test")
        assert (len(train), len(test)) == (1438, 359)
        # Sorted by content, the two splits together are the whole set, so nothing is in both or in neither.
        both = torch.cat([train.tensors[0], test.tensors[0]]).flatten(1) * 16
        assert sorted(both.tolist()) == sorted(digits.load_digits().data.tolist())
        assert torch.equal(train.tensors[0], digits.Digits("train").tensors[0])

    def test_split_does_not_depend_on_the_global_seed(self, digits: ModuleType) -> None:
        torch.manual_seed(1)
        one = digits.Digits("test").tensors[1]
        torch.manual_seed(2)
        assert torch.equal(one, digits.Digits("test").tensors[1])

    def test_network(self, digits: ModuleType) -> None:
        image, label = digits.Digits()[0]
        assert image.shape == (1, 8, 8) and image.min() >= 0 and image.max() == 1 and label.dtype == torch.int64
        model = digits.DigitsCNN()
        assert parameters(model) == 151_306
        assert model(image[None]).shape == (1, 10)


class TestStdlibText:
    def test_split_by_file(self) -> None:
        everything = 10**9
        train = stdlib_gpt.StdlibText("train", max_bytes=everything)
        validation = stdlib_gpt.StdlibText("validation", max_bytes=everything)
        assert not set(train.files) & set(validation.files)
        files = sorted(train.files + validation.files)
        assert "argparse.py" in files and "json/decoder.py" in files
        assert not [file for file in files if "site-packages" in file or file.startswith("test/")]
        assert 0.08 < len(validation.files) / len(files) < 0.12

    def test_reads_files_in_the_order_of_their_paths(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        for number in range(10):
            (tmp_path / "b" / f"{number}.py").write_text(f"{number}" * 9)
        (tmp_path / "a.py").write_text("a" * 9)
        (tmp_path / "site-packages").mkdir()
        (tmp_path / "site-packages" / "c.py").write_text("c" * 9)
        train = stdlib_gpt.StdlibText("train", context=5, root=str(tmp_path))
        validation = stdlib_gpt.StdlibText("validation", context=5, root=str(tmp_path))
        assert train.files == ["a.py", *(f"b/{number}.py" for number in (0, 1, 2, 3, 4, 5, 6, 7, 9))]
        assert validation.files == ["b/8.py"]
        assert bytes(validation.text.tolist()) == b"888888888\0"

    def test_windows_are_shifted_by_one_and_do_not_overlap(self) -> None:
        data = stdlib_gpt.StdlibText("validation", context=32, max_bytes=50_000)
        (inputs, targets), (following, _) = data[0], data[1]
        assert inputs.dtype == torch.int64 and inputs.shape == targets.shape == (32,)
        assert torch.equal(inputs[1:], targets[:-1]) and targets[-1] == following[0]
        assert data[len(data) - 1][1].shape == (32,)
        assert len([*data]) == len(data), "it can be gone through"
        assert len(data.text) <= 50_000

    def test_no_source(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=str(tmp_path)):
            stdlib_gpt.StdlibText(root=str(tmp_path))

    def test_gpt(self) -> None:
        model = stdlib_gpt.CharGPT()
        assert parameters(model) == 644_224
        tokens = torch.randint(256, (2, 20))
        logits = model(tokens)
        assert logits.shape == (2, 20, 256)
        # Causal: what comes later does not change what is predicted earlier.
        changed = tokens.clone()
        changed[:, 10] = (changed[:, 10] + 1) % 256
        torch.testing.assert_close(model(changed)[:, :10], logits[:, :10])
        assert not torch.allclose(model(changed)[:, 10:], logits[:, 10:])
        with pytest.raises(ValueError, match="heads"):
            stdlib_gpt.CharGPT(heads=3)


@pytest.fixture
def batches() -> dict[str, bytes]:
    """The six files of the binary version, two images each: red holds 10 x the number, green 1, blue 2."""
    files = {}
    for number, name in enumerate([*TRAIN_FILES, "test_batch.bin"]):
        record = bytes([number]) + bytes([10 * number]) * 1024 + bytes([1]) * 1024 + bytes([2]) * 1024
        files[name] = record * 2
    return files


@pytest.fixture(params=["folder", "archive"])
def cifar_root(request: pytest.FixtureRequest, tmp_path: Path, batches: dict[str, bytes]) -> Path:
    if request.param == "folder":
        (tmp_path / "cifar-10-batches-bin").mkdir()
        for name, content in batches.items():
            (tmp_path / "cifar-10-batches-bin" / name).write_bytes(content)
    else:
        with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
            for name, content in batches.items():
                info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return tmp_path


class TestCIFAR10:
    def test_reads_folder_and_archive(self, cifar_root: Path) -> None:
        train, test = cifar10.CIFAR10(str(cifar_root), "train"), cifar10.CIFAR10(str(cifar_root), "test")
        assert train.labels == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and test.labels == [5, 5]
        image, label = test[1]
        assert label == 5 and image.shape == (3, 32, 32) and image.dtype == torch.float32
        expected = (torch.tensor([50.0, 1.0, 2.0]) / 255 - cifar10._MEAN.flatten()) / cifar10._STD.flatten()
        torch.testing.assert_close(image, expected.view(3, 1, 1).expand(3, 32, 32))

    def test_augmentation_shifts_by_up_to_four_and_mirrors(self, cifar_root: Path) -> None:
        train = cifar10.CIFAR10(str(cifar_root), "train")
        train.images = torch.arange(3 * 32 * 32).remainder(251).view(1, 3, 32, 32).to(torch.uint8)
        train.augment = False
        plain, _ = train[0]
        train.augment = True
        torch.manual_seed(0)
        padded = torch.nn.functional.pad(plain, (4, 4, 4, 4))
        seen = set()
        for _ in range(200):
            image, _ = train[0]
            matches = [
                (top, left, mirrored)
                for top in range(9)
                for left in range(9)
                for mirrored in (False, True)
                if torch.equal(image.flip(-1) if mirrored else image, padded[:, top : top + 32, left : left + 32])
            ]
            assert len(matches) == 1
            seen.add(matches[0])
        tops, lefts, mirrors = (set(values) for values in zip(*seen, strict=True))
        assert tops == lefts == set(range(9)) and mirrors == {False, True}

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as error:
            cifar10.CIFAR10(str(tmp_path / "nowhere"))
        message = str(error.value)
        assert "\n" not in message
        assert str(tmp_path / "nowhere") in message and "--train_data.init_args.root" in message
        assert "cifar-10-batches-bin" in message and "data_batch_5.bin" in message

    def test_one_file_missing(self, tmp_path: Path, batches: dict[str, bytes]) -> None:
        (tmp_path / "cifar-10-batches-bin").mkdir()
        for name in TRAIN_FILES[:-1]:
            (tmp_path / "cifar-10-batches-bin" / name).write_bytes(batches[name])
        with pytest.raises(FileNotFoundError, match="data_batch_5"):
            cifar10.CIFAR10(str(tmp_path))

    @pytest.mark.parametrize("content", [b"", b"\0" * 3072, b"\x0a" + b"\0" * 3072], ids=["empty", "cut", "label"])
    def test_damaged_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "cifar-10-batches-bin").mkdir()
        (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(content)
        with pytest.raises(ValueError, match="damaged"):
            cifar10.CIFAR10(str(tmp_path), "test")

    @pytest.mark.parametrize("keep", [0, 10, 100])
    def test_damaged_archive(self, tmp_path: Path, batches: dict[str, bytes], keep: int) -> None:
        archive = tmp_path / "cifar-10-binary.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            info = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
            info.size = len(batches["test_batch.bin"])
            tar.addfile(info, io.BytesIO(batches["test_batch.bin"]))
        archive.write_bytes(archive.read_bytes()[:keep])
        with pytest.raises(ValueError, match="damaged"):
            cifar10.CIFAR10(str(tmp_path), "test")

    def test_networks(self) -> None:
        small, large = cifar10.resnet20(), cifar10.resnet110()
        assert parameters(small) == 269_722
        assert parameters(large) == 1_727_962
        # 6n + 2 layers: every convolution and the linear one.
        for model, layers in ((small, 20), (large, 110)):
            assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == layers
        assert small(torch.randn(2, 3, 32, 32)).shape == (2, 10)

    def test_shortcut_halves_and_fills_with_zeros(self) -> None:
        block = cifar10.BasicBlock(4, 8)
        nn.init.zeros_(block.conv2.weight)
        x = torch.rand(2, 4, 6, 6)
        y = block.eval()(x)
        assert torch.equal(y[:, :4], x[:, :, ::2, ::2]) and not y[:, 4:].any()


def image_folder(root: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for number, name in enumerate(("n02", "n01")):
            (root / split / name).mkdir(parents=True)
            for copy in range(2):
                image.new("RGB", (300, 260), (200 * number, 0, 0)).save(root / split / name / f"{copy}.JPEG")


class TestImageNet:
    def test_reads_class_folders(self, tmp_path: Path) -> None:
        try:
            imagenet.import_torchvision()
        except ImportError as error:
            pytest.skip(str(error))
        image_folder(tmp_path)
        train, validation = imagenet.ImageNet(str(tmp_path)), imagenet.ImageNet(str(tmp_path), "val")
        assert len(train) == len(validation) == 4
        assert [validation[index][1] for index in range(4)] == [0, 0, 1, 1]
        image, _ = validation[0]  # n01 comes first and is the reddish one
        assert image.shape == (3, 224, 224) and image.dtype == torch.float32
        torch.testing.assert_close(image[:, 100, 100], torch.tensor([1.307, -2.036, -1.804]), atol=0.03, rtol=0)
        assert train[0][0].shape == (3, 224, 224)
        assert parameters(imagenet.network("resnet18", classes=2)) == 11_177_538

    def test_no_torchvision(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        image_folder(tmp_path)
        monkeypatch.setitem(sys.modules, "torchvision", None)
        for use in (lambda: imagenet.ImageNet(str(tmp_path)), imagenet.network):
            with pytest.raises(ImportError, match="install the build that matches"):
                use()

    @pytest.mark.parametrize("empty", [False, True])
    def test_missing(self, tmp_path: Path, empty: bool) -> None:
        if empty:
            (tmp_path / "train").mkdir()
        with pytest.raises(FileNotFoundError) as error:
            imagenet.ImageNet(str(tmp_path))
        message = str(error.value)
        assert "\n" not in message
        assert str(tmp_path / "train") in message and "--train_data.init_args.root" in message


@pytest.mark.parametrize("context", [checks.building, lambda: checks.fitting(torch.ones(2, 3), torch.ones(2))])
def test_an_error_in_torch_has_no_place_in_the_checks_of_train_py(context: Callable[[], object]) -> None:
    training = compile("with context(): layer(batch)", "train.py", "exec")
    with pytest.raises(ConfigError, match="mat1 and mat2") as told:
        exec(training, {"context": context, "layer": nn.Linear(4, 5), "batch": torch.ones(2, 3)})
    assert "(at" not in str(told.value)


def test_a_history_outlasts_a_resumption_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was emptied before what is kept of it was written."""
    pytest.importorskip("tensorboard")
    record = importlib.import_module("dgcopt.tasks.record")
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')

    def full(self: Path, text: str) -> None:
        self.open("w").close()
        raise OSError(28, "No space left on device", str(self))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "write_text", full)
        record.Record(tmp_path, 2, 4)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    record.Record(tmp_path, 2, 4).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert {one.name for one in tmp_path.iterdir()} == {"history.jsonl", "tensorboard"}
