"""Environments of recipes/agents, played by their scripted players, and one recipe as it is run."""

import functools
import importlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tests.agents
from recipes import ppo
from recipes.agents import teach
from tests.agents import byte_tokenizer
from tests.tiny import tiny_llama
from trl_ext.rewards import RewardFailed

pytestmark = pytest.mark.optional


@pytest.fixture
def lake():
    pytest.importorskip("gymnasium", reason="needs pip install 'trl-ext[agents]'")
    return importlib.import_module("recipes.agents.frozen_lake")


@pytest.fixture
def nim():
    pytest.importorskip("textarena", reason="needs pip install 'trl-ext[agents]'")
    return importlib.import_module("recipes.agents.nim")


@pytest.fixture
def reasoning():
    pytest.importorskip("reasoning_gym", reason="needs pip install 'trl-ext[agents]'")
    return importlib.import_module("recipes.agents.reasoning")


@pytest.fixture(scope="module")
def guess():
    pytest.importorskip("openenv.core", reason="needs pip install 'trl-ext[agents]'")
    module = importlib.import_module("recipes.agents.guess")
    yield module
    stop(module)


@pytest.fixture
def server(guess):
    """The server of the test, which may die in it."""
    guess.Environment()
    yield guess.Environment._server
    if guess.Environment._server.process.poll() is not None:
        stop(guess)


def stop(module):
    if module.Environment._server:
        module.Environment._server.stop()
        module.Environment._server = None


@pytest.mark.slow  # two processes' worth of imports, SFT and PPO
def test_a_model_is_taught_and_trained_by_the_commands_that_the_recipe_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teach.main([f"{Path(teach.__file__).with_name('nim.py')}:Environment", "--episodes", "16"])
    assert len(Path("outputs/agents/nim/rows/test.jsonl").read_text().splitlines()) == 200
    teach.main(["weather", "--episodes", "16"])
    size = ["--per_device_train_batch_size", "16", "--num_mini_batches", "2", "--num_ppo_epochs", "1"]
    ppo.main(["--config", "agents/weather", *size, "--total_episodes", "64", "--max_completion_length", "24"])
    assert Path("outputs/agents/weather/ppo/model.safetensors").is_file()


@pytest.mark.slow
def test_an_environment_that_owns_its_data_trains_by_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained("model")
    tiny_llama(len(tokenizer), max_position_embeddings=2048).save_pretrained("model")
    command = ["--model_name_or_path", "model", "--output_dir", "out", "--max_steps", "1", "--use_cpu", "true"]
    command += ["--per_device_train_batch_size", "4", "--num_mini_batches", "1", "--max_completion_length", "8"]
    named = f"{Path(tests.agents.__file__)}:Counter"
    ppo.main([*command, "--environment", named])
    assert (tmp_path / "out/model.safetensors").exists()
    with pytest.raises(SystemExit):
        ppo.main([*command, "--output_dir", "other", "--environment", named, named])
    assert "several environments need names" in capsys.readouterr().err


# Weather


# Frozen lake


# Nim


def wins(nim, piles):
    """Whether who moves wins: there is a move after which the other one does not."""

    @functools.cache
    def won(piles):
        after = [(*piles[:i], piles[i] - n, *piles[i + 1 :]) for i in range(3) for n in range(1, piles[i] + 1)]
        return any(not won(each) for each in after)

    return won(tuple(piles))


def test_nim_is_played_to_its_end(nim, monkeypatch):
    environment, before = nim.Environment(), random.getstate()
    assert environment.reset(piles=[1, 2, 0]) == "pile 0: 1 pile 1: 2 pile 2: 0"
    left = nim.piles_in(environment.take(pile=1, count=1))
    assert left in ([0, 1, 0], [1, 0, 0])  # two equal moves
    assert environment.take(pile=left.index(1), count=1) == "You won." and environment.get_reward() == 1
    assert environment.take(pile=1, count=1) == "It is over." and environment.get_reward() == 0
    assert random.getstate() == before  # the run's own draws go on
    assert teach.success(nim, nim.Player(), 100) == 1

    monkeypatch.setattr(nim, "BLUNDERS", 0.0)  # each game that the opponent can win
    for seed in range(10):
        environment.reset(piles=[3, 1, 2], seed=seed)
        said = environment.take(pile=1, count=1)
        while nim.piles_in(said):
            pile, count = nim.choose(nim.piles_in(said), 1.0, random.Random(seed))
            said = environment.take(pile=pile, count=count)
        assert said == "You lost." and environment.get_reward() == 0


# reasoning-gym


# OpenEnv


@pytest.mark.slow
def test_a_number_is_found_on_the_server(guess, server):
    environment = guess.Environment()
    assert environment.reset(seed=0) == "1 to 15"
    number = random.Random(0).randint(1, 15)
    assert environment.guess(number) == "You found it." and environment.get_reward() == 1
    assert environment.guess(number) == "It is over." and environment.get_reward() == 0
    environment.reset(seed=0)
    for _ in range(3):
        assert environment.guess(15 if number < 15 else 1) == ("1 to 14" if number < 15 else "2 to 15")
    assert environment.guess(0) == "You did not find it." and environment.get_reward() == 0
    assert teach.success(guess, guess.Player(), 50) == 1


@pytest.mark.slow
def test_a_server_that_dies_or_hangs_in_an_episode_is_named(guess, server, monkeypatch):
    monkeypatch.setattr(guess, "SECONDS", 1.0)
    for blow in (signal.SIGSTOP, signal.SIGKILL):
        environment = guess.Environment()
        environment.reset(seed=0)
        os.kill(server.process.pid, blow)
        begin = time.monotonic()
        with pytest.raises(ConnectionError, match="OpenEnv server at http://127.0.0.1:.* does not answer"):
            environment.guess(3)
        with pytest.raises(RewardFailed, match="does not answer"):
            environment.get_reward()
        assert time.monotonic() - begin < 10
        if blow == signal.SIGSTOP:
            os.kill(server.process.pid, signal.SIGCONT)
    server.process.wait()  # else the next test may still take it for alive


@pytest.mark.slow
def test_the_server_ends_with_its_run(guess):
    code = "from recipes.agents import guess; e = guess.Environment(); print(e._server.process.pid, flush=True)"
    code += "; import os; os.kill(os.getpid(), 9)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid, begin = int(run.stdout.split()[-1]), time.monotonic()
    while is_running(pid) and time.monotonic() - begin < 20:
        time.sleep(0.1)
    assert not is_running(pid)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
