"""The models of the shipped recipes: their sizes, and tiny models of the same architecture."""

import string

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DebertaV2Config,
    DebertaV2Tokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
)

from tests.tiny import CHAT_TEMPLATE

QWEN = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True, "dtype": "bfloat16"}
LLAMA = {
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "dtype": "bfloat16"},
}
SHAPES = {
    "Qwen/Qwen2.5-0.5B": (
        Qwen2Config,
        QWEN
        | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        | {"max_position_embeddings": 32768},
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": (
        Qwen2Config,
        QWEN
        | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
        | {"max_position_embeddings": 32768},
    ),
    "meta-llama/Llama-3.1-8B": (LlamaConfig, LLAMA),
    "meta-llama/Llama-3.1-8B-Instruct": (LlamaConfig, LLAMA),
    "meta-llama/Llama-3.1-70B": (
        LlamaConfig,
        LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "microsoft/deberta-v3-base": (
        DebertaV2Config,
        {"vocab_size": 128100, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
        | {"num_attention_heads": 12, "max_position_embeddings": 512, "relative_attention": True}
        | {"position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p"}
        | {"max_relative_positions": -1, "position_biased_input": False, "type_vocab_size": 0, "pooler_dropout": 0}
        | {"pooler_hidden_act": "gelu", "pooler_hidden_size": 768},
    ),
}


def config_of(name, **kwargs):
    cls, shape = SHAPES[name]
    architecture = "SequenceClassification" if cls is DebertaV2Config else "CausalLM"
    return cls(architectures=[f"{cls.__name__.removesuffix('Config')}For{architecture}"], **shape, **kwargs)


def tokenizer_of(name):
    """A tokenizer of the model's class with a small vocabulary: bytes, or letters for DeBERTa."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if SHAPES[name][0] is DebertaV2Config:
        pieces = [*special, "[MASK]", "\u2581", *string.ascii_letters, *string.punctuation]
        names |= {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "mask_token": "[MASK]"}
        return DebertaV2Tokenizer(vocab=[(piece, -1.0) for piece in pieces], **names)
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(ByteLevel.alphabet())])}
    if SHAPES[name][0] is Qwen2Config:
        tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], pad_token="<pad>", **names)
    else:  # no pad token, as in Llama's
        backend = Tokenizer(BPE(vocabulary, []))
        backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if "Instruct" in name or "Qwen" in name:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_of(name, vocab_size, num_labels=None):
    """The same architecture with a few hundred thousand parameters; a classifier if `num_labels` is given."""
    cls, shape = SHAPES[name]
    # Multiples of 128: bitsandbytes on CPUs with AVX512-BF16 wants whole blocks of 4-bit weights
    small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"vocab_size": vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"}
    small |= {"num_key_value_heads": 2} if "num_key_value_heads" in shape else {"pooler_hidden_size": 128}
    config = cls(**{**shape, **small, **({"num_labels": num_labels} if num_labels else {})})
    if num_labels:
        return AutoModelForSequenceClassification.from_config(config)
    return (AutoModel if cls is DebertaV2Config else AutoModelForCausalLM).from_config(config)
