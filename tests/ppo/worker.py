"""Runs for tests of resuming and of two processes, and the state that they compare; as a script, one such run."""

import copy
import hashlib
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainerCallback

from tests.launch import spare_time
from tests.tiny import prompts, tiny_config, tiny_gpt2, tiny_llama, tiny_ppo, tiny_reward_model
from trl_ext.functional import policy_loss, value_loss
from trl_ext.ppo.rollout import joined
from trl_ext.runs.checkpoints import checkpoint_to_resume

_CLOCK = ("time/", "eps", "tokens_per_second", "step_time", "train_runtime", "train_samples_per", "train_steps_per")


def letters_reward(completions, **kwargs):
    return [len(set(text)) / 7 - 1 for text in completions]


def make_trainer(output_dir, reward=letters_reward, model=None, rows=16, trainer_kwargs=None, **config):
    return tiny_ppo(output_dir, model, reward, **{"train_dataset": prompts(rows)} | (trainer_kwargs or {}), **config)


def scripted(trainer):
    """Complete each prompt by a fixed pseudo-random text of 1 to 8 tokens, in any process and batch."""
    vocabulary, longest = len(trainer.processing_class), trainer.max_completion_length

    def reply(ids):
        seed = int.from_bytes(hashlib.sha256(bytes(ids)).digest()[:4], "big")
        draws = torch.randint(6, vocabulary, (longest,), generator=torch.Generator().manual_seed(seed)).tolist()
        length = 1 + seed % longest
        return draws[: length - 1] + [trainer.processing_class.eos_token_id] if length < longest else draws

    trainer._generate_single_turn = lambda prompt_ids, *_: ([reply(ids) for ids in prompt_ids], None)
    return trainer


def skewed(trainer, spread=0.5, missing_on=None):
    """Script the completions, with another engine's log-probs: a uniform distribution plus a noise of each token."""
    scripted(trainer)
    reply = trainer._generate_single_turn

    def logprobs_of(ids):
        noise = torch.tensor([math.sin(97.0 * token + i) for i, token in enumerate(ids)])
        return spread * noise - math.log(len(trainer.processing_class))

    def generate(prompt_ids, *args):
        answers, _ = reply(prompt_ids)
        is_missing = trainer.accelerator.process_index == missing_on
        return answers, None if is_missing else [logprobs_of(ids).tolist() for ids in answers]

    trainer._generate_single_turn = generate
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
    """The state in which an interrupted run must end, too, without times."""
    return {
        "weights": weights(trainer),
        "optimizer": optimizer_state(trainer),
        "kl_controller": trainer.kl_controller.state_dict(),
        "learning_rate_controller": trainer.learning_rate_controller.state_dict(),
        "reward_normalizer": trainer.reward_normalizer.state_dict(),
        "baseline_gate": trainer.baseline_gate.state_dict(),
        "episodes": trainer.metrics.episodes,
        "logs": [without_clock(logs) for logs in trainer.state.log_history],
    }


def rows_of(trainer):
    """The rows that are trained on, in the order of generation."""
    return joined(trainer._buffered_inputs)


def collected(trainer):
    """Return a list to which the trainer adds each `Rollout` that it collects for training."""
    seen, observe = [], trainer.metrics.add_rollout

    def watch(rollout, *args):
        seen.append(rollout)
        observe(rollout, *args)

    trainer.metrics.add_rollout = watch
    return seen


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
    trainer = make_trainer(output_dir, **saving, **config, **RESUMED)
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

# Actor and critic differ in rank, scaling and adapted layers; GPT-2's layers are Conv1D
LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]}
CRITIC_LORA = {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]}
GPT2_LORA = {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}
GPT2_CRITIC_LORA = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
BUILDERS = {"llama": tiny_llama, "gpt2": tiny_gpt2}
CHECKPOINTING = {
    "off": {},
    "reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    "non-reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
}


def lora_configs(name="llama"):
    actor, critic = (LORA, CRITIC_LORA) if name == "llama" else (LORA | GPT2_LORA, CRITIC_LORA | GPT2_CRITIC_LORA)
    return LoraConfig(**actor), LoraConfig(**critic)


def lora_trainer(output_dir, name="llama", model=None, trainer_kwargs=None, **kwargs):
    actor, critic = lora_configs(name)
    trainer_kwargs = {"peft_config": actor, "critic_peft_config": critic} | (trainer_kwargs or {})
    model = BUILDERS[name]() if model is None else model
    return make_trainer(output_dir, model=model, trainer_kwargs=trainer_kwargs, **kwargs)


def randomize(model, seed=5, std=0.1):
    """Give trainable parameters random values: LoRA starts with a product of 0, the head with values of 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=std, generator=generator)
    return model


GRADIENTS = {"entropy_coef": 0.1, "temperature": 0.7, "max_grad_norm": 1e9, "learning_rate": 1e-2}


def gradients(folder, name, checkpointing, processes=1):
    """Each optimizer step of a rollout with two PPO epochs: its micro-batches, weights and gradients before it."""
    config = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2 // processes}
    trainer = scripted(lora_trainer(folder, name, **config, **GRADIENTS, **CHECKPOINTING[checkpointing]))
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
    """Policy and critic of `lora_trainer`, but as PEFT models with separate bases."""
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


LORA_PARITY = {"trainer_kwargs": {"peft_config": LoraConfig(**LORA)}, "activation_checkpointing": True}


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
    trainer = answering(make_trainer(folder, reward, **config))
    trainer.train()
    return end_state(trainer) | {"processes": trainer.accelerator.num_processes, "wrapper": wrapper(trainer)}


def evaluation(folder, batch_size, **config):
    """Evaluate five prompts: two processes get unequal numbers."""
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


def reward_mistake(folder, kind, model=None):
    rank = PartialState().process_index

    def reward(completions, **kwargs):
        if rank == 1 and kind.startswith("raises"):
            raise KeyError("no such row")
        return [float("nan") if rank == 1 else 1.0] * len(completions)

    return raised_by(make_trainer(folder, InBackground(reward) if "background" in kind else reward, model))


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
    trainer = with_nan(make_trainer(folder))
    seen = watched(trainer)
    return raised_by(trainer), seen[-1]["weights"]


def resumed(folder):
    """The end states of an uninterrupted run, and of runs resumed at the end of a rollout and of a data epoch."""
    config = RESUMED | {"per_device_train_batch_size": 1, "max_steps": 12}
    saving = {"save_strategy": "steps", "save_steps": 1, "save_in_background": True}
    trainer = make_trainer(folder / "saved", **saving, **config)
    trainer.train()
    ends = [end_state(trainer)]
    for step in (4, 8):
        trainer = make_trainer(folder / f"from {step}", **config)
        torch.manual_seed(1234)
        trainer.train(str(folder / "saved" / f"checkpoint-{step}"))
        ends.append(end_state(trainer))
    return ends


def unsaved(folder, what_follows):
    """Process 1's disk is full at its part of the second checkpoint."""
    trainer = make_trainer(
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
    trainer = make_trainer(folder, critic_warmup_rollouts=1, kl_controller="adaptive", max_steps=8, **config)
    seen = watched(trainer)
    trainer.train()
    return seen


def by_another(folder):
    """The error for a checkpoint of one process."""
    return raised_by(make_trainer(folder / "by one", **BY_ONE), resume=True)


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
        "sampler is silent": raised_by(skewed(make_trainer(folder / "silent", **CORRECTED), missing_on=1)),
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
