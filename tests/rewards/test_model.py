"""A reward model as a reward function, outside of any trainer."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.tiny import WORDS, tiny_gpt2, tiny_reward_model, tiny_tokenizer
from trl_ext.rewards import ModelReward

PROMPTS, ANSWERS, FINISHED = ["the cat ", "a dog ran "], ["sat", "flew over the sky"], [True, False]


@pytest.mark.parametrize("pad", ["<pad>", "[PAD]"], ids=["pad", "pad out of the vocabulary"])
@pytest.mark.parametrize("other", [False, True], ids=["same tokenizer", "other tokenizer"])
def test_a_saved_model_scores_each_answer_as_it_does_the_text_alone(tmp_path, other, pad):
    tokenizer, policy_tokenizer = tiny_tokenizer(), tiny_tokenizer(words=WORDS[::-1] if other else WORDS)
    for each in (tokenizer, policy_tokenizer):
        each.add_special_tokens({"pad_token": pad})
    tiny_reward_model(tiny_gpt2(), seed=3).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    eos = policy_tokenizer.eos_token_id
    reward = ModelReward(str(tmp_path), policy_tokenizer=policy_tokenizer, batch_size=2)

    answers = policy_tokenizer(ANSWERS, add_special_tokens=False)["input_ids"]
    scores = reward(
        PROMPTS,
        ANSWERS,
        [ids + [eos] * ended for ids, ended in zip(answers, FINISHED, strict=True)],
        policy_tokenizer(PROMPTS)["input_ids"],
        topic=["x", "y"],  # columns that it has no use for
    )

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    for score, prompt, answer, ended in zip(scores, PROMPTS, ANSWERS, FINISHED, strict=True):
        text = prompt + answer + (" </s>" if ended else "")
        assert score == pytest.approx(model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item(), abs=1e-5)
    assert reward.__name__ == tmp_path.name


def test_an_answer_that_does_not_fit_the_model_raises(tmp_path):
    tokenizer = tiny_tokenizer()
    tiny_reward_model(tiny_gpt2()).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = ModelReward(str(tmp_path), policy_tokenizer=tokenizer)
    with pytest.raises(ValueError, match="has 70 tokens, the reward model's context 64"):
        reward(["the"], ["cat"], [[6] * 69], [[7]])
