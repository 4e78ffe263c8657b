"""Ask a server for scores: `trl-ext serve-reward`, or vLLM."""

import json
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from .completions import text_of, well_formed
from .member import RewardFailed, checked_name
from .scores import number_or_error
from .service import Call, RefusedError, ServedReward, ServiceError, UnavailableError

API = Literal["trl-ext", "vllm-classify", "vllm-score"]
PATHS = {"trl-ext": "/score", "vllm-classify": "/classify", "vllm-score": "/score"}


class Row(NamedTuple):
    """
    Hold a prompt, its completion, whether the completion is `finished` (None: unknown), and the `text` in which a
    classifier reads both. `is_templated` says whether a chat template made that text.
    """

    prompt: Any
    completion: Any
    finished: bool | None
    text: str = ""
    is_templated: bool = False


class ChangedError(RewardFailed):
    """Raised when a server has other weights than at the first request."""


class RemoteReward(ServedReward):
    """
    Have a server score completions; several requests run at once, each with a batch of completions.

    A row fails if its request fails after all retries, or if its score is not a finite number; other rows keep their
    scores. If the server refuses a batch, the batch is halved until the refused row is alone.

    Logs, under `rewards/<name>/`:

    - `failed`: share of rows that failed, unless `on_error="raise"`
    - `latency`: mean seconds of a request
    - `retries`: how many requests of this call were sent again

    The column `finished`, which [`~trl_ext.PPOTrainer`] passes, says whether a completion is finished. Without the
    column a completion is finished if its last token is one of `eos_token_ids`. The column or `eos_token_ids` is
    needed with `tokenizer`, and if `trl-ext serve-reward` serves a reward model.

    A score is the model's logit, or with `logits=False` its sigmoid or softmax. `trl-ext serve-reward` returns what
    its reward function returns.

    `trl-ext serve-reward` reports which weights it serves. They are part of this reward's identity, by which caches
    know it. If the weights change, the call raises an error, whatever `on_error` is: otherwise the run would mix
    scores of old and new weights. Other servers do not report their weights, so URL and `model` are the identity
    instead.

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        api: `"trl-ext"` for `trl-ext serve-reward`; `"vllm-classify"` or `"vllm-score"` (prompt and completion as a
            pair, for cross-encoders) for vLLM.
        model: name of the model, which is sent to the server. A server that has another model refuses the requests.
        label: index of the class whose number is the score, for `"vllm-classify"` if the model has several classes.
        logits: False asks for the server's sigmoid or softmax of the logits. Not for `"trl-ext"`.
        tokenizer: folder or hub name of the model's tokenizer, for `"vllm-classify"`. Its chat template turns messages
            into text, and its EOS token is put after finished completions. None: messages are refused, and no EOS is
            added.
        eos_token_ids: the policy's tokens that end a finished completion.
        batch_size: most rows in one request.
        name: key in the logs. The default is the last part of `model`, or the server's name and port.
        timeout, deadline, retries, max_concurrency, max_characters, api_key_env, on_error: see
            [`~trl_ext.rewards.service.ServedReward`].

    Examples:
        >>> from trl_ext.rewards import RemoteReward
        >>> reward = RemoteReward(SERVER, on_error="skip")  # `trl-ext serve-reward outputs/reward` runs there
        >>> reward(prompts=["Tea?"] * 2, completions=["Yes, please.", "No."])
        [2.0, 1.0]
        >>> prompt, completion = {"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "A large pot."}
        >>> reward(prompts=[[prompt]], completions=[[completion]])
        [3.0]
    """

    def __init__(
        self,
        url: str,
        api: API = "trl-ext",
        model: str | None = None,
        label: int | None = None,
        logits: bool = True,
        tokenizer: str | None = None,
        eos_token_ids: Sequence[int] | None = None,
        batch_size: int = 32,
        name: str | None = None,
        **kwargs: Any,
    ):
        called = (model or urlsplit(url).netloc).rstrip("/").rpartition("/")[2]
        super().__init__(url, PATHS[api], checked_name(name, called), **kwargs)
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
        Return a text with all that the scores depend on: the settings, and the id of the server's weights.

        If the server does not report this id, the text has its URL and `model` instead.

        Raises:
            RewardFailed: `trl-ext serve-reward` does not answer.
        """
        if self.api == "trl-ext" and not self._weights:
            try:
                answer = self.request(Call(time.monotonic() + self.deadline), None, "/health")
            except UnavailableError as error:
                raise RewardFailed(
                    f"reward '{self.__name__}': {self.url} does not say which weights it serves: {error}"
                ) from error
            except ServiceError:
                answer = None
            if isinstance(answer, dict) and answer.get("identity"):  # else a proxy may have answered
                self._check_weights(answer)
        weights = self._weights.get("first")
        where = {"url": self.url, "model": self.model} if weights is None else {"weights": weights}
        names = ("api", "label", "logits", "tokenizer", "eos_token_ids")
        settings = where | {name: getattr(self, name) for name in names}
        return f"RemoteReward:{json.dumps(settings, sort_keys=True)}"

    def _check_weights(self, answer: Any) -> None:
        """Raise a [`ChangedError`] if the server's `answer` names other weights than its first answer did."""
        now = answer.get("identity") if isinstance(answer, dict) else None
        if (first := self._weights.setdefault("first", now)) != now:
            raise ChangedError(
                f"the server had the weights {first or '(not named)'} and now has {str(now or '(not named)')[:100]}, "
                "so the run would mix scores of both: serve the first weights again, or start a new run"
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
        """
        Return the scores as `__call__` does, but NaN instead of None for a row that failed.

        NaN occurs only with `on_error="skip"`.

        Args:
            prompts, completions: texts or messages.
            completion_ids: the completions' tokens, by which `eos_token_ids` tells which are finished.
            finished: for each completion, whether it is finished; if None, `completion_ids` and `eos_token_ids` tell.
            log_metric: TRL's function that logs; None logs nothing.
            **columns: further columns, which are not sent.

        Raises:
            RewardFailed: a row failed and `on_error` is "raise"; or, whatever `on_error` is, the weights have changed.
            ValueError: `tokenizer` is set, but neither `finished` nor `completion_ids` with `eos_token_ids` tells
                which completions are finished.
        """
        call = Call(time.monotonic() + self.deadline)
        ended: Sequence[bool | None] = [None] * len(completions)
        if finished is not None:
            ended = finished
        elif self.eos_token_ids is not None and completion_ids is not None:
            ended = [len(row) > 0 and row[-1] in self.eos_token_ids for row in completion_ids]
        elif self.tokenizer is not None:
            raise ValueError(
                f"reward '{self.__name__}' does not know which completions are finished: give the policy's "
                "`eos_token_ids`, or pass the column `finished`"
            )
        outcomes: list[Any] = [self._row(*row) for row in zip(prompts, completions, ended, strict=True)]
        rows = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Row)]
        batches = [rows[start:][: self.batch_size] for start in range(0, len(rows), self.batch_size)]
        asked = self.ask(lambda batch: self._scores([outcomes[i] for i in batch], call), batches, call.until)
        for batch, answer in zip(batches, asked, strict=True):
            if isinstance(answer, ChangedError):
                raise answer
            for k, i in enumerate(batch):
                outcomes[i] = answer if isinstance(answer, Exception) else answer[k]
        return self.settle(outcomes, log_metric, call.metrics)

    def _row(self, prompt: Any, completion: Any, finished: bool | None) -> Row | Exception:
        """Return what to send for a completion, or the error if it cannot be sent."""
        texts = well_formed(text_of(prompt)), well_formed(text_of(completion))
        if error := self.too_long(*texts):
            return error
        if self.api == "trl-ext":
            return Row(well_formed(prompt), well_formed(completion), finished)
        if self.api == "vllm-score":
            return Row(*texts, finished)
        if isinstance(prompt, str):
            eos = (self._read_tokenizer.eos_token or "") if self.tokenizer and finished else ""
            return Row(*texts, finished, texts[0] + texts[1] + eos)
        if not self.tokenizer:
            return ValueError("the prompts are messages, which need a chat template: give `tokenizer`")
        messages = well_formed([*prompt, *completion])
        text = self._read_tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=not finished)
        return Row(*texts, finished, text, is_templated=True)

    @cached_property
    def _read_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer)

    def _body(self, rows: list[Row]) -> dict[str, Any]:
        """Return the body of a request for the scores of these rows."""
        named: dict[str, Any] = {"model": self.model} if self.model else {}
        prompts, completions, finished, texts, are_templated = map(list, zip(*rows, strict=True))
        if self.api == "trl-ext":
            ended = None if None in finished else finished
            return named | {"prompts": prompts, "completions": completions, "finished": ended}
        named["use_activation"] = not self.logits
        if self.api == "vllm-score":
            return named | {"text_1": prompts, "text_2": completions}
        # A chat template adds its own special tokens
        return named | {"input": texts, "add_special_tokens": not any(are_templated)}

    def _scores(self, rows: list[Row], call: Call) -> list[Any]:
        """Return for each row of a batch its score, or the error if it has none."""
        try:
            answer = self.request(call, self._body(rows))
        except RefusedError as error:  # ask for each half by itself, until the refused row is alone
            half = len(rows) // 2
            if not half:
                return [error]
            return [*self._scores(rows[:half], call), *self._scores(rows[half:], call)]
        if self.api == "trl-ext":
            self._check_weights(answer)
        scores = scores_in_answer(self.api, answer, len(rows), self.label)
        return [number_or_error(score, "it") for score in scores]


def scores_in_answer(api: str, answer: Any, count: int, label: int | None) -> list[Any]:
    """
    Return the score of each row from a server's answer, in order, without checking that it is a number.

    Raises:
        ServiceError: the answer does not have the format of `api`, or does not have `count` scores; or the model has
            no label `label`; or the model has several labels, but `label` is None.
    """
    try:
        if api == "trl-ext":
            scores = answer["scores"]
        else:
            by_place = {item["index"]: item for item in answer["data"]}
            items = [by_place[place] for place in range(len(answer["data"]))]
            scores = [item["score"] if api == "vllm-score" else _of_label(item["probs"], label) for item in items]
    except (LookupError, TypeError, AttributeError) as error:
        raise ServiceError(
            f"the server's answer does not have the format of api={api!r}: {repr(answer)[:120]}. Check `url`, `api` "
            "and `label`"
        ) from error
    if not isinstance(scores, list) or len(scores) != count:
        raise ServiceError(
            f"the server must return {count} scores, one for each completion, not {repr(answer)[:120]}: check `api`"
        )
    return scores


def _of_label(numbers: list[Any], label: int | None) -> Any:
    """Return the number of a class; None for `label` stands for the only class."""
    if label is None and len(numbers) != 1:
        raise ServiceError(f"the model has {len(numbers)} labels: give the index of one as `label`")
    return numbers[label or 0]
