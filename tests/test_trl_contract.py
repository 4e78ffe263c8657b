"""
Everything private, or merely customary, in TRL, transformers, accelerate and PEFT that `trl_ext` relies on.

When an upgrade fails here, the message says what changed upstream and which file of ours reads it. What happens in a
trainer is observed on a plain `RLOOTrainer`, so that a failure is never our own doing.
"""

import ast
import copy
import dataclasses
import inspect
import json
import math
import re
import textwrap

import pytest
import torch
import trl
from accelerate.utils import fsdp_utils
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, Trainer, TrainerCallback
from transformers.generation import LogitsProcessor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import RLOOConfig, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import FusedCausalLMOutput, use_adapter

import trl_ext
from tests.dpo.worker import QUIET, make_trl_trainer
from tests.dpo.worker import make_trainer as make_dpo_trainer
from tests.dpo.worker import pairs as dpo_pairs
from tests.tiny import ON_CPU, length_reward, prompts, tiny_gpt2, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext import PPOTrainer, upstream
from trl_ext.dpo import config as dpo_config
from trl_ext.dpo.inputs import PAIR_COLUMNS
from trl_ext.metrics import METRICS, is_training_log
from trl_ext.ppo.base import PPOTrainerBase
from trl_ext.ppo.config import PPOConfig


def require(condition, changed, reader):
    assert condition, f"Upstream changed: {changed}. {reader} relies on it."


# ---- Names and signatures ----

IMPORTED = {  # name in trl_ext/upstream.py -> the parameters that we pass, in their order
    "AuxiliaryTrainingWrapper": [],
    "BaseTunerLayer": [],
    "RepeatSampler": ["data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed"],
    "add_hooks": ["model"],
    "add_fused_lm_head": ["model", "temperature"],
    "create_model_from_path": ["model_id"],
    "disable_dropout_in_model": ["model"],
    "find_adapter_config_file": ["model_id"],
    "is_vllm_available": [],
    "get_callable_name": ["func"],
    "get_config_model_id": ["config"],
    "is_async_callable": ["func"],
    "is_conversational": ["example"],
    "is_deepspeed_zero3_enabled": [],
    "prepare_deepspeed": ["model", "accelerator"],
    "prepare_fsdp": ["model", "accelerator"],
    "remove_hooks": ["model"],
    "rotate_checkpoints": ["output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime"],
    "set_zero3_state": [],
    "sort_checkpoints": ["output_dir"],
    "unwrap_model_for_generation": ["model", "accelerator", "gather_deepspeed3_params"],
    "use_adapter": ["model", "adapter_name"],
}


def test_imported_names():
    assert sorted(upstream.__all__) == sorted(IMPORTED)
    for name, expected in IMPORTED.items():
        parameters = list(inspect.signature(getattr(upstream, name)).parameters)
        require(
            parameters[: len(expected)] == expected,
            f"`{name}` takes {parameters}, it took {expected} first",
            "trl_ext/upstream.py",
        )


OVERRIDDEN = {  # method of RLOOTrainer -> its parameters, all that our override takes and passes on
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "_clip_grad_norm": ["model"],
    "_compute_loss": ["model", "inputs"],
    "_generate": ["prompts"],
    "_generate_and_score_completions": ["inputs"],
    "_generate_single_turn": ["prompt_ids", "images", "multimodal_fields"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_get_per_token_logps_and_entropies": [
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
        "pixel_values",
        "image_grid_thw",
        "num_images",
        "pixel_attention_mask",
        "spatial_shapes",
        "num_tiles",
        "image_sizes",
        "token_type_ids",
        "mm_token_type_ids",
        "image_position_ids",
    ],
    "_get_train_sampler": ["dataset"],
    "_load_best_model": [],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_load_rng_state": ["checkpoint"],
    "_maybe_log_save_evaluate": [
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
        "learning_rate",
    ],
    "_prepare_inputs": ["generation_batch"],
    "_save": ["output_dir", "state_dict"],
    "_save_checkpoint": ["model", "trial"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_save_rng_state": ["output_dir"],
    "_set_signature_columns_if_needed": [],
    "_tokenize_prompts": ["prompts"],
    "create_optimizer": ["model"],
    "evaluation_loop": ["dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"],
    "log": ["logs", "start_time"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "__init__": [
        "model",
        "reward_funcs",
        "args",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "reward_processing_classes",
        "callbacks",
        "optimizers",
        "quantization_config",
        "peft_config",
    ],
}
OVERRIDDEN_ATTRIBUTES = {"loss_is_scaled_for_ga", "_tag_names", "_name", "_paper"}


def our_members():
    """Name -> our class that defines it, for everything between PPOTrainer and RLOOTrainer."""
    ours = PPOTrainer.__mro__[: PPOTrainer.__mro__.index(RLOOTrainer)]
    automatic = {*vars(type("Empty", (), {})), "__annotations__", "__firstlineno__", "__static_attributes__"}
    return {name: cls for cls in reversed(ours) for name in vars(cls) if name not in automatic}


def test_overridden_methods_keep_their_parameters():
    for name, expected in OVERRIDDEN.items():
        method = getattr(RLOOTrainer, name, None)
        require(method is not None, f"RLOOTrainer has no `{name}` any more", "trl_ext/ppo/")
        parameters = list(inspect.signature(method).parameters)[1:]
        require(
            parameters == expected,
            f"`RLOOTrainer.{name}` takes {parameters}, it took {expected}",
            f"`{name}` in trl_ext/ppo/",
        )


def test_upstream_has_no_name_that_we_use_for_ourselves():
    """A new method upstream with a name of ours would be overridden silently; a lost one, never be called."""
    shared = {name for name in our_members() if hasattr(RLOOTrainer, name)}
    expected = {*OVERRIDDEN, *OVERRIDDEN_ATTRIBUTES} | {"__doc__", "__module__"}
    require(
        shared - {"__doc__", "__module__", "__init__"} == expected - {"__doc__", "__module__", "__init__"},
        f"RLOOTrainer and we both define {sorted(shared ^ expected)}, or no longer do",
        "trl_ext/ppo/ (and the table in this test)",
    )


def test_upstream_sets_no_attribute_that_we_use_for_ourselves(tmp_path):
    plain, names = vars(rloo(tmp_path)), vars(PPOTrainerBase)["__annotations__"]
    inherited = {"args", "model", "train_dataset", "accelerator", "_step", "_buffered_inputs"}
    inherited |= {"eos_token_ids", "generation_config", "num_generations_eval", "reward_func_names"}
    inherited |= {"reward_funcs", "reward_processing_classes"}
    taken = {name for name in names if name in plain} - inherited
    require(not taken, f"RLOOTrainer sets {sorted(taken)}, too", "trl_ext/ppo/base.py")


# ---- A plain trainer under observation ----


class Observed(RLOOTrainer):
    """Notes the order in which upstream calls what we override."""

    def __init__(self, *args, **kwargs):
        self.events = []
        super().__init__(*args, **kwargs)


def _observed(name):
    method = getattr(RLOOTrainer, name)

    def observed(self, *args, **kwargs):
        self.events.append((name, args, kwargs))
        return method(self, *args, **kwargs)

    return observed


for _name in OVERRIDDEN:
    if _name != "__init__":
        setattr(Observed, _name, _observed(_name))


def rloo_config(output_dir, **kwargs):
    return RLOOConfig(
        str(output_dir),
        **{
            **ON_CPU,
            "activation_checkpointing": False,
            "per_device_train_batch_size": 4,
            "max_completion_length": 5,
            "max_steps": 1,
        }
        | kwargs,
    )


def rloo(
    tmp_path, cls=Observed, model=None, reward_funcs=length_reward, eval_dataset=None, peft_config=None, **kwargs
):
    model = model or tiny_llama()
    model.save_pretrained(tmp_path / "policy")
    model.config._name_or_path = str(tmp_path / "policy")  # where RLOO takes its reference from
    return cls(
        model=model,
        reward_funcs=reward_funcs,
        args=rloo_config(tmp_path / "out", **kwargs),
        train_dataset=prompts(),
        eval_dataset=eval_dataset,
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )


def names_of(trainer, *wanted):
    return [name for name, _, _ in trainer.events if not wanted or name in wanted]


def test_attributes_that_we_read_or_write(tmp_path):
    trainer = rloo(tmp_path, reward_funcs=[length_reward, tiny_reward_model_with_tokenizer(tmp_path)])
    expected = {
        "accelerator": object,
        "args": RLOOConfig,
        "aux_loss_enabled": bool,
        "beta": float,
        "callback_handler": object,
        "chat_template_kwargs": dict,
        "control": object,
        "eos_token_ids": list,
        "epsilon_high": float,
        "epsilon_low": float,
        "generation_config": GenerationConfig,
        "is_deepspeed_enabled": bool,
        "is_fsdp_enabled": bool,
        "max_completion_length": int,
        "model": torch.nn.Module,
        "model_wrapped": torch.nn.Module,
        "num_generations": int,
        "num_generations_eval": int,
        "num_iterations": int,
        "place_model_on_device": bool,
        "ref_model": torch.nn.Module,
        "reward_clip_range": type(None),
        "reward_func_names": list,
        "reward_funcs": list,
        "reward_processing_classes": list,
        "reward_weights": torch.Tensor,
        "router_aux_loss_coef": float,
        "state": object,
        "temperature": float,
        "use_vllm": bool,
        "_buffered_inputs": type(None),
        "_logs": dict,
        "_metrics": dict,
        "_pending_extra_logs": dict,
        "_pending_metrics": dict,
        "_step": int,
        "_tokenizer": object,
    }
    for name, kind in expected.items():
        value = getattr(trainer, name, ...)
        require(isinstance(value, kind) and value is not ..., f"`{name}` of RLOOTrainer is {value!r}", "trl_ext/ppo/")
    require(trainer._metrics.keys() == {"train", "eval"}, f"`_metrics` has {list(trainer._metrics)}", "reporting.py")
    require(trainer._logs["advantages"].maxlen == 4, "`_logs['advantages']` is no deque of a rollout", "reporting.py")
    require(
        trainer.callback_handler.model is trainer.model, "the callback handler has another model", "ppo/trainer.py"
    )
    require(
        trainer.reward_func_names == ["length_reward", "reward"],
        f"reward names are {trainer.reward_func_names}",
        "trl_ext/ppo/reporting.py",
    )


def tiny_reward_model_with_tokenizer(tmp_path):
    folder = tmp_path / "reward"
    tiny_reward_model(tiny_llama()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


# ---- The rollout ----


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
    reader = "`_get_per_token_logps_and_entropies` and `_generate_and_score_completions` of trl_ext/ppo/trainer.py"
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
    require("compute_entropy" in calls[-1][1], "the loss does not ask for the entropy by name", reader)


def test_order_of_a_step(tmp_path):
    trainer = rloo(tmp_path)
    trainer.train()
    order = names_of(
        trainer,
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
    )
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
    require(order[: len(expected)] == expected, f"a step runs {order}", "trl_ext/ppo/trainer.py")


def test_what_a_rollout_returns(tmp_path):
    trainer, rollouts = rloo(tmp_path), []
    method = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: rollouts.append(method(inputs)) or rollouts[-1]
    trainer.train()
    (output,) = rollouts
    for part in ("prompt", "completion"):
        ids, mask = output[f"{part}_ids"], output[f"{part}_mask"]
        require(ids.shape == mask.shape and len(ids) == 4, f"`{part}_mask` does not fit", "trl_ext/ppo/trainer.py")
        padded_left = part == "prompt"
        for row in mask.tolist():
            require(row == sorted(row, reverse=not padded_left), f"{part}s are padded otherwise", "ppo/trainer.py")
    require(output["old_logps"].shape == (4,), "`old_logps` is not per sequence", "trl_ext/ppo/trainer.py")


def test_generate_returns_lists_that_are_scored_and_padded(tmp_path):
    trainer, generated = rloo(tmp_path), []
    method = trainer._generate
    trainer._generate = lambda texts: generated.append(method(texts)) or generated[-1]
    trainer.train()
    require(len(generated[0]) == 3, "`_generate` returns other than ids, ids, completions", "trl_ext/ppo/trainer.py")
    prompt_ids, completion_ids, completions = generated[0]
    scored = next(args for name, args, _ in trainer.events if name == "_calculate_rewards")
    require(scored[3] is completion_ids and scored[2] is completions, "rewards read other lists", "ppo/trainer.py")
    require(all(isinstance(i, int) for row in completion_ids for i in row), "ids are no lists", "ppo/trainer.py")
    require(all(2 not in row[:-1] for row in completion_ids), "completions go on after EOS", "ppo/trainer.py")
    require([len(r) > 0 for r in prompt_ids] == [True] * 4, "prompts are empty", "trl_ext/ppo/trainer.py")


def test_rewards_are_gathered_with_nan_for_none(tmp_path):
    seen = {}

    class Callable:
        def __call__(self, prompts, completions, completion_ids, **kwargs):
            seen.update(kwargs)
            return [None, 1.0, 2.0, 3.0]

    class Async:
        async def __call__(self, prompts, completions, completion_ids, **kwargs):
            return [5.0] * 4

    trainer, gathered = rloo(tmp_path, reward_funcs=length_reward), []
    trainer.reward_funcs, trainer.reward_func_names = [Callable()], ["callable"]
    method = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: gathered.append(method(*args)) or gathered[-1]
    trainer.train()
    reader = "trl_ext/ppo/rewards.py, which wraps each function in an object"
    require(gathered[0].shape == (4, 1) and gathered[0][0].isnan().all(), "None is not NaN in (B, functions)", reader)
    require({"topic", "trainer_state", "log_metric", "log_extra"} <= seen.keys(), f"functions get {[*seen]}", reader)
    require(upstream.is_async_callable(Async()), "an object with an async `__call__` is not async", reader)
    require(not upstream.is_async_callable(Callable()), "an object with a plain `__call__` is async", reader)


def test_buffer_and_step_arithmetic(tmp_path):
    trainer = rloo(tmp_path, steps_per_generation=3, num_iterations=2, max_steps=13)
    generated_at, index = [], []
    generate, prepare = trainer._generate_and_score_completions, trainer._prepare_inputs

    def note_generate(inputs):
        require(len(inputs) == 12, f"a rollout gets {len(inputs)} rows", "trl_ext/ppo/trainer.py")
        generated_at.append(trainer._step)
        return generate(inputs)

    def note_prepare(batch):
        inputs = prepare(batch)
        index.append(next(i for i, chunk in enumerate(trainer._buffered_inputs) if chunk is inputs))
        return inputs

    trainer._generate_and_score_completions, trainer._prepare_inputs = note_generate, note_prepare
    trainer.train()
    reader = "`_prepare_inputs`, `_permuted` and resume.py of trl_ext/ppo"
    require(generated_at == [0, 6, 12], f"RLOO generates at `_step` {generated_at}", reader)
    require(index == [i % 3 for i in range(13)], f"RLOO takes the buffer's entries {index}", reader)
    require(trainer._step == 13, f"`_step` counts to {trainer._step} in 13 micro-batches", reader)


def test_a_replaced_buffer_is_used(tmp_path):
    """`_permuted` and a resumed run put their own batches there."""
    trainer = rloo(tmp_path, steps_per_generation=2, max_steps=2)
    prepare, taken = trainer._prepare_inputs, []

    def replace(batch):
        taken.append(prepare(batch))
        if trainer._step == 0:
            trainer._buffered_inputs = [dict(chunk) for chunk in trainer._buffered_inputs]
            taken.append(trainer._buffered_inputs)
        return taken[-1] if isinstance(taken[-1], dict) else taken[-2]

    trainer._prepare_inputs = replace
    trainer.train()
    require(taken[-1] is taken[1][1], "RLOO does not read `_buffered_inputs`", "trl_ext/ppo/resume.py")


def test_sampler_repeats_from_its_own_generator(tmp_path):
    sampler = rloo(tmp_path, steps_per_generation=2, num_iterations=3)._get_train_sampler()
    require(type(sampler) is upstream.RepeatSampler, "the train sampler is another class", "`_EpochSeededSampler`")
    orders = []
    for _ in range(2):
        sampler.generator.manual_seed(5)
        orders.append(list(sampler))
    require(sampler.shuffle and orders[0] == orders[1], "the order is not `generator`'s", "`_EpochSeededSampler`")
    first = orders[0][: 8 * 6]
    require(first == first[:8] * 6 and len(set(first)) == 4, "a rollout is not 2 × 3 times its rows", "ppo/trainer.py")


# ---- The config ----


def test_the_last_check_of_rloo_config_is_the_number_of_generations(tmp_path):
    """We swallow that error, so anything after it would be skipped."""
    reader = "`__post_init__` of trl_ext/ppo/config.py"
    with pytest.raises(ValueError, match="at least 2 generations"):
        rloo_config(tmp_path, num_generations=1)
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(RLOOConfig.__post_init__))).body
    last = function.body[-1]
    require(
        isinstance(last, ast.If)
        and ast.unparse(last.test) == "self.num_generations < 2"
        and [type(statement) for statement in last.body] == [ast.Raise],
        f"RLOOConfig ends its checks with `{ast.unparse(last)[:80]}`",
        reader,
    )

    class Stopped(RLOOConfig):
        def __post_init__(self):
            with pytest.raises(ValueError, match="at least 2 generations"):
                super().__post_init__()

    stopped = dataclasses.dataclass(Stopped)(
        str(tmp_path), use_cpu=True, bf16=False, num_generations=1, generation_kwargs='{"seed": 1}'
    )
    require(stopped.generation_kwargs == {"seed": 1}, "dict fields are parsed after the check", reader)
    require(stopped.steps_per_generation == stopped.gradient_accumulation_steps, "batches are set later", reader)


def test_a_config_is_read_by_its_attributes(tmp_path):
    """`_as_rloo_reads` changes `beta` and others in the constructor only; RLOO keeps what it read on the trainer."""
    trainer = rloo(tmp_path, beta=0.0, epsilon=0.3, num_iterations=2)
    trainer.args.epsilon = trainer.args.num_iterations = trainer.args.beta = None
    trainer.train()
    require(trainer.ref_model is None, "`beta=0` loads a reference", "`_as_rloo_reads` of trl_ext/ppo/trainer.py")
    reader = "`_as_rloo_reads` of trl_ext/ppo/trainer.py"
    require((trainer.epsilon_low, trainer.num_iterations, trainer.beta) == (0.3, 2, 0.0), "values move", reader)


# ---- The training loop of transformers ----


@pytest.mark.parametrize(
    "max_grad_norm, expected", [(1.0, ["_clip_grad_norm", "_get_grad_norm"]), (0.0, ["_get_grad_norm"])]
)
def test_gradients_are_complete_before_they_are_clipped(tmp_path, max_grad_norm, expected):
    trainer = rloo(tmp_path, max_grad_norm=max_grad_norm, gradient_accumulation_steps=2, max_steps=2)

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            trainer.events.append(("step", (), {}))

    trainer.add_callback(Note())
    trainer.train()
    order = names_of(trainer, "training_step", "_clip_grad_norm", "_get_grad_norm", "step")
    reader = "`_before_step` of trl_ext/ppo/trainer.py"
    require(order == ["training_step", "training_step", *expected, "step"] * 2, f"the loop runs {order}", reader)
    norms = [kwargs.get("grad_norm") for name, _, kwargs in trainer.events if name == "_get_grad_norm"]
    require(
        all((norm is None) == (max_grad_norm == 0) for norm in norms), f"`_get_grad_norm` is given {norms}", reader
    )


def test_an_optimizer_leaves_parameters_without_gradient_alone():
    """With `None` gradients neither weight decay nor moments move: skipped steps and critic warm-up rest on it."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=1.0, weight_decay=0.5)
    optimizer.step()
    require(torch.equal(parameter.detach(), torch.ones(3)), "AdamW moves a weight without gradient", "ppo/trainer.py")
    require(not optimizer.state, "AdamW makes state for a weight without gradient", "trl_ext/ppo/trainer.py")


@pytest.mark.parametrize("scaled, factor", [(True, 2.0), (False, 1.0)])
def test_loss_is_scaled_for_ga(tmp_path, scaled, factor):
    trainer = rloo(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.0)
    trainer.loss_is_scaled_for_ga = scaled
    trainer._compute_loss = lambda model, inputs: sum(p.sum() for p in model.parameters())
    grads = []

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            grads.append(next(trainer.model.parameters()).grad.flatten()[0].item())

    trainer.add_callback(Note())
    trainer.train()
    reader = "`loss_is_scaled_for_ga` of trl_ext/ppo/trainer.py"
    require(grads == [factor], f"with `loss_is_scaled_for_ga={scaled}` the gradient of Σp twice is {grads}", reader)


@pytest.mark.parametrize("stop_at", [1, 2, 8], ids=["mid-rollout", "rollout boundary", "epoch boundary"])
def test_resume_calls_load_rng_state_when_the_loop_has_set_its_counters(tmp_path, stop_at):
    config = {"save_strategy": "steps", "save_steps": stop_at, "max_steps": stop_at + 1, "steps_per_generation": 2}
    rloo(tmp_path, **config).train()
    resumed = rloo(tmp_path, **config)
    load, train_step, seen = resumed._load_rng_state, resumed.training_step, []

    def note_load(checkpoint):
        load(checkpoint)
        seen.append((resumed._tr_loss.item(), resumed._total_loss_scalar, resumed._globalstep_last_logged))
        seen.append(bool(resumed.optimizer.state_dict()["state"]))
        resumed._tr_loss, resumed._total_loss_scalar = torch.tensor(100.0), 7.0
        resumed._step = stop_at

    def note_train_step(*args):
        seen.append((resumed._tr_loss.item(), resumed._total_loss_scalar, resumed._step))
        return train_step(*args)

    resumed._load_rng_state, resumed.training_step = note_load, note_train_step
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"{PREFIX_CHECKPOINT_DIR}-{stop_at}"))
    reader = "`_load_rng_state` of trl_ext/ppo/resume.py"
    require(seen[0] == (0.0, 0.0, stop_at), f"the counters are {seen[0]} when it is called", reader)
    require(seen[1], "the optimizer is loaded after it", reader)
    require(seen[2] == (100.0, 7.0, stop_at), f"what it set is {seen[2]} in the first step", reader)
    order = names_of(resumed, "_load_from_checkpoint", "_load_rng_state", "training_step")
    require(
        order[:2] == ["_load_from_checkpoint", "_load_rng_state"] and order.count("_load_rng_state") == 1,
        f"resuming runs {order}",
        reader,
    )


def test_saving(tmp_path):
    trainer = rloo(tmp_path, save_strategy="steps", save_steps=1, max_steps=2, save_total_limit=1)
    limits = []
    save_rng = trainer._save_rng_state

    def note(output_dir):
        limits.append(trainer.args.save_total_limit)
        return save_rng(output_dir)

    trainer._save_rng_state = note
    trainer.train()
    order = names_of(trainer, "_save_checkpoint", "_save", "_save_rng_state")
    reader = "trl_ext/ppo/resume.py"
    require(order[:3] == ["_save_checkpoint", "_save", "_save_rng_state"], f"a checkpoint is {order}", reader)
    folder = tmp_path / "out" / f"{PREFIX_CHECKPOINT_DIR}-2"
    require((folder / "trainer_state.json").is_file(), "the state is not in trainer_state.json", reader)
    saves = [(args, kwargs) for name, args, kwargs in trainer.events if name == "_save"]
    require(saves[1][0] == (str(folder),), f"`_save` is called with {saves[1]}", reader)
    require(not folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-1").exists(), "`save_total_limit` is not applied", reader)
    for step in (9, 10):
        (tmp_path / f"{PREFIX_CHECKPOINT_DIR}-{step}").mkdir()
    order = [path.rsplit("-", 1)[1] for path in upstream.sort_checkpoints(str(tmp_path))]
    require(order == ["9", "10"], f"`sort_checkpoints` returns {order}", "trl_ext/ppo/checkpoint.py")


def test_load_best_model_loads_into_self_model(tmp_path):
    trainer = rloo(
        tmp_path,
        eval_dataset=prompts(4),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        per_device_eval_batch_size=4,
        max_steps=2,
        learning_rate=0.1,
    )
    trainer.train()
    require("_load_best_model" in names_of(trainer), "`_load_best_model` is not called", "trl_ext/ppo/resume.py")
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    require(
        torch.equal(best.lm_head.weight, trainer.model.lm_head.weight),
        "`_load_best_model` does not load `state.best_model_checkpoint` into `self.model`",
        "trl_ext/ppo/resume.py",
    )


def test_evaluation_calls(tmp_path):
    trainer = rloo(tmp_path, eval_dataset=prompts(6), per_device_eval_batch_size=4, num_generations_eval=2)
    trainer.prediction_step = lambda *args, **kwargs: trainer.events.append(("step", args, kwargs)) or (None,) * 3
    metrics = trainer.evaluate()
    order = names_of(trainer, "evaluation_loop", "step", "log")
    reader = "trl_ext/ppo/evaluation.py"
    require(order == ["evaluation_loop", *["step"] * 3, "log"], f"`evaluate()` runs {order}", reader)
    batches = [args[1] for name, args, _ in trainer.events if name == "step"]
    require(all(isinstance(batch, list) and len(batch) == 4 for batch in batches), "batches are other", reader)
    require(not trainer.model.training, "`evaluate()` does not leave the model in eval mode", "reporting.py")
    require("eval_loss" not in metrics, "an evaluation without a loss reports one", reader)
    loader = next(args[0] for name, args, _ in trainer.events if name == "evaluation_loop")
    require(len(loader.dataset) == 6, "the evaluation's loader has another dataset", reader)


def test_log_averages_and_clears_the_metrics(tmp_path):
    trainer = rloo(tmp_path)
    reader = "`log` of trl_ext/ppo/reporting.py"
    trainer.model.train()
    trainer._metrics["train"]["a"] = [1.0, 3.0]
    trainer.log(logs := {"loss": 0.0})
    require(logs["a"] == 2.0 and not trainer._metrics["train"], f"`log` makes {logs} of the metrics", reader)
    trainer.model.eval()
    trainer._metrics["eval"]["a"] = [1.0]
    trainer.log(logs := {"eval_b": 0.0})
    require(logs["eval_a"] == 1.0 and not trainer._metrics["eval"], f"`log` makes {logs} in evaluation", reader)


def test_metrics_of_reward_functions_are_flushed_with_the_rollout(tmp_path):
    def reward(completions, log_metric, log_extra, **kwargs):
        log_metric("mine", 3.0)
        log_extra("column", completions)
        return [0.0] * len(completions)

    trainer = rloo(tmp_path, reward_funcs=reward)
    trainer.train()
    reader = "`_mean_reference_score` of trl_ext/ppo/trainer.py, which clears them"
    require(trainer.state.log_history[0].get("mine") == 3.0, "`log_metric` is not logged by its name", reader)
    require(not trainer._pending_metrics and not trainer._pending_extra_logs, "they stay pending", reader)


def test_sync_callback_reads_the_model_from_its_keywords():
    calls = []

    class Sync(SyncRefModelCallback):
        @staticmethod
        def sync_target_model(model, target_model, alpha):
            calls.append((model, target_model, alpha))

    model, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    args = type("Args", (), {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6})
    callback = Sync(ref_model=reference, accelerator=None)
    for step in (1, 2):
        callback.on_step_end(args, type("State", (), {"global_step": step}), None, model=model)
    require(calls == [(model, reference, 0.6)], f"it synchronises {calls}", "`_SyncReference` of ppo/trainer.py")


# ---- Models ----


def test_generate_builds_its_processors_with_the_warpers_last():
    """`SamplerRecorder` is appended to what `_get_logits_processor` returns, and must see what is drawn from."""

    class Record(LogitsProcessor):
        def __init__(self):
            self.scores = []

        def __call__(self, input_ids, scores):
            self.scores.append(scores.clone())
            return scores

    model, last, custom = tiny_llama().eval(), Record(), Record()
    build, calls = model._get_logits_processor, []

    def with_record(*args, **kwargs):
        calls.append(kwargs)
        processors = build(*args, **kwargs)
        processors.append(last)
        return processors

    model._get_logits_processor = with_record
    config = GenerationConfig(do_sample=True, top_k=3, temperature=0.5, max_new_tokens=4, pad_token_id=0)
    ids = model.generate(torch.tensor([[5, 6]]), generation_config=config, logits_processor=[custom])
    reader = "`SamplerRecorder` of trl_ext/ppo/actor_critic.py"
    require(len(calls) == 1, f"`_get_logits_processor` is called {len(calls)} times a `generate`", reader)
    require(len(last.scores) == ids.size(1) - 2, f"a processor is called {len(last.scores)} times", reader)
    require(
        all(s.isfinite().sum() == 3 for s in last.scores), "an appended processor is not the last, after top-k", reader
    )
    require(all(s.isfinite().all() for s in custom.scores), "a custom processor no longer comes first", reader)


def test_open_fields_of_a_generation_config_are_filled_from_the_models():
    """Why `ActorCritic.generate` hides the model's: a checkpoint's `min_p` would make the sampler another policy."""
    model = tiny_llama().eval()
    model.generation_config.suppress_tokens = [i for i in range(29) if i != 7]
    config = GenerationConfig(do_sample=True, max_new_tokens=3, pad_token_id=0)
    reader = "`generate` of trl_ext/ppo/actor_critic.py"
    filled = model.generate(torch.tensor([[5, 6]]), generation_config=config)
    require(filled[0, 2:].tolist() == [7] * 3, "a field that is None is no longer filled from the model", reader)
    model.generation_config = GenerationConfig()
    torch.manual_seed(0)
    hidden = model.generate(torch.tensor([[5, 6]] * 8), generation_config=config)
    require((hidden[:, 2:] != 7).any(), "`generation_config` of the model is not where it is filled from", reader)


def test_fused_lm_head():
    model = tiny_llama().eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    labels = torch.tensor([[-100, -100, 7, 8]])
    want = (model(ids).logits[0] / 0.7).log_softmax(-1)
    upstream.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    reader = "`ActorCritic.forward` and `unpatched_copy` of trl_ext/ppo/actor_critic.py"
    require("forward" in vars(model), "the fused head is no patch of the instance's `forward`", reader)
    output = model(ids, labels=labels, fused_lm_head=True)
    for name in ("log_probs", "entropy", "aux_loss"):
        require(hasattr(output, name), f"its output has no `{name}`", reader)
    got, expected = output.log_probs[0], [0.0, want[1, 7].item(), want[2, 8].item()]
    require(
        len(got) == 3 and all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(got.tolist(), expected, strict=True)),
        f"log-probs are {got.tolist()}, by hand {expected}",
        reader,
    )


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_models(build):
    policy, reward = build().eval(), tiny_reward_model(build()).eval()
    reader = "trl_ext/ppo/actor_critic.py"
    require("position_ids" in inspect.signature(type(policy).forward).parameters, "no `position_ids`", reader)
    require(isinstance(reward.score, torch.nn.Linear), "a sequence classifier has no linear `score`", reader)
    require(getattr(reward, reward.base_model_prefix) is reward.base_model, "`base_model_prefix` moved", reader)
    ids = torch.tensor([[5, 6]])
    hidden = reward.base_model(input_ids=ids, use_cache=False).last_hidden_state
    same = torch.allclose(reward.score(hidden)[0, -1], reward(ids).logits[0], atol=1e-6)
    require(same, "the classifier's score is not `score(last hidden state)`", reader)
    policy.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    require(policy.is_activation_checkpointing and policy.is_gradient_checkpointing, "it is not switched on", reader)
    policy.activation_checkpointing_disable()
    require(not policy.is_activation_checkpointing, "checkpointing is not switched off", reader)
    require(upstream.get_config_model_id(policy.config) == "", "a model built in memory has a name", "ppo/inputs.py")


def two_adapters():
    """A tiny Llama with adapters `default` and `critic`, none of which is zero."""
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(tiny_llama(), config)
    model.add_adapter("critic", copy.deepcopy(config))
    return model


def test_peft_layers():
    model, reader = two_adapters(), "`AdapterSwitch` of trl_ext/models/adapter_switch.py"
    ids = torch.tensor([[5, 6, 7]])
    layers = [m for m in model.modules() if isinstance(m, upstream.BaseTunerLayer)]
    require(type(model.get_base_model()).__name__ == "LlamaForCausalLM", "`get_base_model` returns other", reader)
    require(
        len(layers) == 4 and layers[0].active_adapters == ["default"], "the layers' adapter is not 'default'", reader
    )

    def logits(active):
        for layer in layers:
            layer._active_adapter = active
        return model(ids).logits

    with model.disable_adapter():
        base = logits(["default"])
    require(torch.equal(logits([]), base), "no active adapter in a layer is not the base", reader)
    require(
        not torch.equal(logits(["critic"]), base), "`_active_adapter` of a layer does not choose its adapter", reader
    )
    require(layers[0].active_adapters == ["critic"], "`active_adapters` is not `_active_adapter`", reader)
    require(layers[0].disable_adapters is False, "`disable_adapters` does not tell whether it is", reader)
    require(
        set(layers[0].scaling) == {"default", "critic"}, "`scaling` is not by adapter", "`copy_adapter` of adapters.py"
    )


def test_what_peft_freezes():
    model, reader = two_adapters(), "`train_adapters` of trl_ext/ppo/actor_critic.py"

    def trained():
        return {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad}

    require(trained() == {"default"}, f"after `add_adapter`, {trained()} are trainable", reader)
    model.set_requires_grad("critic", True)
    require(trained() == {"default", "critic"}, "`set_requires_grad` does not thaw an adapter by name", reader)
    with model.disable_adapter():
        pass
    if trained() == {"default", "critic"}:
        raise AssertionError(
            f"Upstream changed: `disable_adapter` freezes no adapter any more. {reader} can be simpler."
        )


def test_peft_saves_one_adapter(tmp_path):
    two_adapters().save_pretrained(tmp_path, selected_adapters=["default"])
    names = load_file(tmp_path / "adapter_model.safetensors")
    require(
        not (tmp_path / "critic").exists() and not any("critic" in name for name in names),
        "`save_pretrained(selected_adapters=…)` saves other adapters, too",
        "`_one_adapter` of trl_ext/ppo/resume.py",
    )


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_checkpointed_layers_call_one_function(build):
    """`AdapterSwitch._pin_checkpointing` wraps it, wherever transformers keeps it."""
    model, calls, reader = build().train(), [], "`AdapterSwitch` of trl_ext/models/adapter_switch.py"

    def noted(function, *args, **kwargs):
        calls.append(function)
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)

    def set_noted(enable=True, gradient_checkpointing_func=None, **kwargs):
        set_checkpointing(enable=enable, gradient_checkpointing_func=noted, **kwargs)

    set_checkpointing = model._set_gradient_checkpointing
    model._set_gradient_checkpointing = set_noted
    model.activation_checkpointing_enable()
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    require(len(calls) == 2, f"{len(calls)} of 2 layers called the function given to it", reader)
    functions = [getattr(m, "_gradient_checkpointing_func", noted) for m in model.modules()]
    require(all(f is noted for f in functions), "layers keep the function under another name", reader)


def test_the_reference_pass_of_a_lora_policy_asks_the_wrapper():
    """`ActorCritic.disable_adapter`, `set_adapter` and `active_adapter` stand in for PEFT's."""
    source = inspect.getsource(use_adapter)
    used = set(re.findall(r"model\.(\w+)", source.split('"""')[2]))
    require(
        used == {"disable_adapter", "active_adapter", "set_adapter"},
        f"`use_adapter` uses {sorted(used)} of the model",
        "trl_ext/ppo/actor_critic.py",
    )
    source = inspect.getsource(RLOOTrainer)
    for line in (
        'use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)',
        'add_adapter("ref"',
    ):
        require(line in source, f"RLOOTrainer has no `{line}`", "trl_ext/ppo/roles.py")


def test_vllm_weights_are_merged_by_two_calls():
    source = inspect.getsource(VLLMGeneration._iter_named_params)
    for call in ("model.merge_adapter()", "model.unmerge_adapter()", "model.prefix in name"):
        require(
            source.count(call) == 1, f"`_iter_named_params` has no `{call}`", "`merge_exactly` of adapter_switch.py"
        )


def test_vllm_reads_its_settings_when_it_generates():
    """Greedy evaluation and `stop_token_id` change them after it was built. (vLLM itself is not needed here.)"""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(VLLMGeneration))).body
    generate = next(node for node in cls.body if getattr(node, "name", None) == "generate")
    read = {ast.unparse(node) for node in ast.walk(generate) if isinstance(node, ast.Attribute)}
    for name in ("self.temperature", "self.generation_kwargs"):
        require(
            name in read, f"`VLLMGeneration.generate` does not read `{name}`", "trl_ext/ppo/evaluation.py, trainer.py"
        )


def test_sharded_weights_during_generation(tmp_path):
    reader = "trl_ext/ppo/sharding.py"
    trainer = rloo(tmp_path)
    require(trainer._dist.is_zero3 is False, "`_dist.is_zero3` is not whether ZeRO-3 is on", reader)
    generate = inspect.getsource(RLOOTrainer._generate_single_turn)
    require("self.args.ds3_gather_for_generation" in generate, "`_generate_single_turn` gathers unasked", reader)
    setter = inspect.getsource(FSDPModule.set_reshard_after_forward)
    for name in ("_get_fsdp_state()", "_fsdp_param_groups", "post_forward_mesh_info"):
        require(name in setter, f"FSDP2 keeps whether a layer reshards elsewhere than in `{name}`", reader)
    prepare = inspect.getsource(Trainer._prepare_for_training)
    require('register_fsdp_forward_method(self.model, "generate")' in prepare, "FSDP2 skips `generate`", reader)


def test_fsdp_checkpoints_ask_whether_a_model_is_one_of_peft():
    for function in (fsdp_utils._get_model_state_dict, fsdp_utils._set_model_state_dict):
        asks = "if adapter_only and is_peft_model(model):" in inspect.getsource(function)
        require(
            asks, f"`{function.__name__}` of accelerate asks otherwise", "`_without_base` of trl_ext/ppo/resume.py"
        )


def test_requests_are_read_after_they_were_carried_out(tmp_path):
    """`AgreedControl` has the last word on them before the loop reads them."""
    loop = inspect.getsource(Trainer._run_epoch)
    done, read = (loop.find(text) for text in ("self._maybe_log_save_evaluate(", "control.should_training_stop:"))
    require(0 < done < read, "the loop reads requests before `_maybe_log_save_evaluate`", "trl_ext/control.py")


def test_accelerate_names(tmp_path):
    accelerator = rloo(tmp_path).accelerator
    reader = "trl_ext/ppo/"
    rows = torch.arange(3.0)
    require(torch.equal(accelerator.gather(rows[None])[0], rows), "`gather` of one process changes it", reader)
    require(torch.equal(accelerator.reduce(rows, reduction="sum"), rows), "`reduce` changes it", reader)
    require(getattr(accelerator, "scaler", None) is None, "there is a gradient scaler without fp16", reader)
    for name in ("num_processes", "process_index", "distributed_type", "device", "is_main_process"):
        require(hasattr(accelerator, name), f"Accelerator has no `{name}`", reader)


def test_a_subclass_of_the_config_that_we_rely_on(tmp_path):
    config = PPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    hidden = {name for name, value in config.to_dict().items() if str(value).startswith("<")}
    require(
        not hidden, f"`to_dict` of TrainingArguments hides {hidden}", "`to_dict` of trl_ext/ppo/config.py, for copies"
    )


# ---- DPOTrainer: observed on a plain `trl.DPOTrainer` ----

DPO_OVERRIDDEN = {  # method of trl.DPOTrainer -> the parameters that our override names or passes on in this order
    "_compute_loss": ["model", "inputs", "return_outputs"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_save_rng_state": ["output_dir"],
    "_set_signature_columns_if_needed": [],
    "compute_ref_log_probs": ["model", "inputs"],
    "evaluate": ["eval_dataset"],
    "train": ["resume_from_checkpoint"],
    "training_step": [],
    "__init__": [
        "model",
        "ref_model",
        "args",
        "data_collator",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "compute_metrics",
        "callbacks",
        "optimizers",
        "quantization_config",
        "peft_config",
    ],
}
_DPO = "trl_ext/dpo/trainer.py"


def test_dpo_overridden_methods_keep_their_parameters():
    for name, expected in DPO_OVERRIDDEN.items():
        parameters = list(inspect.signature(getattr(trl.DPOTrainer, name)).parameters)[1:]
        exact = name in ("_compute_loss", "compute_ref_log_probs", "__init__")
        require(
            parameters == expected if exact else parameters[: len(expected)] == expected,
            f"`DPOTrainer.{name}` takes {parameters}, it took {expected}",
            _DPO,
        )


def test_dpo_trainer_has_no_name_that_we_use_for_ourselves(tmp_path):
    ours = {name for name in vars(trl_ext.DPOTrainer) if not name.startswith("__")} | {"__init__"}
    shared = {name for name in ours if hasattr(trl.DPOTrainer, name)}
    require(
        shared == {*DPO_OVERRIDDEN, "_tag_names"},
        f"DPOTrainer and we both define {sorted(shared ^ {*DPO_OVERRIDDEN, '_tag_names'})}, or no longer do",
        f"{_DPO} (and the table in this test)",
    )
    plain, mine = vars(make_trl_trainer(tmp_path)), vars(make_dpo_trainer(tmp_path))
    taken = {"beta_controller", "margin_normalizer", "distribution_shift", "_pair_columns"} & set(plain)
    require(not taken, f"DPOTrainer sets {sorted(taken)}, too", _DPO)
    read = {"beta", "precompute_ref_logps", "loss_types", "loss_weights", "ld_alpha", "ref_model"}
    missing = (read | {"_metrics", "_tokenizer", "_is_vision_dataset", "_signature_columns"}) - set(plain)
    require(not missing and set(plain) <= set(mine), f"DPOTrainer no longer sets {sorted(missing)}", _DPO)


def trl_loss(trainer, chosen, rejected, beta, loss_type, label_smoothing=0.1):
    """TRL's loss of these log-ratios, as floats; what it reads is set while the stand-in for the model is called."""
    trainer.loss_types, trainer.loss_weights, trainer.label_smoothing = [loss_type], [1.0], label_smoothing
    # Two tokens each: the first is the prompt, the second the completion
    log_probs = torch.tensor([[c] for c in chosen] + [[r] for r in rejected])
    ids = torch.tensor([[5, 6]] * len(log_probs))
    inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "completion_mask": torch.tensor([[0, 1]] * len(ids))}

    def stand_in(**kwargs):
        require(kwargs.get("fused_lm_head"), "the model is called without `fused_lm_head`", _DPO)
        trainer.beta = torch.tensor(beta)
        inputs["ref_chosen_logps"] = inputs["ref_rejected_logps"] = torch.zeros(len(chosen))
        zeros = torch.zeros_like(log_probs)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    trainer.precompute_ref_logps = True
    return trainer._compute_loss(stand_in, inputs, False).item()


def test_dpo_reads_beta_and_the_reference_after_the_model_has_answered(tmp_path):
    trainer = make_trl_trainer(tmp_path)
    got = trl_loss(trainer, [1.0, -2.0], [0.5, 1.0], [0.2, 0.4], "sigmoid")
    expected = sum(math.log1p(math.exp(-z)) for z in (0.2 * 0.5, 0.4 * -3.0)) / 2
    require(
        math.isclose(got, expected, rel_tol=1e-6), f"the loss of set β and references is {got}, not {expected}", _DPO
    )
    mode = "train" if trainer.model.training else "eval"
    margins = trainer._metrics[mode]["rewards/margins"]
    want = (0.2 * 0.5 + 0.4 * -3.0) / 2
    require(
        isinstance(margins[-1], float) and math.isclose(margins[-1], want, rel_tol=1e-5),
        "`rewards/margins` is no longer the mean of β times the margins, appended as a float",
        f"{_DPO}, to find log-probs that are not finite",
    )
    trainer.loss_weights = [0.0]
    trainer.loss_types = ["sigmoid"]
    output = trl_loss(trainer, [math.nan, 0.0], [0.5, 1.0], [0.2, 0.4], "sigmoid")
    require(math.isnan(output) and math.isnan(margins[-1]), "a NaN does not reach `rewards/margins`", _DPO)


def test_dpo_losses_are_those_that_the_config_knows(tmp_path):
    source = textwrap.dedent(inspect.getsource(trl.DPOTrainer._compute_loss))
    compared = {
        node.comparators[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "loss_type"
    }
    require(
        compared == set(dpo_config.LOSSES), f"the losses are {sorted(compared)}", "LOSSES of trl_ext/dpo/config.py"
    )

    trainer, pairs_ = make_trl_trainer(tmp_path), ([1.0, -2.0, 0.3], [0.5, 1.0, -0.4])
    twice = [[2 * ratio for ratio in ratios] for ratios in pairs_]
    shifted = [[ratio + 1.0 for ratio in ratios] for ratios in pairs_]
    for loss_type in dpo_config.LOSSES:
        loss = trl_loss(trainer, *pairs_, 0.2, loss_type)
        same = {
            "β": loss == trl_loss(trainer, *pairs_, 0.3, loss_type),
            "β·Δ": math.isclose(loss, trl_loss(trainer, *twice, 0.1, loss_type), rel_tol=1e-5)
            and math.isclose(loss, trl_loss(trainer, *shifted, 0.2, loss_type), rel_tol=1e-5),
            "smoothing": loss == trl_loss(trainer, *pairs_, 0.2, loss_type, label_smoothing=0.3),
        }
        # A vector of β is not a factor of Δ where a loss sorts the pairs or divides by lengths
        of_margin = same["β·Δ"] and not same["β"] and loss_type not in ("aot", "aot_unpaired", "sigmoid_norm")
        for what, is_so, names in (
            ("sees β", not same["β"], set(dpo_config.LOSSES) - dpo_config.WITHOUT_BETA),
            ("sees β as β·Δ only", of_margin, dpo_config.OF_BETA_TIMES_MARGIN),
            ("reads `label_smoothing`", not same["smoothing"], dpo_config.READS_LABEL_SMOOTHING),
        ):
            require(
                is_so == (loss_type in names), f"that '{loss_type}' {what} is now {is_so}", "trl_ext/dpo/config.py"
            )


def test_dpo_batches_and_columns(tmp_path):
    trainer = make_trl_trainer(tmp_path)
    rows = list(trainer.train_dataset.select(range(2)))
    keys = {"input_ids", "attention_mask", "completion_mask"}
    require(set(trainer.data_collator(rows)) == keys, "the collator makes other columns than these", "dpo/inputs.py")
    for name in ("prompt_ids", "chosen_ids", "rejected_ids", "source", "weight"):
        require(name in rows[0], f"a prepared dataset has no `{name}` any more", "trl_ext/dpo/")
    trainer._set_signature_columns_if_needed()
    require("chosen_ids" in trainer._signature_columns, "`_signature_columns` is no list of kept columns", _DPO)
    require(not {*PAIR_COLUMNS} & {*trainer._signature_columns}, "TRL has a column of ours", "dpo/inputs.py")
    sums = trainer.compute_ref_log_probs(trainer.ref_model, trainer.data_collator(rows))
    require([tuple(s.shape) for s in sums] == [(2,), (2,)], "`compute_ref_log_probs` returns other shapes", _DPO)


def test_dpo_config_has_none_of_the_old_settings_and_none_of_ours():
    theirs = {field.name for field in dataclasses.fields(trl.DPOConfig)}
    back = theirs & {*dpo_config.OLD_SETTINGS}
    require(not back, f"DPOConfig has {sorted(back)} again", "OLD_SETTINGS of trl_ext/dpo/config.py")
    ours = {*vars(dpo_config.DPOConfig)["__annotations__"]}
    require(not ours & theirs, f"DPOConfig has {sorted(ours & theirs)}, too", "trl_ext/dpo/config.py")


def test_dpo_when_state_is_saved_loaded_and_gradients_are_complete(tmp_path):
    events = []

    class ObservedDPO(trl.DPOTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            events.append(("step", self.accelerator.sync_gradients))
            return loss

        def _save_rng_state(self, output_dir):
            super()._save_rng_state(output_dir)
            events.append(("save", output_dir))

        def _load_optimizer_and_scheduler(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            events.append(("load", checkpoint))

    def train(checkpoint, **kwargs):
        events.clear()
        given = {"train_dataset": dpo_pairs(), "processing_class": tiny_tokenizer(), "ref_model": tiny_llama()}
        kwargs = {**QUIET, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, **kwargs}
        trainer = ObservedDPO(tiny_llama(), args=trl.DPOConfig(str(tmp_path), **kwargs), **given)
        trainer._metrics["train"]["before"].append(7.0)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    checkpoint = str(tmp_path / "checkpoint-2")
    trainer = train(None, max_steps=2)
    steps = [("step", False), ("step", True)]
    require(
        [e for e in events if e[0] != "load"] == steps * 2 + [("save", checkpoint)], f"the order is {events}", _DPO
    )
    require(("load", checkpoint) not in events, "the first run loads a state", _DPO)
    require(
        trainer.state.log_history[0].get("before") == 7.0, "what is in `_metrics` before training is not logged", _DPO
    )
    for skip in (False, True):  # `_load_rng_state` is not called with `ignore_data_skip`
        train(checkpoint, max_steps=3, ignore_data_skip=skip, save_strategy="no")
        require(events == [("load", checkpoint), *steps], f"the order is {events}", _DPO)


# ---- What monitors rely on (trl_ext/callbacks, trl_ext/rewards, trl_ext/metrics.py) ----


class Watcher(TrainerCallback):
    """Keeps what a callback is given."""

    def __init__(self):
        self.logs, self.evaluations, self.names = [], [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))
        self.names.append(sorted(kwargs))
        control.should_save = control.should_save or state.global_step == 3

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.evaluations.append(dict(metrics))
        metrics["eval_mine"] = 1.0

    def on_step_end(self, args, state, control, **kwargs):
        state.stateful_callbacks["trl_ext_monitors"] = {"mine": state.global_step}
        state._not_saved = object()


@pytest.fixture(scope="module")
def watched_runs(tmp_path_factory):
    """A short run of each trainer of `trl_ext.metrics` that has a quantity of its own, with what callbacks saw."""
    model = str(tmp_path_factory.mktemp("model"))
    tiny_llama().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    pairs = {"prompt": ["the cat"] * 8, "chosen": [" sat on the mat"] * 8, "rejected": [" flew over"] * 8}
    labelled = {"prompt": ["the cat"] * 8, "completion": [" sat"] * 8, "label": [True, False] * 4}
    on_policy = {"num_generations": 2, "num_generations_eval": 1, "max_completion_length": 6, "beta": 0.05}
    runs = {}
    for name, extra, data in (
        ("RLOO", on_policy | {"steps_per_generation": 2}, None),
        ("GRPO", on_policy | {"steps_per_generation": 2}, None),
        ("DPO", {}, pairs),
        ("SFT", {}, {"prompt": labelled["prompt"], "completion": labelled["completion"]}),
        ("KTO", {}, labelled),
        ("Reward", {}, pairs),
    ):
        folder, watcher, seen = tmp_path_factory.mktemp(name), Watcher(), []

        def reward(prompts, completions, seen=seen, **kwargs):
            seen.append(kwargs)
            kwargs["log_metric"]("mine", 0.5)
            return [None] * len(prompts)

        dataset = prompts(8) if data is None else Dataset.from_dict(data)
        config = getattr(trl, f"{name}Config")(
            str(folder),
            **ON_CPU,
            max_steps=4,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            eval_strategy="steps",
            eval_steps=2,
            metric_for_best_model="eval_mine",
            gradient_checkpointing=False,
            **extra,
        )
        functions = {} if data is not None else {"reward_funcs": [length_reward, reward]}
        trainer = getattr(trl, f"{name}Trainer")(
            model=model, args=config, train_dataset=dataset, eval_dataset=dataset, callbacks=[watcher], **functions
        )
        trainer.train()
        runs[f"{name}Config"] = (watcher, seen, trainer, folder)
    return runs


@pytest.mark.parametrize("name", [name for name in METRICS if name != "PPOConfig"])
def test_metrics_table_names_keys_that_are_logged(name, watched_runs):
    logs = [log for log in watched_runs[name][0].logs if is_training_log(log)]
    reader = "trl_ext/metrics.py"
    require(len(logs) == 4, f"{name}: {len(logs)} of 4 training logs have `learning_rate`", reader)
    for quantity, metric in METRICS[name].items():
        steps = [i for i, log in enumerate(logs) if metric.key in log]
        expected = [0, 2] if metric.cadence == "rollout" else [0, 1, 2, 3]
        require(steps == expected, f"{name} logs `{metric.key}` ({quantity}) at {steps}, it was at {expected}", reader)


def test_what_callbacks_are_given(watched_runs):
    for name, (watcher, _, trainer, folder) in watched_runs.items():
        reader = "trl_ext/callbacks/"
        for log in watcher.logs:
            kinds = [is_training_log(log), any(key.startswith("eval_") for key in log), "train_loss" in log]
            require(sum(kinds) == 1, f"{name} logs {sorted(log)}, of training, evaluation and end at once", reader)
        require("trainer" not in watcher.names[0], f"callbacks are given {watcher.names[0]}", reader)
        require(
            trainer.state.best_metric == 1.0, "what a callback adds to `metrics` is not for the best model", reader
        )
        saved = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
        require(
            saved["stateful_callbacks"].get("trl_ext_monitors") == {"mine": 3} and "_not_saved" not in saved,
            "`state.stateful_callbacks` is not saved as it is, or saving set by `on_log` comes at another step",
            "trl_ext/callbacks/monitor.py",
        )


@pytest.mark.parametrize("name", ["RLOOConfig", "GRPOConfig"])
def test_what_reward_functions_are_given(name, watched_runs):
    watcher, seen, _, _ = watched_runs[name]
    reader = "trl_ext/rewards/"
    needed = {"completion_ids", "topic", "trainer_state", "log_metric", "log_extra"}
    require(needed <= set(seen[0]), f"reward functions are given {sorted(seen[0])}", reader)
    training = next(log for log in watcher.logs if is_training_log(log))
    require(training["mine"] == 0.5, "`log_metric` does not log", reader)
    require(training["rewards/reward/mean"] is None, "a function that returns None only does not log None", reader)
    require(
        all(
            {"eval_rewards/length_reward/mean", "eval_rewards/length_reward/std", "eval_mine"} <= set(e)
            for e in (watcher.evaluations)
        ),
        f"`on_evaluate` is given {sorted(watcher.evaluations[0])}, without what reward functions scored",
        "trl_ext/callbacks/gold_gap.py",
    )
