"""Prompts as token ids, and another token that ends a response."""

from datasets import Dataset

from tests.ppo.worker import rows_of
from tests.tiny import tiny_llama, tiny_ppo, tiny_tokenizer


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
