"""Sampling ignores the checkpoint's settings, padding changes nothing, and each EOS ends a completion."""

import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM

from tests.tiny import tiny_gpt2, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.models import (
    ActorCritic,
    answer_texts,
    completion_logprobs,
    eos_token_ids,
    prompt_token_ids,
    sample,
)
from trl_ext.models.generation import neutral_generation

PROMPTS = [[6, 7, 8], [9], [10, 11, 12, 13, 14, 15]]
SETTINGS = {
    "min_p": 0.5,
    "typical_p": 0.3,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [*range(6, 20)],
    "max_length": 4,
}


def tiny_bloom():
    """A model that takes no `position_ids`."""
    torch.manual_seed(0)
    return BloomForCausalLM(
        BloomConfig(vocab_size=29, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.5, eos_token_id=2)
    )


class StrictLlama(LlamaForCausalLM):
    """A model whose `forward` takes few arguments, as remote code may."""

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask)


def strict_llama():
    return StrictLlama(tiny_llama().config)


MODELS = [tiny_llama, tiny_gpt2, tiny_bloom]


def adapted(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))  # without effect before it is trained


def with_critic(model):
    return ActorCritic(model, tiny_reward_model(model))


def test_the_checkpoints_sampling_settings_are_hidden_within_the_block(subtests):
    ids = torch.tensor([[6, 7, 8]] * 16)

    def generated(model):
        torch.manual_seed(0)
        return model.generate(ids, do_sample=True, max_new_tokens=4, top_k=0, pad_token_id=0, eos_token_id=2)

    for wrap in [lambda model: model, adapted, with_critic, torch.nn.DataParallel]:
        with subtests.test(wrap=wrap):
            plain, model = tiny_llama().eval(), tiny_llama().eval()
            model.generation_config.update(**SETTINGS)
            saved, wrapped = model.generation_config, wrap(model)
            assert not torch.equal(generated(model), generated(plain))
            with neutral_generation(wrapped):
                assert torch.equal(generated(model), generated(plain))
            assert model.generation_config is saved


def test_each_greedy_token_is_the_likeliest_one_also_with_padding(subtests):
    for build in MODELS:
        with subtests.test(build=build):
            model = build().eval()
            answers = sample(model, PROMPTS, [2], max_new_tokens=5, temperature=0.0)
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                ids = list(prompt)
                while len(ids) < len(prompt) + 5 and (len(ids) == len(prompt) or ids[-1] != 2):
                    ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
                assert answer == ids[len(prompt) :]
            for size in (1, 2):
                assert sample(model, PROMPTS, [2], max_new_tokens=5, temperature=0.0, batch_size=size) == answers


def test_logprobs_of_padded_rows_are_those_of_each_row_alone(subtests):
    for build in [*MODELS, strict_llama]:
        with subtests.test(build=build):
            model = build().eval()
            completions = [[16, 2], [17, 18, 19, 20], []]
            logprobs, mask = completion_logprobs(model, PROMPTS, completions, temperature=0.7)
            assert mask.tolist() == [[True, True, False, False], [True] * 4, [False] * 4]
            assert not logprobs.requires_grad and not logprobs[~mask].any()
            for row, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True)):
                expected = (model(torch.tensor([prompt + completion])).logits[0] / 0.7).log_softmax(-1)
                for t, token in enumerate(completion):
                    assert_close(logprobs[row, t], expected[len(prompt) + t - 1, token], rtol=1e-5, atol=1e-5)


def test_completions_end_at_each_eos_of_the_checkpoint_and_the_tokenizer(subtests):
    for wrap in [lambda model: model, adapted, with_critic]:
        with subtests.test(wrap=wrap):
            model = tiny_llama().eval()
            for saved, expected in ((None, [2]), (7, [2, 7]), ([7, 9, 11, 2], [2, 7, 9, 11])):
                model.generation_config.eos_token_id = saved
                ends = eos_token_ids(wrap(model), tiny_tokenizer())
                assert ends == expected
                answers = sample(model, PROMPTS * 32, ends, max_new_tokens=8, seed=0)
                assert {ids[-1] for ids in answers if len(ids) < 8} == set(ends)
                assert not any(token in ends for ids in answers for token in ids[:-1])
            words = answer_texts(
                tiny_tokenizer(), [[6, 7, 9], [6, 7]], ends
            )  # 9 ends the first, though it is an ordinary word
            assert words == ["the a", "the"]


def test_prompts_are_texts_or_messages_with_one_bos():
    tokenizer = tiny_tokenizer(bos=True)
    tokenizer.chat_template = "<s> " + tokenizer.chat_template
    question, begun = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}
    ids = prompt_token_ids(tokenizer, ["the cat", [question], [question, begun]])
    turn = [1, 4, 6, 8, 2, 5]  # <s> <user> the cat </s> <assistant>
    assert ids == [[1, 6, 8], turn, [*turn, 11]]
    assert sample(tiny_llama().eval(), [], [2], max_new_tokens=4) == []
