"""Merge an adapter into its base, for use without PEFT: what is written loads with plain transformers.

    python recipes/merge.py --adapter PATH_OR_HUB_NAME --output_dir PATH

A policy's adapter becomes a causal language model, a critic's or reward model's a sequence classifier, by the adapter's
`task_type`; tokenizer and generation config lie beside it. An adapter that was trained on a quantised base is merged
into the unquantised one. What was written is loaded again and its logits compared with the adapter model's.
"""

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftConfig, PeftModel, load_peft_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl_ext import StrictTrlParser


@dataclass
class MergeArguments:
    """What to merge into what, and where to."""

    adapter: str = field(metadata={"help": "Adapter: a folder or a hub name."})
    output_dir: str = field(metadata={"help": "Folder for the merged model; must not exist, or be empty."})
    base_model: str | None = field(default=None, metadata={"help": "Base; the one that the adapter names if unset."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Of the merged model; `auto` is the base's own."}
    )

    def __post_init__(self):
        if Path(self.output_dir).exists() and (Path(self.output_dir).is_file() or any(Path(self.output_dir).iterdir())):
            raise ValueError(f"`output_dir` {self.output_dir} exists and is not empty: choose another")


def find_base(args: MergeArguments) -> tuple[PeftConfig, str]:
    """The adapter's configuration and the path of its base; raises where the two cannot be merged."""
    try:
        config = PeftConfig.from_pretrained(args.adapter)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"`adapter` {args.adapter} holds no adapter that PEFT can read ({_line(error)})") from error
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(f"{args.adapter} is a {config.peft_type.value} adapter: its prompt cannot become weights")
    if config.task_type not in (None, "CAUSAL_LM", "SEQ_CLS"):
        raise ValueError(f"{args.adapter} has task_type {config.task_type}; it must be CAUSAL_LM or SEQ_CLS")
    base = args.base_model or config.base_model_name_or_path
    if not base:
        raise ValueError(f"{args.adapter} does not name its base: give `base_model`")
    try:
        base_config = AutoConfig.from_pretrained(base)
    except (ValueError, OSError) as error:
        raise ValueError(f"the base {base} was not found ({_line(error)}): give `base_model`") from error
    if getattr(base_config, "quantization_config", None) is not None:
        raise ValueError(f"the base {base} is quantised: give the unquantised one as `base_model`")
    return config, base


def load(args: MergeArguments, config: PeftConfig, base: str, tokenizer: Any) -> PeftModel:
    """The adapter on its base; raises where a weight of either is missing in the other, or has another shape."""
    kwargs: dict[str, Any] = {"dtype": args.dtype, "revision": None if args.base_model else config.revision}
    if config.task_type == "SEQ_CLS":
        weights = load_peft_weights(args.adapter, device="cpu")
        heads = [len(weight) for name, weight in weights.items() if name.endswith("score.weight")]
        if not heads:
            raise ValueError(f"{args.adapter} is a sequence classifier's adapter, but has no `score` head")
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=heads[0], **kwargs)
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    else:
        model = AutoModelForCausalLM.from_pretrained(base, **kwargs)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    try:
        model = PeftModel.from_pretrained(model, args.adapter)
        result = model.load_adapter(args.adapter, "default")  # says what PEFT only warns of, or not even that
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{args.adapter} does not fit the base {base} ({_line(error)})") from error
    if result.missing_keys or result.unexpected_keys:
        wrong = f"missing {result.missing_keys[:2]}, unexpected {result.unexpected_keys[:2]}"
        raise ValueError(f"{args.adapter} does not fit the base {base} ({wrong})")
    return model.eval()
