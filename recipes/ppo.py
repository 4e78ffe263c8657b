"""Train a causal language model with PPO, on text or chat prompts.

    trl-ext ppo --config tinystories/ppo --model_name_or_path PATH_OR_HUB_NAME

Needed, in the configuration file or as flags: a model, a dataset with the column `prompt` and a held-out
split (or `eval_size`), and a reward: `reward_model_name_or_path`, `reward_funcs`, `rewards`, or several. An
`environment` may provide prompts and a reward, see docs/agents.md. Flags override the file; see --help. The same
command again resumes from the newest complete checkpoint in `output_dir`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl_ext import StrictTrlParser
from trl_ext.cli.arguments import HeldOutArguments, ModelArguments, PromptArguments, save_and_evaluate
from trl_ext.cli.parser import entry_of
from trl_ext.runs import Hold, check_output_dir, setting
from trl_ext.upstream import quiet

if TYPE_CHECKING:
    from collections.abc import Callable

    from datasets import Dataset


@dataclass
class PPOScriptArguments(PromptArguments, HeldOutArguments):
    """Declare the arguments that `PPOConfig` and `ModelConfig` lack: the data, the rewards and the critic."""

    eval_dataset_name: str | None = setting(None, "Dataset to evaluate on; `dataset_name` if unset.")
    max_prompt_length: int | None = setting(
        None,
        "Leave out prompts with more tokens; if unset, all prompts must fit into the models' contexts.",
        range=">= 1",
    )
    ref_model_name_or_path: str | None = setting(
        None, "Reference model, or an adapter, which is merged into its base; if unset, the policy before training."
    )
    value_model_name_or_path: str | None = setting(
        None,
        "Sequence classifier that the critic starts from. If unset: the reward model if it has the "
        "policy's tokenizer, else the policy with a zero head.",
    )
    environment: list[str] | None = setting(
        None,
        "Class of an environment, `path/to/file.py:Class` or `package.module.Class`. For several "
        "give `name=path` each; a row's column `environment` names the row's environment.",
    )
    tools: list[str] | None = setting(
        None, "Functions that the model may call, each `file.py:function` or `module.function`."
    )
    monitors: list[str] | None = setting(
        None, "Callbacks of trl_ext.callbacks, such as `KLBudgetCallback` or `{KLBudgetCallback: {limit: 5}}`."
    )


def without_long_prompts(dataset: "Dataset", tokenizer: Any, longest: int) -> "Dataset":
    """Return the rows whose prompt has at most `longest` tokens, as the trainer counts them."""
    from accelerate import PartialState

    def length(prompt: Any) -> int:
        if isinstance(prompt, list):
            return len(
                tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
            )
        return len(tokenizer(prompt)["input_ids"])

    kept = dataset.filter(lambda prompt: length(prompt) <= longest, input_columns="prompt")
    PartialState().print(
        f"{len(dataset) - len(kept)} of {len(dataset)} prompts have more than {longest} tokens and are left out."
    )
    return kept


def load_environments(entries: list[str] | None, load: "Callable[[str, str], Any]") -> Any:
    """
    Import environment classes; return one class, or a dict of classes by name, or None if there are no entries. Raise
    a `ValueError` if two have the same name, or none.
    """
    named = [entry.rpartition("=") for entry in entries or []]
    classes = {name: load(path, "environment") for name, _, path in named}
    if len(classes) < len(named):  # the last would be played alone
        raise ValueError(f"several environments need different names: give each as `name=path`, got {entries}")
    return classes.get("", classes) or None


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    kinds = (PPOScriptArguments, "trl_ext.PPOConfig", ModelArguments)
    parser = StrictTrlParser(kinds, without_arguments=__doc__)
    parser.set_defaults(eval_on_start=True)  # so that the run's page says what was won
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        check_output_dir(training_args.output_dir, training_args.resume_from_checkpoint)

    # These take seconds to import: what was mistyped has been refused by now
    from accelerate import PartialState
    from trl import get_peft_config, get_quantization_config

    from trl_ext import PPOTrainer, load_dataset_split
    from trl_ext.callbacks import attach_monitors, load_monitors
    from trl_ext.data import held_out_rows
    from trl_ext.models import load_tokenizer
    from trl_ext.ppo import ServerLost
    from trl_ext.rewards import RewardFailed, load_object
    from trl_ext.runs import CannotResume, NotSaved, checkpoint_to_resume
    from trl_ext.workbench import next_answer, next_line, objections, report_of

    with parser.one_line_errors():
        in_use = Hold(training_args.output_dir)

    tokenizer_kwargs = {"revision": model_args.model_revision, "trust_remote_code": training_args.trust_remote_code}
    with parser.one_line_errors():
        monitors = load_monitors(entry_of(script_args.monitors))
        tools = [load_object(path, "tool") for path in script_args.tools or []]
        environment = load_environments(script_args.environment, load_object)
        tokenizer = load_tokenizer(model_args.model_name_or_path, **tokenizer_kwargs)
        rewards, training_args.reward_weights = script_args.load_rewards(
            tokenizer, training_args.reward_weights, script_args.reward_model_name_or_path
        )
    for sentence in objections(rewards):
        PartialState().print(f"Warning: {sentence}")

    # 2. Model: the trainer loads it, and the tokenizer, from the path
    training_args.model_init_kwargs = model_args.init_kwargs(training_args.model_init_kwargs)

    # 3. Data; the trainer checks the columns
    def load(name: str, split: str) -> "Dataset":
        config = script_args.dataset_config if name == script_args.dataset_name else None
        return load_dataset_split(name, split, config=config, columns=())

    eval_name = script_args.eval_dataset_name or script_args.dataset_name
    train_dataset = eval_dataset = None
    with parser.one_line_errors():
        if script_args.dataset_name:
            train_dataset, eval_dataset = held_out_rows(
                load(script_args.dataset_name, script_args.dataset_train_split),
                lambda: load(eval_name, script_args.dataset_test_split),
                script_args.eval_size,
                training_args.seed,
            )
        if longest := script_args.max_prompt_length:
            train_dataset = train_dataset and without_long_prompts(train_dataset, tokenizer, longest)
            eval_dataset = eval_dataset and without_long_prompts(eval_dataset, tokenizer, longest)
    if eval_dataset is None:
        training_args.eval_strategy = "no"
        training_args.eval_on_start = False
    elif "held_out" not in eval_dataset.column_names:  # what a gold judge scores
        eval_dataset = eval_dataset.add_column("held_out", [True] * len(eval_dataset))

    # 4. Train
    with parser.one_line_errors():
        trainer = PPOTrainer(
            model=model_args.model_name_or_path,
            reward_funcs=rewards or None,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            value_model=script_args.value_model_name_or_path,
            ref_model=script_args.ref_model_name_or_path,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
            tools=tools or None,
            environment_factory=environment,
        )
    attach_monitors(trainer, monitors)
    with parser.one_line_errors(CannotResume, NotSaved, RewardFailed, ServerLost):
        checkpoint = checkpoint_to_resume(training_args)
        training_args.eval_on_start &= not checkpoint
        result = trainer.train(resume_from_checkpoint=checkpoint)

    # 5. Save
    save_and_evaluate(parser, trainer, result, RewardFailed, ServerLost)
    report = report_of(training_args.output_dir, bool(result.metrics), training_args.record_run)
    answer = ""
    if train_dataset is not None and not (environment or tools):  # `generate` calls none
        length = training_args.max_completion_length
        answer = next_line(next_answer(training_args, train_dataset, max_new_tokens=length))
    critic = "" if training_args.baseline == "mean" else "its critic/ and "
    trainer.accelerator.print(f"Model: {training_args.output_dir}, with {critic}all_results.json\n{report}{answer}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()
    in_use.release()


if __name__ == "__main__":
    main()
