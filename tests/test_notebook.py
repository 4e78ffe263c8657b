"""The notebook runs from top to bottom, learns, and shows its curves."""

import base64
import os
import re
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
PNG = b"\x89PNG"


def pictures(cell):
    return [output["data"]["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]


@pytest.mark.slow
def test_the_notebook_learns_and_shows_its_curves(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), *sys.path]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = [pictures(cell) for cell in notebook.cells if cell.cell_type == "code"]
    for cell in notebook.cells:  # half of its episodes and a quarter of its plots suffice
        for whole, less in (("total_episodes=2048", "total_episodes=1024"), ("logging_steps=8", "logging_steps=32")):
            cell.source = cell.source.replace(whole, less)
        cell.outputs = [] if cell.cell_type == "code" else cell.get("outputs")
        if cell.cell_type != "code":
            del cell["outputs"]
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (trains,) = [cell for cell in cells if "trainer.train()" in cell.source]
    (curves,) = pictures(trains)  # without a table beside it
    assert base64.b64decode(curves).startswith(PNG) and "<table" not in str(trains.outputs)
    assert sum(map(len, committed)) == 1  # the outputs that are shown on GitHub
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    before, after = map(float, re.search(r"eval_objective/scores: (\S+) → (\S+)", said).groups())
    assert after > before + 0.5
    assert (tmp_path / "outputs" / "quickstart-notebook" / "report.html").is_file()
