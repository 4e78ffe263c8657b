"""PPO with the real vLLM as a server, on a CPU; weights are sent by a file, since TRL's NCCL needs a GPU."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from safetensors.torch import save_file

from tests.ppo.test_ahead import on_server, sampled_from
from tests.tiny import collected, tiny_llama, tiny_ppo, tiny_tokenizer
from tests.vllm.on_cpu import ENVIRONMENT
from trl_ext.ppo import ServerLost
from trl_ext.runs.checkpoints import checkpoint_to_resume

pytestmark = pytest.mark.vllm

TIMEOUT = 900  # seconds: vLLM takes half a minute to start on a free core, and minutes on a busy machine


class Server:
    """`vllm serve` in another process."""

    def __init__(self, model, *flags):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.flags = f"http://127.0.0.1:{self.port}", [model, "--port", str(self.port), *flags]
        self.start()

    def start(self):
        small = "--enforce-eager --dtype float32 --max-model-len 32 --max-num-seqs 16".split()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.serve", *self.flags, *small],
            env={**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"},
            start_new_session=True,
        )

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
FLAGS = ["--weight-transfer-config", json.dumps({"backend": "file"}), "--logprobs-mode", "processed_logprobs"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    tiny_llama(**SHAPE).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    served = Server(str(folder), *FLAGS)
    yield served
    served.kill()


@pytest.fixture
def make(server, tmp_path):
    def make(**config):
        given = {"max_steps": 12, "learning_rate": 3e-2, "temperature": 0.7, "vllm_server_timeout": TIMEOUT}
        vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        return tiny_ppo(tmp_path / "out", server.flags[0], **given | vllm | config)

    return make


@pytest.fixture
def by_file(tmp_path, monkeypatch):
    """Send weights by a file instead of NCCL; the rest is TRL's."""
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient

    class Client(VLLMClient):
        def init_communicator(self, device=0):
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

        def update_named_params(self, metadata, named_params):
            path = str(tmp_path / "weights.safetensors")
            save_file({name: weight.detach().clone() for name, weight in named_params}, path)
            self._start_weight_update()
            self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": path}})
            self._finish_weight_update()

    monkeypatch.setattr(vllm_generation, "VLLMClient", Client)


def largest_difference(rollout):
    return (rollout.sampler_logprobs - rollout.logprobs)[rollout.mask.bool()].abs().max().item()


def test_without_a_gpu_trl_cannot_send_weights(make):
    with pytest.raises(ValueError, match="sends weights over NCCL, so the trainer needs a GPU, too"):
        make()


def test_log_probs_follow_the_weights(make, by_file, server, capfd):
    """With several completions per prompt, and an additional EOS."""
    trainer = make(num_generations=2, stop_token_id=9)
    seen = collected(trainer)
    trainer.train()
    moved = (seen[-1].kl("k1") * seen[-1].mask).sum(1).mean().item()
    with capfd.disabled():
        print("server:", [f"{largest_difference(rollout):.2g}" for rollout in seen], f"KL {moved:.3g}")
    assert len(seen) == 3 and moved > 3
    assert max(map(largest_difference, seen)) <= 1e-4
    for rollout in seen:
        pairs = rollout.prompt_ids.view(4, 2, -1)
        assert (pairs[:, 0] == pairs[:, 1]).all()
        for ids, length, ended in zip(rollout.completion_ids, rollout.lengths.int(), rollout.finished, strict=True):
            assert not {2, 9} & {*ids[: length - 1].tolist()} and (ids[length - 1].item() in (2, 9)) == bool(ended)


def test_a_killed_server_ends_the_run_which_resumes(make, by_file, server):
    trainer = make()
    step = trainer.training_step

    def kill(*args):
        if trainer.state.global_step == 5 and server.process.poll() is None:
            server.kill()
        return step(*args)

    trainer.training_step = kill
    with pytest.raises(ServerLost, match="same command .* resumes from"):
        trainer.train()
    server.start()
    again = make()
    again.train(resume_from_checkpoint=checkpoint_to_resume(again.args))
    assert again.state.global_step == again.state.max_steps


def test_rollouts_ahead_are_sampled_by_the_scheduled_weights(by_file, server, tmp_path):
    given = {"model": server.flags[0], "learning_rate": 3e-2, "vllm_server_timeout": TIMEOUT}
    trainer = on_server(tmp_path / "out", server, **given)
    assert sampled_from(trainer, model=tiny_llama(**SHAPE), tolerance=1e-4) == [0, 0, 1]


def test_a_server_with_other_log_probs_is_refused(server, tmp_path):
    raw = Server(server.flags[0], *FLAGS[:2])
    try:
        with pytest.raises(ValueError, match="Restart the vLLM server .* `--logprobs-mode processed_logprobs`"):
            tiny_ppo(
                tmp_path,
                model=server.flags[0],
                use_vllm=True,
                vllm_mode="server",
                vllm_server_base_url=raw.url,
                vllm_server_timeout=TIMEOUT,
            )
    finally:
        raw.kill()
