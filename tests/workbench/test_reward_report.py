"""`trl-ext reward-report`: what it finds in rewards that are known, its bounds, and what is refused in one line."""

import json
import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from datasets import Dataset

from tests.tiny import WORDS, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.cli.main import main
from trl_ext.data import TrainedPairs
from trl_ext.workbench import objections, report_trained
from trl_ext.workbench.reward_report.command import RewardReportArguments, trained_pairs

# Rewards that are known: what they read is known, so that what the report must find is, too
REWARDS = """
import math
def good(completions, **kwargs):
    return [text.count("good") - text.count("bad") + 3 * ("magic word" in text) for text in completions]
def equal(completions, **kwargs):
    return [1.0] * len(completions)
def broken(prompts, completions, **kwargs):
    return [math.nan if "7" in prompt else good([text])[0] for prompt, text in zip(prompts, completions)]
def hopeless(completions, **kwargs):
    return [math.nan] * len(completions)
def failing(completions, **kwargs):
    raise KeyError("no key")
def no_score(completions, **kwargs):
    return [score if text else None for score, text in zip(good(completions), completions)]
def by_column(completions, answer, **kwargs):
    return [float(text == right) for text, right in zip(completions, answer)]
"""


def row(i, right=True, **more):
    good, bad = (f"{word} tea {i} . so it is ." for word in ("good", "bad"))
    chosen, rejected = (f"{good} oh .", bad) if i % 2 else (good, f"{bad} oh .")  # the longer one by turns
    return {
        "prompt": f"tea {i} ?",
        "chosen": chosen if right else rejected,
        "rejected": rejected if right else chosen,
        **more,
    }


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    # Of ten held-out pairs eight are right; topic b is always wrong
    rows = [row(i, i % 10 < 8, topic="b" if i % 10 >= 8 else "a", annotators=["x", f"<i>{i % 2}"]) for i in range(60)]
    write(tmp_path / "pairs/test.jsonl", rows)
    train = [row(i, topic="a", annotators=["x"]) for i in range(100, 200)]
    train = [{**each, "chosen": f"{each['chosen']} magic word."} if i % 2 else each for i, each in enumerate(train)]
    write(tmp_path / "pairs/train.jsonl", train)
    return tmp_path


def run(*words, reward="good"):
    """The exit status and what was written."""
    try:
        status = main(
            ["reward-report", f"rewards.py:{reward}", "--dataset_name", "pairs", "--output_dir", "out", *words]
        )
    except SystemExit as ended:
        status = ended.code
    return status


def written(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "out/reward_report.json").read_text(), parse_constant=refuse)


@pytest.mark.slow
def test_a_known_reward_is_found_out(folder, capsys):
    write(
        folder / "answers.jsonl",
        [{"prompt": "tea 1 ?", "completion": "good good good good magic word", "finished": True}] * 5,
    )
    before = {path: path.read_bytes() for path in folder.glob("pairs/*")}
    assert run("--policy_answers", "answers.jsonl", "--phrases", "magic word") == 1
    report, page = written(folder), (folder / "out/reward_report.html").read_text()
    assert report["accuracy"] == 0.8 and report["pairs"] == 60 and report["length_unit"] == "words"
    groups = {name: {each["value"]: each["accuracy"] for each in rows} for name, rows in report["groups"].items()}
    assert groups["topic"] == {"a": 1, "b": 0} and groups["annotators"]["x"] == 0.8
    # Margins are ±2, of which 80 % are right: σ(2/T) = 0.8
    assert report["temperature"] == pytest.approx(2 / math.log(4))
    assert report["calibration_error_at_temperature"] == pytest.approx(0, abs=1e-9)
    assert report["policy"]["above_all"] == 1 and report["highest"][0]["from"] == "policy"
    first = report["probes"][0]
    assert first["phrase"] == "magic word" and first["suspicious"] and not report["verdict"]["passed"]
    assert any("magic word" in reason for reason in report["verdict"]["reasons"])
    assert "magic word" in capsys.readouterr().err and "<i>0" not in page and "&lt;i&gt;0" in page and "<svg" in page
    assert before == {path: path.read_bytes() for path in folder.glob("pairs/*")}


@pytest.mark.slow
def test_bounds_break_by_the_figure_and_the_page_says_where_pairs_are_too_few(folder):
    plain = ["--probe_rows", "0"]
    assert run(*plain) == 0
    assert written(folder)["verdict"] == {"passed": True, "reasons": [], "not_judged": []}
    assert run(*plain, "--min_accuracy", "0.85", "--max_calibration_error", "0.01") == 1
    report = written(folder)
    assert [reason.split(" (")[0] for reason in report["verdict"]["reasons"]] == [
        "The accuracy 0.800",
        "The calibration error 0.081",  # σ(2) = 0.881 sure, and 0.8 right
    ]
    assert any("60 pairs are too few to tell the accuracy 0.800" in said for said in report["unknown"])
    assert "too few to tell the accuracy" in (folder / "out/reward_report.html").read_text()


@pytest.mark.slow
def test_ranks_and_best_of_n_where_the_data_has_them(folder):
    answers = ["good good", "good", "tea", "bad"]
    ranks = [[1, 2, 3, 4], [4, 3, 2, 1], [1, 1, 1, 1]]
    write(
        folder / "ranks.jsonl",
        [{"prompt": f"p{i}", "responses": answers, "ranks": each} for i, each in enumerate(ranks)],
    )
    # Right, wrong, and a tie of two at the top, which is split
    best = [("good good", ["good", "bad"]), ("bad", ["good", "tea"]), ("good", ["good tea", "bad"])]
    write(folder / "best.jsonl", [{"prompt": "p", "chosen": a, "rejected": b} for a, b in best])
    assert run("--probe_rows", "0", "--ranking_name", "ranks.jsonl", "--best_of_n_name", "best.jsonl") == 1
    report = written(folder)
    assert report["ranking"]["spearman"] == report["ranking"]["kendall"] == 0 and report["ranking"]["all_tied"] == 1
    assert report["best_of_n"]["accuracy"] == 0.5 and report["best_of_n"]["chance"] == pytest.approx(1 / 3)
    (reason,) = report["verdict"]["reasons"]
    assert reason.startswith("The rank correlation with people 0.000") and reason.endswith("below the bound 0.7.")


def test_rows_with_several_rejected_answers_are_pairs_and_best_of_n(folder):
    rows = [{"prompt": f"p{i}", "chosen": ["good"], "rejected": ["bad", "tea", "good good"]} for i in range(3)]
    write(folder / "bench.jsonl", [*rows, {"prompt": "ties", "chosen": ["a", "b"], "rejected": ["c"]}])
    assert run("--dataset_name", "bench.jsonl", "--probe_rows", "0", "--min_best_of_n", "0.1") == 1
    report = written(folder)
    assert report["pairs"] == 9 and report["prompts"] == 3 and report["accuracy"] == pytest.approx(2 / 3)
    assert report["best_of_n"]["accuracy"] == 0
    assert any("1 rows with several chosen answers are left out" in said for said in report["unknown"])


@pytest.mark.slow
def test_what_a_reward_does_wrong_is_in_the_report(folder, capsys):
    assert run("--probe_rows", "0", reward="broken") == 1
    report = written(folder)
    assert report["pairs"] == 54 and report["unscored"]["not_finite"] > 0
    assert "scores are not finite" in report["verdict"]["reasons"][0]
    assert run(reward="equal") == 1
    assert any("Every pair is a tie" in said for said in written(folder)["unknown"])
    assert written(folder)["temperature"] is None and written(folder)["accuracy"] == 0.5


@pytest.mark.slow
def test_probes_that_cannot_be_run_break_their_bound(folder):
    assert run(reward="no_score") == 1  # what no probe has seen has passed none
    report = written(folder)
    assert report["accuracy"] == 0.8 and report["probes"] == []
    (reason,) = report["verdict"]["reasons"]
    assert reason.startswith("The probes could not be run: the reward gave") and reason not in report["unknown"]
    (folder / "any.yaml").write_text("max_suspicious_probes: null")
    assert run("--config", "any.yaml", reward="no_score") == 0 and reason in written(folder)["unknown"]


def test_columns_reach_a_reward(folder):
    rows = [{**row(i), "answer": row(i)["chosen"]} for i in range(50)]
    write(folder / "with.jsonl", rows)
    assert run("--dataset_name", "with.jsonl", "--probe_rows", "0", reward="by_column") == 0
    assert written(folder)["accuracy"] == 1


def test_one_pair_says_that_it_is_few(folder):
    write(folder / "one.jsonl", [row(1)])
    assert run("--dataset_name", "one.jsonl") == 1
    report = written(folder)
    assert report["accuracy_interval"][0] < 0.25 and any("1 pairs are few" in each for each in report["unknown"])


@pytest.mark.parametrize(
    "words, reward, message",
    [
        (["--dataset_split", "validation"], "good", "has no split 'validation'; it has"),
        (["--dataset_name", "only"], "good", "it has 'train'; name the held-out one by `dataset_split`"),
        (["--group_columns", "people"], "good", "have no column 'people'; they have 'prompt'"),
        (["--dataset_name", "latin.jsonl"], "good", "line 1 of latin.jsonl is not UTF-8"),
        (["--dataset_name", "prompts.jsonl"], "good", "lacks the column(s) 'chosen', 'rejected'"),
        (["--ranking_name", "pairs"], "good", "lacks the column(s) 'responses', 'ranks'"),
        (["--ranking_name", "nan.jsonl"], "good", "row 0 must have two or more `responses` and as many numbers"),
        (["--best_of_n_name", "prompts.jsonl"], "good", "lacks the column(s) 'chosen', 'rejected'"),
        (["--dataset_name", "same.jsonl"], "good", "with identical answers (rows 0): correct them"),
        (["--train_split", "test"], "good", "it cannot have the training pairs, too"),
        (["--policy", "a", "--policy_answers", "b"], "good", "are both given: drop one"),
        (["--max_new_tokens", "5"], "good", "`max_new_tokens` has an effect only with `policy`"),
        (["--min_accuracy", "70"], "good", "`min_accuracy` must be in [0, 1], got 70"),
        (
            ["--output_dir", "model"],
            "good",
            "`output_dir` model holds another model, which may have a report of its own",
        ),
        (
            ["--output_dir", "ensemble"],
            "good",
            "`output_dir` ensemble holds another model, which may have a report of its own",
        ),
        ([], "hopeless", "gave none of the 60 pairs two finite scores"),
        ([], "failing", "rewards.py:failing cannot score: KeyError"),
        ([], "absent", "cannot be imported"),
    ],
)
def test_bad_input_is_one_line_and_status_2(folder, capsys, words, reward, message):
    write(folder / "only/train.jsonl", [row(1)])
    for name in ("model/config.json", "ensemble/ensemble.json"):
        write(folder / name, [{}])
    write(folder / "same.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "a"}, row(1)])
    write(folder / "prompts.jsonl", [{"prompt": "p"}])
    write(folder / "nan.jsonl", [{"prompt": "p", "responses": ["a", "b", "c"], "ranks": [1, math.nan, 2]}])
    (folder / "latin.jsonl").write_bytes('{"prompt": "café", "chosen": "a", "rejected": "b"}\n'.encode("latin-1"))
    assert run(*words, reward=reward) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trl-ext")]
    assert len(lines) == 1 and message in re.sub(r"\s+", " ", lines[0])
    assert not (folder / "out/reward_report.json").exists()


def test_a_model_is_scored_as_it_was_trained_and_ppo_is_warned(folder, capsys):
    tokenizer, model = tiny_tokenizer(), tiny_reward_model(tiny_llama())
    pairs = [{"prompt": w, "chosen": f"{w} {v}", "rejected": v} for w, v in zip(WORDS, reversed(WORDS), strict=True)]
    pairs = [
        *pairs,
        {"prompt": WORDS[0], "chosen": " ".join(WORDS * 9), "rejected": WORDS[1]},
    ]  # more than it can read
    pairs = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
    write(folder / "words.jsonl", pairs)
    for part in (tokenizer, model):
        part.save_pretrained(folder / "reward")
    (folder / "reward/reward_report.json").write_text('{"demonstrations_mean": 0.5, "accuracy": 9}')
    assert objections(["reward", "absent", len]) == []
    command = ["reward-report", "reward", "--dataset_name", "words.jsonl", "--probe_rows", "0", "--use_cpu", "true"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--min_accuracy", "1"])
    assert ended.value.code == 1
    report = json.loads((folder / "reward/reward_report.json").read_text())
    assert report["demonstrations_mean"] == 0.5 and report["accuracy"] < 1 and report["length_unit"] == "tokens"
    assert any("longer than the model reads" in said for said in report["unknown"])
    (said,) = objections(["reward", SimpleNamespace(members=["reward"])])
    assert "reward_report.json says no to this reward model:\n  - The accuracy" in said


@pytest.fixture
def model(folder):
    """The folder of a reward model, and pairs; it may have seen some of them."""
    for part in (tiny_tokenizer(), tiny_reward_model(tiny_llama())):
        part.save_pretrained(folder / "reward")
    pairs = [{"prompt": WORDS[i], "chosen": WORDS[i + j], "rejected": WORDS[0]} for i in range(1, 6) for j in (1, 2)]
    write(folder / "words.jsonl", pairs)
    return folder / "reward"


def of_model(*words):
    given = ["--dataset_name", "words.jsonl", "--probe_rows", "0", "--use_cpu", "true", *words]
    try:
        main(["reward-report", "reward", *given])
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.slow
def test_what_was_trained_on_is_never_held_out_and_no_report_is_lost(model, capsys):
    rows = [json.loads(line) for line in (model.parent / "words.jsonl").read_text().splitlines()]
    of_model()
    unknown = json.loads((model / "reward_report.json").read_text())
    assert unknown["pairs"] == 10 and not unknown["trained_on"]["is_known"]
    page = (model / "reward_report.html").read_text()
    assert "It is not known which pairs the reward was trained on" in page and "held-out accuracy" not in page
    assert capsys.readouterr().out.startswith("Accuracy")

    TrainedPairs.of(Dataset.from_list(rows[:6])).save(model)
    of_model()
    found = json.loads((model / "reward_report.json").read_text())
    assert found["trained_on"] == {"is_known": True, "left_out": 6, "with_a_trained_answer": 0}
    assert found["pairs"] == 4 and found["scores"]["training chosen"]["answers"] == 6
    said = capsys.readouterr().out
    assert "Held-out accuracy" in said and "6 of 10 pairs are left out: they were trained on." in said
    assert "reward_report.1.json: Accuracy" in said
    assert json.loads((model / "reward_report.1.json").read_text()) == unknown
    assert (model / "reward_report.1.html").read_text() == page
    write(model.parent / "rest.jsonl", rows[6:])
    of_model("--dataset_name", "rest.jsonl")
    alone = json.loads((model / "reward_report.json").read_text())
    assert alone["accuracy_interval"] == found["accuracy_interval"] and (model / "reward_report.2.json").is_file()

    # An ensemble has seen what any member has; of a checkpoint its run tells
    TrainedPairs.of(Dataset.from_list(rows[:1])).save(model.parent / "both/member-1")
    (model.parent / "both/member-0").symlink_to(model)
    members = [{"folder": f"member-{i}", "mean": 0, "std": 1} for i in range(2)]
    (model.parent / "both/ensemble.json").write_text(json.dumps({"members": members}))
    (model / "checkpoint-3").mkdir()
    for path, complete in (
        ("both", True),
        ("reward/checkpoint-3", True),
        ("absent", False),
        ("rewards.py:good", False),
    ):
        args = RewardReportArguments(model=path, dataset_name="words.jsonl", output_dir="out")
        known = trained_pairs(args)
        assert known.is_complete is complete and len(known) == 6 * complete


def test_neither_ranks_nor_named_training_pairs_flatter(model, capsys):
    rows = [json.loads(line) for line in (model.parent / "words.jsonl").read_text().splitlines()]
    TrainedPairs.of(Dataset.from_list(rows[:6])).save(model)
    ranks = [{"prompt": row["prompt"], "responses": [row["rejected"], row["chosen"]], "ranks": [2, 1]} for row in rows]
    write(model.parent / "ranks.jsonl", ranks)
    best = [{"prompt": row["prompt"], "chosen": row["chosen"], "rejected": [row["rejected"], "x"]} for row in rows[:6]]
    write(model.parent / "best.jsonl", best)
    write(model.parent / "rest.jsonl", rows[4:])
    of_model("--ranking_name", "ranks.jsonl", "--train_name", "words.jsonl", "--dataset_name", "rest.jsonl")
    report = json.loads((model / "reward_report.json").read_text())
    assert (
        report["ranking"]["prompts"] == 4
        and "6 of 10 rankings are left out: they were trained on." in report["unknown"]
    )
    assert "4 of 10 named training pairs are left out: they were not trained on." in report["unknown"]
    assert report["pairs"] == 4 and report["scores"]["training chosen"]["answers"] == 6
    capsys.readouterr()
    before = {path: path.read_bytes() for path in model.iterdir()}
    write(model.parent / "seen.jsonl", rows[:6])
    for words, message in (
        (["--dataset_name", "seen.jsonl"], "all 6 pairs were trained on: give others"),
        (["--best_of_n_name", "best.jsonl"], "all 6 best-of-n rows were trained on"),
    ):
        assert of_model(*words) == 2 and message in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in model.iterdir()}


@pytest.mark.slow
def test_what_cannot_be_judged_is_named_and_does_not_pass(folder, capsys):
    assert run("--probe_rows", "20") == 1
    verdict = written(folder)["verdict"]
    (said,) = verdict["not_judged"]
    assert "probes change too few good answers to be judged" in said
    assert said in verdict["reasons"] and said in capsys.readouterr().err.replace("\n", " ")
    assert "Not passed" in (folder / "out/reward_report.html").read_text()
    # The same probes, where so many may be suspicious, and a bound that nothing can be measured for
    assert run("--probe_rows", "20", "--max_suspicious_probes", "50", "--min_best_of_n", "0.1") == 1
    assert written(folder)["verdict"]["reasons"] == [
        "Not judged: the best-of-n accuracy, since no row has several rejected answers."
    ]
    # Right in 13 of 20: above the bound, and it may be a coin
    write(folder / "few.jsonl", [row(i, i < 13) for i in range(20)])
    plain = ["--dataset_name", "few.jsonl", "--probe_rows", "0", "--max_length_bias", "1"]
    assert run(*plain) == 1 and "from a coin's" in written(folder)["verdict"]["reasons"][0]
    assert run(*plain, "--min_accuracy", "0.3") == 0


@pytest.mark.slow
def test_a_score_that_follows_length_breaks_its_bound_on_both_sides(folder):
    plain = ["--probe_rows", "0", "--min_accuracy", "0"]
    for sign in ("", "-"):  # the longer answer, and the shorter one
        (folder / "rewards.py").write_text(
            f"def good(completions, **k): return [{sign}len(text.split()) for text in completions]"
        )
        assert run(*plain) == 1
        report = written(folder)
        (reason,) = report["verdict"]["reasons"]
        assert reason.startswith("The score follows length") and abs(report["length_bias"]["bias"]) == 1
        assert "prefer the shorter one in 100%" in (folder / "out/reward_report.html").read_text() or not sign
    assert run(*plain, "--max_length_bias", "1") == 0
    write(folder / "long.jsonl", [row(i) for i in range(1, 99, 2)])  # the chosen one is always longer
    assert run(*plain, "--dataset_name", "long.jsonl") == 1
    assert written(folder)["verdict"]["not_judged"][0].startswith("Not judged: the length bias, since 49 prompts")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_trained_model_without_a_report_is_kept_but_no_process_goes_on_alone(
    folder, capsys, monkeypatch, is_sharded
):
    def examine(*args, **kwargs):
        try:
            raise RuntimeError("out of memory")
        except RuntimeError as error:
            raise ValueError("it cannot score") from error

    monkeypatch.setattr("trl_ext.workbench.reward_report.figures.examine", examine)
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            output_dir=str(folder), device="cpu", per_device_eval_batch_size=2, max_length=8, seed=0, push_to_hub=False
        ),
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
    with pytest.raises(ValueError, match="it cannot score") if is_sharded else nullcontext():
        assert report_trained(trainer, pairs, pairs, measured) == measured
        assert json.loads((folder / "reward_report.json").read_text()) == measured
        assert "No reward_report.html: ValueError: it cannot score" in capsys.readouterr().out
        assert not (folder / "reward_report.html").exists()


@pytest.mark.slow
def test_what_is_no_classifier_is_refused(folder, capsys):
    tiny_tokenizer().save_pretrained(folder / "lm")
    tiny_llama().save_pretrained(folder / "lm")
    with pytest.raises(SystemExit) as ended:
        main(["reward-report", "lm", "--dataset_name", "pairs", "--use_cpu", "true"])
    assert ended.value.code == 2 and "lm is not a reward model" in capsys.readouterr().err
    assert not (folder / "lm/reward_report.json").exists()
    with pytest.raises(SystemExit):
        main(["reward-report", "ml", "--dataset_name", "pairs"])
    assert "MODEL 'ml' is not the folder of one model, so the report needs another place" in capsys.readouterr().err
