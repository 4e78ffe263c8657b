import json

import pytest

from recipes.demo import ensembles
from recipes.demo.ensembles import flipped, main
from recipes.demo.seeds import in_words


def test_the_share_is_flipped_and_each_member_leaves_out_another_quarter():
    rows = [{"prompt": str(i), "chosen": "a", "rejected": "b"} for i in range(40)]
    whole = flipped(rows, 0.25, seed=3)
    assert [row["prompt"] for row in whole] == [row["prompt"] for row in rows]
    assert sum(row["chosen"] == "b" and row["rejected"] == "a" for row in whole) == 10
    left_out = [[row for row in whole if row not in flipped(rows, 0.25, seed=3, left_out=i)] for i in range(4)]
    assert sorted((row for part in left_out for row in part), key=lambda row: int(row["prompt"])) == whole


def test_an_interval_is_students():
    assert in_words([1.0, 2.0, 3.0]) == "+2.000 ± 2.484"  # 4.303 · 1 / √3


def test_each_reward_is_trained_on_in_each_world(monkeypatch, tmp_path):
    asked = []

    def train(demo, name, options, proxy):
        asked.append((demo.seed, name, json.loads(proxy[1])))
        return tmp_path / name

    monkeypatch.setattr(ensembles, "noisy_reward_stage", lambda demo, name, options, rows: demo.folder / name)
    monkeypatch.setattr(ensembles, "ppo_stage", train)
    gold = {"single": 0.2, "mean": 0.3, "WCO": 0.5, "UWO": 0.1}
    monkeypatch.setattr(
        ensembles,
        "measured",
        lambda folder: (
            dict.fromkeys(("gold_sft", "gold_peak", "proxy_end", "kl_end"), 0.0)
            | {"gold_end": gold[folder.name.split("-")[1]]}
        ),
    )
    main(["--seeds", "0", "1", "--output_dir", str(tmp_path)])
    assert [name for seed, name, _ in asked if seed == 1] == [f"unguarded-{name}-0" for name in gold]
    single, worst = asked[0][2]["ModelReward"]["model"], asked[2][2]["EnsembleReward"]
    assert single.endswith("seed-0/reward-single") and worst["combine"] == "min" and len(worst["members"]) == 4
    lines = (tmp_path / "ensembles.md").read_text().splitlines()
    assert lines[4].split(" | ")[1:5:3] == ["WCO", "+0.300 ± 0.000"]
    assert (tmp_path / "ensembles.csv").read_text().count("\n") == 9


@pytest.mark.parametrize("flags", [["--seeds", "1", "1"], ["--flipped_share", "0.6"], ["--kl_coefs", "-1"]])
def test_a_grid_that_makes_no_sense_is_refused(flags, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert "must be" in capsys.readouterr().err
