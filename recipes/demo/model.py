"""Build the demo's language model and its tokenizer from scratch: nothing is downloaded."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .world import AGENT, vocabulary


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word."""
    tokens = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", AGENT, *vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=[AGENT],
        clean_up_tokenization_spaces=False,  # "hello , i" must stay the words it was
        padding_side="left",
        model_max_length=128,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a Llama with about 0.1 million parameters and random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)
