"""Have a model answer, criticise its answer by a sampled principle, and revise it: Constitutional AI's first stage."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...models import answer_texts, eos_token_ids, sample
from .judges import LocalModel, Served, identity_of

CRITIQUE = (
    "Here is a principle: {principle}\nSay where your last answer breaks it, and how. If it keeps the principle, say "
    "so. Reply with that alone."
)
REVISE = "Now write your answer to me again, so that it keeps the principle. Reply with the new answer alone."
STEPS = ("answer", "critique", "revision")  # the answer is step 0, critiques are 1, 3, 5 …, revisions 2, 4, 6 …


def kind_of(step: int) -> str:
    """Return the kind of text in a step: "answer" in 0, "critique" in 1, 3, 5 …, "revision" in 2, 4, 6 …"""
    return STEPS[0] if step == 0 else STEPS[2 - step % 2]


class Turn(NamedTuple):
    """
    Hold a request to the model for one text: an answer, a critique or a revision.

    Args:
        key: hash of the prompt.
        step: number of the text among those on this prompt, see [`kind_of`]. Key and step identify it in the journal.
        messages: the messages that the model is given.
        principle: name of the principle to criticise or revise by; None for the answer.
    """

    key: str
    step: int
    messages: list[dict[str, str]]
    principle: str | None

    @property
    def name(self) -> tuple[str, int]:
        return self.key, self.step

    def row(self, text: str | None, why: str = "read", message: str = "", **more: Any) -> dict[str, Any]:
        """
        Return what the journal records of this request and its text, as one row.

        Args:
            text: the model's text; None if there is none.
            why: "read" if there is a text, else the reason why there is none.
            message: the error. Its first 200 characters are recorded if there is no text.
            **more: further entries of the row.
        """
        named = {"key": self.key, "step": self.step, "kind": kind_of(self.step), "principle": self.principle}
        return {**named, "text": text, "why": why, "message": "" if text else message[:200], **more}


def principle_of(key: str, round_: int, names: Sequence[str], seed: int) -> str:
    """
    Sample one of the principles' `names` for the round `round_`, 1, 2, …, of the prompt with the hash `key`.

    No principle repeats for a prompt before all have occurred.
    """
    digest = hashlib.sha256(key.encode()).hexdigest()
    generator = np.random.default_rng([seed, int(digest[:15], 16)])
    return names[generator.permutation(len(names))[(round_ - 1) % len(names)]]


def turn_of(
    key: str, prompt: Any, step: int, texts: Mapping[int, str | None], principles: Mapping[str, str], seed: int
) -> Turn | None:
    """
    Return the request for the text of a step; None if a text that the step needs is missing.

    In a round the model is given the prompt and the newest answer, but not the rounds before.

    Args:
        key, prompt: the prompt's hash, and the prompt, as text or messages.
        step: 0 for the answer, then a critique and a revision for each round.
        texts: maps each earlier step to its text, None if there is none.
        principles: maps the name of each principle to its text.
        seed: seed for sampling principles.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if step == 0:
        return Turn(key, step, messages, None)
    name = principle_of(key, (step + 1) // 2, [*principles], seed)
    is_critique = kind_of(step) == "critique"
    answer = texts.get(step - 1 if is_critique else step - 2)
    critique = "" if is_critique else texts.get(step - 1)
    if answer is None or critique is None:
        return None
    messages = [*messages, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": CRITIQUE.format(principle=principles[name])})
    if not is_critique:
        messages += [{"role": "assistant", "content": critique}, {"role": "user", "content": REVISE}]
    return Turn(key, step, messages, name)


class ServedWriter(Served):
    """Ask a served model for texts; `rubric` is the version and hash of the constitution."""

    @property
    def identity(self) -> str:
        return identity_of(self.url, self.model, self.rubric, self.settings, CRITIQUE, REVISE)

    def answer(self, turn: Turn) -> dict[str, Any]:
        return turn.row(**self.say(turn.messages))


class LocalWriter(LocalModel):
    """
    Sample texts from a causal language model.

    Args:
        constitution_id: version and hash of the constitution.
        temperature, seed: temperature and seed of the sampling.
        max_tokens: tokens after which a text is cut off; a text that was cut off is left out.
        path, **local: see [`LocalModel`].
    """

    def __init__(self, path: str, constitution_id: str, temperature: float, max_tokens: int, seed: int, **local: Any):
        super().__init__(path, max_tokens, **local)
        self.temperature = temperature
        self.seed = seed
        said = (self.weights, constitution_id, temperature, max_tokens, seed, self.dtype, CRITIQUE, REVISE)
        self.identity = identity_of(*said)

    def asked(self, turn: Turn) -> list[dict[str, str]]:
        return turn.messages

    def answers(self, batch: list[tuple[Turn, list[int]]]) -> Iterable[dict[str, Any]]:
        ends = eos_token_ids(self.model, self.tokenizer)
        drawn = sample(
            self.model,
            [ids for _, ids in batch],
            ends,
            max_new_tokens=self.room,
            temperature=self.temperature,
            seed=int(identity_of(self.seed, batch[0][0].name)[:8], 16),
        )
        texts = answer_texts(self.tokenizer, drawn, ends)
        for (turn, ids), answer, text in zip(batch, drawn, map(str.strip, texts), strict=True):
            why = "cut" if answer[-1] not in ends else "read" if text else "empty"
            yield turn.row(text if why == "read" else None, why, tokens=[len(ids), len(answer)])
