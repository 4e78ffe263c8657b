"""Train a reward model on preference pairs: columns `chosen` and `rejected`, and `prompt` if they do not contain it.

    accelerate launch recipes/reward.py --config recipes/demo/reward.yaml --model_name_or_path PATH_OR_HUB_NAME

Needed, in the configuration file or as flags: a model and a dataset with a held-out split. Flags override the file;
--help lists them all. Beside the model, a plain sequence classifier with one label, this writes what it is worth:
`reward_report.json` and `margins.png`. The same command again goes on from the newest complete
checkpoint in `output_dir`.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import GatheredParameters
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig
from trl import RewardTrainer, get_peft_config, get_quantization_config

from trl_ext import StrictTrlParser, load_dataset_split, save_base_fingerprint
from trl_ext.arguments import DataArguments, ModelArguments, RewardConfig
from trl_ext.checkpoints import CannotResume, ResumableRun, checkpoint_to_resume
from trl_ext.commands import record_run, report_of
from trl_ext.data import check_texts, usable_pairs
from trl_ext.evaluation import centring_shift, plot_margins, reward_model_report


@dataclass
class RewardScriptArguments(DataArguments):
    """What `RewardConfig` and `ModelConfig` do not say: the data."""

    demonstrations_name: str | None = field(
        default=None,
        metadata={"help": "Dataset with `prompt`, `completion` that is to score 0 on average; `chosen` if unset."},
    )
    drop_unusable_pairs: bool = field(
        default=False, metadata={"help": "Go on without pairs that lack an answer or have the same one twice."}
    )


class ResumableRewardTrainer(ResumableRun, RewardTrainer):
    """TRL's, which goes on only from a complete checkpoint of the same run."""


def head_of(model: nn.Module) -> nn.Linear:
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1 and m.weight.requires_grad]
    if len(heads) != 1:
        raise ValueError(f"{type(model).__name__} has {len(heads)} trained layers with one output; there must be one")
    return heads[0]


@torch.no_grad()
def features(trainer: RewardTrainer, rows: list[list[int]]) -> Tensor:
    """(N, D) what the head scores of each row of token ids: of a decoder one token, or what an encoder pools."""
    model, size = trainer.accelerator.unwrap_model(trainer.model).eval(), trainer.args.per_device_eval_batch_size
    pad = trainer.processing_class.pad_token_id
    seen, result = [], []
    hook = head_of(model).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for start in range(0, len(rows), size):
        chunk = {"input_ids": list(rows[start : start + size])}
        batch = trainer.processing_class.pad(chunk, padding_side="right", return_tensors="pt").to(trainer.args.device)
        model(**batch)
        hidden = seen.pop()
        if hidden.dim() == 3:  # as the classifier: the last that is not padding, so not an EOS that is the pad token
            positions = torch.arange(hidden.size(1), device=hidden.device)
            last = (positions * (batch["input_ids"] != pad)).argmax(1)
            hidden = hidden[torch.arange(len(last)), last]
        result.append(hidden.double().cpu())
    hook.remove()
    return torch.cat(result)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def subtract(parameter: Tensor, value: Tensor) -> None:
    value = value.to(parameter.device, parameter.dtype).expand(parameter.shape).contiguous()
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter -= value


def centre_and_report(trainer: RewardTrainer, demonstrations: Dataset, output_dir: Path) -> dict:
    """Make demonstrations score 0 on average, then measure the model as it will be saved."""
    head, train, held_out = head_of(trainer.model), trainer.train_dataset[:2000], trainer.eval_dataset
    reference = features(trainer, demonstrations["chosen_ids"])
    chosen, rejected = features(trainer, held_out["chosen_ids"]), features(trainer, held_out["rejected_ids"])
    everything = torch.cat([reference, features(trainer, train["chosen_ids"] + train["rejected_ids"])])
    gaps = [len(a) - len(b) for a, b in zip(held_out["chosen_ids"], held_out["rejected_ids"], strict=True)]

    def scores(seen: Tensor) -> Tensor:
        bias = 0 if head.bias is None else whole(head.bias).item()
        return seen @ whole(head.weight)[0].detach().double().cpu() + bias

    if isinstance(trainer.model, FSDPModule):  # else the head is a gathered copy, which is not what will be saved
        trainer.model.reshard()
    with GatheredParameters(list(head.parameters()), modifier_rank=0):  # ZeRO-3 leaves them empty
        mean, margins_before = scores(reference).mean(), scores(chosen) - scores(rejected)
        if head.bias is not None:
            subtract(head.bias, mean)
        else:
            subtract(head.weight, mean * centring_shift(reference, everything))
        centred = scores(chosen), scores(rejected)
        margins = centred[0] - centred[1]
        report = {
            **reward_model_report(*centred, torch.tensor(gaps)),
            "demonstrations_mean": scores(reference).mean().item(),
            "demonstrations_mean_before_centring": mean.item(),
            "margin_change_by_centring": (margins - margins_before).abs().mean().item(),
        }
    if trainer.is_world_process_zero():
        plot_margins(margins, output_dir / "margins.png")
    return report


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    parser = StrictTrlParser((RewardScriptArguments, RewardConfig, ModelArguments), without_arguments=__doc__)
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not training_args.bf16:
        parser.error("a quantised base needs `bf16: true`: TRL keeps the score head in bfloat16 then")

    # 2. Data
    dataset, config = script_args.dataset_name, script_args.dataset_config
    with parser.one_line_errors():
        train_dataset, test_dataset = (
            usable_pairs(
                load_dataset_split(dataset, split, config=config, columns=("chosen", "rejected")),
                f"the split {split!r}",
                script_args.drop_unusable_pairs,
            )
            for split in (script_args.dataset_train_split, script_args.dataset_test_split)
        )
        demonstrations = train_dataset
        if script_args.demonstrations_name:
            demonstrations = load_dataset_split(script_args.demonstrations_name, columns=("prompt", "completion"))
            check_texts(demonstrations, ("prompt", "completion"), f"dataset {script_args.demonstrations_name!r}")
            for name in ("chosen", "rejected"):  # the trainer prepares pairs
                demonstrations = demonstrations.add_column(name, demonstrations["completion"])

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
            run_facts={**vars(model_args), "dataset_name": script_args.dataset_name},
        )
    architectures = AutoConfig.from_pretrained(model_args.model_name_or_path).architectures or [""]
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
    report = report_of(output_dir, was_trained=bool(result.metrics))

    # 5. Save
    demonstrations = trainer._prepare_dataset(demonstrations, trainer.processing_class, training_args, "reference")
    result = centre_and_report(trainer, demonstrations, output_dir)
    trainer.save_model()
    if trainer.is_world_process_zero():
        (output_dir / "reward_report.json").write_text(json.dumps(result, indent=2))
    trainer.accelerator.print(
        f"Reward model: {output_dir}, held-out accuracy {result['accuracy']:.1%}. {report}; next: "
        f"accelerate launch recipes/ppo.py --reward_model_name_or_path {output_dir} …"
    )
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset)


if __name__ == "__main__":
    main()
