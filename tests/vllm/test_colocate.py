"""PPO with the real vLLM in the trainer's process, on a CPU."""

import functools

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer import grpo_trainer

from tests.agents import Counter, byte_tokenizer
from tests.ppo.agent_worker import rows
from tests.tiny import collected, end_state, tiny_config, tiny_llama, tiny_ppo, tiny_tokenizer, weights
from trl_ext import PPOTrainer
from trl_ext.functional import turn_starts

pytestmark = pytest.mark.vllm

LORA = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}  # vLLM needs heads of 32 or more
# How far log-probs of vLLM and the trainer may differ, nats: the mean of the absolute values and the largest
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (0.1, 1.0)}


def tied_qwen(**kwargs):
    torch.manual_seed(0)
    shape = {"vocab_size": 29, "intermediate_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **ids, **SHAPE, tie_word_embeddings=True))


MODELS = dict.fromkeys(("llama", "packed"), functools.partial(tiny_llama, **SHAPE)) | {"tied qwen": tied_qwen}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The folder of a tiny policy with two additional EOS tokens."""

    @functools.cache
    def folder(name):
        path = tmp_path_factory.mktemp("policy")
        model = MODELS[name]()
        model.generation_config.eos_token_id = [2, 11]
        model.save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        return str(path)

    return folder


@pytest.fixture(scope="module")
def engines():
    """Engines by model and dtype: starting one takes a while, and the first weight sync sends all weights."""
    from trl.generation import vllm_generation
    from vllm import LLM

    from tests.vllm.on_cpu import keep_weights

    keep_weights()
    built = {}

    def build(dtype, model, **kwargs):
        if (dtype, model) not in built:
            kwargs |= {"max_num_seqs": 16, "enforce_eager": True, "dtype": dtype}
            built[dtype, model] = LLM(model=model, **kwargs)
        return built[dtype, model]

    def use(dtype, monkeypatch):
        monkeypatch.setattr(vllm_generation, "LLM", functools.partial(build, dtype))

    return use


@pytest.fixture
def make(policy, engines, tmp_path, monkeypatch):
    def make(name="llama", dtype="float32", folder="out", **config):
        engines(dtype, monkeypatch)
        given = {"max_steps": 24, "learning_rate": 3e-2, "temperature": 0.7, "bf16": dtype == "bfloat16"}
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 32}
        vllm |= {"vllm_gpu_memory_utilization": 0.3}
        return tiny_ppo(tmp_path / folder, policy(name), **given | vllm | config)

    return make


def differences(rollouts):
    """For each rollout the mean and the largest of |sampler's − trainer's log-prob|, nats."""
    apart = [(r.sampler_logprobs - r.logprobs)[r.mask.bool()].abs() for r in rollouts]
    return [each.mean().item() for each in apart], [each.max().item() for each in apart]


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name, dtype", [("llama", "float32"), ("llama", "bfloat16"), ("tied qwen", "float32")])
def test_log_probs_follow_the_trained_weights(name, dtype, peft, make):
    trainer = make(name, dtype, peft_config=peft)
    before, seen = weights(trainer), collected(trainer)
    trainer.train()
    means, largest = differences(seen)
    moved = (seen[-1].kl("k1") * seen[-1].mask).sum(1).mean().item()
    kind = "lora" if peft else "full"
    print(f"{name} {dtype} {kind}: mean {max(means):.2g}, largest {max(largest):.2g}, KL {moved:.3g}")
    assert len(seen) == 6 and moved > 3
    assert max(means) <= TOLERANCE[dtype][0] and max(largest) <= TOLERANCE[dtype][1]
    if peft:
        base = {n: p for n, p in before.items() if "lora" not in n and "critic" not in n}
        after = weights(trainer)
        assert_close({n: after[n] for n in base}, base, rtol=0, atol=0)


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_log_probs_follow_the_weights_over_several_turns(peft, tmp_path, engines, monkeypatch):
    """With two tool calls in each episode, vLLM reads the history again or takes it from its prefix cache."""

    def calls(tokenizer, ids, **kwargs):
        call = {"type": "function", "function": {"name": "add", "arguments": {"number": 1}}}
        return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": [call]}

    engines("float32", monkeypatch)
    monkeypatch.setattr(grpo_trainer, "parse_response", calls)
    tokenizer = byte_tokenizer()
    for part in (tiny_llama(len(tokenizer), max_position_embeddings=1024, **SHAPE), tokenizer):
        part.save_pretrained(tmp_path / "policy")
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 1024, "temperature": 0.7}
    config = {"max_completion_length": 200, "max_tool_calling_iterations": 2, "max_steps": 24, "learning_rate": 3e-2}
    trainer = PPOTrainer(
        model=str(tmp_path / "policy"),
        args=tiny_config(tmp_path / "out", vllm_gpu_memory_utilization=0.3, **vllm, **config),
        train_dataset=rows([2] * 16),
        processing_class=tokenizer,
        environment_factory=Counter,
        peft_config=peft,
    )
    trainer.vllm_generation.max_completion_length = 6  # tokens of one turn
    seen = collected(trainer)
    trainer.train()
    means, largest = differences(seen)
    moved = (seen[-1].kl("k1") * seen[-1].mask).sum(1).mean().item()
    print(f"turns, {'lora' if peft else 'full'}: mean {max(means):.2g}, largest {max(largest):.2g}, KL {moved:.3g}")
    assert {turn_starts(rollout.mask).sum(1).unique().item() for rollout in seen} == {3} and moved > 3
    assert max(means) <= TOLERANCE["float32"][0] and max(largest) <= TOLERANCE["float32"][1]


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_without_the_weight_sync_log_probs_differ(peft, make):
    trainer = make(peft_config=peft)
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.sync_weights = lambda: None
    seen = collected(trainer)
    trainer.train()
    means, _ = differences(seen)
    print("without sync", peft and "lora", [f"{mean:.2g}" for mean in means])
    assert means[0] <= TOLERANCE["float32"][0] and min(means[2:]) > 0.1


def test_an_unchanged_cpu_engine_is_refused(make, monkeypatch):
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm.packing)
    with pytest.raises(ValueError, match="vLLM has packed its weights for the CPU's kernels"):
        make("packed")


def test_a_completion_ends_by_any_eos_or_at_the_limit(make):
    config = {"stop_token_id": 9, "learning_rate": 0.0, "temperature": 2.0, "per_device_train_batch_size": 16}
    trainer = make(rows=32, max_steps=8, **config)
    seen = collected(trainer)
    trainer.train()
    ends = {2, 9, 11}
    last, sampled = set(), 0
    for rollout in seen:
        for ids, length, ended in zip(rollout.completion_ids, rollout.lengths.int(), rollout.finished, strict=True):
            answer = ids[:length].tolist()
            assert not ends & {*answer[:-1]} and (answer[-1] in ends) == bool(ended)
            assert ended or length == trainer.max_completion_length
            last |= {answer[-1]} & ends
            sampled += 1
    assert last == ends and sampled == 64


def test_several_completions_of_a_prompt_belong_to_it(make):
    trainer = make(num_generations=4, max_steps=4, learning_rate=0.0)
    seen = collected(trainer)
    trainer.train()
    (rollout,) = seen
    groups = rollout.prompt_ids.view(2, 4, -1)
    assert (groups == groups[:, :1]).all() and not torch.equal(groups[0], groups[1])
    assert all(len({tuple(ids.tolist()) for ids in group}) > 1 for group in rollout.completion_ids.view(2, 4, -1))
    assert max(differences(seen)[1]) <= TOLERANCE["float32"][1]


def test_log_probs_are_those_of_the_truncated_distribution(make):
    """With top-k 3, vLLM's log-probs are those of the truncated distribution, at the run's temperature."""
    trainer = make(top_k=3, allow_off_policy_sampling=True, max_steps=4, learning_rate=0.0)
    seen = collected(trainer)
    trainer.train()
    (rollout,) = seen
    for i, length in enumerate(rollout.lengths.int().tolist()):
        ids = torch.cat([rollout.prompt_ids[i][rollout.prompt_mask[i].bool()], rollout.completion_ids[i, :length]])
        with torch.no_grad():
            logits = trainer.model.policy(input_ids=ids[None]).logits[0, -length - 1 : -1] / 0.7
        likeliest = logits.topk(3)
        is_sampled = likeliest.indices == ids[-length:, None]
        expected = likeliest.values.log_softmax(-1)[is_sampled]
        assert_close(rollout.sampler_logprobs[i, :length], expected, rtol=1e-4, atol=1e-4)


def test_the_runs_seed_decides_what_is_sampled(make):
    sampled = []
    for seed in (1, 1, 2):
        trainer = make(max_steps=4, seed=seed, data_seed=0, learning_rate=0.0, folder=f"{len(sampled)}")
        seen = collected(trainer)
        trainer.train()
        sampled.append(seen[0].completion_ids.tolist())
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize("step", [6, 8], ids=["within a rollout", "between two"])
def test_a_resumed_run_ends_as_the_uninterrupted_one(step, make):
    config = {"max_steps": 12, "save_strategy": "steps", "save_steps": step, "learning_rate": 1e-2}
    trainer = make(**config)
    trainer.train()
    again = make(**config)
    again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{step}")
    assert_close(end_state(again), end_state(trainer), rtol=0, atol=0)
