"""Short runs of the recipes; as a script, a run that is killed and started again many times."""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from recipes import dpo, ppo, reward, sft
from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import make_world
from tests.launch import spare_time
from trl_ext import DPOTrainer, PPOTrainer  # noqa: F401 - before processes are forked

ROOT = Path(__file__).parents[2]
RECIPES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}


def refusal(capsys, main, words):
    """The line by which a recipe ends with status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([*map(str, words)])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ": error: " in error
    return error


def rows_of(folder, split="train"):
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def write_rows(folder, **splits):
    """A data set of these splits."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_inputs(folder):
    """A model and data for every recipe."""
    world = make_world(0, demonstrations=100, pairs=100, prompts=40, held_out=40)
    for name, splits in world.items():
        write_rows(folder / name, **splits)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer, 0).save_pretrained(folder / "model")
    return folder


def arguments(name, inputs, output, *more, save_steps=2, steps=4):
    """The command line of a recipe; of PPO, a rollout is two steps."""
    config, data = {
        "sft": ("sft", "sft"),
        "reward": ("reward", "preferences"),
        "dpo": ("dpo", "preferences"),
        "ppo": ("unguarded", "prompts"),
    }[name]
    length = ["--max_steps", str(steps), *(["--eval_strategy", "steps", "--eval_steps", "4"] if name == "sft" else [])]
    if name == "ppo":
        length = ["--total_episodes", str(8 * steps), "--num_ppo_epochs", "1", "--num_mini_batches", "2"]
        length += "--max_completion_length 8 --reward_weights 1 0".split()
    length += [
        "--record_run",
        "false",
        *(["--record_answers", "0"] if name in ("sft", "dpo") else []),
    ]  # writing a page takes longer
    return [
        *("--config", str(ROOT / f"recipes/demo/{config}.yaml"), "--model_name_or_path", str(inputs / "model")),
        *("--dataset_name", str(inputs / data), "--output_dir", str(output), "--warmup_steps", "0"),
        *("--save_strategy", "steps", "--save_steps", str(save_steps), "--save_total_limit", "2"),
        *(
            "--per_device_train_batch_size",
            "8",
            "--disable_tqdm",
            "true",
            "--use_cpu",
            "true",
            *length,
            *map(str, more),
        ),
    ]


def start(name, inputs, output, log):
    """Run a recipe in a forked process, since imports take longer than training."""
    child = os.fork()
    if child:
        return child
    code = 1
    tqdm.set_lock(threading.RLock())  # processes that were killed may hold the usual one
    try:
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout.reconfigure(line_buffering=True)
            RECIPES[name].main(arguments(name, inputs, output, save_steps=1, steps=24))
            code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(code)


def killed_again_and_again(name, folder, times, seed):
    """
    Kill a recipe by `kill -9` at random times of its training and start it again, `times` times.

    `run-0` is not killed. When a run ends by itself, the next one starts in another folder `run-…`.
    """
    chance, inputs, log = random.Random(seed), make_inputs(folder / "inputs"), folder / "log.txt"

    def trains(earlier, sign="\n         step "):
        return log.exists() and log.read_text().count(sign) > earlier

    child = start(name, inputs, folder / "run-0", log)
    assert not ended(child, until=lambda: trains(0))
    began = time.monotonic()
    assert not ended(child, until=lambda: trains(0, "\ndone "))
    seconds, kills, runs = time.monotonic() - began, 0, 1
    assert ended(child), log.read_text()[-3000:]
    # Where checkpoints come late, kill more often, until some run has resumed
    while kills < times or ("Resuming from" not in log.read_text() and kills < 10 * times):
        earlier = log.read_text().count("\n         step ")
        child = start(name, inputs, folder / f"run-{runs}", log)
        if ended(child, until=lambda earlier=earlier: trains(earlier)) or ended(child, chance.uniform(0, seconds)):
            runs += 1
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
    assert ended(start(name, inputs, folder / f"run-{runs}", log)), log.read_text()[-3000:]
    lines = log.read_text()
    resumed, skipped = lines.count("Resuming from"), lines.count("it is not complete")
    print(f"{name}: killed {kills} times in {runs} runs; resumed {resumed} times, skipped {skipped} checkpoints")
    assert resumed, "every process was killed before its first checkpoint"


def ended(child, within=600.0, until=lambda: False):
    """Whether a process ended, with status 0, before the time is over or `until` holds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline and not until():
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, f"it ended with {status}"
            return True
        time.sleep(0.002)
    return False


if __name__ == "__main__":
    spare_time()
    killed_again_and_again(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
