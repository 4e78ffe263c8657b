"""Have policies answer the same prompts, one policy in memory at a time; score the answers, and compare them."""

import gc
import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ... import models
from ...data import check_texts, load_dataset_split, load_trained_prompts, prompt_hashes, write_rows
from ...evaluation import accuracy_interval
from ...rewards import Member, repetition_watch
from ...runs import read_jsonl

# The keys of a line of answers. Columns of the prompts' dataset with one of these names are left out
OWN = ("prompt", "completion", "prompt_ids", "completion_ids", "finished", "logprob", "made_by")
_AT_ONCE = 4  # answers whose (B, T, V) logits are in memory together


@dataclass(frozen=True)
class Sampling:
    """Hold the settings for sampling answers from each policy, named as in the arguments of `trl-ext evaluate`."""

    max_completion_length: int
    temperature: float
    top_p: float
    batch_size: int
    seed: int
    dtype: str
    use_cpu: bool

    def load(self, name: str) -> Any:
        return models.load_model(name, "cpu" if self.use_cpu else None, dtype=self.dtype)


def load_prompts(name: str, config: str | None, split: str | None, most: int | None) -> Dataset:
    """
    Load a dataset's rows with a `prompt`, text or messages. Other columns are kept, since rewards may read them.

    Args:
        name: file, folder or hub name.
        config: configuration of a hub dataset.
        split: split to load; None is `train` for a file, else `test`.
        most: number of rows to take from the beginning; None takes all.

    Raises:
        ValueError: a prompt is missing or empty.
    """
    split = split or ("train" if Path(name).is_file() else "test")
    dataset = load_dataset_split(name, split, config=config)
    dataset = dataset.select(range(min(len(dataset), most or len(dataset))))
    check_texts(dataset, ("prompt",), f"`prompts` {name}", may_be_empty=False)
    return dataset


def check_held_out(policies: dict[str, str], rows: Dataset) -> list[str]:
    """
    Check that no policy was trained on a prompt of `rows`.

    Args:
        policies: maps each policy's name to its path.
        rows: dataset with the prompts.

    Returns:
        A sentence for each policy whose training prompts are unknown.

    Raises:
        ValueError: a policy was trained on some of the prompts.
    """
    hashes = prompt_hashes(rows)
    seen = []
    unknown = []
    for name, policy in policies.items():
        if (trained := load_trained_prompts(policy)) is None:
            unknown.append(
                f"It is not known whether {name} was trained on some of these prompts: it has no record of its "
                "training prompts (`trained_prompts.npy`)."
            )
        elif len(places := np.flatnonzero(np.isin(hashes, trained))):
            seen.append(f"{name} was trained on {len(places)} of {len(rows)} prompts (row {places[0]} is the first)")
    if seen:
        raise ValueError(
            f"{'; '.join(seen)}: evaluate on other prompts, or leave these out: `trl-ext prompts --sets "
            "prompts=PROMPTS train=TRAINING_DATA --held_out train --output_dir FOLDER` writes a copy without them"
        )
    return unknown


def answers_of(policy: str, rows: Dataset, sampling: Sampling, path: Path) -> tuple[list[dict[str, Any]], bool]:
    """
    Return a policy's answers to prompts, from a file if it has them, else sampled.

    If `path` has answers of the same weights to the same prompts with the same sampling, these are returned. Else all
    prompts are answered again, and all answers are written to `path` at the end.

    Args:
        policy: folder or hub name of the policy.
        rows: dataset with the column `prompt`.
        sampling: how answers are sampled.
        path: file of the answers, in JSON lines.

    Returns:
        The answers, and whether they were read from the file. An answer has these keys:

        - `prompt`, `completion`: as texts or messages.
        - `prompt_ids`, `completion_ids`: as token ids.
        - `finished`: whether the answer ended by EOS.
        - `logprob`: log π(y | x) in nats, at the temperature of the sampling, or at 1 for greedy answers.
        - `made_by`: hash of the weights, the prompts and the sampling.
    """
    prompts = rows["prompt"][:]
    asked = [models.path_identity(policy), asdict(sampling), prompts]
    made_by = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    if path.is_file():
        found = list(read_jsonl(path))
        if len(found) == len(rows) and all(row.get("made_by") == made_by for row in found):
            return [{key: row[key] for key in OWN} for row in found], True
    tokenizer = models.load_tokenizer(policy)
    prompt_ids = models.prompt_token_ids(tokenizer, prompts)
    model = sampling.load(policy)
    ends = models.eos_token_ids(model, tokenizer)
    drawn = models.sample(
        model,
        prompt_ids,
        ends,
        max_new_tokens=sampling.max_completion_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        batch_size=sampling.batch_size,
        seed=sampling.seed,
    )
    logprobs = _logprobs(model, prompt_ids, drawn, sampling.temperature)
    answered = models.answer_rows(tokenizer, prompts, prompt_ids, drawn, ends)
    found = [{**row, "logprob": each, "made_by": made_by} for row, each in zip(answered, logprobs, strict=True)]
    write_rows(path, found)
    return found, False


def kl_of(reference: str, answered: dict[str, tuple[str, list[dict]]], sampling: Sampling) -> dict[str, Any]:
    """
    Estimate each policy's KL to the reference from the policy's own answers, in nats per answer.

    An answer y to x gives log π(y | x) − log π_ref(y | x). This is the estimator k1 of KL(π ‖ π_ref), summed over the
    answer's tokens. It is unbiased if `top_p` is 1 and `temperature` is above 0.

    Args:
        reference: folder or hub name of the reference.
        answered: maps each policy's name to a tuple: its folder or hub name, and its answers as [`answers_of`]
            returns them.
        sampling: how the answers were sampled, and how the reference is to be loaded.

    Returns:
        A dict from each policy's name to a list with an estimate for each answer, in nats; None in place of the list
        if policy and reference have different vocabularies.
    """
    model = sampling.load(reference)
    tokens = models.load_tokenizer(reference).get_vocab()
    found: dict[str, Any] = {}
    for name, (policy, rows) in answered.items():
        highest = max(token for row in rows for token in (*row["prompt_ids"], *row["completion_ids"]))
        if models.load_tokenizer(policy).get_vocab() != tokens or highest >= models.vocabulary_of(model):
            found[name] = None
            continue
        prompts = [row["prompt_ids"] for row in rows]
        completions = [row["completion_ids"] for row in rows]
        logprobs = _logprobs(model, prompts, completions, sampling.temperature)
        found[name] = [row["logprob"] - other for row, other in zip(rows, logprobs, strict=True)]
    return found


def _logprobs(model: Any, prompts: Sequence[Any], answers: Sequence[Any], temperature: float) -> list[float]:
    found: list[float] = []
    for start in range(0, len(answers), _AT_ONCE):
        batch = slice(start, start + _AT_ONCE)
        logprobs, _ = models.completion_logprobs(model, prompts[batch], answers[batch], temperature or 1.0)
        found += logprobs.sum(1).tolist()
    return found


def free() -> None:
    """Free the memory of models that are no longer referenced, including GPU memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def scores(reward: Callable, answers: Sequence[dict[str, Any]], columns: dict[str, list]) -> list[float | None]:
    """
    Return a reward's score of each answer, or None where it gives none.

    Args:
        reward: reward function with TRL's signature.
        answers: answers as [`answers_of`] returns them.
        columns: further columns of the prompts, by name, which the reward is given, too.
    """
    names = {"prompts": "prompt", "completions": "completion"} | {name: name for name in OWN[2:5]}
    given = {name: [row[key] for row in answers] for name, key in names.items()}
    return Member(reward)(**{**columns, **given})


def judged(
    judge: Callable, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], columns: dict[str, list]
) -> list[float | None]:
    """
    Return for each prompt by how much a judge prefers the policy's answer (ours) to the baseline's (theirs).

    The value is above 0 if the judge prefers ours, below 0 if it prefers the baseline's, and None if a score is
    missing. The judge is asked about both orders of the two answers, so that a preference for a position cancels:

    - A [`~trl_ext.rewards.JudgeReward`] with `compare` asks both orders by itself. The value is its score of our
      answer minus the middle of its scale.
    - Another judge is called twice: for our answer with the baseline's in the column `baseline`, and for the
      baseline's with ours in that column. The value is the first score minus the second.

    Args:
        judge: reward function.
        ours, theirs: the policy's and the baseline's answers to the same prompts, as [`answers_of`] returns them.
        columns: further columns of the prompts, by name.
    """
    one = [row["completion"] for row in ours]
    other = [row["completion"] for row in theirs]
    compare = getattr(judge, "compare", None)
    first = scores(judge, ours, {**columns, compare or "baseline": other})
    if compare:
        second: list[float | None] = [sum(judge.scale) / 2] * len(first)  # type: ignore[attr-defined]
    else:
        second = scores(judge, theirs, {**columns, "baseline": one})
    return margins(first, second)


# ---- Figures ----


def mean_of(values: Sequence[float | None]) -> dict[str, Any]:
    """
    Return the mean of the values that are not None, and its standard error s/√n with s² = Σ(x − mean)²/(n − 1).

    Args:
        values: a value for each answer; None where there is none.

    Returns:
        A dict with `mean` (None without values), `standard_error` (None for fewer than two values), and `count`, the
        number of values.
    """
    known = torch.tensor([value for value in values if value is not None], dtype=torch.double)
    error = (known.std() / len(known) ** 0.5).item() if len(known) > 1 else None
    mean = known.mean().item() if len(known) else None
    return {"mean": mean, "standard_error": error, "count": len(known)}


def win_rate(margins: Sequence[float | None], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """
    Return the share of prompts on which a policy's answer beats the baseline's; a tie counts one half.

    The 95 % interval is a percentile bootstrap over prompts (Efron 1979), which is paired, since a margin compares two
    answers to one prompt. With fewer than 30 prompts a bootstrap is too uncertain: the interval is Wilson's (1927).

    Args:
        margins: (N,) for each prompt, the policy's score minus the baseline's; None leaves the prompt out.
        prompts: (N,) names of the prompts; rows with the same name are resampled together.

    Returns:
        A dict with `win_rate` (None without margins), its `interval`, [low, high] (None for fewer than two prompts),
        and the counts `wins`, `ties` and `losses`.
    """
    known = [(margin, prompt) for margin, prompt in zip(margins, prompts, strict=True) if margin is not None]
    values = torch.tensor([margin for margin, _ in known], dtype=torch.double)
    wins, ties, losses = (int(found.sum()) for found in (values > 0, values == 0, values < 0))
    named = [prompt for _, prompt in known]
    return {
        "win_rate": (wins + ties / 2) / len(known) if known else None,
        "interval": list(accuracy_interval(values, named)) if len(set(named)) > 1 else None,
        "wins": wins,
        "ties": ties,
        "losses": losses,
    }


def margins(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    """Return each score in `ours` minus the score at the same index in `theirs`; None where either is None."""
    pairs = zip(ours, theirs, strict=True)
    return [None if mine is None or other is None else mine - other for mine, other in pairs]


def policy_figures(
    answers: Sequence[Mapping[str, Any]],
    scored: Mapping[str, Sequence[float | None]],
    kl: Sequence[float] | None,
) -> dict[str, Any]:
    """
    Return a policy's figures that do not depend on the baseline.

    Args:
        answers: (N,) with `prompt`, `completion`, `completion_ids` and `finished`.
        scored: maps each reward's name to its (N,) scores.
        kl: (N,) log π(y | x) − log π_ref(y | x); None if the KL is not known.

    Returns:
        - `rewards`: maps each reward's name to the mean score, as [`mean_of`] returns it.
        - `kl`, `length`: mean KL and mean tokens of an answer, as [`mean_of`] returns them; `kl` may be None.
        - `cut_off`: share of the answers that did not end by EOS.
        - `distinct_3`: number of different 3-grams of words as a share of all answers' 3-grams; None if no answer has
          one.
        - `repeated`: share of an answer's 3-grams that occurred before in it, mean over the answers.
    """
    repetition: dict[str, Any] = {}
    repetition_watch(**{f"{key}s": [row[key] for row in answers] for key in ("prompt", "completion")},
                     log_metric=repetition.__setitem__)  # fmt: skip
    return {
        "rewards": {reward: mean_of(values) for reward, values in scored.items()},
        "kl": None if kl is None else mean_of(kl),
        "length": mean_of([float(len(row["completion_ids"])) for row in answers]),
        "cut_off": sum(not row["finished"] for row in answers) / len(answers),
        "distinct_3": repetition.get("repetition/distinct_3"),
        "repeated": repetition.get("repetition/repeated"),
    }
