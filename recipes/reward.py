"""Train a reward model on preference pairs: columns `chosen` and `rejected`, and `prompt` if they do not contain it.

    trl-ext reward --config demo/reward --model_name_or_path PATH_OR_HUB_NAME

Needed, in the configuration file or as flags: a model and a dataset with a held-out split. Flags override the file;
see --help. Beside the model, a plain sequence classifier with one label, this writes what it is worth:
`reward_report.json` and `margins.png`. The same command again goes on from the newest complete
checkpoint in `output_dir`.
"""

import json
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from trl_ext import StrictTrlParser
from trl_ext.arguments import ClassifierArguments, HeldOutArguments
from trl_ext.model_names import check_model
from trl_ext.output_dir import check_output_dir, is_evaluated
from trl_ext.terminal import late_bars, quiet


@dataclass
class RewardScriptArguments(HeldOutArguments):
    """What `RewardConfig` and `ModelConfig` do not say: the data."""

    demonstrations_name: str | None = field(
        default=None,
        metadata={"help": "Dataset with `prompt`, `completion` that is to score 0 on average; `chosen` if unset."},
    )
    drop_unusable_pairs: bool = field(
        default=False, metadata={"help": "Go on without pairs that lack an answer or have the same one twice."}
    )
    resume_anyway: bool = field(
        default=False, metadata={"help": "Go on from a checkpoint that a run with other settings wrote."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_size == 0:
            raise ValueError("`eval_size` must be 1 or more: what the model is worth is measured on held-out pairs")


def check_models(script_args: RewardScriptArguments, model_args: ClassifierArguments) -> None:
    """Refuse a model that is not there, before anything that takes seconds is imported."""
    check_model("model_name_or_path", model_args.model_name_or_path, model_args.model_revision, tokenizer=True)


def next_ppo(
    output_dir: Path, script_args: RewardScriptArguments, model_args: ClassifierArguments, context: int
) -> str:
    """The command that trains the base of the reward model with PPO on its prompts, as a shell takes it."""
    flags = {
        "model_name_or_path": model_args.model_name_or_path,
        "reward_model_name_or_path": output_dir,
        "dataset_name": script_args.dataset_name,
        "output_dir": f"{output_dir}-ppo",
        **({"dataset_config": script_args.dataset_config} if script_args.dataset_config else {}),
        **({"eval_size": script_args.eval_size} if script_args.eval_size else {}),
        **({"use_peft": "true"} if model_args.use_peft else {}),
        **({"max_completion_length": context // 2} if context <= 1024 else {}),  # PPOConfig's own would not fit
    }
    return shlex.join(
        ["trl-ext", "ppo", *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]
    )


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    parser = StrictTrlParser(
        (RewardScriptArguments, "trl_ext.resumable.RewardConfig", ClassifierArguments),
        without_arguments=__doc__,
        check=check_models,
    )
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not training_args.bf16:
        parser.error("a quantised base needs `bf16: true`: TRL keeps the score head in bfloat16 then")
    with parser.one_line_errors():
        check_output_dir(training_args.output_dir, training_args.resume_from_checkpoint)

    late_bars()

    # These take seconds to import: what was mistyped has been refused by now
    from accelerate.utils import GatheredParameters
    from torch import nn
    from transformers import AutoConfig
    from trl import get_peft_config, get_quantization_config

    from trl_ext import load_dataset_split, save_base_fingerprint
    from trl_ext.checkpoints import CannotResume, checkpoint_to_resume
    from trl_ext.commands import record_run, report_of
    from trl_ext.data import check_chat_template, check_texts, held_out_rows, usable_pairs
    from trl_ext.evaluation import centre_and_report, head_of
    from trl_ext.models import keep_unpacked
    from trl_ext.resumable import ResumableRewardTrainer

    # 2. Data
    tokenizer_kwargs = {"revision": model_args.model_revision, "trust_remote_code": training_args.trust_remote_code}

    def load(split: str):
        dataset = load_dataset_split(
            script_args.dataset_name, split, config=script_args.dataset_config, columns=("chosen", "rejected")
        )
        if training_args.chat_template_path is None:
            check_chat_template(dataset, f"the split {split!r}", model_args.model_name_or_path, **tokenizer_kwargs)
        return usable_pairs(dataset, f"the split {split!r}", script_args.drop_unusable_pairs)

    with parser.one_line_errors():
        train_dataset, test_dataset = held_out_rows(
            load(script_args.dataset_train_split),
            lambda: load(script_args.dataset_test_split),
            script_args.eval_size,
            training_args.seed,
        )
        demonstrations = train_dataset
        if script_args.demonstrations_name:
            demonstrations = load_dataset_split(script_args.demonstrations_name, columns=("prompt", "completion"))
            check_texts(demonstrations, ("prompt", "completion"), f"dataset {script_args.demonstrations_name!r}")
            for name in ("chosen", "rejected"):  # the trainer prepares pairs
                demonstrations = demonstrations.add_column(name, demonstrations["completion"])

    pair_columns = train_dataset.column_names

    # 3. Model: the trainer loads it, and the tokenizer, from the path
    training_args.model_init_kwargs = model_args.init_kwargs(training_args.model_init_kwargs)
    peft_config = get_peft_config(model_args)
    if peft_config is not None:
        peft_config.task_type = "SEQ_CLS"  # so that the head is trained, and saved with the adapter
    with parser.one_line_errors():
        trainer = ResumableRewardTrainer(
            model=model_args.model_name_or_path,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=test_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=peft_config,
            resume_anyway=script_args.resume_anyway,
        )
    keep_unpacked(trainer.model)
    architectures = AutoConfig.from_pretrained(model_args.model_name_or_path, **tokenizer_kwargs).architectures or [""]
    if "SequenceClassification" not in architectures[0]:  # so the head is new (N+ details: std 1/√(d+1))
        head = head_of(trainer.model)
        with GatheredParameters([head.weight], modifier_rank=0):
            nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    output_dir = Path(training_args.output_dir)
    if peft_config is not None:  # so that a LoRA policy on the same base can score with the adapter alone
        output_dir.mkdir(parents=True, exist_ok=True)
        # Before FSDP2 shards it
        save_base_fingerprint(trainer.model, output_dir, model_args.model_name_or_path, model_args.model_revision)

    # 4. Train
    record_run(trainer)
    with parser.one_line_errors(CannotResume):
        result = trainer.train(resume_from_checkpoint=checkpoint_to_resume(training_args))
    if result.metrics:  # none where the run was complete already
        trainer.save_metrics("train", result.metrics)

    # 5. Save
    was_trained = bool(result.metrics)
    was_centred = is_evaluated(output_dir, result, "reward_report.json", "*.safetensors")
    outcome = ""
    if not was_centred:
        demonstrations = trainer._prepare_dataset(demonstrations, trainer.processing_class, training_args, "reference")
        measured = centre_and_report(trainer, demonstrations, output_dir)
        trainer.save_model()
        if trainer.is_world_process_zero():
            (output_dir / "reward_report.json").write_text(json.dumps(measured, indent=2))
        outcome = f", held-out accuracy {measured['accuracy']:.1%}"
    context = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", math.inf)
    has_prompts = architectures[0].endswith("ForCausalLM") and "prompt" in pair_columns
    trainer.accelerator.print(
        f"Reward model: {output_dir}{outcome}\n{report_of(output_dir, was_trained=was_trained)}; next: "
        f"{next_ppo(output_dir, script_args, model_args, context) if has_prompts else 'trl-ext ppo --help'}"
    )
    if training_args.push_to_hub and not was_centred:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    main()
