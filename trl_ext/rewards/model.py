"""A reward model as a reward function."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..temporarily import temporarily
from ..upstream import is_conversational


def logits_of(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the (B,) scores of a sequence classifier of one label."""
    return model(input_ids=input_ids, attention_mask=attention_mask).logits[:, 0]


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    return a is b or (a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id)


def load_classifier(path: str, **kwargs: Any) -> Any:
    """Load a sequence classifier of one label; raise a `ValueError` if what was saved has another number of them."""
    try:
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **kwargs)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        names = {"revision", "trust_remote_code"} & kwargs.keys()
        labels = AutoConfig.from_pretrained(path, **{name: kwargs[name] for name in names}).num_labels
        raise ValueError(
            f"{path} has num_labels={labels} in its configuration, and weights that do not fit a classifier of one "
            "label, which a reward model or critic is: train one (`recipes/reward.py`), or name another."
        ) from error


def load_reward_model(path: str, **kwargs: Any) -> PreTrainedModel:
    """Load a sequence classifier of one label; raise a `ValueError` if its head would be new, so random."""
    model, found = load_classifier(path, output_loading_info=True, **kwargs)
    new = sorted(key for key in found["missing_keys"] if not key.startswith(f"{model.base_model_prefix}."))
    if new:
        raise ValueError(
            f"{path} is no reward model: it has no weights for {', '.join(new)}, so that its scores would be random. "
            "Train one (`recipes/reward.py`), or pass a model object if that is what you want."
        )
    return model


class ModelReward:
    """
    Score answers with a reward model, fed what `trl.RewardTrainer` trained it on.

    With the policy's tokenizer it reads the token ids themselves, EOS included, and what a chat template puts behind
    it. With another tokenizer the text is tokenised as RewardTrainer does, special tokens included. The model's own
    EOS (for messages: its chat template's end of turn) is there exactly if the answer was finished.

    Args:
        score: returns the (B,) scores of right-padded `input_ids` and `attention_mask` (B, L).
        config: the model's configuration.
        tokenizer: the model's own tokenizer.
        policy_tokenizer: the tokenizer of `prompt_ids` and `completion_ids`.
        eos_token_ids: ids of the policy that finish an answer.
        batch_size: rows in one forward.
        device: where `score` reads its inputs.
        chat_template_kwargs: passed on to the chat template.
    """

    def __init__(
        self,
        score: Callable[[Tensor, Tensor], Tensor],
        config: Any,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: list[int],
        batch_size: int,
        device: torch.device,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        self.score = score
        self.config = config.get_text_config()
        self.context = getattr(config, "max_position_embeddings", None)
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.shares_tokenizer = same_tokenizer(tokenizer, policy_tokenizer)
        self.eos_token_ids = eos_token_ids
        self.batch_size = batch_size
        self.device = device
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.__name__ = "model_reward"

    @classmethod
    def from_pretrained(cls, path: str, policy_tokenizer: Any, eos_token_ids: list[int], batch_size: int, device: Any):
        """Load a sequence classifier of one label, and its tokenizer, from a folder or the hub."""
        tokenizer = AutoTokenizer.from_pretrained(path)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model: Any = load_reward_model(path).to(device).eval()
        reward = cls(
            partial(logits_of, model), model.config, tokenizer, policy_tokenizer, eos_token_ids, batch_size, device
        )
        reward.__name__ = os.path.basename(os.path.normpath(path))
        return reward

    def __call__(
        self, prompts: list, completions: list, completion_ids: list[list[int]], prompt_ids: list[list[int]], **_
    ) -> list[float]:
        """Score each completion; `prompt_ids` are the tokens that the policy was given for each prompt."""
        finished = [row[-1] in self.eos_token_ids for row in completion_ids]
        if self.shares_tokenizer:
            ids = [[*prompt, *answer] for prompt, answer in zip(prompt_ids, completion_ids, strict=True)]
            if is_conversational({"prompt": prompts[0]}):
                for row, prompt, ended in zip(ids, prompts, finished, strict=True):
                    row += self._after_eos(prompt, row[-1]) if ended else []
        else:
            rows = zip(prompts, completions, prompt_ids, completion_ids, finished, strict=True)
            ids = [
                self._tokenize(prompt, self._continuation(text, asked, answer), ended)
                for prompt, text, asked, answer, ended in rows
            ]
        longest = max(map(len, ids))
        if self.context and longest > self.context:
            raise ValueError(
                f"a prompt with its completion has {longest} tokens, the reward model's context {self.context}: "
                "shorten the prompts or `max_completion_length`"
            )
        return [
            score
            for start in range(0, len(ids), self.batch_size)
            for score in self._scores(ids[start:][: self.batch_size])
        ]

    def _scores(self, ids: list[list[int]]) -> list[float]:
        pad = self.tokenizer.pad_token_id
        if pad >= self.config.vocab_size:
            # The model has no row for it. It takes a row's last token that is not the pad token as the end of the row
            last = {row[-1] for row in ids}
            pad = next(token for token in range(len(last) + 1) if token not in last)
        lengths = torch.tensor([len(row) for row in ids], device=self.device)
        rows = [torch.tensor(row, device=self.device) for row in ids]
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        mask = (torch.arange(input_ids.size(1), device=self.device) < lengths[:, None]).long()
        with torch.no_grad(), temporarily(self.config, pad_token_id=pad):
            return self.score(input_ids, mask).float().tolist()

    def _continuation(self, completion: Any, prompt_ids: list[int], completion_ids: list[int]) -> Any:
        """Return the text of a completion behind its prompt: decoded alone, SentencePiece drops its leading space."""
        ids = [prompt_ids, [*prompt_ids, *completion_ids]]
        prompt, whole = self.policy_tokenizer.batch_decode(ids, skip_special_tokens=True)
        return whole.removeprefix(prompt) if isinstance(completion, str) and whole.startswith(prompt) else completion

    def _after_eos(self, prompt: list, eos: int) -> list[int]:
        """Return what the chat template puts behind the EOS of the last turn (ChatML: a line break)."""
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
