"""A round of labels: the queue, the labels, the pairs, and the reward model that is trained further."""

import json
import shutil

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

from recipes import refresh_reward
from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import make_world
from recipes.refresh_reward import main, read_rows as read, write_rows
from tests.recipes.small_runs import ROOT, refusal
from trl_ext.data import TrainedPairs
from trl_ext.rewards import EnsembleReward

VARIED = f"{__file__}:varied"


def varied(completions, completion_ids, finished, product, **kwargs):
    """A reward with many equal scores."""
    assert [ids[-1] == 1 for ids in completion_ids] == finished and all(product)  # </s> is token 1
    return [float(len(text) % 5) for text in completions]


def reward_model(folder, seed):
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    return model


def words(inputs, output_dir, *more, reward="reward"):
    flags = {"model_name_or_path": inputs / "model", "reward_model_name_or_path": inputs / reward}
    flags |= {"dataset_name": inputs / "prompts", "output_dir": output_dir, "max_new_tokens": 8, "use_cpu": "true"}
    flags |= {"num_prompts": 30, "queue_size": 20, "batch_size": 64}
    return [*refresh_reward.words(flags), *map(str, more)]


@pytest.fixture(scope="module")
def inputs(inputs, tmp_path_factory):
    """The shared policy, with other data and reward models with different weights."""
    folder, tokenizer = tmp_path_factory.mktemp("inputs"), make_tokenizer()
    shutil.copytree(inputs / "model", folder / "model")
    for name, splits in make_world(0, demonstrations=8, pairs=64, prompts=40, held_out=16).items():
        for part, rows in splits.items():
            write_rows(folder / name / f"{part}.jsonl", rows)
    make_model(tokenizer, 1).save_pretrained(folder / "sft")
    for place, name in enumerate(["reward", "ensemble/member-0", "ensemble/member-1"]):
        reward_model(folder / "model", place).save_pretrained(folder / name)
    for name in ("sft", "reward", "ensemble/member-0", "ensemble/member-1"):
        tokenizer.save_pretrained(folder / name)
    members = [{"folder": f"member-{place}", "mean": 0.0, "std": 1.0} for place in range(2)]
    (folder / "ensemble" / "ensemble.json").write_text(json.dumps({"members": members}))
    config = yaml.safe_load((ROOT / "recipes/demo/reward.yaml").read_text())
    config |= {"max_steps": 2, "warmup_steps": 0, "disable_tqdm": True, "per_device_train_batch_size": 8}
    (folder / "reward.yaml").write_text(yaml.safe_dump(config))
    return folder


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def queued(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("queued") / "round-1"
    main(words(inputs, folder, reward="ensemble"))
    return folder


@pytest.fixture
def queue(inputs, queued, tmp_path):
    """A round that has its queue already; nothing is sampled again."""
    return shutil.copytree(queued, tmp_path / "round")


def test_the_queue_pairs_the_best_answers_with_others_and_names_their_source(inputs, queued):
    queue = read(queued / "queue.jsonl")
    assert len({row["prompt"] for row in queue}) == len({row["item"] for row in queue}) == 20
    assert all(row["response_a"] != row["response_b"] and row["round"] == 1 for row in queue)
    assert {row["policy_a"] for row in queue} == {str(inputs / "model")}
    # The members' mean score, and their standard deviation
    picked = [
        {name: row[f"{name}_{row['picked']}"] for name in ("response", "score", "disagreement")} for row in queue
    ]
    said = {
        (row["prompt"], row["completion"]): row["finished"] for row in read(queued / "answers/policy-answers.jsonl")
    }
    asked = [(row["prompt"], each["response"]) for row, each in zip(queue, picked, strict=True)]
    members = EnsembleReward(str(inputs / "ensemble")).members
    finished = [said[each] for each in asked]
    scores = torch.tensor([member.function(*zip(*asked, strict=True), finished=finished) for member in members])
    expected = torch.stack([scores.mean(0), scores.std(0, correction=0)], 1)
    torch.testing.assert_close(torch.tensor([[each["score"], each["disagreement"]] for each in picked]), expected)
    # For each prompt in the queue the candidate is its best answer
    lowest = min(each["score"] for each, row in zip(picked, queue, strict=True) if row["why"] == "score")
    assert all(each["score"] <= lowest for each, row in zip(picked, queue, strict=True) if row["why"] != "score")
    assert [row["why"] for row in queue].count("score") == 8


def test_ties_skips_and_contradictions_make_no_pair(inputs, queue, tmp_path, capsys):
    rows = read(queue / "queue.jsonl")
    said = [{"item": row["item"], "annotator": "ann", "choice": "a"} for row in rows]
    for place, row in enumerate(rows):  # two annotators disagree, a tie, a skip
        said.append({"item": row["item"], "annotator": "bob", "choice": {0: "b", 1: "tie", 2: None}.get(place, "a")})
    said.append({"item": rows[3]["item"], "annotator": "ann", "choice": "b"})  # an annotator who contradicts herself
    write_rows(tmp_path / "people.jsonl", said)
    main(words(inputs, queue, "--labels", tmp_path / "people.jsonl", reward="ensemble"))
    pairs = {pair["item"]: pair for part in ("train", "test") for pair in read(queue / "pairs" / f"{part}.jsonl")}
    assert {row["item"] for row in rows} - {*pairs} == {rows[0]["item"], rows[1]["item"]}
    for row in rows[2:]:
        pair = pairs[row["item"]]
        expected = {"prompt": row["prompt"], "chosen": row["response_a"], "rejected": row["response_b"]}
        assert pair | expected == pair
    assert pairs[rows[2]["item"]]["annotators"] == ["ann"] and pairs[rows[3]["item"]]["annotators"] == ["bob"]
    assert "left out: 1 items without a winner, 1 items with a confidence below 0.6" in capsys.readouterr().out


def test_a_judges_choices_follow_its_scores(inputs, queue):
    main(words(inputs, queue, "--judge", VARIED, reward="ensemble"))
    rows = {row["item"]: row for row in read(queue / "queue.jsonl")}
    for label in read(queue / "labels.jsonl"):
        row = rows[label["item"]]
        a, b = (len(row[f"response_{side}"]) % 5 for side in "ab")
        assert label["choice"] == ("tie" if a == b else "a" if a > b else "b")


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["reward", "ensemble"])
def test_the_reward_model_is_trained_further_and_compared(inputs, tmp_path, capsys, reward, queued):
    folder = tmp_path / "round"
    if reward == "ensemble":
        shutil.copytree(queued, folder)
    train = ["--judge", VARIED, "--reward_config", inputs / "reward.yaml", "--old_share", 0.5]
    train += ["--reward_dataset_name", inputs / "preferences"]
    seen = read(inputs / "preferences" / "test.jsonl")[: 3 if reward == "reward" else 0]
    if seen:  # the old model's training pairs are known, the ensemble's are not
        TrainedPairs.of(Dataset.from_list(seen)).save(inputs / reward)
    main(words(inputs, folder, reward=reward))
    main(words(inputs, folder, *train, reward=reward))
    said = capsys.readouterr().out
    report = json.loads((folder / "refresh.json").read_text())
    assert report["is_held_out"] is bool(seen) and ("\nHeld-out accuracy, old pairs (13)" in said) is bool(seen)
    assert report["training"]["old"] == report["training"]["new"] == len(read(folder / "pairs" / "train.jsonl"))
    assert report["old"]["old pairs"]["pairs"] == 16 - len(seen)
    assert report["new"]["this round"]["pairs"] == len(read(folder / "pairs" / "test.jsonl"))
    trained = refresh_reward.members_of(str(folder / "reward"))
    assert len(trained) == (2 if reward == "ensemble" else 1)
    # It starts from the old model: after two steps its weights are near that model's, and far from others'
    for old, new in zip(refresh_reward.members_of(str(inputs / reward)), trained, strict=True):
        weights = [AutoModelForSequenceClassification.from_pretrained(each).model.state_dict() for each in (old, new)]
        steps = [(weights[1][name] - weight).abs().max().item() for name, weight in weights[0].items()]
        assert 0 < max(steps) < 0.01
    command = said[said.rindex("next: trl-ext ppo") :].splitlines()[0]
    assert f"--model_name_or_path {inputs / 'model'}" in command and str(folder / "reward") in command
    before = files(folder)
    main(words(inputs, folder, *train, reward=reward))
    assert files(folder) == before
    assert "old_share: 0.5 → 0.6" in refusal(
        capsys, main, words(inputs, folder, *train, "--old_share", 0.6, reward=reward)
    )
