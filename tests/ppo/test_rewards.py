"""From completions to scores to token rewards: inputs of reward models, results of functions, order of steps."""

import asyncio
import itertools
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close
from trl import RewardConfig, RewardTrainer

from tests.tiny import (
    CHAT_TEMPLATE,
    ON_CPU,
    WORDS,
    collected,
    length_reward,
    prompts,
    rows_of,
    scripted,
    tiny_gpt2,
    tiny_llama,
    tiny_ppo,
    tiny_reward_model,
    tiny_tokenizer,
    without_clock,
)
from trl_ext.ppo import score_rollouts
from trl_ext.rewards.member import MarksFailures

EQUAL = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
QUESTIONS = ["the cat ", "a dog ran on the mat ", "then it was very happy ", "the "]
ANSWERS = ["sat", "flew over the sky and ran", "sad", "big bird sat on a log"]
FINISHED = [True, False, False, True]
# As in ChatML, text follows the end of the turn: RewardTrainer trains on it
TEMPLATE_WITH_TAIL = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% if not (loop.last and continue_final_message) %} </s> log"
    "{% endif %} {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make(tmp_path, reward_funcs, dataset=None, **config):
    given = {"baseline": "critic", "train_dataset": dataset or prompts(), **config}
    return tiny_ppo(tmp_path / "ppo", None, reward_funcs, **given)


def roll_out(trainer, answers):
    """Score these completions (token ids) of the first prompts instead of sampled ones."""
    rollouts = collected(trainer)
    trainer._generate_single_turn = lambda *_: ([list(ids) for ids in answers], None)
    trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(len(answers))])
    return rollouts[-1]


def answer_ids(tokenizer, answers=ANSWERS, finished=FINISHED):
    ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
    return [row + [tokenizer.eos_token_id] * end for row, end in zip(ids, finished, strict=True)]


# ---- Reward models ----


def messages(role, content):
    return [{"role": role, "content": content}]


def trained_reward_model(tmp_path, tokenizer, chat):
    """A reward model after a step of RewardTrainer, and its scores of the answers as RewardTrainer tokenises them."""
    pairs = {"prompt": QUESTIONS, "chosen": ANSWERS, "rejected": ["very small"] * 4}
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    if chat:
        pairs = {name: [messages(roles[name], text) for text in texts] for name, texts in pairs.items()}
    trainer = RewardTrainer(
        model=tiny_reward_model(tiny_gpt2(), seed=3),
        args=RewardConfig(
            str(tmp_path / "reward"),
            **ON_CPU,
            max_steps=1,
            learning_rate=1e-2,
        ),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
    )
    trainer.train()
    model = trainer.model.eval()
    scores = []
    for i, finished in enumerate(FINISHED):
        ids = trainer.train_dataset[i]["chosen_ids"]
        if not finished:  # the same text without EOS
            ids = (
                tokenizer.apply_chat_template(
                    pairs["prompt"][i] + pairs["chosen"][i], continue_final_message=True, return_dict=True
                )["input_ids"]
                if chat
                else tokenizer(QUESTIONS[i] + ANSWERS[i])["input_ids"]
            )
            assert trainer.train_dataset[i]["chosen_ids"][: len(ids)] == ids
        with torch.no_grad():
            scores.append(model(input_ids=torch.tensor([ids])).logits.item())
    assert len({round(score, 4) for score in scores}) == 4
    return model, scores


def questions(chat):
    return Dataset.from_dict({"prompt": [messages("user", q) for q in QUESTIONS] * 2 if chat else QUESTIONS * 2})


@pytest.mark.slow
@pytest.mark.parametrize("other", [False, True], ids=["same_tokenizer", "other_tokenizer"])
def test_a_score_is_that_of_reward_trainer_on_the_same_text(subtests, tmp_path, other):
    tokenizers = [{"bos": False, "pad": True}, {"bos": True, "pad": True}, {"bos": False, "pad": False}]
    chats = {"text": None, "chat": CHAT_TEMPLATE, "chat with a tail": TEMPLATE_WITH_TAIL}
    for (name, chat), options in itertools.product(chats.items(), tokenizers):
        with subtests.test(chat=name, **options):
            policy_tokenizer = tiny_tokenizer(**options)
            # The other tokenizer has other ids for the words, and BOS exactly where the policy's has none
            words, bos = WORDS[::-1] if other else WORDS, options["bos"] != other
            reward_tokenizer = tiny_tokenizer(words=words, bos=bos, pad=options["pad"])
            policy_tokenizer.chat_template = reward_tokenizer.chat_template = chat
            model, expected = trained_reward_model(tmp_path, reward_tokenizer, chat)
            trainer = make(
                tmp_path,
                model,
                questions(chat),
                processing_class=policy_tokenizer,
                reward_processing_classes=reward_tokenizer,
            )
            rollout = roll_out(trainer, answer_ids(policy_tokenizer))
            assert_close(rollout.rewards_per_func[:, 0], torch.tensor(expected), **CLOSE)


@pytest.mark.parametrize(
    "other", [pytest.param(False, marks=pytest.mark.slow), True], ids=["same_tokenizer", "other_tokenizer"]
)
def test_scores_do_not_depend_on_the_chunks_of_reward_models(tmp_path, other):
    tokenizer = tiny_tokenizer(words=WORDS[::-1] if other else WORDS)
    scores = []
    for size in (1, 3, 64):
        reward = tiny_reward_model(tiny_gpt2(), seed=3)
        trainer = make(
            tmp_path,
            reward,
            questions(False),
            reward_processing_classes=tokenizer,
            local_rollout_forward_batch_size=size,
        )
        rows = []
        reward.score.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(len(args[0])))
        rollout = roll_out(trainer, answer_ids(tiny_tokenizer()))
        assert rows == {1: [1] * 4, 3: [3, 1], 64: [4]}[size]
        scores.append(rollout.rewards_per_func)
    assert_close(scores[1:], scores[:1] * 2, **CLOSE)


# ---- Reward functions ----


async def async_length_reward(completions, **kwargs):
    await asyncio.sleep(0)
    return length_reward(completions)


class AsyncReward:
    """Async through `__call__`."""

    async def __call__(self, completions, **kwargs):
        return length_reward(completions)


def none_if_short(completions, **kwargs):
    return [None if len(text.split()) < 2 else 10.0 for text in completions]


def test_scores_are_weighted_sums_over_the_functions_that_apply(tmp_path):
    """score = Σ w_i s_i over the functions that returned a number: sync ones, async ones and models."""
    model = tiny_reward_model(tiny_gpt2(), seed=3)
    functions = [length_reward, async_length_reward, none_if_short, AsyncReward(), model]
    trainer = make(
        tmp_path,
        functions,
        questions(False),
        reward_processing_classes=[None] * 4 + [tiny_tokenizer()],
        reward_weights=[1.0, -3.0, 0.5, 0.25, 2.0],
    )
    rollout = roll_out(trainer, answer_ids(tiny_tokenizer()))
    per_function = rollout.rewards_per_func
    lengths = torch.tensor([len(text.split()) for text in ANSWERS], dtype=torch.float32)
    assert_close(per_function[:, [0, 1, 3]], lengths[:, None].expand(4, 3), **EQUAL)
    expected = lengths * (1 - 3 + 0.25) + torch.tensor([0.0, 5.0, 0.0, 5.0]) + 2 * per_function[:, 4]
    assert_close(rollout.scores, expected, **CLOSE)
    assert rollout.finished.tolist() == FINISHED


class Judge(MarksFailures):
    """Fails on the second completion, and does not apply to the third."""

    def scores_or_nan(self, prompts, completions, **kwargs):
        return [-5.0, math.nan, None, -5.0]


class OwnSkip:
    on_error = "skip"

    def __call__(self, completions, **kwargs):
        return [-5.0, None, -5.0, -5.0]


def test_a_failed_reward_leaves_no_score_unless_its_weight_is_0(tmp_path):
    for judge in (Judge(), OwnSkip()):
        rollout = roll_out(make(tmp_path, [length_reward, judge], questions(False)), answer_ids(tiny_tokenizer()))
        assert rollout.valid.tolist() == [True, False, True, True]
        assert rollout.rewards_per_func[1].isnan().tolist() == [False, True]
        trainer = make(tmp_path, [length_reward, judge], questions(False), reward_weights=[1.0, 0.0])
        assert roll_out(trainer, answer_ids(tiny_tokenizer())).valid.all()
        rows = Dataset.from_dict({"prompt": QUESTIONS, "completion": ANSWERS, "completion_ids": [[1]] * 4})
        scores, _ = score_rollouts(rows, [length_reward, judge], ["length", "judge"], 4)
        assert scores[1].isnan().all() and not scores[::2, 0].isnan().any()
    with pytest.raises(RuntimeError, match="At step 0, .*reward function 'raises'"):
        score_rollouts(rows, [judge, raises], ["judge", "raises"], 4)


def raises(completions):
    raise KeyError("no such key")


MISTAKES = {  # what it returns -> the message, and the class of the error
    "raises": (raises, "KeyError: 'no such key'", KeyError),
    "too few": (lambda c: [1.0] * (len(c) - 1), "each completion, 8 in all; got 7", ValueError),
    "NaN": (lambda c: [0.0, math.nan] + [0.0] * (len(c) - 2), "returned nan for completion 1", ValueError),
    "a string": (lambda c: [1.0, "2"] + [0.0] * (len(c) - 2), "returned '2' for completion 1", TypeError),
    "tokens": (lambda c: torch.ones(len(c), 7), "each token of completion 0, 2 in all; got 7", ValueError),
    "None": (lambda c: None, "must return a list .* got NoneType", TypeError),
}


def right_once(wrong, kind):
    """A reward function whose second call is wrong."""
    calls = []

    def judge(completions, **kwargs):
        calls.append(1)
        return length_reward(completions) if len(calls) == 1 else wrong(completions)

    async def async_judge(completions, **kwargs):
        return judge(completions)

    return judge if kind == "sync" else async_judge


@pytest.mark.slow
def test_an_error_names_function_row_and_step(subtests, tmp_path):
    """In the second rollout, at step 1, beside a function without errors."""
    for mistake, kind in [*((m, "sync") for m in MISTAKES), ("raises", "async")]:
        with subtests.test(mistake=mistake, kind=kind):
            wrong, message, cause = MISTAKES[mistake]
            function = right_once(wrong, kind)
            trainer = make(
                tmp_path,
                [length_reward, function],
                per_device_train_batch_size=8,
                num_mini_batches=1,
                num_ppo_epochs=1,
                max_completion_length=2,
                max_steps=2,
            )
            message = f"^At step 1, process 0: reward function '{function.__name__}': .*{message}"
            with pytest.raises(RuntimeError, match=message) as error:
                trainer.train()
            assert "length_reward" not in str(error.value)
            assert isinstance(error.value.__cause__, cause)


# ---- Rows without a score ----


@pytest.mark.slow
def test_a_row_without_a_score_is_masked_out_of_loss_moments_and_metrics(tmp_path):
    """The completions for which all functions return None change nothing except their count."""

    def judge(topic, completions, **kwargs):
        return [None if t == "topic 0" else float(len(c)) for t, c in zip(topic, completions, strict=True)]

    dataset = prompts(8)
    unscored = [topic == "topic 0" for topic in dataset["topic"]]
    by_prompt = {prompt: i for i, prompt in enumerate(dataset["prompt"])}
    assert len(by_prompt) == 8 and sum(unscored) == 3
    generator = torch.Generator().manual_seed(0)
    answers = torch.randint(6, 26, (2, 8, 5), generator=generator)
    answers[1, [not u for u in unscored]] = answers[0, [not u for u in unscored]]
    ends = []
    for ids in answers.tolist():
        config = {"reward_normalization": "running", "whiten_rewards": True}
        trainer = make(tmp_path, judge, dataset, **config, kl_controller="adaptive", kl_target=0.1)
        decode = trainer.processing_class.batch_decode
        trainer._generate_single_turn = lambda prompt_ids, *_, ids=ids, decode=decode: (
            [ids[by_prompt[prompt]] for prompt in decode(prompt_ids)],
            None,
        )
        trainer.train()
        logs = [without_clock(log) for log in trainer.state.log_history]
        ends.append((trainer.model.state_dict(), trainer.reward_normalizer.state_dict(), logs))
        without = rows_of(trainer)["loss_mask"].sum(1) == 0
        assert without.sum() == 3 and rows_of(trainer)["advantages"][without].abs().sum() == 0
    assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)
    first = ends[0][2][0]
    assert first["objective/num_unscored"] == 3
    scores = judge(dataset["topic"], decode(answers[0]))
    scores = torch.tensor([score for score in scores if score is not None], dtype=torch.float64)
    assert_close(first["objective/scores"], scores.mean().item())
    assert_close(first["objective/scores_std"], scores.std().item())
    assert_close(trainer.reward_normalizer.running[:2], torch.tensor([5.0, scores.mean()], dtype=torch.float64))


def test_rollouts_without_any_score_change_nothing(tmp_path):
    trainer = make(tmp_path, lambda prompts, **_: [None] * len(prompts), reward_normalization="batch")
    before = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    trainer.train()
    assert_close(trainer.model.state_dict(), before, **EQUAL)
    assert trainer.state.log_history[0]["objective/num_unscored"] == 8
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)
    with pytest.raises(ValueError, match="no completion got a score"):
        for _ in range(3):
            trainer.train()


# ---- The order of the steps ----


@pytest.mark.parametrize("eos_rule", ["missing_eos_score", "missing_eos_penalty"])
def test_the_order_of_steps_from_score_to_token_rewards(tmp_path, token_rewards, eos_rule):
    """score → missing EOS → normalise → clip → − β KL per token → whiten, in float64."""
    given = [3.0, -1.0, None, 0.5, 2.0, 7.0, -4.0, -9.0]
    finished = [True, False, True, False, True, True, False, True]
    trainer = make(
        tmp_path,
        lambda prompts, **_: given,
        ref_model=tiny_llama(seed=7),
        reward_normalization="batch",
        reward_clip_range=[-0.8, 1.1],
        kl_coef=0.2,
        whiten_rewards=True,
        **{eos_rule: 1.5},
    )
    answers = [WORDS[i : i + 1 + i % 5] for i in range(8)]
    ids = answer_ids(tiny_tokenizer(), [" ".join(a) for a in answers], finished)
    trainer._generate_single_turn = lambda *_: (ids, None)
    rollout = trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(8)])

    scores = []
    for score, ends in zip(given, finished, strict=True):
        if score is not None and not ends:
            score = 1.5 if eos_rule == "missing_eos_score" else score - 1.5
        scores.append(score)
    valid = [score for score in scores if score is not None]
    mean = sum(valid) / 7
    std = math.sqrt(sum((score - mean) ** 2 for score in valid) / 6)
    shaped = [None if score is None else min(max((score - mean) / std, -0.8), 1.1) for score in scores]
    assert {-0.8, 1.1} < set(shaped)  # some were clipped, some were not

    tokens = {}
    for i, score in enumerate(shaped):
        if score is None:
            continue
        n = int(rollout["completion_mask"][i].sum())
        ids = torch.cat([rollout["prompt_ids"][i][rollout["prompt_mask"][i].bool()], rollout["completion_ids"][i, :n]])
        with torch.no_grad():
            policy, reference = (
                m(input_ids=ids[None]).logits[0, -n - 1 : -1].double().log_softmax(-1).gather(1, ids[-n:, None])[:, 0]
                for m in (trainer.model.policy, trainer.ref_model)
            )
        for t in range(n):
            tokens[i, t] = -0.2 * (policy[t] - reference[t]).item() + (score if t == n - 1 else 0.0)
    mean = sum(tokens.values()) / len(tokens)
    std = math.sqrt(sum((r - mean) ** 2 for r in tokens.values()) / (len(tokens) - 1))
    expected = torch.zeros_like(token_rewards[0])
    for place, reward in tokens.items():
        expected[place] = (reward - mean) / std + mean
    assert_close(token_rewards[0], expected, rtol=1e-4, atol=1e-5)


def test_the_kl_of_scored_rows_updates_the_coefficient_after_the_rewards(tmp_path, token_rewards):
    """Rewards and log have the old coefficient; the controller reads k1 whatever the rewards' estimator."""
    trainer = make(
        tmp_path,
        lambda prompts, **_: [None, None, *[0.0] * 6],
        ref_model=tiny_llama(seed=7),
        kl_controller="adaptive",
        kl_estimator="k3",
        kl_coef=0.2,
        max_steps=1,
    )
    rollouts, given, update = collected(scripted(trainer)), [], trainer.kl_controller.update
    trainer.kl_controller.update = lambda *args: given.append(args) or update(*args)
    trainer.train()
    (rollout,), ((kl, episodes),) = rollouts, given
    log_ratios = [
        (rollout.logprobs[i, :n] - rollout.ref_logprobs[i, :n]).double()
        for i, n in enumerate(rollout.lengths.int().tolist())
    ]
    assert len({len(row) for row in log_ratios}) > 2
    assert episodes == 6 and kl == pytest.approx(sum(row.sum().item() for row in log_ratios[2:]) / 6, rel=1e-5)
    expected = torch.zeros(token_rewards[0].shape)
    for i, row in enumerate(log_ratios[2:], start=2):
        expected[i, : len(row)] = -0.2 * ((-row).exp() - 1 + row)
    assert_close(token_rewards[0], expected, rtol=1e-4, atol=1e-5)
    assert trainer.state.log_history[0]["objective/kl_coef"] == pytest.approx(0.2) != trainer.kl_controller.kl_coef


# ---- Normalisation ----


@pytest.mark.parametrize("kind", ["running", "batch", "group"])
def test_normalisation_equals_a_slow_reference(tmp_path, token_rewards, kind):
    """Three rollouts of noisy scores, some None; what enters the token rewards is (score − mean) / deviation of …"""
    generator = np.random.default_rng(0)
    rollouts = []

    def judge(completions, topic, **kwargs):
        scores = [None if i == 3 else generator.normal(5, 3) for i in range(len(completions))]
        rollouts.append(list(zip(topic, scores, strict=True)))
        return scores

    trainer = make(
        tmp_path,
        judge,
        reward_normalization=kind,
        reward_group_column="topic" if kind == "group" else None,
        kl_coef=0.0,
        num_ppo_epochs=1,
        max_steps=6,
    )
    trainer.train()
    assert len(rollouts) == len(token_rewards) == 3
    for k, rollout in enumerate(rollouts):
        so_far = [row for earlier in rollouts[: k + 1] for row in earlier]
        for i, (topic, score) in enumerate(rollout):
            if score is None:
                continue
            pool = {
                "running": [s for _, s in so_far if s is not None],
                "batch": [s for _, s in rollout if s is not None],
                "group": [s for t, s in so_far if s is not None and t == topic],
            }[kind]
            # One score has no deviation: it is only centred
            expected = (score - np.mean(pool)) / (np.std(pool, ddof=1) if len(pool) > 1 else 1.0)
            assert_close(token_rewards[k][i].sum().item(), expected, rtol=1e-4, atol=1e-5)
        assert token_rewards[k][3].abs().sum() == 0
