import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from recipes.demo.measure import measure
from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import gold, make_world


@pytest.fixture(scope="module")
def models():
    tokenizer = make_tokenizer()
    policy, reference = make_model(tokenizer, 0), make_model(tokenizer, 1)
    with torch.no_grad():
        policy.lm_head.weight *= 20  # far from uniform
        policy.lm_head.weight[tokenizer.eos_token_id] += 0.2
    torch.manual_seed(2)
    config = type(policy.config)(**{**policy.config.to_dict(), "num_labels": 1})
    return policy, reference, AutoModelForSequenceClassification.from_config(config).eval(), tokenizer


@pytest.fixture(scope="module")
def rows():
    return make_world(0, demonstrations=1, pairs=1, prompts=1, held_out=24)["prompts"]["test"]


def test_measures_equal_those_of_each_completion_alone(models, rows):
    policy, reference, reward_model, tokenizer = models
    measured = measure(policy, reference, reward_model, tokenizer, rows)
    for i, row in enumerate(rows):
        prompt, answer = (tokenizer(text)["input_ids"] for text in (row["prompt"], measured.answers[i]))
        answer = answer + [tokenizer.eos_token_id] * int(measured.ended[i])
        if int(measured.length[i]) != len(answer):
            continue  # it sampled a token that texts do not show
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logprobs, ref_logprobs = (
                m(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, len(prompt) - 1 :].sum().double()
                for m in (policy, reference)
            )
            proxy = reward_model(ids).logits[0, 0].double()
        assert_close(measured.kl[i], logprobs - ref_logprobs, rtol=1e-4, atol=1e-3)
        assert_close(measured.entropy[i], -logprobs, rtol=1e-4, atol=1e-3)
        assert_close(measured.proxy[i], proxy, rtol=1e-4, atol=1e-4)
        expected = gold(measured.answers[i], row["product"], row["problem"], bool(measured.ended[i]))
        assert measured.phrase[i] == ("i love you" in measured.answers[i])
        assert measured.gold[i].item() == pytest.approx(expected, abs=1e-6)
