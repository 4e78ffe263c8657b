"""Have a model answer, criticise its answer by a drawn principle, and revise it: Constitutional AI's first stage."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...rewards import Call, RefusedError, ServiceError, WithheldError, message_of, text_of
from .asking import LocalModel
from .judges import Served, usage_of

CRITIQUE = (
    "Here is a principle: {principle}\nSay where your last answer breaks it, and how. If it keeps the principle, say "
    "so. Reply with that alone."
)
REVISE = "Now write your answer to me again, so that it keeps the principle. Reply with the new answer alone."
STEPS = ("answer", "critique", "revision")  # the answer is step 0, critiques are 1, 3, 5 …, revisions 2, 4, 6 …


def kind_of(step: int) -> str:
    """Return what is written in a step: "answer" in 0, "critique" in 1, 3, 5 …, "revision" in 2, 4, 6 …"""
    return STEPS[0] if step == 0 else STEPS[2 - step % 2]


class Turn(NamedTuple):
    """
    Ask for one text.

    Args:
        key: name of the prompt.
        step: step in which the text is written; key and step together name the text in the journal.
        messages: what the model is given.
        principle: name of the principle to criticise or revise by; None for the answer.
    """

    key: str
    step: int
    messages: list[dict[str, str]]
    principle: str | None

    @property
    def name(self) -> tuple[str, int]:
        return self.key, self.step


def principle_of(key: str, round_: int, names: Sequence[str], seed: int) -> str:
    """Draw the name of the principle for a prompt's round (1, 2, …): each comes once before any comes again."""
    again, place = divmod(round_ - 1, len(names))
    generator = np.random.default_rng([seed, again, int(hashlib.sha256(key.encode()).hexdigest()[:15], 16)])
    return names[generator.permutation(len(names))[place]]


def turn_of(
    row: Mapping[str, Any], step: int, texts: Mapping[int, str | None], principles: Mapping[str, str], seed: int
) -> Turn | None:
    """
    Return the request for the text of a step; None if a text that the step needs is missing.

    In a round the model is given the prompt and the newest answer, but not the rounds before.

    Args:
        row: row with `key` and `prompt`.
        step: 0 for the answer, then a critique and a revision for each round.
        texts: earlier step → its text, None if there is none.
        principles: name → text of the principle.
        seed: seed for drawing principles.
    """
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if step == 0:
        return Turn(row["key"], step, messages, None)
    name = principle_of(row["key"], (step + 1) // 2, [*principles], seed)
    is_critique = kind_of(step) == "critique"
    answer = texts.get(step - 1 if is_critique else step - 2)
    critique = "" if is_critique else texts.get(step - 1)
    if answer is None or critique is None:
        return None
    messages = [*messages, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": CRITIQUE.format(principle=principles[name])})
    if not is_critique:
        messages += [{"role": "assistant", "content": critique}, {"role": "user", "content": REVISE}]
    return Turn(row["key"], step, messages, name)


def written(turn: Turn, text: str | None, why: str = "read", message: str = "", **more: Any) -> dict[str, Any]:
    """Return the journal's row for a turn. If no text was written, `text` is None and `why` is the reason."""
    named = {"key": turn.key, "step": turn.step, "kind": kind_of(turn.step), "principle": turn.principle}
    return {**named, "text": text, "why": why, "message": message[:200], **more}


class ServedWriter(Served):
    """
    Ask a served model for texts.

    Args:
        constitution_id: version and hash of the constitution.
        **settings: arguments of [`~trl_ext.rewards.JudgeReward`].
    """

    def __init__(self, constitution_id: str, **settings: Any):
        super().__init__(rubric=constitution_id, **settings)

    @property
    def identity(self) -> str:
        """Return a hash of all that the texts depend on: the server, the model, the constitution, our requests."""
        said = [self.url, self.model, self.rubric, self.settings, CRITIQUE, REVISE]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def write_all(self, turns: Sequence[Turn], done: Callable[[dict[str, Any]], None]) -> None:
        """Ask for texts, several at once, and call `done` with each row for the journal as soon as it is known."""
        self.work_on(turns, lambda turn: done(self.text(turn)))

    def text(self, turn: Turn) -> dict[str, Any]:
        """Ask the server for the text of a turn; return a row for the journal: the text, or why there is none."""
        try:
            answer = self.chat(turn.messages, Call(time.monotonic() + self.deadline))
        except RefusedError as error:
            return written(turn, None, "refused", str(error))
        kept: dict[str, Any] = {"tokens": list(usage_of(answer)), **self.served}
        try:
            text = message_of(answer)
        except WithheldError as error:
            return written(turn, None, "withheld", str(error), **kept)
        except ServiceError as error:
            return written(turn, None, "cut or no message", str(error), **kept)
        return written(turn, text or None, "read" if text else "empty", **kept)


class LocalWriter(LocalModel):
    """
    Sample texts from a causal language model.

    Args:
        constitution_id: version and hash of the constitution.
        temperature, seed: temperature and seed of the sampling.
        max_tokens: tokens after which a text is cut off; a text that was cut off is left out.
        path, batch_size, dtype, use_cpu: see [`LocalModel`].
    """

    def __init__(
        self,
        path: str,
        constitution_id: str,
        temperature: float,
        max_tokens: int,
        batch_size: int,
        seed: int,
        dtype: str,
        use_cpu: bool,
    ):
        from ...models import path_identity

        super().__init__(path, batch_size, dtype, use_cpu)
        self.temperature, self.max_tokens, self.seed = temperature, max_tokens, seed
        said = [path_identity(path), constitution_id, temperature, max_tokens, seed, dtype, CRITIQUE, REVISE]
        self.identity = hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def write_all(self, turns: Sequence[Turn], done: Callable[[dict[str, Any]], None]) -> None:
        """Sample texts in batches, and call `done` with each row for the journal. A text that was cut off is None."""
        from ...models import answer_texts, eos_token_ids, prompt_token_ids, sample

        for start in range(0, len(turns), self.batch_size):
            batch = []
            for turn in turns[start : start + self.batch_size]:
                (ids,) = prompt_token_ids(self.tokenizer, [self._prompt(turn)])
                if len(ids) + self.max_tokens > self.context:
                    done(written(turn, None, "too long", f"{len(ids)} tokens, the context has {self.context}"))
                else:
                    batch.append((turn, ids))
            if not batch:
                continue
            ends = eos_token_ids(self.model, self.tokenizer)
            drawn = sample(
                self.model,
                [ids for _, ids in batch],
                ends,
                max_new_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=int(hashlib.sha256(f"{self.seed} {batch[0][0].name}".encode()).hexdigest()[:8], 16),
            )
            texts = answer_texts(self.tokenizer, drawn, ends)
            for (turn, ids), answer, text in zip(batch, drawn, texts, strict=True):
                why = "cut or no message" if answer[-1] not in ends else "read" if text.strip() else "empty"
                kept: dict[str, Any] = {"tokens": [len(ids), len(answer)]}
                done(written(turn, text.strip() if why == "read" else None, why, **kept))

    def _prompt(self, turn: Turn) -> Any:
        if self.is_chat:
            return turn.messages
        roles = {"user": "Question", "assistant": "Answer"}
        return "\n\n".join(f"{roles.get(m['role'], m['role'])}: {text_of([m])}" for m in turn.messages) + "\n\nAnswer:"
