"""What stands between the trainer and the reward functions: checks, and reward models that see what training saw."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..upstream import is_async_callable, is_conversational


class CheckedReward:
    """
    A reward function whose mistakes are noted instead of raised: an exception on one process would leave the others
    waiting in the next collective. The trainer raises the notes on all processes together.
    """

    def __init__(self, function: Callable, name: str, mistakes: list[tuple[str, Exception | None]]):
        self.function = function
        self.name = name
        self.mistakes = mistakes

    def __call__(self, prompts: list, **kwargs) -> list[float | None]:
        try:
            return self._checked(self.function(prompts=prompts, **kwargs), prompts)
        except Exception as error:
            return self._note(error, prompts)

    def _note(self, error: Exception, prompts: list) -> list[float | None]:
        self.mistakes.append((f"reward function '{self.name}': {type(error).__name__}: {error}", error))
        return [0.0] * len(prompts)

    def _checked(self, rewards: Any, prompts: list) -> list[float | None]:
        rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards
        if not isinstance(rewards, (list, tuple)):
            raise TypeError(f"must return a list with one float or None per completion, got {type(rewards).__name__}")
        if len(rewards) != len(prompts):
            raise ValueError(f"returned {len(rewards)} rewards for {len(prompts)} completions; return one for each")
        for row, reward in enumerate(rewards):
            if reward is None:
                continue
            if isinstance(reward, (str, list)):
                raise TypeError(f"returned {reward!r} for completion {row}; return a float, or None")
            if not abs(reward) <= torch.finfo(torch.float32).max:  # NaN, too
                raise ValueError(f"returned {reward} for completion {row}; return None where it does not apply")
        return [None if reward is None else float(reward) for reward in rewards]


class CheckedAsyncReward(CheckedReward):
    async def __call__(self, prompts: list, **kwargs) -> list[float | None]:  # type: ignore[override]
        try:
            return self._checked(await self.function(prompts=prompts, **kwargs), prompts)
        except (Exception, asyncio.CancelledError) as error:
            return self._note(error if isinstance(error, Exception) else RuntimeError("cancelled"), prompts)


def checked(function: Callable, name: str, mistakes: list) -> CheckedReward:
    return (CheckedAsyncReward if is_async_callable(function) else CheckedReward)(function, name, mistakes)


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    return a is b or (a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id)


class AdapterReward:
    """Stands for a reward model that was saved as an adapter, until the policy is there whose base it may share."""

    def __init__(self, path: str):
        self.path = path
        self.__name__ = os.path.basename(os.path.normpath(path))

    def __call__(self, *args, **kwargs):
        raise NotImplementedError


class ModelReward:
    """
    A reward model as a reward function, fed what `trl.RewardTrainer` trained it on.

    With the policy's tokenizer it scores the token ids themselves, EOS included, and what a chat template puts behind
    it. With another tokenizer the text is tokenised as RewardTrainer does, special tokens included, and the model's
    own EOS (for messages: its chat template's end of turn) is there exactly if the answer was finished.

    Args:
        score: (B,) scores of right-padded `input_ids` and `attention_mask` (B, L).
        context: the most tokens the model can read, None if it does not say.
        tokenizer: the model's own tokenizer.
        policy_tokenizer: the tokenizer of `prompt_ids` and `completion_ids`.
        batch_size: rows in one forward.
        is_finished: whether these completion ids end by EOS.
        prompt_ids: returns the token ids of the current prompts.
        chat_template_kwargs: passed on to the chat template.
    """

    def __init__(
        self,
        score: Callable[..., Tensor],
        context: int | None,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        is_finished: Callable[[list[int]], bool],
        prompt_ids: Callable[[], list[list[int]]],
        chat_template_kwargs: dict[str, Any],
    ):
        self.score = score
        self.context = context
        self.device = device
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.shares_tokenizer = same_tokenizer(tokenizer, policy_tokenizer)
        self.batch_size = batch_size
        self.is_finished = is_finished
        self.prompt_ids = prompt_ids
        self.chat_template_kwargs = chat_template_kwargs

    def __call__(self, prompts: list, completions: list, completion_ids: list[list[int]], **_) -> list[float]:
        if self.shares_tokenizer:
            ids = [list(p) + list(c) for p, c in zip(self.prompt_ids(), completion_ids, strict=True)]
            if is_conversational({"prompt": prompts[0]}):
                for row, prompt, completion_id in zip(ids, prompts, completion_ids, strict=True):
                    row += self._after_eos(prompt, completion_id[-1]) if self.is_finished(completion_id) else []
        else:
            ids = [
                self._tokenize(prompt, self._continuation(completion, p, c), self.is_finished(c))
                for prompt, completion, p, c in zip(
                    prompts, completions, self.prompt_ids(), completion_ids, strict=True
                )
            ]
        longest = max(map(len, ids))
        if self.context and longest > self.context:
            raise ValueError(
                f"a prompt with its completion has {longest} tokens, the reward model's context {self.context}: "
                "shorten the prompts or `max_completion_length`"
            )
        scores: list[float] = []
        for start in range(0, len(ids), self.batch_size):
            batch = self.tokenizer.pad(
                {"input_ids": ids[start : start + self.batch_size]}, padding_side="right", return_tensors="pt"
            ).to(self.device)
            with torch.no_grad():
                scores += self.score(batch["input_ids"], batch["attention_mask"]).float().tolist()
        return scores

    def _continuation(self, completion: Any, prompt_ids: list[int], completion_ids: list[int]) -> Any:
        """The text of a completion behind its prompt: decoded alone, SentencePiece drops its leading space."""
        ids = [prompt_ids, [*prompt_ids, *completion_ids]]
        prompt, whole = self.policy_tokenizer.batch_decode(ids, skip_special_tokens=True)
        return whole.removeprefix(prompt) if isinstance(completion, str) and whole.startswith(prompt) else completion

    def _after_eos(self, prompt: list, eos: int) -> list[int]:
        """What the chat template puts behind the EOS of the last turn (ChatML: a line break)."""
        messages = [{"role": "assistant", "content": "x"}]
        closing = self._tokenize(prompt, messages, True)[len(self._tokenize(prompt, messages, False)) :]
        return closing[1:] if closing[:1] == [eos] else []

    def _tokenize(self, prompt: Any, completion: Any, finished: bool) -> list[int]:
        if is_conversational({"prompt": prompt}):
            return self.tokenizer.apply_chat_template(
                prompt + completion,
                tokenize=True,
                return_dict=True,
                continue_final_message=not finished,
                **self.chat_template_kwargs,
            )["input_ids"]
        return self.tokenizer(prompt + completion + (self.tokenizer.eos_token if finished else ""))["input_ids"]
