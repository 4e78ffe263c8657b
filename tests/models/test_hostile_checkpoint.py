"""No setting in a checkpoint's generation_config.json changes how our code samples."""

import pytest
import torch
from transformers import GenerationConfig

from tests.dpo.worker import make_trainer as make_dpo_trainer
from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext import PPOTrainer
from trl_ext.models import ActorCritic, sample

HOSTILE = {  # field of `GenerationConfig` -> a value that changes the output of `generate`, or breaks it
    "assistant_confidence_threshold": 0.9,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 1,
    "bad_words_ids": [[7], [8]],
    "begin_suppress_tokens": [*range(6, 20)],
    "cache_config": {"backend": "none"},
    "cache_implementation": "quantized",
    "compile_config": {"fullgraph": True},
    "constraints": ["x"],
    "continuous_batching_config": {"num_blocks": 1},
    "decoder_start_token_id": 9,
    "disable_compile": False,
    "diversity_penalty": 2.0,
    "do_sample": False,
    "dola_layers": "low",
    "early_stopping": True,
    "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 3.0,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.05,
    "exponential_decay_length_penalty": (1, 3.0),
    "force_words_ids": [[8]],
    "forced_bos_token_id": 21,
    "forced_eos_token_id": 21,
    "guidance_scale": 4.0,
    "is_assistant": True,
    "length_penalty": 4.0,
    "low_memory": True,
    "max_cache_len": 3,
    "max_length": 4,
    "max_matching_ngram_size": 2,
    "max_new_tokens": 1,
    "max_time": 0.0,
    "min_length": 30,
    "min_new_tokens": 30,
    "min_p": 0.5,
    "no_repeat_ngram_size": 1,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant",
    "num_beam_groups": 2,
    "num_beams": 3,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "pad_token_id": 9,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 1,
    "prompt_lookup_num_tokens": 3,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 5.0,
    "return_dict_in_generate": True,
    "sequence_bias": [[[7], 9.0]],
    "speculation_type": "x",
    "stop_strings": ["cat", "dog"],
    "suppress_tokens": [*range(6, 20)],
    "target_lookbehind": 1,
    "temperature": 0.1,
    "token_healing": True,
    "top_h": 0.1,
    "top_k": 2,
    "top_p": 0.1,
    "typical_p": 0.1,
    "use_cache": False,
    "use_mtp": True,
    "watermarking_config": {"bias": 9.0},
    "a_setting_of_tomorrow": 3,
}
# Names of tokens and bookkeeping, not settings of sampling
READ = {"bos_token_id", "eos_token_id", "transformers_version", "_from_model_config"}
IDS = [[6, 7, 8], [9]] * 8


def rollout(model):
    """Generate a rollout as TRL does."""
    asked = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    ids, mask = torch.tensor([[0, 0, 9], [6, 7, 8]] * 8), torch.tensor([[0, 0, 1], [1, 1, 1]] * 8)
    return model.generate(
        input_ids=ids, attention_mask=mask, generation_config=GenerationConfig(**asked, eos_token_id=[2])
    )


@pytest.mark.slow
def test_no_field_of_the_checkpoint_changes_a_sample_or_a_rollout(subtests):
    """A field that is new in transformers must be added here. Half of the fields do change a plain `generate`."""
    fields = vars(GenerationConfig()).keys()
    assert fields <= HOSTILE.keys() | READ, f"give {sorted(fields - HOSTILE.keys() - READ)} a hostile value"
    model, bites = tiny_llama().eval(), 0
    actor_critic = ActorCritic(model, tiny_reward_model(model))
    samples, rolled = sample(model, IDS, [2], max_new_tokens=8, seed=0), rollout(actor_critic)
    plain = rollout(model)  # with other random numbers
    for name, value in HOSTILE.items():
        with subtests.test(name=name):
            model.generation_config = GenerationConfig()
            setattr(model.generation_config, name, value)
            assert sample(model, IDS, [2], max_new_tokens=8, seed=0) == samples
            assert torch.equal(rollout(actor_critic), rolled)
            try:
                bites += not torch.equal(rollout(model), plain)
            except Exception:  # so many different outcomes
                bites += 1
    assert bites > 30


@pytest.mark.parametrize("what", ["PPO", "DPO"])
def test_a_config_that_could_not_be_saved_is_refused_before_training(what, tmp_path):
    model = tiny_llama()
    model.generation_config.temperature = 0.6
    with pytest.raises(ValueError, match="`temperature`.*do_sample"):
        if what == "DPO":
            make_dpo_trainer(tmp_path, model)
        else:
            arguments = {"train_dataset": prompts(), "processing_class": tiny_tokenizer()}
            PPOTrainer(model, length_reward, tiny_config(tmp_path), **arguments)
    model.generation_config.do_sample = True
    make_dpo_trainer(tmp_path, model).save_model()
