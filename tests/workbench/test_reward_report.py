"""`trl-ext reward-report`: its findings in known rewards, its bounds, and what counts as held out."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from datasets import Dataset

from tests.tiny import WORDS, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.cli.main import main
from trl_ext.data import TrainedPairs
from trl_ext.workbench import objections, report_trained, write_reward_report
from trl_ext.workbench.reports.reward_report import RewardReportArguments, trained_pairs

# Rewards with a known rule, so that the report's findings are known
REWARDS = """
import math
def good(completions, **kwargs):
    return [text.count("good") - text.count("bad") + 3 * ("magic word" in text) for text in completions]
def long(completions, **kwargs):
    return [len(text.split()) for text in completions]
def broken(prompts, completions, **kwargs):
    return [math.nan if "7" in prompt else good([text])[0] for prompt, text in zip(prompts, completions)]
def no_score(completions, **kwargs):
    return [score if text else None for score, text in zip(good(completions), completions)]
"""


def row(i, right=True, **more):
    good, bad = (f"{word} tea {i} . so it is ." for word in ("good", "bad"))
    pair = (f"{good} oh .", bad) if i % 2 else (good, f"{bad} oh .")  # alternately the longer one
    chosen, rejected = pair if right else pair[::-1]
    return {"prompt": f"tea {i} ?", "chosen": chosen, "rejected": rejected, **more}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    # Eight of ten held-out pairs are right; topic b is always wrong
    rows = [row(i, i % 10 < 8, topic="b" if i % 10 >= 8 else "a", annotators=["x", f"<i>{i % 2}"]) for i in range(60)]
    write(tmp_path / "pairs/test.jsonl", rows)
    train = [row(i, topic="a", annotators=["x"]) for i in range(100, 200)]
    train = [{**each, "chosen": f"{each['chosen']} magic word."} if i % 2 else each for i, each in enumerate(train)]
    write(tmp_path / "pairs/train.jsonl", train)
    return tmp_path


def status_of(words):
    try:
        return main(words) or 0
    except SystemExit as ended:
        return ended.code


def run(words="", reward="good"):
    """The exit status and the report."""
    base = f"reward-report rewards.py:{reward} --dataset_name pairs --output_dir out"
    status = status_of([*base.split(), *words.split()])
    return status, json.loads(open("out/reward_report.json").read(), parse_constant=pytest.fail)


PLAIN = "--probe_rows 0"


@pytest.mark.slow
def test_the_report_finds_the_rule_of_a_known_reward(folder, capsys):
    answer = {"prompt": "tea 1 ?", "completion": "good good good good magic word", "finished": True}
    write(folder / "answers.jsonl", [answer] * 5)
    before = {path: path.read_bytes() for path in folder.glob("pairs/*")}
    (folder / "reward.yaml").write_text("phrases: [magic word]\npolicy_answers: answers.jsonl\n")
    status, report = run("--config reward.yaml")
    page = (folder / "out/reward_report.html").read_text()
    assert status == 1 and report["accuracy"] == 0.8 and report["pairs"] == 60 and report["length_unit"] == "words"
    groups = {name: {each["value"]: each["accuracy"] for each in rows} for name, rows in report["groups"].items()}
    assert groups["topic"] == {"a": 1, "b": 0} and groups["annotators"]["x"] == 0.8
    # Margins are ±2, of which 80 % are right: σ(2/T) = 0.8
    assert report["temperature"] == pytest.approx(2 / math.log(4))
    assert report["calibration_error_at_temperature"] == pytest.approx(0, abs=1e-9)
    assert report["policy"]["above_all"] == 1 and report["highest"][0]["from"] == "policy"
    first = report["probes"][0]
    assert first["phrase"] == "magic word" and first["suspicious"] and not report["verdict"]["passed"]
    assert any("magic word" in reason for reason in report["verdict"]["reasons"])
    assert "magic word" in capsys.readouterr().err and "<i>0" not in page and "&lt;i&gt;0" in page
    assert before == {path: path.read_bytes() for path in folder.glob("pairs/*")}
    # The part for the hub has neither texts nor values of columns
    write_reward_report(folder / "hub", report, is_uploaded=True)
    told = (folder / "hub/reward_report.json").read_text()
    assert "tea 1" not in told and "<i>" not in told and not (folder / "hub/reward_report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, reward, reasons",
    [
        ("", "good", []),
        ("--max_calibration_error 0.01", "good", ["The calibration error 0.081 ("]),  # σ(2) = 0.881, accuracy 0.8
        ("--dataset_name few.jsonl --max_length_bias 1", "good", ["Not judged: the accuracy 0.650 ("]),  # or at random
        ("--min_accuracy 0", "long", ["The length bias 1.000 (1.000 to 1.000) is beyond the bound 0.2."]),
        ("", "broken", ["50 of 320 scores are not finite."]),
    ],
)
def test_a_bound_is_broken_by_its_figure_or_cannot_be_judged(folder, words, reward, reasons):
    write(folder / "few.jsonl", [row(i, i < 13) for i in range(20)])  # right in 13 of 20
    status, report = run(f"{PLAIN} {words}", reward)
    said = report["verdict"]["reasons"]
    assert status == bool(reasons) != report["verdict"]["passed"] and len(said) == len(reasons)
    assert all(sentence.startswith(begin) for sentence, begin in zip(said, reasons, strict=True)), said
    assert report["verdict"]["not_judged"] == [each for each in said if each.startswith("Not judged")]


def test_rows_with_several_rejected_answers_are_pairs_and_best_of_n(folder):
    rows = [{"prompt": f"p{i}", "chosen": ["good"], "rejected": ["bad", "tea", "good good"]} for i in range(3)]
    rows += [
        {"prompt": "ties", "chosen": ["a", "b"], "rejected": ["c"]},
        {"prompt": "x", "chosen": ["a"], "rejected": []},
    ]
    write(folder / "bench.jsonl", rows)
    _, report = run(f"{PLAIN} --dataset_name bench.jsonl --drop_unusable_pairs true")
    assert report["pairs"] == 9 and report["prompts"] == 3 and report["accuracy"] == pytest.approx(2 / 3)
    assert report["best_of_n"]["accuracy"] == 0 and report["best_of_n"]["chance"] == pytest.approx(1 / 4)
    assert any("Rows with several chosen answers are left out (1 of" in said for said in report["unknown"])


@pytest.mark.slow
def test_probes_that_cannot_run_or_be_judged_break_their_bound(folder):
    status, report = run(reward="no_score")  # a reward without a probe has passed none
    (reason,) = report["verdict"]["reasons"]
    assert status == 1 and report["accuracy"] == 0.8 and report["probes"] == []
    assert reason.startswith("The probes could not be run: the reward must return") and reason not in report["unknown"]
    status, report = run("--probe_rows 20")
    (said,) = report["verdict"]["not_judged"]
    assert status == 1 and "probes change too few good answers" in said and said in report["verdict"]["reasons"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("rewards.py:good --dataset_name pairs --group_columns people", "people"),  # before scoring, which takes hours
        ("rewards.py:good --dataset_name pairs --train_split test", "the reward was trained on all pairs (60)"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(folder, capsys, words, message):
    assert status_of(["reward-report", *words.split(), "--output_dir", "out"]) == 2
    assert message in capsys.readouterr().err
    assert not [*folder.glob("*/reward_report.json")]


# ---- Models and their training pairs ----


@pytest.fixture
def model(folder):
    """The folder of a reward model, and pairs; it may have been trained on some of them."""
    for part in (tiny_tokenizer(), tiny_reward_model(tiny_llama())):
        part.save_pretrained(folder / "reward")
    pairs = [{"prompt": WORDS[i], "chosen": WORDS[i + j], "rejected": WORDS[0]} for i in range(1, 6) for j in (1, 2)]
    write(folder / "words.jsonl", pairs)
    return folder / "reward"


def of_model(words="", **kwargs):
    status = status_of(f"reward-report reward --dataset_name words.jsonl {PLAIN} --use_cpu true {words}".split())
    return status, json.loads(open("reward/reward_report.json").read())


def test_a_model_is_scored_as_it_was_trained_and_ppo_is_warned(model):
    long = {"prompt": WORDS[0], "chosen": " ".join(WORDS * 9), "rejected": WORDS[1]}  # longer than its context
    (model.parent / "words.jsonl").write_text(json.dumps(long) + "\n" + (model.parent / "words.jsonl").read_text())
    (model / "reward_report.json").write_text('{"demonstrations_mean": 0.5, "accuracy": 9}')
    assert objections(["reward", "absent", len]) == []
    status, report = of_model("--min_accuracy 1")
    assert status == 1 and report["demonstrations_mean"] == 0.5 and report["length_unit"] == "tokens"
    assert any("longer than the model reads" in said for said in report["unknown"])
    (said,) = objections(["reward", SimpleNamespace(members=["reward"])])
    assert "This reward model did not pass its report, reward/reward_report.json:\n  - The accuracy" in said


@pytest.mark.slow
def test_training_pairs_are_never_held_out_and_no_report_is_lost(model):
    rows = [json.loads(line) for line in (model.parent / "words.jsonl").read_text().splitlines()]
    _, unknown = of_model()
    assert unknown["pairs"] == 10 and not unknown["trained_on"]["is_known"]
    assert "held-out accuracy" not in (model / "reward_report.html").read_text()
    TrainedPairs.of(Dataset.from_list(rows[:6])).save(model)
    ranks = [{"prompt": row["prompt"], "responses": [row["rejected"], row["chosen"]], "ranks": [2, 1]} for row in rows]
    write(model.parent / "ranks.jsonl", ranks)
    _, found = of_model("--ranking_name ranks.jsonl")
    assert found["trained_on"] == {"is_known": True, "left_out": 6, "with_a_trained_answer": 0}
    assert found["pairs"] == 4 and found["scores"]["training chosen"]["answers"] == 6
    assert found["ranking"]["prompts"] == 4
    assert json.loads((model / "reward_report.1.json").read_text()) == unknown
    write(model.parent / "rest.jsonl", rows[4:])  # named training pairs that were not trained on do not count
    _, alone = of_model("--dataset_name rest.jsonl --train_name words.jsonl")
    assert alone["accuracy_interval"] == found["accuracy_interval"] and (model / "reward_report.2.json").is_file()
    write(model.parent / "seen.jsonl", rows[:6])
    assert of_model("--dataset_name seen.jsonl") == (2, alone)

    # An ensemble was trained on the pairs of all members
    TrainedPairs.of(Dataset.from_list(rows[:1])).save(model.parent / "both/member-1")
    (model.parent / "both/member-0").symlink_to(model)
    members = [{"folder": f"member-{i}", "mean": 0, "std": 1} for i in range(2)]
    (model.parent / "both/ensemble.json").write_text(json.dumps({"members": members}))
    paths = {"both": True, "absent": False, "rewards.py:good": False}
    for path, complete in paths.items():
        known = trained_pairs(RewardReportArguments(model=path, dataset_name="words.jsonl", output_dir="out"))
        assert known.is_complete is complete and len(known) == 6 * complete


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_trained_model_is_kept_if_its_report_fails(folder, capsys, monkeypatch, is_sharded):
    def examine(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("trl_ext.workbench.reports.reward_figures.examine", examine)
    args = {"device": "cpu", "per_device_eval_batch_size": 2, "max_length": 8, "seed": 0, "push_to_hub": False}
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(folder), **args),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        model=tiny_reward_model(tiny_llama()),
        processing_class=tiny_tokenizer(),
        eval_dataset=[row(1)],
        is_fsdp_enabled=is_sharded,
        is_deepspeed_enabled=False,
        is_world_process_zero=lambda: True,
    )
    (folder / "reward_report.html").write_text("of an earlier model")
    pairs, measured = Dataset.from_list([row(1)]), {"accuracy": 1.0}
    with pytest.raises(RuntimeError, match="out of memory") if is_sharded else nullcontext():
        assert report_trained(trainer, pairs, pairs, measured) == measured
        assert json.loads((folder / "reward_report.json").read_text()) == measured
        assert "reward_report.html was not written: RuntimeError: out of memory" in capsys.readouterr().out
        assert not (folder / "reward_report.html").exists()
