"""The notebook: it runs from top to bottom, learns, and shows its curves while it does."""

import base64
import os
import re
import sys
from pathlib import Path

import pytest

from tests.callbacks.replay import Replay
from tests.tiny import tiny_config
from trl_ext.callbacks import LivePlotCallback

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
    for cell in notebook.cells:
        cell.outputs = [] if cell.cell_type == "code" else cell.get("outputs")
        if cell.cell_type != "code":
            del cell["outputs"]
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (trains,) = [cell for cell in cells if "trainer.train()" in cell.source]
    (curves,) = pictures(trains)  # redrawn in its place, with no table beside it
    assert base64.b64decode(curves).startswith(PNG) and "<table" not in str(trains.outputs)
    assert sum(map(len, committed)) == 1  # as it is shown to who does not run it
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    before, after = map(float, re.search(r"eval_objective/scores: (\S+) → (\S+)", said).groups())
    assert after > before + 0.5
    assert (tmp_path / "outputs" / "quickstart-notebook" / "report.html").is_file()


@pytest.mark.slow
def test_the_live_plot_redraws_one_picture_while_it_trains(tmp_path, monkeypatch):
    display = pytest.importorskip("IPython.display")
    drawn = []

    class Handle:
        def update(self, picture):
            drawn.append(("again", picture.data))

    def show(picture, display_id):
        drawn.append(("first", picture.data))
        return Handle()

    monkeypatch.setattr(display, "display", show)
    run = Replay(tiny_config(tmp_path), LivePlotCallback(seconds=0, panels=("scores", "loss", "no such key")))
    for step in range(1, 4):
        run.log(step, logs={"objective/scores": step, "loss": 1 / step})
    run.fire("on_train_end")
    run.log(4, logs={"eval_objective/scores": 1.0})  # an evaluation by hand
    assert [how for how, _ in drawn] == ["first", "again", "again", "again"]
    assert all(data.startswith(PNG) for _, data in drawn) and len({data for _, data in drawn[:3]}) == 3


def test_without_ipython_the_live_plot_says_what_to_install(monkeypatch):
    monkeypatch.setattr("trl_ext.upstream.packages.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="LivePlotCallback needs IPython, which is not installed"):
        LivePlotCallback()
