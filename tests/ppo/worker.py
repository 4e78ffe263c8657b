"""Runs for tests of resuming, of adapters on one base, and of two processes; as a script, one such run."""

import copy
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from tests.launch import spare_time
from tests.tiny import (
    BUILDERS,
    CHECKPOINTING,
    LORA,
    end_state,
    lora_configs,
    optimizer_state,
    prompts,
    randomize,
    scripted,
    skewed,
    tiny_config,
    tiny_lora_ppo,
    tiny_ppo,
    tiny_reward_model,
    weights,
    without_clock,
)
from trl_ext.functional import policy_loss, value_loss
from trl_ext.runs.checkpoints import checkpoint_to_resume


class Stop(Exception):
    pass


class StopAfter(TrainerCallback):
    """Kills the process or raises right after an optimizer step, before logging and saving."""

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


# Two micro-batches a step, two steps a PPO epoch, four a rollout, eight a data epoch: 14 steps end within epoch 1.
# The learning rate is far too high, and a controller adapts it to the KL of the updates.
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
    "step_kl_target": 0.05,
    "dataloader_num_workers": 0,
}


def train_and_die(output_dir, kill_after_step=0, kill_in_save=0, **config):
    """Train with `RESUMED`, but die after a step, or in the n-th `torch.save` with half of the file written."""
    saving = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    trainer = tiny_ppo(output_dir, **saving, **config, **RESUMED)
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
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(trainer.args))
    save(end_state(trainer), Path(output_dir) / "end.pt")


def in_processes_of_their_own(output_dir, *runs):
    """Fork a process for each run, one after the other; return their exit codes. The imports are shared."""
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


# ---- Adapters ----

GRADIENTS = {"entropy_coef": 0.1, "temperature": 0.7, "max_grad_norm": 1e9, "learning_rate": 1e-2}


def gradients(folder, name, checkpointing, processes=1):
    """Each optimizer step of a rollout with two PPO epochs: its micro-batches, weights and gradients before it."""
    config = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2 // processes}
    trainer = scripted(tiny_lora_ppo(folder, name, **config, **GRADIENTS, **CHECKPOINTING[checkpointing]))
    randomize(trainer.model, std=0.3)
    steps, batches, compute_loss = [], [], trainer._compute_loss

    def watched(model, inputs):
        batches.append({key: copy.copy(value) for key, value in inputs.items()})
        return compute_loss(model, inputs)

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            steps.append(
                {
                    "batches": batches.copy(),
                    "weights": {n: p.detach().clone() for n, p in trained.items()},
                    "gradients": {n: p.grad.clone() for n, p in trained.items()},
                }
            )
            batches.clear()

    trainer._compute_loss = watched
    trainer.add_callback(Keep())
    trainer.train()
    return steps


def users_model(name="llama", seed=9):
    """A PeftModel with a trained adapter."""
    return randomize(get_peft_model(BUILDERS[name](), lora_configs(name)[0]), seed)


def separate_models(name):
    """Policy and critic of `tiny_lora_ppo`, but as PEFT models with separate bases."""
    base = BUILDERS[name]()
    classifier = tiny_reward_model(base)
    classifier.base_model.load_state_dict(base.base_model.state_dict())
    actor, critic = lora_configs(name)
    critic.task_type = "SEQ_CLS"
    return get_peft_model(base, actor).eval(), get_peft_model(classifier, critic).eval()


def separate_parameter(policy, critic, name):
    """The parameter with this name in a trainer's model."""
    if name.startswith("critic.score."):
        return critic.get_parameter(name.replace("critic.score.", "base_model.model.score.modules_to_save.default."))
    name = name.removeprefix("policy.")
    return (
        critic.get_parameter(name.replace(".critic.", ".default."))
        if ".critic." in name
        else policy.get_parameter(name)
    )


def loss_of(policy, critic, row, config):
    """PPO's loss of one row, summed over its tokens, without padding."""
    n = int(row["loss_mask"].sum())
    prompt = row["prompt_ids"][row["prompt_mask"].bool()]
    ids = torch.cat([prompt, row["completion_ids"][:n]])[None]
    logprobs = (policy(input_ids=ids).logits[0, -n - 1 : -1] / config.temperature).log_softmax(-1)
    classifier = critic.get_base_model()
    values = classifier.score(classifier.base_model(input_ids=ids).last_hidden_state)[0, -n - 1 : -1, 0]
    old_logprobs, advantages, old_values, returns = (
        row[key][None, :n] for key in ("old_logprobs", "advantages", "old_values", "returns")
    )
    chosen = logprobs.gather(1, ids[0, -n:, None]).T
    actor, _ = policy_loss(chosen, old_logprobs, advantages, config.resolved_cliprange, config.resolved_cliprange)
    value, _ = value_loss(values[None], old_values, returns, config.cliprange_value)
    entropy = -(logprobs.exp() * logprobs).sum()
    return actor.sum() + config.vf_coef * value.sum() - config.entropy_coef * entropy


def assert_gradients_of_separate_models(name, *processes):
    """At each step the gradients on all processes equal those of separate models: max |Δ| ≤ 1e-5 · max |g|."""
    policy, critic = separate_models(name)
    config = tiny_config("unused", **GRADIENTS)
    assert len(processes[0]) == 4
    for step, *others in zip(*processes, strict=True):
        own = {name: separate_parameter(policy, critic, name) for name in step["weights"]}
        trained = [p for model in (policy, critic) for p in model.parameters() if p.requires_grad]
        assert {id(p) for p in trained} == {id(p) for p in own.values()}
        for parameter_name, parameter in own.items():
            parameter.data.copy_(step["weights"][parameter_name])
            parameter.grad = None
        for batch in (batch for process in (step, *others) for batch in process["batches"]):
            tokens = batch.pop("step_tokens")
            for i in range(len(batch["loss_mask"])):
                (loss_of(policy, critic, {k: v[i] for k, v in batch.items()}, config) / tokens).backward()
        for part in (".default.", ".critic.", "score"):
            names = [n for n in own if part in n]
            largest = max(own[n].grad.abs().max().item() for n in names)
            assert largest > 1e-3
            for n in names:
                for process in (step, *others):
                    torch.testing.assert_close(process["gradients"][n], own[n].grad, rtol=0, atol=1e-5 * largest)


# ---- On one process or two ----


def topic_reward(completions, topic, **kwargs):
    return [None if name == "topic 1" else len(set(text)) / 7 for name, text in zip(topic, completions, strict=True)]


def wrapper(trainer):
    return type(trainer.model_wrapped).__name__


def raised_by(trainer, resume=None):
    """Class and message of the error that ended training, and the seconds until then."""
    start = time.monotonic()
    try:
        trainer.train(resume)
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


LORA_PARITY = {"peft_config": LoraConfig(**LORA), "activation_checkpointing": True}


class InBackground:
    """Another reward, in the background."""

    in_background = True

    def __init__(self, reward):
        self.reward = reward
        self.__name__ = reward.__name__

    def __call__(self, **kwargs):
        return self.reward(**kwargs)


def parity(folder, processes, reward=topic_reward, answering=scripted, parts=1, **config):
    """Two rollouts of the same 8 completions on any number of processes; one minibatch, two PPO epochs."""
    config = {
        "per_device_train_batch_size": 4 // processes // parts,
        "gradient_accumulation_steps": 2 * parts,
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
    trainer = answering(tiny_ppo(folder, None, reward, **config))
    trainer.train()
    return end_state(trainer) | {"processes": trainer.accelerator.num_processes, "wrapper": wrapper(trainer)}


def evaluation(folder, batch_size, **config):
    """Evaluate five prompts: two processes get unequal numbers."""
    rewarded = []

    def reward(prompts, completions, **kwargs):
        rewarded.extend(prompts)
        return [len(set(prompt + completion)) / 7 for prompt, completion in zip(prompts, completions, strict=True)]

    trainer = tiny_ppo(
        folder, None, reward, per_device_eval_batch_size=batch_size, eval_dataset=prompts(5, seed=9), **config
    )
    logs = without_clock(scripted(trainer).evaluate())
    return {name: value for name, value in logs.items() if not name.endswith(("runtime", "per_second"))}


def reward_mistake(folder, kind, model=None):
    rank = PartialState().process_index

    def reward(completions, **kwargs):
        if rank == 1 and kind.startswith("raises"):
            raise KeyError("no such row")
        return [float("nan") if rank == 1 else 1.0] * len(completions)

    return raised_by(tiny_ppo(folder, model, InBackground(reward) if "background" in kind else reward))


def with_nan(trainer):
    """Make the advantages of the second step NaN on process 1."""
    compute_loss = trainer._compute_loss

    def broken(model, inputs):
        if trainer.accelerator.process_index == 1 and trainer.state.global_step == 1:
            inputs = {**inputs, "advantages": inputs["advantages"] * float("nan")}
        return compute_loss(model, inputs)

    trainer._compute_loss = broken
    return trainer


CORRECTED = {  # some importance weights are beyond the bounds
    "importance_sampling_mode": "token_mask",
    "importance_sampling_clip_min": 0.7,
    "importance_sampling_clip_max": 1.5,
}


def not_finite(folder):
    trainer = with_nan(tiny_ppo(folder))
    seen = watched(trainer)
    return raised_by(trainer), seen[-1]["weights"]


def resumed(folder):
    """The end states of an uninterrupted run, and of runs resumed at the end of a rollout and of a data epoch."""
    config = RESUMED | {"per_device_train_batch_size": 1, "max_steps": 12}
    saving = {"save_strategy": "steps", "save_steps": 1, "save_in_background": True}
    trainer = tiny_ppo(folder / "saved", **saving, **config)
    trainer.train()
    ends = [end_state(trainer)]
    for step in (4, 8):
        trainer = tiny_ppo(folder / f"from {step}", **config)
        torch.manual_seed(1234)
        trainer.train(str(folder / "saved" / f"checkpoint-{step}"))
        ends.append(end_state(trainer))
    return ends


def unsaved(folder, what_follows):
    """Process 1's disk is full at its part of the second checkpoint."""
    trainer = tiny_ppo(
        folder,
        **BY_ONE | {"max_steps": 4, "on_save_failure": what_follows, "num_mini_batches": 1, "num_ppo_epochs": 1},
    )

    class Fill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if args.process_index == 1 and state.global_step == 2:
                path = folder / "checkpoint-2" / "ppo_state_1.pt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to("/dev/full")

    trainer.add_callback(Fill())
    return raised_by(trainer), trainer.state.global_step


def warmup(folder):
    config = {"weight_decay": 0.5, "num_ppo_epochs": 1, "activation_checkpointing": True, "kl_horizon": 100}
    trainer = tiny_ppo(folder, critic_warmup_rollouts=1, kl_controller="adaptive", max_steps=8, **config)
    seen = watched(trainer)
    trainer.train()
    return seen


def by_another(folder):
    """The error for a checkpoint of one process."""
    return raised_by(tiny_ppo(folder / "by one", **BY_ONE), resume=True)


BY_ONE = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


def on_two_processes(output_dir):
    """Run every check in one launch: imports take longer than all of them."""
    folder = Path(output_dir)
    results = {
        "parity": parity(folder / "parity", 2),
        "generations": parity(folder / "generations", 2, num_generations=2),
        "background": parity(folder / "background", 2, InBackground(topic_reward)),
        "evaluation": [evaluation(folder / "evaluation", size) for size in (1, 2, 4)],
        "evaluation, 2 generations": evaluation(folder / "evaluation", 2, num_generations_eval=2),
        "reward raises": reward_mistake(folder / "raises", "raises"),
        "background raises": reward_mistake(folder / "raises", "raises in the background"),
        "reward is NaN": reward_mistake(folder / "nan", "nan"),
        "corrected": parity(folder / "corrected", 2, answering=skewed, **CORRECTED),
        "sampler is silent": raised_by(skewed(tiny_ppo(folder / "silent", **CORRECTED), missing_on=1)),
        "not finite": not_finite(folder / "not finite"),
        "unsaved, stop": unsaved(folder / "stop", "stop"),
        "unsaved, continue": unsaved(folder / "continue", "continue"),
        "warm-up": warmup(folder / "warm-up"),
        "resumed": resumed(folder),
        "by another": by_another(folder),
        "lora": parity(folder / "lora", 2, **LORA_PARITY),
        "turns": parity(folder / "turns", 2, gae_level="turn"),
        "mean": parity(folder / "mean", 2, baseline="mean", num_generations=2),
        "gradients": {
            (name, kind): gradients(folder / f"{name} {kind}", name, kind, 2)
            for name in BUILDERS
            for kind in CHECKPOINTING
        },
    }
    torch.save(results, folder / f"process {PartialState().process_index}.pt")


if __name__ == "__main__":
    spare_time()
    match sys.argv[1:]:
        case ["killed", output_dir]:
            behind = {"kill_in_save": 5, "save_in_background": True}
            in_processes_of_their_own(output_dir, {"kill_after_step": 6}, {"kill_in_save": 5}, behind, {})
        case ["distributed", output_dir]:
            on_two_processes(output_dir)
