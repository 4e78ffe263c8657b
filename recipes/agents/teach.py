"""Teach a small model how a tool is called: a tokenizer and a model of its own, and SFT on a scripted player."""

import json
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
MARKS += ["<tool_response>", "</tool_response>"]


def play(environment: Any, row: dict[str, Any], player: Any) -> list[dict[str, Any]]:
    """Return the messages of an episode."""
    prompt = [dict(message) for message in row["prompt"]]
    said = environment.reset(**{key: value for key, value in row.items() if key != "prompt"})
    prompt[-1]["content"] += said
    messages = prompt
    while isinstance(answer := player(said), tuple):
        name, arguments = answer
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        said = str(getattr(environment, name)(**arguments))
        messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
        messages.append({"role": "tool", "name": name, "content": said})
    return [*messages, {"role": "assistant", "content": answer}]


def tools_of(environment: Any) -> list:
    names = [name for name in dir(type(environment)) if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [getattr(environment, name) for name in names]


def make_tokenizer(texts: list[str], size: int = 400) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=MARKS[:3], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens(MARKS[3:])
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return fast
