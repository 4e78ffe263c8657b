"""`trl-ext serve-reward` over real sockets: batches of several clients, errors, and its end."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import uvicorn

from tests.tiny import WORDS, prompts, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.rewards import ModelReward, RemoteReward
from trl_ext.workbench.feedback import serving as serve_reward
from trl_ext.workbench.feedback.serving import Batcher, Limits, make_app

ROOT = Path(__file__).parents[2]


def by_text(prompts, completions, **columns):
    return [float(sum(map(ord, f"{p}|{c}")) % 1009) for p, c in zip(prompts, completions, strict=True)]


@contextmanager
def serving(function, name="m", key=None, identity=None, **limits):
    """Yield the URL of a server in a thread, and its batcher."""
    batcher = Batcher(function, Limits(**limits))
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(batcher, name, key, identity), log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", batcher
    finally:
        server.should_exit = True
        thread.join()


def all_at_once(ask, count):
    """Call `ask` with each number, each in its own thread."""
    threads = [threading.Thread(target=ask, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_64_clients_get_their_scores_in_large_batches():
    """No row is lost or scored twice, each reply belongs to its request, and batches are full."""
    seen, wrong, sizes, requests = [], [], [], 10

    def scored(prompts, completions, **columns):
        seen.extend(zip(prompts, completions, strict=True))
        sizes.append(len(prompts))
        time.sleep(0.02)
        return by_text(prompts, completions)

    def client(k):
        with httpx2.Client(timeout=60) as http:
            for i in range(requests):
                asked = [f"client {k}"] * (1 + (k + i) % 2), [f"{i} {j} {k * i}" for j in range(1 + (k + i) % 2)]
                answer = http.post(url + "/score", json=dict(zip(("prompts", "completions"), asked, strict=True)))
                if answer.json() != {"scores": by_text(*asked), "model": "m"}:
                    wrong.append(answer.text)

    with serving(scored, max_wait=2.0) as (url, batcher):
        all_at_once(client, 64)
    assert wrong == []
    assert len(seen) == len(set(seen)) == 64 * requests * 1.5
    assert statistics.median(sizes) >= 32 and max(sizes) <= 65 and batcher.waiting == 0


@pytest.mark.slow
def test_one_clients_bad_row_fails_no_other_client():
    def fragile(prompts, completions, **columns):
        assert len({type(prompt) for prompt in prompts}) == 1, "texts and messages in one call"
        if "bad" in completions:
            raise ValueError("this cannot be read")
        if "broken" in completions:
            raise OSError("/secret/path")
        if "over" in completions:
            sys.exit("it is over")
        return by_text(prompts, completions)

    kinds = ["good", "bad", [{"role": "assistant", "content": "hi"}], "broken", "over"] * 4
    answers = {}

    def client(k):
        prompt = "p" if isinstance(kinds[k], str) else [{"role": "user", "content": "p"}]
        answers[k] = httpx2.post(url + "/score", json={"prompts": [prompt], "completions": [kinds[k]]}, timeout=60)

    with serving(fragile, max_wait=0.3) as (url, _):
        all_at_once(client, len(kinds))
    assert [answers[k].status_code for k in range(len(kinds))] == [200, 422, 200, 500, 500] * 4
    assert answers[1].json() == {"error": "this cannot be read"}
    assert answers[3].json() == {"error": "scoring failed: OSError"}


ROWS = {"prompts": ["p"], "completions": ["c"]}


@pytest.mark.parametrize(
    "body, status, said",
    [
        (b"\xff", 422, "must be JSON in UTF-8"),
        (ROWS | {"completions": ["c", "d"]}, 422, "two lists of the same length"),
        (ROWS | {"completions": [[{"role": "user", "content": None}]]}, 422, "all texts, or all lists of messages"),
        (ROWS | {"completions": ["c" * 2000]}, 413, "the request is longer than 1000 bytes"),
        (ROWS | {"finished": [True], "model": "m"}, 200, "scores"),
    ],
)
def test_a_bad_request_is_refused_in_one_sentence(small_server, body, status, said):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": "Bearer key", "content-type": "application/json"}
    answer = httpx2.post(small_server + "/score", content=content, headers=headers)
    assert (answer.status_code, "error" in answer.json()) == (status, status != 200) and said in answer.text


@pytest.fixture(scope="module")
def small_server():
    with serving(by_text, key="key", max_queue_rows=8, max_body_bytes=1000) as (url, _):
        yield url


def test_requests_without_a_token_or_from_a_browser_are_refused(small_server, monkeypatch):
    for headers in ({}, {"authorization": "Bearer kez"}, {"authorization": "key"}, {"authorization": "Bearer kéy"}):
        headers = {name: value.encode() for name, value in headers.items()}
        for answer in (
            httpx2.post(small_server + "/score", json=ROWS, headers=headers),
            httpx2.get(small_server + "/metrics", headers=headers),
        ):
            assert answer.status_code == 401 and answer.json() == {
                "error": "the request has no bearer token, or not the token of this server"
            }
    assert httpx2.get(small_server + "/health").json() == {"status": "ok", "model": "m"}  # and no `identity`
    page = {"authorization": "Bearer key", "content-type": "text/plain"}
    assert httpx2.post(small_server + "/score", content=json.dumps(ROWS), headers=page).status_code == 415
    monkeypatch.setenv("SCORES_KEY", "key")
    assert RemoteReward(small_server, api_key_env="SCORES_KEY")(["p"], ["c"]) == by_text(["p"], ["c"])


def test_a_full_queue_refuses_and_abandoned_requests_are_not_scored():
    seen, released = [], threading.Event()

    def slow(prompts, completions, **columns):
        seen.extend(completions)
        released.wait(30)
        return by_text(prompts, completions)

    with serving(slow, max_queue_rows=2, max_batch_size=1) as (url, batcher):
        first = threading.Thread(target=RemoteReward(url), args=(["p"], ["first"]))
        first.start()
        while not seen:
            time.sleep(0.01)
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(url + "/score", json=ROWS | {"completions": ["left"]}, timeout=httpx2.Timeout(60, read=0.2))
        while batcher.waiting > 1:
            time.sleep(0.01)
        full = httpx2.post(url + "/score", json={"prompts": ["p"] * 2, "completions": ["a", "b"]}, timeout=60)
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        released.set()
        assert RemoteReward(url)(["p"], ["last"]) == by_text(["p"], ["last"])
        first.join()
        assert seen == ["first", "last"]


@pytest.mark.slow
def test_a_served_model_has_its_local_scores(tmp_path):
    tiny_reward_model(tiny_llama()).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    asked = [row["prompt"] + " " for row in prompts(12)]
    answers = [" ".join(WORDS[: i % 8 + 1]) for i in range(len(asked))]
    ended = [i % 2 == 0 for i in range(len(asked))]
    messages = [[{"role": "user", "content": prompt}] for prompt in asked]
    turns = [[{"role": "assistant", "content": answer}] for answer in answers]
    function = serve_reward.load(str(tmp_path))
    with serving(function, name=function.__name__) as (url, _):
        remote = RemoteReward(url, model=tmp_path.name, batch_size=8)
        for given in ((asked, answers), (messages, turns)):
            expected = ModelReward(str(tmp_path))(*given, finished=ended)
            assert remote(*given, finished=ended) == pytest.approx(expected, abs=1e-5)


def test_a_server_reports_the_identity_of_its_weights(tmp_path):
    """Folders have the same name, `reward`, and get new weights under it."""
    seen = []
    for seed, folder in enumerate(("one/reward", "two/reward", "one/reward")):
        tiny_reward_model(tiny_llama(), seed=seed).save_pretrained(tmp_path / folder)
        tiny_tokenizer().save_pretrained(tmp_path / folder)
        once, again = (serve_reward.identity_of(serve_reward.load(str(tmp_path / folder))) for _ in range(2))
        assert once == again and once not in seen
        seen.append(once)


@pytest.mark.slow
def test_the_command_answers_pending_requests_before_it_ends(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\ndef slow(completions, **columns):\n    print('begun', flush=True)\n    time.sleep(1.5)\n"
        "    return [1.0] * len(completions)\n"
    )
    command = [sys.executable, "-m", "trl_ext", "serve-reward", "mine.py:slow", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    name, _, url = process.stdout.readline().split(";")[0].split()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(httpx2.post(url + "/score", json=ROWS, timeout=20)))
    asking.start()
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    asking.join()
    assert name == "slow" and answers[0].json()["scores"] == [1.0]
    assert process.wait(20) in (0, -signal.SIGTERM)


def test_unsafe_settings_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        serve_reward.main(["mine.py:one", "--host", "0.0.0.0"])
    assert "--host 0.0.0.0 lets other machines connect" in capsys.readouterr().err
