"""GRPO's methods from prompts to rewards, and their order."""

import pytest
import torch

from tests.contract.observed import grpo, names_of, require, returned_by
from tests.tiny import tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.upstream import names as upstream


def test_order_of_a_step(tmp_path):
    expected = [
        "training_step",
        "_prepare_inputs",
        "_generate_and_score_completions",
        "_generate",
        "_tokenize_prompts",
        "_generate_single_turn",
        "_calculate_rewards",
        "_compute_loss",
        "_clip_grad_norm",
        "_get_grad_norm",
        "log",
    ]
    trainer = grpo(tmp_path)
    trainer.train()
    order = names_of(trainer, *expected)
    require(order[: len(expected)] == expected, f"a step runs {order}")


READER = "The rollout of PPOTrainer"


def test_our_passes_run_between_generation_and_scores(tmp_path):
    """GRPO may ask for log-probs in between. It accepts None."""
    trainer = grpo(tmp_path, steps_per_generation=2)
    output = returned_by(trainer, "_generate_and_score_completions")

    def without(*args, **kwargs):
        trainer.events.append(("asked", args, kwargs))
        return None, None, None

    trainer._get_per_token_logps_and_entropies = without
    trainer._compute_loss = lambda model, inputs: sum(p.sum() for p in model.parameters())
    trainer.train()
    order = names_of(trainer, "_generate", "asked", "_calculate_rewards")
    require(order == ["_generate", "asked", "_calculate_rewards"], f"a rollout runs {order}", READER)
    require("old_per_token_logps" not in output[0], "log-probs that are None are returned", READER)


@pytest.mark.parametrize("accumulation, asked", [(1, 1), (2, 0)])
def test_log_probs_are_computed_where_several_steps_share_a_rollout(tmp_path, accumulation, asked):
    """Only of the policy: with `beta=0` GRPO never asks for the reference's."""
    trainer = grpo(tmp_path, steps_per_generation=2, gradient_accumulation_steps=accumulation)
    rollout = returned_by(trainer, "_generate_and_score_completions")
    trainer._compute_loss = lambda model, inputs: sum(p.sum() for p in model.parameters())
    trainer.train()
    passes = names_of(trainer, "_get_per_token_logps_and_entropies")
    require(len(passes) == asked, f"a rollout makes {len(passes)} passes", READER)
    require("ref_per_token_logps" not in rollout[0], "a rollout has log-probs of the reference", READER)


def test_log_probs_of_the_sampler_are_passed_on(tmp_path):
    """From our `_generate_single_turn` to our rollout; without vLLM GRPO does not use them for a correction."""
    trainer = grpo(tmp_path)
    generate, logprobs = trainer._generate_single_turn, [[-0.5] * n for n in (1, 2, 3, 4)]
    trainer._generate_single_turn = lambda *args: (generate(*args)[0], logprobs)
    generated, rollouts = (returned_by(trainer, name) for name in ("_generate", "_generate_and_score_completions"))
    trainer.train()
    require(generated[0][4] is logprobs, "`_generate` returns others than `_generate_single_turn`", READER)
    require("importance_sampling_ratio" not in rollouts[0], "they correct the loss without vLLM", READER)


def test_keys_of_a_rollout(tmp_path):
    trainer = grpo(tmp_path)
    rollouts = returned_by(trainer, "_generate_and_score_completions")
    trainer.train()
    (output,) = rollouts
    for part in ("prompt", "completion"):
        ids, mask = output[f"{part}_ids"], output[f"{part}_mask"]
        require(ids.shape == mask.shape and len(ids) == 4, f"`{part}_mask` does not fit")
        padded_left = part == "prompt"
        for row in mask.tolist():
            require(row == sorted(row, reverse=not padded_left), f"{part}s are padded otherwise")


def test_generate_returns_eight_things(tmp_path):
    """In the order in which `RolloutTrainer._generate` unpacks them. Reward functions get the same lists."""
    trainer = grpo(tmp_path)
    generated, drawn = (returned_by(trainer, name) for name in ("_generate", "_generate_single_turn"))
    trainer.train()
    require(len(generated[0]) == 8, f"`_generate` returns {len(generated[0])} things", READER)
    prompt_ids, completion_ids, tool_mask, completions, logprobs, *_ = generated[0]
    require(len(drawn[0]) == 2, "`_generate_single_turn` returns other than ids and log-probs", READER)
    require(drawn[0][0] is completion_ids, "`_generate` returns other ids than `_generate_single_turn`", READER)
    require(logprobs is None is drawn[0][1], "transformers' generation returns log-probs", READER)
    require(tool_mask is None, "there is a mask of tools without tools", READER)
    scored = next(args for name, args, _ in trainer.events if name == "_calculate_rewards")
    require(scored[3] is completion_ids and scored[2] is completions, "rewards read other lists", READER)
    require(all(isinstance(i, int) for row in completion_ids for i in row), "ids are no lists", READER)
    require(all(2 not in row[:-1] for row in completion_ids), "completions go on after EOS", READER)
    require([len(r) > 0 for r in prompt_ids] == [True] * 4, "prompts are empty", READER)
    rows = next(args[0] for name, args, _ in trainer.events if name == "_generate_and_score_completions")
    require(scored[0] is rows, "rewards are given other rows than the rollout", READER)
    asked = next(args[0] for name, args, _ in trainer.events if name == "_generate")
    same = all(prompt is row["prompt"] for prompt, row in zip(asked, rows, strict=True))
    require(same, "`_generate` is given copies of the rows' prompts", READER)


def test_a_tool_mask_marks_the_policys_tokens(tmp_path):
    """It is the third item, 1 = sampled by the policy, and GRPO's lengths count only these tokens."""
    trainer = grpo(tmp_path)
    generated = returned_by(trainer, "_generate")

    def environment(prompts, trainer):
        ids = [[5, 6, 7, 2]] * len(prompts)
        masks = [[1, 0, 0, 1]] * len(prompts)
        return {"prompt_ids": [[5]] * len(prompts), "completion_ids": ids, "logprobs": None, "env_mask": masks}

    trainer.rollout_func = environment
    trainer.train()
    require(generated[0][2] == [[1, 0, 0, 1]] * 4, f"the third thing is {generated[0][2]}", READER)
    length = trainer.state.log_history[0]["completions/mean_length"]
    require(length == 2.0, f"the lengths are {length} with tokens of a tool", READER)


def test_rewards_are_gathered_with_nan_for_none(tmp_path):
    seen = {}

    class Callable:
        def __call__(self, prompts, completions, completion_ids, **kwargs):
            seen.update(kwargs)
            return [None, 1.0, 2.0, 3.0]

    class Async:
        async def __call__(self, prompts, completions, completion_ids, **kwargs):
            return [5.0] * 4

    trainer = grpo(tmp_path)
    trainer.reward_funcs, trainer.reward_func_names = [Callable()], ["callable"]
    gathered = returned_by(trainer, "_calculate_rewards")
    trainer.train()
    reader = "PPOTrainer, which wraps each reward function in an object,"
    require(gathered[0].shape == (4, 1) and gathered[0][0].isnan().all(), "None is not NaN in (B, functions)", reader)
    require({"topic", "trainer_state", "log_metric", "log_extra"} <= seen.keys(), f"functions get {[*seen]}", reader)
    require(upstream.is_async_callable(Async()), "an object with an async `__call__` is not async", reader)
    require(not upstream.is_async_callable(Callable()), "an object with a plain `__call__` is async", reader)


def test_metrics_of_reward_functions_are_flushed_with_the_rollout(tmp_path):
    def reward(completions, log_metric, log_extra, **kwargs):
        log_metric("mine", 3.0)
        log_extra("column", completions)
        return [0.0] * len(completions)

    trainer = grpo(tmp_path, reward_funcs=reward)
    trainer.train()
    reader = "The mean score of the demonstrations, which clears them,"
    require(trainer.state.log_history[0].get("mine") == 3.0, "`log_metric` is not logged by its name", reader)
    require(not trainer._pending_metrics and not trainer._pending_extra_logs, "they stay pending", reader)


def test_attributes_of_the_constructor(tmp_path):
    tiny_reward_model(tiny_llama()).save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    trainer = grpo(tmp_path, reward_funcs=[length := (lambda completions, **_: [0.0] * 4), str(tmp_path / "reward")])
    metrics, advantages = trainer._metrics, trainer._logs["advantages"]
    require(metrics.keys() == {"train", "eval"}, f"`_metrics` has {list(metrics)}", "What PPOTrainer logs")
    require(advantages.maxlen == 4, "`_logs['advantages']` is no deque of a rollout", "What PPOTrainer logs")
    require(trainer.reward_func_names == ["<lambda>", "reward"], "rewards have other names", "What PPOTrainer logs")
    require(trainer.reward_funcs[0] is length, "`reward_funcs` are wrapped")
    require(isinstance(trainer.reward_funcs[1], torch.nn.Module), "`reward_funcs` has no model")
    require(isinstance(trainer.eos_token_ids, list), "`eos_token_ids` is no list")
    require(trainer.callback_handler.model is trainer.model, "the callback handler has another model")
    require(trainer._buffered_inputs is None and trainer._step == 0, "the buffer does not start empty")
