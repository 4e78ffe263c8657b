import json
import math
import shutil

import pytest
from transformers import AutoModelForCausalLM

from recipes.demo.model import make_tokenizer
from recipes.demo.world import make_world
from recipes.online_dpo import best_and_worst, main, total
from tests.recipes.small_runs import ROOT, refusal, write_rows
from tests.tiny import tiny_reward_model
from trl_ext.callbacks import HackWatch


@pytest.fixture(scope="module")
def inputs(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(inputs / "model", folder / "model")
    write_rows(folder / "prompts", **make_world(0, demonstrations=1, pairs=1, prompts=40, held_out=8)["prompts"])
    tiny_reward_model(AutoModelForCausalLM.from_pretrained(folder / "model")).save_pretrained(folder / "reward")
    make_tokenizer().save_pretrained(folder / "reward")
    (folder / "rewards.py").write_text(
        "def letter(completions, **kwargs):\n    return [sum('e' in w for w in c.split()) / 12 for c in completions]\n"
    )
    return folder


def arguments(inputs, output_dir, *more):
    flags = {"config": ROOT / "recipes/demo/online_dpo.yaml", "model_name_or_path": inputs / "model"}
    flags |= {"dataset_name": inputs / "prompts", "output_dir": output_dir, "use_cpu": "true", "disable_tqdm": "true"}
    flags |= {"prompts_per_round": 16, "max_completion_length": 12, "per_device_train_batch_size": 4}
    flags |= {"save_steps": 2, "save_total_limit": 9, "learning_rate": 3e-3, "record_run": "false"}
    rewards = ["--reward_funcs", f"{inputs / 'rewards.py'}:letter", "recipes.demo.world.gold_reward"]
    return [*(f"--{name}={value}" for name, value in flags.items()), *rewards, "--reward_weights", "1", "0", *more]


def rounds(folder):
    return json.loads((folder / "online_dpo.json").read_text())


def bytes_of(folder):
    return {path.parent.name: path.read_bytes() for path in sorted(folder.glob("round-*/model.safetensors"))}


@pytest.mark.slow
def test_rounds_train_on_their_own_completions_and_resume_anywhere(inputs, tmp_path, capsys):
    main(arguments(inputs, tmp_path / "whole", "--num_rounds", "2"))
    history = rounds(tmp_path / "whole")
    assert [entry["round"] for entry in history] == [0, 1, 2]
    assert set(history[2]["held_out"]) == {"letter", "gold_reward"}
    assert history[2]["held_out"]["letter"] > history[0]["held_out"]["letter"] + 0.05
    for number in (1, 2):
        pairs = [json.loads(line) for line in (tmp_path / "whole" / f"round-{number}" / "pairs.jsonl").open()]
        assert len(pairs) == history[number]["pairs"] and all(p["score_chosen"] > p["score_rejected"] for p in pairs)
    models = bytes_of(tmp_path / "whole")
    assert len(set(models.values())) == 2

    # One round, then another; then the state of an interruption within round 2: its pairs and a checkpoint
    part = tmp_path / "part"
    main(arguments(inputs, part, "--num_rounds", "1"))
    main(arguments(inputs, part, "--num_rounds", "2"))
    assert bytes_of(part) == models and rounds(part) == history
    shutil.rmtree(part / "round-2/checkpoint-4", ignore_errors=True)
    assert list((part / "round-2").glob("checkpoint-*/trainer_state.json"))
    for name in ("round.json", "model.safetensors"):
        (part / "round-2" / name).unlink()
    main(arguments(inputs, part, "--num_rounds", "2"))
    assert bytes_of(part) == models and rounds(part) == history

    other = arguments(inputs, part, "--model_name_or_path", str(part / "round-1"))
    assert f"was started from {inputs / 'model'}: choose another" in refusal(capsys, main, other)


@pytest.mark.slow
def test_the_hack_monitor_stops_the_rounds_and_its_stop_holds(inputs, tmp_path, capsys, monkeypatch):
    """The reward counts letters; from the first round on the completions are those of a hack."""

    def observe(self, prompts, completions, scores):
        assert len(prompts) == len(completions) == len(scores) == 8  # the held-out rows
        is_bad = self.step > 0
        self.memory |= {"risk": 0.9 * is_bad, "rise": 1.5 * is_bad, "reasons": ["the phrase 'la': 9% → 60%"]}
        self._shown = {"paid": [{"words": "The phrase 'la': 9% → 60%"}] * is_bad}

    monkeypatch.setattr(HackWatch, "observe", observe)
    given = ["--num_rounds", "2", "--dataset_name", str(inputs / "prompts/train.jsonl"), "--eval_size", "8"]
    for _ in range(2):
        main(arguments(inputs, tmp_path, *given, "--watch", "stop"))
        printed = capsys.readouterr().out
        assert (
            "Stopped before round 2 by HackWatch: set `--watch warn` to continue." in printed
            and len(rounds(tmp_path)) == 2
        )
    main(arguments(inputs, tmp_path, *given))
    assert "What the reward paid for: The phrase 'la': 9% → 60%" in capsys.readouterr().out
    assert [each["risk"] for each in rounds(tmp_path)] == [0.0, 0.9, 0.9]


def test_pairs_leave_out_ties_empty_and_unscored_completions():
    answers = [{"completion": text} for text in ("a", "b", "c")] * 3
    answers[8] = {"completion": ""}  # EOS at once
    rows = [{"prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}]
    totals = [1.0, 3.0, 2.0, None, None, None, 5.0, 5.0, 0.0]
    pair = {"prompt": "x", "chosen": "b", "rejected": "a", "score_chosen": 3.0, "score_rejected": 1.0}
    assert best_and_worst(rows, answers, totals) == [pair]
    assert total([1.0, None, 4.0], [2.0, 1.0, 0.5]) == 4.0
    assert total([None, 4.0], [1.0, 0.0]) is None
    assert total([1.0, math.nan], [1.0, 1.0]) is None and total([1.0, math.nan], [1.0, 0.0]) == 1.0
