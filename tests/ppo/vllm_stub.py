"""A stand-in for a vLLM server: it serves TRL's client over HTTP from a model of its own, and can be stopped."""

import contextlib
import copy
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from trl.generation.vllm_client import VLLMClient

PROCESSED = {
    "weight_transfer_config": {"backend": "nccl"},
    "model_config": {"logprobs_mode": "processed_logprobs"},
}


class VLLMServer:
    """
    Samples completions from its model, by a seed that depends only on the prompt.

    `model` is on its disk: a restarted server has that model again. `during` is called with the path of each
    request.
    """

    def __init__(self, model, config=PROCESSED):
        self.on_disk, self.config, self.port, self.starts = copy.deepcopy(model).eval(), config, 0, 0
        self.during = lambda path: None
        self.updates, self.is_down = 0, True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self.model = copy.deepcopy(self.on_disk)
        self.starts += 1
        self.is_down = False
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):  # noqa: N802
                self.answer()

            def do_POST(self):  # noqa: N802
                self.answer(json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or "{}"))

            def answer(self, body=None):
                path = self.path.split("?")[0]
                stub.during(path)
                if stub.is_down:
                    return  # without an answer
                said = stub.say(path, body)
                self.send_response(404 if said is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(said or {}).encode())

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *args):
                pass

        self.http = Server(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def stop(self):
        self.is_down = True
        self.http.shutdown()
        self.http.server_close()

    def restart(self, seconds=0.0):
        """Stop, and start again with the model on disk; `seconds` later, in a thread."""
        self.stop()
        if seconds:
            threading.Thread(target=lambda: (time.sleep(seconds), self.start()), daemon=True).start()
        else:
            self.start()

    def say(self, path, body):
        match path:
            case "/health" | "/reset_prefix_cache" | "/update_weights":
                return {"ok": True}
            case "/v1/models":
                return {"data": [{"id": "policy"}]}
            case "/server_info":
                return self.config and {"vllm_config": {**self.config, "instance_id": str(self.starts)}}
            case "/v1/completions":
                return {"choices": [self.sample(ids, i, body) for ids in body["prompt"] for i in range(body["n"])]}

    @torch.no_grad()
    def sample(self, prompt, copy_of_it, asked):
        seed = int.from_bytes(hashlib.sha256(bytes([*prompt, copy_of_it])).digest()[:4], "big")
        generator, ids, logprobs = torch.Generator().manual_seed(seed), list(prompt), []
        while len(logprobs) < asked["max_tokens"] and (not logprobs or ids[-1] not in asked["stop_token_ids"]):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            policy = (logits / (asked["temperature"] or 1)).log_softmax(-1)
            token = (
                torch.multinomial(policy.exp(), 1, generator=generator) if asked["temperature"] else policy.argmax()
            )
            ids.append(token.item())
            logprobs.append(policy[ids[-1]].item())
        sampled = ids[len(prompt) :]
        names = [f"token_id:{token}" for token in sampled]
        said = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": [None] * len(sampled)}
        return {"prompt_token_ids": prompt, "token_ids": sampled, "logprobs": said if asked["logprobs"] == 0 else None}


def client_of(server):
    """TRL's client with weights that go to `server` without NCCL; those that arrive before a failure count."""

    class Client(VLLMClient):
        def init_communicator(self, device=0):
            self.joined = server.starts

        def update_named_params(self, metadata, named_params):
            assert self.joined == server.starts, "NCCL would wait for ever"
            weights = dict(next(named_params) for _ in metadata[:-1])
            self._post(f"{self.base_url}/update_weights", json={})
            weights |= named_params
            missing = server.model.load_state_dict(
                {n: w.clone() for n, w in weights.items()}, strict=False
            ).missing_keys
            assert not missing
            server.updates += 1

    return Client


@contextlib.contextmanager
def serving(model, monkeypatch, config=PROCESSED):
    """Yield a server to which a trainer's client connects."""
    server = VLLMServer(model, config)
    for module in ("vllm_client", "vllm_generation"):
        monkeypatch.setattr(f"trl.generation.{module}.is_vllm_available", lambda: True)
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMClient", client_of(server))
    server.start()
    try:
        yield server
    finally:
        with contextlib.suppress(Exception):
            server.stop()


def after(number, path, do):
    """Return a `during` that calls `do` at the `number`-th request of `path`."""
    left = [number]

    def during(asked):
        left[0] -= asked == path
        if not left[0] and asked == path:
            left[0] = -1
            do()

    return during
