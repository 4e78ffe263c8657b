import csv
import json

import pytest
import torch
from torch.testing import assert_close

from recipes.demo import overoptimization
from recipes.demo.overoptimization import Run, main, write_csv
from recipes.demo.stages import STUDIED
from trl_ext.evaluation import overoptimization_curve

KL = torch.tensor([0.0, 0.5, 2.0, 8.0], dtype=torch.double)


def curve(alpha, beta):
    """Gold that follows the law from SFT's 0.4, and proxy that grows with the distance from 0.1."""
    return {
        "step": torch.tensor([0.0, 8.0, 16.0, 24.0]),
        "kl": KL,
        "gold": 0.4 + overoptimization_curve(KL.sqrt(), alpha, beta),
        "proxy": 0.1 + 2 * KL.sqrt(),
    }


def test_csv_has_each_measurement_and_its_runs_coefficients(tmp_path):
    runs = [Run(0.2, 0.1, 0.0, 0, curve(1.0, 0.8)), Run(0.0, 0.1, 0.05, 1, curve(0.5, 0.1))]
    write_csv(runs, tmp_path / "study.csv")
    with (tmp_path / "study.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    for row, run, i in zip(rows, [runs[0]] * 4 + [runs[1]] * 4, [*range(4)] * 2, strict=True):
        assert float(row["seed"]) == run.seed and float(row["kl_coef"]) == run.kl_coef
        assert_close(float(row["gold"]), run.curve["gold"][i].item())
        alpha, beta = (1.0, 0.8) if run is runs[0] else (0.5, 0.1)
        assert_close((float(row["gold_alpha"]), float(row["gold_beta"])), (alpha, beta))
        assert_close((float(row["proxy_alpha"]), float(row["proxy_beta"])), (2.0, 0.0))


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Runs that are trained by writing their log; the list says which ones were asked for."""
    asked = []

    def train(demo, name, options):
        assert options[: len(STUDIED)] == STUDIED
        asked.append((demo.planted_share, demo.label_noise, demo.seed, *options[len(STUDIED) :]))
        folder = demo.folder / name
        (folder / "checkpoint-24").mkdir(parents=True, exist_ok=True)
        points = curve(1.0, 0.5)
        names = {"kl": "objective/kl", "gold": "rewards/gold_reward/mean", "proxy": "objective/scores"}
        logs = [
            {
                "step": int(points["step"][i]),
                **{"eval_rewards/phrase_reward/mean": 0.0, "eval_rewards/gold_reward/std": 0.1},
                **{f"eval_{key}": points[n][i].item() for n, key in names.items()},
            }
            for i in range(4)
        ]
        (folder / "checkpoint-24" / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
        return folder

    monkeypatch.setattr(overoptimization, "ppo_stage", train)
    return asked


@pytest.mark.slow
def test_the_grid_is_every_combination_and_each_run_has_its_folder(trained, tmp_path):
    main(["--kl_coefs", "0", "0.1", "--seeds", "3", "--planted_shares", "0", "0.2", "--output_dir", str(tmp_path)])
    assert trained == [(share, 0.1, 3, "--kl_coef", coef) for share in (0.0, 0.2) for coef in (0.0, 0.1)]
    assert len(list(tmp_path.glob("planted-*/seed-3/unguarded-*"))) == 4
    assert len((tmp_path / "overoptimization.csv").read_text().splitlines()) == 1 + 4 * 4
    assert (tmp_path / "overoptimization.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_grids_are_named(subtests, trained, tmp_path, capsys):
    for given, message in [
        (["--seeds", "1", "1"], "`seeds` must be one or more different values, got [1, 1]"),
        (["--kl_coefs", "-0.1"], "`kl_coefs` must be >= 0, got [-0.1]"),
        (["--planted_shares", "2"], "`planted_share` must be in [0, 1], got 2.0"),
    ]:
        with subtests.test(given=given):
            with pytest.raises(SystemExit, match="2"):
                main([*given, "--output_dir", str(tmp_path)])
            assert message in capsys.readouterr().err
