"""A reward model as a reward function: without a trainer, in TRL's trainers and in ours."""

import copy
import os
import pickle

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from tests.tiny import WORDS, prompts, tiny_gpt2, tiny_llama, tiny_ppo, tiny_reward_model, tiny_tokenizer
from trl_ext.rewards import ModelReward, reward_identity
from trl_ext.rewards.model import batches

PROMPTS, ANSWERS, FINISHED = ["the cat ", "a dog ran "], ["sat", "flew over the sky"], [True, False]


def saved(folder, model=None, tokenizer=None):
    (model or tiny_reward_model(tiny_gpt2(), seed=3)).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return str(folder)


def adapted(folder, base, seed, **kwargs):
    """Save a LoRA adapter with a head, both random, on the reward model in `base`."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model = get_peft_model(
        model, LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"} | kwargs)
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return saved(folder, model)


def alone(model, tokenizer, texts):
    """A model's score of each text, without padding."""
    with torch.no_grad():
        return [model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item() for text in texts]


# ---- Its input ----


@pytest.mark.parametrize("other", [False, True], ids=["same tokenizer", "other tokenizer"])
def test_a_saved_model_scores_each_completion_as_the_text_alone(tmp_path, other):
    tokenizer, policy_tokenizer = tiny_tokenizer(), tiny_tokenizer(words=WORDS[::-1] if other else WORDS)
    reward = ModelReward(saved(tmp_path, tokenizer=tokenizer), policy_tokenizer=policy_tokenizer, batch_size=2)

    answers = policy_tokenizer(ANSWERS, add_special_tokens=False)["input_ids"]
    ids = [row + [policy_tokenizer.eos_token_id] * end for row, end in zip(answers, FINISHED, strict=True)]
    prompt_ids = policy_tokenizer(PROMPTS)["input_ids"]
    scores = reward(PROMPTS, ANSWERS, ids, prompt_ids, topic=["x", "y"])  # a column that it does not need

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    texts = [p + a + " </s>" * end for p, a, end in zip(PROMPTS, ANSWERS, FINISHED, strict=True)]
    assert scores == pytest.approx(alone(model, tokenizer, texts), abs=1e-5)
    assert reward.__name__ == tmp_path.name

    # A stock trainer has no prompt_ids, another caller no token ids at all
    assert reward(PROMPTS, ANSWERS, ids) == pytest.approx(scores, abs=1e-5)
    assert ModelReward(str(tmp_path))(PROMPTS, ANSWERS, finished=FINISHED) == pytest.approx(scores, abs=1e-5)


def test_whether_a_completion_finished_is_not_guessed(tmp_path):
    ids = [[7, 2], [8]]
    path = saved(tmp_path)
    said = ModelReward(path)(PROMPTS, ANSWERS, ids, finished=[True, False])
    assert ModelReward(path, eos_token_ids=[2])(PROMPTS, ANSWERS, ids) == said
    assert ModelReward(path, policy_tokenizer=path)(PROMPTS, ANSWERS, ids) == said
    assert ModelReward(path, eos_token_ids=[8])(PROMPTS, ANSWERS, ids) != said
    with pytest.raises(ValueError, match="cannot tell which completions are finished: call it with `finished`"):
        ModelReward(path)(PROMPTS, ANSWERS, ids)


@pytest.mark.slow
def test_a_row_that_is_too_long_is_refused_or_cut_at_the_left(tmp_path):
    tokenizer, logged = tiny_tokenizer(bos=True), {}
    path = saved(tmp_path, tokenizer=tokenizer)
    reward = ModelReward(path, policy_tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match="has 70 tokens, but the reward model reads 64 at most"):
        reward(["the"], ["cat"], [[6] * 69], [[7]])

    reward = ModelReward(path, max_length=4, truncation="left", name="short")
    scores = reward(
        ["big bird ran on ", "the "], ["the mat", "cat"], finished=[True, False], log_metric=logged.__setitem__
    )
    expected = alone(reward.model, tokenizer, ["the mat </s>", "the cat"])  # after <s>
    assert scores == pytest.approx(expected, abs=1e-5) and logged == {"rewards/short/truncated": 0.5}


# ---- Batches and devices ----


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=pytest.mark.slow), "llama", "bert"])
def test_scores_do_not_depend_on_batches_order_or_padding_side(kind, side):
    """For classifiers that score the last token or the first one, with position ids counted from the left."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertConfig(vocab_size=len(tiny_tokenizer()), num_labels=1, initializer_range=0.2, **sizes)
    model = {
        "gpt2": lambda: tiny_reward_model(tiny_gpt2()),
        "llama": lambda: tiny_reward_model(tiny_llama()),
        "bert": lambda: BertForSequenceClassification(bert),
    }[kind]()
    tokenizer = tiny_tokenizer(bos=True)
    tokenizer.padding_side = side
    rows = prompts(12)["prompt"]
    ended = [i % 3 == 0 for i in range(12)]
    expected = None
    for bounds in ({"batch_size": 1}, {"batch_size": 7}, {"max_batch_tokens": 1}, {"max_batch_tokens": 40}, {}):
        reward = ModelReward(model, tokenizer=tokenizer, **bounds)
        for order in (torch.arange(12), torch.randperm(12)):
            place = order.tolist()
            scores = torch.tensor(
                reward([rows[i] for i in place], [" sat on"] * 12, finished=[ended[i] for i in place])
            )[order.argsort()]
            expected = scores if expected is None else expected
            assert_close(scores, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.05


def test_batches_hold_each_row_once_within_both_bounds():
    lengths = torch.randint(1, 50, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for tokens, rows in ((100, None), (None, 7), (100, 3), (10, None), (None, None)):
        made = batches(lengths, tokens, rows)
        assert sorted(row for batch in made for row in batch) == list(range(200))
        for batch in made:
            longest = max(lengths[row] for row in batch)
            assert tokens is None or len(batch) * longest <= tokens or len(batch) == 1
            assert rows is None or len(batch) <= rows
    assert len(batches(lengths, None, 7)) == 29  # equally many on each process, for any lengths


def test_an_adapter_scores_as_in_peft_also_in_8_bit(tmp_path):
    pytest.importorskip("bitsandbytes")
    base = saved(tmp_path / "base", tiny_reward_model(tiny_llama()))
    path = adapted(tmp_path / "adapter", base, seed=1)
    expected = alone(
        AutoPeftModelForSequenceClassification.from_pretrained(path, num_labels=1).eval(),
        tiny_tokenizer(),
        [p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)],
    )
    for kwargs, tolerance in (({}, 1e-5), ({"dtype": "bfloat16"}, 0.05), ({"load_in_8bit": True}, 0.05)):
        reward = ModelReward(path, **kwargs)
        assert reward(PROMPTS, ANSWERS, finished=[False] * 2) == pytest.approx(expected, abs=tolerance)
    names = {type(module).__name__ for module in reward.model.modules()}
    assert "Linear8bitLt" in names and reward.identity != ModelReward(path).identity


def test_it_is_loaded_unsharded_under_fsdp_and_zero3(tmp_path, monkeypatch):
    """FSDP loads weights only on the first process, and ZeRO-3 partitions them, for a trainer that wraps them."""
    from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled

    class ZeRO3:
        def is_zero3(self):
            return True

    config, seen, load = ZeRO3(), [], AutoModelForSequenceClassification.from_pretrained
    path = saved(tmp_path)
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda: config)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")

    def loading(*args, **kwargs):
        seen.append((is_deepspeed_zero3_enabled(), os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"].lower()))
        return load(*args, **kwargs)

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", loading)
    ModelReward(path)
    assert seen == [(False, "false")] and is_deepspeed_zero3_enabled()


# ---- Its identity ----


def test_its_identity_changes_with_its_scores(tmp_path):
    path = saved(tmp_path / "a")
    reward = ModelReward(path)
    same = ModelReward(saved(tmp_path / "b"), batch_size=3, name="other")
    assert reward_identity(reward) == reward.identity == same.identity
    others = [
        ModelReward(saved(tmp_path / "c", tiny_reward_model(tiny_gpt2(), seed=4))),
        ModelReward(path, tokenizer=tiny_tokenizer(words=WORDS[::-1])),
        ModelReward(path, max_length=32),
        ModelReward(path, dtype="bfloat16"),
        ModelReward(path, truncation="left"),
        ModelReward(path, eos_token_ids=[2]),  # which completions have finished, if no column says so
        ModelReward(path, eos_token_ids=[2, 5]),
    ]
    assert len({reward.identity, *(other.identity for other in others)}) == 8
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    changed = copy.deepcopy(model)
    changed.score.weight.data += 1
    tokenizer = tiny_tokenizer()
    assert ModelReward(model, tokenizer=tokenizer).identity != ModelReward(changed, tokenizer=tokenizer).identity


def test_it_pickles(tmp_path):
    reward = ModelReward(saved(tmp_path))
    again = pickle.loads(pickle.dumps(reward))
    assert again(PROMPTS, ANSWERS, finished=FINISHED) == reward(PROMPTS, ANSWERS, finished=FINISHED)
    assert again.identity == reward.identity


# ---- In trainers ----


def test_in_ppo_it_scores_as_a_reward_model_given_by_path(tmp_path):
    """Also with another tokenizer, from the same ids."""
    other = saved(tmp_path / "other", tokenizer=tiny_tokenizer(words=WORDS[::-1]))
    path, tokenizer = saved(tmp_path / "rm"), tiny_tokenizer()
    functions = [
        each
        for folder in (path, other)
        for each in (folder, ModelReward(folder, policy_tokenizer=tokenizer, max_batch_tokens=20, name="ours"))
    ]
    trainer = tiny_ppo(tmp_path / "ppo", None, functions, max_steps=1)
    rows, calculate = [], trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: rows.append(calculate(*args)) or rows[-1]
    trainer.train()
    assert_close(rows[0][:, [1, 3]], rows[0][:, [0, 2]], rtol=1e-5, atol=1e-5)
    assert rows[0].std(0).min() > 0.05
