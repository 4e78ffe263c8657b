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

from ...data import check_texts, load_dataset_split, load_trained_prompts, prompt_hashes, write_rows
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

# What a line of answers has; a column of the prompts with such a name is left out
OWN = ("prompt", "completion", "prompt_ids", "completion_ids", "finished", "logprob", "made_by")
_AT_ONCE = 4  # answers whose (B, T, V) logits are in memory together
_NAMED = 5  # rows that a sentence names


@dataclass(frozen=True)
class Sampling:
    """Hold how answers are sampled, which is the same for all policies."""

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
    """Load the prompts, text or messages, with the other columns of their rows, which rewards may ask for."""
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
        ValueError: a policy was trained on some; the message has their number and rows.
    """
    hashes, seen, unknown = prompt_hashes(rows), [], []
    for name, policy in policies.items():
        if (trained := load_trained_prompts(policy)) is None:
            unknown.append(
                f"Not checked: {name} has no record of the prompts that it was trained on (`trained_prompts.npy`), so "
                "these may be among them."
            )
        elif len(places := np.flatnonzero(np.isin(hashes, trained))):
            shown = ", ".join(map(str, places[:_NAMED])) + (", …" if len(places) > _NAMED else "")
            first = rows[int(places[0])]["prompt"]
            text = first if isinstance(first, str) else first[-1]["content"]
            first = repr(textwrap.shorten(text, 80, placeholder=" …"))
            seen.append(f"{len(places)} of {len(rows)} prompts were trained on by {name} (rows {shown}; {first})")
    if seen:
        raise ValueError(
            f"{'; '.join(seen)}: leave them out. `trl-ext prompts` writes copies of a set without what another has"
        )
    return unknown


def answers_of(policy: str, rows: Dataset, sampling: Sampling, path: Path) -> tuple[list[dict[str, Any]], bool]:
    """
    Return a policy's answers, and whether they were there already; new ones are written as JSON lines, all or none.

    A line has the prompt, the answer, their token ids, `finished`, whether it ended by EOS, and `logprob`,
    log π(y | x) in nats at the temperature of the sampling, 1 for greedy answers. Answers that a file has are kept if
    the policy's weights, the prompts and the sampling are the same; else all are made anew.

    Raises:
        ValueError: a prompt leaves no room for an answer.
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
            f"{policy} has a context of {context} tokens, and the longest prompt {longest}: lower "
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
    Estimate each policy's KL to the reference by its own answers: log π(y | x) − log π_ref(y | x), nats per answer.

    Summed over the answer's tokens this is the estimator k1 of KL(π ‖ π_ref), unbiased where `top_p` is 1.

    Args:
        reference: folder or hub name.
        answered: name of each policy → its folder or hub name, and its answers.
        sampling: how the answers were sampled, which also says how the reference is loaded.

    Returns:
        Name → a value for each answer; None in place of the values if the reference does not read the same tokens.
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
    """Free the memory of a model that is no longer needed, for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def scores(reward: Callable, answers: Sequence[dict[str, Any]], columns: dict[str, list]) -> list[float | None]:
    """Return a reward's score of each answer; None where it has none."""
    given = {name: [row[name] for row in answers] for name in ("completion_ids", "prompt_ids", "finished")}
    prompts, completions = ([row[name] for row in answers] for name in ("prompt", "completion"))
    return Member(reward)(prompts=prompts, completions=completions, **{**columns, **given})


def judged(
    judge: Callable, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], columns: dict[str, list]
) -> list[float | None]:
    """
    Return by how much a judge prefers our answer to the baseline's, for each prompt, asked in both orders.

    A judge is given the other answer in the column `baseline`. A [`~trl_ext.rewards.JudgeReward`] with `compare` asks
    in both orders by itself, and prefers our answer above the middle of its scale. A function is called once for each
    order, and prefers the answer that it scores higher, so a preference for a position cancels.
    """
    one, other = ([row["completion"] for row in answers] for answers in (ours, theirs))
    compare = getattr(judge, "compare", None)
    first = scores(judge, ours, {**columns, compare or "baseline": other})
    if compare:
        second: list[float | None] = [sum(judge.scale) / 2] * len(first)  # type: ignore[attr-defined]
    else:
        second = scores(judge, theirs, {**columns, "baseline": one})
    return margins(first, second)
