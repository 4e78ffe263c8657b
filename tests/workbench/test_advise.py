"""`trl-ext advise`: reads the reports that the other commands write, and refuses what cannot be."""

import json
import re
import shlex

import pytest

from tests.test_docs import COMMANDS, flags_of
from tests.workbench.planning.test_runs import CONFIG
from trl_ext.workbench.labels import command as annotators
from trl_ext.workbench.planning import Facts
from trl_ext.workbench.planning.advice import TITLES
from trl_ext.workbench.planning.command import FIND_OUT, AdviseArguments, main, next_commands
from trl_ext.workbench.prompts import command as prompts

REWARD = {"pairs": 256, "accuracy": 0.7, "accuracy_interval": [0.64, 0.76], "calibration_error": 0.1}
LABELS = {"agreement": 0.75, "labels_per_item": 3.0, "unknown": []}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def rows(path, count, **columns):
    return write(path, "".join(json.dumps({k: f"{v} {i}" for k, v in columns.items()}) + "\n" for i in range(count)))


def run(capsys, *words):
    """Exit status, what was printed, and the errors."""
    try:
        main([*words])
        status = 0
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.mark.slow
def test_reads_what_the_other_commands_write(folder, capsys):
    """By the commands themselves: a key that they rename is missed here."""
    table = [
        {"prompt": f"p{i}", "response_a": f"a{i}", "response_b": f"b{i}", "annotator": who, "choice": "a"}
        for i in range(40)
        for who in ("anna", "bob", "chris")
    ]
    for row in table[::9]:
        row["choice"] = "b"
    write(folder / "labels.jsonl", "".join(json.dumps(row) + "\n" for row in table))
    annotators.main(["--dataset_name", "labels.jsonl", "--output_dir", "labels", "--held_out_annotators", "0"])
    rows(folder / "sft.jsonl", 30, prompt="please write a story about", completion="it was")
    rows(folder / "rl.jsonl", 20, prompt="please write a story about")
    rows(folder / "eval.jsonl", 10, prompt="please write a story about")
    prompts.main("--sets sft=sft.jsonl rl=rl.jsonl eval=eval.jsonl --output_dir prompts".split())
    write(folder / "reward" / "reward_report.json", REWARD | {"verdict": {"passed": False, "reasons": ["a phrase"]}})
    capsys.readouterr()
    words = ["--annotators", "labels", "--prompts_report", "prompts", "--reward_report", "reward"]
    status, printed, _ = run(
        capsys, *words, "--budget", "labels=900", "gpu_hours=5", "--output_file", "out/advice.json"
    )
    assert status == 0 and printed.startswith("Label more first\n")
    found = json.loads((folder / "out/advice.json").read_text())
    report = json.loads((folder / "labels/annotators.json").read_text())
    facts = found["facts"]
    assert report["left_out_annotators"] == ["anna"] and facts["labels_per_item"] == 3
    assert facts["agreement"] == report["without_left_out"]["agreement"] > report["agreement"]
    assert facts["pairs"] == report["pairs"]["train"]["pairs"] > 0
    assert (facts["accuracy"], facts["accuracy_low"], facts["passed"]) == (0.7, 0.64, False)
    assert facts["complaints"] == ["a phrase"] and facts["leaks"] == [{"name": "eval", "shared": 10, "rows": 10}]
    assert facts["demonstrations"] == 20 and facts["prompts"] == 10  # without what the evaluation has
    assert (facts["labels"], facts["gpu_hours"]) == (900, 5.0)
    assert found["origins"]["pairs"] == "labels/annotators.json" and found["method"] == "label-more"
    assert [each["name"] for each in found["unknown"]] == ["verifiable", "ppo"]
    for each in (*found["reasons"], *found["cautions"], *found["changes"], *found["leave"]):
        assert f"- {each['sentence']} [{each['source']}]" in printed


def test_data_sets_are_counted_and_go_before_reports(folder, capsys):
    rows(folder / "pairs" / "train.jsonl", 2_100, prompt="p", chosen="c", rejected="r")
    rows(folder / "pairs" / "test.jsonl", 3, prompt="p", chosen="c", rejected="r")
    labels = write(folder / "annotators.json", LABELS | {"pairs": {"train": {"pairs": 9}}})
    _, printed, _ = run(capsys, "--pairs", "pairs", "--annotators", labels)
    assert printed.startswith("DPO, on the pairs\n") and "There are 2,100 pairs" in printed
    assert "trl-ext dpo --model_name_or_path PATH_OR_HUB_NAME --dataset_name pairs --output_dir outputs/dpo" in printed
    assert run(capsys, "--pairs", "pairs:test")[1].startswith("Label more first\n")
    config = write(folder / "advise.yaml", "pairs: pairs\nverifiable: false\nbudget: [labels=10]\n")
    assert "whether a rule" not in run(capsys, "--config", config)[1]


@pytest.mark.slow
def test_a_model_is_planned_on_the_gpus(folder, capsys):
    CONFIG.save_pretrained(folder / "model")
    words = ["--model_name_or_path", "model", "--gpu", "RTX 4090", "--gpus", "2", "--json", "advice.json"]
    status, printed, _ = run(capsys, *words, "--verifiable", "true")
    assert status == 0 and printed.startswith("PPO\n") and "This library will do" in printed
    facts = json.loads((folder / "advice.json").read_text())["facts"]
    assert facts["ppo"]["lora"] and not facts["ppo_full"]["lora"] and facts["ppo"]["gpus"] == 2


def test_commands_exist():
    reports = [
        AdviseArguments(),
        AdviseArguments(annotators="labels/annotators.json", reward_report="reward", prompts="rl"),
    ]
    told = [how for _, how in FIND_OUT.values()]
    for args in reports:
        for facts in (Facts(), Facts(verifiable=True), Facts(accuracy=0.7)):
            told += [command for method in TITLES for command in next_commands(method, args, facts)]
    for command in told:
        program, name, *words = shlex.split(command)
        assert program == "trl-ext" and name in COMMANDS
        assert {word[2:] for word in words if word.startswith("--")} <= flags_of(name), command
    assert "labels/pairs --use_confidence true" in " ".join(told)
    assert (
        "trl-ext ppo --model_name_or_path PATH_OR_HUB_NAME --dataset_name rl --reward_model_name_or_path reward"
        in (" ".join(told))
    )


def test_commands_run_on_data_without_a_test_split_and_on_an_ensemble(folder):
    rows(folder / "pairs" / "train.jsonl", 30, prompt="p", chosen="a", rejected="b")
    rows(folder / "rl" / "validation.jsonl", 20, prompt="p")
    write(folder / "rewards" / "ensemble.json", {"members": []})
    args = AdviseArguments(pairs="pairs", prompts="rl:validation", reward_report="rewards")
    (dpo,) = next_commands("dpo", args, Facts(accuracy=0.7))
    assert "--dataset_name pairs --eval_size 3 " in dpo
    (ppo,) = next_commands("ppo", args, Facts())
    assert "--dataset_name rl --dataset_train_split validation --eval_size 2 " in ppo
    assert "--eval_size" not in next_commands("online-dpo", args, Facts())[0]  # which has no such flag
    assert "--rewards '{EnsembleReward: {members: rewards}}'" in ppo


def test_an_ensemble_counts_by_its_mean(folder, capsys):
    by_mean = {"accuracy": {"mean": 0.7, "min": 0.6}, "accuracy_interval": {"mean": [0.64, 0.76], "min": [0.5, 0.7]}}
    write(folder / "reward_report.json", {**by_mean, "members": {"member-0": {}}})
    status, _, _ = run(capsys, "--reward_report", "reward_report.json", "--json", "advice.json")
    facts = json.loads((folder / "advice.json").read_text())["facts"]
    assert status == 0 and (facts["accuracy"], facts["accuracy_low"]) == (0.7, 0.64)


def wrong(**changes):
    return {**REWARD, **changes}


SETS = {"rows": 5, "kept": 5, "shared_near": 0}


@pytest.mark.parametrize(
    "words, file, value, message",
    [
        ("--reward_report nothing", "x", "", r"there is no nothing; `trl-ext reward-report` writes reward"),
        ("--reward_report r.json", "r.json", "{", r"r\.json is not JSON"),
        ("--reward_report r.json", "r.json", LABELS, r"of `trl-ext reward-report`: .* 'accuracy'"),
        ("--reward_report r.json", "r.json", [1], "lacks 'accuracy'"),
        ("--reward_report r.json", "r.json", wrong(accuracy=70), "accuracy must be a number from 0 to 1, got 70"),
        ("--reward_report r.json", "r.json", wrong(accuracy=True), "got True"),
        ("--reward_report r.json", "r.json", wrong(accuracy=0.9), r"its interval goes from 0\.64 to 0\.76"),
        ("--reward_report r.json", "r.json", wrong(accuracy_interval=[0.7]), "r.json cannot be read"),
        (
            "--reward_report r.json",
            "r.json",
            wrong(verdict={"passed": True, "reasons": ["a phrase"]}),
            "passed: True, with 1 reasons against it",
        ),
        ("--reward_report r.json", "r.json", wrong(verdict={"passed": False}), "KeyError.*reasons"),
        ("--annotators a.json", "a.json", LABELS | {"agreement": -1}, "agreement must be a number from 0 to 1"),
        ("--annotators a.json", "a.json", LABELS | {"pairs": {"train": {"pairs": 1.5}}}, "pairs.train.pairs must be"),
        (
            "--prompts_report p.json",
            "p.json",
            {"sets": {"rl": SETS | {"kept": 6}}, "settings": {"held_out": []}},
            "set 'rl' has 5 rows, but 6 are kept",
        ),
        ("--prompts_report p.json", "p.json", {"sets": {"rl": {}}, "settings": {"held_out": []}}, "KeyError"),
        ("--pairs d.jsonl", "d.jsonl", '{"prompt": "p"}\n', "`pairs`: .*lacks the column"),
        ("--pairs none.jsonl", "x", "", "none.jsonl"),
        ("--budget hours=3", "x", "", "`budget` names 'hours': it takes gpu_hours and labels"),
        ("--budget labels=many", "x", "", "`budget` of labels must be a number above 0, got 'many'"),
        ("--budget labels=1 labels=2", "x", "", "names 'labels' twice"),
        ("--gpus 8 --verifiable true", "x", "", "`gpus` is 8, but their kind is not known"),
        ("--gpu H100", "x", "", "`gpu` has an effect only with `model_name_or_path`"),
        ("--model_name_or_path m --gpu H1000", "x", "", "`gpu` must be one of RTX 3060.* got 'H1000'"),
        ("--model_name_or_path ./m --gpu H100", "x", "", "`model_name_or_path` ./m: there is no such folder"),
        ("--gpus 0", "x", "", "`gpus` must be >= 1, got 0"),
        ("--verifiable perhaps", "x", "", "perhaps"),
        ("--pair d.jsonl", "x", "", r"unknown flag '--pair'.*--pairs"),
    ],
)
def test_wrong_input_is_one_line(folder, capsys, words, file, value, message):
    write(folder / file, value)
    status, printed, errors = run(capsys, *words.split())
    assert status == 2 and printed == "" and len(errors.strip().splitlines()) == 1
    assert re.search(message, errors), errors


def test_reports_of_other_data_are_refused(folder, capsys):
    labels = write(folder / "a.json", LABELS | {"pairs": {"train": {"pairs": 9}}})
    report = {"sets": {"pref": SETS}, "settings": {"held_out": ["eval"]}}
    words = ["--annotators", labels, "--prompts_report", write(folder / "p.json", report)]
    status, _, errors = run(capsys, *words)
    assert status == 2 and "a.json says 9 pairs and" in errors and "5: give reports of the same data" in errors
    rows(folder / "pairs.jsonl", 7, prompt="p", chosen="c", rejected="r")
    assert run(capsys, *words, "--pairs", "pairs.jsonl")[0] == 0  # it is said which


def test_people_who_are_left_out_do_not_count(folder, capsys):
    report = LABELS | {"agreement": 0.55, "without_left_out": {"agreement": 0.7}}
    assert run(capsys, "--annotators", write(folder / "a.json", report), "--json", "x.json")[0] == 0
    assert json.loads((folder / "x.json").read_text())["facts"]["agreement"] == 0.7
