"""Vision-language models pass through TRL's collator and the tap."""

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from tests.dpo.worker import DRIFT, INFORMED, NORMALIZED, QUIET, config, logged
from tests.tiny import WORDS, tiny_tokenizer
from trl_ext import DPOTrainer

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% for c in m.content %}"
    "{% if c.type == 'image' %}<image> {% else %}{{ c.text }} {% endif %}{% endfor %}"
    "{% if m.role == 'assistant' %}</s> {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def processor():
    tokenizer = tiny_tokenizer(words=[*WORDS, "<image>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


def model(tokenizer):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**shape, image_size=8, patch_size=4, projection_dim=16),
            text_config=LlamaConfig(**shape, **tokens, vocab_size=len(tokenizer), max_position_embeddings=64),
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1,
        )
    )


def rows():
    generator = np.random.default_rng(0)
    return Dataset.from_list(
        [
            {
                "images": [Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8))],
                "prompt": [{"role": "user", "content": "the cat"}],
                "chosen": [{"role": "assistant", "content": f"sat on {WORDS[i]}"}],
                "rejected": [{"role": "assistant", "content": f"ran {WORDS[i + 1]}"}],
                "confidence": 0.8,
                "weight": 1.0,
                "margin": 0.1,
                "source": "long",
            }
            for i in range(8)
        ]
    )


@pytest.mark.parametrize("options", [{}, {"log_displacement": True}, {**DRIFT, **INFORMED, **NORMALIZED}], ids=len)
def test_vision_language_models(options, tmp_path):
    vision, shared = processor(), {"max_length": None, "max_steps": 3}
    args = config(tmp_path, **shared, **options)
    ours = DPOTrainer(model(vision.tokenizer), args=args, train_dataset=rows(), processing_class=vision)
    ours.train()
    if len(options) > 1:
        assert logged(ours, "beta")[-1] != 0.1 and logged(ours, "loss")[-1] < logged(ours, "loss")[0]
        return
    theirs = trl.DPOTrainer(
        model(vision.tokenizer),
        ref_model=model(vision.tokenizer),
        args=trl.DPOConfig(str(tmp_path), **QUIET | shared),
        train_dataset=rows(),
        processing_class=vision,
    )
    theirs.train()
    assert logged(ours, "loss") == logged(theirs, "loss")
