"""Train a causal language model with PPO, on text or chat prompts.

    accelerate launch recipes/ppo.py --config recipes/tinystories/ppo.yaml --model_name_or_path PATH_OR_HUB_NAME

Needed, in the configuration file or as flags: a model, a dataset with the column `prompt` (or `input_ids`), and a
reward: `reward_model_name_or_path`, `reward_funcs`, or both. Flags override the file; --help lists them all. Running
the same command again resumes from the newest checkpoint in `output_dir`. Without arguments: the demo's guarded run.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from trl_ext import PPOConfig, PPOTrainer, StrictTrlParser, load_dataset_split
from trl_ext.callbacks import attach_monitors, load_monitors


@dataclass
class PPOScriptArguments(ScriptArguments):
    """What `PPOConfig` and `ModelConfig` do not say: the data and where rewards and values come from."""

    eval_dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset to evaluate on; `dataset_name` if unset."}
    )
    eval_size: int | None = field(
        default=None,
        metadata={
            "help": "Prompts to cut from the training split and evaluate on, for data without `dataset_test_split`. "
            "0 switches evaluation off."
        },
    )
    max_prompt_length: int | None = field(
        default=None,
        metadata={"help": "Leave out prompts of more tokens; without it they must fit into the contexts."},
    )
    reward_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Sequence classifier with one label. `reward_weights` are: this model's, then `reward_funcs`'."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={"help": "Reward functions, each `package.module.function` or `path/to/file.py:function`."},
    )
    ref_model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Reference model; the policy before training if unset."},
    )
    value_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Sequence classifier that the critic starts from. If unset: the reward model if it has the "
            "policy's tokenizer, else the policy with a zero head."
        },
    )
    monitors: list[str] | None = field(
        default=None,
        metadata={"help": "Callbacks of trl_ext.callbacks: `KLBudgetCallback` or `KLBudgetCallback(limit=5)`."},
    )

    def __post_init__(self):
        if not self.dataset_name:
            raise ValueError("no dataset: give `dataset_name`, a hub name, a .jsonl file or a folder")
        if not (self.reward_model_name_or_path or self.reward_funcs):
            raise ValueError("no reward: give `reward_model_name_or_path`, `reward_funcs`, or both")
        if self.eval_size is not None and (self.eval_size < 0 or self.eval_dataset_name):
            raise ValueError(f"`eval_size` must be 0 or more, and without `eval_dataset_name`; got {self.eval_size}")
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ValueError(f"`max_prompt_length` must be 1 or more, got {self.max_prompt_length}")
        if self.dataset_streaming or self.ignore_bias_buffers:
            raise ValueError("`dataset_streaming` and `ignore_bias_buffers` are not supported: leave them unset")


def load_reward(path: str) -> Callable:
    """Import a reward function from `package.module.function` or `path/to/file.py:function`."""
    place, _, name = path.rpartition(":" if ".py:" in path else ".")
    try:
        if not (place and name):
            raise ImportError("no module or no function is named")
        module = _module_of_file(Path(place)) if place.endswith(".py") else _module_of_name(place)
        function = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise ImportError(
            f"reward function {path!r} cannot be imported: {error}. Tried {name!r} of {place!r} from {Path.cwd()}; "
            "write `package.module.function` or `path/to/file.py:function`."
        ) from error
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            f"reward function {path!r} is of type {type(function).__name__}; name a function or an instance"
        )
    return function


def _module_of_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # a script's own folder is there instead
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def without_long_prompts(dataset: Dataset, tokenizer: Any, longest: int) -> Dataset:
    """The rows whose prompt has up to `longest` tokens, as the trainer counts them."""

    def length(row: dict[str, Any]) -> int:
        prompt = row.get("prompt")
        if "input_ids" in row:
            return sum(row.get("attention_mask") or [1] * len(row["input_ids"]))
        if isinstance(prompt, list):
            return len(
                tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
            )
        return len(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else 0  # the trainer refuses others

    kept = dataset.filter(lambda row: length(row) <= longest)
    PartialState().print(f"{len(dataset) - len(kept)} of {len(dataset)} prompts have more than {longest} tokens.")
    return kept


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    parser = StrictTrlParser((PPOScriptArguments, PPOConfig, ModelConfig))
    if not (sys.argv[1:] if arguments is None else arguments):
        sys.path.insert(0, str(Path(__file__).parents[1]))
        arguments = importlib.import_module("recipes.demo.stages").prepare_ppo()
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    if model_args.model_name_or_path is None:
        parser.error("no model: give `model_name_or_path`, a folder or a hub name")
    try:
        rewards = [load_reward(path) for path in script_args.reward_funcs or []]
        monitors = load_monitors(script_args.monitors)
    except (ImportError, TypeError, ValueError) as error:
        parser.error(str(error))
    if script_args.reward_model_name_or_path:
        rewards.insert(0, script_args.reward_model_name_or_path)

    # 2. Model: the trainer loads it, and the tokenizer, from the path
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }

    # 3. Data; the trainer checks the columns
    load = {"config": script_args.dataset_config, "columns": ()}
    try:
        train_dataset = load_dataset_split(script_args.dataset_name, script_args.dataset_train_split, **load)
        if script_args.eval_size is None:
            eval_name = script_args.eval_dataset_name or script_args.dataset_name
            try:
                eval_dataset = load_dataset_split(eval_name, script_args.dataset_test_split, **load)
            except ValueError as error:
                parser.error(f"{error}; `eval_size` cuts prompts to evaluate on from the training split")
        elif script_args.eval_size:
            split = train_dataset.train_test_split(script_args.eval_size, seed=training_args.seed)
            train_dataset, eval_dataset = split["train"], split["test"]
        else:
            eval_dataset, training_args.eval_strategy = None, "no"
        if longest := script_args.max_prompt_length:
            tokenizer = AutoTokenizer.from_pretrained(
                model_args.model_name_or_path,
                revision=model_args.model_revision,
                trust_remote_code=training_args.trust_remote_code,
            )
            train_dataset = without_long_prompts(train_dataset, tokenizer, longest)
            eval_dataset = eval_dataset and without_long_prompts(eval_dataset, tokenizer, longest)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if eval_dataset is not None and "held_out" not in eval_dataset.column_names:  # what a gold judge scores
        eval_dataset = eval_dataset.add_column("held_out", [True] * len(eval_dataset))

    # 4. Train
    try:
        trainer = PPOTrainer(
            model=model_args.model_name_or_path,
            reward_funcs=rewards,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            value_model=script_args.value_model_name_or_path,
            ref_model=script_args.ref_model_name_or_path,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    attach_monitors(trainer, monitors)
    metrics = trainer.train().metrics
    if metrics:  # none where the run was complete already
        trainer.save_metrics("train", metrics)

    # 5. Save
    trainer.save_model()
    if eval_dataset is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.accelerator.print(f"Model, critic/ and all_results.json are in {training_args.output_dir}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()


if __name__ == "__main__":
    main()
