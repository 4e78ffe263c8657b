"""What a token of an answer costs as answers grow: PPO, its parts, and TRL's GRPO, on one small model.

    python tests/benchmarks/long_answers.py

Four answers a rollout, of exactly as many tokens as the row says, and one pass over them; a Llama of hidden size 128
with 4 layers and a vocabulary of 2,000, in float32 on one thread. Each cell is a process of its own. Its first rollout
warms up; the CPU-seconds of the second are divided by its tokens. Memory is the peak of the resident set minus what it
was after the imports. The exponent is the slope of log seconds over log length between the two longest answers: 0
where a token costs the same however long its answer is, 1 where attention is all that counts.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from typing import Any

from memory import peak, reset_peak, resident

SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
ANSWERS = 4
ARMS: dict[str, dict[str, Any]] = {
    "PPO": {},
    "PPO, LoRA": {"lora": True},
    "PPO, without a reference": {"kl_coef": 0.0, "use_ref_model": False},
    "PPO, a critic of one layer": {"critic_layers": 1},
    "PPO, `baseline: mean`": {"baseline": "mean"},
    "GRPO": {"grpo": True},
}


def measured(arm: str, tokens: int) -> dict[str, float]:
    """Train two rollouts in this process; return the CPU-seconds of a token in the second, and the peak in MiB."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tests.tiny import ON_CPU, tiny_llama, tiny_reward_model, tiny_tokenizer
    from trl_ext import PPOConfig, PPOTrainer

    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer([f"w{i}" for i in range(1994)])
    shape = SHAPE | {"max_position_embeddings": tokens + 64}
    settings = dict(ARMS[arm])
    of_grpo, layers = settings.pop("grpo", False), settings.pop("critic_layers", None)
    more: dict[str, Any] = {"peft_config": LoraConfig(target_modules="all-linear")} if settings.pop("lora", 0) else {}
    if layers:
        small = tiny_llama(len(tokenizer), **shape | {"num_hidden_layers": layers})
        more["value_model"] = tiny_reward_model(small)
    ended: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended.append(time.process_time())

    trainer_class, config_class = (GRPOTrainer, GRPOConfig) if of_grpo else (PPOTrainer, PPOConfig)
    settings |= {"num_generations": 2, "beta": 0.05} if of_grpo else {"num_ppo_epochs": 1, "watch": "off"}
    settings |= {} if of_grpo else {"record_run": False}
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(len(tokenizer), **shape).save_pretrained(f"{folder}/policy")  # GRPO loads its reference by name
        trainer = trainer_class(
            model=f"{folder}/policy",
            reward_funcs=lambda completion_ids, **_: [float(ids[0] % 2) for ids in completion_ids],
            args=config_class(
                folder,
                **ON_CPU,
                **settings,
                per_device_train_batch_size=ANSWERS,
                max_completion_length=tokens,
                generation_kwargs={"min_new_tokens": tokens},
                max_steps=2,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3"] * 8}),
            processing_class=tokenizer,
            callbacks=[Clock()],
            **more,
        )
        reset_peak("cpu")
        before = resident("VmRSS")
        trainer.train()
    return {"seconds": (ended[1] - ended[0]) / (ANSWERS * tokens), "peak": peak("cpu") - before}


def table(found: dict[str, dict[int, dict[str, float]]]) -> str:
    lengths = list(next(iter(found.values())))
    heads = ["", *(f"{x:,} tokens: ms a token" for x in lengths), "exponent", *(f"{x:,}: MiB" for x in lengths)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm, cells in found.items():
        seconds = [cells[x]["seconds"] for x in lengths]
        steps = math.log(lengths[-1] / lengths[-2]) if len(lengths) > 1 else math.nan
        exponent = math.log(seconds[-1] / seconds[-2]) / steps if len(lengths) > 1 else math.nan
        shown = [arm, *(f"{1000 * x:.2f}" for x in seconds), f"{exponent:.2f}"]
        shown += [f"{cells[x]['peak']:,.0f}" for x in lengths]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # arm and length, in the process of a cell
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], int(options.one[1]))))
        sys.exit()
    found: dict[str, dict[int, dict[str, float]]] = {}
    for arm in options.arms:
        for length in options.lengths:
            command = [sys.executable, __file__, "--one", arm, str(length)]
            done = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.setdefault(arm, {})[length] = json.loads(done.splitlines()[-1])
            print(arm, length, found[arm][length], file=sys.stderr, flush=True)
    print(table(found))
