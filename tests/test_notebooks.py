"""The notebook of examples/ runs from top to bottom, and shows the pictures that it stores."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "dgc_in_five_minutes.ipynb"


def kinds(notebook: Any) -> list[list[str]]:
    """The kind of every output of each cell: printed text, or the data of a picture."""
    return [
        sorted("picture" if "image/png" in output.get("data", {}) else output.output_type for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stored = nbformat.read(NOTEBOOK, as_version=4)
    fresh = copy.deepcopy(stored)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = nbclient.NotebookClient(
        fresh, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()  # raises CellExecutionError for an error, and for an assert that fails
    assert kinds(fresh) == kinds(stored)
    assert sum(kind == ["picture"] for kind in kinds(fresh)) >= 2
