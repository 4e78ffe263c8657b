"""Saving policy and critic, and resuming bit for bit."""

import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import fsdp_utils
from torch import nn
from transformers import TrainerState
from transformers.trainer_utils import TrainOutput

from ..checkpoints import MARKER, differences, fingerprint, newest_complete, read_marker, write_marker
from ..models.adapter_switch import CRITIC, POLICY, base_model_of, size_of
from ..models.adapters import adapter_facts, load_adapter, save_classifier
from ..temporarily import temporarily
from ..upstream import rotate_checkpoints
from .base import PPOTrainerBase


class ResumeMixin(PPOTrainerBase):
    """`train()`, checkpoints and `save_model` of [`PPOTrainer`]."""

    # ---- Saving and resuming ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs) -> TrainOutput:
        """
        Train, or go on where an earlier call was interrupted.

        Args:
            resume_from_checkpoint:
                `None` goes on from the newest complete checkpoint in `output_dir` if the configuration is the same,
                and raises if it is not. `True` does so, and raises if there is none. A path goes on from there,
                whatever the configuration was. `False` starts anew.
        """
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        # The config's field is a string, on the command line and in YAML, too
        words: dict[Any, bool] = {"true": True, "false": False}
        resume_from_checkpoint = words.get(str(resume_from_checkpoint).lower(), resume_from_checkpoint)
        policy = self.accelerator.unwrap_model(self.model).policy
        self._train_adapters()  # what is frozen now, the optimizer would leave out
        self._fingerprint = fingerprint(
            self.args,
            reward_functions=self.reward_func_names,
            train_rows=len(self.train_dataset),
            policy=f"{type(base_model_of(policy)).__name__}, {size_of(policy.parameters()):,} parameters",
            **adapter_facts(policy) if self._is_peft else {},
        )
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        if checkpoint is not None:
            state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
            if state.global_step >= state.max_steps and self._is_same_run(checkpoint):
                self.accelerator.print(f"Training is complete, at step {state.global_step}: loading {checkpoint}.")
                self._load_from_checkpoint(checkpoint)
                self.state = state
                if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
                    self._load_best_model()
                return TrainOutput(state.global_step, float("nan"), {})
            self._check_processes(checkpoint)
            if self.args.sync_ref_model:
                self._load_reference(os.path.join(checkpoint, "reference"))
            self.accelerator.print(f"Resuming from {checkpoint}, step {state.global_step} of {state.max_steps}.")
        else:
            self._step, self._buffered_inputs, self._skip_until = 0, None, 0
            self._episodes_at_start = self._episodes
        output = super().train(resume_from_checkpoint=checkpoint or False, **kwargs)
        return output._replace(training_loss=output.metrics.get("train_loss", output.training_loss))

    def _is_same_run(self, checkpoint: str) -> bool:
        marker = read_marker(checkpoint)
        return marker is not None and marker["configuration"] == self._fingerprint

    def _find_checkpoint(self, resume: str | bool | None) -> str | None:
        if resume is False:
            return None
        if isinstance(resume, str):
            if read_marker(resume) is None:
                raise ValueError(
                    f"{resume} is not a complete checkpoint (it has no {MARKER}): it was interrupted while it was "
                    "written, or is none of PPOTrainer. Pass another one, or `True` for the newest complete one."
                )
            return resume
        checkpoint, skipped = newest_complete(self.args.output_dir)
        for path in skipped:
            self.accelerator.print(
                f"Skipping {path}: it is not complete (interrupted while it was written, or `save_only_model`)."
            )
        if checkpoint is None:
            if resume:
                raise ValueError(f"No complete checkpoint in {self.args.output_dir}, so there is nothing to resume.")
            return None
        different = differences((read_marker(checkpoint) or {}).get("configuration", {}), self._fingerprint)
        if different:
            self._check_processes(checkpoint)  # another number of them changes the batch sizes, too
            raise ValueError(
                f"{checkpoint} belongs to another configuration ({'; '.join(different)}). Choose another "
                "`output_dir`, "
                "pass `resume_from_checkpoint='<path>'` to go on from it all the same, or `False` to start anew."
            )
        return checkpoint

    def _check_processes(self, checkpoint: str) -> None:
        """Each process kept the rows of its own rollout, its random states and its part of the metrics."""
        written, now = (read_marker(checkpoint) or {}).get("processes"), self.accelerator.num_processes
        if written not in (None, now):
            raise ValueError(
                f"{checkpoint} was written by {written} process(es), this run has {now}, so it cannot go on exactly: "
                f"start it on {written}; or begin a new run in another `output_dir`, with the checkpoint as `model` "
                "and its folder `critic` as `value_model`."
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save and os.path.exists(os.path.join(checkpoint, MARKER)):
            os.remove(os.path.join(checkpoint, MARKER))
        # Older checkpoints may only go once this one is complete
        with temporarily(self.args, save_total_limit=None):
            super()._save_checkpoint(model, trial)
        if self.args.sync_ref_model:
            self._save_reference(os.path.join(checkpoint, "reference"))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if not self.args.save_only_model:  # there is nothing to resume from
                write_marker(checkpoint, self._fingerprint, self.accelerator.num_processes)
            rotate_checkpoints(
                output_dir=self._get_output_dir(trial=trial),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _save_reference(self, folder: str) -> None:
        """Keep a reference that `sync_ref_model` moves."""
        state = self.accelerator.get_state_dict(self.ref_model)
        if self.args.should_save:
            self.accelerator.unwrap_model(self.ref_model).save_pretrained(folder, state_dict=state)

    def _load_reference(self, folder: str) -> None:
        if not os.path.isdir(folder):
            raise ValueError(
                f"{folder} is missing, so the reference that `sync_ref_model=True` has moved is not known: the "
                "checkpoint was written without it. Go on with `sync_ref_model=False`, or start anew."
            )
        self._prepare_reference(self.accelerator.unwrap_model(self.model).policy, folder)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Write the policy as a model of its own, and the critic beside it under `critic/`."""
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        actor_critic = self.accelerator.unwrap_model(self.model)
        parts: dict[str, dict | None] = {"policy": None, "critic": None}
        if state_dict is not None:
            for role in parts:
                prefix = f"{role}."
                parts[role] = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        with self._as_model(actor_critic.policy), self._one_adapter(actor_critic.policy):
            super()._save(output_dir, state_dict=parts["policy"])
        if self.args.should_save:
            folder = os.path.join(output_dir, "critic")
            if actor_critic.shares_base:
                head = parts["critic"] or actor_critic.critic.state_dict()
                save_classifier(actor_critic.policy, CRITIC, head, folder, parts["policy"])
            else:
                actor_critic.critic.save_pretrained(folder, state_dict=parts["critic"])

    @contextmanager
    def _one_adapter(self, policy: Any):
        """PEFT saves all adapters; the critic's, the reference and reward models are not part of the policy."""
        if not self._is_peft:
            yield
            return
        policy.save_pretrained = partial(policy.save_pretrained, selected_adapters=[POLICY])
        try:
            yield
        finally:
            del policy.save_pretrained

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # DeepSpeed leaves frozen weights out of a checkpoint only if the Trainer sees a PeftModel
        policy = self.accelerator.unwrap_model(self.model).policy
        with (
            self._without_base(),
            self._as_model(policy) if self.is_deepspeed_enabled and self._is_peft else nullcontext(),
        ):
            super()._save_optimizer_and_scheduler(output_dir)

    def _without_base(self) -> AbstractContextManager:
        """Under FSDP, accelerate leaves frozen weights out of a checkpoint only of what it takes for a PeftModel."""
        if not (self.is_fsdp_enabled and self._is_peft):
            return nullcontext()
        return temporarily(fsdp_utils, is_peft_model=lambda model: True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            with self._without_base():
                return super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self._is_peft:
            with self._as_model(self.model.policy):
                super()._load_from_checkpoint(resume_from_checkpoint)
        self._load_roles(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            with self._without_base():
                return super()._load_best_model()
        if not self._is_peft:
            with self._as_model(self.accelerator.unwrap_model(self.model).policy):
                super()._load_best_model()
        self._load_roles(self.state.best_model_checkpoint)

    def _load_roles(self, checkpoint: str) -> None:
        """Load what is no plain policy: adapters (which the Trainer would load, and freeze), and the critic."""
        actor_critic = self.accelerator.unwrap_model(self.model)
        critic, folder = actor_critic.critic, os.path.join(checkpoint, "critic")
        if self._is_peft:
            load_adapter(actor_critic.policy, POLICY, checkpoint)
        if actor_critic.shares_base:
            critic.score.load_state_dict(load_adapter(actor_critic.policy, CRITIC, folder))
        else:
            saved = type(critic).from_pretrained(folder, dtype=critic.dtype)
            critic.load_state_dict(saved.state_dict())

    @contextmanager
    def _as_model(self, model: nn.Module):
        actor_critic, self.model = self.model, model
        try:
            yield
        finally:
            self.model = actor_critic

    def _state_file(self, checkpoint: str) -> str:
        return os.path.join(checkpoint, f"ppo_state_{self.args.process_index}.pt")

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.kl_controller.consume_scale(self.control)  # the control is saved without it
        in_rollout = self._step % self._steps_per_rollout != 0
        state = {
            "step": self._step,
            "skip_until": self._skip_until,
            "episodes": self._episodes,
            "rollout": {k: v.cpu() for k, v in self._rollout.items()} if in_rollout and self._rollout else None,
            "kl_controller": self.kl_controller.state_dict(),
            "reward_normalizer": self.reward_normalizer.state_dict(),
            "stats": self._stats["train"].state_dict(),
            "metrics": dict(self._metrics["train"]),
            # The Trainer starts its loss sums anew, so that the first log after resuming would cover fewer steps
            "tr_loss": self._tr_loss.cpu(),
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
        }
        torch.save(state, self._state_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        if not os.path.isfile(self._state_file(checkpoint)):
            raise ValueError(
                f"{self._state_file(checkpoint)} is missing: the checkpoint was written with "
                "`save_only_model=True`, or was not copied whole, and cannot be resumed from. Choose another "
                "`output_dir`, or pass `resume_from_checkpoint=False` to start anew."
            )
        state = torch.load(self._state_file(checkpoint), map_location="cpu", weights_only=True)
        self._step, self._skip_until = state["step"], state["skip_until"]
        self._episodes = self._episodes_at_start = state["episodes"]
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.reward_normalizer.load_state_dict(state["reward_normalizer"])
        self._stats["train"].load_state_dict(state["stats"])
        self._metrics["train"].update(state["metrics"])
        self._tr_loss = state["tr_loss"].to(self.args.device)
        self._total_loss_scalar, self._globalstep_last_logged = state["total_loss"], state["last_logged"]
        if state["rollout"] is not None:
            self._rollout = {name: values.to(self.args.device) for name, values in state["rollout"].items()}
            self._buffered_inputs = self._permuted(
                self._step % self._steps_per_rollout // self.args.steps_per_generation
            )
