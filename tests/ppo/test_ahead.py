"""Rollouts that are drawn ahead: of which weights, how they are resumed, and what happens when somebody dies."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from tests.launch import on_two_processes
from tests.ppo.vllm_stub import after, serving
from tests.ppo.worker import RESUMED, collected, draw, end_state, lora_trainer, make_trainer, weights
from tests.tiny import length_reward, prompts, tiny_gpt2, tiny_llama
from trl_ext.models import rollout_process
from trl_ext.models.generation import completion_logprobs
from trl_ext.models.rollout_process import RolloutProcess
from trl_ext.models.rollout_worker import Job, Sampler
from trl_ext.ppo import RolloutProcessLost, ServerLost, ahead
from trl_ext.rewards.member import Started
from trl_ext.runs.checkpoints import checkpoint_to_resume
from trl_ext.runs.marker import MARKER

TIMEOUT = 60


class Late(Future):
    """Answers that are drawn when they are waited for, and not before: their weights must still be there."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def exception(self, timeout=None):
        if not self.done():
            self.draw(self)
        return super().exception()


class Here(RolloutProcess):
    """Draws in this process, as late as can be."""

    def __init__(self, setup):
        self.setup = setup
        self._memory = torch.zeros(setup.slots * setup.slot_bytes, dtype=torch.uint8)
        self.sampler = Sampler(setup, self._memory)
        self.jobs: list[Job] = []
        MADE.append(self)

    def submit(self, job, arrived):
        def drawn(future):
            answers = self.sampler.draw(job)
            arrived(answers)
            future.set_result(answers)

        self.jobs.append(job)
        return Late(drawn)

    def close(self):
        pass


MADE: list[Here] = []


@pytest.fixture
def here(monkeypatch):
    MADE.clear()
    monkeypatch.setattr(ahead, "RolloutProcess", Here)
    return MADE


def ahead_trainer(output_dir, k=1, **config):
    return make_trainer(output_dir, **RESUMED | {"rollouts_ahead": k} | config)


class BeforeRollouts(TrainerCallback):
    """Keeps the policy as it was before each rollout was trained on."""

    def __init__(self, trainer, steps=4):
        self.trainer, self.steps, self.seen = trainer, steps, []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.steps == 0:
            self.seen.append(weights(self.trainer))


def tokens(ids, mask):
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rollout_is_drawn_from_the_weights_that_the_schedule_says(k, here, tmp_path):
    """14 steps are four rollouts of two data epochs: nothing is drawn beyond, and each from older weights but two."""
    trainer = ahead_trainer(tmp_path, k, logging_steps=1, max_approx_kl=None)
    rollouts, before = collected(trainer), BeforeRollouts(trainer)
    trainer.add_callback(before)
    trainer.train()

    (process,) = here
    assert [job.number for job in process.jobs] == [0, 1, 2, 3] and len({job.seed for job in process.jobs}) == 4
    for n, (rollout, job) in enumerate(zip(rollouts, process.jobs, strict=True)):
        version = max(0, n - k)
        for name, parameter in process.sampler.model.named_parameters():
            parameter.data.copy_(before.seen[version][f"policy.{name}"])
        process.sampler.version = job.version
        answers = process.sampler.draw(job)
        assert job.version == version
        ids = [
            row[mask.bool()].tolist()
            for row, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)
        ]
        assert ids == answers.ids
        assert [
            row[mask.bool()].tolist() for row, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)
        ] == job.prompts
        width = answers.logprobs.size(1)
        torch.testing.assert_close(rollout.sampler_logprobs[:, :width], answers.logprobs, rtol=0, atol=0)
        is_current = torch.allclose(rollout.sampler_logprobs, rollout.logprobs, atol=1e-5)
        assert is_current == (n == 0)
    logs = [log["sampling/staleness"] for log in trainer.state.log_history if "sampling/staleness" in log]
    assert logs == [4.0 * min(n, k) for n in range(4)]
    assert any("time/generate_wait" in log for log in trainer.state.log_history)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """By k: the end of a run that saves nothing, and a folder with a checkpoint of each step of one that does."""
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "RolloutProcess", Here)
        for k in (1, 2):
            trainer = ahead_trainer(tmp_path_factory.mktemp("plain"), k)
            trainer.train()
            saving = ahead_trainer(tmp_path_factory.mktemp("saving"), k, save_strategy="steps", save_steps=1)
            saving.train()
            runs[k] = end_state(trainer), Path(saving.args.output_dir)
    return runs


@pytest.mark.parametrize(
    ("k", "step"),
    [
        pytest.param(1, 4, id="boundary", marks=pytest.mark.slow),
        pytest.param(1, 9, id="epoch 1", marks=pytest.mark.slow),
        pytest.param(2, 2, id="mid rollout, k=2"),
        pytest.param(2, 8, id="epoch's end, k=2", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_ends_as_the_uninterrupted_one(k, step, here, uninterrupted, tmp_path):
    end, saved = uninterrupted[k]
    trainer = ahead_trainer(tmp_path, k)
    torch.manual_seed(1234)
    trainer.train(str(saved / f"checkpoint-{step}"))
    torch.testing.assert_close(end_state(trainer), end, rtol=0, atol=0, equal_nan=True)
    kept = (step - 1) // 4 + k  # the last rollout that had been drawn when it was saved
    assert [job.number for process in here for job in process.jobs] == list(range(kept + 1, 4))


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_prompts_draws_anew(here, uninterrupted, tmp_path):
    trainer = ahead_trainer(tmp_path, 1, data_seed=5, resume_anyway=True)
    trainer.train(str(uninterrupted[1][1] / "checkpoint-4"))
    assert [job.number for process in here for job in process.jobs] == [1, 2, 3]


@pytest.mark.slow
def test_adapters_are_sent_merged_and_tied_weights_once(here, tmp_path):
    for trainer in (
        lora_trainer(tmp_path, rollouts_ahead=1, max_steps=1),
        lora_trainer(tmp_path, "gpt2", rollouts_ahead=1, max_steps=1),
        make_trainer(tmp_path, model=tiny_gpt2(), rollouts_ahead=1, max_steps=1),
    ):
        draw(trainer.model)
        rollouts = collected(trainer)
        trainer.train()
        torch.testing.assert_close(rollouts[0].sampler_logprobs, rollouts[0].logprobs, rtol=0, atol=1e-5)


class Judge:
    """In the background; the second call lets the first rollout's training go on."""

    in_background = True
    __name__ = "judge"

    def __init__(self):
        self.calls, self.second = [], threading.Event()

    def __call__(self, completions, trainer_state, topic, finished, **kwargs):
        self.calls.append((trainer_state.global_step, completions, topic, finished))
        if len(self.calls) == 2:
            self.second.set()
        return length_reward(completions)


class LateAtFirst(Started):
    """The first call's thread is overtaken by the second one's."""

    seen = 0

    def _run(self, function, kwargs):
        LateAtFirst.seen += 1
        if LateAtFirst.seen == 1:
            time.sleep(0.5)
        super()._run(function, kwargs)


class AtOnce(Here):
    def submit(self, job, arrived):
        future = super().submit(job, arrived)
        future.exception()
        return future


@pytest.mark.slow
def test_slow_rewards_are_asked_while_the_rollout_before_is_trained_on(monkeypatch, tmp_path):
    monkeypatch.setattr(ahead, "RolloutProcess", AtOnce)
    monkeypatch.setattr(ahead, "Started", LateAtFirst)
    asked = {}
    for in_background in (True, False):
        judge = Judge()
        judge.in_background = in_background
        trainer = make_trainer(tmp_path, judge, rollouts_ahead=1, max_steps=8, logging_steps=4)
        if in_background:

            class Waits(TrainerCallback):
                def on_step_end(self, args, state, control, judge=judge, **kwargs):
                    assert judge.second.wait(TIMEOUT)  # before the second rollout has been taken up

            trainer.add_callback(Waits())
        trainer.train()
        asked[in_background] = end_state(trainer), [call[1:] for call in judge.calls]
        assert [step for step, *_ in judge.calls] == ([0, 0] if in_background else [0, 4])
    torch.testing.assert_close(asked[True][0], asked[False][0], rtol=0, atol=0, equal_nan=True)
    assert asked[True][1] == asked[False][1]


def test_other_prompts_than_those_that_were_drawn_for_are_refused(here, tmp_path):
    trainer = make_trainer(tmp_path, rollouts_ahead=1)
    get_dataloader = trainer.get_train_dataloader

    def shuffled():
        trainer.train_dataset = prompts(16, seed=5)
        loader = get_dataloader()
        trainer.train_dataset = prompts(16)
        return loader

    trainer.get_train_dataloader = shuffled
    with pytest.raises(RuntimeError, match="At step 0, process 0: rollout 0 was generated for other prompts than the"):
        trainer.train()


# ---- A server ----


@pytest.mark.slow
def test_a_server_draws_while_the_rollout_before_is_trained_on(monkeypatch, tmp_path):
    """And it gets no weights while it draws, neither before a rollout nor before an evaluation."""
    goes_on, started, drawing, together = threading.Event(), [], [], []

    class Trained(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                goes_on.set()  # the second rollout was asked for, and not waited for

    with serving(tiny_llama(seed=5), monkeypatch) as server:
        say = server.say

        def said(path, body):
            if path == "/update_weights":
                together.extend(drawing)
            if path != "/v1/completions":
                return say(path, body)
            started.append(path)
            drawing.append(path)
            if len(started) == 2:
                goes_on.wait(TIMEOUT)
            if len(started) == 3:
                time.sleep(1.0)  # meanwhile an evaluation begins
            answer = say(path, body)
            drawing.pop()
            return answer

        server.say = said
        evaluated = {"eval_strategy": "steps", "eval_steps": 5, "trainer_kwargs": {"eval_dataset": prompts(2)}}
        trainer = on_server(tmp_path, server, **evaluated)
        trainer.add_callback(Trained())
        assert drawn_from(trainer) == [0, 0, 1]
    assert not together and goes_on.is_set()


@pytest.mark.slow
def test_a_server_that_is_restarted_draws_again_from_the_weights_as_they_are(monkeypatch, tmp_path, capfd):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = on_server(tmp_path, server)
        server.during = after(3, "/v1/completions", server.restart)
        assert drawn_from(trainer) == [0, 0, 2]
    assert capfd.readouterr().out.count("was restarted, so it gets the weights again") == 1


@pytest.mark.slow
def test_a_server_that_stays_away_ends_the_run_which_draws_what_it_lacks_later(monkeypatch, tmp_path):
    with serving(tiny_llama(seed=5), monkeypatch) as server:
        trainer = on_server(tmp_path, server, vllm_server_timeout=0.2)
        server.during = after(3, "/v1/completions", server.stop)
        with pytest.raises(ServerLost, match=r"the same command resumes from .*checkpoint-8\."):
            trainer.train()
        server.during = lambda path: None
        server.start()
        trainer = on_server(tmp_path, server)
        assert drawn_from(trainer, resume=checkpoint_to_resume(trainer.args)) == [0]


def on_server(tmp_path, server, **config):
    config = {"vllm_server_timeout": TIMEOUT, "num_generations": 2, "max_steps": 12, "learning_rate": 1e-2} | config
    server_mode = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
    return make_trainer(tmp_path, rollouts_ahead=1, **server_mode, **config)


def drawn_from(trainer, resume=None, model=None, tolerance=1e-5):
    """Train, and return for each rollout the number of the rollout before which the weights that drew it were seen."""
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


# ---- A process of its own ----


class NeverStarts(RolloutProcess):
    def _start(self):
        raise OSError("no memory")


class AnswersAtOnce(RolloutProcess):
    def _start(self):
        pass

    def _receive(self):
        while not self._pending:
            time.sleep(0.01)
        return 0, None


@pytest.mark.parametrize(
    ("kind", "said"),
    [(NeverStarts, r"ended \(OSError\('no memory'\)\)"), (AnswersAtOnce, "The thread that watches .* SystemExit")],
)
def test_whoever_waits_is_told_why_nothing_will_come(kind, said):
    process = kind(SimpleNamespace(slots=1, slot_bytes=64, device="cpu"))
    future = process.submit(Job(0, 0, [[1]], 0), lambda answers: sys.exit())
    with pytest.raises(RuntimeError, match=said):
        future.result(TIMEOUT)
    process.close()


def processes_of(pid):
    """Ids of the processes that `pid` has started, and that live."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def workers(parent):
    return [pid for pid in processes_of(parent) if "rollout_worker" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.slow
@pytest.mark.extra  # `test_on_two_processes` kills one, too
def test_a_process_that_is_killed_is_started_again_and_changes_nothing(uninterrupted, tmp_path, caplog):
    killed = []

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                killed.extend(workers(os.getpid()))
                os.kill(killed[0], signal.SIGKILL)

    trainer = ahead_trainer(tmp_path, 1)
    trainer.add_callback(Kill())
    with caplog.at_level("WARNING", logger=rollout_process.logger.name):
        rollout_process.logger.propagate = True
        trainer.train()
    torch.testing.assert_close(end_state(trainer), uninterrupted[1][0], rtol=0, atol=0, equal_nan=True)
    assert len(killed) == 1 and not workers(os.getpid())
    assert "The rollout process on cpu ended (killed by SIGKILL: by a person, or by the system" in caplog.text


@pytest.mark.parametrize("is_quiet", [True, False])
def test_the_second_process_leaves_out_what_the_script_leaves_out(is_quiet, monkeypatch):
    """Else it says what libraries say as they are imported, in the midst of the trainer's table."""
    programs = []
    monkeypatch.setattr(rollout_process, "is_quiet", lambda: is_quiet)
    monkeypatch.setattr(rollout_process.subprocess, "Popen", lambda command, **_: programs.append(command[-1]))
    process = RolloutProcess.__new__(RolloutProcess)
    process.setup, process._memory_file, process._asked = None, 0, {}
    with pytest.raises(OSError):  # nobody is there to be told anything
        process._start()
    before_torch = programs[0].partition("import serve")[0]
    assert ("quiet()" in before_torch) is is_quiet


@pytest.mark.slow
def test_what_fails_again_and_again_ends_the_run_with_its_message(monkeypatch, tmp_path):
    trainer = make_trainer(tmp_path, rollouts_ahead=1)
    monkeypatch.setattr(rollout_process, "_RESTARTS", 0)
    with torch.no_grad():
        trainer.model.policy.lm_head.weight.fill_(float("nan"))
    said = r"process 0: The rollout process .* ended \(RuntimeError: The policy's logits.* same command resumes from"
    with pytest.raises(RolloutProcessLost, match=said):
        trainer.train()
    assert not workers(os.getpid())


LONG = """
import sys
from tests.ppo.worker import make_trainer
from tests.tiny import tiny_llama
model = tiny_llama(max_position_embeddings=100_000)
trainer = make_trainer(sys.argv[1], model=model, rollouts_ahead=1, max_completion_length=90_000)
trainer.eos_token_ids = trainer.generation_config.eos_token_id = []
trainer.train()
"""


@pytest.mark.slow
def test_no_orphan_stays_in_mid_generation(tmp_path):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.Popen([sys.executable, "-c", LONG, str(tmp_path)], cwd=root, env=environment)
    until = time.monotonic() + 4 * TIMEOUT
    while not (found := workers(run.pid)) and time.monotonic() < until:
        time.sleep(0.1)
    (pid,) = found

    weights_are_there = "memfd:weights"  # it builds its model, and draws
    while weights_are_there not in Path(f"/proc/{pid}/maps").read_text() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1.0)
    os.kill(pid, signal.SIGINT)  # of Ctrl-C the trainer decides
    time.sleep(0.5)
    assert lives(pid)
    run.kill()
    run.wait()
    until = time.monotonic() + 20
    while lives(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not lives(pid)


@pytest.mark.slow
@pytest.mark.distributed
def test_on_two_processes(tmp_path):
    """Each has a second process of its own, one of which is killed; and what fails on one ends both, or neither."""
    first, second = on_two_processes("tests.ppo.ahead_worker", tmp_path)
    torch.testing.assert_close(first["here"]["weights"], second["here"]["weights"], rtol=0, atol=0)
    for process in (first, second):
        torch.testing.assert_close(process["second process"], process["here"], rtol=0, atol=0, equal_nan=True)
        error, message, seconds = process["fails"]
        assert error == "RuntimeError" and message == "At step 4, process 1: out of memory" and seconds < TIMEOUT
        error, message, seconds = process["unsaved"]
        assert error is None and seconds < TIMEOUT, message
    complete = {path.parent.name for path in tmp_path.glob(f"unsaved/checkpoint-*/{MARKER}")}
    assert complete == {"checkpoint-4", "checkpoint-6", "checkpoint-8"}
    assert any(not torch.equal(a, b) for a, b in zip(first["here"]["ids"], second["here"]["ids"], strict=True))


# ---- What cannot be ----


def test_what_cannot_be_is_refused(subtests, tmp_path):
    vllm = {"use_vllm": True, "rollouts_ahead": 1}
    for config, message in [
        ({"rollouts_ahead": -1}, "`rollouts_ahead` must be >= 0, got -1"),
        (
            {"rollout_device": "cpu"},
            "`rollout_device=cpu` is for the second process .* `rollouts_ahead=0` starts none",
        ),
        (vllm | {"vllm_mode": "colocate"}, "`rollouts_ahead=1` needs vLLM in a process of its own"),
        (
            vllm | {"vllm_mode": "server", "rollouts_ahead": 2},
            "`rollouts_ahead=2` is too many for vLLM: .* at most one rollout ahead",
        ),
        (vllm | {"vllm_mode": "server", "rollout_device": "cpu"}, "`rollout_device=cpu` .* vLLM generates"),
        (
            {"rollouts_ahead": 1, "rollout_device": "cuda:7"},
            r"names 'cuda:7', which this machine does not have \(\d accelerators\)",
        ),
        ({"rollouts_ahead": 1, "rollout_device": "gpu"}, "names 'gpu', which this machine does not have"),
        (
            {"rollouts_ahead": 1, "rollout_device": 1},
            "`rollout_device=1` is not the name of a device. Give a text such as",
        ),
        ({"rollouts_ahead": 1, "rollout_device": "cpu,cpu"}, r"names 2 devices for 1 process\(es\)"),
    ]:
        with subtests.test(config=config), pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, **config)

    class Local(type(tiny_llama())):
        pass

    model = tiny_llama()
    model.__class__ = Local
    with pytest.raises(
        ValueError, match="builds a .*<locals>.Local in a second process, and that process cannot import it"
    ):
        make_trainer(tmp_path, model=model, rollouts_ahead=1)
    policy = SimpleNamespace(config=SimpleNamespace(quantization_config={}))
    args = SimpleNamespace(use_vllm=False, rollouts_ahead=1, rollout_device=None)
    with pytest.raises(ValueError, match="`rollouts_ahead=1` does not work with a quantised base"):
        ahead.check_ahead(args, policy, torch.device("cpu"))
    with pytest.raises(
        ValueError,
        match=re.escape("training is on cuda:0. Name a device for that process, such as `rollout_device: cuda:1`"),
    ):
        ahead.check_ahead(args, tiny_llama(), torch.device("cuda:0"))
