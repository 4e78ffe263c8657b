"""Train a reward model on preference pairs: columns `chosen` and `rejected`, and `prompt` if they do not contain it.

    trl-ext reward --config demo/reward --model_name_or_path PATH_OR_HUB_NAME

Needed, in the configuration file or as flags: a model and a dataset with a held-out split (or `eval_size`). Flags
override the file; see --help. This writes the model, a sequence classifier with one label (with `use_peft`, its
adapter), and a report on its quality, as `trl-ext reward-report` does: `reward_report.html` and `reward_report.json`.
The same command again resumes from the newest complete checkpoint in `output_dir`. `--ensemble k` divides the pairs
into k parts, and trains k models into `member-0`, `member-1`, … of `output_dir`. Each has another seed, and lacks
another one of the parts. `EnsembleReward` takes `output_dir` as its members.
"""

import copy
import gc
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext import StrictTrlParser
from trl_ext.cli.arguments import ClassifierArguments, HeldOutArguments
from trl_ext.runs import Hold, check_output_dir, from_first, setting, write_text
from trl_ext.upstream import quiet


@dataclass
class RewardScriptArguments(HeldOutArguments):
    """Declare the arguments that `RewardConfig` and `ModelConfig` lack, such as the data."""

    demonstrations_name: str | None = setting(
        None,
        "Demonstrations (`prompt`, `completion`), which are to score 0 on average; unset, the chosen answers are.",
    )
    drop_unusable_pairs: bool = setting(
        False, "Leave out pairs that lack an answer or have the same answer twice, instead of stopping."
    )

    group_columns: list[str] | None = setting(
        None, "Columns to report the accuracy by; if unset topic, subset, source, language, annotator."
    )
    probe_rows: int = setting(
        128, "Held-out answers that each probe of the report changes; 0 for no probes.", range=">= 0"
    )
    ensemble: int | None = setting(
        None,
        "Number k of models to train as an ensemble. Each has another seed, and lacks one of k parts of the pairs.",
        range=">= 2",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_size == 0:
            raise ValueError("`eval_size` must be 1 or more, got 0: held-out pairs show how good the model is")


def next_command(
    output_dir: Path, script_args: RewardScriptArguments, model_args: ClassifierArguments, context: int, use_cpu: bool
) -> str:
    """
    Return the command that trains the base, whose context has `context` tokens, by PPO with the reward model in
    `output_dir`; or by DPO if the reward model did not pass its report.
    """
    from trl_ext.workbench import objections

    stage = "dpo" if objections([str(output_dir)]) else "ppo"
    flags = {"model_name_or_path": model_args.model_name_or_path, "dataset_name": script_args.dataset_name}
    if stage == "ppo":
        flags["reward_model_name_or_path"] = output_dir
        if context <= 1024:
            flags["max_completion_length"] = context // 2  # PPOConfig's own would not fit
    flags |= {"output_dir": f"{output_dir}-{stage}", "dataset_config": script_args.dataset_config}
    flags |= {"eval_size": script_args.eval_size, "use_peft": model_args.use_peft, "use_cpu": use_cpu}
    given = {name: str(value).lower() if value is True else value for name, value in flags.items() if value}
    return shlex.join(["trl-ext", stage, *(str(part) for name in given for part in (f"--{name}", given[name]))])


def without_folds(rows: Any, k: int, seed: int) -> list:
    """Divide the rows into k random parts; return k datasets, each without another part."""
    import torch

    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return [rows.select(sorted(order[torch.arange(len(rows)) % k != i].tolist())) for i in range(k)]


def begin_ensemble(output_dir: Path, settings: dict) -> None:
    """
    Record the members' settings, and print a warning if the folder was started with others; raise a `ValueError` if it
    holds the run of a single model.
    """
    from accelerate import PartialState

    from trl_ext.runs import differences

    file = output_dir / "ensemble_settings.json"
    if (output_dir / "train_results.json").is_file() or any(output_dir.glob("checkpoint-*")):
        raise ValueError(
            f"`output_dir` {output_dir} holds a run of a single model, not of an ensemble: choose another folder"
        )
    before = json.loads(file.read_text()) if file.is_file() else settings
    if different := differences(before, settings):
        PartialState().print(
            f"Warning: {output_dir} was started with other settings: {'; '.join(different)}. From here on the new "
            "settings are used."
        )
    PartialState().wait_for_everyone()  # all have read
    if PartialState().is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        for name in ("ensemble.json", "reward_report.json"):
            (output_dir / name).unlink(missing_ok=True)
        write_text(file, json.dumps(settings, indent=2))


def is_complete(member: str) -> bool:
    """Return whether the member in a folder was trained and measured; the first process decides for all."""
    return from_first(all(Path(member, name).is_file() for name in ("reward_report.json", "held_out_scores.json")))


def finish_ensemble(output_dir: Path, k: int) -> str:
    """
    Measure the members together, write `ensemble.json` for `EnsembleReward`, and return a text to print; "" on all
    processes but the main one, which does this.
    """
    import torch
    from accelerate import PartialState

    from trl_ext.evaluation import ensemble_report

    if not PartialState().is_main_process:
        return ""
    folders = [f"member-{i}" for i in range(k)]
    scores = [json.loads((output_dir / folder / "held_out_scores.json").read_text()) for folder in folders]
    chosen, rejected = (torch.tensor([each[name] for each in scores]) for name in ("chosen", "rejected"))
    report = ensemble_report(chosen, rejected)
    both = torch.cat([chosen, rejected], dim=1)
    reports = {folder: json.loads((output_dir / folder / "reward_report.json").read_text()) for folder in folders}
    shown = ("accuracy", "accuracy_interval", "calibration_error", "margin_mean", "margin_std")
    report["members"] = {folder: {name: each[name] for name in shown} for folder, each in reports.items()}
    write_text(output_dir / "reward_report.json", json.dumps(report, indent=2))
    members = [
        {"folder": folder, "mean": row.mean().item(), "std": row.std().item()}
        for folder, row in zip(folders, both, strict=True)
    ]
    write_text(output_dir / "ensemble.json", json.dumps({"members": members}, indent=2))  # last: all is there
    alone = ", ".join(f"{each['accuracy']:.1%}" for each in reports.values())
    are_held_out = all(each.get("trained_on", {}).get("is_known") for each in reports.values())
    accuracy = "held-out accuracy" if are_held_out else "accuracy"
    return (
        f"Ensemble: {output_dir}, {accuracy} of the mean {report['accuracy']['mean']:.1%}, of the members "
        f"{alone}; disagreement {report['disagreement']['mean']:.3f}\nNext: `rewards: [EnsembleReward: {{members: "
        f"{output_dir}}}]` in a configuration of `trl-ext ppo`"
    )


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    kinds = (RewardScriptArguments, "trl_ext.dpo.RewardConfig", ClassifierArguments)
    parser = StrictTrlParser(kinds, without_arguments=__doc__)
    parser.set_defaults(eval_on_start=True)  # so that the run's page says what was won
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not training_args.bf16:
        parser.error("a quantised base needs `bf16: true`, because TRL then keeps the score head in bfloat16")
    resume = str(training_args.resume_from_checkpoint or "").lower()
    if script_args.ensemble and (training_args.push_to_hub or resume not in ("", "false")):
        parser.error("with `ensemble` leave `push_to_hub` unset, and `resume_from_checkpoint` unset or `false`")
    with parser.one_line_errors():  # of an ensemble, `begin_ensemble` says what may be gone on with
        may_go_on = "false" if script_args.ensemble else training_args.resume_from_checkpoint
        check_output_dir(training_args.output_dir, may_go_on)

    # These take seconds to import: what was mistyped has been refused by now
    import torch
    from accelerate import PartialState
    from accelerate.utils import GatheredParameters
    from torch import nn
    from trl import get_peft_config, get_quantization_config

    from trl_ext import load_dataset_split, save_base_fingerprint
    from trl_ext.data import TrainedPairs, held_out_rows, not_trained_on, usable_pairs
    from trl_ext.dpo import ResumableRewardTrainer, centre, head_of
    from trl_ext.evaluation import reward_model_report
    from trl_ext.models import base_of, context_of, has_head, keep_4bit_layout, load_config
    from trl_ext.runs import CannotResume, NotSaved, checkpoint_to_resume, fingerprint
    from trl_ext.workbench import next_line, objections, report_of, report_trained

    with parser.one_line_errors():
        in_use = Hold(training_args.output_dir)

    # 2. Data
    def load(split: str):
        dataset = load_dataset_split(
            script_args.dataset_name, split, config=script_args.dataset_config, columns=("chosen", "rejected")
        )
        return usable_pairs(dataset, f"the split {split!r}", script_args.drop_unusable_pairs)

    with parser.one_line_errors():
        train_dataset, test_dataset = held_out_rows(
            load(script_args.dataset_train_split),
            lambda: load(script_args.dataset_test_split),
            script_args.eval_size,
            training_args.seed,
        )
        start = (model_args.model_name_or_path, model_args.model_revision)
        trusted = {"trust_remote_code": training_args.trust_remote_code}
        saved = load_config(*start, **trusted).architectures or [""]
        is_classifier = "SequenceClassification" in saved[0] or has_head(*start)
        # A language model has seen no pairs; which ones a reward model has, its record alone can tell
        before = TrainedPairs.load(model_args.model_name_or_path) or TrainedPairs(is_complete=not is_classifier)
        held_out = len(test_dataset)
        test_dataset = not_trained_on(test_dataset, before | TrainedPairs.of(train_dataset))
        if len(test_dataset) < held_out:
            PartialState().print(
                f"{held_out - len(test_dataset)} of {held_out} held-out pairs are left out: the model is, or was, "
                "trained on them"
            )
        demonstrations = train_dataset
        if script_args.demonstrations_name:
            demonstrations = load_dataset_split(script_args.demonstrations_name, columns=("prompt", "completion"))
            for name in ("chosen", "rejected"):  # the trainer prepares pairs
                demonstrations = demonstrations.add_column(name, demonstrations["completion"])

    training_args.model_init_kwargs = model_args.init_kwargs(training_args.model_init_kwargs)

    def train(args: Any, rows: Any) -> tuple[str, str]:
        """Train one model; return lines that summarise the run, and the command to run next."""
        # 3. Model: the trainer loads it, and the tokenizer, from the path
        peft_config = get_peft_config(model_args)
        if peft_config is not None:
            peft_config.task_type = "SEQ_CLS"  # so that the head is trained, and saved with the adapter
        with parser.one_line_errors():
            trainer = ResumableRewardTrainer(
                model=model_args.model_name_or_path,
                args=args,
                train_dataset=rows,
                eval_dataset=test_dataset,
                quantization_config=get_quantization_config(model_args),
                peft_config=peft_config,
            )
        keep_4bit_layout(trainer.model)
        if not is_classifier:  # so the head is new (N+ details: std 1/√(d+1))
            head = head_of(trainer.model)
            with GatheredParameters([head.weight], modifier_rank=0):
                nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
        output_dir = Path(args.output_dir)
        if hasattr(trainer.model, "peft_config"):  # so that a LoRA policy on the same base can score with the adapter
            output_dir.mkdir(parents=True, exist_ok=True)
            # Before FSDP2 shards it
            save_base_fingerprint(trainer.model, output_dir, *base_of(*start))

        # 4. Train
        trained = before | TrainedPairs.of(rows)
        with parser.one_line_errors(CannotResume, NotSaved):
            checkpoint = checkpoint_to_resume(args)
            args.eval_on_start &= args.eval_strategy != "no" and not checkpoint  # else it would stand alone
            result = trainer.train(resume_from_checkpoint=checkpoint)

        # 5. Save: the model first, since a disk may be full
        if trainer._is_changed:  # resumed with other settings: its pairs may have been others
            trained = TrainedPairs(trained.pairs, is_complete=False)
        if not result.metrics and (earlier := TrainedPairs.load(output_dir)):  # of the command that trained it
            trained |= earlier
        texts = trainer._prepare_dataset(demonstrations, trainer.processing_class, args, "reference")
        centred, scores = centre(trainer, texts)
        answers = zip(trainer.eval_dataset["chosen_ids"], trainer.eval_dataset["rejected_ids"], strict=True)
        gaps = torch.tensor([len(chosen) - len(rejected) for chosen, rejected in answers])
        measured = reward_model_report(scores["chosen"], scores["rejected"], gaps) | centred
        trainer.save_model()
        if trainer.is_world_process_zero():
            trained.save(output_dir, is_uploaded=args.push_to_hub)
        if result.metrics:  # none where the run was complete already
            trainer.save_metrics("train", result.metrics)
        if trainer.is_world_process_zero():
            named = {name: each.tolist() for name, each in scores.items()}
            write_text(output_dir / "held_out_scores.json", json.dumps(named))
        report = report_trained(
            *(trainer, test_dataset, rows, measured),
            trained=trained,
            group_columns=script_args.group_columns,
            probe_rows=script_args.probe_rows,
        )
        what = "held-out accuracy" if trained.is_complete else "accuracy"
        outcome = f", {what} {report['accuracy']:.1%}"
        outcome += "".join(f"\nWarning: {said}" for said in objections([str(output_dir)]))
        if args.push_to_hub:
            trainer.push_to_hub(dataset_name=script_args.dataset_name)
        page = report_of(output_dir, bool(result.metrics), args.record_run)
        done = f"Reward model: {output_dir}{outcome}\n{page}"
        context = context_of(trainer.model)
        has_prompts = saved[0].endswith("ForCausalLM") and "prompt" in train_dataset.column_names
        following = next_command(output_dir, script_args, model_args, context, args.use_cpu)
        return done, following if has_prompts else "trl-ext ppo --help"

    if script_args.ensemble is None:
        done, following = train(training_args, train_dataset)
        PartialState().print(f"{done}{next_line(following)}")
        in_use.release()
        return
    settings = fingerprint(training_args, **vars(script_args), **vars(model_args), rows=len(train_dataset))
    with parser.one_line_errors():
        begin_ensemble(Path(training_args.output_dir), settings)
    for i, rows in enumerate(without_folds(train_dataset, script_args.ensemble, training_args.seed)):
        args = copy.copy(training_args)
        args.output_dir = str(Path(training_args.output_dir, f"member-{i}"))
        args.seed = training_args.seed + i
        if resume != "false" and is_complete(args.output_dir):
            PartialState().print(f"{args.output_dir} is complete, so it is not trained again.")
            continue
        PartialState().print(train(args, rows)[0])
        gc.collect()  # the next one needs the room
    PartialState().print(finish_ensemble(Path(training_args.output_dir), script_args.ensemble))
    in_use.release()


if __name__ == "__main__":
    main()
