import json

import pytest
from transformers import AutoModelForSequenceClassification

from recipes.demo import sao
from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.sao import ALGORITHMS, Run, chosen_rate, main, train
from recipes.demo.world import make_world


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """What was trained; an algorithm's proxy rises with its rate, and the seed moves the world, not what is gained."""
    asked = []

    def trained(run, sft, reward, prompts, output_dir):
        asked.append(run)
        gain = {"PPO": 1.0, "SAO": 3.0}.get(run.algorithm, 2.0) + 100 * run.learning_rate
        said = {f"{name}_{end}": 1.0 for name in ("kl", "length", "ended") for end in ("sft", "end")}
        said |= {"gold_sft": run.seed, "gold_end": run.seed + gain / 10, "proxy_sft": 0.0, "proxy_end": gain}
        return {"generated": run.tokens, "episodes": 10, **said}

    monkeypatch.setattr(sao, "train", trained)
    monkeypatch.setattr(sao, "sft_stage", lambda demo: demo.folder / "sft")
    monkeypatch.setattr(sao, "reward_stage", lambda demo: demo.folder / "reward")
    return asked


def test_rates_are_chosen_on_other_seeds_and_the_same_command_goes_on(runs, tmp_path):
    flags = ["--learning_rates", "1e-3", "1e-2", "--tuning_seeds", "7", "8", "--output_dir", str(tmp_path)]
    main([*flags, "--seeds", "0", "--algorithms", "PPO", "SAO"])
    assert len(runs) == 2 * 2 * 2 + 2
    assert {run.seed for run in runs[:8]} == {7, 8}
    assert [(run.algorithm, run.learning_rate, run.seed) for run in runs[8:]] == [("PPO", 1e-2, 0), ("SAO", 1e-2, 0)]
    main([*flags, "--seeds", "0", "1", "--algorithms", "PPO", "SAO", "PPO + lam_alpha"])
    assert [(run.algorithm, run.seed) for run in runs[10:]] == [
        ("PPO + lam_alpha", 0),
        ("PPO", 1),
        ("SAO", 1),
        ("PPO + lam_alpha", 1),
    ]
    lines = (tmp_path / "sao.md").read_text().splitlines()
    assert (
        "| SAO | 0.01 | +0.400 ± 0.000 | +4.000 ± 0.000 | +3.950 ± 0.000 | +1.000 ± 0.000 | 1.0 | 10.0 | 2 |" in lines
    )
    assert lines[-2:] == [
        "| SAO, PPO | +0.200 ± 0.000 | +2.000 ± 0.000 | +2.000 ± 0.000 |",
        "| PPO + lam_alpha, PPO | +0.100 ± 0.000 | +1.000 ± 0.000 | +1.000 ± 0.000 |",
    ]


def test_a_rate_that_diverged_is_not_chosen():
    rows = [
        {"learning_rate": rate, "proxy_end": proxy, "kl_coef": 0.1, "kl_end": kl}
        for rate, proxy, kl in [(2, float("nan"), 1.0), (2, 9.0, 1.0), (1, 0.0, 1.0), (3, 5.0, 60.0)]
    ]
    assert chosen_rate(rows) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--seeds", "1", "1"],
        ["--seeds", "8"],
        ["--tokens", "0"],
        ["--algorithms", "GRPO", "PPO + lam_alpha"],
        ["--algorithms", "DPO"],
    ],
)
def test_a_study_that_makes_no_sense_is_refused(flags, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert "`" in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
def test_each_algorithm_trains_until_its_tokens_are_spent(subtests, tmp_path):
    tokenizer, policy = make_tokenizer(), make_model(make_tokenizer(), 0)
    config = type(policy.config)(**{**policy.config.to_dict(), "num_labels": 1})
    reward = AutoModelForSequenceClassification.from_config(config)
    for name, model in (("sft", policy), ("reward", reward)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    rows = make_world(0, demonstrations=1, pairs=1, prompts=64, held_out=2)["prompts"]
    for split, part in rows.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    for algorithm in [name for name in ALGORITHMS if "+" not in name]:
        with subtests.test(algorithm=algorithm):
            run = Run(algorithm, 1e-3, 0, 64 * 48 + 1, 0.05, 0.0, False)
            row = train(run, tmp_path / "sft", tmp_path / "reward", tmp_path, tmp_path / "run")
            assert row["episodes"] == 128 and 64 * 48 < row["generated"] <= 128 * 48  # two rollouts
            assert row["gold_sft"] >= -1 and (row["kl_end"] != 0) == (algorithm != "SAO")  # SAO's critic warms up
