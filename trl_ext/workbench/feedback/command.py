"""Label pairs of answers by a judge, a language model, that is first compared with people's labels.

    trl-ext label --pairs PAIRS --rubric rubric.yaml --judge_url URL --judge_model NAME --output_dir OUT
    trl-ext label …the same… --labels labelled.json

PAIRS has `prompt`, `response_a`, `response_b`; with --prompts and --policies answers are sampled and paired. The judge
is a server with OpenAI's API, such as vLLM (--judge_url), or a local model (--judge_model_name_or_path). The first
call writes rows for people to label, and asks nothing. With their labels the judge is asked about these rows. If
it agrees with people (Cohen's kappa of `min_agreement` or more), it labels the rest, and pairs/train.jsonl is written.
Else no pair is written, and the exit status is 1. The same command goes on where it was interrupted.
"""

import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ...cli.model_names import check_model
from ...cli.parser import StrictTrlParser, entry_of
from ...runs import Hold, check_output_dir, check_settings, redacted, setting
from ...upstream import late_bars, quiet
from .asking import ask, check_read
from .criteria import check_is_there

SERVED = (
    *("judge_model", "judge_temperature", "judge_max_tokens", "judge_extra", "api_key_env", "votes", "timeout"),
    *("retries", "max_concurrency", "price_input", "price_output"),
)
SAMPLED = ("max_prompts", "temperatures", "num_samples", "pairs_per_prompt", "max_completion_length", "top_p")
OWN = {
    *"item key prompt response_a response_b chosen rejected confidence share votes".split(),
    *"judge rubric constitution principles".split(),
    *(f"{what}_{of}" for what in ("policy", "temperature") for of in ("a", "b", "chosen", "rejected")),
}


@dataclass
class LabelArguments:
    """Declare the arguments of `trl-ext label`: the pairs, the judge, its rubric, and people's labels."""

    rubric: str = field(
        metadata={"help": "YAML file with `version` and `rubric`, which says what makes an answer good."}
    )
    output_dir: str = field(metadata={"help": "Where verdicts, the report and the pairs go."})
    pairs: str | None = setting(None, "Pairs: `prompt`, `response_a`, `response_b`, maybe `item`. File or hub name.")
    prompts: str | None = setting(None, "Instead of pairs, prompts that `policies` answer. File or hub name.")
    dataset_split: str = setting("train", "Split of the pairs or prompts.")
    max_prompts: int | None = setting(None, "Answer the first so many prompts only.", range=">= 1")
    keep_columns: list[str] | None = setting(None, "Further columns to keep in the training pairs.")
    policies: list[str] | None = setting(None, "Models that answer the prompts: folders or hub names.")
    temperatures: list[float] = field(
        default_factory=lambda: [1.0], metadata={"help": "Temperatures at which each policy answers."}
    )
    num_samples: int = setting(2, "Answers of each policy at each temperature.", range=">= 1")
    pairs_per_prompt: int = setting(1, "Pairs that are drawn from a prompt's answers.", range=">= 1")
    max_completion_length: int = setting(256, "Tokens after which an answer is cut off.", range=">= 1")
    top_p: float = setting(1.0, "Sample from the likeliest tokens of this total probability.", range="in (0, 1]")
    constitution: str | None = setting(
        None, "YAML file with `version` and `principles`: name and text of each. All are judged in one call."
    )
    judge_url: str | None = setting(None, "Judge behind OpenAI's API: its address, as http://127.0.0.1:8000/v1.")
    judge_model: str | None = setting(None, "Name of the model there.")
    judge_temperature: float = setting(0.0, "Temperature of the judge.", range=">= 0")
    judge_max_tokens: int = setting(256, "Longest message of the judge, its reasoning included.", range=">= 1")
    judge_extra: str | None = setting(
        None, "More keys of the request, in YAML; null removes one: '{max_tokens: null, max_completion_tokens: 256}'."
    )
    api_key_env: str | None = setting(None, "Environment variable that holds the server's key.")
    votes: int = setting(1, "How often each question is asked in each order of the answers.", range=">= 1")
    timeout: float = setting(60.0, "Seconds for one request.", range="> 0 and finite")
    retries: int = setting(8, "Further tries of a request that failed or came too fast.", range=">= 0")
    max_concurrency: int = setting(8, "Requests at once.", range=">= 1")
    judge_model_name_or_path: str | None = setting(
        None, "Instead of a server a local model, folder or hub name, whose log-probs of A and B are the verdict."
    )
    labels: list[str] | None = setting(
        None, "What people chose: Label Studio's or Argilla's export, or a file with `item`, `choice`, `annotator`."
    )
    known_share: float = setting(0.1, "Share of the pairs that people are to label.", range="in (0, 1]")
    min_known: int = setting(50, "Least number of pairs with people's labels.", range=">= 20")
    min_agreement: float = setting(
        0.6, "Least Cohen's kappa of judge and people. Below it no pair is written.", range="in [0, 1]"
    )
    price_input: float | None = setting(None, "Price of a million tokens in.", range=">= 0")
    price_output: float | None = setting(None, "Price of a million tokens out.", range=">= 0")
    only_cost: bool = setting(False, "Say what it will cost, and ask nothing.")
    batch_size: int = setting(16, "Sequences at once, of a local judge and of policies.", range=">= 1")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of local weights; `auto` is as saved."
    )
    use_cpu: bool = setting(False, "Use no GPU, also where there is one.")
    seed: int = setting(0, "Seed of samples, pairs, rows for people and intervals.")

    def __post_init__(self) -> None:
        check_settings(self)
        check_is_there(self.rubric, "rubric")
        if self.constitution is not None:
            check_is_there(self.constitution, "constitution")
        for file in self.labels or []:
            check_is_there(file, "labels")
        if (self.pairs is None) == (self.prompts is None):
            raise ValueError("give either `pairs`, or `prompts` with `policies`")
        if (self.prompts is None) == bool(self.policies):
            raise ValueError("`prompts` and `policies` belong together: give both, or `pairs` alone")
        if (self.judge_url is None) == (self.judge_model_name_or_path is None):
            raise ValueError("give one judge: `judge_url` with `judge_model`, or `judge_model_name_or_path`")
        check_read(self, SERVED, "judge_url")
        check_read(self, SAMPLED, "prompts")
        if self.judge_url and not self.judge_model:
            raise ValueError("`judge_url` needs `judge_model`, the model's name at that address")
        if self.votes > 1 and self.judge_temperature == 0:
            raise ValueError(
                f"`votes` {self.votes} are all the same at `judge_temperature` 0: raise `judge_temperature`, or set "
                "`votes` to 1"
            )
        if self.judge_extra is not None and not isinstance(entry_of(self.judge_extra), dict):
            raise ValueError(f"`judge_extra` must be a YAML mapping such as '{{seed: 1}}', got {self.judge_extra!r}")
        if any(not temperature >= 0 for temperature in self.temperatures):
            raise ValueError(f"`temperatures` must be 0 or more, got {self.temperatures}")
        if self.policies and len(self.policies) * len(self.temperatures) * self.num_samples < 2:
            raise ValueError("one answer to a prompt makes no pair: raise `num_samples`, or give more policies")
        if own := {*(self.keep_columns or ())} & OWN:
            raise ValueError(
                f"`keep_columns` names {min(own)!r}, but pairs have a column of that name already: rename yours"
            )


def run(args: LabelArguments) -> dict[str, Any]:
    """
    Have the judge label the pairs that people labelled and, if it agrees with people, all others.

    Returns:
        The report, which is written, too.
    """
    from ..labels import agreement_report
    from ..labels.labelling import answer_key
    from .criteria import read_criteria
    from .data import people_choices, rows_for_people, write_for_people
    from .journal import Journal
    from .judges import LocalJudge, ServedJudge
    from .page import write_report
    from .report import of_all, of_known, training_pairs

    folder, criteria = Path(args.output_dir), read_criteria(args.rubric, args.constitution)
    judge: Any
    if args.judge_url:
        judge = ServedJudge(
            criteria,
            url=args.judge_url,
            model=args.judge_model,
            temperature=args.judge_temperature,
            max_tokens=args.judge_max_tokens,
            extra=entry_of(args.judge_extra) if args.judge_extra else None,
            api_key_env=args.api_key_env,
            timeout=args.timeout,
            retries=args.retries,
            max_concurrency=args.max_concurrency,
        )
    else:
        check_model("judge_model_name_or_path", args.judge_model_name_or_path, tokenizer=True)
        judge = LocalJudge(str(args.judge_model_name_or_path), criteria, args.batch_size, args.dtype, args.use_cpu)
    journal = Journal(folder / "verdicts.jsonl", judge.identity, ("key", "first", "vote"))
    if args.judge_url and journal.models:
        judge.served["model"] = next(iter(journal.models))
    left_out: dict[str, int] = {}
    rows = _rows(args, folder, left_out)
    if len(rows) < args.min_known:
        raise ValueError(
            f"there are {len(rows)} pairs, and people must label at least {args.min_known} (`min_known`): give more "
            "pairs"
        )
    report: dict[str, Any] = {
        "judge": args.judge_model or args.judge_model_name_or_path,
        "rubric": criteria.rubric_id,
        "constitution": criteria.constitution_id,
        "principles": list(criteria.principles),
        "rows": len(rows),
        "left_out": left_out,
        "gate": {"passed": False, "reasons": [], "min_agreement": args.min_agreement},
        "pairs": None,
        "settings": redacted(asdict(args)),
    }
    write_for_people(folder, rows_for_people(rows, args.known_share, args.min_known, args.seed))
    people, labels = people_choices(args.labels, rows) if args.labels else ({}, None)
    known, others = ([row for row in rows if (row["key"] in people) == is_known] for is_known in (True, False))
    if labels is not None:
        among = agreement_report(labels, args.seed)
        report["people"] = {name: among[name] for name in ("labels", "items", "alpha", "alpha_interval", "unknown")}
        report["people"]["annotators"] = len(among["annotators"])
    tested = {answer_key(row["prompt"], None) for row in known}  # a prompt is trained on or tested, not both
    kept = [row for row in others if answer_key(row["prompt"], None) not in tested]
    if len(kept) < len(others):
        left_out["of a prompt that people labelled"] = len(others) - len(kept)
    _say_cost(args, judge, journal, known or rows, kept if known else [])
    if args.only_cost:
        return report
    if len(known) < args.min_known:
        report["gate"]["reasons"] = [
            f"{len(known)} pairs have a label by people, and `min_known` is {args.min_known}: with fewer, kappa is "
            f"too uncertain (around 0.6 it is known to ±0.22 from 50 pairs, ±0.35 from 20). Have people label "
            f"{folder / 'people.jsonl'} (or label_studio.json, argilla.jsonl), and give their file as --labels"
        ]
        _withdraw(folder, report)
        write_report(folder, report)
        return report
    ask(judge.ask_all, journal, _questions(args, known), "Known pairs", args.judge_url)
    report |= of_known(journal, known, people, criteria.names, args)
    if report["gate"]["passed"]:
        ask(judge.ask_all, journal, _questions(args, kept), "Pairs", args.judge_url)
        try:
            report["pairs"] = training_pairs(folder, journal, known, kept, people, report, criteria, args)
        except ValueError as error:  # the verdicts were paid for: the report has them
            report["gate"] |= {"passed": False, "reasons": [str(error)]}
    if not report["gate"]["passed"]:
        _withdraw(folder, report)
    report["judged"] = of_all(journal, rows, criteria.names, args)
    write_report(folder, report)
    return report


def _rows(args: LabelArguments, folder: Path, left_out: dict[str, int]) -> list[dict[str, Any]]:
    """Return the pairs to judge, given or sampled, and write them as `queue.jsonl`."""
    from ...data import write_rows
    from ..evaluate.data import Sampling, load_prompts
    from .data import load_pairs, sample_pairs

    keep = args.keep_columns or []
    if args.pairs:
        rows = load_pairs(args.pairs, args.dataset_split, keep, left_out)
    else:
        for policy in args.policies or []:
            check_model("policies", policy, tokenizer=True)
        prompts = load_prompts(str(args.prompts), None, args.dataset_split, args.max_prompts)
        if missing := [name for name in keep if name not in prompts.column_names]:
            raise ValueError(f"`keep_columns`: the prompts have no column {', '.join(map(repr, missing))}")
        given: dict[str, Any] = {each.name: getattr(args, each.name, 1.0) for each in fields(Sampling)}
        rows = sample_pairs(prompts, args, Sampling(**given), folder / "answers", keep, left_out)
    write_rows(folder / "queue.jsonl", [{k: v for k, v in row.items() if k != "key"} for row in rows])
    return rows


def _withdraw(folder: Path, report: dict[str, Any]) -> None:
    """Remove the files of pairs that an earlier run wrote, when the judge passed the gate; keep the verdicts."""
    if old := sorted((folder / "pairs").glob("*.jsonl")):
        for file in old:
            file.unlink()
        report["gate"]["reasons"].append(
            f"{folder / 'pairs'} was removed: an earlier run wrote it when the gate passed"
        )


def _questions(args: LabelArguments, rows: list[dict[str, Any]]) -> list[Any]:
    """Return all questions about these pairs: each pair in both orders of its answers, `votes` times in each."""
    from .judges import Question

    return [
        Question(row["key"], row["prompt"], (row["response_a"], row["response_b"]), first, vote)
        for row in rows
        for vote in range(args.votes)
        for first in "ab"
    ]


def _say_cost(args: LabelArguments, judge: Any, journal: Any, first: list[dict], then: list[dict]) -> None:
    """Print the cost of the questions that have no answer yet, in calls, tokens and money: of `first`, then `then`."""
    from .figures import money

    for rows, what in ((first, "pairs"), (then, "further pairs, if people agree with the judge")):
        if not rows:
            continue
        questions = _questions(args, rows)
        missing = journal.missing(questions)
        tokens = sum(len(str(judge.asked(question))) for question in missing) // 4
        out = len(missing) * args.judge_max_tokens if args.judge_url else 0
        done = f" ({len(questions) - len(missing):,} are answered)" if len(missing) < len(questions) else ""
        said = f"Cost of {len(rows):,} {what}: {len(missing):,} calls{done}, about {tokens:,} tokens in"
        if args.judge_url:
            said += f", up to {out:,} out, more where the judge is asked again"
            prices = (args.price_input, args.price_output)
            if None in prices:
                said += "; for a price give --price_input and --price_output"
            else:
                said += f"; about {money(tokens, out, *prices):,.2f} at these prices"
        print(said, flush=True)


def main(arguments: list[str] | None = None) -> None:
    quiet()
    parser = StrictTrlParser(LabelArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    late_bars()
    with parser.one_line_errors(ValueError, OSError, ImportError, RuntimeError):
        check_output_dir(args.output_dir, "false")
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        with Hold(args.output_dir):
            report = run(args)
    if args.only_cost:
        return
    from .report import sentences

    for sentence in sentences(report):
        print(sentence)
    print(f"Report: {Path(args.output_dir) / 'label.html'}")
    if not report["gate"]["passed"]:
        for reason in report["gate"]["reasons"]:
            print(f"{parser.prog}: refused: {' '.join(reason.split())}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
