"""Train PPO's critic before PPO, on saved answers of the policy that PPO will start from (VC-PPO, 2503.01491).

    trl-ext generate --model_name_or_path POLICY --dataset_name PROMPTS --dataset_split train --rollouts true \\
        --output_file rollouts.jsonl
    trl-ext pretrain-critic --config qwen2.5-0.5b/pretrain_critic --model_name_or_path POLICY_OR_REWARD_MODEL

Needed, in the configuration file or as flags: a model that the critic starts from (the policy, whose backbone gets a
zero head, or a reward model with the policy's tokenizer), a dataset with saved answers and a held-out split (or
`eval_size`), and the answers' scores: the column `score_column`, or rewards that score them as in PPO
(`reward_model_name_or_path`, `reward_funcs`, `rewards`). `gamma`, `reward_…` and `missing_eos_…` must be those of the
PPO run, which takes the result as `value_model_name_or_path`. The same command again resumes from the newest complete
checkpoint in `output_dir`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext import StrictTrlParser
from trl_ext.cli.arguments import (
    ClassifierArguments,
    HeldOutArguments,
    PromptArguments,
    save_and_evaluate,
)
from trl_ext.runs import Hold, check_output_dir, setting
from trl_ext.upstream import quiet


@dataclass
class CriticScriptArguments(PromptArguments, HeldOutArguments):
    """Declare the arguments that `CriticConfig` and `ModelConfig` lack: answers, their scores, and their policy."""

    score_column: str | None = setting(None, "Column with each answer's score, in place of rewards.")
    policy_name_or_path: str | None = setting(
        None, "Policy that sampled the answers, for its tokenizer; `model_name_or_path` if unset."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score_column and (self.reward_model_name_or_path or self.reward_funcs or self.rewards):
            raise ValueError(f"`score_column` {self.score_column} and a reward are both given: remove one")


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    kinds = (CriticScriptArguments, "trl_ext.CriticConfig", ClassifierArguments)
    parser = StrictTrlParser(kinds, without_arguments=__doc__)
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        check_output_dir(training_args.output_dir, training_args.resume_from_checkpoint)

    # These take seconds to import: what was mistyped has been refused by now
    import torch
    from accelerate import PartialState
    from datasets import concatenate_datasets
    from transformers import set_seed
    from trl import get_peft_config

    from trl_ext import load_dataset_split, save_base_fingerprint
    from trl_ext.callbacks import record_run
    from trl_ext.data import hold_out_prompts
    from trl_ext.models import base_of, eos_token_ids, keep_4bit_layout, load_tokenizer
    from trl_ext.ppo import CriticTrainer, check_apart, load_critic, score_rollouts, with_finished, with_returns
    from trl_ext.rewards import ModelReward, RewardFailed, distinct
    from trl_ext.runs import CannotResume, NotSaved, checkpoint_to_resume
    from trl_ext.workbench import next_line, objections, report_of

    with parser.one_line_errors():
        in_use = Hold(training_args.output_dir)

    # 2. Model
    policy = script_args.policy_name_or_path or model_args.model_name_or_path
    revision = None if script_args.policy_name_or_path else model_args.model_revision
    set_seed(training_args.seed)  # a new adapter's weights are drawn
    with parser.one_line_errors():
        tokenizer = load_tokenizer(policy, revision, trust_remote_code=training_args.trust_remote_code)
        ends = eos_token_ids(policy, tokenizer, revision=revision)
        critic, origin = load_critic(
            model_args.model_name_or_path,
            get_peft_config(model_args),
            trust_remote_code=training_args.trust_remote_code,
            **model_args.init_kwargs(training_args.model_init_kwargs),
        )
    keep_4bit_layout(critic)

    # 3. Data: token ids, scores, and the returns that PPO will ask for
    size = training_args.per_device_eval_batch_size
    with parser.one_line_errors(), parser.one_line_errors(RewardFailed):
        model = None
        if path := script_args.reward_model_name_or_path:
            reads = {"policy_tokenizer": tokenizer, "eos_token_ids": ends}
            model = ModelReward(path, batch_size=size, device=training_args.device, **reads)
        rewards, training_args.reward_weights = script_args.load_rewards(
            tokenizer, training_args.reward_weights, model
        )
        for sentence in objections(rewards):
            PartialState().print(f"Warning: {sentence}")

        def load(split: str) -> Any:
            rows = load_dataset_split(script_args.dataset_name, split, config=script_args.dataset_config, columns=())
            return with_finished(rows, tokenizer, ends)

        rollouts = load(script_args.dataset_train_split)
        if script_args.eval_size is None:
            test = load(script_args.dataset_test_split)
            check_apart(rollouts, test)
            sides = [False] * len(rollouts) + [True] * len(test)
            rollouts = concatenate_datasets([rollouts, test]).add_column("is_test", sides)
        if rewards:
            names = distinct([reward.__name__ for reward in rewards])
            scores, token_scores = score_rollouts(rollouts, rewards, names, size)
        else:
            scores = torch.tensor(rollouts[script_args.score_column][:], dtype=torch.float64)[:, None]
            token_scores = None
        # One scale for both sides
        rollouts = with_returns(rollouts, scores, training_args, token_scores)
        if script_args.eval_size is None:
            train_dataset, eval_dataset = (
                rollouts.select([i for i, side in enumerate(rollouts["is_test"]) if side == is_test])
                for is_test in (False, True)
            )
        else:
            train_dataset, eval_dataset = hold_out_prompts(rollouts, script_args.eval_size, training_args.seed)
    del rewards, model
    if eval_dataset is None:
        training_args.eval_strategy = "no"
        training_args.eval_on_start = False

    # 4. Train
    with parser.one_line_errors():
        trainer = CriticTrainer(
            model=critic,
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            run_facts={"eos_token_ids": ends},
        )
    output_dir = Path(training_args.output_dir)
    if hasattr(critic, "peft_config"):  # so that PPO can put the critic on its policy's base
        output_dir.mkdir(parents=True, exist_ok=True)
        save_base_fingerprint(critic, output_dir, *base_of(model_args.model_name_or_path, model_args.model_revision))
    if training_args.record_run:
        record_run(trainer)
    with parser.one_line_errors(CannotResume, NotSaved):
        result = trainer.train(resume_from_checkpoint=checkpoint_to_resume(training_args))

    # 5. Save
    metrics = save_and_evaluate(parser, trainer, result)
    explained = ""
    if metrics:
        share = metrics.get("eval_val/explained_variance", math.nan)  # of returns that are all equal
        explained = f", from {origin}, held-out explained variance {share:.2f}"
    report = report_of(training_args.output_dir, bool(result.metrics), training_args.record_run)
    command = f"trl-ext ppo --model_name_or_path {policy} --value_model_name_or_path {training_args.output_dir}"
    further = next_line(f"{command}, with this run's scores and `gamma`")
    trainer.accelerator.print(f"Critic: {training_args.output_dir}{explained}\n{report}{further}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    in_use.release()


if __name__ == "__main__":
    main()
