"""Ask a server for scores: ours (`trl-ext serve-reward`), vLLM's, or text-embeddings-inference's."""

import json
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any, get_args
from urllib.parse import urlsplit

from ..runs.nearest import did_you_mean
from ..runs.redaction import redacted
from .checks import check_counts, checked_name
from .member import RewardFailed
from .service import (
    Call,
    RefusedError,
    ServedReward,
    ServiceError,
    StoppedError,
    UnavailableError,
    check_score,
    well_formed,
)
from .texts import text_of
from .wire import API, PATHS, Row, request_of, scores_in_answer, weights_in_answer


class ChangedError(ServiceError):
    """Say that a server has other weights than when it was first asked."""


class RemoteReward(ServedReward):
    """
    Have a server score answers; several requests run at once, each with a batch of answers.

    A row fails if its request fails after all retries, or if its score is not a finite number; other rows keep their
    scores. If the server refuses a batch, the batch is halved until the refused row is alone.

    Logs, under `rewards/<name>/`:

    - `failed`: share of rows that failed, unless `on_error="raise"`
    - `latency`: mean seconds of a request
    - `retries`: how many requests of this call were sent again

    The column `finished`, which [`~trl_ext.PPOTrainer`] passes, says whether an answer is finished. Without the column
    an answer is finished if its last token is one of `eos_token_ids`. One of the two is needed with `tokenizer`, and
    if `trl-ext serve-reward` serves a reward model.

    A score is the model's logit, or with `logits=False` its sigmoid or softmax. `trl-ext serve-reward` returns what
    its reward function returns.

    `trl-ext serve-reward` reports which weights it serves. They are part of this reward's identity, which resumed runs
    and caches compare. If the weights change, the call raises an error, whatever `on_error` says: otherwise the run
    would mix scores by old and new weights. Other servers report no weights, so URL and `model` take their place in
    the identity.

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        api: `"trl-ext"` for `trl-ext serve-reward`; `"vllm-classify"` or `"vllm-score"` (prompt and completion as a
            pair, for cross-encoders) for vLLM; `"tei"` for text-embeddings-inference.
        model: name of the model, which is also the default `name`. A server that has another model refuses the
            requests. The name is not sent to TEI, which has a single model.
        label: the class whose number is the score, if the model has several classes: its index for `"vllm-classify"`,
            its name for `"tei"`.
        logits: False asks for the server's sigmoid or softmax of the logits. Not for `"trl-ext"`.
        tokenizer: folder or hub name of the model's tokenizer. Its chat template turns messages into text, and its EOS
            token is put after finished answers. None: messages are refused, and no EOS is added. Leave it None with
            `"trl-ext"`, whose server does both, and with `"vllm-score"`, which needs neither.
        eos_token_ids: the policy's tokens that end a finished answer.
        batch_size: most rows in one request.
        name: key in the logs. The default is `model`, or the server's name and port.
        timeout, deadline, retries, max_concurrency, max_characters: see
            [`~trl_ext.rewards.service.ServedReward`].
        breaker_failures, breaker_seconds, api_key_env, on_error: see there.

    Examples:
        >>> from trl_ext.rewards import RemoteReward
        >>> reward = RemoteReward(SERVER, on_error="skip")  # `trl-ext serve-reward outputs/reward` runs there
        >>> reward(prompts=["Tea?"] * 2, completions=["Yes, please.", "No."])
        [2.0, 1.0]
        >>> question, answer = {"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "A large pot."}
        >>> reward(prompts=[[question]], completions=[[answer]])
        [3.0]
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
        **kwargs: Any,
    ):
        if api not in get_args(API):
            known = ", ".join(map(repr, get_args(API)))
            raise ValueError(f"`api` must be one of {known}, got {api!r}{did_you_mean(str(api), get_args(API))}")
        super().__init__(
            url,
            PATHS[api],
            checked_name(name, (model or urlsplit(str(url)).netloc).rstrip("/").rpartition("/")[2] or "remote"),
            **kwargs,
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
        self._weights: dict[str, str | None] = {}  # "first": the weights that the server named first

    @property
    def identity(self) -> str:
        """
        Return the settings that the scores depend on, and the server's weights, or its URL and `model` instead.

        Raises:
            RewardFailed: `trl-ext serve-reward` does not answer.
        """
        weights = self._served()
        where = {"url": self.url, "model": self.model} if weights is None else {"weights": weights}
        names = ("api", "label", "logits", "tokenizer", "eos_token_ids")
        settings = where | {name: getattr(self, name) for name in names}
        return f"RemoteReward:{json.dumps(settings, sort_keys=True)}"

    def _served(self) -> str | None:
        """Return which weights the server named when it was first asked; None if it named none."""
        if self.api == "trl-ext" and not self._weights:
            try:
                call = Call(time.monotonic() + self.deadline)
                answer = self._service.ask(call, url=f"{self.url.removesuffix(self.path)}/health")
            except UnavailableError as error:
                raise RewardFailed(
                    f"reward '{self.__name__}': {redacted(self.url)} does not say which weights it serves: {error}"
                ) from error
            except ServiceError:  # another kind of server, or a proxy
                answer = None
            self._check_weights(weights_in_answer(answer))
        return self._weights.get("first")

    def _check_weights(self, now: str | None) -> None:
        """Remember the first weights that the server names; raise a [`ChangedError`] if it names others `now`."""
        if (first := self._weights.setdefault("first", now)) != now:
            raise ChangedError(
                f"the server had the weights {first or '(not named)'} and now has {now or '(not named)'}, so the run "
                "would mix scores of both: serve the first ones again, or begin a new run"
            )

    def scores_or_nan(
        self,
        prompts: list,
        completions: list,
        completion_ids: Any = None,
        finished: Sequence[bool] | None = None,
        log_metric: Any = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return each completion's score, NaN if it failed; raise a [`RewardFailed`] if the weights have changed."""
        call = Call(time.monotonic() + self.deadline)
        ended = self._ended(len(completions), finished, completion_ids)
        outcomes: list[Any] = []
        for prompt, completion, end in zip(prompts, completions, ended, strict=True):
            texts = well_formed(text_of(prompt)), well_formed(text_of(completion))
            outcomes.append(self.too_long(*texts) or self._row(prompt, completion, texts, end))
        self.check(outcomes)  # before anything is sent
        rows = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Row)]
        batches = [rows[start:][: self.batch_size] for start in range(0, len(rows), self.batch_size)]

        def score(batch: list[int]) -> list[Any]:
            return self._scores([outcomes[i] for i in batch], batch, call)

        for batch, found in zip(batches, self.ask(score, batches, call.until), strict=True):
            for k, i in enumerate(batch):
                outcomes[i] = found if isinstance(found, Exception) else found[k]
        for row, outcome in enumerate(outcomes):
            if isinstance(outcome, ChangedError):
                raise RewardFailed(self._describe(row, outcome)) from outcome
        return self.settle(outcomes, log_metric, call.metrics)

    def _ended(self, count: int, finished: Sequence[bool] | None, completion_ids: Any) -> list[bool | None]:
        if finished is not None:
            return [bool(end) for end in finished]
        if self.eos_token_ids is not None and completion_ids is not None:
            return [len(row) > 0 and row[-1] in self.eos_token_ids for row in completion_ids]
        if self.tokenizer is not None:
            raise ValueError(
                f"reward '{self.__name__}' cannot tell which completions are finished: give the policy's "
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
            return ValueError(
                "the prompts are messages, which need a chat template: give the reward model's `tokenizer`"
            )
        messages = well_formed([*prompt, *completion])
        text = self._read_tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=not finished)
        return Row(*texts, finished, text, is_templated=True)

    @cached_property
    def _read_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer)

    def _scores(self, rows: list[Row], places: list[int], call: Call) -> list[Any]:
        """
        Return for each row of a batch its score, or the error that took its place.

        If the server refuses the batch, ask for each half by itself, and so on until the refused row is alone.
        """
        body = request_of(self.api, rows, self.model, self.logits)
        try:
            answer = self._service.ask(call, body)
        except RefusedError as error:
            if len(rows) == 1:
                return [error]
            half = len(rows) // 2
            first = self._scores(rows[:half], places[:half], call)
            if self.is_over(first):
                return first + [StoppedError("not asked: another row failed")] * (len(rows) - half)
            return first + self._scores(rows[half:], places[half:], call)
        if self.api == "trl-ext":
            self._check_weights(weights_in_answer(answer))
        found: list[Any] = []
        for place, score in zip(places, scores_in_answer(self.api, answer, len(rows), self.label), strict=True):
            try:
                found.append(check_score(score, place))
            except (TypeError, ValueError) as error:
                found.append(error)
        return found
