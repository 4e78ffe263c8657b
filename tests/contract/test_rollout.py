"""What RLOO does from prompts to rewards, with which methods, and in what order."""

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from trl import RLOOTrainer

from tests.contract.observed import Observed, names_of, require, rloo
from tests.tiny import tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.upstream import names as upstream
from trl_ext.upstream.contract import assigned


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
    trainer = rloo(tmp_path)
    trainer.train()
    order = names_of(trainer, *expected)
    require(order[: len(expected)] == expected, f"a step runs {order}")


@pytest.mark.parametrize("beta, peft, passes", [(0.0, False, 1), (0.1, False, 2), (0.1, True, 2)])
def test_log_prob_passes_of_a_rollout(tmp_path, beta, peft, passes):
    peft_config = LoraConfig(r=2, task_type="CAUSAL_LM") if peft else None
    trainer = rloo(tmp_path, beta=beta, peft_config=peft_config)
    grad_enabled, adapters = [], []
    method = Observed._get_per_token_logps_and_entropies

    def note(self, *args, **kwargs):
        grad_enabled.append(torch.is_grad_enabled())
        if peft:
            layer = next(m for m in self.model.modules() if isinstance(m, BaseTunerLayer))
            adapters.append(not layer.disable_adapters)
        return method(self, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = note.__get__(trainer)
    trainer.train()
    reader = "What PPOTrainer keeps of a rollout"
    calls = [(args, kwargs) for name, args, kwargs in trainer.events if name == "_get_per_token_logps_and_entropies"]
    require(len(calls) == passes + 1, f"a rollout and a step make {len(calls)} log-prob passes", reader)
    models = [args[0] for args, _ in calls]
    require(models[0] is trainer.model, "the first pass is not the policy's", reader)
    if passes == 2:
        reference = trainer.model if peft else trainer.ref_model
        require(models[1] is reference, "the second pass is not the reference's", reader)
    if peft:
        require(adapters == [True, False, True], f"adapters are on in the passes {adapters}", reader)
    require(grad_enabled == [False] * passes + [True], f"gradients are enabled in {grad_enabled}", reader)
    for args, _ in calls:
        require(len(args) >= 4 and args[1].shape == args[2].shape, "arguments are not ids, mask, width", reader)
        require(args[3] < args[1].size(1), "`logits_to_keep` is not the completions' width", reader)


def test_what_a_rollout_returns(tmp_path):
    trainer, rollouts = rloo(tmp_path), []
    method = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: rollouts.append(method(inputs)) or rollouts[-1]
    trainer.train()
    (output,) = rollouts
    for part in ("prompt", "completion"):
        ids, mask = output[f"{part}_ids"], output[f"{part}_mask"]
        require(ids.shape == mask.shape and len(ids) == 4, f"`{part}_mask` does not fit")
        padded_left = part == "prompt"
        for row in mask.tolist():
            require(row == sorted(row, reverse=not padded_left), f"{part}s are padded otherwise")


def test_a_rollout_leaves_nothing_on_the_trainer_but_metrics():
    """So another object may run it in the trainer's place."""
    method = RLOOTrainer._generate_and_score_completions
    names = assigned([type("Rollout", (), {"method": method})])
    require(not names, f"`_generate_and_score_completions` sets {sorted(names)}", "What PPOTrainer keeps of a rollout")


def test_generate_returns_lists_that_are_scored_and_padded(tmp_path):
    trainer, generated = rloo(tmp_path), []
    method = trainer._generate
    trainer._generate = lambda texts: generated.append(method(texts)) or generated[-1]
    trainer.train()
    require(len(generated[0]) == 3, "`_generate` returns other than ids, ids, completions")
    prompt_ids, completion_ids, completions = generated[0]
    scored = next(args for name, args, _ in trainer.events if name == "_calculate_rewards")
    require(scored[3] is completion_ids and scored[2] is completions, "rewards read other lists")
    require(all(isinstance(i, int) for row in completion_ids for i in row), "ids are no lists")
    require(all(2 not in row[:-1] for row in completion_ids), "completions go on after EOS")
    require([len(r) > 0 for r in prompt_ids] == [True] * 4, "prompts are empty")
    rows = next(args[0] for name, args, _ in trainer.events if name == "_generate_and_score_completions")
    tokenized = next(args[0] for name, args, _ in trainer.events if name == "_tokenize_prompts")
    same = all(prompt is row["prompt"] for prompt, row in zip(tokenized, rows, strict=True))
    require(same, "`_tokenize_prompts` is given copies of the rows' prompts")


def test_rewards_are_gathered_with_nan_for_none(tmp_path):
    seen = {}

    class Callable:
        def __call__(self, prompts, completions, completion_ids, **kwargs):
            seen.update(kwargs)
            return [None, 1.0, 2.0, 3.0]

    class Async:
        async def __call__(self, prompts, completions, completion_ids, **kwargs):
            return [5.0] * 4

    trainer, gathered = rloo(tmp_path), []
    trainer.reward_funcs, trainer.reward_func_names = [Callable()], ["callable"]
    method = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: gathered.append(method(*args)) or gathered[-1]
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

    trainer = rloo(tmp_path, reward_funcs=reward)
    trainer.train()
    reader = "The mean score of the demonstrations, which clears them,"
    require(trainer.state.log_history[0].get("mine") == 3.0, "`log_metric` is not logged by its name", reader)
    require(not trainer._pending_metrics and not trainer._pending_extra_logs, "they stay pending", reader)


def test_what_the_constructor_sets(tmp_path):
    tiny_reward_model(tiny_llama()).save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    trainer = rloo(tmp_path, reward_funcs=[length := (lambda completions, **_: [0.0] * 4), str(tmp_path / "reward")])
    metrics, advantages = trainer._metrics, trainer._logs["advantages"]
    require(metrics.keys() == {"train", "eval"}, f"`_metrics` has {list(metrics)}", "What PPOTrainer logs")
    require(advantages.maxlen == 4, "`_logs['advantages']` is no deque of a rollout", "What PPOTrainer logs")
    require(trainer.reward_func_names == ["<lambda>", "reward"], "rewards have other names", "What PPOTrainer logs")
    require(trainer.reward_funcs[0] is length, "`reward_funcs` are wrapped")
    require(isinstance(trainer.reward_funcs[1], torch.nn.Module), "`reward_funcs` has no model")
    require(isinstance(trainer.eos_token_ids, list), "`eos_token_ids` is no list")
    require(trainer.callback_handler.model is trainer.model, "the callback handler has another model")
    require(trainer._buffered_inputs is None and trainer._step == 0, "the buffer does not start empty")
