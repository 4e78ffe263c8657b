"""The runs that tests of resuming and of two processes start, and what they compare; as a script, one such run."""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import TrainerCallback

import trl_ext.ppo.trainer as ppo_trainer
from tests.tiny import prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer

_CLOCK = ("time/", "eps", "tokens_per_second", "step_time", "train_runtime", "train_samples_per", "train_steps_per")


def letters_reward(completions, **kwargs):
    return [len(set(text)) / 7 - 1 for text in completions]


def make_trainer(output_dir, reward=letters_reward, model=None, rows=16, trainer_kwargs=None, **config):
    model = tiny_llama() if model is None else model
    kwargs = {"train_dataset": prompts(rows), "processing_class": tiny_tokenizer()} | (trainer_kwargs or {})
    return PPOTrainer(model=model, reward_funcs=reward, args=tiny_config(output_dir, **config), **kwargs)


def scripted(trainer):
    """Answer each prompt by a fixed pseudo-random text of 1 to 8 tokens, whatever the process or the batch."""
    vocabulary, longest = len(trainer._tokenizer), trainer.max_completion_length

    def reply(ids):
        seed = int.from_bytes(hashlib.sha256(bytes(ids)).digest()[:4], "big")
        draws = torch.randint(6, vocabulary, (longest,), generator=torch.Generator().manual_seed(seed)).tolist()
        length = 1 + seed % longest
        return draws[: length - 1] + [trainer._tokenizer.eos_token_id] if length < longest else draws

    trainer._generate_single_turn = lambda prompt_ids, *_: [reply(ids) for ids in prompt_ids]
    return trainer


def weights(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def optimizer_state(trainer):
    return {
        f"{i}.{name}": torch.as_tensor(value).clone()
        for i, state in trainer.optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def without_clock(logs):
    return {name: value for name, value in logs.items() if not name.startswith(_CLOCK)}


def end_state(trainer):
    """All that an interrupted run must end with; the clock's readings are left out."""
    return {
        "weights": weights(trainer),
        "optimizer": optimizer_state(trainer),
        "kl_controller": trainer.kl_controller.state_dict(),
        "reward_normalizer": trainer.reward_normalizer.state_dict(),
        "episodes": trainer._episodes,
        "logs": [without_clock(logs) for logs in trainer.state.log_history],
    }


class Stop(Exception):
    pass


class StopAfter(TrainerCallback):
    """Ends the process or raises right after an optimizer step, before anything is logged or saved."""

    def __init__(self, step, kill=False):
        self.step, self.kill = step, kill

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Stop


class EachStep(TrainerCallback):
    """Keeps what `look()` returns before training and after each optimizer step."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen.append(self.look())

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(self.look())


# Two micro-batches a step, two steps a PPO epoch, four a rollout, eight a data epoch: 14 end in mid epoch 1.
# The learning rate makes one minibatch of some rollouts exceed `max_approx_kl`.
RESUMED = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "max_steps": 14,
    "logging_steps": 3,
    "learning_rate": 4e-3,
    "kl_controller": "adaptive",
    "kl_horizon": 100,
    "kl_target": 0.5,
    "reward_normalization": "running",
    "max_approx_kl": 0.02,
    "dataloader_num_workers": 0,
}


def train_and_die(output_dir, kill_after_step=0, kill_in_save=0):
    """Train as `RESUMED`, but die after a step, or within the n-th `torch.save`, half of the file written."""
    trainer = make_trainer(output_dir, save_strategy="steps", save_steps=4, save_total_limit=1, **RESUMED)
    if kill_after_step:
        trainer.add_callback(StopAfter(kill_after_step, kill=True))
    saves, save = [], torch.save

    def dying_save(contents, path, *args, **kwargs):
        saves.append(path)
        save(contents, path, *args, **kwargs)
        if len(saves) == kill_in_save:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = dying_save
    trainer.train()
    save(end_state(trainer), Path(output_dir) / "end.pt")


def in_processes_of_their_own(output_dir, *runs):
    """Fork a fresh process for each run, one after the other; return how each ended. The imports are shared."""
    ends = []
    for kwargs in runs:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            train_and_die(output_dir, **kwargs)
            sys.stdout.flush()
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        contents = sorted(path.name for path in Path(output_dir).glob("checkpoint-*"))
        print(f"ended with {ends[-1]}, leaving {contents}", flush=True)
    return ends


# ---- On one process or two ----


def topic_reward(completions, topic, **kwargs):
    return [None if name == "topic 1" else len(set(text)) / 7 for name, text in zip(topic, completions, strict=True)]


def wrapper(trainer):
    return type(trainer.model_wrapped).__name__


def raised_by(trainer):
    """What ended training, and after how many seconds."""
    start = time.monotonic()
    try:
        trainer.train()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None, "", time.monotonic() - start


def watched(trainer):
    watch = EachStep(
        lambda: {
            "weights": weights(trainer),
            "optimizer": optimizer_state(trainer),
            "lr": trainer.lr_scheduler.get_last_lr()[0],
            "kl_coef": trainer.kl_controller.kl_coef,
        }
    )
    trainer.add_callback(watch)
    return watch.seen


def parity(folder, processes, **config):
    """Two rollouts of 8 with one minibatch, passed over twice, of the same 8 answers on any number of processes."""
    config = {
        "per_device_train_batch_size": 4 // processes,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 1,
        "max_steps": 4,
        "kl_controller": "adaptive",
        "kl_horizon": 100,
        "kl_target": 0.5,
        "reward_normalization": "running",
        "whiten_rewards": True,
        "entropy_coef": 0.02,
        "weight_decay": 0.1,
    } | config
    trainer = scripted(make_trainer(folder, topic_reward, **config))
    trainer.train()
    return end_state(trainer) | {"processes": trainer.accelerator.num_processes, "wrapper": wrapper(trainer)}


def evaluation(folder, batch_size, **config):
    """Five prompts, which no number of processes divides."""
    rewarded = []

    def reward(prompts, completions, **kwargs):
        rewarded.extend(prompts)
        return [len(set(prompt + completion)) / 7 for prompt, completion in zip(prompts, completions, strict=True)]

    trainer = make_trainer(
        folder,
        reward,
        per_device_eval_batch_size=batch_size,
        trainer_kwargs={"eval_dataset": prompts(5, seed=9)},
        **config,
    )
    logs = without_clock(scripted(trainer).evaluate())
    return {name: value for name, value in logs.items() if not name.endswith(("runtime", "per_second"))}


def reward_mistake(folder, kind):
    rank = PartialState().process_index

    def reward(completions, **kwargs):
        if rank == 1 and kind == "raises":
            raise KeyError("no such row")
        return [float("nan") if rank == 1 else 1.0] * len(completions)

    return raised_by(make_trainer(folder, reward))


def not_finite(folder):
    """On process 1 the advantages of the second step are NaN."""
    trainer = make_trainer(folder)
    seen, compute_loss = watched(trainer), trainer._compute_loss

    def broken(model, inputs):
        if trainer.accelerator.process_index == 1 and trainer.state.global_step == 1:
            inputs = {**inputs, "advantages": inputs["advantages"] * float("nan")}
        return compute_loss(model, inputs)

    trainer._compute_loss = broken
    return raised_by(trainer), seen[-1]["weights"]


def resumed(folder):
    """Each run's end: without interruption, and from checkpoints in data epoch 1 and at its start."""
    config = RESUMED | {"per_device_train_batch_size": 1, "max_steps": 12}
    trainer = make_trainer(folder / "saved", save_strategy="steps", save_steps=1, **config)
    trainer.train()
    ends = [end_state(trainer)]
    for step in (8, 9):
        trainer = make_trainer(folder / f"from {step}", **config)
        torch.manual_seed(1234)
        trainer.train(str(folder / "saved" / f"checkpoint-{step}"))
        ends.append(end_state(trainer))
    return ends


def warmup(folder):
    config = {"weight_decay": 0.5, "num_ppo_epochs": 1, "activation_checkpointing": True, "kl_horizon": 100}
    trainer = make_trainer(folder, critic_warmup_rollouts=1, kl_controller="adaptive", max_steps=6, **config)
    seen = watched(trainer)
    trainer.train()
    return seen


def too_far(folder):
    """The second micro-batch of step 2 exceeds `max_approx_kl`, on process 1 alone."""
    calls, approx_kl = [], ppo_trainer.approx_kl

    def exceeding(logprobs, old_logprobs):
        calls.append(None)
        exceeds = trainer.accelerator.process_index == 1 and len(calls) == 4
        return approx_kl(logprobs, old_logprobs) + 1000.0 * exceeds

    trainer = make_trainer(folder, **RESUMED | {"max_approx_kl": 50.0, "max_steps": 6, "logging_steps": 1})
    seen = watched(trainer)
    ppo_trainer.approx_kl = exceeding
    try:
        trainer.train()
    finally:
        ppo_trainer.approx_kl = approx_kl
    return seen, [entry.get("policy/skipped_steps", 0) for entry in trainer.state.log_history[:-1]], len(calls)


def on_two_processes(output_dir):
    """Every check in one launch: importing takes longer than all of them."""
    folder = Path(output_dir)
    results = {
        "parity": parity(folder / "parity", 2),
        "generations": parity(folder / "generations", 2, num_generations=2),
        "evaluation": [evaluation(folder / "evaluation", size) for size in (1, 2, 4)],
        "evaluation, 2 generations": evaluation(folder / "evaluation", 2, num_generations_eval=2),
        "reward raises": reward_mistake(folder / "raises", "raises"),
        "reward is NaN": reward_mistake(folder / "nan", "nan"),
        "not finite": not_finite(folder / "not finite"),
        "warm-up": warmup(folder / "warm-up"),
        "too far": too_far(folder / "too far"),
        "resumed": resumed(folder),
    }
    torch.save(results, folder / f"process {PartialState().process_index}.pt")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["killed", output_dir]:
            in_processes_of_their_own(output_dir, {"kill_after_step": 6}, {"kill_in_save": 5}, {})
        case ["distributed", output_dir]:
            on_two_processes(output_dir)
