import json

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from recipes.reward import main, without_folds
from tests.recipes.small_runs import ROOT, rows_of, write_rows
from trl_ext.callbacks import curve
from trl_ext.data import TrainedPairs
from trl_ext.evaluation import ensemble_report
from trl_ext.rewards import EnsembleReward
from trl_ext.workbench.pages.recorded import read_run
from trl_ext.workbench.reports.reward_report import main as reward_report


def arguments(inputs, output_dir, *more):
    flags = {"config": ROOT / "recipes/demo/reward.yaml", "model_name_or_path": inputs / "model", "use_cpu": "true"}
    flags |= {"dataset_name": inputs / "preferences", "output_dir": output_dir, "disable_tqdm": "true"}
    flags |= {"per_device_train_batch_size": 32, "max_steps": 3}
    return [*(f"--{name}={value}" for name, value in flags.items()), *map(str, more)]


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("trained")
    more = ["--demonstrations_name", str(inputs / "sft"), "--eval_strategy", "steps", "--eval_steps", "3"]
    main(arguments(inputs, output_dir, *more))
    return output_dir


class StopError(Exception):
    """Raised where the training would begin."""


def stops(*given, **kwargs):
    raise StopError


@pytest.mark.slow
def test_a_new_head_has_its_standard_deviation_and_a_trained_one_is_kept(inputs, trained, tmp_path, monkeypatch):
    heads = []
    monkeypatch.setattr(
        "trl_ext.dpo.ResumableRewardTrainer.train",
        lambda self, **_: heads.append(self.model.score.weight.detach().clone()) or stops(),
    )
    for model in (inputs / "model", trained):
        with pytest.raises(StopError):
            main([*arguments(inputs, tmp_path), "--model_name_or_path", str(model)])
    # 64 samples of N(0, 1/65): the standard deviation is known to 1/√128 of itself
    assert_close(heads[0].std().item(), 65**-0.5, rtol=3 / 128**0.5, atol=0)
    saved = AutoModelForSequenceClassification.from_pretrained(trained, num_labels=1)
    assert_close(heads[1], saved.score.weight.detach())


def score(folder, texts):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    batch = tokenizer([f"{text}</s>" for text in texts], padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]


@pytest.mark.slow
def test_demonstrations_score_zero_on_average_as_a_plain_classifier(inputs, trained):
    scores = score(trained, [row["prompt"] + row["completion"] for row in rows_of(inputs / "sft")])
    assert_close(scores.mean(), torch.zeros(()), atol=1e-5, rtol=0)
    assert scores.std() > 0.05


@pytest.mark.slow
def test_the_report_has_the_figures_of_the_saved_model(inputs, trained):
    report = json.loads((trained / "reward_report.json").read_text())
    rows = rows_of(inputs / "preferences", "test")
    chosen, rejected = (score(trained, [row["prompt"] + row[name] for row in rows]) for name in ("chosen", "rejected"))
    margins = (chosen - rejected).double()
    assert report["pairs"] == len(rows) == 40
    assert_close(report["accuracy"], (margins > 0).double().mean().item())
    assert_close(report["margin_mean"], margins.mean().item(), rtol=1e-4, atol=1e-5)
    assert {"temperature", "groups", "probes", "verdict"} <= report.keys() and report["probes"]
    assert curve(read_run(trained).history, "eval_accuracy")[0] == [0, 3]  # also before the first step


@pytest.mark.slow
def test_rows_are_held_out_if_there_is_no_test_split(inputs, tmp_path):
    data = ["--dataset_name", str(inputs / "preferences" / "train.jsonl"), "--eval_size", "20"]
    main([*arguments(inputs, tmp_path), *data])
    trained = json.loads((tmp_path / "reward_report.json").read_text())
    assert trained["pairs"] == 20 and trained["trained_on"]["is_known"]
    assert not any("eval_loss" in log for log in read_run(tmp_path).history)  # by `eval_strategy`; the report has it

    # On the whole file: 80 pairs were trained on, only the held-out ones are left
    with pytest.raises(SystemExit) as ended:
        reward_report([str(tmp_path), *data[:2], "--use_cpu", "true", "--probe_rows", "0"])
    assert ended.value.code == 1  # three steps make no reward model
    report = json.loads((tmp_path / "reward_report.json").read_text())
    assert report["pairs"] == 20 and report["trained_on"]["left_out"] == 80
    assert_close(report["accuracy"], trained["accuracy"])
    assert_close(report["margin_mean"], trained["margin_mean"], rtol=1e-3, atol=1e-4)

    # A model that is trained further has been trained on these pairs, too
    train, test = (
        [
            {name: row[name] for name in ("prompt", "chosen", "rejected")}
            for row in rows_of(inputs / "preferences", split)
        ]
        for split in ("train", "test")
    )
    swapped = write_rows(tmp_path / "data", train=test, test=train)
    main(arguments(inputs, tmp_path / "again", "--dataset_name", swapped, "--model_name_or_path", tmp_path))
    assert len(TrainedPairs.load(tmp_path / "again")) == 80 + 40
    assert json.loads((tmp_path / "again" / "reward_report.json").read_text())["pairs"] == 20


# ---- Ensembles ----


def test_each_pair_is_held_out_from_one_member():
    rows = Dataset.from_dict({"row": range(11)})
    left_out = [set(range(11)) - set(part["row"]) for part in without_folds(rows, 3, seed=0)]
    assert sorted(row for part in left_out for row in part) == list(range(11))
    assert {len(part) for part in left_out} == {3, 4} and without_folds(rows, 3, seed=1)[0]["row"] != list(range(11))


def test_the_report_of_an_ensemble_by_hand():
    chosen = torch.tensor([[2.0, 0.0, 1.0], [2.0, 1.0, -3.0]])  # two members, three pairs
    report = ensemble_report(chosen, torch.zeros(2, 3))
    # Means 2, 0.5, −1; worst cases 2, 0, −3; mean − std: 2, 0, −3. A tie is half
    assert report["accuracy"] == {"mean": 2 / 3, "median": 2 / 3, "min": 0.5, "uncertainty": 0.5}
    spread = report["disagreement"]  # of the chosen 0, 0.5, 2, of the rejected 0
    assert_close([spread[name] for name in ("mean", "where_right", "where_wrong")], [2.5 / 6, 0.5 / 4, 1.0])


@pytest.mark.slow
def test_an_ensemble_is_trained_resumed_and_loaded_by_its_folder(inputs, tmp_path, capsys):
    command = [*arguments(inputs, tmp_path), "--ensemble", "2", "--use_peft", "true", "--lora_r", "4"]
    main(command)
    rows = rows_of(inputs / "preferences", "test")
    ensemble = EnsembleReward(str(tmp_path))
    written = []
    for i, member in enumerate(ensemble.members):
        scores = json.loads((tmp_path / f"member-{i}" / "held_out_scores.json").read_text())["chosen"]
        said = member.function(
            [row["prompt"] for row in rows], [row["chosen"] for row in rows], finished=[True] * len(rows)
        )
        assert_close(said, scores, rtol=1e-4, atol=1e-5)
        written.append(scores)
    assert written[0] != written[1]
    report = json.loads((tmp_path / "reward_report.json").read_text())
    assert report["pairs"] == 40 and report["disagreement"]["mean"] > 0 and len(report["members"]) == 2

    # As if interrupted just before the second member was measured
    capsys.readouterr()
    (tmp_path / "ensemble.json").unlink()
    (tmp_path / "member-1" / "reward_report.json").unlink()
    main(command)
    out = capsys.readouterr().out
    assert "member-0 is complete" in out and "Reward model" in out and "member-1 is complete" not in out
    again = json.loads((tmp_path / "member-1" / "held_out_scores.json").read_text())["chosen"]
    assert_close(again, written[1])  # the same seed and pairs
    assert (tmp_path / "ensemble.json").is_file()
