"""Fine-tune a causal language model on demonstrations: columns `prompt` and `completion`, or `messages`, or `text`.

    trl-ext sft --config demo/sft --model_name_or_path PATH_OR_HUB_NAME

Needed, in the configuration file or as flags: a model and a dataset. Flags override the file; see --help.
The same command again resumes from the newest complete checkpoint in `output_dir`.
"""

from dataclasses import dataclass

from trl_ext import StrictTrlParser
from trl_ext.cli.arguments import HeldOutArguments, ModelArguments, save_and_evaluate
from trl_ext.runs import Hold, check_output_dir, setting
from trl_ext.upstream import quiet


@dataclass
class SFTScriptArguments(HeldOutArguments):
    """Declare the arguments that `SFTConfig` and `ModelConfig` lack: the data."""

    eval_dataset_name: str | None = setting(
        None, "Dataset to evaluate on; `dataset_name`'s `dataset_test_split` if unset."
    )


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    kinds = (SFTScriptArguments, "trl_ext.dpo.SFTConfig", ModelArguments)
    parser = StrictTrlParser(kinds, without_arguments=__doc__)
    parser.set_defaults(eval_on_start=True)  # so that the run's page says what was won
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        check_output_dir(training_args.output_dir, training_args.resume_from_checkpoint)

    # These take seconds to import: what was mistyped has been refused by now
    from trl import get_peft_config, get_quantization_config

    from trl_ext import load_dataset_split
    from trl_ext.data import held_out_rows, one_form
    from trl_ext.dpo import ResumableSFTTrainer
    from trl_ext.models import keep_4bit_layout
    from trl_ext.runs import CannotResume, NotSaved, checkpoint_to_resume
    from trl_ext.workbench import next_answer, next_line, report_of

    with parser.one_line_errors():
        in_use = Hold(training_args.output_dir)

    # 2. Model: the trainer loads it, and the tokenizer, from the path
    training_args.model_init_kwargs = model_args.init_kwargs(training_args.model_init_kwargs)

    # 3. Data
    def load(name: str, split: str):
        config = script_args.dataset_config if name == script_args.dataset_name else None
        dataset = load_dataset_split(name, split, config=config, columns=())
        if not {"messages", "conversations", "input_ids"} & {*dataset.column_names}:
            needed = "completion" if "prompt" in dataset.column_names else training_args.dataset_text_field
            dataset.select_columns(needed)  # which raises a `ValueError` if it is missing
        return one_form(dataset, f"dataset {name!r}")

    eval_dataset = None
    with parser.one_line_errors():
        train_dataset = load(script_args.dataset_name, script_args.dataset_train_split)
        if training_args.eval_strategy != "no" or script_args.eval_dataset_name or script_args.eval_size:
            eval_name = script_args.eval_dataset_name or script_args.dataset_name
            train_dataset, eval_dataset = held_out_rows(
                train_dataset,
                lambda: load(eval_name, script_args.dataset_test_split),
                script_args.eval_size,
                training_args.seed,
            )
    if eval_dataset is None:
        training_args.eval_strategy = "no"
        training_args.eval_on_start = False

    # 4. Train
    with parser.one_line_errors():
        trainer = ResumableSFTTrainer(
            model=model_args.model_name_or_path,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    keep_4bit_layout(trainer.model)
    with parser.one_line_errors(CannotResume, NotSaved):
        checkpoint = checkpoint_to_resume(training_args)
        training_args.eval_on_start &= not checkpoint
        result = trainer.train(resume_from_checkpoint=checkpoint)

    # 5. Save
    save_and_evaluate(parser, trainer, result)
    report = report_of(training_args.output_dir, bool(result.metrics), training_args.record_run)
    trainer.accelerator.print(
        f"Model: {training_args.output_dir}\n{report}{next_line(next_answer(training_args, train_dataset))}"
    )
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    in_use.release()


if __name__ == "__main__":
    main()
