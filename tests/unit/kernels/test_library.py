"""The library of loops in C: when it is used, how threads share its work, and what it reads and writes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dgcopt import kernels
from dgcopt.errors import ConfigError
from dgcopt.kernels.native import library
from tests.support.oracle import (
    assert_same_bits,
    built,
    native,
    numbers,
    specification,
)

KERNELS = Path(kernels.__file__).parent


@built
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_what_is_not_cut_by_blocks(threads, monkeypatch):
    """Tiles, chunks and rows: each is worked on once, by one thread."""
    cuts: list[int] = []
    pool = library._pool
    monkeypatch.setattr(library, "_pool", lambda *args: cuts.append(args[1]) or pool(*args))
    shapes = [(0, 70, 2000), (140_032, 500, 700), (490_048, 3, 5)]
    flat, other = (numbers(490_112, torch.float32, "normal", seed) for seed in range(2))
    spans = [(first, min(first + 4096, stop)) for first in range(0, 490_112, 4096) for stop in [490_112]]
    chunks, matrices = kernels.Chunks(spans, [7] * len(spans), flat.device), kernels.Matrices(shapes)
    left, right = (
        numbers(3000, torch.float32, "normal", 2).view(-1, 3),
        numbers(1500, torch.float32, "normal", 3).view(-1, 3),
    )
    results = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for of in (native, specification):
            frequencies, again, sums, product = (torch.zeros(n) for n in (490_112, 490_112, 490_112, 500_000))
            of.dct(flat, matrices, frequencies)
            of.inverse_dct(frequencies, matrices, again, "set")
            found = of.add_and_select_chunks(flat, other, 0.9, sums, chunks)
            of.put_product(left, right, product, None)
            results.append((frequencies, again, sums, product, found[1]))
            assert torch.equal(sums[found[0]], found[1])
    finally:
        torch.set_num_threads(before)
    for mine, specified in zip(*results, strict=True):
        assert_same_bits(mine, specified)
    assert len(cuts) == (0 if threads == 1 else 2 * 4)  # two helpers of each loop


def run(code: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_environment_chooses(tmp_path):
    show = "from dgcopt import kernels; print(repr(kernels.instructions()))"
    assert run(show, DGCOPT_KERNELS="torch") == "''"
    with pytest.raises(AssertionError, match="DGCOPT_KERNELS must be"):
        run(show, DGCOPT_KERNELS="fast")


def test_without_the_library_everything_runs_in_torch(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("DGCOPT_KERNELS", raising=False)
    monkeypatch.setattr(library, "_LIBRARY", tmp_path / "missing.so")
    library._library.cache_clear()
    try:
        with caplog.at_level("INFO", "dgcopt"):
            assert kernels.instructions() == "" and kernels.instructions() == ""
            assert kernels.pack_small(torch.ones(8, dtype=torch.uint8), 1).tolist() == [255]
        told = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert [level for level, _ in told] == ["WARNING"], "once in a process"
        assert f"compiled loops are missing ({tmp_path / 'missing.so'})" in told[0][1]
        assert "`python setup.py build_ext --inplace --force`" in told[0][1]
        monkeypatch.setenv("DGCOPT_KERNELS", "native")
        library._library.cache_clear()
        with pytest.raises(ConfigError, match="loops are missing"):
            kernels.instructions()
    finally:
        library._library.cache_clear()


@pytest.mark.parametrize("why", ["processor", "platform"])
def test_no_warning_without_an_expected_library(why, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("DGCOPT_KERNELS", raising=False)
    if why == "platform":
        monkeypatch.setattr(library, "_LIBRARY", tmp_path / "missing.so")
        monkeypatch.setattr(library.sys, "platform", "darwin")
    else:
        monkeypatch.setattr(library.ctypes, "CDLL", lambda _: None)
        monkeypatch.setattr(library, "_text", lambda *_: "")
    library._library.cache_clear()
    try:
        with caplog.at_level("INFO", "dgcopt"):
            assert kernels.instructions() == ""
        words = {"platform": "are for Linux only", "processor": "need a processor with"}[why]
        assert [record.levelname for record in caplog.records] == ["INFO"] and words in caplog.text
    finally:
        library._library.cache_clear()


@built
def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch, caplog):
    """As after an update of an editable install: what is missing in it would end training with an AttributeError."""
    monkeypatch.delenv("DGCOPT_KERNELS", raising=False)
    elsewhere = tmp_path / "kernels"
    shutil.copytree(KERNELS, elsewhere, ignore=shutil.ignore_patterns("*.so", "*.py"))
    monkeypatch.setattr(library, "__file__", str(elsewhere / "native" / "library.py"))
    library._library.cache_clear()
    try:
        assert kernels.instructions()
        (elsewhere / "memory" / "native.h").write_text("/* newer */")
        library._library.cache_clear()
        with caplog.at_level("INFO", "dgcopt"):
            assert kernels.instructions() == ""
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "are older than their sources" in caplog.text and "install dgcopt again" in caplog.text
    finally:
        library._library.cache_clear()


@built
def test_under_sanitizers(tmp_path):
    """The loops read and write nothing but what they are given, and do nothing that C leaves undefined."""
    compiler = shutil.which("gcc") or pytest.skip("no gcc, whose sanitizers this uses")
    sanitized = tmp_path / "libdgcopt.so"
    flags = ["-g1", "-O0", "-ffp-contract=off", "-shared", "-fPIC", "-fsanitize=address,undefined"]
    flags.append("-fno-sanitize-recover=all")
    # of the instruction sets only the one that this processor runs: each takes a quarter of a minute
    sets = re.compile(r"#define TARGET.*?#define SET (\w+)\n.*?#undef SET\n", re.DOTALL)
    whole = (KERNELS / "native" / "native.c").read_text()
    source = tmp_path / "native.c"
    source.write_text(sets.sub(lambda found: found[0] * (found[1] == kernels.instructions()), whole))
    assert len(source.read_text()) < len(whole)
    build = subprocess.run(
        [compiler, *flags, f"-I{KERNELS / 'native'}", source, "-o", sanitized], capture_output=True, text=True
    )
    if build.returncode:
        pytest.skip(f"gcc has no sanitizers here: {build.stderr[-200:]}")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    code = f"""
import importlib, pathlib, sys
from dgcopt.kernels.native import library
library._LIBRARY = pathlib.Path({str(sanitized)!r})
here = pathlib.Path({str(Path(__file__).parent)!r})
sys.path.insert(0, str(here.parents[2]))
for path in sorted(here.glob("test_*.py")):
    for name, test in vars(importlib.import_module("tests.unit.kernels." + path.stem)).items():
        if name.startswith("test_") and getattr(test, "in_c", test).__dict__.get("is_hypothesis_test"):
            getattr(test, "in_c", test)()
print("clean", library.instructions())
"""
    env = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "DGCOPT_TEST_EXAMPLES": "30"}
    assert run(code, DGCOPT_KERNELS="native", **env) == f"clean {kernels.instructions()}"
