"""
The same episodes of a tool-calling environment through TRL's GRPOTrainer and our PPOTrainer: CPU seconds and memory.

    python benchmarks/agents.py --batch 8 --rollouts 2

Both sides have the same random weights, the same environment, and a logits processor that makes each turn the same
scripted call, so that what is drawn, called and answered is the same, token by token. Neither has a reference
(`beta=0`, `use_ref_model=False`), each trains once on each answer. GRPO has two episodes for each of half as many
prompts. Each measurement is a process of its own, on one thread, and the sides take turns. Seconds are those of the
CPU, from the end of the first rollout's updates, which warm up, to the end of the last one's. Memory is the peak of
the resident set minus what it was after the imports.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from memory import peak, reset_peak, resident
from ppo_work import LORA, SHAPES, force

SIDES = {"ours": "our PPO", "grpo": "TRL GRPO"}
LAST = "~"  # ends the environment's last answer
TURNS = 6  # of the longest episode; the mean is half of it


def environment():
    class Counter:
        def reset(self, target=1, **row):
            self.left = target
            return "Count."

        def add(self, number: int) -> str:
            """
            Add a number.

            Args:
                number: What to add.

            Returns:
                The sum.
            """
            self.left -= number
            return f"There are {self.left} left to add." + LAST * (self.left == 0)

        def get_reward(self):
            return float(self.left == 0)

    return Counter


def scripted(tokenizer):
    """The processor that lets nothing be drawn but calls of `add`, and a last word after the last answer."""
    import torch
    from transformers import LogitsProcessor

    from tests.agents import call

    calls, words = (
        tokenizer(text, return_tensors="pt")["input_ids"][0] for text in (call("add", number=1), "Done.<|im_end|>")
    )
    words = torch.cat([words, words[-1:].expand(len(calls) - len(words))])
    opened = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=False
    )
    opening = len(tokenizer("<|im_start|>" + opened.rsplit("<|im_start|>", 1)[1])["input_ids"])
    begin, last = tokenizer.convert_tokens_to_ids("<|im_start|>"), tokenizer(LAST)["input_ids"][0]

    class Scripted(LogitsProcessor):
        drawn = 0

        def __call__(self, input_ids, scores):
            places = torch.arange(input_ids.size(1)).expand_as(input_ids)
            place = input_ids.size(1) - opening - torch.where(input_ids == begin, places, 0).amax(1)
            place = place.clamp(0, len(calls) - 1)
            token = torch.where((input_ids == last).any(1), words[place], calls[place])
            self.drawn += len(input_ids)
            return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)

    return Scripted()


def run(settings):
    import peft  # noqa: F401
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback

    from tests.agents import byte_tokenizer

    if settings.side == "ours":
        from trl_ext import PPOConfig, PPOTrainer
    torch.set_num_threads(1)
    after_imports = resident("VmRSS")
    reset_peak("cpu")
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPES[settings.size],
    )
    model = AutoModelForCausalLM.from_config(config)
    processor = scripted(tokenizer)
    force(model, processor)
    steps = settings.rollouts * settings.mini_batches
    if settings.side == "ours":
        own = {"num_ppo_epochs": 1, "num_mini_batches": settings.mini_batches, "record_run": False}
        make_config, make_trainer = partial(PPOConfig, use_ref_model=False, kl_coef=0.0, **own), PPOTrainer
    else:
        own = {"num_generations": 2, "steps_per_generation": settings.mini_batches}
        make_config, make_trainer = partial(trl.GRPOConfig, beta=0.0, **own), trl.GRPOTrainer
    times = 2 if settings.side == "ours" else 1  # that a row is there, as each is in a group of GRPO
    rows = [
        {"prompt": [{"role": "user", "content": f"Task {n}. "}], "target": 1 + n % TURNS}
        for n in range(steps * settings.batch)
        for _ in range(times)
    ]
    seconds = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seconds.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            model=model,
            reward_funcs=None,
            args=make_config(
                folder,
                per_device_train_batch_size=settings.batch // settings.mini_batches,
                gradient_accumulation_steps=1,
                max_steps=steps,
                max_completion_length=settings.response,
                learning_rate=1e-4,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                shuffle_dataset=False,
                logging_steps=settings.mini_batches,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            environment_factory=environment(),
            peft_config=peft.LoraConfig(task_type="CAUSAL_LM", **LORA) if settings.lora else None,
            callbacks=[Clock()],
        )
        trainer.train()
    first, *others = [log for log in trainer.state.log_history if "tools/call_frequency" in log]
    return {
        "seconds": seconds[-1] - seconds[settings.mini_batches - 1],
        "peak": peak("cpu") - after_imports,
        "calls": statistics.mean(log["tools/call_frequency"] for log in others),
        "failures": max(log["tools/failure_frequency"] for log in others),
        "length": statistics.mean(log["completions/mean_length"] for log in others),
        "time": {name: sum(log.get(name, 0) for log in others) for name in first if name.startswith("time/")},
        "reward": statistics.mean(log["rewards/Counter/mean"] for log in others),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=16, help="episodes of a rollout")
    parser.add_argument("--mini_batches", type=int, default=2)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="how often each side is measured")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    settings = vars(parser.parse_args())
    if settings["only"]:
        print(json.dumps(run(SimpleNamespace(**json.loads(settings["only"])))))
        return
    print(f"{'':22}{'CPU s':>8}{'of GRPO':>9}{'MiB':>8}{'of GRPO':>9}")
    for lora in (False, True):
        results = {side: [] for side in SIDES}
        for _ in range(settings["turns"]):
            for side, found in results.items():
                given = json.dumps({**settings, "side": side, "lora": lora})
                process = subprocess.run(
                    [sys.executable, __file__, "--only", given], capture_output=True, text=True, check=False
                )
                if process.returncode:
                    sys.exit(process.stderr)
                found.append(json.loads(process.stdout.splitlines()[-1]))
                print({**found[-1], "side": side}, file=sys.stderr)
        played = {
            name: {each[name] for found in results.values() for each in found}
            for name in ("calls", "failures", "reward")
        }
        if any(len(values) > 1 for values in played.values()):
            sys.exit(f"the sides have not played the same episodes: {played}")
        figures = {
            side: [statistics.median(each[name] for each in found) for name in ("seconds", "peak")]
            for side, found in results.items()
        }
        for side, (seconds, memory) in figures.items():
            ratios = seconds / figures["grpo"][0], memory / figures["grpo"][1]
            name = f"{SIDES[side]}, {'LoRA' if lora else 'full fine-tuning'}"
            print(f"{name:22}{seconds:8.1f}{ratios[0]:9.2f}{memory:8.0f}{ratios[1]:9.2f}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
