"""
Write `data/`: what trl_ext 0.2.0 leaves on the disk for tiny models.

    python -m tests.frozen.make FOLDER

They were made at 0.2.0. Never make them again to make a test pass: what cannot be read any more is somebody's run.
A new format gets a new folder beside them.
"""

import inspect
import itertools
import json
import os
import platform
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch

import trl_ext as package
from recipes import generate, online_dpo, refresh_reward, reward
from tests.frozen import commands
from tests.tiny import WORDS, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.checkpoints import RolledBack
from trl_ext.commands.main import main as trl_ext_command
from trl_ext.rewards import GoldJudgeReward, source_identity

SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1}
BEFORE_MANY_CLOCKS = time.time() - 1_700_000_000  # a machine whose clock is behind would take the files for later ones


def write_start():
    """What all commands begin with."""
    tokenizer = tiny_tokenizer()
    policy = tiny_llama(**SHAPE)
    for name, model in {"policy": policy, "reward": tiny_reward_model(policy)}.items():
        model.save_pretrained(f"start/{name}")
        tokenizer.save_pretrained(f"start/{name}")
    words = itertools.cycle(WORDS)

    def text(count):
        return " ".join(itertools.islice(words, count))

    places = range(12)
    prompts = [{"prompt": text(1 + i % 5), "topic": f"topic {i % 3}"} for i in places]
    write("prompts/train", prompts)
    write("prompts/test", [{"prompt": text(2), "topic": "held out"} for _ in range(4)])
    write("texts", [{"text": text(4 + i % 5)} for i in places])
    known = [
        {
            "score_chosen": 1.0 + i % 3,
            "score_rejected": 0.5,
            "confidence": 0.5 + 0.1 * (i % 5),
            "weight": 0.5 * (i % 3),
        }
        for i in places
    ]
    pairs = [
        {"prompt": f"{text(2)} ", "chosen": text(3 + i % 4), "rejected": text(2 + i % 3), "source": "ab"[i % 2]} | each
        for i, each in enumerate(known)
    ]
    write("pairs/train", pairs)
    write("pairs/test", [{"prompt": f"{text(3)} ", "chosen": text(4), "rejected": text(2)} for _ in range(6)])
    votes = [
        {"prompt": row["prompt"], "response_a": row["chosen"], "response_b": row["rejected"], "annotator": who}
        | {"choice": "a" if (place + shift) % 4 else "b"}
        for place, row in enumerate(pairs)
        for shift, who in enumerate(["ann", "bob", "cy"])
    ]
    write("votes", votes)
    settings = "max_steps: 1\nper_device_train_batch_size: 4\nmax_length: 32\nsave_strategy: 'no'\nreport_to: none\n"
    Path("start/reward.yaml").write_text(f"{settings}bf16: false\nrecord_run: false\nprobe_rows: 0\n")


def write(name, rows):
    path = Path("start", f"{name}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_runs():
    for name, command in commands.COMMANDS.items():
        trainer = command(name)
        trainer.add_callback(commands.After())
        with suppress(commands.Interrupted):
            trainer.train()
        if name in ("ppo", "ppo_lora"):
            trainer.save_model(f"saved_{name}")  # policy and critic
    try:
        commands.rolled_back("rolled_back").train()
    except RolledBack as reason:
        print(reason)


def write_rest():
    online_dpo.main([*commands.ONLINE_DPO, "--num_rounds", "1"])
    reward.main(commands.REWARD)
    refresh_reward.main(commands.REFRESH[:-2])  # the queue alone
    queue = [json.loads(line) for line in Path("round-1/queue.jsonl").read_text().splitlines()]
    write(
        "labels", [{"item": row["item"], "annotator": who, "choice": "a"} for row in queue for who in ("ann", "bob")]
    )
    refresh_reward.main([*commands.REFRESH, *commands.REFRESH_TRAIN])
    trl_ext_command(commands.ANNOTATORS)
    trl_ext_command(commands.PROMPTS)
    judge = GoldJudgeReward(commands.shortness, folder="gold")
    judge(["a", "b"], ["cat dog", "sat"], held_out=[True, True])
    names = {module: names_in(import_module(module)) for module in modules()}
    Path("names.json").write_text(json.dumps(names, indent=1))
    identities = {name: source_identity(each) for name, each in commands.told().items()}
    Path("identities.json").write_text(json.dumps(identities, indent=2))


def modules():
    """Return the dotted names of the package's modules."""
    root = Path(package.__file__).parents[1]
    paths = [path for path in root.glob("trl_ext/**/*.py") if path.stem not in ("__main__", "sandbox", "process")]
    return sorted(".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths)


def names_in(module):
    """Return the names of classes and functions that a module defines."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(
        name for name in defined if inspect.isroutine(value := getattr(module, name)) or inspect.isclass(value)
    )


def main(folder):
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)  # no file is to name a path of this machine
    torch.set_num_threads(1)
    write_start()
    generate.main(commands.GENERATE)
    write_runs()
    write_rest()
    packages = {name: version(name) for name in ("transformers", "trl", "peft", "accelerate", "datasets", "torch")}
    for path in [*Path().rglob("*")]:  # what nothing reads
        if path.suffix in (".html", ".png", ".xml", ".md"):
            path.unlink()
    Path("versions.json").write_text(json.dumps({"python": platform.python_version(), **packages}, indent=2))


if __name__ == "__main__":
    real, real_ns = time.time, time.time_ns
    with (
        mock.patch.object(time, "time", lambda: real() - BEFORE_MANY_CLOCKS),
        mock.patch.object(time, "time_ns", lambda: real_ns() - int(BEFORE_MANY_CLOCKS * 1e9)),
    ):
        main(sys.argv[1])
