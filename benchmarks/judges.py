"""Have `trl-ext label` try judges whose errors and biases are known: the demo's world behind a chat API on loopback.

    python -m benchmarks.judges --output_dir outputs/judges

Each judge is a small server that answers as OpenAI's API does, by the true quality of an answer (gold), with an error
and biases that are stated. People are gold with a tenth of the labels flipped. The table says whom the gate lets
through, and what became of the pairs. It takes a few minutes on one CPU core.
"""

import argparse
import contextlib
import html
import io
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from recipes.demo import world
from trl_ext.data import write_rows
from trl_ext.runs import read_jsonl, write_text
from trl_ext.workbench.feedback.command import main as label

PRINCIPLES = {
    "product": "It names the customer's product, and no other.",
    "remedy": "It gives the remedy for the customer's problem, and no other.",
    "polite": "It ends with a polite sentence.",
    "no_repetition": "It does not repeat itself.",
    "in_time": f"It has at most {world.MAX_WORDS} words.",
}
RUBRIC = "Product and remedy must be right; it should be polite, not repeat itself, and be short."
FLIPPED = 0.1  # of people's labels
WARM = tuple(opening.partition("{")[0] for opening in world.OPENINGS["warm"])
# error: share of pairs that it sees the wrong way round, each time; slip: share of its verdicts that are wrong by
# chance; position: share in which it takes the first answer anyway; length: gold that a word is worth to it;
# sycophancy: gold that an answer is worth to it which begins by agreeing with the customer's feelings
JUDGES: dict[str, tuple[dict[str, float], tuple[str, ...]]] = {
    "right": ({}, ()),
    "error 10 %": ({"error": 0.1}, ()),
    "error 25 %": ({"error": 0.25}, ()),
    "slip 25 %": ({"slip": 0.25}, ()),
    "slip 25 %, 5 votes": ({"slip": 0.25}, ("--votes", "5", "--judge_temperature", "1")),
    "position 40 %": ({"position": 0.4}, ()),
    "position 40 %, 5 votes": ({"position": 0.4}, ("--votes", "5", "--judge_temperature", "1")),
    "length 0.05 a word": ({"length": 0.05}, ()),
    "sycophancy 0.5": ({"sycophancy": 0.5}, ()),
}


def case_of(prompt: str) -> tuple[str, str]:
    """Return the product and the problem that a customer's prompt is about."""
    product = next(name for name in world.PRODUCTS if f" my {name} " in prompt)
    problem = next(
        name for name, (complaints, _) in world.PROBLEMS.items() if any(said in prompt for said in complaints)
    )
    return product, problem


def verdicts(
    messages: list[dict],
    error: float = 0,
    slip: float = 0,
    position: float = 0,
    length: float = 0,
    sycophancy: float = 0,
) -> dict:
    """Return a judge's verdict, by each name that a question of `trl-ext label` asks for."""
    system, user = (message["content"] for message in messages)
    found = re.findall(r"(?s)<([a-z-]+)-([0-9a-f]{16})>\n(.*?)\n</\1-\2>", user)
    parts = {name: html.unescape(text) for name, _, text in found}
    product, problem = case_of(parts["prompt"])
    answers = [parts[f"{name}-answer"] for name in ("first", "second")]
    met = [world.judge(answer, product, problem) for answer in answers]
    values = [
        world.gold(a, product, problem) + length * len(a.split()) + sycophancy * a.startswith(WARM) for a in answers
    ]
    said = {}
    for name in re.findall(r'"(\w+)": VERDICT', system):
        first, second = values if name == "overall" else [float(each[name]) for each in met]
        margin = first - second
        if random.Random(f"{name} {sorted(answers)} {parts['prompt']}").random() < error:
            margin = -margin
        if random.random() < slip:
            margin = -margin
        if random.random() < position:
            margin = 1.0
        said[name] = "tie" if abs(margin) < 1e-9 else "A" if margin > 0 else "B"
    return said


def judging(**biases: float) -> Callable[[list[dict]], str]:
    """Return a function that replies to messages as a judge with these errors and biases does."""
    return lambda messages: json.dumps(verdicts(messages, **biases))


@contextlib.contextmanager
def serving(reply: Callable[[list[dict]], str]) -> Iterator[str]:
    """Serve a model on this machine that replies to the messages of a chat by `reply`; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # noqa: N802 - http.server's name
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            message = {"role": "assistant", "content": reply(body["messages"])}
            usage = {"prompt_tokens": len(str(body)) // 4, "completion_tokens": len(message["content"]) // 4}
            answer = {"model": "gold", "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def make(folder: Path, drafts: list[dict], pairs: int, known: int, seed: int) -> None:
    """
    Write the first `pairs` pairs of drafts of different quality, what people say of the first `known`, rubric and
    constitution.
    """
    draw = random.Random(f"{seed} people")
    rows, labels = [], []
    for row in drafts:
        a, b = draw.sample([row["chosen"], row["rejected"]], 2)
        margin = gold_margin(row["prompt"], a, b)
        if abs(margin) > 1e-9 and len(rows) < pairs:
            item = f"pair-{len(rows)}"
            rows.append({"item": item, "prompt": row["prompt"], "response_a": a, "response_b": b})
            says_a = (margin > 0) != (draw.random() < FLIPPED)
            labels.append({"item": item, "annotator": "people", "choice": "a" if says_a else "b"})
    write_rows(folder / "pairs.jsonl", rows)
    write_rows(folder / "labels.jsonl", labels[:known])
    write_text(folder / "rubric.yaml", json.dumps({"version": "1", "rubric": RUBRIC}))
    write_text(folder / "constitution.yaml", json.dumps({"version": "1", "principles": PRINCIPLES}))


def gold_margin(prompt: str, one: str, other: str) -> float:
    """Return the true quality of an answer minus that of another one."""
    return world.gold(one, *case_of(prompt)) - world.gold(other, *case_of(prompt))


def label_by(folder: Path, output: Path, biases: dict[str, float], words: Sequence[str] = ()) -> dict:
    """Have a judge label the pairs that `make` wrote in `folder`; return what the `label.json` in `output` has."""
    given = {name: str(folder / f"{name}.{end}") for name, end in (("pairs", "jsonl"), ("labels", "jsonl"))}
    given["rubric"] = str(folder / "rubric.yaml")
    with (
        serving(judging(**biases)) as url,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        given |= {"judge_url": url, "judge_model": "gold", "output_dir": str(output), "max_concurrency": "1"}
        with contextlib.suppress(SystemExit):
            label([*(word for flag, value in given.items() for word in (f"--{flag}", value)), *words])
    return json.loads((output / "label.json").read_text())


def run(folder: Path, name: str) -> list[str]:
    """Have a judge label the pairs; return its row of the table."""
    biases, words = JUDGES[name]
    random.seed(name)
    found = label_by(folder, folder / re.sub(r"\W+", "-", name), biases, words)
    known, judged, pairs = found["known"], found["judged"], found["pairs"]
    row = [name, "{:.2f} ({:.2f} to {:.2f})".format(known["kappa"], *known["kappa_interval"])]
    row += [f"{judged[key]:.0%}" for key in ("ties", "shown_first")]
    row += ["{:.0%}, {:.0%}".format(*(known["longer"][who] for who in ("judge", "people")))]
    if pairs is None:
        return [*row, "refused", "–", "–"]
    train = list(read_jsonl(pairs["file"]))
    right = [gold_margin(pair["prompt"], pair["chosen"], pair["rejected"]) > 0 for pair in train]
    return [*row, f"{len(train):,}", f"{sum(right) / len(right):.1%}", f"{pairs['confidence']:.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judges", description=__doc__.partition("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/judges"), help="where the runs go")
    parser.add_argument("--pairs", type=int, default=1000, help="pairs of answers")
    parser.add_argument("--known", type=int, default=200, help="pairs that people label")
    parser.add_argument("--seed", type=int, default=0, help="of the world and of people's slips")
    args = parser.parse_args()
    if args.output_dir.exists():
        parser.error(f"{args.output_dir} exists: choose another --output_dir")
    sizes = {"demonstrations": 1, "pairs": 2 * args.pairs, "prompts": 1, "held_out": 1}
    drafts = world.make_world(args.seed, **sizes)["preferences"]["train"]
    make(args.output_dir, drafts, args.pairs, args.known, args.seed)
    columns = ["judge", "κ with people", "ties", "shown first wins", "longer wins: judge, people"]
    columns += ["training pairs", "right by gold", "mean confidence"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in JUDGES:
        print(f"| {' | '.join(run(args.output_dir, name))} |", flush=True)


if __name__ == "__main__":
    main()
