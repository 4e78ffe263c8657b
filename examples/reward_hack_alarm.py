# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-ext"]
#
# [tool.uv.sources]
# trl-ext = {path = "..", editable = true}
# ///
"""Train on a reward that can be hacked, with a monitor that detects it: half a minute on a CPU, without any download.

    uv run examples/reward_hack_alarm.py

The reward pays for each "very", though it was meant to reward a warm tone. A tiny model learns to say little else. The
monitor detects that one phrase spreads over the answers, and stops the run. `report.html` in the output directory
shows when.
"""

import argparse
import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_ext import PPOConfig, PPOTrainer
from trl_ext.callbacks import RepetitionCallback
from trl_ext.rewards import repetition_watch

WORDS = "the a cat dog bird sky sea tree sat ran saw is was and near over very happy sad big".split()


def warm(completions, **kwargs):
    """Count the word "very", as a bad measure of a warm tone."""
    return [float(text.split().count("very")) for text in completions]


def tiny_model():
    """Return a model with random weights and its word-level tokenizer."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/reward-hack-alarm")
    args = parser.parse_args()

    torch.set_num_threads(1)  # for tensors this small, threads cost more than they save
    model, tokenizer = tiny_model()
    draw = random.Random(0)
    prompts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 5))) for _ in range(512)]
    trainer = PPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[warm, repetition_watch],
        args=PPOConfig(
            args.output_dir,
            reward_weights=[1.0, 0.0],  # the second one only measures
            total_episodes=8192,
            per_device_train_batch_size=32,
            num_mini_batches=2,
            max_completion_length=12,
            learning_rate=3e-3,
            kl_coef=0.0,  # nothing holds the policy back
            logging_steps=8,
            save_steps=32,
            report_to="none",
            bf16=False,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[RepetitionCallback(action="stop")],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
