"""Bad input: a clear error before anything is lost. (Several processes: test_distributed.py.)"""

import copy

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, ProcessorMixin

from tests.ppo.worker import collected, rows_of
from tests.tiny import WORDS, length_reward, prompts, tiny_config, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext import PPOTrainer
from trl_ext.ppo.inputs import check_prompt_lengths
from trl_ext.rewards.model import ModelReward


def make(tmp_path, model=None, reward_funcs=length_reward, train_dataset=None, config=None, **kwargs):
    return PPOTrainer(
        **{
            "model": model or tiny_llama(),
            "reward_funcs": reward_funcs,
            "args": tiny_config(tmp_path, **(config or {})),
            "train_dataset": prompts() if train_dataset is None else train_dataset,
            "processing_class": tiny_tokenizer(),
            **kwargs,
        }
    )


# ---- Reward functions ----


def test_a_reward_function_that_could_not_be_called_is_refused_before_training(tmp_path):
    def gold(completions, answer, **kwargs):
        return [float(a == b) for a, b in zip(completions, answer, strict=True)]

    def narrow(prompts, completions):
        return [0.0 for _ in completions]

    with pytest.raises(ValueError, match="'gold' needs answer, but the train dataset has the columns prompt, topic"):
        make(tmp_path, reward_funcs=gold)
    rows = prompts().add_column("answer", ["a"] * 16)
    with pytest.raises(ValueError, match="'gold' needs answer, but the eval dataset has"):
        make(tmp_path, reward_funcs=gold, train_dataset=rows, eval_dataset=prompts(4))
    make(tmp_path, reward_funcs=[gold, length_reward], train_dataset=rows)
    with pytest.raises(
        TypeError, match=r"'narrow' does not take completion_ids, .*: let its last argument be `\*\*kwargs`"
    ):
        make(tmp_path, reward_funcs=narrow)


@pytest.mark.slow
def test_a_mistake_in_the_middle_of_a_run_names_its_step_and_loses_no_checkpoint(tmp_path):
    calls = []

    def fails_at_third_rollout(completions, **kwargs):
        calls.append(1)
        return length_reward(completions) if len(calls) < 3 else None

    config = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4}
    with pytest.raises(RuntimeError, match="At step 8, .*'fails_at_third_rollout'"):
        make(tmp_path, reward_funcs=fails_at_third_rollout, config=config).train()
    resumed = make(tmp_path, reward_funcs=fails_at_third_rollout, config=config)
    calls.clear()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert resumed.state.global_step == 12 and len(calls) == 1


@pytest.mark.slow
def test_a_reward_model_that_runs_out_of_context(tmp_path):
    reward = tiny_reward_model(tiny_llama(max_position_embeddings=6))
    with pytest.raises(
        RuntimeError, match=r"a prompt with its completion has \d+ tokens, but the reward model's context has 6"
    ):
        make(tmp_path, reward_funcs=reward).train()


# ---- Datasets ----


def long_prompts():
    rows = prompts().to_list()
    rows[3]["prompt"] = " ".join(["cat"] * 60)
    rows[5]["prompt"] = " ".join(["cat"] * 57)
    rows[6]["prompt"] = " ".join(["cat"] * 56)  # just fits: 56 + 8 = 64
    return Dataset.from_list(rows)


@pytest.mark.slow
def test_datasets(subtests, tmp_path):
    for dataset, error, message in [
        (None, ValueError, "`train_dataset` is required"),
        (
            long_prompts(),
            ValueError,
            r"2 of 16 prompts in the train dataset .*`max_completion_length=8`.*longest prompt: 60",
        ),
        (prompts().select([]), ValueError, "The train dataset is empty"),
        (
            prompts(7),
            ValueError,
            r"has 7 prompts, but a rollout needs 8 .*4 × .*1 × .*2 × 1 processes.* Lower one of the first three",
        ),
        (
            prompts().rename_column("prompt", "query"),
            ValueError,
            r"needs a column `prompt` .*; it has \['query', 'topic'\]",
        ),
        (
            prompts().add_column("image", [None] * 16),
            ValueError,
            "has images; vision-language models are not supported",
        ),
        (
            IterableDataset.from_generator(lambda: iter(())),
            TypeError,
            "must be a `datasets.Dataset`, got IterableDataset",
        ),
        ([{"prompt": "a"}] * 16, TypeError, "must be a `datasets.Dataset`, got list"),
        (
            Dataset.from_dict({"prompt": ["cat", ""] * 8}),
            ValueError,
            r"8 of 16 prompts .* are empty \(the first is row 1",
        ),
    ]:
        with subtests.test(message=message):

            def build(**kwargs):
                PPOTrainer(
                    model=tiny_llama(),
                    reward_funcs=length_reward,
                    args=tiny_config(tmp_path),
                    processing_class=tiny_tokenizer(),
                    **kwargs,
                )

            with pytest.raises(error, match=message):
                build(train_dataset=dataset)
            if dataset is not None and "rollout" not in message:  # an eval set may be smaller than a rollout
                with pytest.raises(error, match=message.replace("train", "eval")):
                    build(train_dataset=prompts(), eval_dataset=dataset)
                with pytest.raises(error, match=message.replace("train", "second")):
                    build(train_dataset=prompts(), eval_dataset={"first": prompts(), "second": dataset})


@pytest.mark.slow
def test_rows_that_are_no_prompts_are_named(subtests, tmp_path):
    def chat(**message):
        return {"prompt": [[{"role": "user", "content": "the cat"}]] * 7 + [[message]]}

    ids = "row 7: `input_ids` must be a list of token ids below 29, the policy's vocabulary, got "
    for rows, message in [
        ({"prompt": ["a"] * 7 + [None]}, "must hold text or messages, but 1 of 8 rows do not .*row 7, with None"),
        ({"prompt": [3] * 8}, "8 of 8 rows do not .* row 0, with 3"),
        ({"prompt": [b"cat"] * 8}, "8 of 8 rows do not .* row 0, with b'cat'"),
        ({"prompt": ["a"] * 7 + ["  "]}, r"1 of 8 prompts .* are empty \(the first is row 7\)"),
        (chat(role="user", content=None), "1 of 8 rows do not .* row 7, with .*'content': None"),
        (chat(role=None, content="a"), "1 of 8 rows do not .* row 7, with .*'role': None"),
        ({"prompt": [[{"role": "user"}]] * 8}, "8 of 8 rows do not .* row 0, with"),
        ({"input_ids": [[6]] * 7 + [None]}, f"{ids}None"),
        ({"input_ids": [[6]] * 7 + [[6, None]]}, ids),
        ({"input_ids": [[6]] * 7 + [[29]]}, rf"{ids}\[29\]"),
        ({"input_ids": [[6]] * 7 + [[-1]]}, rf"{ids}\[-1\]"),
        ({"input_ids": [[6.5]] * 8}, r"`input_ids` must be .*, got \[6.5\]"),
        ({"input_ids": [["a"]] * 8}, r"`input_ids` must be .*, got \['a'\]"),
        ({"input_ids": [6] * 8}, "`input_ids` must be .*, got 6"),
        (
            {"input_ids": [[6, 7]] * 8, "attention_mask": [[1]] * 8},
            "`attention_mask` has 1 entries, but `input_ids` has 2",
        ),
    ]:
        with subtests.test(rows=rows), pytest.raises(ValueError, match=message):
            make(tmp_path, train_dataset=Dataset.from_dict(rows))
    padding = {"input_ids": [[99, 6]] * 8, "attention_mask": [[0, 1]] * 8}  # is masked, whatever it is
    make(tmp_path, train_dataset=Dataset.from_dict(padding), config={"max_steps": 1}).train()


@pytest.mark.parametrize("whose", ["the policy's tokenizer", "the tokenizer of reward model 'reward_model_0'"])
def test_messages_need_a_chat_template(tmp_path, whose):
    without = tiny_tokenizer()
    without.chat_template = None
    tokenizer, other = (without, tiny_tokenizer()) if "policy" in whose else (tiny_tokenizer(), without)
    arguments = {
        "processing_class": tokenizer,
        "reward_funcs": tiny_reward_model(tiny_llama()),
        "reward_processing_classes": [other],
    }
    messages = Dataset.from_dict({"prompt": [[{"role": "user", "content": "the cat"}]] * 8})
    text = Dataset.from_dict({"prompt": ["the cat"] * 8})
    make(tmp_path, train_dataset=text, **arguments)
    for name, datasets in (("train", (messages, text)), ("eval", (text, messages))):
        with pytest.raises(
            ValueError, match=f"the prompts of the {name} dataset are messages, but {whose} .* no chat"
        ):
            make(tmp_path, train_dataset=datasets[0], eval_dataset=datasets[1], **arguments)


def test_a_missing_column_is_named(subtests, tmp_path):
    for config, column in [
        ({"reward_normalization": "group", "reward_group_column": "subject"}, "subject"),
        ({"reward_normalization": "reference"}, "completion"),
    ]:
        message = f"reads the column '{column}', but the train dataset has .*'prompt', 'topic'"
        with subtests.test(config=config), pytest.raises(ValueError, match=message):
            make(tmp_path, config=config)


# ---- Models and tokenizers ----


class Processor(ProcessorMixin):
    def __init__(self):
        pass


def test_models_and_tokenizers(subtests, tmp_path):
    for build, message in [
        (
            lambda m: {"value_model": tiny_reward_model(tiny_llama(20))},
            "`value_model` has a vocabulary of 20 .* ids up to 28",
        ),
        (lambda m: {"ref_model": tiny_llama(20)}, "`ref_model` has a vocabulary of 20 tokens, but the policy has 29"),
        (
            lambda m: {"processing_class": tiny_tokenizer([*WORDS, "more", "words"])},
            "tokenizer has token ids up to 30, .* only 29",
        ),
        (lambda m: {"value_model": two_labels()}, "`value_model` must have one label, got num_labels=2"),
        (lambda m: {"reward_funcs": two_labels()}, "Reward model .* has num_labels=2; a reward model needs one label"),
        (
            lambda m: {"value_model": tiny_llama()},
            "`value_model` must be a sequence classifier .*, got LlamaForCausalLM",
        ),
        (lambda m: {"ref_model": m}, "`model` and `ref_model` are the same object"),
        (lambda m: {"value_model": m}, "`model` and `value_model` are the same object"),
        (
            lambda m: dict.fromkeys(("value_model", "reward_funcs"), tiny_reward_model(m)),
            "`value_model` and reward function 0",
        ),
        (lambda m: {"processing_class": Processor()}, "Vision-language models are not supported"),
        (lambda m: {"processing_class": None}, "`model` was built in memory, so its tokenizer is not known"),
        (
            lambda m: {"config": {"use_ref_model": False, "kl_coef": 0}, "ref_model": tiny_llama()},
            "`use_ref_model=False`",
        ),
        (lambda m: {"processing_class": without_eos()}, "The tokenizer has no EOS token, so no answer would end"),
        (
            lambda m: {"config": {"stop_token_id": 29}},
            r"`stop_token_id=29` is not in the policy's vocabulary \(0 to 28\)",
        ),
        (
            lambda m: {"config": {"reward_weights": [1.0, 2.0]}},
            r"reward weights \(2\) must match number of reward functions",
        ),
        (lambda m: {"reward_processing_classes": [None, None]}, r"processing classes \(2\) must match"),
    ]:
        with subtests.test(message=message):
            model = tiny_llama()
            with pytest.raises(ValueError, match=message):
                make(tmp_path, model=model, **build(model))


def test_a_classifier_of_two_labels_is_refused(tmp_path, subtests):
    path = str(tmp_path / "two")
    config = tiny_llama().config
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    for given in ({"reward_funcs": path}, {"value_model": path}):
        with subtests.test(given=given), pytest.raises(ValueError, match=f"{path} has num_labels=2 in its config"):
            make(tmp_path, **given)


@pytest.mark.parametrize("what", ["a path", "an adapter", "ModelReward"])
def test_a_reward_model_without_a_head_is_refused(tmp_path, what):
    model, path = tiny_llama(), str(tmp_path / "sft")
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    if what == "an adapter":
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(r=2, task_type="CAUSAL_LM"))
        model.save_pretrained(path := str(tmp_path / "adapter"))
        tiny_tokenizer().save_pretrained(path)
    with pytest.raises(ValueError, match="no weights for score.weight, so .* random|has no `score` head"):
        if what == "ModelReward":
            ModelReward(path)
        make(tmp_path, reward_funcs=path)
    if what == "a path":  # whoever passes an object knows what it is
        make(tmp_path, reward_funcs=AutoModelForSequenceClassification.from_pretrained(path, num_labels=1))
        tiny_reward_model(tiny_llama()).save_pretrained(path)
        assert make(tmp_path, reward_funcs=path).reward_func_names == ["sft"]


def without_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


def two_labels():
    config = copy.deepcopy(tiny_llama().config)
    config.num_labels = 2
    return AutoModelForSequenceClassification.from_config(config)


def test_a_config_of_another_trainer(tmp_path):
    from trl import RLOOConfig

    with pytest.raises(TypeError, match="`args` must be a `PPOConfig`, got RLOOConfig"):
        make(tmp_path, args=RLOOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_critic_learning_rate_with_an_optimizer_of_the_caller(tmp_path):
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`critic_learning_rate` cannot be applied to an optimizer"):
        make(tmp_path, model=model, optimizers=(optimizer, None), config={"critic_learning_rate": 1e-3})


@pytest.mark.parametrize("pad", ["is EOS", "is missing"])
def test_pad_tokens(tmp_path, pad):
    """Both work: padding is told from EOS by the masks, so an EOS that was drawn is trained on, and counted."""
    tokenizer = tiny_tokenizer(pad=False)
    if pad == "is EOS":
        tokenizer.pad_token = tokenizer.eos_token
    model = tiny_llama(pad_token_id=None)
    model.lm_head.weight.data[2] *= 3  # EOS is drawn often
    reward = tiny_reward_model(tiny_llama())
    trainer = make(tmp_path, model=model, reward_funcs=[reward, length_reward], processing_class=tokenizer)
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

    # a reward model scores each row as it does the row alone; RewardTrainer sets its pad token to EOS, too
    scoring = trainer.reward_funcs[0].function.score.args[0]
    for i in range(len(rows["loss_mask"])):
        row = torch.cat([rows[f"{part}_ids"][i][rows[f"{part}_mask"][i].bool()] for part in ("prompt", "completion")])
        alone = scoring(input_ids=row[None], attention_mask=torch.ones_like(row)[None]).logits[0, 0].item()
        assert rollouts[-1].rewards_per_func[i, 0].item() == pytest.approx(alone, abs=1e-5)


# ---- The output folder ----


@pytest.mark.slow
def test_the_output_folder_of_another_configuration(tmp_path):
    config = {"save_strategy": "steps", "save_steps": 2}
    make(tmp_path, config=config).train()
    with pytest.raises(ValueError, match=r"checkpoint-4 belongs to another configuration \(vf_coef: 0.1 → 0.5\)"):
        make(tmp_path, config={**config, "vf_coef": 0.5}).train(True)
    with pytest.raises(
        ValueError, match=r"another configuration .*the dataset's rows changed .16 rows before, 24 now."
    ):
        make(tmp_path, config=config, train_dataset=prompts(24)).train(True)
    assert make(tmp_path, config=config).train(True).global_step == 4  # it is complete
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        make(tmp_path, config=config).train(resume_from_checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match="No complete checkpoint in .*, so there is nothing to resume"):
        make(tmp_path / "new", config=config).train(resume_from_checkpoint=True)


# ---- NaN ----


@pytest.mark.slow
@pytest.mark.parametrize("role, max_grad_norm", [("policy", 1.0), ("policy", 0.0), ("critic", 1.0)])
def test_a_gradient_that_is_not_finite_stops_before_the_step(tmp_path, role, max_grad_norm):
    trainer = make(tmp_path, config={"max_steps": 8, "max_grad_norm": max_grad_norm, "gradient_accumulation_steps": 2})
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
    make(tmp_path / "again", model=saved["policy"], value_model=saved["critic"]).train()  # they are of use


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_named(tmp_path):
    """Values that overflow give an infinite value loss; the message says where it was seen first."""
    trainer = make(
        tmp_path, config={"baseline": "critic"}, reward_funcs=lambda completions, **_: [3e38] * len(completions)
    )
    with pytest.raises(
        FloatingPointError, match=r"of the critic is not finite at step 1 \(first seen in .*loss/value_avg"
    ):
        trainer.train()
    assert (tmp_path / "last-good" / "model.safetensors").is_file()


# ---- What the types allow and nothing can use ----


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ref_model": 3}, "`ref_model` must be a path or a model, got 3"),
        ({"reward_funcs": 3}, "reward 0 must be a path, a model or a function, got 3"),
        (
            {"train_dataset": prompts(8).add_column("prompt_ids", [0] * 8)},
            "has a column `prompt_ids`.*Rename the column",
        ),
        (
            {
                "train_dataset": Dataset.from_dict({"prompt": ["the " * 62] * 8}),
                "eval_dataset": {"train": prompts(4), "test": prompts(4)},
            },
            r"8 of 8 prompts in the train dataset leave no room.* to 2 or less\.$",
        ),
    ],
    ids=["ref_model", "reward_funcs", "prompt_ids", "an eval dataset named train"],
)
def test_an_argument_that_nothing_can_use_is_named(tmp_path, wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(tmp_path, **wrong)


@pytest.mark.slow
def test_a_rollout_that_failed_leaves_the_next_one_alone(tmp_path):
    calls = []

    def fails_once(completions, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("once")
        return [1.0] * len(completions)

    config = {"max_steps": 2, "allow_off_policy_sampling": True, "top_k": 5}
    trainer = make(tmp_path, reward_funcs=fails_once, config=config)
    with pytest.raises(RuntimeError, match="once"):
        trainer.train()
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_damaged_snapshot_is_named(tmp_path):
    config = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make(tmp_path, config=config).train()
    path = tmp_path / "checkpoint-2" / "ppo_state_0.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="checkpoint-2 is not a complete checkpoint: ppo_state_0.pt has 100 bytes"):
        make(tmp_path, config=config).train(str(path.parent))
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        make(tmp_path, config=config).train("nowhere")


@pytest.mark.parametrize(
    ("lengths", "advice"),
    [
        ([10, 11], "`max_completion_length` to 53 or less"),
        ([3, 11], "to 53 or less, or filter out prompts of more than 4 tokens"),
        ([3, 64], "filter out prompts of more than 4 tokens"),
        ([5, 64], "to 59 or less, and filter out prompts that leave no room for that"),
        ([64, 70], "no prompt leaves room for a token, so shorten them, or train a policy with a longer context"),
    ],
)
def test_prompts_that_leave_no_room_are_told_what_would_fit(lengths, advice):
    """In a context of 64, with answers of 60; never to filter all prompts out."""
    rows = Dataset.from_dict({"prompt": ["x"] * len(lengths)})
    with pytest.raises(ValueError) as raised:
        check_prompt_lengths(lambda _: lengths, tiny_llama(), 60, [("train", rows)])
    assert str(raised.value).endswith(f"{advice}.") and ("filter" in advice) == ("filter" in str(raised.value))
