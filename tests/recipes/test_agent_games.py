"""Environments of recipes/agents, played by their scripted players, and the commands of a recipe."""

import importlib
import os
import random
import signal
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


def game(package, name):
    @pytest.fixture
    def imported():
        pytest.importorskip(package, reason="needs pip install -e '.[agents]'")
        return importlib.import_module(f"recipes.agents.{name}")

    return imported


lake, nim, reasoning = game("gymnasium", "frozen_lake"), game("textarena", "nim"), game("reasoning_gym", "reasoning")


@pytest.fixture(scope="module")
def guess():
    pytest.importorskip("openenv.core", reason="needs pip install -e '.[agents]'")
    module = importlib.import_module("recipes.agents.guess")
    yield module
    stop(module)


@pytest.fixture
def server(guess):
    """A server that the test may kill."""
    guess.Environment()
    yield guess.Environment._server
    if guess.Environment._server.process.poll() is not None:
        stop(guess)


def stop(module):
    if module.Environment._server:
        module.Environment._server.stop()
        module.Environment._server = None


@pytest.mark.slow
def test_the_commands_in_the_recipe_teach_and_train_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teach.main([f"{Path(teach.__file__).with_name('nim.py')}:Environment", "--episodes", "16"])
    assert len(Path("outputs/agents/nim/rows/test.jsonl").read_text().splitlines()) == 200
    teach.main(["weather", "--episodes", "16"])
    size = "--per_device_train_batch_size 16 --num_mini_batches 2 --num_ppo_epochs 1".split()
    ppo.main(["--config", "agents/weather", *size, "--total_episodes", "64", "--max_completion_length", "24"])
    assert Path("outputs/agents/weather/ppo/model.safetensors").is_file()


@pytest.mark.slow
def test_an_environment_with_its_own_data_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained("model")
    tiny_llama(len(tokenizer), max_position_embeddings=2048).save_pretrained("model")
    command = "--model_name_or_path model --output_dir out --max_steps 1 --use_cpu true".split()
    command += "--per_device_train_batch_size 4 --num_mini_batches 1 --max_completion_length 8".split()
    named = f"{Path(tests.agents.__file__)}:Counter"
    ppo.main([*command, "--environment", named])
    assert (tmp_path / "out/model.safetensors").exists()


# Nim


def test_nim_is_played_to_its_end(nim):
    environment, before = nim.Environment(), random.getstate()
    assert environment.reset(piles=[1, 2, 0]) == "pile 0: 1 pile 1: 2 pile 2: 0"
    left = nim.piles_in(environment.take(pile=1, count=1))
    assert left in ([0, 1, 0], [1, 0, 0])  # two equal moves
    assert environment.take(pile=left.index(1), count=1) == "You won." and environment.get_reward() == 1
    assert environment.take(pile=1, count=1) == "It is over." and environment.get_reward() == 0
    assert random.getstate() == before  # the run's own random state does not change
    assert teach.success(nim, nim.Player(), 100) == 1


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
    server.process.wait()  # else the next test may find it alive
