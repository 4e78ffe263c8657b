"""
Ask a served or local model questions, such as which of two answers is better, and keep its replies in a journal.
"""

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from ... import rewards
from ...cli.parser import read_yaml
from ...models import completion_logprobs, context_of, load_model, load_tokenizer, path_identity, prompt_token_ids
from ...runs import read_jsonl

TASK = f"""You compare two answers to a prompt.

{{rubric}}

Say "A" if the first answer is better, "B" if the second one is, and "tie" if neither is.

{rewards.DATA_ALONE}{{{{"overall": VERDICT}}}}"""
LOCAL = f"""You compare two answers to a prompt.

{{rubric}}

{rewards.DATA_ALONE.partition(chr(10) * 2)[0]}

{{material}}

Which answer is better, A (the first) or B (the second)? Reply with one letter."""
_CHOICES = {"a": 1.0, "b": 0.0, "tie": 0.5}
_FOREVER = 1e8  # seconds: no deadline is needed, since a server that cannot be reached ends the run
_MESSAGE = 500  # most characters of a judge's message that are kept


def read_criteria(path: str, key: str, kind: type) -> tuple[Any, str]:
    """
    Return the value of `key` in a YAML file with a `version`, and the file's identity, `VERSION@HASH`.

    Raises:
        ValueError: the file has no such key, its value is not of this kind or is empty, or there is no version.
        yaml.YAMLError: the file is not valid YAML.
    """
    content = Path(path).read_bytes()
    found = read_yaml(content.decode())
    value = isinstance(found, dict) and found.get("version") and found.get(key)
    if not value or not isinstance(value, kind):
        raise ValueError(
            f"{path} must be YAML with the keys `version` and `{key}` (a {kind.__name__}), got {str(found)[:60]!r}"
        )
    return value, f"{found['version']}@{hashlib.sha256(content).hexdigest()[:12]}"


def identity_of(*said: Any) -> str:
    """Return a hash of everything (`said`) that a model's answers depend on."""
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


class Journal:
    """
    Append answers to a file of JSON lines as they arrive, so that no recorded answer is asked for again, even after
    `kill -9`.

    Args:
        path: the file.
        by: identity of the model, and of everything else that its answers depend on.
        names: keys of a row whose values together identify the question.

    Raises:
        ValueError: the file has answers by another model, rubric, constitution or setting.
    """

    def __init__(self, path: Path, by: str, names: Sequence[str]):
        self.by = by
        self.names = names
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):  # the line that a killed run was writing
            self._file.write("\n")
        found = list(read_jsonl(path))
        if others := sum(row.get("by") != by for row in found):
            raise ValueError(
                f"{path}: {others} of {len(found)} answers were made with another model, rubric, constitution or "
                "model setting: choose another `output_dir`, or use the earlier model and settings"
            )
        self.rows: dict[tuple, dict[str, Any]] = {tuple(row[name] for name in names): row for row in found}

    def add(self, row: dict[str, Any]) -> None:
        """Write a row, from any thread, and pass it to the operating system before returning."""
        with self._lock:
            self._file.write(json.dumps({**row, "by": self.by}, ensure_ascii=False) + "\n")
            self._file.flush()
            self.rows[tuple(row[name] for name in self.names)] = row

    def ask(self, model: Any, questions: list[Any], what: str) -> None:
        """
        Ask the questions that have no answer in the journal yet, with a progress bar.

        Args:
            model: a `Served` or a `LocalModel`.
            questions: all questions. The `name` of each is a tuple of the values that identify it.
            what: name of the questions on the progress bar.

        Raises:
            RuntimeError: the server cannot be reached, refuses requests or serves another model than before. The
                answers so far are kept.
        """
        model.served = next((row["model"] for row in self.rows.values() if "model" in row), None)
        missing = [question for question in questions if question.name not in self.rows]
        with tqdm(total=len(missing), desc=what, unit="call", disable=not missing) as bar:

            def done(row: dict[str, Any]) -> None:
                self.add(row)
                bar.update()

            try:
                model.answer_all(missing, done)
            except rewards.RewardFailed as error:
                kept = f"The answers so far ({len(self.rows):,}) are kept: run the same command again to resume"
                raise RuntimeError(f"asking the model at {model.url} failed: {error.__cause__}. {kept}") from error


class Served(rewards.JudgeReward):
    """
    Ask a language model behind an OpenAI-compatible API, several requests at once; stop if the model changes.

    A subclass defines `answer`, which asks a question and returns its row for the [`Journal`].

    Args:
        **settings: arguments of [`~trl_ext.rewards.JudgeReward`].
    """

    served: str | None = None  # the model that the server named first
    answer: Callable[[Any], dict[str, Any]]

    def answer_all(self, questions: Sequence[Any], done: Callable[[dict[str, Any]], None]) -> None:
        """
        Ask the questions, and call `done` with the [`Journal`]'s row for each as soon as its answer is known.

        Raises:
            RewardFailed: a question failed; the error's cause says why. No further question is asked.
        """
        until = time.monotonic() + _FOREVER
        self.check(self.ask(lambda question: done(self.answer(question)), questions, until))

    def say(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """
        Send a conversation to the model, and return its next message as a dict.

        Returns:
            - `text`: the message; None if there is none.
            - `why`: "read", or the reason why there is no text: "empty", "cut", "withheld" or "refused".
            - `message`: the text; "" if it is empty; or the error that says why there is none.
            - `tokens`: list of two numbers, the tokens of the request and of the answer.
            - `model`: the model that the server named; missing if the request was refused.

        Raises:
            ServiceError: the server cannot be reached, refuses all requests (as with a wrong key), refuses a request
                before it has answered any, or names another model than before.
        """
        try:
            answer = self.completion(messages, rewards.Call(time.monotonic() + self.deadline))
        except rewards.RefusedError as error:
            if self.served is None:  # nothing was ever answered: the settings must be wrong
                raise rewards.ServiceError(str(error)) from error
            return {"text": None, "why": "refused", "message": str(error), "tokens": [0, 0]}
        now = str(answer.get("model"))
        self.served = self.served or now
        if now != self.served:
            raise rewards.ServiceError(
                f"the server answered as the model {self.served} and now answers as {now}, so answers of both would "
                "be mixed: serve the first model again, or choose another `output_dir`"
            )
        usage = answer.get("usage") or {}
        kept = {"tokens": [usage.get(f"{part}_tokens", 0) for part in ("prompt", "completion")], "model": now}
        try:
            text = rewards.message_of(answer)
            return {"text": text or None, "why": "read" if text else "empty", "message": text, **kept}
        except rewards.WithheldError as error:
            return {"text": None, "why": "withheld", "message": str(error), **kept}
        except rewards.ServiceError as error:
            return {"text": None, "why": "cut", "message": str(error), **kept}


class LocalModel:
    """
    Ask a causal language model with a chat template on this machine, in batches. Its weights are loaded when needed.

    A subclass defines `asked`, which returns the messages of a question, and `answers`, which takes a batch, a list
    of tuples (question, token ids of its messages), and returns the [`Journal`]'s row for each.

    Args:
        path: folder or hub name of the model.
        room: most tokens of an answer. A question is not asked if its prompt leaves fewer in the model's context.
        batch_size: questions in one batch.
        dtype: dtype of the weights; `auto` keeps the saved one.
        use_cpu: do not use a GPU, even if there is one.
    """

    url = "this machine"
    asked: Callable[[Any], list[dict[str, str]]]
    answers: Callable[[list[tuple[Any, list[int]]]], Iterable[dict[str, Any]]]

    def __init__(self, path: str, room: int, batch_size: int, dtype: str, use_cpu: bool):
        self.path = path
        self.room = room
        self.batch_size = batch_size
        self.dtype = dtype
        self.use_cpu = use_cpu
        self.tokenizer = load_tokenizer(path)
        self.weights = path_identity(path)

    @cached_property
    def model(self) -> Any:
        return load_model(self.path, "cpu" if self.use_cpu else None, dtype=self.dtype)

    def answer_all(self, questions: Sequence[Any], done: Callable[[dict[str, Any]], None]) -> None:
        """Ask the questions in batches, and call `done` with the [`Journal`]'s row for each."""
        for start in range(0, len(questions), self.batch_size):
            context = context_of(self.model)
            batch = []
            for question in questions[start : start + self.batch_size]:
                (ids,) = prompt_token_ids(self.tokenizer, [self.asked(question)])
                if len(ids) + self.room > context:
                    done(
                        question.row(
                            None,
                            why="too long",
                            message=f"{len(ids)} tokens and {self.room} for the answer, the context has {context}",
                        )
                    )
                else:
                    batch.append((question, ids))
            for row in self.answers(batch) if batch else ():
                done(row)


class Question(NamedTuple):
    """
    Hold a question to a judge: which of two answers is better?

    Args:
        key: the pair's key, a hash of its texts.
        prompt: the prompt, text or messages.
        pair: answers a and b.
        first: "a" or "b", the answer that is shown first.
        vote: number of the repetition of the same question: 0, 1, …
    """

    key: str
    prompt: Any
    pair: tuple[Any, Any]
    first: str
    vote: int

    @property
    def name(self) -> tuple[str, str, int]:
        return self.key, self.first, self.vote

    @property
    def parts(self) -> dict[str, str]:
        """Return the texts that a judge reads (prompt, first and second answer), by their tags."""
        a, b = (rewards.well_formed(rewards.text_of(answer)) for answer in self.pair)
        first, second = (a, b) if self.first == "a" else (b, a)
        return {"prompt": rewards.conversation(self.prompt), "first-answer": first, "second-answer": second}

    def row(self, verdict: float | None, why: str = "read", message: str = "", **more: Any) -> dict[str, Any]:
        """
        Return what the [`Journal`] records of this question and its answer, as one row.

        Args:
            verdict: how sure the judge is that the answer shown first is better, 0 to 1; None without a verdict. The
                row has it as `a_is_better`: how sure the judge is that answer a, shown first or second, is better.
            why: "read" if the judge's message had a verdict, else the reason why there is none.
            message: the judge's message. Its first 500 characters are kept.
            **more: further entries of the row.
        """
        turned = verdict if verdict is None or self.first == "a" else 1 - verdict
        named = {"key": self.key, "first": self.first, "vote": self.vote}
        return {**named, "a_is_better": turned, "why": why, "message": message[:_MESSAGE], **more}


class ServedJudge(Served):
    """
    Ask a served model which of two answers is better.

    Args:
        rubric: text of the rubric.
        rubric_id: version and hash of the rubric.
        **settings: arguments of [`~trl_ext.rewards.JudgeReward`].
    """

    def __init__(self, rubric: str, rubric_id: str, **settings: Any):
        super().__init__(rubric=rubric, **settings)
        self.rubric_id = rubric_id

    @property
    def identity(self) -> str:
        return identity_of(self.url, self.model, self.rubric_id, self.settings, TASK)

    def asked(self, question: Question) -> list[dict[str, str]]:
        """Return the messages that ask a question; its texts are between tags that contain a random number."""
        nonce = secrets.token_hex(8)
        rules = TASK.format(rubric=self.rubric.strip(), nonce=nonce)
        return [
            {"role": "system", "content": rules},
            {"role": "user", "content": rewards.tagged(question.parts, nonce)},
        ]

    def answer(self, question: Question) -> dict[str, Any]:
        """
        Ask a question, and return the [`Journal`]'s row for it. If a message has no verdict, ask again, up to
        `parse_retries` times.
        """
        if error := self.too_long(*question.parts.values()):
            return question.row(None, why="too long", message=str(error))
        tokens = []
        for _ in range(self.parse_retries + 1):
            said = self.say(self.asked(question))
            tokens.append(said.pop("tokens"))
            verdict = verdict_in(said.pop("text") or "")
            if verdict is not None or said["why"] == "refused":
                break
        if verdict is None and said["why"] in ("read", "empty"):
            said["why"] = "unreadable"
        return question.row(verdict, **said, tokens=[*map(sum, zip(*tokens, strict=True))], asked=len(tokens))


def verdict_in(message: str) -> float | None:
    """
    Return the verdict in a judge's message, such as `{"overall": "A"}`: 1 if A, the first answer, is better, 0 if B
    is, 0.5 for a tie; None if the message has no verdict.
    """
    for part in rewards.verdicts_in(message):
        try:
            found = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, Mapping):
            return _CHOICES.get(str(found.get("overall")).strip().lower())
    return None


class LocalJudge(LocalModel):
    """
    Judge by the log-probs that a causal language model gives to the letters "A" and "B".

    Args:
        rubric: what to judge by.
        rubric_id: version and hash of the rubric.
        path, **local: see [`LocalModel`].
    """

    def __init__(self, path: str, rubric: str, rubric_id: str, **local: Any):
        super().__init__(path, 1, **local)
        self.rubric = rubric
        self.identity = identity_of(self.weights, rubric_id, self.dtype, LOCAL)
        self.letters = [self.tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in "AB"]
        if self.letters[0] == self.letters[1]:
            raise ValueError(f"{path}: its tokenizer gives A and B the same tokens: use another model")

    def asked(self, question: Question) -> list[dict[str, str]]:
        """
        Return the messages that ask a question; the tags contain a hash, so that every run sends the same messages.
        """
        nonce = identity_of(question.parts, self.identity)[:16]
        text = LOCAL.format(rubric=self.rubric.strip(), nonce=nonce, material=rewards.tagged(question.parts, nonce))
        return [{"role": "user", "content": text}]

    def answers(self, batch: list[tuple[Question, list[int]]]) -> Iterable[dict[str, Any]]:
        """Return a batch's rows for the journal; a verdict is P(A) / (P(A) + P(B))."""
        prompts = [ids for _, ids in batch for _ in self.letters]
        logprobs = completion_logprobs(self.model, prompts, self.letters * len(batch))[0].sum(1)
        first = logprobs.double().view(-1, 2).softmax(-1)[:, 0].tolist()
        return [
            question.row(p, tokens=[len(ids), 0], asked=1) for (question, ids), p in zip(batch, first, strict=True)
        ]
