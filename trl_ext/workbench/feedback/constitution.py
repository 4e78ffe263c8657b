"""Have a model revise its own answers by the principles of a constitution: rows for SFT, and pairs.

    trl-ext constitution --prompts PROMPTS --constitution FILE.yaml --model_url URL --model NAME --output_dir OUT

The model answers each prompt, criticises its answer by a principle that is sampled, and revises it, `rounds` times.
`sft/train.jsonl` has the last revisions, `pairs/train.jsonl` has each revision as chosen and the first answer as
rejected, and `to_judge.jsonl` has the same pairs for `trl-ext label`, whose judge is compared with people first. Each
row keeps principle, critique and round. The model is a server with OpenAI's API (--model_url), or a local one
(--model_name_or_path). The same command resumes where it was interrupted.
"""

import json
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from ...cli.parser import parse_and_run
from ...runs import check_settings, redacted, setting, write_text
from .command import AskingArguments

_ROWS = 100  # most revisions that a page shows


@dataclass(kw_only=True)
class ConstitutionArguments(AskingArguments):
    """Declare the arguments of `trl-ext constitution`: prompts, principles, rounds, and the model that writes."""

    prompts: str = field(metadata={"help": "Prompts: a file, a folder or a hub name with the column `prompt`."})
    constitution: str = field(metadata={"help": "YAML file with `version` and `principles`: name and text of each."})
    rounds: int = setting(1, "How often an answer is criticised and revised.", range=">= 1")
    model_url: str | None = setting(None, "Address of a model behind OpenAI's API, such as http://127.0.0.1:8000/v1.")
    model: str | None = setting(None, "Name of the model in that API.")
    model_extra: str | None = setting(
        None, "More keys of the request, in YAML; null removes one: '{max_tokens: null}'."
    )
    model_name_or_path: str | None = setting(None, "Local model in place of a server: a folder or hub name.")
    temperature: float = setting(1.0, "Temperature of the model.", range=">= 0")
    max_tokens: int = setting(512, "Longest text of the model, in tokens. Longer texts are left out.", range=">= 1")
    only_cost: bool = setting(False, "Print the largest number of calls that the run takes, and ask nothing.")

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.model_url is None) == (self.model_name_or_path is None) or bool(self.model_url) != bool(self.model):
            raise ValueError("give one model: `model_url` with `model`, or `model_name_or_path`")


def run(args: ConstitutionArguments) -> dict[str, Any]:
    """
    Have the model answer each prompt and revise its answer; write the training rows, the page and the JSON.

    Returns:
        The content of `constitution.json`; empty if only the cost was to be printed.

    Raises:
        ValueError: no row is left for one of the files to train on or to judge.
    """
    from ...data import check_texts, load_dataset_split, write_rows
    from ..labels.labelling import answer_key
    from .judges import Journal, read_criteria
    from .report import tokens_of
    from .revise import LocalWriter, ServedWriter, kind_of, turn_of

    folder = Path(args.output_dir)
    principles, constitution_id = read_criteria(args.constitution, "principles", dict)
    writer: Any
    if args.model_url:
        settings = args.served(args.model_url, args.model, args.model_extra)
        settings |= {"temperature": args.temperature, "max_tokens": args.max_tokens}
        writer = ServedWriter(rubric=constitution_id, **settings)
    else:
        given = (str(args.model_name_or_path), constitution_id, args.temperature, args.max_tokens, args.seed)
        writer = LocalWriter(*given, **args.local)
    journal = Journal(folder / "texts.jsonl", f"{writer.identity} {args.seed}", ("key", "step"))
    dataset = load_dataset_split(args.prompts, args.dataset_split)
    check_texts(dataset, ("prompt",), f"`prompts` {args.prompts}", may_be_empty=False)
    prompts = {answer_key(prompt, None): prompt for prompt in dataset["prompt"]}
    steps = range(1 + 2 * args.rounds)
    calls = sum((key, step) not in journal.rows for key in prompts for step in steps)
    earlier = len(prompts) * len(steps) - calls
    print(f"Cost: at most {calls:,} calls{f' (an earlier run made {earlier:,} others)' * bool(earlier)}", flush=True)
    if args.only_cost:
        return {}
    texts: dict[str, dict[int, str | None]] = {key: {} for key in prompts}
    for step in steps:
        turns = [turn_of(key, prompts[key], step, texts[key], principles, args.seed) for key in prompts]
        journal.ask(writer, [turn for turn in turns if turn], f"{kind_of(step)}s")
        for key, of in texts.items():
            of[step] = journal.rows.get((key, step), {}).get("text")
    made, left_out = _rows(prompts, journal.rows, texts, args, constitution_id)
    for name, rows in made.items():
        if not rows:
            raise ValueError(
                f"no row is left for {name}.jsonl (prompts: {len(prompts)}; left out: "
                f"{', '.join(f'{count} {why}' for why, count in left_out.items()) or 'none'}): read "
                f"{folder / 'texts.jsonl'} to see why"
            )
        write_rows(folder / f"{name}.jsonl", rows)
    written = [[text for step in steps[::2] if (text := of[step])] for of in texts.values()]  # without critiques
    used = [journal.rows[key, step] for key in prompts for step in steps if (key, step) in journal.rows]
    found = {
        "model": made["sft/train"][0]["model"],
        "constitution": constitution_id,
        "prompts": len(prompts),
        "sft": len(made["sft/train"]),
        "pairs": len(made["pairs/train"]),
        "left_out": dict(left_out),
        "length": [fmean(len(given[at]) for given in written if given) for at in (0, -1)],
        "outcomes": dict(Counter(row["why"] for row in used)),
        "calls": len(used),
        **tokens_of(used),
        "settings": redacted(asdict(args)),
    }
    write_text(folder / "constitution.json", json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "constitution.html", page(found, made["pairs/train"], principles))
    return found


def _rows(
    prompts: dict[str, Any], journal: dict[tuple, Any], texts: dict[str, dict[int, str | None]], args: Any, by: str
) -> tuple[dict[str, list[dict[str, Any]]], Counter[str]]:
    """
    Make the rows of the output files from the texts that the model wrote.

    Args:
        prompts: maps each prompt's key, a hash, to the prompt.
        journal: maps (key, step) to the journal's row. Step 0 is the answer, 1, 3, … are critiques, 2, 4, … revisions.
        texts: maps each key to a dict from the step to its text; None where there is none.
        args: the command's arguments.
        by: version and hash of the constitution, which each row gets.

    Returns:
        - a dict from each file's name to its rows: `sft/train` has each prompt with its last revision, `pairs/train`
          each revision as chosen and the first answer as rejected, `to_judge` the same pairs, with their answers in
          random order;
        - how many prompts, rounds or revisions were left out, by reason.
    """
    import numpy as np

    left_out: Counter[str] = Counter()
    made: dict[str, list[dict[str, Any]]] = {"sft/train": [], "pairs/train": [], "to_judge": []}
    for key, prompt in prompts.items():
        of = texts[key]
        sft = None
        if (first := of[0]) is None:
            left_out["without an answer"] += 1
            continue
        for round_ in range(1, args.rounds + 1):
            if (revision := of[2 * round_]) is None:
                left_out["rounds without a revision"] += 1
                continue
            found = journal[key, 2 * round_]
            kept = {
                "principle": found["principle"],
                "critique": of[2 * round_ - 1],
                "round": round_,
                "constitution": by,
                "model": found.get("model") or args.model_name_or_path,
            }
            chosen, rejected = (
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for text in (revision, first)
            )
            sft = {"prompt": prompt, "completion": chosen, **kept}
            if revision == first:
                left_out["revisions that change nothing"] += 1
                continue
            made["pairs/train"].append({"prompt": prompt, "chosen": chosen, "rejected": rejected, **kept})
            is_a = np.random.default_rng([args.seed, round_, int(key[:15], 16)]).random() < 0.5
            a, b = (chosen, rejected) if is_a else (rejected, chosen)
            pair = {"item": f"{key}-{round_}", "prompt": prompt, "response_a": a, "response_b": b}
            made["to_judge"].append({**pair, "revised": "a" if is_a else "b", **kept})
        if sft:
            made["sft/train"].append(sft)
    return made, left_out


def page(found: dict[str, Any], pairs: list[dict[str, Any]], principles: dict[str, str]) -> str:
    """
    Return the HTML page of `trl-ext constitution`.

    Args:
        found: content of `constitution.json`.
        pairs: rows with a revision as `chosen` and the first answer as `rejected`.
        principles: maps the name of each principle to its text.
    """
    from ..pages.markup import render

    return render(
        Path(__file__).with_name("constitution.html.j2"),
        title="Revised by a constitution",
        tiles={
            **{name: found[name] for name in ("model", "constitution", "prompts", "pairs")},
            "rows for SFT": found["sft"],
            "mean characters, first and last": " → ".join(f"{length:,.0f}" for length in found["length"]),
            **found["left_out"],
            **{f"texts {why}": count for why, count in found["outcomes"].items()},
        },
        principles=principles.items(),
        rows=pairs[:_ROWS],
        settings=found["settings"],
    )


def main(arguments: list[str] | None = None) -> None:
    args, found = parse_and_run(ConstitutionArguments, __doc__, run, arguments)
    if args.only_cost:
        return
    folder = Path(args.output_dir)
    left = ", ".join(f"{count} {why}" for why, count in found["left_out"].items()) or "none"
    print(f"SFT: {folder / 'sft/train.jsonl'}, {found['sft']:,} revisions of {found['prompts']:,} prompts")
    print(f"Pairs: {folder / 'pairs/train.jsonl'}, {found['pairs']:,} revisions over first answers; left out: {left}")
    print(f"Requests: {found['calls']:,} calls, {found['tokens_in']:,} tokens in, {found['tokens_out']:,} out")
    words = ["--pairs", folder / "to_judge.jsonl", "--keep_columns", "principle", "critique", "round", "revised"]
    judge = shlex.join(["trl-ext", "label", *map(str, words), "--rubric", "rubric.yaml"])
    print(f"Page: {folder / 'constitution.html'}; to have the pairs judged: {judge} …")


if __name__ == "__main__":
    main()
