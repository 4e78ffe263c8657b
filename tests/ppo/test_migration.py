"""Prompts as token ids, tokens without rows, and what TRL 1.12's own tests of PPO ask for."""

import pytest
import torch
from datasets import Dataset

from tests.ppo.test_vocabularies import logged
from tests.ppo.worker import rows_of
from tests.tiny import length_reward, tiny_gpt2, tiny_llama, tiny_ppo, tiny_reward_model, tiny_tokenizer


def rollout_prompts(trainer):
    """The prompt tokens of the trainer's rollout, without padding, as the policy read them."""
    ids, mask = rows_of(trainer)["prompt_ids"], rows_of(trainer)["prompt_mask"].bool()
    return [row[real].tolist() for row, real in zip(ids, mask, strict=True)]


def test_input_ids_become_the_prompt_tokens_verbatim(tmp_path):
    """No text in between: a second BOS, lost special tokens or another split into tokens would all show."""
    tokenizer = tiny_tokenizer(bos=True)
    rows = [[1, 6, 7, 2, 6], [8], [1, 1, 9, 3, 2], [4, 10, 11, 5], [1, 12], [2, 2], [13, 14, 15], [1, 16, 17]]
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    given = {"train_dataset": Dataset.from_dict({"input_ids": rows}), "processing_class": tokenizer}
    trainer = tiny_ppo(tmp_path, None, reward, max_steps=1, shuffle_dataset=False, **given)
    trainer.train()
    assert rollout_prompts(trainer) == rows
    assert seen == tokenizer.batch_decode(rows, skip_special_tokens=True)  # reward functions read text


def test_stop_token_id_ends_responses(tmp_path):
    tokenizer, stop = tiny_tokenizer(), 9
    model = tiny_llama()
    model.lm_head.weight.data[stop] *= 4  # drawn often
    config = {"stop_token_id": stop, "missing_eos_score": -7.0, "max_completion_length": 20}
    trainer = tiny_ppo(tmp_path, model, max_steps=1, **config)
    trainer.train()
    ids, mask = rows_of(trainer)["completion_ids"], rows_of(trainer)["completion_mask"].bool()
    ended = 0
    for row, real in zip(ids, mask, strict=True):
        tokens = row[real].tolist()
        assert not {stop, tokenizer.eos_token_id} & set(tokens[:-1])
        ended += tokens[-1] == stop
    assert ended >= 1
    log = trainer.state.log_history[0]
    assert log["val/num_eos_tokens"] >= ended  # it counts as an end
    assert log["completions/clipped_ratio"] == 1 - log["val/num_eos_tokens"] / 8


# ---- TRL 1.12's own tests of its PPOTrainer, with models built here ----


@pytest.mark.slow
def test_a_pad_token_out_of_the_vocabulary_changes_nothing(tmp_path):
    """Weights, scores and logs are those of a run that pads by a token of the vocabulary: pads are masked."""
    ends = []
    for pad in ("<unk>", "[PAD]"):
        tokenizer = tiny_tokenizer(pad=False)
        tokenizer.add_special_tokens({"pad_token": pad})
        model = tiny_gpt2(pad_token_id=None)
        rewards = [tiny_reward_model(model, seed=4), length_reward]
        config = {"local_rollout_forward_batch_size": 3, "processing_class": tokenizer}
        trainer = tiny_ppo(tmp_path / pad, model, rewards, **config)
        trainer.train()
        ends.append((trainer.model.state_dict(), logged(trainer)))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)
