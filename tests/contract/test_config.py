"""The settings of RLOO that PPOConfig inherits."""

import ast
import dataclasses
import inspect
import textwrap

import pytest
from trl import RLOOConfig

from tests.contract.observed import require, rloo, rloo_config
from trl_ext.ppo.config import PPOConfig


def test_the_last_check_of_rloo_config_is_the_number_of_generations(tmp_path):
    """We swallow that error, so anything after it would be skipped."""
    reader = "`PPOConfig`"
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
    require(trainer.ref_model is None, "`beta=0` loads a reference", "`_as_rloo_reads` of PPOTrainer")
    reader = "`_as_rloo_reads` of PPOTrainer"
    require((trainer.epsilon_low, trainer.num_iterations, trainer.beta) == (0.3, 2, 0.0), "values move", reader)


def test_to_dict_hides_no_setting(tmp_path):
    config = PPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    hidden = {name for name, value in config.to_dict().items() if str(value).startswith("<")}
    require(not hidden, f"`to_dict` of TrainingArguments hides {hidden}", "`PPOConfig`, when it is copied,")
