"""Label pairs of answers by a judge, a language model, that is first compared with people's labels.

    trl-ext label --pairs PAIRS --rubric rubric.yaml --judge_url URL --judge_model NAME --output_dir OUT
    trl-ext label …the same… --labels labelled.json

PAIRS has `prompt`, `response_a`, `response_b`; with --prompts and --policies answers are sampled and paired. The judge
is a server with OpenAI's API, such as vLLM (--judge_url), or a local model (--judge_model_name_or_path). Each call
writes rows for people to label. The judge is asked about the pairs that people labelled as soon as these are
`min_known` or more. If the judge agrees with people (Cohen's kappa of `min_agreement` or more), it labels the pairs of
all other prompts, and pairs/train.jsonl is written. If no pair is written, the exit status is 1. The same command
resumes where it was interrupted.
"""

import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...cli.parser import entry_of, parse_and_run
from ...runs import check_settings, redacted, refuse, setting

OWN = {
    *"item key prompt response_a response_b chosen rejected confidence share votes judge rubric".split(),
    *"policy_a policy_b".split(),
}


@dataclass(kw_only=True)
class AskingArguments:
    """Declare the arguments that `trl-ext label` and `trl-ext constitution` share, such as how to ask a model."""

    output_dir: str = field(metadata={"help": "Folder for all answers, the page and the rows."})
    dataset_split: str = setting("train", "Split of the data, or a part of one as `train[:100]`.")
    api_key_env: str | None = setting(None, "Environment variable that holds the server's key.")
    timeout: float = setting(120.0, "Longest time for one request, in seconds.", range="> 0 and finite")
    retries: int = setting(8, "How often to retry a request that failed or was rate-limited.", range=">= 0")
    max_concurrency: int = setting(8, "Number of requests that are sent at once.", range=">= 1")
    batch_size: int = setting(16, "Number of sequences in a batch of a local model.", range=">= 1")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of a local model's weights; `auto` keeps the saved one."
    )
    use_cpu: bool = setting(False, "Do not use a GPU, even if there is one.")
    seed: int = setting(0, "Seed of all sampling.")

    def served(self, url: str, model: str | None, extra: str | None) -> dict[str, Any]:
        """
        Return arguments of [`~trl_ext.rewards.JudgeReward`] for a server at `url`, without its rubric and sampling.

        `model` is the model's name there; `extra` is YAML text with more keys of the request's body, or None.
        """
        names = ("api_key_env", "timeout", "retries", "max_concurrency")
        given = {"url": url, "model": model, "extra": entry_of(extra) if extra else None}
        return given | {name: getattr(self, name) for name in names}

    @property
    def local(self) -> dict[str, Any]:
        """Return the arguments `batch_size`, `dtype` and `use_cpu` of [`LocalModel`]."""
        return {name: getattr(self, name) for name in ("batch_size", "dtype", "use_cpu")}


@dataclass(kw_only=True)
class LabelArguments(AskingArguments):
    """Declare the arguments of `trl-ext label`: the pairs, the judge, its rubric, and people's labels."""

    rubric: str = field(
        metadata={"help": "YAML file with `version` and `rubric`, which says what makes an answer good."}
    )
    pairs: str | None = setting(None, "Pairs, a file or hub name: `prompt`, `response_a`, `response_b`, maybe `item`.")
    prompts: str | None = setting(None, "Prompts for `policies` to answer, a file or hub name, in place of `pairs`.")
    keep_columns: list[str] | None = setting(None, "Further columns to keep in the training pairs.")
    policies: list[str] | None = setting(None, "Models that answer the prompts: folders or hub names.")
    temperature: float = setting(1.0, "Temperature at which policies answer.", range=">= 0")
    num_samples: int = setting(2, "Number of answers of each policy to a prompt.", range=">= 1")
    max_completion_length: int = setting(256, "Tokens after which an answer is cut off.", range=">= 1")
    judge_url: str | None = setting(None, "Address of a judge with OpenAI's API, such as http://127.0.0.1:8000/v1.")
    judge_model: str | None = setting(None, "Name of the judge in that API.")
    judge_temperature: float = setting(0.0, "Temperature of the judge.", range=">= 0")
    judge_max_tokens: int = setting(
        256, "Longest message of the judge in tokens, its reasoning included.", range=">= 1"
    )
    judge_extra: str | None = setting(
        None, "More keys of the request, in YAML; null removes one: '{max_tokens: null, max_completion_tokens: 256}'."
    )
    votes: int = setting(1, "How often the judge is asked about a pair in each order of its answers.", range=">= 1")
    judge_model_name_or_path: str | None = setting(
        None,
        "Local model as judge, in place of a server: a folder or hub name. Its log-probs of A and B give the verdict.",
    )
    labels: list[str] | None = setting(
        None, "What people chose: Label Studio's or Argilla's export, or a file with `item`, `choice`, `annotator`."
    )
    known_share: float = setting(0.1, "Share of the pairs that people are to label.", range="in (0, 1]")
    min_known: int = setting(50, "Least number of pairs with people's labels.", range=">= 20")
    min_agreement: float = setting(
        0.6, "Least Cohen's kappa of judge and people. Below it no pair is written.", range="in [0, 1]"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        own = {*(self.keep_columns or ())} & OWN
        refuse(
            (
                (self.pairs is None) == (self.prompts is None) or (self.prompts is None) == bool(self.policies),
                "give either `pairs`, or `prompts` and `policies`",
            ),
            (
                (self.judge_url is None) == (self.judge_model_name_or_path is None)
                or (self.judge_url is None) != (self.judge_model is None),
                "give one judge: `judge_url` with `judge_model`, or `judge_model_name_or_path`",
            ),
            (
                self.votes > 1 and (self.judge_temperature == 0 or self.judge_url is None),
                f"with `judge_temperature` 0, or a local judge, all `votes` ({self.votes}) are the same: raise the "
                "temperature of a judge behind `judge_url`, or set `votes` to 1",
            ),
            (own, f"`keep_columns` names {min(own, default='')!r}, a column that the pairs get anyway: rename yours"),
        )


def run(args: LabelArguments) -> dict[str, Any]:
    """
    Have the judge label the pairs that people labelled and, if it agrees with people, the pairs of all other prompts.

    If people labelled fewer than `min_known` pairs, the judge is not asked, and no training pairs are written.

    Returns:
        The report, a dict that is also written as `label.json` and shown by `label.html`. Its entry `gate` has
        `passed`, whether training pairs were written, and `reasons`, a list of sentences on why not.
    """
    import numpy as np

    from ..labels import krippendorff_alpha
    from ..labels.labelling import CHOICES, answer_key
    from .data import most, people_choices, write_for_people
    from .judges import Journal, LocalJudge, Question, ServedJudge, read_criteria
    from .report import of_all, of_known, prompt_groups, training_pairs, write_report

    folder = Path(args.output_dir)
    rubric, rubric_id = read_criteria(args.rubric, "rubric", str)
    judge: Any
    if args.judge_url:
        settings = args.served(args.judge_url, args.judge_model, args.judge_extra)
        settings |= {"temperature": args.judge_temperature, "max_tokens": args.judge_max_tokens}
        judge = ServedJudge(rubric, rubric_id, **settings)
    else:
        judge = LocalJudge(str(args.judge_model_name_or_path), rubric, rubric_id, **args.local)
    journal = Journal(folder / "verdicts.jsonl", judge.identity, ("key", "first", "vote"))

    def questions(rows: list[dict[str, Any]]) -> list[Question]:
        """Return all questions about these pairs: for each pair, both orders of its answers, `votes` times each."""
        return [
            Question(row["key"], row["prompt"], (row["response_a"], row["response_b"]), first, vote)
            for row in rows
            for vote in range(args.votes)
            for first in "ab"
        ]

    def votes_of(row: dict[str, Any]) -> list[dict[str, Any]]:
        return [journal.rows[each.name] for each in questions([row]) if each.name in journal.rows]

    left_out: Counter[str] = Counter()
    rows = _rows(args, folder, left_out)
    write_for_people(folder, rows, max(round(args.known_share * len(rows)), args.min_known), args.seed)
    counts = people_choices(args.labels or (), rows)
    people = {key: most(votes) for key, votes in counts.items()}
    known = [row for row in rows if row["key"] in people]
    tested = {answer_key(row["prompt"], None) for row in known}  # a prompt is trained on or tested, not both
    kept = [row for row in rows if answer_key(row["prompt"], None) not in tested]
    if lost := len(rows) - len(known) - len(kept):
        left_out["of a prompt that people labelled"] = lost
    given = np.array([[counts[row["key"]][choice] for choice in CHOICES] for row in known]).reshape(-1, 3)
    alpha, ends = krippendorff_alpha(given, prompt_groups(known), seed=args.seed)
    report: dict[str, Any] = {
        "judge": args.judge_model or args.judge_model_name_or_path,
        "rubric": rubric_id,
        "rows": len(rows),
        "left_out": left_out,
        "people": {"labels": int(given.sum()), "items": len(known), "alpha": alpha, "alpha_interval": ends},
        "gate": {"passed": False, "reasons": [], "min_agreement": args.min_agreement},
        "pairs": None,
        "judged": None,
        "settings": redacted(asdict(args)),
    }
    missing = [question for question in questions(known + kept) if question.name not in journal.rows]
    tokens = sum(len(str(judge.asked(question))) for question in missing) // 4
    out = f", up to {len(missing) * args.judge_max_tokens:,} out" * bool(args.judge_url)
    pairs = f"{len(known):,} that people labelled, {len(kept):,} others"
    print(f"Cost of the pairs ({pairs}): {len(missing):,} calls, about {tokens:,} tokens in{out}", flush=True)
    gate = report["gate"]
    if len(known) < args.min_known:
        gate["reasons"].append(
            f"people labelled {len(known)} of the pairs, fewer than `min_known` ({args.min_known}), so kappa is too "
            "uncertain (a kappa of 0.6 has an error of ±0.22 with 50 pairs, ±0.35 with 20). Have people label "
            f"{folder / 'people.jsonl'} (or label_studio.json, argilla.jsonl), and pass their file as --labels"
        )
    else:
        journal.ask(judge, questions(known), "Known pairs")
        report |= of_known(known, people, votes_of, args)
        gate = report["gate"]
        if gate["passed"]:
            journal.ask(judge, questions(kept), "Pairs")
            report["pairs"] = training_pairs(known, kept, people, votes_of, report, args)
            if not report["pairs"]["train"]:
                gate |= {
                    "passed": False,
                    "reasons": [
                        f"no pair is left to train on, of {len(kept)} whose prompts people did not label: give more"
                    ],
                }
        judged = [votes for votes in map(votes_of, rows) if len(votes) == 2 * args.votes]
        report["judged"] = of_all(judged)
    if not gate["passed"]:  # what an earlier run wrote must not be trained on
        for file in (folder / "pairs").glob("*.jsonl"):
            file.unlink()
            gate["reasons"].append(f"{file} was removed: an earlier run wrote it, when the judge agreed with people")
    write_report(folder, report)
    return report


def _rows(args: LabelArguments, folder: Path, left_out: Counter[str]) -> list[dict[str, Any]]:
    """
    Load or sample the pairs to judge, write them as `queue.jsonl`, and return them, see [`load_pairs`].

    `left_out` counts the rows that are left out, by reason; this function adds to it.
    """
    from ...data import load_dataset_split, write_rows
    from .data import load_pairs, sample_pairs

    keep = args.keep_columns or []
    if args.pairs:
        rows = load_pairs(args.pairs, args.dataset_split, keep, left_out)
    else:
        prompts = load_dataset_split(str(args.prompts), args.dataset_split, columns=("prompt", *keep))
        rows = sample_pairs(prompts, args, folder / "answers", left_out)
    write_rows(folder / "queue.jsonl", [{k: v for k, v in row.items() if k != "key"} for row in rows])
    return rows


def main(arguments: list[str] | None = None) -> None:
    args, report = parse_and_run(LabelArguments, __doc__, run, arguments)
    from .report import sentences

    for sentence in sentences(report):
        print(sentence)
    print(f"Report: {Path(args.output_dir) / 'label.html'}")
    if not report["gate"]["passed"]:
        for reason in report["gate"]["reasons"]:
            print(f"trl-ext label: refused: {reason}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
