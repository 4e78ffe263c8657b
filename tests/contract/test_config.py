"""The settings of RLOO that PPOConfig inherits, and those of GRPO that it lacks."""

import ast
import dataclasses
import inspect
import sys
import textwrap

import pytest
from trl import GRPOConfig, GRPOTrainer, RLOOConfig

from tests.contract.observed import grpo, require
from tests.tiny import ON_CPU, prompts
from trl_ext.ppo.config import PPOConfig


def test_the_last_check_of_rloo_config_is_the_number_of_generations(tmp_path):
    """We swallow that error, so anything after it would be skipped."""
    reader = "`PPOConfig`"
    with pytest.raises(ValueError, match="at least 2 generations"):
        RLOOConfig(str(tmp_path), **ON_CPU, per_device_train_batch_size=4, num_generations=1)
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


GRPOS_LOSS = {"_compute_loss", "get_off_policy_mask", "get_gamma_weights"}  # PPO never calls these
ITS_OWN = {field.name for field in dataclasses.fields(GRPOConfig)} - {f.name for f in dataclasses.fields(PPOConfig)}
READER = "`_as_grpo_reads` of PPOTrainer, which shows GRPO these settings in the constructor alone,"


def test_what_grpo_reads_of_a_setting_in_the_constructor_it_keeps(tmp_path):
    trainer = grpo(tmp_path, epsilon=0.3, num_iterations=2)
    trainer.args.epsilon = trainer.args.num_iterations = trainer.args.beta = trainer.args.sync_ref_model = None
    trainer.train()
    require(trainer.ref_model is None, "`beta=0` loads a reference", READER)
    require((trainer.epsilon_low, trainer.num_iterations, trainer.beta) == (0.3, 2, 0.0), "values move", READER)


class Sealed(GRPOConfig):
    """Notes, once `sealed`, what TRL reads of it that PPOConfig lacks; transformers reads all fields for its logs."""

    read_by_trl = ()

    def __getattribute__(self, name):
        if name in ITS_OWN and "sealed" in vars(self) and sys._getframe(1).f_globals["__name__"].startswith("trl."):
            self.read_by_trl += (name,)
        return super().__getattribute__(name)


def test_a_setting_that_we_lack_is_read_in_the_constructor_alone(tmp_path):
    """In training, evaluating and saving. PPOConfig lacks it then, so PPOTrainer would fail."""
    config = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    config |= {"per_device_eval_batch_size": 2, "steps_per_generation": 3}  # GRPO then asks for log-probs
    trainer = grpo(tmp_path, cls=Sealed, eval_dataset=prompts(2), **config)
    trainer._compute_loss = lambda model, inputs: sum(p.sum() for p in model.parameters())
    trainer.args.sealed = True
    trainer.train()
    require(not trainer.args.read_by_trl, f"{trainer.args.read_by_trl} are read later", READER)


def test_no_method_but_the_constructor_and_the_loss_reads_a_setting_that_we_lack():
    """Nor in the branches that the run above does not reach, such as vLLM's."""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer))).body
    read = {
        (method.name, node.attr)
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and method.name not in {"__init__", *GRPOS_LOSS}
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.args" and node.attr in ITS_OWN
    }
    # In continuous batching alone, which `PPOConfig` refuses
    require(read <= {("_generate_single_turn", "cast_lm_head_to_fp32")}, f"{sorted(read)} are read later", READER)


def test_to_dict_hides_no_setting(tmp_path):
    config = PPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    hidden = {name for name, value in config.to_dict().items() if str(value).startswith("<")}
    require(not hidden, f"`to_dict` of TrainingArguments hides {hidden}", "`PPOConfig`, when it is copied,")
