"""Critics, reward models and references with the policy's tokenizer but another number of embedding rows."""

from contextlib import nullcontext

import pytest
from torch.testing import assert_close

from tests.tiny import WORDS, tiny_llama, tiny_ppo, tiny_reward_model, tiny_tokenizer

ROWS = len(tiny_tokenizer())  # the number of tokens; a policy with more rows can sample ids that are no tokens
MORE = ROWS + 11


def logged(trainer):
    names = ("objective", "rewards", "loss", "policy", "val")
    return [{k: v for k, v in log.items() if k.startswith(names)} for log in trainer.state.log_history]


@pytest.mark.slow
def test_embedding_rows_without_a_token_change_nothing(tmp_path):
    """With a critic and a reward model that have more rows than the policy."""
    ends = []
    for rows in (ROWS, MORE):
        policy, critic, reward = tiny_llama(), tiny_reward_model(tiny_llama(), 3), tiny_reward_model(tiny_llama(), 4)
        for model in (critic, reward):
            model.resize_token_embeddings(rows, mean_resizing=False)
        trainer = tiny_ppo(tmp_path / str(rows), policy, reward, value_model=critic)
        trainer.train()
        weights = trainer.model.state_dict()
        table = weights["critic.model.embed_tokens.weight"]
        assert len(table) == rows
        weights["critic.model.embed_tokens.weight"] = table[:ROWS]
        ends.append((weights, logged(trainer)))
    assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


def test_a_model_with_too_few_rows_or_another_tokenizer_is_refused(tmp_path, subtests):
    few, many = tiny_reward_model(tiny_llama(20)), tiny_reward_model(tiny_llama(99))
    tiny_reward_model(tiny_llama(99)).save_pretrained(tmp_path / "classifier")
    tiny_llama(99).save_pretrained(tmp_path / "model")
    for folder in ("classifier", "model"):
        tiny_tokenizer(WORDS[::-1]).save_pretrained(tmp_path / folder)
    other = f"was saved with another tokenizer, in which '{WORDS[0]}' has the id {ROWS - 1}, not 6"
    for kwargs, message in [
        ({"value_model": few}, "`value_model` has no embeddings for tokens"),
        ({"value_model": str(tmp_path / "classifier")}, f"`value_model` .*{other}"),
        ({"ref_model": str(tmp_path / "model")}, f"`ref_model` .*{other}"),
        ({"value_model": many}, ""),
    ]:
        refused = pytest.raises(ValueError, match=message) if message else nullcontext()
        with subtests.test(kwargs=kwargs), refused:
            tiny_ppo(tmp_path, **kwargs)
