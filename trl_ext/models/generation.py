"""Sample from a causal language model, and compute log-probs of completions."""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from ..functional import logprobs_and_entropies, position_ids
from ..upstream.names import pad
from ..upstream.statements import temporarily
from .weights import base_model_of

_PAD = 0  # any id would do, since it is masked; a tokenizer's own pad may lie outside the model's vocabulary


@contextmanager
def neutral_generation(model: Any) -> Iterator[None]:
    """
    Hide the checkpoint's generation_config.json from `generate` within the `with` block.

    `generate` reads from this file every field that a call leaves unset, such as `min_p`, `no_repeat_ngram_size` and
    stop strings. Completions would then come from another distribution than the one whose log-probs are computed.

    Args:
        model: a model, plain or wrapped by PEFT, DDP or DeepSpeed.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if vars(module).get("generation_config") is not None:
                stack.enter_context(temporarily(module, generation_config=GenerationConfig()))
        yield


def check_savable(model: Any) -> None:
    """Raise a `ValueError` now if transformers would refuse to save the model with its generation config."""
    if not hasattr(model, "peft_config"):  # an adapter is saved without a generation config
        model.generation_config.validate(strict=True)


def forked_rng(device: torch.device) -> AbstractContextManager:
    """Restore torch's global random states, of the CPU and (but for MPS) of `device`, after the `with` block."""
    devices = [device] if device.type not in ("cpu", "mps") else []
    return torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda")


def eos_token_ids(model: Any, tokenizer: Any, revision: str | None = None) -> list[int]:
    """
    Return the ids of all tokens that end a completion: the EOS of the tokenizer and of the model's generation config.

    Args:
        model: a model; or its folder or hub name (no weights are loaded from there).
    """
    if isinstance(model, str):
        from .loading import base_of

        model, revision = base_of(model, revision)
        try:
            config = GenerationConfig.from_pretrained(model, revision=revision)
        except OSError:  # there is no such file, so transformers would make one from the model's configuration
            config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model, revision=revision))
    else:
        config = base_model_of(model).generation_config
    saved = config.eos_token_id
    if not isinstance(saved, list):
        saved = [saved]
    return sorted({tokenizer.eos_token_id, *saved} - {None})


def warn_of_turn_end(tokenizer: Any, ends: Iterable[int], setting: str) -> None:
    """
    Warn if the chat template ends an assistant's turn with a special token that is not in `ends`.

    Args:
        tokenizer: the model's tokenizer, with its chat template.
        ends: ids of the tokens that end a completion.
        setting: the setting that the warning advises, as a format string such as `"stop_token_id: {id}"` or
            `"eos_token: {token!r}"`.
    """
    reply = "trl_ext"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    try:
        _, is_there, after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(reply)
    except TemplateError:  # a template that takes no such turns
        return
    end = next(iter(tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]), None)
    if is_there and end in tokenizer.added_tokens_decoder and end not in {*ends}:
        token = tokenizer.convert_ids_to_tokens(end)
        warnings.warn(
            f"The chat template ends the assistant's turn by {token!r}, but a completion ends only by "
            f"{', '.join(map(repr, tokenizer.convert_ids_to_tokens([*ends])))}: if the model ends turns as the "
            f"template does, its completions run on until they are cut off. Set "
            f"`{setting.format(token=token, id=end)}`.",
            UserWarning,
            stacklevel=2,
        )


def prompt_token_ids(tokenizer: Any, prompts: Sequence[Any]) -> list[list[int]]:
    """
    Tokenize prompts.

    Args:
        tokenizer: the tokenizer; for prompts that are messages it must have a chat template.
        prompts: texts, or lists of messages. If the last message is the assistant's, it is left open, to be continued;
            else the assistant's turn is opened after it.

    Returns:
        Token ids of each prompt.
    """
    return [
        tokenizer(prompt)["input_ids"]
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(  # to ids, since the tokenizer would add a BOS to the template's own
            prompt,
            add_generation_prompt=prompt[-1]["role"] != "assistant",
            continue_final_message=prompt[-1]["role"] == "assistant",
            return_dict=True,
        )["input_ids"]
        for prompt in prompts
    ]


def sample(
    model: Any,
    prompt_ids: Sequence[list[int]],
    eos_token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch_size: int | None = None,
    seed: int | None = None,
) -> list[list[int]]:
    """
    Sample a completion of each prompt, and ignore the sampling settings of the checkpoint's generation_config.json.

    Args:
        model: a causal language model in evaluation mode.
        prompt_ids: token ids of each prompt; a prompt has at least one.
        eos_token_ids: tokens that end a completion.
        max_new_tokens: tokens after which a completion is cut off.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_p: sample only from the smallest set of the likeliest tokens whose probabilities sum to at least this.
        batch_size: number of prompts to answer at once; None answers all at once.
        seed: seed of the samples, after which the global generators are restored; None samples from the global
            generators.

    Returns:
        Token ids of each completion, up to and including its EOS, if it has one.
    """
    # 0 switches top-k off; unset, it would be 50
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=_PAD,
        **(sampling if temperature else {"do_sample": False}),
    )
    size = batch_size or max(len(prompt_ids), 1)
    completion_ids = []
    with neutral_generation(model), nullcontext() if seed is None else forked_rng(model.device):
        if seed is not None:
            torch.manual_seed(seed)
        for start in range(0, len(prompt_ids), size):
            ids, mask = padded(prompt_ids[start : start + size], "left", model.device)
            sequences = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            completion_ids += [up_to_eos(row, eos_token_ids) for row in sequences[:, ids.shape[1] :].tolist()]
    return completion_ids


def answer_texts(tokenizer: Any, answers: Sequence[list[int]], eos_token_ids: Sequence[int]) -> list[str]:
    """
    Return each completion's text, without the tokenizer's special tokens, and without a last token that is one of
    `eos_token_ids`, special or not. A completion has at least one token.
    """
    ids = [row[:-1] if row[-1] in eos_token_ids else row for row in answers]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def answer_rows(
    tokenizer: Any,
    prompts: Sequence[Any],
    prompt_ids: Sequence[list[int]],
    answers: Sequence[list[int]],
    eos_token_ids: Sequence[int],
) -> list[dict[str, Any]]:
    """
    Return a row for each completion, with what a reward function reads.

    Args:
        prompts, prompt_ids: the prompts, texts or messages, and their token ids.
        answers: token ids of the completions, as [`sample`] returns them.
        eos_token_ids: tokens that end a completion.

    Returns:
        A dict for each completion: `prompt`; `completion`, a text for a text, a list with one message for messages;
        `prompt_ids`, `completion_ids`; and `finished`, whether the completion ends by EOS.
    """
    return [
        {
            "prompt": prompt,
            "completion": text if isinstance(prompt, str) else [{"role": "assistant", "content": text}],
            "prompt_ids": asked,
            "completion_ids": ids,
            "finished": ids[-1] in eos_token_ids,
        }
        for prompt, asked, ids, text in zip(
            prompts, prompt_ids, answers, answer_texts(tokenizer, answers, eos_token_ids), strict=True
        )
    ]


@torch.no_grad()
def completion_logprobs(
    model: Any, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """
    Compute the log-probs of completions, log π(y_t | x, y_<t).

    Args:
        model: a causal language model in evaluation mode.
        prompt_ids: token ids of each prompt.
        completion_ids: token ids of each completion; T is the length of the longest.
        temperature: divides the logits.

    Returns:
        (B, T) log-probs, nats, 0 on padding; and a (B, T) mask, bool, of the completions' tokens.
    """
    prompts, prompt_mask = padded(prompt_ids, "left", model.device)
    completions, mask = padded(completion_ids, "right", model.device)
    attention_mask = torch.cat([prompt_mask, mask], dim=1)
    width = completions.shape[1]
    # One more than the completion: the first of its tokens is chosen after the prompt's last
    options = {"position_ids": position_ids(attention_mask), "logits_to_keep": width + 1, "use_cache": False}
    taken = inspect.signature(type(base_model_of(model)).forward).parameters
    logits = model(
        input_ids=torch.cat([prompts, completions], dim=1),
        attention_mask=attention_mask,
        **{name: value for name, value in options.items() if name in taken},
    ).logits[:, -width - 1 : -1]
    logprobs = torch.stack(
        [  # row by row, since a copy of all logits may not fit into memory
            logprobs_and_entropies(row, ids, temperature, with_entropies=False)[0]
            for row, ids in zip(logits, completions, strict=True)
        ]
    )
    return torch.where(mask.bool(), logprobs, 0.0), mask.bool()


def up_to_eos(ids: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Cut a list of token ids off after its first EOS, one of `eos_token_ids`."""
    end = next((i + 1 for i, token in enumerate(ids) if token in eos_token_ids), len(ids))
    return ids[:end]


def padded(
    rows: Sequence[list[int]], side: str, device: Any, value: int = _PAD, multiple: int | None = None
) -> tuple[Tensor, Tensor]:
    """
    Pad rows of token ids with `value` on the `side` "left" or "right".

    Return (B, L) ids, L rounded up to a multiple of `multiple`, and their (B, L) mask, 1 = real token.
    """
    ids = [torch.tensor(row, dtype=torch.long, device=device) for row in rows]
    return pad(ids, value, side, multiple), pad([*map(torch.ones_like, ids)], 0, side, multiple)
