"""Whether a folder may be written, and whether what lies there is of the run that ended."""

import os

import pytest
from transformers.trainer_utils import TrainOutput

from trl_ext.marker import MARKER
from trl_ext.output_dir import check_output_dir, is_evaluated


def test_a_finished_run_is_written_over_on_request_only(tmp_path):
    (tmp_path / "train_results.json").write_text("{}")
    for resume in (None, "true"):
        with pytest.raises(FileExistsError, match="holds a finished run without checkpoints"):
            check_output_dir(tmp_path, resume)
    for resume in ("false", "False"):
        check_output_dir(tmp_path, resume)
    (tmp_path / "checkpoint-3").mkdir()  # it is gone on with
    check_output_dir(tmp_path)


def test_a_run_is_evaluated_if_it_was_complete_and_all_its_results_are_newer_than_its_checkpoints(tmp_path):
    loaded, trained = TrainOutput(4, float("nan"), {}), TrainOutput(4, 0.5, {"train_loss": 0.5})
    patterns = ("eval_results.json", "margins*.png")
    assert not is_evaluated(tmp_path, loaded)
    (tmp_path / "eval_results.json").write_text("{}")
    assert is_evaluated(tmp_path, loaded) and not is_evaluated(tmp_path, trained)
    assert not is_evaluated(tmp_path, loaded, *patterns)
    (tmp_path / "margins_a.png").write_text("")
    assert is_evaluated(tmp_path, loaded, *patterns)

    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / MARKER).write_text("{}")
    for age, evaluated in ((-60, True), (60, False)):
        now = os.path.getmtime(tmp_path / "eval_results.json")
        os.utime(tmp_path / "checkpoint-4" / MARKER, (now + age, now + age))
        assert is_evaluated(tmp_path, loaded) == evaluated
