"""Scores of a server: ours (`trl-ext serve-reward`), vLLM's, or text-embeddings-inference's."""

import json
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any, get_args
from urllib.parse import urlsplit

from ..runs.nearest import did_you_mean
from ..runs.redaction import redacted
from .member import OnError, RewardFailed, without_failures
from .naming import checked_name
from .service import (
    RefusedError,
    ServedReward,
    ServiceError,
    StoppedError,
    UnavailableError,
    check_counts,
    check_score,
    mean,
    well_formed,
)
from .texts import text_of
from .wire import API, PATHS, Row, request_of, scores_in_answer, weights_in_answer


class ChangedError(ServiceError):
    """The server has other weights than it had at first."""


class RemoteReward(ServedReward):
    """
    Score answers by a server, several requests of several answers each at once.

    A row fails if its request does, after retries, or if its score is no finite number; the others keep theirs. A
    batch that the server refuses is halved until the row is alone which it refuses. Logged, under `rewards/<name>/`:
    `failed` (share of rows, unless `on_error="raise"`), `latency` (seconds of a request), `retries` (in this call).

    An answer is finished if the column `finished` says so, which [`~trl_ext.PPOTrainer`] passes, or else if its last
    token is one of `eos_token_ids`. A stock trainer needs these.

    The score is a logit, unless `logits=False`; of `trl-ext serve-reward` it is what the function there returns.

    `trl-ext serve-reward` says which weights it has. They are this reward's identity, for resuming and for caches. If
    it has others later, the call raises, whatever `on_error` says: scores of both would be mixed. Other servers do not
    say it, and are named by URL and `model`.

    Args:
        url: of the server, as `http://127.0.0.1:8000`.
        api: `"trl-ext"` for `trl-ext serve-reward`; `"vllm-classify"` or `"vllm-score"` (prompt and completion as a
            pair, for cross-encoders) for vLLM; `"tei"` for text-embeddings-inference.
        model: which one the server must have, by name, else it refuses; this reward is called by it. TEI has one, and
            is not asked.
        label: the class whose number is the score, where there are several: its index for `"vllm-classify"`, its name
            for `"tei"`.
        logits: False asks for what the server makes of them, sigmoid or softmax. Not for `"trl-ext"`.
        tokenizer: of the model, a folder or hub name. Its chat template makes a text of messages, and its EOS ends
            finished answers. Without it there is no EOS, and messages are refused. `"trl-ext"` does both by itself,
            `"vllm-score"` needs neither.
        eos_token_ids: the policy's tokens that finish an answer.
        batch_size: rows of one request.
        name: key in the logs. The default is made of `model`, or of the server's name and port.
        timeout, deadline: seconds for one request, and for a whole call; what is not answered by then has failed.
        retries: further tries of a request, after waits that grow.
        max_concurrency: requests at once.
        max_characters: of a prompt or completion; a longer one is not sent, and its row has failed.
        breaker_failures, breaker_seconds: after that many failed requests in a row, retries included, all fail at
            once for that time. Then one is let through, and the others wait for its outcome.
        api_key_env: environment variable with a bearer token.
        on_error: `"raise"`, `"skip"` (None for a failed row), or the score of a failed row.
    """

    def __init__(
        self,
        url: str,
        api: API = "trl-ext",
        model: str | None = None,
        label: int | str | None = None,
        logits: bool = True,
        tokenizer: str | None = None,
        eos_token_ids: Sequence[int] | None = None,
        batch_size: int = 32,
        name: str | None = None,
        timeout: float = 60.0,
        deadline: float = 600.0,
        retries: int = 5,
        max_concurrency: int = 8,
        max_characters: int = 100_000,
        breaker_failures: int = 5,
        breaker_seconds: float = 30.0,
        api_key_env: str | None = None,
        on_error: OnError = "raise",
    ):
        if api not in get_args(API):
            known = ", ".join(map(repr, get_args(API)))
            raise ValueError(f"`api` must be one of {known}, got {api!r}{did_you_mean(str(api), get_args(API))}")
        super().__init__(
            url,
            PATHS[api],
            checked_name(name, (model or urlsplit(str(url)).netloc).rstrip("/").rpartition("/")[2] or "remote"),
            timeout,
            deadline,
            retries,
            max_concurrency,
            max_characters,
            breaker_failures,
            breaker_seconds,
            api_key_env,
            on_error,
        )
        wanted = {"vllm-classify": "must be the index of a class", "tei": "must be the name of a class"}
        if label is not None and type(label) is not {"vllm-classify": int, "tei": str}.get(api):
            raise ValueError(f"`label` {wanted.get(api, 'is not read')} with api={api!r}, got {label!r}")
        for setting, is_given in {"tokenizer": tokenizer is not None, "logits=False": not logits}.items():
            if is_given and (api == "trl-ext" or (setting, api) == ("tokenizer", "vllm-score")):
                raise ValueError(f"`{setting}` is not read with api={api!r}: leave it out")
        check_counts(batch_size=batch_size)
        self.api = api
        self.model = model
        self.label = label
        self.logits = logits
        self.tokenizer = tokenizer
        self.eos_token_ids = None if eos_token_ids is None else list(eos_token_ids)
        self.batch_size = batch_size
        self._weights: dict[str, str | None] = {}  # "first": those that the server named first

    @property
    def identity(self) -> str:
        """What decides on the scores: the weights that the server says it has; where it cannot, URL and model."""
        weights = self._served()
        where = {"url": self.url, "model": self.model} if weights is None else {"weights": weights}
        names = ("api", "label", "logits", "tokenizer", "eos_token_ids")
        settings = where | {name: getattr(self, name) for name in names}
        return f"RemoteReward:{json.dumps(settings, sort_keys=True)}"

    def _served(self) -> str | None:
        """Return which weights the server has, asked once; None if it cannot say."""
        if self.api == "trl-ext" and not self._weights:
            try:
                answer = self._service.get(
                    f"{self.url.removesuffix(self.path)}/health", time.monotonic() + self.deadline
                )
            except UnavailableError as error:
                raise RewardFailed(
                    f"reward '{self.__name__}': {redacted(self.url)} does not say which weights it serves: {error}"
                ) from error
            except ServiceError:  # one of other makes, or behind a proxy
                answer = None
            self._check_weights(weights_in_answer(answer))
        return self._weights.get("first")

    def _check_weights(self, now: str | None) -> None:
        """Keep which weights the server says that it has; raise if it said others before."""
        if (first := self._weights.setdefault("first", now)) != now:
            raise ChangedError(
                f"it had the weights {first or '(not named)'} and has {now or '(not named)'} now: scores of both "
                "would be mixed; serve the first ones again, or begin a new run"
            )

    def __call__(
        self, prompts: list, completions: list, completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        """Score each completion; `finished` and `completion_ids` say which were finished."""
        return without_failures(self.told(prompts, completions, completion_ids, **columns))

    def told(
        self,
        prompts: list,
        completions: list,
        completion_ids: Any = None,
        finished: Sequence[bool] | None = None,
        log_metric: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return the same, but NaN for a row that failed."""
        until = time.monotonic() + self.deadline
        ended = self._ended(len(completions), finished, completion_ids)
        outcomes: list[Any] = []
        for prompt, completion, end in zip(prompts, completions, ended, strict=True):
            texts = well_formed(text_of(prompt)), well_formed(text_of(completion))
            outcomes.append(self.too_long(*texts) or self._row(prompt, completion, texts, end))
        self.check(outcomes)  # before anything is sent
        rows = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Row)]
        batches = [rows[start:][: self.batch_size] for start in range(0, len(rows), self.batch_size)]
        seconds: list[float] = []
        retried: list[float] = []

        def score(batch: list[int]) -> list[Any]:
            return self._scores([outcomes[i] for i in batch], batch, until, seconds, retried)

        for batch, found in zip(batches, self.ask(score, batches, until), strict=True):
            for k, i in enumerate(batch):
                outcomes[i] = found if isinstance(found, Exception) else found[k]
        for row, outcome in enumerate(outcomes):
            if isinstance(outcome, ChangedError):
                raise RewardFailed(self._describe(row, outcome)) from outcome
        return self.settle(outcomes, log_metric, {"latency": mean(seconds), "retries": float(len(retried))})

    def _ended(self, count: int, finished: Sequence[bool] | None, completion_ids: Any) -> list[bool | None]:
        if finished is not None:
            return [bool(end) for end in finished]
        if self.eos_token_ids is not None and completion_ids is not None:
            return [len(row) > 0 and row[-1] in self.eos_token_ids for row in completion_ids]
        if self.tokenizer is not None:
            raise ValueError(
                f"reward '{self.__name__}': which answers were finished is not known: give the policy's "
                "`eos_token_ids`, or pass the column `finished`"
            )
        return [None] * count

    def _row(self, prompt: Any, completion: Any, texts: tuple[str, str], finished: bool | None) -> Row | Exception:
        if self.api == "trl-ext":
            return Row(well_formed(prompt), well_formed(completion), finished)
        if self.api == "vllm-score":
            return Row(*texts, finished)
        if isinstance(prompt, str):
            eos = (self._read_tokenizer.eos_token or "") if self.tokenizer and finished else ""
            return Row(*texts, finished, texts[0] + texts[1] + eos)
        if not self.tokenizer:
            return ValueError("messages need a chat template: give the model's as `tokenizer`")
        messages = well_formed([*prompt, *completion])
        text = self._read_tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=not finished)
        return Row(*texts, finished, text, is_templated=True)

    @cached_property
    def _read_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer)

    def _scores(self, rows: list[Row], places: list[int], until: float, seconds: list, retried: list) -> list[Any]:
        """Scores of a batch, or errors in their place; what is refused is halved, so that one row fails alone."""
        body = request_of(self.api, rows, self.model, self.logits)
        try:
            answer = self._service.post(body, until, seconds, retried)
        except RefusedError as error:
            if len(rows) == 1:
                return [error]
            half = len(rows) // 2
            first = self._scores(rows[:half], places[:half], until, seconds, retried)
            if self.is_over(first):
                return first + [StoppedError("not asked: another row failed")] * (len(rows) - half)
            return first + self._scores(rows[half:], places[half:], until, seconds, retried)
        if self.api == "trl-ext":
            self._check_weights(weights_in_answer(answer))
        found: list[Any] = []
        for place, score in zip(places, scores_in_answer(self.api, answer, len(rows), self.label), strict=True):
            try:
                found.append(check_score(score, place))
            except (TypeError, ValueError) as error:
                found.append(error)
        return found
