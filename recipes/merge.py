"""Merge an adapter into its base, for use without PEFT: the merged model loads with plain transformers.

    trl-ext merge --adapter PATH_OR_HUB_NAME --output_dir PATH

The adapter's `task_type` decides what it becomes: a policy's adapter becomes a causal language model, a critic's or
reward model's a sequence classifier. An adapter that was trained on a quantised base is merged into the unquantised
base. The merged model is loaded again, and its logits must agree with the adapter model's.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trl_ext import StrictTrlParser
from trl_ext.runs import check_output_dir, setting
from trl_ext.upstream import quiet

PART = "_unfinished"  # folder in `output_dir` that holds the merged model until it has been checked


@dataclass
class MergeArguments:
    """Declare the arguments of `trl-ext merge`: the adapter, its base, and the output folder."""

    output_dir: str = field(metadata={"help": "Folder for the merged model: a new or an empty one."})
    adapter: str = field(metadata={"help": "Adapter: a folder or a hub name."})
    base_model: str | None = setting(None, "Base of the adapter; if unset, the base that the adapter names.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of the merged model; `auto` keeps the base's."
    )

    def __post_init__(self):
        output_dir = Path(self.output_dir)
        if output_dir.is_file() or (output_dir.is_dir() and any(each.name != PART for each in output_dir.iterdir())):
            raise ValueError(f"`output_dir` {self.output_dir} exists and is not empty: choose another folder")


def load(args: MergeArguments) -> tuple[Any, Any, Any]:
    """
    Load the adapter on its base; return it, its tokenizer and the class of the merged model.

    Raises:
        ValueError: there is no such adapter, its base is quantised, its classifier has no head, or it does not fit the
            base.
        OSError: the base cannot be loaded.
        KeyError: the adapter is neither a language model's nor a classifier's.
    """
    from peft import PeftConfig, PeftModel, load_peft_weights
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from trl_ext.models import fit_vocabulary

    kinds: dict[str, Any] = {"CAUSAL_LM": AutoModelForCausalLM, "SEQ_CLS": AutoModelForSequenceClassification}
    config = PeftConfig.from_pretrained(args.adapter)
    kind = kinds[config.task_type or "CAUSAL_LM"]
    base = args.base_model or config.base_model_name_or_path or ""
    kwargs = {}
    if not args.base_model and config.revision:
        kwargs["revision"] = config.revision
    if getattr(AutoConfig.from_pretrained(base, **kwargs), "quantization_config", None):
        raise ValueError(f"the base {base} is quantised: give the unquantised base as `base_model`")
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.adapter)
    except (OSError, ValueError):  # a critic's folder has none
        tokenizer = AutoTokenizer.from_pretrained(base, **kwargs)

    weights = load_peft_weights(args.adapter, device="cpu")
    if config.task_type == "SEQ_CLS":
        heads = [w for n, w in weights.items() if n.endswith("score.weight")]
        if not heads:  # it would get a random one
            raise ValueError(
                f"{args.adapter} has no `score` head, so the merged model would get a random one: save the adapter of "
                "the trained classifier with its head"
            )
        kwargs["num_labels"] = len(heads[0])
        # Without it, the classifier would refuse batches
        kwargs["pad_token_id"] = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model = kind.from_pretrained(base, dtype=args.dtype, **kwargs)
    fit_vocabulary(model, weights)
    model = PeftModel.from_pretrained(model, args.adapter)
    result = model.load_adapter(args.adapter, "default")  # tells what PEFT only warns of, or passes over
    if result.missing_keys or result.unexpected_keys:
        missing = result.missing_keys
        unexpected = result.unexpected_keys
        raise ValueError(
            f"{args.adapter} does not fit the base {base}: {len(missing)} weights missing and {len(unexpected)} "
            f"unexpected, such as {[*missing, *unexpected][0]}: give the base that it was trained on as `base_model`"
        )
    return model.eval(), tokenizer, kind


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    parser = StrictTrlParser(MergeArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        check_output_dir(args.output_dir)

    # These take seconds to import: what was mistyped has been refused by now
    import torch
    from transformers import AutoModelForCausalLM

    from trl_ext.data import TrainedPairs, load_trained_prompts, save_prompt_hashes
    from trl_ext.models import merge

    with parser.one_line_errors():
        trained = TrainedPairs.load(args.adapter)
        trained_prompts = load_trained_prompts(args.adapter)
        model, tokenizer, kind = load(args)

    # 2. What the merged model must give
    vocabulary = model.config.get_text_config().vocab_size
    input_ids = torch.randint(vocabulary, (1, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=input_ids.to(model.device)).logits

    # 3. Merge and save in PART, so that a killed merge leaves nothing in `output_dir` that loads as a model
    output_dir = Path(args.output_dir)
    part = output_dir / PART
    shutil.rmtree(part, ignore_errors=True)  # what a killed merge has left
    merged = merge(model)
    merged.save_pretrained(part)
    tokenizer.save_pretrained(part)
    if trained is not None:  # what the adapter has seen the merged model has, too
        trained.save(part)
    if trained_prompts is not None:
        save_prompt_hashes(part, trained_prompts)

    # 4. Check what was written
    written = kind.from_pretrained(part, dtype=merged.dtype).eval()
    with torch.no_grad():
        difference = (written(input_ids=input_ids).logits - expected.cpu()).abs().max().item()
    allowed = max(1e-4, 8 * torch.finfo(merged.dtype).eps) * max(1.0, expected.abs().max().item())
    if not difference <= allowed:
        raise RuntimeError(
            f"the logits of the merged model differ from the adapter model's by {difference:.1e}, but {merged.dtype} "
            f"explains only {allowed:.1e}: do not use {part}"
        )
    for file in sorted(part.iterdir(), key=lambda file: file.name == "config.json"):  # without it nothing loads
        file.rename(output_dir / file.name)
    part.rmdir()
    print(f"Model: {output_dir}, {merged.dtype}; logits differ from the adapter model's by up to {difference:.1e}")
    if kind is AutoModelForCausalLM:
        print(f"next: trl-ext generate --model_name_or_path {args.output_dir} --prompt hello")


if __name__ == "__main__":
    main()
