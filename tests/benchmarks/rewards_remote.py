"""How fast answers are scored one by one, in batches, and by `trl-ext serve-reward` with 1, 8 and 64 clients.

    python tests/benchmarks/rewards_remote.py

A reward model of random weights is made, and served by the command itself, in another process. Prints a
Markdown table.
"""

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.tiny import WORDS, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.rewards import ModelReward, RemoteReward


def made(folder: str, hidden: int, layers: int) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    model = tiny_reward_model(tiny_llama(**sizes, max_position_embeddings=256))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def rows(count: int, tokens: int) -> tuple[list[str], list[str], list[bool]]:
    chance = random.Random(0)
    prompts = [" ".join(chance.choices(WORDS, k=16)) + " " for _ in range(count)]
    completions = [" ".join(chance.choices(WORDS, k=chance.randrange(tokens // 2, tokens + 1))) for _ in range(count)]
    return prompts, completions, [True] * count


def seconds_of(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def by_clients(url: str, clients: int, prompts: list, completions: list, finished: list) -> None:
    """Each client asks for one row, waits for its score, and asks for the next."""
    todo, lock = iter(zip(prompts, completions, finished, strict=True)), threading.Lock()

    def ask() -> None:
        with httpx2.Client() as http:
            while True:
                with lock:
                    row = next(todo, None)
                if row is None:
                    return
                body = {"prompts": [row[0]], "completions": [row[1]], "finished": [row[2]]}
                assert http.post(url + "/score", json=body, timeout=60).status_code == 200

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def batches(url: str) -> dict[float, float]:
    """How many calls there were of up to so many rows, from /metrics."""
    shown = httpx2.get(url + "/metrics").text
    return {float(edge): float(n) for edge, n in re.findall(r'batch_rows_bucket{le="([^"]+)"} (\S+)', shown)}


def median_bucket(before: dict[float, float], after: dict[float, float]) -> str:
    counts = {edge: after[edge] - before[edge] for edge in after}
    edges = sorted(counts)
    middle = next(i for i, edge in enumerate(edges) if counts[edge] >= counts[edges[-1]] / 2)
    low = int(edges[middle - 1]) + 1 if middle else 1
    return f"{low}–{int(edges[middle])}" if low < edges[middle] else f"{low}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="longest answer; the shortest has half of it")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max_wait_ms", type=float, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    asked = rows(args.rows, args.tokens)
    found: dict[str, list[float]] = {}
    sizes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        made(folder, args.hidden, args.layers)
        local = ModelReward(folder)
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-m", "trl_ext", "serve-reward", folder, "--port", "0"]
        command += ["--max_wait_ms", str(args.max_wait_ms)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            url = server.stdout.readline().split(" at ")[1].split(";")[0]
            remote = RemoteReward(url, batch_size=64, max_concurrency=4)
            local(*(column[:64] for column in asked[:2]), finished=asked[2][:64])
            remote(*(column[:64] for column in asked[:2]), finished=asked[2][:64])

            def one_by_one() -> None:
                for prompt, completion, end in zip(*asked, strict=True):
                    local([prompt], [completion], finished=[end])

            ways = {
                "in process, one by one": one_by_one,
                "in process, one call": lambda: local(*asked[:2], finished=asked[2]),
                "served, `RemoteReward`, 64 rows a request": lambda: remote(*asked[:2], finished=asked[2]),
            }
            for clients in (1, 8, 64):
                ways[f"served, {clients} clients with a row each"] = lambda n=clients: by_clients(url, n, *asked)
            for _ in range(args.repeats):
                for name, way in ways.items():
                    before = batches(url)
                    found.setdefault(name, []).append(args.rows / seconds_of(way))
                    sizes[name] = median_bucket(before, batches(url)) if name.startswith("served") else ""
        finally:
            server.terminate()
    print(f"{args.rows} rows, hidden size {args.hidden}, {args.layers} layers, answers of {args.tokens // 2} to")
    print(f"{args.tokens} tokens, --max_wait_ms {args.max_wait_ms:g}; median and range of {args.repeats} runs\n")
    print("| | rows a second | median batch |\n|---|---|---|")
    for name, speeds in found.items():
        middle = statistics.median(speeds)
        print(f"| {name} | {middle:.0f} ({min(speeds):.0f}–{max(speeds):.0f}) | {sizes[name]} |")


if __name__ == "__main__":
    main()
