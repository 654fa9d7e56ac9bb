"""`python -m build` makes an sdist and a wheel that trains where there is no compiler, and none but torch around it."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dgcopt import __version__, kernels
from dgcopt.kernels.native import library

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "dgcopt/kernels").rglob("*.[ch]"))
PLACE = Path("dgcopt/kernels/libdgcopt.so")
LEFT_OUT = (".*", "runs", "data", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs", "examples", "site")

linux = pytest.mark.skipif(sys.platform != "linux", reason="wheels for other systems are pure Python")


def run(*words: str | Path, cwd: Path, path: str | None = None, **env: str) -> str:
    """The output of a command that must succeed, with nothing of this process's Python around it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DGCOPT_")) and k != "VIRTUAL_ENV"}
    kept |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **({} if path is None else {"PATH": path}), **env}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=kept, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def sources(folder: Path) -> Path:
    """A copy of the files that a build reads."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT, "*.so"))
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with both. A library of these very sources that is built already is not compiled once more."""
    tree = sources(tmp_path_factory.mktemp("sources") / "dgcopt")
    if kernels.in_use().startswith("native"):
        built = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / PLACE
        built.parent.mkdir(parents=True)
        shutil.copyfile(ROOT / PLACE, built)
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", cwd=tree)
    yield tree / "dist"
    shutil.rmtree(tree)


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def assert_fits(wheel: Path, machine: str) -> None:
    """Any Python, and a glibc of 2014."""
    assert wheel.name == f"dgcopt-{__version__}-py3-none-manylinux_2_17_{machine}.whl"
    assert PLACE.as_posix() in zipfile.ZipFile(wheel).namelist()
    told = run(Path(sys.executable).parent / "auditwheel", "show", wheel, cwd=wheel.parent)
    assert re.search(rf'is consistent with\s+the\s+following\s+platform tag: "manylinux_2_17_{machine}"', told), told


@linux
def test_the_wheel_fits_every_python_and_an_old_libc(wheel: Path) -> None:
    assert_fits(wheel, os.uname().machine)


def test_the_sdist_can_be_built(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*SOURCES, "setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names


def test_without_a_compiler_the_wheel_is_for_all(tmp_path: Path) -> None:
    tree = sources(tmp_path / "dgcopt")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", cwd=tree, CC="no-such-compiler")
    (wheel,) = (tree / "dist").iterdir()
    assert wheel.name == f"dgcopt-{__version__}-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


TRAIN = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Linear(300, 200)
loader = [(torch.randn(8, 300), torch.randint(200, (8,))) for _ in range(5)]
loss_fn = torch.nn.functional.cross_entropy
before = model.weight.detach().clone()
{code}
assert comm.size == 2 and comm.wire == "torch" and not torch.equal(before, model.weight)
assert optimizer.telemetry.steps == 5 and optimizer.telemetry.ratio > 50, optimizer.telemetry
dgcopt.check_replicas(model.named_parameters())
sys.stdout.write(f"trained by {{dgcopt.__file__}}\\n")
dgcopt.shutdown()
"""


@linux
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_it_trains_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    """The README's ten lines, pasted into an empty folder, by torchrun. Torch is borrowed from this environment."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    packages = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip())
    # one path, in which no further .pth is read: an editable dgcopt of this environment stays out of it
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    install = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    run(sys.executable, *install, cwd=tmp_path)
    assert not shutil.which("cc", path=str(python.parent)) and not shutil.which("gcc", path=str(python.parent))

    empty = tmp_path / "empty"
    empty.mkdir()
    told = run(python.with_name("dgcopt"), "env", cwd=empty, path=str(python.parent))
    assert f"native ({library.instructions()})" in told if library.instructions() else "torch, as" in told

    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (empty / "train.py").write_text(TRAIN.format(code=code))
    torchrun = (python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py")
    told = run(*torchrun, cwd=empty, path=str(python.parent))
    assert told.count(f"trained by {packages}") == 2, told


@linux
def test_a_wheel_for_aarch64(tmp_path: Path) -> None:
    """Cross-compiled by clang for the oldest glibc, with every loop that the library for this processor has."""
    pytest.importorskip("ziglang")
    tree = sources(tmp_path / "dgcopt")
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m ziglang cc -target aarch64-linux-gnu.2.17 "$@" -O1 -Werror\n'
    )
    compiler.chmod(0o755)
    target = {"CC": str(compiler), "LDSHARED": f"{compiler} -shared", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    run(sys.executable, "setup.py", "--quiet", "bdist_wheel", cwd=tree, **target)
    (wheel,) = (tree / "dist").iterdir()
    assert_fits(wheel, "aarch64")
    with zipfile.ZipFile(wheel) as archive:
        arm = Path(archive.extract(PLACE.as_posix(), tmp_path))
    machine, names = exported(arm)
    assert machine == "EM_AARCH64"
    if library.instructions() in ("avx2", "avx512"):
        here, expected = exported(ROOT / PLACE)
        assert here == "EM_X86_64"
        common = {name.removesuffix("_avx2") for name in expected if not name.endswith("_avx512")}
        assert {name.removesuffix("_neon") for name in names} == common


def exported(path: Path) -> tuple[str, set[str]]:
    """The processor of a library, and the functions that it shows."""
    from elftools.elf.elffile import ELFFile

    with open(path, "rb") as file:
        elf = ELFFile(file)

        def is_shown(symbol: Any) -> bool:
            info = symbol["st_info"]
            return info["type"] == "STT_FUNC" and info["bind"] == "STB_GLOBAL" and symbol["st_shndx"] != "SHN_UNDEF"

        symbols = elf.get_section_by_name(".dynsym").iter_symbols()
        found = {s.name for s in symbols if is_shown(s)}
        return elf["e_machine"], {name for name in found if not name.startswith("_")}


def test_elsewhere_kernels_say_why_they_run_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGCOPT_KERNELS", raising=False)
    monkeypatch.setattr(library, "_LIBRARY", ROOT / "dgcopt" / "no-such-library.so")
    for platform, words in (
        ("darwin", "are for Linux only"),
        ("win32", "are for Linux only"),
        ("linux", "are missing"),
    ):
        monkeypatch.setattr("sys.platform", platform)
        library._library.cache_clear()
        assert library.in_use().startswith("torch, as the compiled loops") and words in library.in_use()
    monkeypatch.undo()
    library._library.cache_clear()


def test_the_matrix_is_what_the_package_says_it_runs_on() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    told = re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    matrix = jobs["matrix"]["strategy"]["matrix"]
    assert matrix["python"] == told and setup["options"]["python_requires"] == f">={told[0]}"
    oldest = re.search(r"torch>=(\S+)", setup["options"]["install_requires"])
    assert oldest and matrix["torch"][0].startswith(oldest[1]) and len(matrix["torch"]) == 3
