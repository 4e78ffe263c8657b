"""
How fast a cached score is, against one by a model of the demo's size, and what an entry costs.

    python tests/benchmarks/rewards_cache.py               # with a redis-server on the path, Redis too

A batch is 64 prompts and answers of the demo's world with their token ids; a model's time is that of `ModelReward`, on
one thread. Each figure is the median of its repeats, and sides take turns: after a forward the rows are in none of the
processor's caches. Bytes an entry are the growth of the resident set over a million entries, divided by them.
"""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import AutoModelForSequenceClassification

from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import AGENT, vocabulary
from trl_ext.rewards import CachedReward, ModelReward

BATCH, PROMPT, ANSWER = 64, 16, 32


def demo_model():
    """`ModelReward` with a sequence classifier of the demo's size, random weights."""
    tokenizer = make_tokenizer()
    config = make_model(tokenizer, 0).config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).eval()
    return ModelReward(model, tokenizer=tokenizer, policy_tokenizer=tokenizer)


def batch(seed):
    """Rows of the demo's words, as a trainer passes them."""
    words, generator = vocabulary(), torch.Generator().manual_seed(seed)

    def texts(count):
        return [
            " ".join(words[i] for i in row) for row in torch.randint(len(words), (BATCH, count), generator=generator)
        ]

    prompts, completions, tokenizer = [f"{text} {AGENT} " for text in texts(PROMPT)], texts(ANSWER), make_tokenizer()
    return {
        "prompts": prompts,
        "completions": completions,
        "prompt_ids": tokenizer(prompts)["input_ids"],
        "completion_ids": [[*ids, tokenizer.eos_token_id] for ids in tokenizer(completions)["input_ids"]],
        "finished": [True] * BATCH,
    }


def milliseconds(sides, repeats):
    """Median time of a call of each side, in turns."""
    times = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_an_entry(entries):
    cached = CachedReward(lambda completions, **_: [float(len(each)) / 7 for each in completions], columns=[])
    before = resident()
    for start in range(0, entries, 1000):
        cached(["p"] * 1000, [f"answer {start + i}" for i in range(1000)])
    return (resident() - before) / entries


def redis_server(folder):
    if shutil.which("redis-server") is None:
        return None, None
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    any("Ready to accept connections" in line for line in server.stdout)
    return server, f"redis://127.0.0.1:{port}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--entries", type=int, default=1_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, rows = demo_model(), batch(0)
    cached, text_alone = CachedReward(model), CachedReward(model, columns=["finished"])
    scores = cached(**rows)
    assert text_alone(**rows) == scores == cached(**rows)
    sides = {
        "model": lambda: model(**rows),
        "in memory, all columns, right after the model": lambda: cached(**rows),
        "in memory, all columns": lambda: cached(**rows),
        "in memory, `columns=['finished']`": lambda: text_alone(**rows),
    }
    with tempfile.TemporaryDirectory() as folder:
        server, url = redis_server(folder)
        if url:
            CachedReward(model, redis_url=url)(**rows)
            shared = CachedReward(model, redis_url=url)

            def from_redis():
                shared._memory.clear()
                return shared(**rows)

            assert from_redis() == scores
            sides["Redis on this machine"] = from_redis
        times = milliseconds(sides, args.repeats)
        if server:
            server.kill()
            server.wait()
    print(f"| {BATCH} answers from | ms | faster than the model |\n|---|---|---|")
    for name, each in times.items():
        print(f"| {name} | {each:.3f} | {times['model'] / each:.0f} × |")
    print(f"\n{bytes_an_entry(args.entries):.0f} bytes an entry in memory, over {args.entries:,} entries")


if __name__ == "__main__":
    main()
