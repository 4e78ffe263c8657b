"""Run PPO in half a minute on a laptop, without any download: a tiny language model learns to name colours.

    accelerate launch recipes/quickstart.py

The model has random weights and a word-level tokenizer, so its first answers are random words. The reward is the share
of four colours that an answer names, minus a little for each word too many; the adaptive controller keeps the KL to
the initial model near its target. The model, and a page on how it was trained, are in `outputs/quickstart`. It takes
no arguments: edit it, or continue with `recipes/ppo.py`.
"""

import random
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_ext.runs import FolderInUse, Hold
from trl_ext.upstream import quiet

COLOURS = "red green blue yellow".split()
WORDS = "the a cat dog bird sky sea tree sat ran saw is was and near over".split()


def colours_named(completions: list[str], **kwargs) -> list[float]:
    answers = [text.split() for text in completions]
    return [
        len(set(COLOURS) & set(words)) / len(COLOURS) - 0.1 * max(len(words) - len(COLOURS), 0) for words in answers
    ]


def tiny_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *COLOURS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
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
    return LlamaForCausalLM(config), PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def main() -> None:
    quiet()  # before the libraries that are imported next
    from trl_ext import PPOConfig, PPOTrainer
    from trl_ext.callbacks import HackWatch
    from trl_ext.workbench import report_of

    torch.set_num_threads(1)  # the tensors are tiny: threads would wait for each other longer than they work
    model, tokenizer = tiny_model()
    draw = random.Random(0)
    prompts = [" ".join(draw.choices(WORDS, k=draw.randint(2, 5))) for _ in range(544)]
    trainer = PPOTrainer(
        model=model,
        reward_funcs=colours_named,
        args=PPOConfig(
            output_dir="outputs/quickstart",
            total_episodes=2048,
            per_device_train_batch_size=32,
            num_mini_batches=2,
            max_completion_length=12,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            kl_controller="adaptive",
            kl_target=6.0,
            kl_horizon=1000,
            logging_steps=32,
            save_strategy="no",
            report_to="none",
            bf16=False,
            dataloader_pin_memory=False,
            activation_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts[32:]}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:32]}),
        processing_class=tokenizer,
    )
    # The reward pays for names of colours and for few words: that is wanted, and no hack
    trainer.add_callback(HackWatch(trainer=trainer, expected=["length", "phrase"]))
    before = trainer.evaluate()
    try:
        with Hold(trainer.args.output_dir):
            trainer.train()
            trainer.save_model()
    except FolderInUse as error:
        sys.exit(str(error))
    after = trainer.evaluate()
    for name in ("eval_objective/scores", "eval_objective/kl"):
        trainer.accelerator.print(f"{name.removeprefix('eval_objective/')}: {before[name]:.2f} → {after[name]:.2f}")
    output_dir = trainer.args.output_dir
    trainer.accelerator.print(
        f"Model: {output_dir}\n{report_of(output_dir)}\nnext: "
        f"trl-ext generate --model_name_or_path {output_dir} --prompt 'the bird saw' --max_new_tokens 12"
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(__doc__)
    main()
