"""Use a reward model as a reward function."""

import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import PartialState
from torch import Tensor

from ..models.generation import eos_token_ids as ends_of, padded
from ..models.weights import check_pad_token, context_of, hash_of, path_identity, tokenizer_identity
from ..upstream.names import is_conversational
from ..upstream.statements import temporarily
from .member import checked_name
from .scores import log_to

# Rewards in the background run in threads. Two of them may share a model, whose configuration, active adapter and
# tokenizer each call sets for itself
_ONE_AT_A_TIME = threading.RLock()


def logits_of(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """
    Return the (B,) scores of a sequence classifier with one label, for rows `input_ids` (B, L) with `attention_mask`
    (B, L).
    """
    return model(input_ids=input_ids, attention_mask=attention_mask).logits[:, 0]


def same_tokenizer(a: transformers.PreTrainedTokenizerBase, b: transformers.PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizers `a` and `b` have the same vocabulary and the same EOS token."""
    return a is b or (a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id)


def load_classifier(path: str, **kwargs: Any) -> Any:
    """
    Load a sequence classifier with one label by `from_pretrained`, with `kwargs`; transformers raises an error if the
    saved head has more labels.
    """
    return transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **kwargs)


def load_reward_model(path: str, **kwargs: Any) -> transformers.PreTrainedModel:
    """
    Load a sequence classifier with one label by `from_pretrained`, with `kwargs`; raise a `ValueError` if it was saved
    without a head.
    """
    model, loading_info = load_classifier(path, output_loading_info=True, **kwargs)
    new = sorted(key for key in loading_info["missing_keys"] if not key.startswith(f"{model.base_model_prefix}."))
    if new:
        raise ValueError(
            f"{path} is not a reward model: it has no weights for {', '.join(new)}, so its scores would be random. "
            "Train a reward model (`recipes/reward.py`), or pass a model object to use random weights."
        )
    return model


def _loaded_tokenizer(tokenizer: Any, revision: str | None = None) -> Any:
    """Load the tokenizer that a folder or hub name (of `revision`) names; return an object or None unchanged."""
    from ..models.loading import load_tokenizer

    return load_tokenizer(tokenizer, revision) if isinstance(tokenizer, str) else tokenizer


def batches(lengths: Sequence[int], max_tokens: int | None = None, max_rows: int | None = None) -> list[list[int]]:
    """
    Put rows of similar length into batches, the longest first; return for each batch the indices of its rows.

    Args:
        lengths: number of tokens of each row.
        max_tokens: most tokens in a batch, padding included; a longer row is a batch by itself. None: no limit.
        max_rows: most rows of a batch; None: no limit. If weights are sharded over processes, set only this limit,
            since all processes must have the same number of batches.
    """
    result: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        rows = len(result[-1]) if result else 0
        too_long = bool(rows and max_tokens and (rows + 1) * lengths[result[-1][0]] > max_tokens)
        if rows == 0 or rows == max_rows or too_long:
            result.append([])
        result[-1].append(row)
    return result


class ModelReward:
    """
    Score completions with a reward model, on the tokens that `trl.RewardTrainer` would train it on.

    Prompt and completion are tokenised with the model's own tokenizer and chat template. An EOS token (in messages,
    the template's end of turn) follows only if the completion is finished. If `policy_tokenizer` equals the model's
    tokenizer, and the call gives `prompt_ids` and `completion_ids`, the model reads these tokens instead; in messages,
    a finished completion is then followed by the tokens that the chat template puts after EOS.

    The column `finished`, which [`~trl_ext.PPOTrainer`] passes, says whether a completion is finished. Without this
    column, a completion is finished if its last token is one of `eos_token_ids`. So with other trainers, set
    `eos_token_ids` or `policy_tokenizer`.

    Args:
        model: a sequence classifier with one label: the folder or hub name of a model or of an adapter, or a model
            object, which is frozen and put into evaluation mode.
        tokenizer: the model's tokenizer, or its folder or hub name; None loads the one saved with the model. A model
            object needs one.
        policy_tokenizer: the tokenizer of `prompt_ids` and `completion_ids`, or the policy's folder or hub name.
        eos_token_ids: the policy's tokens that end a finished completion. None: the EOS of `policy_tokenizer`, and if
            that is a folder or hub name, also those of the policy's generation config.
        revision: revision of a model on the hub.
        dtype: dtype of the weights, such as `"bfloat16"`; None keeps the saved one.
        load_in_8bit: quantise the weights as they are loaded (bitsandbytes).
        device: device of the model. None: the device of this process, but a model object stays on its device.
        max_batch_tokens: most tokens in one forward pass, padding included; None: no limit. Rows of similar length
            are batched together.
        batch_size: most rows in one forward pass; None: no limit. If weights are sharded over processes, set this
            limit and `max_batch_tokens=None`, since all processes must run the same number of forward passes.
        max_length: most tokens of a row, prompt and completion together. It is never more than the model's context,
            which is the default.
        truncation: what happens to a row longer than `max_length`. `"refuse"` raises a `ValueError`. `"left"` cuts off
            the beginning of the prompt, but not a special token at its start, and logs the share of rows cut as
            `rewards/<name>/truncated`.
        chat_template_kwargs: passed on to the chat template.
        shared_base: the [`~trl_ext.models.loading.SharedBase`] whose base model this adapter and others use.
        score: a function that takes `input_ids` and `attention_mask` (B, L) and returns scores (B,). It is called in
            place of `model`'s own forward, for a wrapped model. `model` then stays unchanged, and on its device.
        name: key in the logs; None: the last part of the model's name.

    Raises:
        ValueError: a saved model has no weights for the head that scores, or a model object has several labels.

    Examples:
        >>> from trl_ext.rewards import ModelReward
        >>> reward = ModelReward(MODEL)  # a folder of `recipes/reward.py`, or a hub name
        >>> scores = reward(prompts=["a b", "c"], completions=["d", "e f"], finished=[True, False])
        >>> prompt, completion = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "d"}
        >>> scores += reward(prompts=[[prompt]], completions=[[completion]], finished=[True])
        >>> [type(score).__name__ for score in scores]
        ['float', 'float', 'float']
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        policy_tokenizer: Any = None,
        eos_token_ids: Sequence[int] | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype | None = None,
        load_in_8bit: bool = False,
        device: str | torch.device | None = None,
        max_batch_tokens: int | None = 16384,
        batch_size: int | None = None,
        max_length: int | None = None,
        truncation: Literal["refuse", "left"] = "refuse",
        chat_template_kwargs: dict[str, Any] | None = None,
        shared_base: Any = None,
        score: Callable[[Tensor, Tensor], Tensor] | None = None,
        name: str | None = None,
    ):
        path = model if isinstance(model, str) else None
        self.path = path
        self.revision = revision
        self.load_in_8bit = load_in_8bit
        self.device = device
        if path is not None:
            self.tokenizer = _loaded_tokenizer(tokenizer or path, None if tokenizer else revision)
            model = self._load(path, dtype, shared_base)
        else:
            self.tokenizer = _loaded_tokenizer(tokenizer)
        if model.config.num_labels != 1:  # the others would be left out
            raise ValueError(f"a reward model must be trained with num_labels=1, got {model.config.num_labels}")
        # The first call moves the model: only then has a trainer said which device the process has
        is_placed = load_in_8bit or (path is None and device is None)
        self._to_place = score is None and not is_placed
        if score is None:
            model.requires_grad_(False).eval()
        self.model = model
        self.score = score or partial(logits_of, model)
        self.config = model.config.get_text_config()
        check_pad_token(model, self.tokenizer)
        self.policy_tokenizer = _loaded_tokenizer(policy_tokenizer)
        self.shares_tokenizer = policy_tokenizer is not None and same_tokenizer(self.tokenizer, self.policy_tokenizer)
        self.eos_token_ids = list(eos_token_ids) if eos_token_ids is not None else self._ends(policy_tokenizer)
        self.max_batch_tokens = max_batch_tokens
        self.batch_size = batch_size
        self.truncation = truncation
        limits = [max_length, context_of(model)]
        if path is not None:  # RoBERTa has more positions than it can use; its tokenizer has the right number
            limits.append(self.tokenizer.model_max_length)
        self.max_length = min(filter(None, limits))
        self.chat_template_kwargs = chat_template_kwargs or {}
        origin = path or getattr(model.config, "_name_or_path", "") or "model_reward"
        self.__name__ = checked_name(name, Path(os.path.normpath(origin)).name)

    def _load(self, path: str, dtype: Any, shared_base: Any) -> Any:
        """Load a whole model, or an adapter on the shared base or one of its own."""
        from ..models.adapters import check_head  # here: PEFT takes seconds
        from ..models.loading import SharedBase, is_adapter, load_separately, whole_on_each_process

        kwargs: dict[str, Any] = {"dtype": dtype or "auto", "device_map": None}
        if self.load_in_8bit:
            kwargs["quantization_config"] = transformers.BitsAndBytesConfig(load_in_8bit=True)
        if self.revision is not None:
            kwargs["revision"] = self.revision
        with whole_on_each_process():
            if not is_adapter(path, self.revision):
                return load_reward_model(path, **kwargs)
            check_head(path, self.revision)
            if shared_base is None and not self.load_in_8bit:  # in 8 bits, merging the adapter would round
                return load_separately(path, **kwargs)
            return (shared_base or SharedBase()).add(path, **kwargs)

    def _ends(self, policy_tokenizer: Any) -> list[int] | None:
        """Return the tokens that end the policy's completions; None if they are not known."""
        if isinstance(policy_tokenizer, str):
            return ends_of(policy_tokenizer, self.policy_tokenizer)
        return None if policy_tokenizer is None else [policy_tokenizer.eos_token_id]

    @cached_property
    def identity(self) -> str:
        """Return a text that identifies the weights, the tokenizer and the settings that the scores depend on."""
        from peft import PeftConfig

        from ..models.loading import is_adapter

        if self.path is None:
            weights = [f"xxh3:{hash_of(self.model.state_dict(keep_vars=True))[:12]}"]
        else:
            weights = [path_identity(self.path, self.revision)]
            if is_adapter(self.path, self.revision):
                base = PeftConfig.from_pretrained(self.path, revision=self.revision)
                weights.append(path_identity(base.base_model_name_or_path, base.revision))
        dtype = next(self.model.parameters()).dtype
        settings = [self.load_in_8bit, self.max_length, self.truncation, sorted(self.chat_template_kwargs.items())]
        settings += [self.eos_token_ids, self.shares_tokenizer]  # which tokens of a completion are read
        return " ".join(map(str, [*weights, tokenizer_identity(self.tokenizer), dtype, *settings]))

    def __call__(
        self,
        prompts: list,
        completions: list,
        completion_ids: list[list[int]] | None = None,
        prompt_ids: list[list[int]] | None = None,
        finished: list[bool] | None = None,
        log_metric: Any = None,
        **_: Any,
    ) -> list[float]:
        """
        Return each completion's score.

        Args:
            prompts, completions: texts or messages.
            completion_ids: the policy's tokens of each completion, EOS included; None if they are not known.
            prompt_ids: the policy's tokens of each prompt; None if they are not known.
            finished: whether each completion is finished; if None, `completion_ids` and `eos_token_ids` tell.
            log_metric: TRL's function that logs a metric; None logs nothing.

        Raises:
            ValueError: it is not known which completions are finished, or `truncation` is `"refuse"` and a row is
                longer than `max_length`.
        """
        if finished is None:
            if self.eos_token_ids is None or completion_ids is None:
                raise ValueError(
                    "the reward model cannot tell which completions are finished: call it with `finished`; or with "
                    "`completion_ids`, and give it the policy's `eos_token_ids` or tokenizer (`policy_tokenizer`)"
                )
            finished = [bool(row) and row[-1] in self.eos_token_ids for row in completion_ids]
        scores = [0.0] * len(prompts)
        with _ONE_AT_A_TIME:
            if self._to_place:
                self.device = self.device or PartialState().device
                self.model.to(self.device)
                self._to_place = False
            rows = self._rows(prompts, completions, completion_ids, prompt_ids, finished) if prompts else []
            rows = self._fitting(rows, log_metric)
            for batch in batches([len(row) for row in rows], self.max_batch_tokens, self.batch_size):
                for row, score in zip(batch, self._scores([rows[row] for row in batch]), strict=True):
                    scores[row] = score
        return scores

    def _rows(self, prompts, completions, completion_ids, prompt_ids, ended) -> list[list[int]]:
        """Return each row's token ids, as the model reads them; `ended` says which completions are finished."""
        has_ids = prompt_ids is not None and completion_ids is not None and self.policy_tokenizer is not None
        if has_ids and self.shares_tokenizer:
            rows = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
            # A policy with a larger embedding may sample an id that is no token; decoded to text, the id would vanish
            rows = [[i for i in row if i < len(self.tokenizer)] for row in rows]
            if is_conversational({"prompt": prompts[0]}):
                for row, prompt, end in zip(rows, prompts, ended, strict=True):
                    row += self._after_eos(prompt, row[-1]) if end else []
            return rows
        if has_ids:
            parts = zip(completions, prompt_ids, completion_ids, strict=True)
            completions = [self._continuation(*part) for part in parts]
        return [self._tokenize(*part) for part in zip(prompts, completions, ended, strict=True)]

    def _fitting(self, rows: list[list[int]], log_metric: Any) -> list[list[int]]:
        """Return the rows cut to `max_length` tokens, or raise a `ValueError`, as `truncation` says."""
        longest = max(map(len, rows), default=0)
        limit = self.max_length
        too_long = [len(row) > limit for row in rows]
        if any(too_long) and self.truncation == "refuse":
            raise ValueError(
                f"a prompt with its completion has {longest} tokens, but the reward model reads {limit} at most (its "
                "context, or a smaller `max_length`): shorten the prompts, lower `max_completion_length`, or cut the "
                "beginning of long prompts off by `ModelReward(…, truncation='left')`"
            )
        if self.truncation == "left":
            log_to(log_metric, {"truncated": sum(too_long) / max(len(rows), 1)}, self)
        first = {self.tokenizer.bos_token_id, self.tokenizer.cls_token_id}
        kept = [int(row[0] in first) if row else 0 for row in rows]  # how many stay in front
        return [
            row[:k] + row[len(row) - limit + k :] if cut else row
            for row, k, cut in zip(rows, kept, too_long, strict=True)
        ]

    def _scores(self, ids: list[list[int]]) -> list[float]:
        """Score a batch of rows in one forward pass."""
        pad = self.tokenizer.pad_token_id
        if pad is None:
            pad = self.tokenizer.eos_token_id  # as RewardTrainer does
        # Pad on the right, whatever the tokenizer says, as RewardTrainer did
        input_ids, mask = padded(ids, "right", self.device or self.model.device, pad)
        with torch.no_grad(), temporarily(self.config, pad_token_id=pad):
            return self.score(input_ids, mask).float().tolist()

    def _continuation(self, completion: Any, prompt_ids: list[int], completion_ids: list[int]) -> Any:
        """Return a completion's text with its first space, which SentencePiece drops; return messages unchanged."""
        ids = [prompt_ids, [*prompt_ids, *completion_ids]]
        prompt, whole = self.policy_tokenizer.batch_decode(ids, skip_special_tokens=True)
        return whole.removeprefix(prompt) if isinstance(completion, str) and whole.startswith(prompt) else completion

    def _after_eos(self, prompt: list, eos: int) -> list[int]:
        """Return the tokens that the chat template puts after a turn's `eos` (ChatML: a line break); [] if none."""
        messages = [{"role": "assistant", "content": "x"}]
        closing = self._tokenize(prompt, messages, True)[len(self._tokenize(prompt, messages, False)) :]
        return closing[1:] if closing[:1] == [eos] else []

    def _tokenize(self, prompt: Any, completion: Any, finished: bool) -> list[int]:
        """Return a row's token ids by the model's tokenizer and chat template; EOS only if it is finished."""
        if is_conversational({"prompt": prompt}):
            return self.tokenizer.apply_chat_template(
                prompt + completion,
                tokenize=True,
                return_dict=True,
                continue_final_message=not finished,
                **self.chat_template_kwargs,
            )["input_ids"]
        return self.tokenizer(prompt + completion + ((self.tokenizer.eos_token or "") if finished else ""))[
            "input_ids"
        ]
