"""Have a model revise its own answers by the principles of a constitution: rows for SFT, and pairs.

    trl-ext constitution --prompts PROMPTS --constitution FILE.yaml --model_url URL --model NAME --output_dir OUT

The model answers each prompt, criticises its answer by a principle that is drawn, and revises it, `rounds` times.
`sft/train.jsonl` has the last revisions, `pairs/train.jsonl` the revisions over the first answers, and
`to_judge.jsonl` the same pairs for `trl-ext label`, whose judge is compared with people first. Each row keeps
principle, critique and round. The model is a server with OpenAI's API (--model_url), or a local one
(--model_name_or_path). The same command goes on where it was interrupted.
"""

import json
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...cli.model_names import check_model
from ...cli.parser import StrictTrlParser, entry_of
from ...runs import Hold, check_output_dir, check_settings, redacted, setting, write_text
from ...upstream import late_bars, quiet
from .asking import ask, check_read

SERVED = (
    "model",
    "model_extra",
    "api_key_env",
    "timeout",
    "retries",
    "max_concurrency",
    "price_input",
    "price_output",
)


@dataclass
class ConstitutionArguments:
    """Declare the arguments of `trl-ext constitution`: prompts, principles, rounds, and the model that writes."""

    prompts: str = field(metadata={"help": "Prompts: a file, a folder or a hub name with the column `prompt`."})
    constitution: str = field(metadata={"help": "YAML file with `version` and `principles`: name and text of each."})
    output_dir: str = field(metadata={"help": "Where all texts, the page and the rows go."})
    dataset_split: str = setting("train", "Split of the prompts.")
    max_prompts: int | None = setting(None, "Take the first so many prompts only.", range=">= 1")
    rounds: int = setting(1, "How often an answer is criticised and revised.", range=">= 1")
    model_url: str | None = setting(None, "Model behind OpenAI's API: its address, as http://127.0.0.1:8000/v1.")
    model: str | None = setting(None, "Name of the model there.")
    model_extra: str | None = setting(
        None, "More keys of the request, in YAML; null removes one: '{max_tokens: null}'."
    )
    api_key_env: str | None = setting(None, "Environment variable that holds the server's key.")
    timeout: float = setting(120.0, "Seconds for one request.", range="> 0 and finite")
    retries: int = setting(8, "Further tries of a request that failed or came too fast.", range=">= 0")
    max_concurrency: int = setting(8, "Requests at once.", range=">= 1")
    model_name_or_path: str | None = setting(None, "Instead of a server a local model, folder or hub name.")
    temperature: float = setting(1.0, "Temperature of the model.", range=">= 0")
    max_tokens: int = setting(512, "Longest text of the model, in tokens. Longer texts are left out.", range=">= 1")
    price_input: float | None = setting(None, "Price of a million tokens in.", range=">= 0")
    price_output: float | None = setting(None, "Price of a million tokens out.", range=">= 0")
    only_cost: bool = setting(False, "Say what it will cost at most, and ask nothing.")
    batch_size: int = setting(16, "Texts at once, of a local model.", range=">= 1")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of local weights; `auto` is as saved."
    )
    use_cpu: bool = setting(False, "Use no GPU, also where there is one.")
    seed: int = setting(0, "Seed of principles, a local model's texts, and the order of a pair's answers.")

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.model_url is None) == (self.model_name_or_path is None):
            raise ValueError("give one model: `model_url` with `model`, or `model_name_or_path`")
        check_read(self, SERVED, "model_url")
        if self.model_url and not self.model:
            raise ValueError("`model_url` needs `model`, the model's name at that address")
        if self.model_extra is not None and not isinstance(entry_of(self.model_extra), dict):
            raise ValueError(f"`model_extra` must be a YAML mapping such as '{{seed: 1}}', got {self.model_extra!r}")


def run(args: ConstitutionArguments) -> dict[str, Any]:
    """
    Have the model answer, criticise and revise, and write the rows and the page.

    Returns:
        The content of `constitution.json`; empty if only the cost was asked for.
    """
    from ...data import write_rows
    from ..evaluate.data import load_prompts
    from .criteria import read_principles
    from .figures import spent
    from .journal import Journal
    from .page import constitution_page
    from .revise import LocalWriter, ServedWriter, kind_of, turn_of

    folder = Path(args.output_dir)
    principles, constitution_id = read_principles(args.constitution)
    writer: Any
    if args.model_url:
        writer = ServedWriter(
            constitution_id,
            url=args.model_url,
            model=args.model,
            temperature=args.temperature,
            max_tokens=args.max_tokens,
            extra=entry_of(args.model_extra) if args.model_extra else None,
            api_key_env=args.api_key_env,
            timeout=args.timeout,
            retries=args.retries,
            max_concurrency=args.max_concurrency,
        )
    else:
        check_model("model_name_or_path", args.model_name_or_path, tokenizer=True)
        writer = LocalWriter(
            str(args.model_name_or_path),
            constitution_id,
            args.temperature,
            args.max_tokens,
            args.batch_size,
            args.seed,
            args.dtype,
            args.use_cpu,
        )
    journal = Journal(folder / "texts.jsonl", f"{writer.identity} {args.seed}", ("key", "step"))
    if args.model_url and journal.models:
        writer.served["model"] = next(iter(journal.models))
    prompts = load_prompts(args.prompts, None, args.dataset_split, args.max_prompts)["prompt"][:]
    rows = list({key: {"key": key, "prompt": prompt} for prompt in prompts for key in [_key(prompt)]}.values())
    steps = range(1 + 2 * args.rounds)
    _say_cost(args, rows, journal, len(steps))
    if args.only_cost:
        return {}
    texts: dict[str, dict[int, str | None]] = {row["key"]: {} for row in rows}
    for step in steps:
        turns = [turn_of(row, step, texts[row["key"]], principles, args.seed) for row in rows]
        ask(writer.write_all, journal, [turn for turn in turns if turn], f"{kind_of(step)}s", args.model_url)
        for row in rows:
            texts[row["key"]][step] = journal.rows.get((row["key"], step), {}).get("text")
    made = _rows(rows, journal, texts, args, constitution_id)
    for name in ("sft", "pairs"):
        if not made[name]:
            raise ValueError(
                f"no row is left of {len(rows)} prompts (left out: {dict(made['left_out'])}): read "
                f"{folder / 'texts.jsonl'} to see why"
            )
        write_rows(folder / name / "train.jsonl", made[name])
    write_rows(folder / "to_judge.jsonl", made["to_judge"])
    used = [journal.rows[row["key"], step] for row in rows for step in steps if (row["key"], step) in journal.rows]
    found = {
        "model": next((row["model"] for row in used if row.get("model")), args.model or args.model_name_or_path),
        "constitution": constitution_id,
        "prompts": len(rows),
        "sft": len(made["sft"]),
        "pairs": len(made["pairs"]),
        "left_out": dict(made["left_out"]),
        "outcomes": dict(Counter(row["why"] for row in used)),
        "by_principle": made["by_principle"],
        "calls": len(used),
        **spent(used, args.price_input, args.price_output),
        "settings": redacted(asdict(args)),
    }
    write_text(folder / "constitution.json", json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "constitution.html", constitution_page(found, made["pairs"], principles))
    return found


def _key(prompt: Any) -> str:
    from ..labels.labelling import answer_key

    return answer_key(prompt, None)


def _rows(
    rows: list[dict[str, Any]], journal: Any, texts: dict[str, dict[int, str | None]], args: Any, constitution_id: str
) -> dict[str, Any]:
    """
    Make rows of the texts.

    Returns:
        - `sft`: each prompt with its last revision.
        - `pairs`: each revision as chosen, the first answer as rejected.
        - `to_judge`: the same pairs for a judge, their two answers in random order.
        - `left_out`: reason → how often it left something out.
        - `by_principle`: name → number of revisions, and mean length of the first answers and of the revisions.
    """
    left_out: Counter[str] = Counter()
    made: dict[str, Any] = {"sft": [], "pairs": [], "to_judge": [], "left_out": left_out}
    lengths: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        key, of = row["key"], texts[row["key"]]
        if (first := of[0]) is None:
            left_out["without an answer"] += 1
            continue
        last = None
        for round_ in range(1, args.rounds + 1):
            revision, step = of.get(2 * round_), 2 * round_
            if revision is None:
                left_out["rounds without a revision"] += 1
                continue
            found = journal.rows[key, step]
            kept = {
                "principle": found["principle"],
                "critique": of[step - 1],
                "round": round_,
                "constitution": constitution_id,
                "model": found.get("model") or args.model or args.model_name_or_path,
            }
            last = revision, kept
            lengths.setdefault(found["principle"], []).append((len(first), len(revision)))
            if revision == first:
                left_out["revisions that change nothing"] += 1
                continue
            chosen, rejected = (_answer(row["prompt"], text) for text in (revision, first))
            made["pairs"].append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected, **kept})
            item = f"{key}-{round_}"
            is_a = np.random.default_rng([args.seed, round_, int(key[:15], 16)]).random() < 0.5
            a, b = (chosen, rejected) if is_a else (rejected, chosen)
            made["to_judge"].append(
                {"item": item, "prompt": row["prompt"], "response_a": a, "response_b": b,
                 "revised": "a" if is_a else "b", **kept}
            )  # fmt: skip
        if last:
            made["sft"].append({"prompt": row["prompt"], "completion": _answer(row["prompt"], last[0]), **last[1]})
    made["by_principle"] = {
        name: {
            "revisions": len(pairs),
            "length_before": sum(a for a, _ in pairs) / len(pairs),
            "length_after": sum(b for _, b in pairs) / len(pairs),
        }
        for name, pairs in sorted(lengths.items())
    }
    return made


def _answer(prompt: Any, text: str) -> Any:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _say_cost(args: ConstitutionArguments, rows: list[dict[str, Any]], journal: Any, steps: int) -> None:
    """Print the highest possible cost of the texts that are still missing, in calls, tokens and money."""
    from .figures import money

    calls = sum((row["key"], step) not in journal.rows for row in rows for step in range(steps))
    prompts = sum(len(str(row["prompt"])) for row in rows) // 4
    out = calls * args.max_tokens
    # A critique reads an answer, a revision reads answer and critique; each reads requests of some 60 tokens, too
    read = prompts * steps + len(rows) * args.rounds * (3 * args.max_tokens + 180)
    said = f"Cost: at most {calls:,} of {len(rows) * steps:,} calls, about {read:,} tokens in, {out:,} out"
    price = money(read, out, args.price_input, args.price_output)
    print(said + (f"; {price:,.2f} at these prices" if price is not None else ""), flush=True)


def main(arguments: list[str] | None = None) -> None:
    quiet()
    parser = StrictTrlParser(ConstitutionArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    late_bars()
    with parser.one_line_errors(ValueError, OSError, ImportError, RuntimeError):
        check_output_dir(args.output_dir, "false")
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        with Hold(args.output_dir):
            found = run(args)
    if args.only_cost:
        return
    folder = Path(args.output_dir)
    left = ", ".join(f"{count} {why}" for why, count in found["left_out"].items()) or "none"
    print(f"SFT: {folder / 'sft/train.jsonl'}, {found['sft']:,} revisions of {found['prompts']:,} prompts")
    print(f"Pairs: {folder / 'pairs/train.jsonl'}, {found['pairs']:,} revisions over first answers; left out: {left}")
    print(f"Asked: {found['calls']:,} calls, {found['tokens_in']:,} tokens in, {found['tokens_out']:,} out")
    words = ["--pairs", folder / "to_judge.jsonl", "--keep_columns", "principle", "critique", "round", "revised"]
    judge = shlex.join(["trl-ext", "label", *map(str, words), "--rubric", "rubric.yaml"])
    print(f"Page: {folder / 'constitution.html'}; to have the pairs judged: {judge} …")


if __name__ == "__main__":
    main()
