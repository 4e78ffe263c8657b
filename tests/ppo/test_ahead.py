"""A vLLM server generates the next rollout during training: its weights, and resuming."""

import threading
import time

import pytest
from transformers import TrainerCallback

from tests.ppo.vllm_stub import after, serving
from tests.tiny import collected, prompts, tiny_llama, tiny_ppo, weights
from trl_ext.models.generation import completion_logprobs
from trl_ext.ppo import ServerLost
from trl_ext.runs.checkpoints import checkpoint_to_resume

pytestmark = pytest.mark.slow

TIMEOUT = 60


class BeforeRollouts(TrainerCallback):
    """Keeps the policy's weights from before each rollout's updates."""

    def __init__(self, trainer, steps=4):
        self.trainer, self.steps, self.seen = trainer, steps, []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.steps == 0:
            self.seen.append(weights(self.trainer))


def tokens(ids, mask):
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]


def on_server(tmp_path, server, **config):
    config = {"vllm_server_timeout": TIMEOUT, "num_generations": 2, "max_steps": 12, "learning_rate": 1e-2} | config
    server_mode = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
    return tiny_ppo(tmp_path, rollouts_ahead=1, **server_mode, **config)


def sampled_from(trainer, resume=None, model=None, tolerance=1e-5):
    """Train, and return for each rollout the number of the rollout whose initial weights sampled it."""
    rollouts, before, model = collected(trainer), BeforeRollouts(trainer), model or tiny_llama()
    trainer.add_callback(before)
    trainer.train(resume_from_checkpoint=resume)
    versions = []
    for rollout in rollouts:
        asked = (
            tokens(rollout.prompt_ids, rollout.prompt_mask),
            tokens(rollout.completion_ids, rollout.completion_mask),
        )
        differences = []
        for seen in before.seen:
            model.load_state_dict({name: seen[f"policy.{name}"] for name in model.state_dict()})
            logprobs = completion_logprobs(model, *asked)[0]
            differences.append((logprobs - rollout.sampler_logprobs).abs().max().item())
        nearest, *others = sorted(differences)
        assert nearest < tolerance and all(other > 1e-3 for other in others)
        versions.append(differences.index(min(differences)))
    return versions


def test_a_server_generates_while_the_last_rollout_is_trained_on(monkeypatch, tmp_path):
    """It gets no weights meanwhile, neither before a rollout nor before an evaluation."""
    is_trained, started, generating, together, waits = threading.Event(), [], [], [], []

    class Trained(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                is_trained.set()  # the second rollout was requested, and training does not wait

    with serving(tiny_llama(seed=5), monkeypatch) as server:
        say = server.say

        def said(path, body):
            if path == "/update_weights":
                together.extend(generating)
            if path != "/v1/completions":
                return say(path, body)
            started.append(path)
            generating.append(path)
            second = trainer._ahead.pending.get(1)  # both are requested at once, and may come in any order
            if second and second.prompts[0] == body["prompt"][0]:
                waits.append(is_trained.wait(TIMEOUT))
            if len(started) == 3:
                time.sleep(1.0)  # an evaluation begins meanwhile
            answer = say(path, body)
            generating.pop()
            return answer

        server.say = said
        evaluated = {"eval_strategy": "steps", "eval_steps": 5, "eval_dataset": prompts(2)}
        trainer = on_server(tmp_path, server, **evaluated)
        trainer.add_callback(Trained())
        assert sampled_from(trainer) == [0, 0, 1]
    assert not together and waits == [True]


def test_a_run_resumes_after_its_server_went_away(monkeypatch, tmp_path):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = on_server(tmp_path, server)
        server.during = after(3, "/v1/completions", server.stop)
        with pytest.raises(ServerLost, match=r"same command .* resumes from .*checkpoint-8\."):
            trainer.train()
        server.during = lambda path: None
        server.start()
        trainer = on_server(tmp_path, server)
        assert sampled_from(trainer, resume=checkpoint_to_resume(trainer.args)) == [0]


def test_a_rollout_of_other_prompts_is_refused(monkeypatch, tmp_path):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = on_server(tmp_path, server)
        get_dataloader = trainer.get_train_dataloader

        def shuffled():
            trainer.train_dataset = prompts(16, seed=5)
            loader = get_dataloader()
            trainer.train_dataset = prompts(16)
            return loader

        trainer.get_train_dataloader = shuffled
        with pytest.raises(RuntimeError, match="rollout 0 was generated ahead for other prompts than the"):
            trainer.train()
