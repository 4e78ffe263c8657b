"""Answers by vLLM: log-probs are kept, and a server that goes away costs nothing. `tests/vllm` runs the real one."""

import threading
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from tests.launch import on_two_processes
from tests.ppo.vllm_stub import PROCESSED, after, serving
from tests.ppo.worker import collected, end_state, make_trainer
from tests.tiny import tiny_config, tiny_llama
from trl_ext.ppo.vllm import ServerLost, check_loadable, check_logprobs, sampled_logprobs
from trl_ext.runs.checkpoints import checkpoint_to_resume

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def make(tmp_path, server, timeout=20.0, **config):
    """A trainer of three rollouts, whose answers come from the server."""
    torch.manual_seed(0)
    kwargs = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url} | config
    return make_trainer(
        tmp_path, vllm_server_timeout=timeout, max_steps=12, learning_rate=1e-2, temperature=0.7, **kwargs
    )


# ---- Log-probs ----


def test_the_log_prob_of_each_sampled_token_is_kept():
    logprobs = sampled_logprobs([[5, 6, 2], [7]], [[[-1.0], [-2.0], [-0.5]], [[-3.0]]], [[[5], [6], [2]], [[7]]])
    assert logprobs == [[-1.0, -2.0, -0.5], [-3.0]]


def test_what_an_engine_returns_is_checked_and_passed_on():
    said = [[4]], [[5, 6]], [[[-1.0], [-2.0]]], [[[5], [6]]]
    engine = SimpleNamespace(generate=lambda prompts, num_generations: said)
    check_logprobs(engine)
    assert engine.generate([[4]], num_generations=1) is said
    said[2][0][1][0] = None
    with pytest.raises(RuntimeError, match="sampled token 6 at place 1 of answer 0"):
        engine.generate([[4]], num_generations=1)
    said = [], [], None, None  # of a server that has gone: it is asked again
    assert engine.generate([[4]], num_generations=1) is said


@pytest.mark.parametrize(
    "logprobs, of_tokens, message",
    [
        (None, None, "vLLM returned no log-probs"),
        ([[[-1.0], [None]]], [[[5], [6]]], "sampled token 6 at place 1 of answer 0 with the log-prob NaN"),
        ([[[-1.0], [float("-inf")]]], None, "with the log-prob -inf: the training has diverged"),
        ([[[-1.0], [-1.0]]], [[[5], [7]]], "log-probs for the wrong tokens of answer 0"),
        ([[[-1.0]]], [[[5]]], r"1 log-probs of \[5\] … for the 2 tokens \[5, 6\]"),
    ],
)
def test_a_log_prob_that_is_not_of_what_was_drawn_is_an_error(logprobs, of_tokens, message):
    with pytest.raises(RuntimeError, match=message):
        sampled_logprobs([[5, 6]], logprobs, of_tokens)


@pytest.mark.parametrize("num_generations", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_log_probs_are_those_of_the_server_that_has_the_trainers_weights(num_generations, tmp_path, monkeypatch):
    """Of each answer its own, with several to a prompt; the weights move by nats in between."""
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = make(tmp_path, server, num_generations=num_generations, stop_token_id=9)
        seen = collected(trainer)
        trainer.train()
    assert len(seen) == server.updates == 3
    for rollout in seen:
        torch.testing.assert_close(rollout.sampler_logprobs, rollout.logprobs * rollout.mask, rtol=1e-4, atol=1e-4)
    assert seen[-1].kl("k1").abs().max() > 0.5
    answers = [ids[: int(n)].tolist() for r in seen for ids, n in zip(r.completion_ids, r.lengths, strict=True)]
    assert not any({2, 9} & {*answer[:-1]} for answer in answers)
    assert {2, 9} <= {answer[-1] for answer in answers} and len({*map(tuple, answers[:8])}) == 8


@pytest.mark.slow
def test_greedy_answers_are_the_most_likely_ones(tmp_path, monkeypatch):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = make(tmp_path, server, trainer_kwargs={"eval_dataset": None}, num_generations=1)
        trainer.eval_dataset = trainer.train_dataset.select(range(4))
        server_side = trainer.evaluate()
    own = make_trainer(tmp_path / "own", temperature=0.7, trainer_kwargs={"eval_dataset": trainer.eval_dataset})
    ours = own.evaluate()
    for name in ("scores", "entropy"):
        assert server_side[f"eval_greedy/objective/{name}"] == pytest.approx(ours[f"eval_greedy/objective/{name}"])


def test_an_engine_that_has_packed_its_weights_is_refused():
    """As vLLM's CPU build does: the initial policy would be sampled from."""
    model = torch.nn.Linear(2, 2)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner)))
    engine = SimpleNamespace(llm=llm, accelerator=SimpleNamespace(device=torch.device("cpu")))
    check_loadable(engine)
    model.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(ValueError, match="vLLM cannot load updated weights there"):
        check_loadable(engine)


def test_what_vllm_would_answer_wrongly_or_refuse_is_refused(tmp_path):
    with pytest.raises(ValueError, match="would give all 2 answers to a prompt .* the same text"):
        tiny_config(tmp_path, use_vllm=True, num_generations=2, generation_kwargs={"seed": 1})
    with pytest.raises(ValueError, match="`temperature=2.5` is above 2, and vLLM refuses that"):
        tiny_config(tmp_path, use_vllm=True, temperature=2.5)


# ---- A server that goes away ----


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """How runs end whose server stays."""
    ends = {}
    for name, peft in (("full", None), ("lora", LORA)):
        with pytest.MonkeyPatch.context() as patch, serving(tiny_llama(seed=5), patch) as server:
            folder = tmp_path_factory.mktemp(name)
            trainer = make(folder, server, trainer_kwargs={"peft_config": peft})
            trainer.train()
            ends[name] = end_state(trainer)
    return ends


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, path, seconds",
    [
        ("full", "/v1/completions", 0.3),
        ("full", "/v1/completions", 0),  # it answers with the weights of its disk
        ("lora", "/update_weights", 0.3),  # the adapter is merged into the base then
    ],
)
def test_a_server_that_dies_and_comes_back_costs_nothing(
    name, path, seconds, undisturbed, tmp_path, monkeypatch, capfd
):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = make(tmp_path, server, trainer_kwargs={"peft_config": LORA if name == "lora" else None})
        server.during = after(2, path, lambda: server.restart(seconds))
        trainer.train()
    torch.testing.assert_close(end_state(trainer), undisturbed[name], rtol=0, atol=0)
    assert server.starts == 2
    said = capfd.readouterr().out
    assert said.count("was restarted, so it gets the weights again") == 1
    assert ("does not answer" in said) == bool(seconds)


@pytest.mark.slow
def test_a_server_that_was_restarted_unseen_gets_the_weights(undisturbed, tmp_path, monkeypatch):
    """While the trainer updates its weights nobody asks it anything; its own would be those of its disk."""
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = make(tmp_path, server)
        step = trainer.training_step

        def restart(*args):
            if trainer.state.global_step == 5:
                server.restart()
            return step(*args)

        trainer.training_step = restart
        trainer.train()
    torch.testing.assert_close(end_state(trainer), undisturbed["full"], rtol=0, atol=0)


@pytest.mark.slow
def test_a_server_that_hangs_is_gone(undisturbed, tmp_path, monkeypatch):
    """Its connections stay open: as of a process that was stopped, or a network that was cut."""
    monkeypatch.setattr("trl_ext.ppo.vllm._PATIENCE", 0.2)
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer, over = make(tmp_path, server), threading.Event()

        def hang():
            server.during = lambda path: over.wait()
            threading.Timer(2.0, lambda: (server.stop(), over.set(), server.start())).start()
            over.wait()

        server.during = after(2, "/v1/completions", hang)
        trainer.train()
    assert server.starts == 2
    torch.testing.assert_close(end_state(trainer), undisturbed["full"], rtol=0, atol=0)


@pytest.mark.slow
def test_a_rollout_that_is_drawn_ahead_is_drawn_anew(tmp_path, monkeypatch):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = make(tmp_path, server, rollouts_ahead=1)
        server.during, seen = after(2, "/v1/completions", lambda: server.restart(0.3)), collected(trainer)
        trainer.train()
    assert server.starts == 2 and trainer.state.global_step == 12
    assert all(len(rollout.scores) == 8 and rollout.sampler_logprobs.isfinite().all() for rollout in seen)


@pytest.mark.parametrize("behind", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_that_stays_away_ends_the_run_which_goes_on_later(behind, undisturbed, tmp_path, monkeypatch):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = make(tmp_path, server, timeout=0.2, save_in_background=behind)
        server.during = after(3, "/v1/completions", server.stop)
        with pytest.raises(
            ServerLost, match=r"has not answered for 0.2 s .* the same command resumes from .*checkpoint-8\."
        ):
            trainer.train()
        server.during = lambda path: None
        server.start()
        again = make(tmp_path, server, save_in_background=behind)
        newest = checkpoint_to_resume(again.args)
        assert newest.endswith("checkpoint-8")
        again.train(resume_from_checkpoint=newest)
    torch.testing.assert_close(end_state(again), undisturbed["full"], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_wait_for_the_server_and_end_together(tmp_path):
    """Only the first one asks it; all gather the weights, and an adapter is unmerged on each."""
    both = on_two_processes("tests.ppo.vllm_worker", tmp_path)
    assert [said["starts"] for said in both] == [2, 1] and both[0]["processes"] == 2
    for said in both:
        torch.testing.assert_close(said["comes back"], both[0]["stays"], rtol=0, atol=0)
        assert "has not answered for 0.2 s" in said["away"] and "resumes from" in said["away"]
    assert checkpoint_to_resume(tiny_config(tmp_path / "away"))


def test_a_server_that_refuses_ends_the_run_with_what_it_says(tmp_path, monkeypatch):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = make(tmp_path, server)
        say = server.say
        server.say = lambda path, body: None if path == "/v1/completions" else say(path, body)
        with pytest.raises(ServerLost, match="refuses the request. Request failed: 404.* No step was"):
            trainer.train()


@pytest.mark.parametrize(
    "config, message",
    [
        (None, "restart it with VLLM_SERVER_DEV_MODE=1"),
        ({**PROCESSED, "weight_transfer_config": None}, "restart it with `--weight-transfer-config"),
        (
            {**PROCESSED, "model_config": {"logprobs_mode": "raw_logprobs"}},
            "with `--logprobs-mode processed_logprobs`",
        ),
        ({"model_config": {}}, "is not a vLLM server"),
    ],
)
def test_a_server_of_another_kind_is_refused_before_anything_is_loaded(config, message, tmp_path, monkeypatch):
    with serving(tiny_llama(seed=5), monkeypatch, config) as server, pytest.raises(ValueError, match=message):
        make(tmp_path, server)


def test_a_server_that_is_not_there_is_one_sentence(tmp_path, monkeypatch, capfd):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        server.stop()
        with pytest.raises(ServerLost, match=r"has not answered for 0.1 s .*: ConnectError. Start the server"):
            make(tmp_path, server, timeout=0.1)
    assert capfd.readouterr().out.count("waiting for it, up to 0.1 s.") == 1
    with pytest.raises(ValueError, match="'localhost:8000' is not the address of a vLLM server"):
        make(tmp_path, server, vllm_server_base_url="localhost:8000")
