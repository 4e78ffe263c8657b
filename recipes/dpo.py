"""Train a causal language model with DPO on preference pairs: columns `prompt`, `chosen` and `rejected`, text or chat.

    trl-ext dpo --config demo/dpo --model_name_or_path PATH_OR_HUB_NAME

Needed, in the configuration file or as flags: a model and a dataset with a held-out split (or `eval_size`). Flags
override the file; see --help. `eval_results.json`, beside the model, has its metrics on the held-out pairs. The same
command again resumes from the newest complete checkpoint in `output_dir`.
"""

from dataclasses import dataclass
from functools import partial

from trl_ext import StrictTrlParser
from trl_ext.cli.arguments import HeldOutArguments, ModelArguments, save_and_evaluate
from trl_ext.runs import Hold, check_output_dir, setting
from trl_ext.upstream import quiet


@dataclass
class DPOScriptArguments(HeldOutArguments):
    """Declare the arguments that `DPOConfig` and `ModelConfig` lack: the data and the reference."""

    ref_model_name_or_path: str | None = setting(
        None, "Reference model, or an adapter, which is merged into its base; if unset, the model before training."
    )
    drop_unusable_pairs: bool = setting(
        False, "Leave out pairs that lack an answer or have the same answer twice, instead of stopping."
    )


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    kinds = (DPOScriptArguments, "trl_ext.DPOConfig", ModelArguments)
    parser = StrictTrlParser(kinds, without_arguments=__doc__)
    parser.set_defaults(eval_on_start=True)  # so that the run's page says what was won
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        check_output_dir(training_args.output_dir, training_args.resume_from_checkpoint)

    # These take seconds to import: what was mistyped has been refused by now
    from transformers import AutoModelForCausalLM
    from trl import get_peft_config, get_quantization_config

    from trl_ext import DPOTrainer, load_dataset_split
    from trl_ext.data import held_out_rows, usable_pairs
    from trl_ext.models import is_adapter, load_merged
    from trl_ext.runs import CannotResume, NotSaved, checkpoint_to_resume
    from trl_ext.workbench import next_answer, next_line, report_of

    with parser.one_line_errors():
        in_use = Hold(training_args.output_dir)

    # 2. Data
    def load(split: str):
        dataset = load_dataset_split(
            script_args.dataset_name, split, config=script_args.dataset_config, columns=("chosen", "rejected")
        )
        return usable_pairs(dataset, f"the split {split!r}", script_args.drop_unusable_pairs)

    with parser.one_line_errors():
        train_dataset, eval_dataset = held_out_rows(
            load(script_args.dataset_train_split),
            lambda: load(script_args.dataset_test_split),
            script_args.eval_size,
            training_args.seed,
        )
    if eval_dataset is None:
        training_args.eval_strategy = "no"
        training_args.eval_on_start = False

    # 3. Model: the trainer loads it, and the tokenizer, from the path
    training_args.model_init_kwargs = model_args.init_kwargs(training_args.model_init_kwargs)
    reference = None
    with parser.one_line_errors():
        given = script_args.ref_model_name_or_path
        if given and not (given == model_args.model_name_or_path and is_adapter(given)):  # the trainer copies that one
            kwargs = {"trust_remote_code": training_args.trust_remote_code, **training_args.model_init_kwargs}
            kwargs.pop("revision")  # the policy's
            load = partial(load_merged, device_map=None) if is_adapter(given) else AutoModelForCausalLM.from_pretrained
            reference = load(given, **kwargs)
        trainer = DPOTrainer(
            model=model_args.model_name_or_path,
            ref_model=reference,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )

    # 4. Train
    with parser.one_line_errors(CannotResume, NotSaved):
        checkpoint = checkpoint_to_resume(training_args)
        training_args.eval_on_start &= not checkpoint
        result = trainer.train(resume_from_checkpoint=checkpoint)

    # 5. Save
    metrics = save_and_evaluate(parser, trainer, result)
    outcome = ""
    if metrics:
        outcome = f", held-out preference accuracy {metrics['eval_rewards/accuracies']:.1%}"
    report = report_of(training_args.output_dir, bool(result.metrics), training_args.record_run)
    trainer.accelerator.print(
        f"Model: {training_args.output_dir}{outcome}\n{report}{next_line(next_answer(training_args, train_dataset))}"
    )
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    in_use.release()


if __name__ == "__main__":
    main()
