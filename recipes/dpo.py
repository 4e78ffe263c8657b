"""Train a causal language model with DPO on preference pairs: columns `prompt`, `chosen` and `rejected`, text or chat.

    accelerate launch recipes/dpo.py --config recipes/demo/dpo.yaml --model_name_or_path PATH_OR_HUB_NAME

Needed, in the configuration file or as flags: a model and a dataset with a held-out split. Flags override the file;
--help lists them all. Beside the model this writes how it does on the held-out pairs: `eval_results.json`. The same
command again resumes from the newest checkpoint in `output_dir`.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForCausalLM
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from trl_ext import DPOConfig, DPOTrainer, StrictTrlParser, load_dataset_split
from trl_ext.data import usable_pairs


@dataclass
class DPOScriptArguments(ScriptArguments):
    """What `DPOConfig` and `ModelConfig` do not say: the data and the reference."""

    ref_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Reference model; the model before training if unset."}
    )
    eval_size: int | None = field(
        default=None,
        metadata={
            "help": "Pairs to cut from the training split and evaluate on, for data without `dataset_test_split`. "
            "0 switches evaluation off."
        },
    )
    drop_unusable_pairs: bool = field(
        default=False, metadata={"help": "Go on without pairs that lack an answer or have the same one twice."}
    )

    def __post_init__(self):
        if not self.dataset_name:
            raise ValueError("no dataset: give `dataset_name`, a hub name, a .jsonl file or a folder")
        if self.eval_size is not None and self.eval_size < 0:
            raise ValueError(f"`eval_size` must be 0 or more, got {self.eval_size}")
        if self.dataset_streaming or self.ignore_bias_buffers:
            raise ValueError("`dataset_streaming` and `ignore_bias_buffers` are not supported: leave them unset")


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    parser = StrictTrlParser((DPOScriptArguments, DPOConfig, ModelConfig))
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.exit(2, __doc__)
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    if model_args.model_name_or_path is None:
        parser.error("no model: give `model_name_or_path`, a folder or a hub name")

    # 2. Data
    def load(split: str):
        dataset = load_dataset_split(
            script_args.dataset_name, split, config=script_args.dataset_config, columns=("chosen", "rejected")
        )
        return usable_pairs(dataset, f"the split {split!r}", script_args.drop_unusable_pairs)

    try:
        train_dataset, eval_dataset = load(script_args.dataset_train_split), None
        if script_args.eval_size is None:
            try:
                eval_dataset = load(script_args.dataset_test_split)
            except ValueError as error:
                parser.error(f"{error}; `eval_size` cuts pairs to evaluate on from the training split")
        elif script_args.eval_size:
            split = train_dataset.train_test_split(script_args.eval_size, seed=training_args.seed)
            train_dataset, eval_dataset = split["train"], split["test"]
        else:
            training_args.eval_strategy = "no"
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))

    # 3. Model: the trainer loads it, and the tokenizer, from the path
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    reference = None
    try:
        if script_args.ref_model_name_or_path:
            kwargs = {name: value for name, value in training_args.model_init_kwargs.items() if name != "revision"}
            reference = AutoModelForCausalLM.from_pretrained(script_args.ref_model_name_or_path, **kwargs)
        trainer = DPOTrainer(
            model=model_args.model_name_or_path,
            ref_model=reference,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))

    # 4. Train, from the newest checkpoint that is complete
    states = Path(training_args.output_dir).glob("checkpoint-*/trainer_state.json")
    newest = max(states, key=lambda path: path.stat().st_mtime, default=None)
    checkpoint = training_args.resume_from_checkpoint or (newest and str(newest.parent))
    trainer.save_metrics("train", trainer.train(resume_from_checkpoint=checkpoint).metrics)

    # 5. Save
    trainer.save_model()
    outcome = ""
    if eval_dataset is not None:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        outcome = f", held-out preference accuracy {metrics['eval_rewards/accuracies']:.1%}"
    trainer.accelerator.print(f"Policy: {training_args.output_dir}{outcome}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    main()
