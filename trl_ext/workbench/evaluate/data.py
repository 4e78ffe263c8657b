"""Have policies answer the same prompts, with one policy in memory at a time, and score the answers."""

import gc
import hashlib
import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ...data import check_texts, content_of, load_dataset_split, load_trained_prompts, prompt_hashes, write_rows
from ...models import (
    answer_texts,
    completion_logprobs,
    eos_token_ids,
    load_model,
    load_tokenizer,
    path_identity,
    prompt_token_ids,
    sample,
    vocabulary_of,
)
from ...rewards import Member
from ...runs import read_jsonl
from .figures import margins

# The keys of a line of answers. Columns of the prompts' data set with one of these names are left out
OWN = ("prompt", "completion", "prompt_ids", "completion_ids", "finished", "logprob", "made_by")
_AT_ONCE = 4  # answers whose (B, T, V) logits are in memory together
_NAMED = 5  # rows that a sentence names


@dataclass(frozen=True)
class Sampling:
    """Hold the settings for sampling answers from each policy."""

    max_completion_length: int
    temperature: float
    top_p: float
    batch_size: int
    seed: int
    dtype: str
    use_cpu: bool

    def load(self, name: str) -> Any:
        return load_model(name, "cpu" if self.use_cpu else None, dtype=self.dtype)


def load_prompts(name: str, config: str | None, split: str | None, most: int | None) -> Dataset:
    """
    Load a data set's rows with a `prompt`, text or messages. Their other columns are kept: rewards may read them.

    Args:
        name: file, folder or hub name.
        config: configuration of a hub data set.
        split: split to load; None is `train` for a file, else `test`.
        most: rows to take from the beginning; None takes all.

    Raises:
        ValueError: there are no rows, or a prompt is missing.
    """
    split = split or ("train" if Path(name).is_file() else "test")
    dataset = load_dataset_split(name, split, config=config)
    dataset = dataset.select(range(min(len(dataset), most or len(dataset))))
    if not len(dataset):
        raise ValueError(f"`prompts` {name}, split {split!r}, has no rows: give one or more prompts")
    check_texts(dataset, ("prompt",), f"`prompts` {name}", may_be_empty=False)
    return dataset


def check_held_out(policies: dict[str, str], rows: Dataset) -> list[str]:
    """
    Refuse prompts that a policy was trained on; return a sentence for each policy whose training prompts are unknown.

    Raises:
        ValueError: a policy was trained on some of the prompts; the message says on how many, and on which rows.
    """
    hashes, seen, unknown = prompt_hashes(rows), [], []
    for name, policy in policies.items():
        if (trained := load_trained_prompts(policy)) is None:
            unknown.append(
                f"It is not known whether {name} was trained on some of these prompts: it has no record of its "
                "training prompts (`trained_prompts.npy`)."
            )
        elif len(places := np.flatnonzero(np.isin(hashes, trained))):
            shown = ", ".join(map(str, places[:_NAMED])) + (", …" if len(places) > _NAMED else "")
            first = rows[int(places[0])]["prompt"]
            text = first if isinstance(first, str) else content_of(first[-1])
            first = repr(textwrap.shorten(text, 80, placeholder=" …"))
            seen.append(f"{name} was trained on {len(places)} of {len(rows)} prompts (rows {shown}; {first})")
    if seen:
        raise ValueError(
            f"{'; '.join(seen)}: leave them out. `trl-ext prompts` writes a copy of a set without the prompts of "
            "another set"
        )
    return unknown


def answers_of(policy: str, rows: Dataset, sampling: Sampling, path: Path) -> tuple[list[dict[str, Any]], bool]:
    """
    Return a policy's answers to prompts, from a file or else sampled.

    If `path` has answers of the same weights to the same prompts with the same sampling, these are returned. Else all
    prompts are answered anew, and all answers are written to `path` at the end.

    Args:
        policy: folder or hub name of the policy.
        rows: data set with the column `prompt`.
        sampling: how answers are sampled.
        path: file of the answers, in JSON lines.

    Returns:
        The answers, and whether the file had them already. An answer has these keys:

        - `prompt`, `completion`: as texts or messages.
        - `prompt_ids`, `completion_ids`: as token ids.
        - `finished`: whether the answer ended by EOS.
        - `logprob`: log π(y | x) in nats, at the temperature of the sampling, or at 1 for greedy answers.
        - `made_by`: hash of the weights, the prompts and the sampling.

    Raises:
        ValueError: the longest prompt and `max_completion_length` together do not fit into the policy's context.
    """
    prompts = rows["prompt"][:]
    asked = [path_identity(policy), asdict(sampling), prompts]
    made_by = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    if path.is_file():
        found = list(read_jsonl(path))
        if len(found) == len(rows) and all(row.get("made_by") == made_by for row in found):
            return [{key: row[key] for key in OWN} for row in found], True
    tokenizer = load_tokenizer(policy)
    prompt_ids = prompt_token_ids(tokenizer, prompts)
    model = sampling.load(policy)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and (longest := max(map(len, prompt_ids))) + sampling.max_completion_length > context:
        raise ValueError(
            f"{policy} has a context of {context} tokens, and the longest prompt has {longest}: lower "
            f"`max_completion_length` {sampling.max_completion_length}, or shorten the prompts"
        )
    ends = eos_token_ids(model, tokenizer)
    drawn = sample(
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
    texts = answer_texts(tokenizer, drawn, ends)
    found = []
    for prompt, text, asked_ids, ids, logprob in zip(prompts, texts, prompt_ids, drawn, logprobs, strict=True):
        completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        values = (prompt, completion, asked_ids, ids, ids[-1] in ends, logprob, made_by)
        found.append(dict(zip(OWN, values, strict=True)))
    write_rows(path, found)
    return found, False


def kl_of(reference: str, answered: dict[str, tuple[str, list[dict]]], sampling: Sampling) -> dict[str, Any]:
    """
    Estimate each policy's KL to the reference from the policy's own answers, in nats per answer.

    An answer y to x gives log π(y | x) − log π_ref(y | x). This is the estimator k1 of KL(π ‖ π_ref), summed over the
    answer's tokens. It is unbiased if `top_p` is 1.

    Args:
        reference: folder or hub name of the reference.
        answered: name of a policy → its folder or hub name, and its answers.
        sampling: how the answers were sampled, and how the reference is to be loaded.

    Returns:
        Name of a policy → an estimate for each answer; None if policy and reference have different vocabularies.
    """
    model, tokens = sampling.load(reference), load_tokenizer(reference).get_vocab()
    found: dict[str, Any] = {}
    for name, (policy, rows) in answered.items():
        highest = max(token for row in rows for token in (*row["prompt_ids"], *row["completion_ids"]))
        if load_tokenizer(policy).get_vocab() != tokens or highest >= vocabulary_of(model):
            found[name] = None
            continue
        prompts, completions = ([row[key] for row in rows] for key in ("prompt_ids", "completion_ids"))
        logprobs = _logprobs(model, prompts, completions, sampling.temperature)
        found[name] = [row["logprob"] - other for row, other in zip(rows, logprobs, strict=True)]
    return found


def _logprobs(model: Any, prompts: Sequence[Any], answers: Sequence[Any], temperature: float) -> list[float]:
    found: list[float] = []
    for start in range(0, len(answers), _AT_ONCE):
        batch = slice(start, start + _AT_ONCE)
        found += completion_logprobs(model, prompts[batch], answers[batch], temperature or 1.0)[0].sum(1).tolist()
    return found


def free() -> None:
    """Free the memory of models that are no longer referenced, on the GPU, too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def scores(reward: Callable, answers: Sequence[dict[str, Any]], columns: dict[str, list]) -> list[float | None]:
    """Return a reward's score of each answer, None where it gives none; `columns` are passed on to the reward."""
    given = {name: [row[name] for row in answers] for name in ("completion_ids", "prompt_ids", "finished")}
    prompts, completions = ([row[name] for row in answers] for name in ("prompt", "completion"))
    return Member(reward)(prompts=prompts, completions=completions, **{**columns, **given})


def judged(
    judge: Callable, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], columns: dict[str, list]
) -> list[float | None]:
    """
    Return for each prompt by how much a judge prefers our answer to the baseline's.

    The value is above 0 if the judge prefers ours, below 0 if it prefers the baseline's, and None if a score is
    missing. Both orders of the two answers are asked, so that a preference for a position cancels:

    - A [`~trl_ext.rewards.JudgeReward`] with `compare` asks both orders by itself. The value is its score of our
      answer minus the middle of its scale.
    - Another judge is called twice: for our answer with the baseline's in the column `baseline`, and for the
      baseline's with ours in that column. The value is the first score minus the second.

    Args:
        judge: reward function.
        ours, theirs: our answers and the baseline's to the same prompts.
        columns: further columns of the prompts.
    """
    one, other = ([row["completion"] for row in answers] for answers in (ours, theirs))
    compare = getattr(judge, "compare", None)
    first = scores(judge, ours, {**columns, compare or "baseline": other})
    if compare:
        second: list[float | None] = [sum(judge.scale) / 2] * len(first)  # type: ignore[attr-defined]
    else:
        second = scores(judge, theirs, {**columns, "baseline": one})
    return margins(first, second)
