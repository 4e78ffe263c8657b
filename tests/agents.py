"""For tests of agents: a tokenizer that can write tool calls, environments, and scripted policies."""

import json
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
MARKS += ["<tool_response>", "</tool_response>"]


def byte_tokenizer():
    """Build a tokenizer of bytes and Qwen3's special tokens, with its chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*MARKS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens(MARKS[3:])
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return fast


def call(name, /, **arguments):
    """Return the text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def played_by(trainer, player):
    """Generate by a script in place of the policy: `player(history)` returns the text of a turn."""

    def generate(prompt_ids, *_, **__):
        texts = [trainer.processing_class.decode(ids) for ids in prompt_ids]
        return [trainer.processing_class(player(text))["input_ids"] for text in texts], None

    trainer._generate_completions = generate
    return trainer


def counts(history):
    """Play `Counter`: add 1 until the target is reached."""
    target = int(history.split("Reach ")[1][0])
    return "Done.<|im_end|>" if history.count("The sum is") == target else call("add", number=1)


class Counter:
    """The policy adds numbers until the sum is the target."""

    def reset(self, target=3, **row):
        self.target, self.total, self.reward = target, 0, 0.0
        return f"Reach {target}."

    def add(self, number: int) -> str:
        """
        Add a number.

        Args:
            number: what to add.

        Returns:
            The sum.
        """
        before = abs(self.target - self.total)
        self.total += number
        self.reward = float(before - abs(self.target - self.total))
        return f"The sum is {self.total}."

    def get_reward(self):
        return float(self.total == self.target)


class SteppedCounter(Counter):
    """Also rewards each step that comes closer to the target."""

    def _step_reward(self):
        return self.reward
