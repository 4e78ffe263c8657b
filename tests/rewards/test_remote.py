"""RemoteReward against servers that answer right, wrong, late or not at all."""

import pickle
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.rewards.http_stub import serving
from tests.tiny import tiny_tokenizer
from trl_ext.rewards import CachedReward, RemoteReward, RewardFailed, reward_identity
from trl_ext.rewards.service import _client

ANSWERS = [f"{'very ' * (i % 7)}happy {i}" for i in range(40)]
PROMPTS = [f"prompt {i} " for i in range(40)]


def by_text(body, handler=None):
    """The stub's scores: a function of prompt and completion, so that swapped scores are detected."""
    return {"scores": [len(p) + len(c) / 100 for p, c in zip(body["prompts"], body["completions"], strict=True)]}


EXPECTED = by_text({"prompts": PROMPTS, "completions": ANSWERS})["scores"]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("trl_ext.rewards.service._wait", lambda state: 0.01)


def test_each_row_gets_its_score_despite_temporary_errors():
    """Random temporary errors of all kinds change only the number of requests."""
    chance, logged = random.Random(0), {}

    def answer(body, handler):
        match chance.randrange(8):
            case 0:
                return 503, {"retry-after": "0"}, {"error": "busy"}
            case 1:
                return 429, {}, {}
            case 2:
                return None  # it hangs up
            case 3:
                return 200, {"content-length": 5000}, b'{"scores": [1'  # here in mid-answer
            case 4:
                time.sleep(0.3)  # longer than the timeout
        return by_text(body)

    with serving(answer) as (url, came):
        reward = RemoteReward(url, batch_size=3, timeout=0.2, retries=50, max_concurrency=8)
        assert reward(PROMPTS, ANSWERS, log_metric=logged.__setitem__) == EXPECTED
        assert reward([], []) == []
    name = reward.__name__
    # Some requests timed out
    assert logged[f"rewards/{name}/retries"] >= len(came) - 14 > 0 and logged[f"rewards/{name}/latency"] > 0
    assert f"rewards/{name}/failed" not in logged


PASSING = {  # what a proxy may answer for a while
    "rubbish": b'{"scores": [1, 2',
    "nothing": b"",
    "a page": b"<html><body>Hello</body></html>",
    "deep": b"[" * 100_000,
    "an error": {"error": "no"},
}
BAD = {
    "no object": [1.0, 2.0],
    "a text": {"scores": "1.0 2.0"},
    "too few": {"scores": [1.0]},
    "other": {"detail": "no"},
    "elsewhere": (302, {"location": "http://127.0.0.1:1/"}, {}),
    "not found": (404, {}, {"error": "no such model"}),
}


@pytest.mark.parametrize("bad", PASSING)
def test_an_invalid_reply_is_requested_again(bad):
    left = [PASSING[bad]] * 2
    with serving(lambda body, _: left.pop() if left else by_text(body)) as (url, came):
        assert RemoteReward(url)(PROMPTS[:5], ANSWERS[:5]) == EXPECTED[:5] and len(came) == 3


@pytest.mark.parametrize("bad", BAD)
def test_a_wrong_reply_is_an_error_and_is_not_requested_again(bad):
    logged = {}
    with serving(lambda body, _: BAD[bad] if "bad" in body["completions"] else by_text(body)) as (url, came):
        answers = ["good", "fine", "bad", "late", "last"]
        scores = RemoteReward(url, batch_size=2, name="r", on_error="skip")(
            PROMPTS[:5], answers, log_metric=logged.__setitem__
        )
        expected = by_text({"prompts": PROMPTS[:5], "completions": answers})["scores"]
        assert scores == [*expected[:2], None, None, expected[4]]
        assert logged["rewards/r/failed"] == 2 / 5 and len(came) == 3
        with pytest.raises(RuntimeError, match=rf"reward 'r': completion 2: {url}/score: \S") as raised:
            RemoteReward(url, batch_size=2, name="r")(PROMPTS[:5], answers)
        assert len(str(raised.value)) < 500


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1e60, "10", [1.0], {}])
def test_a_score_that_is_not_finite_is_an_error_of_its_row_alone(score):
    with serving(lambda body, _: {"scores": [1.0, score, None]}) as (url, _):
        assert RemoteReward(url, on_error="skip")(["p"] * 3, ["a", "b", "c"]) == [1.0, None, None]
        with pytest.raises(RuntimeError, match="completion 1: .*: returned"):
            RemoteReward(url)(["p"] * 3, ["a", "b", "c"])


def test_only_the_row_that_the_server_refuses_fails():
    def answer(body, _):
        return (422, {}, {"error": "too long"}) if "x" in body["completions"] else by_text(body)

    answers = [*ANSWERS]
    answers[17] = answers[33] = "x"
    with serving(answer) as (url, came):
        scores = RemoteReward(url, batch_size=32, on_error="skip")(PROMPTS, answers)
        assert scores == [None if i in (17, 33) else score for i, score in enumerate(EXPECTED)]
        assert len(came) < 20
        with pytest.raises(RuntimeError, match="completion 17: .*status 422: .*too long"):
            RemoteReward(url, max_concurrency=1)(PROMPTS, answers)


def test_a_server_that_is_gone_gets_no_requests_for_a_while(monkeypatch):
    monkeypatch.setattr("trl_ext.rewards.service._PAUSE", 0.5)
    is_up = False
    with serving(lambda body, _: by_text(body) if is_up else (500, {}, {})) as (url, came):
        reward = RemoteReward(url, batch_size=1, max_concurrency=1, retries=0, on_error="skip")
        assert reward(PROMPTS[:8], ANSWERS[:8]) == [None] * 8 and len(came) == 5
        reward.on_error = "raise"
        with pytest.raises(
            RuntimeError, match="the request was not sent, since the last requests failed; requests are sent again in"
        ):
            reward(PROMPTS[:2], ANSWERS[:2])
        is_up = True
        time.sleep(0.6)
        assert reward(PROMPTS[:2], ANSWERS[:2]) == EXPECTED[:2]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["says nothing", "drips", "drips headers"])
def test_no_call_lasts_longer_than_the_deadline(way):
    is_over = threading.Event()
    begun = {"drips": b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n", "drips headers": b"HTTP/1.1 200 O"}

    def answer(body, handler):
        if "prompt 3 " in body["prompts"]:
            handler.wfile.write(begun.get(way, b""))
            while not is_over.wait(0.05):
                handler.wfile.write(b" " if way in begun else b"")  # each byte comes in time, the whole answer never
        return by_text(body)

    with serving(answer) as (url, _):
        reward = RemoteReward(url, batch_size=1, deadline=4.0, timeout=1.0, retries=100, on_error="skip")
        start = time.monotonic()
        scores = reward(PROMPTS, ANSWERS)
        assert time.monotonic() - start < 20
        is_over.set()
    assert scores == [None if i == 3 else score for i, score in enumerate(EXPECTED)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "an error elsewhere"])
def test_a_process_can_exit_while_its_server_hangs(how):
    code = f"""
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it, and passes that on
from trl_ext.rewards import RemoteReward
reward = RemoteReward(sys.argv[1], timeout=100)
print("ready", flush=True)
if {how == "Ctrl-C"}:
    reward(["p"], ["c"])
threading.Thread(target=reward, args=(["p"], ["c"]), daemon=True).start()
raise ValueError
"""
    with serving(lambda body, _: time.sleep(60)) as (url, came):
        process = subprocess.Popen(
            [sys.executable, "-c", code, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        while how == "Ctrl-C" and not came:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert ("KeyboardInterrupt" if how == "Ctrl-C" else "") in said


@pytest.mark.parametrize("status", [403, 200])
def test_a_token_is_sent_and_not_written(monkeypatch, status):
    monkeypatch.setenv("SCORES_KEY", "s3cret-token-of-mine")
    seen = []

    def answer(body, handler):
        seen.append(handler.headers["authorization"])
        return status, {}, {"error": f"wrong token {handler.headers['authorization']}"}

    with serving(answer) as (url, _):
        reward = RemoteReward(url, api_key_env="SCORES_KEY")
        with pytest.raises(RuntimeError) as raised:
            reward(["p"], ["c"])
        identity = reward_identity(reward)
    assert {*seen} == {"Bearer s3cret-token-of-mine"}
    assert "wrong token" in str(raised.value)
    for text in (str(raised.value), str(raised.value.__cause__), repr(vars(reward)), identity):
        assert "s3cret" not in text
    assert b"s3cret" not in pickle.dumps(reward)
    monkeypatch.delenv("SCORES_KEY")
    with pytest.raises(ValueError, match="environment variable SCORES_KEY is not set or empty: export a token"):
        RemoteReward(url, api_key_env="SCORES_KEY")
    for secret in ("http://me:pass@host", "http://host/?key=pass"):
        with pytest.raises(ValueError, match="`url` must not contain credentials") as refused:
            RemoteReward(secret)
        assert "pass" not in str(refused.value)


def test_its_identity_is_that_of_the_weights_or_the_url():
    def identity(url, **given):
        return reward_identity(RemoteReward(url, **given))

    with (
        serving(by_text, lambda: {"status": "ok", "model": "m", "identity": "a"}) as (one, _),
        serving(by_text, lambda: {"status": "ok", "model": "n", "identity": "a"}) as (same, _),
        serving(by_text, lambda: {"status": "ok", "model": "m", "identity": "b"}) as (other, _),
        serving(by_text) as (dumb, _),
        serving(by_text, lambda: {"status": "ok", "model": "m"}) as (older, _),
        serving(by_text, lambda: (501, {}, {})) as (post_only, _),
    ):
        assert identity(one) == identity(f"{same}/score", model="n", timeout=3, max_concurrency=2, batch_size=1)
        assert len({identity(url, model="m") for url in (one, other, dumb, older, post_only)}) == 5
        assert identity(dumb, model="m") != identity(dumb)
        assert identity(dumb, eos_token_ids=[2]) != identity(dumb)
        assert identity(one, api="vllm-score") != identity(same, api="vllm-score")  # without a request
    _client.cache_clear()  # the stub still answers on open connections
    with pytest.raises(RewardFailed, match=f"'m': {one} does not say which weights it serves: the server did not"):
        identity(one, model="m", retries=1, on_error="skip")


@pytest.mark.parametrize("health", [None, lambda: {"status": "ok"}], ids=["not found", "the proxy's own"])
def test_behind_a_proxy_the_first_reply_names_the_weights(health):
    weights = {"now": "xxh3:old"}
    with serving(lambda body, _: {"scores": [1.0], "identity": weights["now"]}, health) as (url, _):
        reward = RemoteReward(url)
        assert url in reward_identity(reward)
        assert reward(["p"], ["a"]) == [1.0] and "xxh3:old" in reward_identity(reward)
        weights["now"] = "xxh3:new"
        with pytest.raises(RewardFailed, match="had the weights xxh3:old and now has xxh3:new"):
            reward(["p"], ["a"])


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_new_weights_in_mid_run_are_reported_and_scores_never_mixed(on_error):
    """As when a server restarts on a folder that was trained further."""
    weights = {"now": "xxh3:old"}

    def answer(body, _):
        return {"scores": [float(weights["now"] == "xxh3:old")] * len(body["prompts"]), "identity": weights["now"]}

    with serving(answer, lambda: {"identity": weights["now"]}) as (url, _):
        plain, cached = (RemoteReward(url, on_error=on_error, batch_size=1, name="r") for _ in range(2))
        keeping = CachedReward(cached)
        assert plain(["p"], ["a"]) == keeping(["p"], ["a"]) == [1.0]
        before = reward_identity(plain)
        weights["now"] = "xxh3:new"
        for reward in (plain, pickle.loads(pickle.dumps(plain)), keeping):
            with pytest.raises(
                RewardFailed, match="the server had the weights xxh3:old and now has xxh3:new.* new run"
            ):
                reward(["p"] * 3, ["b", "c", "d"])
        assert reward_identity(plain) == before != reward_identity(RemoteReward(url))
        assert keeping(["p"], ["a"]) == [1.0]
        assert CachedReward(RemoteReward(url)).identity != keeping.identity
        weights["now"] = None  # an older server without an identity
        with pytest.raises(RewardFailed, match="now has \\(not named\\)"):
            plain(["p"], ["b"])
        weights["now"] = "xxh3:old"
        assert plain(["p"], ["b"]) == [1.0]


# ---- Other servers ----

# Replies of vLLM 0.32.0 for a LlamaForSequenceClassification of random weights, without ids, times and usage.
# transformers' logits: -0.1539589, -2.4897330; for the pairs -3.0957899, -2.4897330
CLASSIFY = {
    "id": "classify-9ece188c49d10842",
    "object": "list",
    "model": "rm1",
    "data": [
        {"index": 0, "label": "LABEL_0", "probs": [-0.15395784378051758], "num_classes": 1},
        {"index": 1, "label": "LABEL_0", "probs": [-2.4897334575653076], "num_classes": 1},
    ],
}
TWO_LABELS = {
    "object": "list",
    "model": "rm2",
    "data": [
        {"index": 0, "label": "LABEL_0", "probs": [0.1386905163526535, -0.7515593767166138], "num_classes": 2},
        {"index": 1, "label": "LABEL_0", "probs": [1.786466121673584, -2.196251153945923], "num_classes": 2},
    ],
}
SCORE = {
    "object": "list",
    "model": "rm1",
    "data": [
        {"index": 0, "object": "score", "score": -3.095790386199951},
        {"index": 1, "object": "score", "score": -2.4897334575653076},
    ],
}
TEXTS = ["the cat sat", "a dog ran</s>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "given, answer, path, sent, expected",
    [
        (
            {"api": "vllm-classify"},
            CLASSIFY,
            "/classify",
            {"input": TEXTS, "use_activation": False, "add_special_tokens": True},
            [-0.15395784378051758, -2.4897334575653076],
        ),
        (
            {"api": "vllm-classify", "model": "rm2", "label": 1, "logits": False},
            {**TWO_LABELS, "data": TWO_LABELS["data"][::-1]},  # in the order of `index`
            "/classify",
            {"model": "rm2", "input": TEXTS, "use_activation": True, "add_special_tokens": True},
            [-0.7515593767166138, -2.196251153945923],
        ),
        (
            {"api": "vllm-score"},
            SCORE,
            "/score",
            {"text_1": ["the cat ", "a dog "], "text_2": ["sat", "ran"], "use_activation": False},
            [-3.095790386199951, -2.4897334575653076],
        ),
    ],
    ids=["classify", "classify, two labels", "score"],
)
def test_requests_and_replies_of_other_servers(given, answer, path, sent, expected, tokenizer):
    paths = []
    with serving(lambda body, handler: paths.append(handler.path) or answer) as (url, came):
        templates = {} if given["api"] == "vllm-score" else {"tokenizer": tokenizer, "eos_token_ids": [9]}
        reward = RemoteReward(url, **templates, **given)
        assert reward(["the cat ", "a dog "], ["sat", "ran"], [[3, 4], [5, 9]], column=["x", "y"]) == expected
        assert came == [sent] and paths == [path]
        if templates:
            with pytest.raises(ValueError, match="give the policy's `eos_token_ids`, or pass the column `finished`"):
                RemoteReward(url, tokenizer=tokenizer, **given)(["the cat "], ["sat"], [[3, 4]])
