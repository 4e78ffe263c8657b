"""Pre-training a critic: its returns and values are PPO's, and a step does not depend on how it is split.

As a script, the runs of each of two processes."""

import sys
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from torch.testing import assert_close

from tests.tiny import ON_CPU, prompts, tiny_gpt2, tiny_llama, tiny_ppo, tiny_reward_model, tiny_tokenizer
from trl_ext import save_base_fingerprint
from trl_ext.callbacks.metrics import METRICS
from trl_ext.ppo import (
    CriticConfig,
    CriticTrainer,
    check_apart,
    load_critic,
    score_rollouts,
    with_finished,
    with_returns,
)

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1}
SCALE = {"gamma": 0.9, "reward_clip_range": (-1.0, 1.5), "missing_eos_penalty": 0.5, "reward_weights": [2.0]}


def token_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def critic_config(folder, **kwargs):
    given = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "max_steps": 3, "eval_on_start": False}
    given |= {"record_run": False}
    return CriticConfig(str(folder), **{**ON_CPU, "activation_checkpointing": False, **given, **kwargs})


def rows(n=16, seed=0, longest=7):
    """Rows whose return at each token is the last token's id over 10."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most):
        return torch.randint(
            6, 26, (int(torch.randint(1, most, (1,), generator=generator)),), generator=generator
        ).tolist()

    parts = [(ids(6), ids(longest)) for _ in range(n)]
    seen = [[*prompt, *answer][len(prompt) - 1 : -1] for prompt, answer in parts]
    return Dataset.from_dict(
        {
            "prompt_ids": [prompt for prompt, _ in parts],
            "completion_ids": [answer for _, answer in parts],
            "returns": [[token / 10 for token in tokens] for tokens in seen],
        }
    )


# ---- As in PPO ----


BY_GROUP = {"reward_normalization": "group", "reward_group_column": "topic", "whiten_rewards": True}


OTHERS = [pytest.param({"reward_normalization": kind}, marks=pytest.mark.slow) for kind in ("batch", "none")]


@pytest.fixture(params=[{"reward_normalization": "running"}, BY_GROUP, *OTHERS])
def rollout(request, tmp_path):
    """The first rollout of a PPO run (λ_value = 1), and its rows as a data set of saved rollouts."""
    given = {"lam": 0.7, "lam_value": 1.0, "kl_coef": 0.3, "value_model": tiny_reward_model(tiny_gpt2())}
    trainer = tiny_ppo(tmp_path, tiny_gpt2(), token_reward, **given, **request.param, **SCALE)
    rolled_out = trainer._generate_and_score_completions(list(prompts(8)))
    ids, masks = ([rolled_out[f"{part}_{what}"] for part in ("prompt", "completion")] for what in ("ids", "mask"))
    columns = [
        [row[m.bool()].tolist() for row, m in zip(i, mask, strict=True)] for i, mask in zip(ids, masks, strict=True)
    ]
    saved = {"prompt": [""] * 8, "completion_ids": columns[1], "prompt_ids": columns[0], "topic": prompts(8)["topic"]}
    return rolled_out, Dataset.from_dict(saved), critic_config(tmp_path / "critic", **request.param, **SCALE)


def test_returns_are_those_of_ppos_first_rollout(rollout):
    """Monte Carlo returns with normalised and clipped scores and the EOS rule; the first rollout's KL is 0."""
    rolled_out, saved, args = rollout
    saved = with_finished(saved, tiny_tokenizer(), [2])
    assert 0 < sum(saved["finished"]) < 8
    saved = saved.add_column("completion", [""] * 8) if "completion" not in saved.column_names else saved
    scores, tokens = score_rollouts(saved, [token_reward], ["token_reward"], batch_size=3)
    returns = with_returns(saved, scores, args, tokens)["returns"][:]
    for row, (ours, mask) in enumerate(zip(returns, rolled_out["completion_mask"].bool(), strict=True)):
        assert_close(torch.tensor(ours), rolled_out["returns"][row][mask], rtol=1e-4, atol=1e-5)


def test_returns_by_hand():
    saved = Dataset.from_dict(
        {"prompt_ids": [[6], [7], [8]], "completion_ids": [[9, 2], [9, 9, 9], [2]], "score": [3.0, 5.0, 1.0]}
    )
    saved = with_finished(saved, tiny_tokenizer(), [2])
    args = critic_config("unused", gamma=0.5, missing_eos_score=-1.0)
    made = with_returns(saved, torch.tensor(saved["score"][:])[:, None], args)
    assert made["returns"][:] == [[1.5, 3.0], [-0.25, -0.5, -1.0], [1.0]]
    left = with_returns(
        saved, torch.tensor(saved["score"][:])[:, None], critic_config("unused", mask_truncated_completions=True)
    )
    assert left["returns"][:] == [[3.0, 3.0], [1.0]]

    def by_token(completion_ids, **kwargs):
        return [[1.0, 2.0], [0.5, 0.0, 0.5], None]

    saved = saved.add_column("prompt", ["a"] * 3).add_column("completion", ["b"] * 3)
    scores, tokens = score_rollouts(saved, [by_token], ["by_token"], batch_size=3)
    made = with_returns(saved, scores, critic_config("unused", gamma=0.5), tokens)
    assert made["returns"][:] == [[2.0, 2.0], [0.625, 0.25, 0.5]]  # the third row has no score


@pytest.mark.parametrize(
    "is_lora", [pytest.param(False, id="full"), pytest.param(True, id="lora", marks=pytest.mark.slow)]
)
def test_ppo_starts_with_the_learned_values(is_lora, tmp_path):
    """A trained and saved critic has the same value at each token in PPO, and explains more than a constant."""
    tokenizer, base = tiny_tokenizer(), tmp_path / "policy"
    tiny_llama(seed=3).save_pretrained(base)
    tokenizer.save_pretrained(base)
    critic, origin = load_critic(str(base), LoraConfig(**LORA) if is_lora else None)
    assert "zero head" in origin
    if is_lora:
        save_base_fingerprint(critic, tmp_path, str(base))
    data = rows(64)
    trainer = CriticTrainer(
        critic,
        critic_config(tmp_path, max_steps=60 if is_lora else 40, learning_rate=3e-2),
        train_dataset=data,
        eval_dataset=rows(16, seed=1),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()
    assert before["eval_val/explained_variance"] == pytest.approx(0, abs=1e-6)
    trainer.train()
    assert trainer.evaluate()["eval_val/explained_variance"] > 0.3
    trainer.save_model()

    peft = LoraConfig(**LORA, task_type="CAUSAL_LM") if is_lora else None
    ppo = tiny_ppo(tmp_path / "ppo", str(base), token_reward, value_model=str(tmp_path), peft_config=peft)
    rolled_out = ppo._generate_and_score_completions(list(prompts(8)))
    prompt, mask = rolled_out["prompt_mask"].sum(1), rolled_out["completion_mask"]
    batch = {
        "input_ids": torch.cat([rolled_out["prompt_ids"], rolled_out["completion_ids"]], dim=1),
        "labels": rolled_out["completion_ids"],
        "token_counts": list(zip(prompt.tolist(), mask.sum(1).tolist(), strict=True)),
    }
    with torch.no_grad():
        values = trainer._values(trainer.model.eval(), batch)
    assert values.abs().max() > 0.1
    assert_close(rolled_out["old_values"] * mask, values * mask, rtol=1e-4, atol=1e-5)


# ---- One step ----


def stepped(folder, rows_a_device, accumulation, packed=True):
    """The weights after two steps on 16 rows with very different lengths."""
    torch.manual_seed(0)
    critic = tiny_reward_model(tiny_llama(), seed=0)
    args = critic_config(
        folder,
        per_device_train_batch_size=rows_a_device,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        padding_free=packed,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0,
        lr_scheduler_type="constant",
    )
    trainer = CriticTrainer(
        critic,
        args,
        train_dataset=rows(32, longest=12),
        eval_dataset=rows(7, seed=2),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    metrics = {name: value for name, value in trainer.evaluate().items() if "val/" in name}
    logs = [log for log in trainer.state.log_history if "val/rmse" in log]
    assert all({metric.key for metric in METRICS["CriticConfig"].values()} <= log.keys() for log in logs)
    logged = [log["val/rmse"] for log in logs]
    return (
        {name: p.detach().clone() for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()},
        metrics,
        logged,
    )


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(4, 4, True), (16, 1, False)], ids=["accumulated", "padded"])
def test_a_step_does_not_depend_on_how_it_is_split(cut, tmp_path):
    whole, metrics, logged = stepped(tmp_path, 16, 1)
    parts, theirs, also = stepped(tmp_path, *cut)
    assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    assert_close(theirs, metrics, rtol=1e-4, atol=1e-6)
    assert_close(also, logged, rtol=1e-4, atol=1e-6)


def test_several_gpus_without_a_launcher_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(CriticConfig, "n_gpu", 2)
    with pytest.raises(ValueError, match="One process sees 2 GPUs: use `accelerate launch`"):
        CriticTrainer(tiny_reward_model(tiny_llama()), critic_config(tmp_path), rows())


# ---- Data ----


def test_rollouts_of_one_prompt_in_both_splits_are_refused():
    train, held_out = (Dataset.from_dict({"prompt_ids": ids}) for ids in ([[1], [2]], [[3], [2]]))
    with pytest.raises(ValueError, match="1 of 2 held-out rollouts answer prompts of the training set"):
        check_apart(train, held_out)
    check_apart(train, held_out.select([0]))


@pytest.mark.parametrize(
    "wrong", [{"finished": [True, True]}, {"completion": ["a", "cat"]}], ids=["another end", "another text"]
)
def test_ids_of_another_tokenizer_are_refused(wrong):
    saved = {"prompt_ids": [[6], [7]], "completion_ids": [[8, 2], [9]]}
    with pytest.raises(ValueError, match="tokenizer of the policy"):
        with_finished(Dataset.from_dict(saved | wrong), tiny_tokenizer(), [2])


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), PartialState(cpu=True).process_index
    data = Dataset.from_dict(
        {"prompt": ["a"] * 5, "completion": ["b"] * 5, "prompt_ids": [[6]] * 5, "completion_ids": [[7]] * 5}
    )
    data = data.add_column("finished", [False] * 5).add_column("number", list(range(5)))
    scores, _ = score_rollouts(data, [lambda number, **_: [float(n) for n in number]], ["number"], 2)
    torch.save((stepped(folder / "two", 8, 1), scores.tolist()), folder / f"process {rank}.pt")
