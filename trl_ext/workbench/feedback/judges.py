"""Ask a judge which of two answers is better, overall and by each principle. It is a server or a local model."""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...rewards import (
    DATA_ALONE,
    Call,
    JudgeReward,
    RefusedError,
    ServiceError,
    WithheldError,
    conversation,
    message_of,
    tagged,
    text_of,
    verdicts_in,
    well_formed,
)
from .asking import LocalModel
from .criteria import OVERALL, Criteria

INSTRUCTIONS = f"""You compare two answers to a prompt.

{{rubric}}

{{task}}

{DATA_ALONE}{{reply}}"""
TASK = 'Say "A" if the first answer is better, "B" if the second one is, and "tie" if neither is.'
PRINCIPLES = 'Say so for each of these principles alone, and as "{overall}" for all that is said above:\n{each}'
LOCAL = f"""You compare two answers to a prompt.

{{criterion}}

{DATA_ALONE.partition(chr(10) * 2)[0]}

{{material}}

Which answer is better, A (the first) or B (the second)? Reply with one letter."""
_CHOICES = {"a": 1.0, "b": 0.0, "tie": 0.5}
_FOREVER = 1e8  # seconds: no deadline is needed, since a server that cannot be reached ends the run
_MESSAGE = 500  # most characters of a judge's message that are kept


class Question(NamedTuple):
    """
    Ask for one verdict on a pair of answers.

    Args:
        key: name of the pair.
        prompt: the prompt, text or messages.
        answers: answers a and b.
        first: "a" or "b", the answer that is shown first.
        vote: number of the repetition of the same question: 0, 1, …
    """

    key: str
    prompt: Any
    answers: tuple[Any, Any]
    first: str
    vote: int

    @property
    def name(self) -> tuple[str, str, int]:
        return self.key, self.first, self.vote

    @property
    def parts(self) -> dict[str, str]:
        """Return tag → text for the texts that a judge reads: the prompt, the first and the second answer."""
        a, b = (well_formed(text_of(answer)) for answer in self.answers)
        first, second = (a, b) if self.first == "a" else (b, a)
        return {"prompt": conversation(self.prompt), "first-answer": first, "second-answer": second}


def outcome(
    question: Question, found: Mapping[str, float] | None, why: str = "read", message: str = "", **more: Any
) -> dict[str, Any]:
    """
    Return the journal's row for a question.

    Args:
        question: what was asked.
        found: name → how sure the judge is that the answer shown first is better, 0 to 1; None without a verdict. The
            row has as `a_is_better` how sure the judge is that answer a is better.
        why: "read", or why there is no verdict.
        message: the judge's message.
        **more: further entries of the row.
    """
    turned = found and {name: p if question.first == "a" else 1 - p for name, p in found.items()}
    named = {"key": question.key, "first": question.first, "vote": question.vote}
    return {**named, "a_is_better": turned or None, "why": why, "message": message[:_MESSAGE], **more}


class Served(JudgeReward):
    """
    Ask a language model behind an OpenAI-compatible API, several requests at once; raise if the model changes.

    Args:
        **settings: arguments of [`~trl_ext.rewards.JudgeReward`].
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.served: dict[str, str | None] = {}  # "model": the model that the server named first

    def work_on(self, jobs: Sequence[Any], function: Callable[[Any], None]) -> None:
        """
        Call `function(job)` for each job, several at once.

        Raises:
            Exception: the first error of a job. After an error no further job is begun.
        """
        errors: list[Exception] = []

        def work(job: Any) -> None:
            if errors:  # a job in another thread has failed, and `ask` has not noticed yet
                return
            try:
                function(job)
            except Exception as error:
                errors.append(error)
                raise

        self.ask(work, jobs, time.monotonic() + _FOREVER)
        if errors:
            raise errors[0]

    def chat(self, messages: list[dict[str, str]], call: Call) -> Any:
        """
        Send messages to the model, and return the server's answer.

        Raises:
            RefusedError: the server refuses these messages, but has answered others.
            ServiceError: the server cannot be reached, has refused all requests, or names another model than before.
        """
        try:
            answer = self.completion(messages, call)
        except RefusedError as error:
            if self.served:
                raise
            raise ServiceError(str(error)) from error  # nothing was ever answered: the settings must be wrong
        now = answer["model"] if isinstance(answer.get("model"), str) else None
        if (first := self.served.setdefault("model", now)) != now:
            raise ServiceError(
                f"the server answered as the model {first or '(not named)'} and now answers as "
                f"{now or '(not named)'}, so answers of both would be mixed: serve the first one again, or choose "
                "another `output_dir`"
            )
        return answer


class ServedJudge(Served):
    """
    Ask a served model for verdicts. One request asks for the verdicts by all principles, and overall.

    Args:
        criteria: what to judge by.
        **settings: arguments of [`~trl_ext.rewards.JudgeReward`].
    """

    def __init__(self, criteria: Criteria, **settings: Any):
        super().__init__(rubric=criteria.rubric, compare="response_b", **settings)
        self.criteria = criteria

    @property
    def identity(self) -> str:
        """Return a hash of all that the verdicts depend on: the server, the model, the criteria and our requests."""
        said = [self.url, self.model, self.criteria.rubric_id, self.criteria.constitution_id, self.settings]
        return hashlib.sha256(json.dumps([*said, INSTRUCTIONS, TASK, PRINCIPLES], sort_keys=True).encode()).hexdigest()

    def asked(self, question: Question) -> list[dict[str, str]]:
        """Return the messages that ask a question; its texts stand between tags that have a random number."""
        nonce, principles, task = secrets.token_hex(8), self.criteria.principles, TASK
        if principles:
            each = "\n".join(f"- {name}: {text}" for name, text in principles.items())
            task += "\n\n" + PRINCIPLES.format(overall=OVERALL, each=each)
        reply = "{" + ", ".join(f'"{name}": VERDICT' for name in self.criteria.names) + "}"
        rules = INSTRUCTIONS.format(rubric=self.rubric.strip(), task=task, nonce=nonce, reply=reply)
        return [{"role": "system", "content": rules}, {"role": "user", "content": tagged(question.parts, nonce)}]

    def ask_all(self, questions: Sequence[Question], done: Callable[[dict[str, Any]], None]) -> None:
        """
        Ask the questions, several at once, and call `done` with each row for the journal as soon as it is known.

        Raises:
            ServiceError: the server cannot be reached, has refused all requests, or names another model than before;
                no further question is asked.
        """
        self.work_on(questions, lambda question: done(self.verdict(question)))

    def verdict(self, question: Question) -> dict[str, Any]:
        """
        Ask one question, and return the journal's row for it.

        If the message has no verdict, ask again, up to `parse_retries` times.
        """
        if error := self.too_long(*question.parts.values()):
            return outcome(question, None, "too long", str(error))
        call, tokens, why, message = Call(time.monotonic() + self.deadline), [0, 0], "", ""
        started = time.monotonic()
        for asked in range(1, self.parse_retries + 2):
            try:
                answer = self.chat(self.asked(question), call)
            except RefusedError as error:
                return outcome(question, None, "refused", str(error))
            for place, count in enumerate(usage_of(answer)):
                tokens[place] += count
            seconds = round(time.monotonic() - started, 3)
            kept: dict[str, Any] = {"tokens": tokens, "asked": asked, "seconds": seconds, **self.served}
            try:
                message = message_of(answer)
                return outcome(question, read(message, self.criteria.names), message=message, **kept)
            except WithheldError as error:
                why, message = "withheld", str(error)
            except NoVerdict as error:
                why = str(error)
            except ServiceError as error:  # the message was cut off
                why, message = "unreadable", str(error)
        return outcome(question, None, why, message, **kept)


class NoVerdict(ServiceError):
    """Say that a message lacks verdicts: "incomplete" if it has some of them, "unreadable" if it has none."""


def read(message: str, names: Iterable[str]) -> dict[str, float]:
    """
    Return the verdicts in a judge's message: name → 1 if the first answer is better, 0 if the second, 0.5 for a tie.

    Raises:
        NoVerdict: neither the message nor its last line is a JSON object, or the object lacks the verdict of a name.
    """
    for part in verdicts_in(message):
        try:
            found = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, Mapping):
            said = {str(name).strip().lower(): str(value).strip().lower() for name, value in found.items()}
            known = {name: _CHOICES[said[name]] for name in names if said.get(name) in _CHOICES}
            if set(known) == set(names):
                return known
            raise NoVerdict("incomplete" if known else "unreadable")
    raise NoVerdict("unreadable")


def usage_of(answer: Any) -> tuple[int, int]:
    """Return how many tokens a request has, and how many its answer, as the server reports them; 0 if it does not."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    counts = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
    first, second = (count if type(count) is int and count >= 0 else 0 for count in counts)
    return first, second


class LocalJudge(LocalModel):
    """
    Judge by the log-probs that a causal language model gives to the letters "A" and "B", with a prompt for each name.

    Args:
        criteria: what to judge by.
        path, batch_size, dtype, use_cpu: see [`LocalModel`].
    """

    def __init__(self, path: str, criteria: Criteria, batch_size: int, dtype: str, use_cpu: bool):
        from ...models import path_identity

        super().__init__(path, batch_size, dtype, use_cpu)
        self.criteria = criteria
        said = [path_identity(path), criteria.rubric_id, criteria.constitution_id, dtype, LOCAL]
        self.identity = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        letters = [f"{'' if self.is_chat else ' '}{letter}" for letter in "AB"]
        self.letters = [self.tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in letters]
        if self.letters[0] == self.letters[1] or not all(self.letters):
            raise ValueError(
                f"`judge_model_name_or_path` {path}: its tokenizer gives A and B the same tokens: take another model"
            )

    def asked(self, question: Question) -> list[Any]:
        """
        Return the prompt for each name, as text or as messages.

        The number in the tags is a hash, not random: the same question always has the same prompt.
        """
        nonce = hashlib.sha256(json.dumps([question.parts, self.identity]).encode()).hexdigest()[:16]
        criteria = {**self.criteria.principles, OVERALL: self.criteria.rubric}
        texts = [
            LOCAL.format(criterion=criteria[name], nonce=nonce, material=tagged(question.parts, nonce))
            for name in self.criteria.names
        ]
        return [[{"role": "user", "content": text}] if self.is_chat else f"{text}\nAnswer:" for text in texts]

    def ask_all(self, questions: Sequence[Question], done: Callable[[dict[str, Any]], None]) -> None:
        """Ask the questions in batches, and call `done` with each row for the journal."""
        from ...models import completion_logprobs, prompt_token_ids

        names = self.criteria.names
        for start in range(0, len(questions), size := max(self.batch_size // (2 * len(names)), 1)):
            batch = []
            for question in questions[start : start + size]:
                ids = prompt_token_ids(self.tokenizer, self.asked(question))
                longest = max(map(len, ids)) + max(map(len, self.letters))
                if longest > self.context:
                    done(outcome(question, None, "too long", f"{longest} tokens, the context has {self.context}"))
                else:
                    batch.append((question, ids))
            if not batch:
                continue
            prompts = [each for _, ids in batch for each in ids for _ in self.letters]
            logprobs = completion_logprobs(self.model, prompts, self.letters * (len(prompts) // 2))[0].sum(1)
            first = logprobs.double().view(len(batch), len(names), 2).softmax(-1)[..., 0].tolist()  # P(A) of A and B
            for (question, ids), found in zip(batch, first, strict=True):
                tokens = [sum(map(len, ids)), 0]
                done(outcome(question, dict(zip(names, found, strict=True)), tokens=tokens, asked=len(names)))
