"""A cache in front of a reward: what a key is made of, a real Redis as its second level, and one that dies."""

import json
import math
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from tests.tiny import tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.rewards import (
    CachedReward,
    ConstitutionReward,
    EnsembleReward,
    JudgeReward,
    ModelReward,
    PatternReward,
    RepetitionWatch,
    SumReward,
    source_identity,
)

redis = pytest.importorskip("redis")
NAME = "rewards/cached_counted"


class Counted:
    """Scores by length, and notes what it was asked."""

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


def test_each_answer_is_scored_once():
    reward = Counted()
    cached = CachedReward(reward)
    assert call(cached, "a", "bb", "a", "none") == ([1.0, 2.0, 1.0, None], {f"{NAME}/cache_hits": 0.25})
    assert call(cached, "bb", "none", "ccc") == ([2.0, None, 3.0], {f"{NAME}/cache_hits": 1 / 3})
    assert call(cached, "a", "ccc") == ([1.0, 3.0], {f"{NAME}/cache_hits": 1.0})
    assert reward._asked == [["a", "bb", "none"], ["none", "ccc"]]
    assert call(cached) == ([], {})


def test_all_that_a_score_may_depend_on_is_in_the_key():
    base = {"prompts": ["p"], "completions": ["a"], "completion_ids": [[1, 2]], "finished": [True], "topic": [1]}
    others = [
        {"prompts": ["q"]},
        {"completions": ["b"]},
        {"completion_ids": [[1, 3]]},
        {"completion_ids": [[12]]},
        {"finished": [False]},
        {"finished": [1]},
        {"topic": ["1"]},
        {"topic": [1.0]},
        {"topic": [None]},
        {"completions": [[{"role": "assistant", "content": "a"}]]},
        {"prompts": ["pa"], "completions": [""]},
        {"greedy": True},
    ]
    reward = Counted()
    cached = CachedReward(reward)
    for change in others:
        cached(**base | change)
    cached(["p"], ["a"], [[1, 2]], finished=[True], topic=[1])  # completion_ids by their place
    cached(**base)
    assert len(reward._asked) == len(others) + 1
    cached(**base, trainer_state=object(), log_extra=None)  # what is of no row
    renamed = {"label": [1], **{name: value for name, value in base.items() if name != "topic"}}
    assert len(reward._asked) == len(others) + 1
    cached(**renamed)
    assert len(reward._asked) == len(others) + 2
    keys = [CachedReward(each)._written(["p"], ["a"], {}) for each in (Counted(), Counted(2.0), PatternReward("a"))]
    assert len({key for row in keys for key in row}) == 3
    assert keys[0] == CachedReward(Counted(), capacity=5, ttl=7)._written(["p"], ["a"], {})
    options = ({}, {"columns": []}, {"columns": ["topic"]}, {"columns": [], "normalize": "space"})
    assert len({CachedReward(Counted(), **each).identity for each in options}) == 4


def test_what_is_not_in_the_key_does_not_reach_the_reward():
    """Else the first answer's column, or step, would decide on the score of all others."""
    judge = JudgeReward("http://127.0.0.1:1/v1", "m", "Kind answers are good.", compare="baseline")
    with pytest.raises(
        RuntimeError, match=r"no column 'baseline', which `compare` .* \(it gets only the cache's `columns` \[\]"
    ):
        call(CachedReward(judge, columns=[]), "a", baseline=["b"])
    model = ModelReward(tiny_reward_model(tiny_llama()), tokenizer=tiny_tokenizer())
    with pytest.raises(
        RuntimeError, match=r"cannot tell which completions are finished.*only the cache's `columns` \[\]"
    ):
        call(CachedReward(model, columns=[]), "a", finished=[True])

    def by_step(completions, trainer_state=None, **columns):
        return [float(getattr(trainer_state, "global_step", 0))] * len(completions)

    for reward in (by_step, SumReward([by_step]), RepetitionWatch(score=0.0)):
        with pytest.raises(
            RuntimeError, match="the reward reads `trainer_state.global_step`, .*\. Use the reward without"
        ):
            call(CachedReward(reward), "a", trainer_state=SimpleNamespace(global_step=3))
        assert call(CachedReward(reward), "a", trainer_state=None)[0] == [0.0]

    seen = []

    def told(prompts, completions, **columns):
        seen.append({name for name, value in columns.items() if value is not None})
        return [1.0] * len(completions)

    columns = {"topic": [1], "finished": [True], "completion_ids": [[1]], "log_extra": print}
    for counted, expected in ((None, {*columns, "log_metric"}), (["topic"], {"topic", "log_metric", "log_extra"})):
        call(CachedReward(told, columns=counted), "a", **columns)
        assert seen.pop() == expected
    for constant in (None, 3):  # what is None is passed, so it counts
        cached = CachedReward(told)
        call(cached, "a", constant=constant)
        call(cached, "a")
    assert len(seen) == 4


def test_fewer_columns_and_normalized_texts_give_more_hits():
    reward = Counted()
    cached = CachedReward(reward, columns=["finished"], normalize="punctuation")
    told = {"finished": [True, True], "topic": [1, 2]}
    assert call(cached, "a b", " a,\nb!", **told)[0] == [3.0, 3.0]
    assert call(cached, "a b", "ab", finished=[False, True])[0] == [3.0, 2.0]
    messages = [[{"role": "assistant", "content": text}] for text in ("x  y", "x y ")]
    assert call(CachedReward(reward, columns=[], normalize="space"), *messages)[0] == [1.0, 1.0]
    assert reward._asked == [["a b"], ["a b", "ab"], [messages[0]]]


def test_the_least_recently_used_entry_makes_room():
    reward = Counted()
    cached = CachedReward(reward, capacity=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        call(cached, text)
    assert reward._asked == [["a"], ["b"], ["c"], ["b"]] and len(cached._memory) == 2


def test_nothing_of_a_call_that_fails_is_kept_and_the_error_names_the_row():
    answers = {"nan": math.nan, "text": "1", "tokens": [0.1, 0.2]}

    def scored(completions, **kwargs):
        return [answers.get(each, 1.0) for each in completions]

    cached = CachedReward(scored)
    call(cached, "known")
    for bad, message in [
        ("nan", "returned nan for completion 2"),
        ("tokens", "one score for each answer, but this reward scores each token"),
    ]:
        with pytest.raises(RuntimeError, match=f"'scored': .*{message}"):
            call(cached, "known", "fine", bad)
    assert len(cached._memory) == 1
    cached = CachedReward(lambda completions, **_: [1.0])
    with pytest.raises(RuntimeError, match="returned 1 rewards for 2 completions"):
        call(cached, "a", "b", "a")


def test_an_async_reward_is_awaited_and_what_it_says_of_rows_comes_in_their_places():
    async def later(completions, log_extra, **kwargs):
        log_extra("seen", completions)
        return [float(len(each)) for each in completions]

    table = {}
    cached = CachedReward(later)
    for answers, seen in ((("a", "bb"), ["a", "bb"]), (("a", "ccc", "a"), [None, "ccc", None])):
        cached(["p"] * len(answers), [*answers], log_extra=table.__setitem__)
        assert table["seen"] == seen


def test_threads_share_it():
    cached = CachedReward(Counted(), capacity=50)
    wrong = []

    def work(seed):
        for i in range(200):
            texts = ["x" * ((seed * 7 + i * k) % 90) for k in range(1, 9)]
            if cached(["p"] * 8, texts) != [float(len(text)) for text in texts]:
                wrong.append(texts)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and len(cached._memory) <= 50


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


def test_two_processes_share_a_redis_of_plain_numbers_that_go_by_themselves(serve):
    server = serve()
    cached = CachedReward(Counted(), redis_url=server.url, ttl=100)
    hits = {f"{NAME}/cache_hits": 1 / 3, f"{NAME}/redis_hits": 0.0}
    assert call(cached, "a", "bb", "a") == ([1.0, 2.0, 1.0], hits)
    client = redis.Redis.from_url(server.url)
    keys = client.keys("*")
    assert sorted(json.loads(client.get(key)) for key in keys) == [1.0, 2.0]
    assert all(0 < client.ttl(key) <= 100 and key.startswith(b"trl-ext:reward:") for key in keys)

    context = multiprocessing.get_context("fork")  # as a data loader's: it has the parent's open connection
    queue = context.Queue()
    child = context.Process(target=score_in_a_process, args=(server.url, ["bb", "ccc"], queue))
    child.start()
    (scores, logged), asked = queue.get(timeout=60)
    child.join()
    assert scores == [2.0, 3.0] and asked == [["ccc"]] and logged[f"{NAME}/redis_hits"] == 0.5
    assert call(cached, "ccc")[1] == {f"{NAME}/cache_hits": 1.0, f"{NAME}/redis_hits": 1.0}
    assert call(pickle.loads(pickle.dumps(cached)), "a")[1][f"{NAME}/redis_hits"] == 1.0


@pytest.mark.parametrize(
    "poison", [b"NaN", b"Infinity", b"1e999", b'"5"', b"[1]", b"true", b"null", b"", b"\x80\x04K\x01.", b"9" * 10**6]
)
def test_what_is_no_finite_number_is_scored_anew_and_put_right(serve, poison):
    server, reward = serve(), Counted()
    call(CachedReward(reward, redis_url=server.url), "abc")
    client = redis.Redis.from_url(server.url)
    (key,) = client.keys("*")
    client.set(key, poison)
    assert call(CachedReward(reward, redis_url=server.url), "abc")[0] == [3.0]
    assert len(reward._asked) == 2 and client.get(key) == b"3.0"


def test_a_key_of_another_kind_costs_the_call_no_more_than_redis(serve):
    server, reward = serve(), Counted()
    call(CachedReward(reward, redis_url=server.url), "abc")
    client = redis.Redis.from_url(server.url)
    (key,) = client.keys("*")
    client.delete(key)
    client.lpush(key, "x")
    assert call(CachedReward(reward, redis_url=server.url), "abc")[0] == [3.0]


def certificate(folder):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
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
    cached = CachedReward(Counted(), redis_url=url + query, redis_password_env="CACHE_PASSWORD")
    call(cached, "abc")
    again = CachedReward(Counted(), redis_url=url + query, redis_password_env="CACHE_PASSWORD")
    assert call(again, "abc")[1][f"{NAME}/redis_hits"] == 1.0
    told = [repr(cached), repr(vars(cached)), str(pickle.dumps(cached)), cached.identity, source_identity(cached)]
    assert not any("hunter2" in each for each in told)

    monkeypatch.setenv("CACHE_PASSWORD", "hunter2-of-another")
    refused = CachedReward(Counted(), redis_url=url + query, redis_password_env="CACHE_PASSWORD")
    assert call(refused, "abc") == ([3.0], {f"{NAME}/cache_hits": 0.0, f"{NAME}/redis_hits": 0.0})
    if tls:  # a certificate that nobody vouches for
        assert call(CachedReward(Counted(), redis_url=url), "abc")[1][f"{NAME}/redis_hits"] == 0.0
    assert "AuthenticationError" in caplog.text and "hunter2" not in caplog.text


def test_a_redis_that_dies_costs_speed_and_one_that_comes_back_is_used(serve, caplog):
    server, reward = serve(), Counted()
    cached = CachedReward(reward, redis_url=server.url, retry_after=0.5)
    call(cached, "a")
    server.kill()
    for text in ("bb", "ccc", "dddd"):
        assert call(cached, text)[0] == [float(len(text))]
    assert sum("Redis does not answer" in record.message for record in caplog.records) == 1
    server = serve(port=server.port)
    time.sleep(0.6)
    call(cached, "eeeee")
    assert call(CachedReward(Counted(), redis_url=server.url), "eeeee")[1][f"{NAME}/redis_hits"] == 1.0
    assert "Redis answers again" in caplog.text


def test_a_redis_that_never_answers_is_waited_for_once():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        cached = CachedReward(Counted(), redis_url=url, timeout=1.0)
        start = time.monotonic()
        for i in range(20):
            call(cached, "x" * i)
        assert time.monotonic() - start < 10


def test_a_server_that_is_no_redis_is_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as web:

        def rubbish():
            for _ in range(2):
                connection, _ = web.accept()
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + os.urandom(100))
                connection.close()

        threading.Thread(target=rubbish, daemon=True).start()
        cached = CachedReward(Counted(), redis_url=f"redis://127.0.0.1:{web.getsockname()[1]}", timeout=0.5)
        assert call(cached, "abc")[0] == [3.0]


@pytest.mark.parametrize("said", [5, None, [5], [[1.0]], [], [b"7.0", b"8.0"], "7.0"], ids=repr)
def test_an_answer_of_another_form_is_no_score(said, monkeypatch):
    cached = CachedReward(Counted(), redis_url="redis://127.0.0.1:1")
    monkeypatch.setattr(cached, "_ask_redis", lambda question: said)
    assert call(cached, "abc")[0] == [7.0 if said == [b"7.0", b"8.0"] else 3.0]


def test_bad_arguments(subtests, monkeypatch):
    reward = Counted()
    number = PatternReward("a", on_error=0.0)
    for arguments, error, message in [
        ({"reward": "path"}, TypeError, "must be a reward function"),
        ({"reward": number}, ValueError, "has on_error=0.0, so the cache would keep 0.0 as the score"),
        ({"capacity": 0}, ValueError, "`capacity` must be"),
        ({"ttl": 0.5}, ValueError, "`ttl` must be"),
        ({"timeout": 0}, ValueError, "`timeout` must be more than 0"),
        ({"columns": "finished"}, TypeError, "a list of names"),
        ({"normalize": "case"}, ValueError, "'space', 'punctuation'"),
        ({"normalize": "space"}, ValueError, "columns=None the cache compares them"),
        ({"redis_password_env": "X"}, ValueError, "only with `redis_url`"),
        ({"redis_url": "http://a"}, ValueError, "must begin with redis://"),
        ({"redis_url": "redis://:hunter2@a"}, ValueError, "must not contain a password"),
        ({"redis_url": "redis://a?password=hunter2"}, ValueError, "must not contain a password"),
        ({"redis_url": "redis://a", "redis_password_env": "NOT_SET_HERE"}, ValueError, "NOT_SET_HERE, which is not"),
    ]:
        with subtests.test(message=message), pytest.raises(error, match=message) as raised:
            CachedReward(**{"reward": reward, **arguments})
        assert "hunter2" not in str(raised.value)
    for columns, error, message in [
        ({"image": [object()]}, TypeError, "one of the columns .'image'. holds something other"),
        ({"prompts": ["a", "b"]}, ValueError, "2 prompts for 1 completions"),
    ]:
        with subtests.test(message=message), pytest.raises(error, match=message):
            call(CachedReward(reward), "a", **columns)
    with pytest.raises(ValueError, match=r"`columns` names 'topic', but the data has the columns \['finished'\]"):
        call(CachedReward(reward, columns=["topic"]), "a", finished=[True])


def test_what_a_failing_member_leaves_is_no_score_to_keep(subtests):
    pattern = PatternReward("a")
    for reward, policy in [
        (SumReward([pattern, Counted()], on_error="skip"), "'skip'"),
        (SumReward([pattern, PatternReward("b", on_error="skip")]), "'skip'"),
        (EnsembleReward([pattern, Counted()], on_error=0.5), "0.5"),
        (ConstitutionReward(SumReward([PatternReward("b", on_error=1)]), [pattern]), "1"),
    ]:
        with subtests.test(reward.__name__), pytest.raises(ValueError, match=f"has a member with on_error={policy}"):
            CachedReward(reward)
    CachedReward(SumReward([pattern, Counted()]))
    CachedReward(PatternReward("b", on_error="skip"))  # None is not kept


def test_an_error_says_among_which_rows_it_counts():
    def failing(completions, **kwargs):
        if "bad" in completions:
            raise ValueError(f"completion {completions.index('bad')}")
        return [1.0] * len(completions)

    cached = CachedReward(failing)
    call(cached, "a", "b")
    with pytest.raises(RuntimeError, match=r"completion 1 \(counted among completions 1, 3: the reward got only"):
        call(cached, "a", "c", "b", "bad")
