import pytest

from recipes.demo import staleness
from recipes.demo.staleness import main


def test_each_world_is_trained_with_rollouts_of_each_age(monkeypatch, tmp_path):
    asked = []

    def train(demo, name, options):
        asked.append((demo.seed, name, dict(zip(options[::2], options[1::2], strict=True))))
        return tmp_path / name

    gold = {"0": 0.6, "1": 0.5, "4": 0.2}
    same = dict.fromkeys(("gold_sft", "proxy_sft", "proxy", "kl", "staleness", "sampling_kl", "clipfrac"), 0.0)
    monkeypatch.setattr(staleness, "ppo_stage", train)
    monkeypatch.setattr(staleness, "measured", lambda folder: same | {"gold": gold[folder.name.split("-")[2]]})
    ages = ["--rollouts_ahead", "0", "1", "4", "--corrections", "auto", "none"]
    main(["--seeds", "0", "1", *ages, "--output_dir", str(tmp_path)])
    settings = ("--rollouts_ahead", "--importance_sampling_mode")
    runs = [(name, *map(options.get, settings)) for seed, name, options in asked if seed == 1]
    assert runs == [
        ("unguarded-ahead-0-none", 0, None),
        ("unguarded-ahead-1-auto", 1, "auto"),
        ("unguarded-ahead-1-none", 1, "none"),
        ("unguarded-ahead-4-auto", 4, "auto"),
        ("unguarded-ahead-4-none", 4, "none"),
    ]
    lines = (tmp_path / "staleness.md").read_text().splitlines()
    assert lines[5].split(" | ")[:4] == ["| 4", "auto", "+0.200 ± 0.000", "-0.400 ± 0.000"]
    assert (tmp_path / "staleness.csv").read_text().count("\n") == 11


@pytest.mark.parametrize("flags", [["--seeds", "1", "1"], ["--rollouts_ahead", "1"], ["--rollouts_ahead", "0", "-1"]])
def test_a_grid_that_makes_no_sense_is_refused(flags, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert "must be" in capsys.readouterr().err
