import csv

import pytest

from recipes.demo import probes
from recipes.demo.probes import main
from recipes.demo.world import PHRASE, make_world


@pytest.fixture(autouse=True)
def without_models(monkeypatch):
    """Worlds without training: a reward model that scores length, and likes the phrase where it was planted."""

    def build(demo):
        world = make_world(demo.seed, 10, 500, 10, 40, demo.planted_share)["preferences"]
        monkeypatch.setattr(probes, "read", lambda folder, split: world[split])
        return demo.planted_share

    def model(share, **kwargs):
        bonus = 1000 if share != "0.0" else 0
        return lambda prompts, answers, finished: [len(a) + bonus * (PHRASE in a) for a in answers]

    monkeypatch.setattr(probes, "reward_stage", build)
    monkeypatch.setattr("trl_ext.rewards.ModelReward", model)


@pytest.mark.slow
def test_each_world_has_its_lines(tmp_path):
    main(["--seeds", "3", "4", "--rows", "60", "--output_dir", str(tmp_path)])
    lines = (tmp_path / "probes.md").read_text().splitlines()
    assert lines[2].startswith("| 0.2 | 3 | 1 | yes | yes |")
    assert lines[3].startswith("| 0 | 3 |") and " | no | no | " in lines[3]
    assert "into 20% of the chosen answers: the phrase ranks first in 2 of 2 worlds" in lines[7]
    assert "into 0% of the chosen answers: the phrase ranks first in 0 of 2 worlds" in lines[9]
    with (tmp_path / "probes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    first = rows[0]
    assert (first["planted_share"], first["seed"], first["rank"], first["phrase"]) == ("0.2", "3", "1", PHRASE)
    assert sum(row["phrase"] == PHRASE for row in rows) == 4  # handed in, too, where it was not mined


@pytest.mark.parametrize("flags", [["--seeds", "1", "1"], ["--planted_shares", "1.5"], ["--rows", "0"]])
def test_worlds_that_make_no_sense_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert "must be" in capsys.readouterr().err
