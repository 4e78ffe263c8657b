"""Bad input raises a clear error before work is lost. (Several processes: test_distributed.py.)"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tiny import (
    WORDS,
    collected,
    length_reward,
    prompts,
    rows_of,
    tiny_llama,
    tiny_ppo,
    tiny_reward_model,
    tiny_tokenizer,
)
from trl_ext.rewards.model import ModelReward

# ---- Input that would train wrongly or fail late ----


def gold(completions, answer, **kwargs):
    return [float(a == b) for a, b in zip(completions, answer, strict=True)]


def rows(**columns):
    return Dataset.from_dict({name: values * 8 for name, values in columns.items()})


WRONG = [
    ({"reward_funcs": gold}, "'gold' needs {'answer'}, but the train dataset"),
    (
        {"reward_funcs": gold, "train_dataset": rows(prompt=["a"], answer=["b"]), "eval_dataset": prompts(4)},
        "the eval",
    ),
    ({"train_dataset": prompts(7)}, "has 7 prompts, but a rollout needs 8"),
    ({"train_dataset": rows(prompt=["cat", ""])}, "8 of 16 prompts of the train dataset are empty"),
    ({"train_dataset": rows(prompt=[[{"role": "user", "content": "cat"}], []])}, "8 of 16 prompts .* are empty"),
    ({"eval_dataset": rows(prompt=["the " * 62])}, "prompt of the eval dataset has 62 tokens.* of 64"),
    ({"value_model": tiny_reward_model(tiny_llama(max_position_embeddings=12))}, "critic's context of 12 tokens"),
    ({"train_dataset": rows(prompt=["a"], image=["x"])}, "images are not supported"),
    ({"train_dataset": rows(prompt=["a"], prompt_ids=["x"])}, "get other values by such names"),
    ({"train_dataset": rows(prompt=["a"], completions=["x"])}, r"the columns \['completions'\]. .* by such names"),
    ({"eval_dataset": prompts(4), "per_device_eval_batch_size": 3, "num_generations": 2}, "3 completions"),
    ({"eval_dataset": {"a": prompts(4), "b": prompts(4)}, "metric_for_best_model": "reward"}, "eval_a_obj"),
    ({"eval_dataset": {"eval": prompts(4)}, "metric_for_best_model": "reward"}, "eval_eval_obj"),
    ({"train_dataset": prompts(7), "eval_dataset": {"train": prompts(8)}}, "has 7 prompts"),
    ({"value_model": tiny_reward_model(tiny_llama(20))}, "`value_model` has no embeddings for tokens"),
    ({"processing_class": tiny_tokenizer([*WORDS, "more", "words"])}, "but the tokenizer has higher ids"),
    ({"use_ref_model": False, "kl_coef": 0, "ref_model": tiny_llama()}, "`use_ref_model=False`"),
    ({"baseline": "mean", "critic_warmup_rollouts": 1}, "`baseline='mean'` uses none"),
    ({"reward_normalization": "reference"}, "the column `completion` of the train dataset"),
    ({"optimizers": (object(), None), "critic_learning_rate": 1e-3}, "`critic_learning_rate` cannot"),
    ({"train_dataset": rows(input_ids=[[6], [7]])}, r"\['prompt'\] not in the dataset"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_input_that_would_train_wrongly_or_fail_late_is_refused_at_once(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        tiny_ppo(tmp_path, **wrong)


@pytest.mark.parametrize("name", ["value_model", "ref_model", "reward_funcs"])
def test_one_object_in_two_roles_is_refused(tmp_path, name):
    model = tiny_llama()
    with pytest.raises(ValueError, match="are the same object, but each must be a separate one"):
        tiny_ppo(tmp_path, model=model, **{name: model})


@pytest.mark.parametrize("what", ["a path", "an adapter", "ModelReward"])
def test_a_reward_model_without_a_head_is_refused(tmp_path, what):
    model, path = tiny_llama(), str(tmp_path / "sft")
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    if what == "an adapter":
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(r=2, task_type="CAUSAL_LM"))
        model.save_pretrained(path := str(tmp_path / "adapter"))
        tiny_tokenizer().save_pretrained(path)
    with pytest.raises(
        ValueError,
        match="no weights for score.weight|has no `score` head|of task type CAUSAL_LM",
    ):
        if what == "ModelReward":
            ModelReward(path)
        tiny_ppo(tmp_path, reward_funcs=path)
    if what == "a path":  # an object is taken as it is
        tiny_ppo(tmp_path, reward_funcs=AutoModelForSequenceClassification.from_pretrained(path, num_labels=1))
        tiny_reward_model(tiny_llama()).save_pretrained(path)
        assert tiny_ppo(tmp_path, reward_funcs=path).reward_func_names == ["sft"]


@pytest.mark.parametrize("pad", ["is EOS", "is missing"])
def test_pad_tokens(tmp_path, pad):
    """Both work: the masks distinguish padding from EOS, so a sampled EOS is trained on and counted."""
    tokenizer = tiny_tokenizer(pad=False)
    if pad == "is EOS":
        tokenizer.pad_token = tokenizer.eos_token
    model = tiny_llama(pad_token_id=None)
    model.lm_head.weight.data[2] *= 3  # so that EOS is frequent
    reward = tiny_reward_model(tiny_llama())
    trainer = tiny_ppo(tmp_path, model=model, reward_funcs=[reward, length_reward], processing_class=tokenizer)
    rollouts = collected(trainer)
    trainer.train()
    assert trainer.processing_class.pad_token_id == tokenizer.eos_token_id
    rows = rows_of(trainer)
    ended = 0
    for ids, mask in zip(rows["completion_ids"], rows["loss_mask"].bool(), strict=True):
        ended += ids[mask][-1].item() == tokenizer.eos_token_id
        assert (ids[mask] == tokenizer.eos_token_id).sum() <= 1
        assert (ids[~mask] == tokenizer.eos_token_id).all()
    assert ended > 0
    assert trainer.state.log_history[0]["val/num_eos_tokens"] == ended

    # a reward model scores each row as the row alone; RewardTrainer also sets its pad token to EOS
    scoring = trainer.reward_funcs[0].function.score.args[0]
    for i in range(len(rows["loss_mask"])):
        row = torch.cat([rows[f"{part}_ids"][i][rows[f"{part}_mask"][i].bool()] for part in ("prompt", "completion")])
        alone = scoring(input_ids=row[None], attention_mask=torch.ones_like(row)[None]).logits[0, 0].item()
        assert rollouts[-1].rewards_per_func[i, 0].item() == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("pad", [True, False])
def test_a_completion_that_reaches_the_context_ends_there(tmp_path, pad):
    """Without pad tokens, or an EOS where EOS pads. No check sees prompts that `reset` makes or `evaluate` gets."""
    trainer = tiny_ppo(
        tmp_path,
        processing_class=tiny_tokenizer(pad=pad),
        generation_kwargs={"suppress_tokens": [0, 2]},
        allow_off_policy_sampling=True,
    )
    rollouts = collected(trainer)
    trainer._generate_and_score_completions([{"prompt": "the " * 60}, {"prompt": "cat"}] * 4)
    assert rollouts[0].lengths.tolist() == [4, 8] * 4 and not rollouts[0].finished.any()


# ---- NaN ----


@pytest.mark.slow
@pytest.mark.parametrize("role, max_grad_norm", [("policy", 1.0), ("policy", 0.0), ("critic", 1.0)])
def test_a_gradient_that_is_not_finite_stops_before_the_step(tmp_path, role, max_grad_norm):
    trainer = tiny_ppo(tmp_path, max_steps=8, max_grad_norm=max_grad_norm, gradient_accumulation_steps=2)
    good = {}

    def poison(grad):
        if trainer.state.global_step == 3:
            good.update({name: value.clone() for name, value in trainer.model.state_dict().items()})
            return grad * float("nan")
        return grad

    next(getattr(trainer.model, role).parameters()).register_hook(poison)
    with pytest.raises(FloatingPointError) as error:
        trainer.train()
    message = str(error.value)
    assert f"The gradient of the {role} is not finite at step 4 (every logged term is finite, so the back" in message
    assert str(tmp_path / "last-good") in message
    assert trainer.state.global_step == 3

    saved = {
        "policy": AutoModelForCausalLM.from_pretrained(tmp_path / "last-good"),
        "critic": AutoModelForSequenceClassification.from_pretrained(tmp_path / "last-good" / "critic"),
    }
    for name, part in saved.items():
        want = {key.removeprefix(f"{name}."): value for key, value in good.items() if key.startswith(f"{name}.")}
        torch.testing.assert_close(part.state_dict(), want, rtol=0, atol=0)
    tiny_ppo(tmp_path / "again", model=saved["policy"], value_model=saved["critic"]).train()  # they are finite
