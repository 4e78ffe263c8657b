"""Monitors in stock TRL scripts, in resumed runs, and with PPOTrainer."""

import asyncio
import json
from contextlib import suppress

import pytest
from accelerate import PartialState
from datasets import Dataset
from transformers import EarlyStoppingCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from tests.callbacks.replay import SIZES, notices_of, ppo, sft, with_callbacks
from tests.tiny import length_reward, prompts, tiny_llama, tiny_tokenizer
from trl_ext.callbacks import (
    CanaryCallback,
    ClipFractionCallback,
    ConsoleCallback,
    EntropyFloorCallback,
    GoldGapCallback,
    JSONLCallback,
    KLBudgetCallback,
    LengthDriftCallback,
    RepetitionCallback,
    RewardDriftCallback,
)
from trl_ext.callbacks.answers import generate_completions
from trl_ext.callbacks.monitor import REGISTRY, alerts_of
from trl_ext.rewards import GoldJudgeReward, repetition_watch, score_watch
from trl_ext.runs.control import take_kl_scale
from trl_ext.runs.files import read_jsonl

pytestmark = pytest.mark.slow

PAIRS = {"prompt": ["the cat"] * 16, "chosen": [" sat on the mat"] * 16, "rejected": [" flew over"] * 16}
COMPLETIONS = {"prompt": ["the cat"] * 16, "completion": [" sat"] * 16}
HELD_OUT = prompts(8, seed=1).add_column("held_out", [True] * 8)
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "max_steps": 4}


def gold(completions, **kwargs):
    return [len(set(text.split())) / 8 for text in completions]


class AsyncJudge:
    """Keeps an object of one event loop, and needs every argument that reward functions get."""

    loop = None

    async def __call__(self, prompts, completions, completion_ids, prompt_ids, finished, **kwargs):
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop() and len(completion_ids) == len(prompt_ids) == len(finished)
        return gold(completions)


def events(folder, kind):
    return [event for event in read_jsonl(folder / "metrics.rank0.jsonl") if event["type"] == kind]


@pytest.mark.parametrize(("cls", "args"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_grpo_and_rloo_scripts(cls, args, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "model")  # TRL loads the reference by its path
    sizes = {"num_generations": 2, "num_generations_eval": 1, "max_completion_length": 8, "beta": 0.05}
    trainer = cls(
        model=str(tmp_path / "model"),
        reward_funcs=[score_watch(length_reward, bound=4.0), repetition_watch, GoldJudgeReward(gold)],
        args=args(str(tmp_path), reward_weights=[1.0, 0.0, 0.0], **SIZES | sizes | EVALUATED),
        train_dataset=prompts(16),
        eval_dataset=HELD_OUT,
        processing_class=tiny_tokenizer(),
    )
    ConsoleCallback.replace(trainer)
    budget, recorder = KLBudgetCallback(limit=10, action="stop"), JSONLCallback()
    of_logs = ClipFractionCallback(), EntropyFloorCallback(), RewardDriftCallback(minimum=4), LengthDriftCallback()
    with_callbacks(trainer, [budget, *of_logs, RepetitionCallback(), GoldGapCallback(), recorder]).train()
    assert trainer.state.global_step == 4 and not notices_of(trainer.state)
    assert "KL/tok" in capsys.readouterr().out
    train, evaluations = events(tmp_path, "train"), events(tmp_path, "eval")
    assert [event["step"] for event in train] == [1, 2, 3, 4] and "kl" in train[0]
    assert train[0]["logs"]["score_watch/length_reward/share_above"] >= 0 and "loss" in train[0]
    assert "rewards/gold_judge/mean" not in train[0]["logs"]  # None: training rows are not scored
    assert evaluations[0]["step"] == 0 and "eval_gold/win_rate" not in evaluations[0]["logs"]
    assert 0 <= evaluations[-1]["logs"]["eval_gold/win_rate"] <= 1
    written = {name for row in read_jsonl(tmp_path / "completions.rank0.jsonl") for name in row["scores"]}
    assert written == {"length_reward", "repetition_watch", "gold_judge"}


@pytest.mark.parametrize(
    ("cls", "args", "data"),
    [
        (DPOTrainer, DPOConfig, PAIRS),
        (SFTTrainer, SFTConfig, COMPLETIONS),
        (KTOTrainer, KTOConfig, COMPLETIONS | {"label": [True, False] * 8}),
    ],
    ids=["DPO", "SFT", "KTO"],
)
def test_dpo_sft_and_kto_scripts(cls, args, data, tmp_path):
    best = {"metric_for_best_model": "eval_gold/mean", "load_best_model_at_end": True, "learning_rate": 1e-2}
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    tiny_llama().save_pretrained(tmp_path / "model")
    trainer = cls(
        model=str(tmp_path / "model"),
        args=args(str(tmp_path), **SIZES | best | every_step, max_steps=4),
        train_dataset=Dataset.from_dict(data),
        eval_dataset=Dataset.from_dict(data | {"prompt": ["the cat", "a dog", "it", "very"] * 4}),
        processing_class=tiny_tokenizer(),
    )
    judge = gold if cls is DPOTrainer else AsyncJudge()
    canary = CanaryCallback(trainer=trainer, prompts=["the cat"], minutes=0, max_new_tokens=4, judge=judge)
    gap = GoldGapCallback(trainer=trainer, judge=judge, max_new_tokens=8, num_prompts=6)
    stopping = EarlyStoppingCallback(early_stopping_patience=9)
    with_callbacks(trainer, [gap, stopping, canary, EntropyFloorCallback(), JSONLCallback()]).train()
    logged = [log["eval_gold/mean"] for log in trainer.state.log_history if "eval_gold/mean" in log]
    rates = [log["eval_gold/win_rate"] for log in trainer.state.log_history if "eval_gold/win_rate" in log]
    assert trainer.state.global_step == 4 and 0 < canary.memory["first"]["score"] <= 1
    assert len(logged) == 4 and len(rates) == 3 and trainer.state.best_metric == pytest.approx(max(logged))
    assert len((tmp_path / "canary.jsonl").read_text().splitlines()) == 5
    sent = [event["logs"] for event in events(tmp_path, "eval") if "eval_gold/mean" in event["logs"]]  # as to trackers
    assert [log["eval_gold/mean"] for log in sent] == logged and all("eval_gold/std" in log for log in sent)
    assert len(events(tmp_path, "train")) == 4


def test_answers_are_texts_or_messages_that_end_with_eos(tmp_path):
    asked = ["the cat", [{"role": "user", "content": "a dog ran"}]]
    trainer = sft(tmp_path)
    trainer.model.train()
    plain = generate_completions(trainer, asked, 8)
    text, (message,) = plain["completions"]
    assert text and message["role"] == "assistant" and message["content"]
    texts = tiny_tokenizer().batch_decode(plain["completion_ids"], skip_special_tokens=True)
    assert texts == [text, message["content"]] and plain["finished"] == [i[-1] == 2 for i in plain["completion_ids"]]
    assert trainer.model.training
    trainer.model.generation_config.eos_token_id = [2, tiny_tokenizer().convert_tokens_to_ids(text.split()[1])]
    ended = generate_completions(trainer, asked[:1], 8)
    assert ended["completions"] == text.split()[:1] and ended["finished"] == [True]


def test_a_prompt_that_fills_the_context_is_cut_at_the_left(tmp_path):
    trainer = sft(tmp_path)
    cut = generate_completions(trainer, ["the cat", " ".join(["the cat"] * 40)], 8)  # the context has 64 tokens
    assert [len(ids) for ids in cut["prompt_ids"]] == [2, 56]
    assert max(len(ids) for ids in cut["completion_ids"]) > 1


@pytest.mark.parametrize("processes", [4, 8])
def test_each_prompt_keeps_its_answer_on_any_number_of_processes(processes, tmp_path, monkeypatch):
    trainer = sft(tmp_path)
    asked = ["the cat", "a dog", "it", "very", "the mat"]
    alone = generate_completions(trainer, asked, 4)
    assert len({*alone["completions"]}) == 5
    gathered = []

    def gather(mine):  # the processes run one after the other: the last one gathers what all have
        gathered.append(mine)
        if len(gathered) < processes:
            raise InterruptedError
        assert len({*map(len, gathered)}) == 1  # else some would wait for the others under ZeRO-3 and FSDP
        return sum(gathered, [])

    monkeypatch.setattr("trl_ext.callbacks.answers.gather_object", gather)
    monkeypatch.setitem(PartialState._shared_state, "num_processes", processes)
    for rank in range(processes):
        monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
        with suppress(InterruptedError):
            together = generate_completions(trainer, asked, 4)
    assert together == alone


# ---- State ----


def test_resumed_monitors_keep_their_state(tmp_path):
    def run(*added, **kwargs):
        monitors = EntropyFloorCallback(steps=6, relative=0.9), KLBudgetCallback(keys={"kl": "loss"}, warn=1, limit=2)
        saving = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
        return monitors[0], sft(tmp_path, *monitors, *added, **saving, **kwargs)

    _, whole = run()
    whole.train()
    expected = whole.state.stateful_callbacks[REGISTRY]
    assert expected["EntropyFloorCallback"]["attributes"]["memory"]["series"]["entropy"]["count"] == 8
    added = LengthDriftCallback()  # a monitor that the checkpoint does not have
    entropy, resumed = run(added, restore_callback_states_from_checkpoint=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    registry = resumed.state.stateful_callbacks[REGISTRY]
    for name in ("EntropyFloorCallback", "KLBudgetCallback"):
        assert registry[name] == expected[name]
    assert entropy.memory is registry["EntropyFloorCallback"]["attributes"]["memory"]  # the same object, in place
    mine = [(a["monitor"], a["step"]) for a in alerts_of(resumed.state) if a["monitor"] != "LengthDriftCallback"]
    assert added.memory["seen"] and mine == [(a["monitor"], a["step"]) for a in expected["alerts"]]
    saved = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["stateful_callbacks"][REGISTRY]
    assert saved["LengthDriftCallback"]["args"]["factor"] == 1.5


# ---- The KL coefficient ----

RAISED = {"warn": 1e-9, "limit": 1e-9, "tolerance": 9, "action": "raise_kl"}


def test_ppo_clamps_a_requested_kl_coef_and_applies_it_after_a_resume(tmp_path):
    """The alert of step 1 requests 9 · 0.1, clamped to 0.5, for the rollout of step 5; checkpoint 4 lies between."""
    settings = {"kl_coef": 0.1, "kl_controller": "adaptive", "kl_coef_max": 0.5, "kl_horizon": 1e9, "max_steps": 6}
    for resume in (False, str(tmp_path / "checkpoint-4")):
        monitor = KLBudgetCallback(keys={"kl": "loss/value_avg"}, kl_factor=9, **RAISED)
        trainer = ppo(tmp_path, monitor, save_strategy="steps", save_steps=2, **settings)
        trainer.train(resume_from_checkpoint=resume)
        coefficients = {log["step"]: log.get("objective/kl_coef") for log in trainer.state.log_history}
        assert (coefficients[1], coefficients[5]) == pytest.approx((0.1, 0.5))
        assert take_kl_scale(trainer.state) == 1.0 and not notices_of(trainer.state)
