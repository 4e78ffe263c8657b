"""The cache of a reward: its keys, a real Redis as its second level, and a Redis that dies."""

import json
import math
import multiprocessing
import pickle
import shutil
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest

from trl_ext.rewards import (
    CachedReward,
    EnsembleReward,
    JudgeReward,
    PatternReward,
    load_rewards,
    reward_identity,
)

redis = pytest.importorskip("redis")
NAME = "rewards/cached_counted"


class Counted:
    """Scores by length, and records its inputs."""

    def __init__(self, scale=1.0):
        self.scale = scale
        self.__name__ = "counted"
        self._asked = []

    def __call__(self, prompts, completions, **columns):
        self._asked.append([*completions])
        return [None if each == "none" else self.scale * len(each) for each in completions]


def call(reward, *completions, prompts=None, **columns):
    logged = {}
    given = {"prompts": prompts or ["p"] * len(completions), "completions": [*completions], **columns}
    return reward(**given, log_metric=logged.__setitem__), logged


# ---- In memory ----


def test_each_completion_is_scored_once():
    reward = Counted()
    cached = CachedReward(reward)
    assert call(cached, "a", "bb", "a", "none") == ([1.0, 2.0, 1.0, None], {f"{NAME}/cache_hits": 0.25})
    assert call(cached, "bb", "none", "ccc") == ([2.0, None, 3.0], {f"{NAME}/cache_hits": pytest.approx(1 / 3)})
    assert call(cached, "a", "ccc") == ([1.0, 3.0], {f"{NAME}/cache_hits": 1.0})
    assert reward._asked == [["a", "bb", "none"], ["none", "ccc"]]
    assert call(cached) == ([], {})


def test_the_key_has_all_that_a_score_may_depend_on():
    base = {"prompts": ["p"], "completions": ["a"], "completion_ids": [[1, 2]], "finished": [True], "topic": [1]}
    others = [
        {"prompts": ["q"]},
        {"completions": ["b"]},
        {"completion_ids": [[1, 3]]},
        {"completion_ids": [[12]]},
        {"finished": [False]},
        {"finished": [1]},
        {"topic": ["1"]},
        {"topic": [None]},
        {"completions": [[{"role": "assistant", "content": "a"}]]},
        {"prompts": ["pa"], "completions": [""]},
        {"greedy": True},
    ]
    reward = Counted()
    cached = CachedReward(reward)
    for change in (*others, {}):
        cached(**base | change)
    cached(**base, trainer_state=object(), log_extra=print)  # arguments that are not of a row
    assert len(reward._asked) == len(others) + 1
    cached(**{"label" if name == "topic" else name: value for name, value in base.items()})
    assert len(reward._asked) == len(others) + 2


def test_the_reward_gets_only_what_is_in_the_key():
    """Else the first completion's column or step would decide the score of all others."""
    seen = []

    def got(prompts, completions, log_extra, **columns):
        log_extra("seen", completions)  # of some rows, though TRL's table needs all
        seen.append({name for name, value in columns.items() if value is not None})
        return [1.0] * len(completions)

    given = {"topic": [1], "finished": [True], "completion_ids": [[1]]}
    rest = {"trainer_state": SimpleNamespace(global_step=3), "log_extra": None}
    for columns, expected in ((None, {*given}), (["topic"], {"topic"}), ([], set())):
        call(CachedReward(got, columns=columns), "a", **given, **rest)
        assert seen.pop() == {*expected, "log_metric"}


def test_a_failed_call_leaves_nothing_in_the_cache():
    answers = {"nan": math.nan, "tokens": [0.1, 0.2]}
    asked = []

    async def scored(completions, **kwargs):
        asked.append(completions)
        return [answers.get(each, 1.0) for each in completions]

    cached = CachedReward(scored)
    for bad, message in [("nan", "returned nan for completion 1"), ("tokens", r"returned \[0.1, 0.2\]")]:
        with pytest.raises(RuntimeError, match=f"'scored': .*{message}"):
            call(cached, "fine", bad)
    assert call(cached, "fine")[0] == [1.0] and len(asked) == 3


# ---- The identity of a reward ----


def longer_than(bound):
    return lambda completions, **kwargs: [float(len(each) > bound) for each in completions]


def test_the_identity_is_source_and_settings_or_the_rewards_own():
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "Kind answers are good."}
    different = [
        Counted(),
        Counted(2.0),
        longer_than(3),
        longer_than(4),
        PatternReward("a"),
        PatternReward("b"),
        EnsembleReward([Counted(), longer_than(3)]),
        EnsembleReward([Counted(), longer_than(3)], "min"),
        JudgeReward(**judge),
        JudgeReward(**judge, scale=(0, 1)),
        *(load_rewards([{"get_soft_overlong_punishment": {"max_completion_len": n, "soft_punish_cache": 2}}])[0][0]
          for n in (8, 9)),
        CachedReward(Counted()),
        CachedReward(Counted(), columns=[]),
    ]  # fmt: skip
    assert len({*map(reward_identity, different)} - {None}) == len(different)
    assert reward_identity(Counted()) == reward_identity(different[0])
    assert reward_identity(CachedReward(Counted(), ttl=7)) == reward_identity(CachedReward(Counted(), capacity=5))
    named = longer_than(3)
    named.identity = "the third"
    assert reward_identity(named) == "the third"


# ---- With Redis ----


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


class Server:
    """Debian's redis-server on a free port."""

    def __init__(self, folder, *options, tls=False, port=None):
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("no redis-server: apt-get install redis-server")
        self.port = port or free_port()
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        command = [binary, *ports, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if "Ready to accept connections" in line:
                return
        pytest.skip("this redis-server cannot be started so")

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(*options, **kwargs):
        servers.append(Server(tmp_path, *options, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def score_in_a_process(url, texts, queue):
    reward = Counted()
    logged = call(CachedReward(reward, redis_url=url), *texts)
    queue.put((logged, reward._asked))


def test_two_processes_share_a_redis_of_numbers_that_expire(serve):
    server = serve()
    cached = CachedReward(Counted(), redis_url=server.url, ttl=100)
    assert call(cached, "a", "bb", "a")[1] == {f"{NAME}/cache_hits": pytest.approx(1 / 3), f"{NAME}/redis_hits": 0.0}
    client = redis.Redis.from_url(server.url)
    keys = client.keys("*")
    assert sorted(json.loads(client.get(key)) for key in keys) == [1.0, 2.0]
    assert all(0 < client.ttl(key) <= 100 and key.startswith(b"trl-ext:reward:") for key in keys)

    context = multiprocessing.get_context("fork")  # like a data loader's worker: it inherits an open connection
    queue = context.Queue()
    child = context.Process(target=score_in_a_process, args=(server.url, ["bb", "ccc"], queue))
    child.start()
    (scores, logged), asked = queue.get(timeout=60)
    child.join()
    assert scores == [2.0, 3.0] and asked == [["ccc"]] and logged[f"{NAME}/redis_hits"] == 0.5
    assert call(cached, "ccc")[1] == {f"{NAME}/cache_hits": 1.0, f"{NAME}/redis_hits": 1.0}
    assert call(pickle.loads(pickle.dumps(cached)), "a")[1][f"{NAME}/redis_hits"] == 1.0
    other = CachedReward(Counted(2.0), redis_url=server.url)  # another reward's score
    assert call(other, "a")[0] == [2.0]


def certificate(folder):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost "
        "-addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run([*command.split(), *map(str, files)], check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_password_and_tls(serve, tls, tmp_path, monkeypatch, caplog):
    options, query = ["--requirepass", "hunter2-of-redis"], ""
    if tls:
        cert, key = certificate(tmp_path)
        options += ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
        options += ["--tls-ca-cert-file", str(cert)]
        query = f"?ssl_ca_certs={cert}"
    server = serve(*options, tls=tls)
    url = server.url.replace("redis:", "rediss:") if tls else server.url
    monkeypatch.setenv("CACHE_PASSWORD", "hunter2-of-redis")

    def hits(url, **kwargs):
        cached = CachedReward(Counted(), redis_url=url, redis_password_env="CACHE_PASSWORD", **kwargs)
        scores, logged = call(cached, "abc")
        got = [repr(cached), repr(vars(cached)), str(pickle.dumps(cached)), cached.identity]
        assert scores == [3.0] and not any("hunter2" in each for each in got)
        return logged[f"{NAME}/redis_hits"]

    assert [hits(url + query), hits(url + query)] == [0.0, 1.0]
    if tls:  # a self-signed certificate
        assert hits(url) == 0.0
    monkeypatch.setenv("CACHE_PASSWORD", "hunter2-of-another")
    assert hits(url + query) == 0.0
    assert "does not answer" in caplog.text and "hunter2" not in caplog.text
    for secret in ("redis://:hunter2@a", "redis://a?password=hunter2"):
        with pytest.raises(ValueError, match="must not contain a password") as refused:
            CachedReward(Counted(), redis_url=secret)
        assert "hunter2" not in str(refused.value)


def test_a_redis_that_dies_only_costs_time_and_is_used_again(serve, caplog, monkeypatch):
    monkeypatch.setattr("trl_ext.rewards.cached._REST", 0.5)
    server, reward = serve(), Counted()
    cached = CachedReward(reward, redis_url=server.url)
    call(cached, "a")
    server.kill()
    for text in ("bb", "ccc", "dddd"):
        assert call(cached, text)[0] == [float(len(text))]
    assert sum("Redis does not answer" in record.message for record in caplog.records) == 1
    server = serve(port=server.port)
    time.sleep(0.6)
    call(cached, "eeeee")
    assert call(CachedReward(Counted(), redis_url=server.url), "eeeee")[1][f"{NAME}/redis_hits"] == 1.0
