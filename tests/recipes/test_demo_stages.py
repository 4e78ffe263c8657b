import re
import shutil

import pytest

from recipes.demo import run
from recipes.demo.stages import MARKER, DemoArguments, build


def test_an_interrupted_stage_is_not_complete(tmp_path):
    def interrupted(folder):
        (folder / "half").write_text("…")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "stage", {}, interrupted)
    assert not (tmp_path / "stage").exists()
    build(tmp_path / "stage", {}, lambda folder: (folder / "file").write_text("whole"))
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == sorted([MARKER, "file"])
    assert not (tmp_path / "stage.partial").exists()


@pytest.mark.slow
def test_the_short_demo_runs_reports_and_resumes(tmp_path, capsys):
    """One test, so that the demo is built once."""
    folder = tmp_path
    run.main(["--short", "--output_dir", str(folder)])
    demo = folder / "seed-0-short"
    summary = capsys.readouterr().out.split("Guarded PPO is better")[-1]
    assert f"Report: {demo / 'report.html'}" in summary and "|" not in summary and not (demo / "report.md").exists()
    report = (demo / "report.html").read_text()
    assert "64 held-out prompts" in report and report.count("data:image/png;base64,") == 1
    links = re.findall(r'href="([^"]+)"', report)
    assert len(links) == 5
    assert all((demo / link).is_file() for link in links)
    # The same command again trains nothing and gives the same report
    models = {path: path.stat().st_mtime_ns for path in demo.glob("*/model.safetensors")}
    capsys.readouterr()
    run.main(["--short", "--output_dir", str(folder)])
    assert capsys.readouterr().out.count("complete already") == 5
    assert (demo / "report.html").read_text() == report
    assert {path: path.stat().st_mtime_ns for path in models} == models and len(models) == 4

    # Interrupted between training and the marker: PPOTrainer finds its checkpoint
    (demo / "unguarded" / MARKER).unlink()
    (demo / "report.html").unlink()
    run.main(["--short", "--output_dir", str(folder)])
    output = capsys.readouterr().out
    assert output.count("complete already") == 4
    assert "Training is complete, at step 6" in output
    seconds = r'(?<=data-name="seconds">)\d+'
    assert re.sub(seconds, "", (demo / "report.html").read_text()) == re.sub(seconds, "", report)

    # The whole demo has another folder; other settings are refused
    assert DemoArguments(output_dir=str(folder)).folder == folder / "seed-0"
    with pytest.raises(SystemExit, match="2"):
        run.main(["--short", "--planted_share", "0", "--output_dir", str(folder)])
    assert "world was built with other settings (" in capsys.readouterr().err

    # One stage alone builds the missing ones before it, and prints its folder
    before = {name: (demo / name / "model.safetensors").read_bytes() for name in ("sft", "reward")}
    for name in before:
        shutil.rmtree(demo / name)
    for is_missing in (True, False):
        run.main(["--short", "--output_dir", str(folder), "--stage", "reward"])
        output = capsys.readouterr().out
        assert (f"Building {demo / 'sft'}." in output) == is_missing
        assert f"reward: {demo / 'reward'} (" in output
    for name, weights in before.items():  # the same run as in the whole demo
        assert (demo / name / "model.safetensors").read_bytes() == weights
