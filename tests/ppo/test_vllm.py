"""Completions of vLLM: log-probs, and a server that goes away. `tests/vllm` has the real vLLM."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close

from tests.ppo.vllm_stub import PROCESSED, after, serving
from tests.tiny import collected, end_state, tiny_llama, tiny_ppo
from trl_ext.ppo.vllm import ServerLost, check_logprobs, checked_logprobs
from trl_ext.runs.checkpoints import checkpoint_to_resume

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def make(tmp_path, server, **config):
    """A trainer of three rollouts, which the server samples."""
    torch.manual_seed(0)
    kwargs = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url} | config
    return tiny_ppo(tmp_path, vllm_server_timeout=20.0, max_steps=12, learning_rate=1e-2, temperature=0.7, **kwargs)


# ---- Log-probs ----


def test_the_log_prob_of_each_sampled_token_is_kept():
    logprobs = checked_logprobs([[5, 6, 2], [7]], [[[-1.0], [-2.0], [-0.5]], [[-3.0]]], [[[5], [6], [2]], [[7]]])
    assert logprobs == [[-1.0, -2.0, -0.5], [-3.0]]


@pytest.mark.parametrize(
    "logprobs, of_tokens, message",
    [
        (None, None, "a log-prob for each token"),
        ([[[-1.0], [-1.0]]], [[[5], [7]]], "a log-prob for each token"),
        ([[[-1.0]]], [[[5]]], "a log-prob for each token"),
        ([[[-1.0], [None]]], [[[5], [6]]], "not finite"),
        ([[[-1.0], [float("-inf")]]], None, "not finite"),
    ],
)
def test_logprobs_of_other_tokens_are_an_error(logprobs, of_tokens, message):
    engine = SimpleNamespace(generate=lambda: ([[4]], [[5, 6]], logprobs, of_tokens))
    check_logprobs(engine)
    with pytest.raises(RuntimeError, match=message):
        engine.generate()


@pytest.mark.parametrize("num_generations", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_server_has_the_trainers_weights(num_generations, tmp_path, monkeypatch):
    """Each completion has its log-probs, with several per prompt; the weights change by nats in between."""
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = make(tmp_path, server, num_generations=num_generations, stop_token_id=9)
        seen = collected(trainer)
        trainer.train()
    assert len(seen) == server.updates == 3
    for rollout in seen:
        assert_close(rollout.sampler_logprobs, rollout.logprobs * rollout.mask, rtol=1e-4, atol=1e-4)
    assert seen[-1].kl("k1").abs().max() > 0.5
    answers = [ids[: int(n)].tolist() for r in seen for ids, n in zip(r.completion_ids, r.lengths, strict=True)]
    assert not any({2, 9} & {*answer[:-1]} for answer in answers)
    assert {2, 9} <= {answer[-1] for answer in answers} and len({*map(tuple, answers[:8])}) == 8


# ---- A server that goes away ----


@pytest.mark.slow
def test_a_run_without_its_server_ends_and_resumes(tmp_path, monkeypatch):
    ends = []
    for is_cut in (False, True):
        folder = tmp_path / str(is_cut)
        with serving(tiny_llama(seed=5), monkeypatch) as server:
            trainer = make(folder, server, save_in_background=True)
            if is_cut:
                server.during = after(3, "/v1/completions", server.stop)
                with pytest.raises(ServerLost, match=r"failed: .* same command .* resumes from .*checkpoint-8\."):
                    trainer.train()
                server.during = lambda path: None
                server.start()
                trainer = make(folder, server, save_in_background=True)
            trainer.train(resume_from_checkpoint=checkpoint_to_resume(trainer.args) if is_cut else None)
        ends.append(end_state(trainer))
    assert_close(*ends, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4])
def test_a_restarted_server_is_not_used(step, tmp_path, monkeypatch):
    """It restarts while the trainer updates, and would sample with the weights on its disk."""
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = make(tmp_path, server)
        training_step = trainer.training_step

        def restart(*args):
            if trainer.state.global_step == step:
                server.restart()
            return training_step(*args)

        trainer.training_step = restart
        with pytest.raises(ServerLost, match="it was restarted"):
            trainer.train()


@pytest.mark.parametrize(
    "config, message",
    [
        ({**PROCESSED, "weight_transfer_config": None}, "with `--weight-transfer-config"),
        (
            {**PROCESSED, "model_config": {"logprobs_mode": "raw_logprobs"}},
            "with `--logprobs-mode processed_logprobs`",
        ),
    ],
)
def test_a_server_without_a_flag_is_refused(config, message, tmp_path, monkeypatch):
    with serving(tiny_llama(seed=5), monkeypatch, config) as server, pytest.raises(ValueError, match=message):
        make(tmp_path, server)
