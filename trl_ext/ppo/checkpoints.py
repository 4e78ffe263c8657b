"""Start and resume a run of PPO, and write its checkpoints: policy, critic, and what PPO adapts."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import TrainOutput

from ..callbacks.hack_watch import attach_watches
from ..callbacks.recording import record_run
from ..models.actor_critic import weights_of
from ..models.adapters import saving_policy_adapter_only, without_base
from ..runs.checkpoints import ResumableRun
from ..runs.control import saving_forbidden
from ..runs.output_dir import Hold
from ..runs.saving import how_to_resume
from ..upstream.statements import temporarily
from .collection import RolloutTrainer
from .vllm import RolloutsAhead, ServerLost

_WITH_STATE = (
    "kl_controller",
    "learning_rate_controller",
    "reward_normalizer",
    "baseline_gate",
    "metrics",
)  # attributes that checkpoints keep


class PPOCheckpoints(ResumableRun, RolloutTrainer):
    """Extend [`RolloutTrainer`]: start or resume a run of PPO, and write its checkpoints; a base of `PPOTrainer`."""

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        if self.args.record_run:  # not before: callbacks may have been added since, such as a JSONLCallback
            record_run(self, samples=True)
        attach_watches(self, self.args.watch)
        if self.args.save_strategy == "steps" and self.args.save_steps % self.args.steps_per_rollout:
            self.accelerator.print(
                f"`save_steps` {self.args.save_steps:g}: checkpoints are written only at the end of a rollout, every "
                f"{self.args.steps_per_rollout} optimizer steps."
            )
        self.accelerator.print(
            f"PPO: {self._steps():,} optimizer steps, {self.args.steps_per_rollout} on each rollout of "
            f"{self.args.batch_size:,} episodes; critic: {self._critic_origin}; learning rate: "
            f"{self.args.learning_rate:g}{', adapted to `step_kl_target`' * bool(self.args.step_kl_target)}"
        )
        self._actor_critic.train_adapters()  # what is frozen now, the optimizer would leave out
        self._step, self._buffered_inputs = 0, None  # unless a checkpoint is loaded
        self._seen_step = 0  # `_step` when the Trainer last asked whether to log, save or evaluate
        self.metrics.episodes_at_start = self.metrics.episodes
        self._last_loaded_step = -1  # so vLLM is sent the weights, also if a checkpoint has the same step
        if self.args.rollouts_ahead:
            self._ahead = RolloutsAhead(
                self.vllm_generation, self.args, self._errors, self.metrics, self._prompts_of, self._sync_weights
            )
        self._errors.were_raised = False
        try:
            with Hold(self.args.output_dir):  # until the last step is saved, too
                try:
                    output = super().train(resume_from_checkpoint, **kwargs)
                except Exception as error:
                    is_server = isinstance(error, ServerLost)
                    if not (is_server or self._errors.were_raised):
                        raise  # perhaps on this process alone
                    fix = "Start the server" if is_server else "Fix the cause"
                    left = how_to_resume(fix, self.state.global_step, self._save_last_step())
                    raise type(error)(f"{error} {left}") from error.__cause__
        finally:
            self._ahead = None
        return output._replace(training_loss=output.metrics.get("train_loss", output.training_loss))

    @property
    def _given_model(self) -> Any:
        return self._actor_critic.policy

    _has_state_of_each_process = True  # each has random states and metrics of its own

    def _run_facts(self) -> dict[str, Any]:
        return {
            **super()._run_facts(),
            "rewards": self.reward_func_names,
            "reference": self._reference_identity,
            "critic": self.args.baseline != "mean",
        }

    @property
    def _must_wait(self) -> bool:
        """Return whether a rollout is half trained, and the run continues: a checkpoint cannot hold such a rollout."""
        is_half = self._step % self._micro_steps_per_rollout != 0
        is_last = self.state.global_step >= self.state.max_steps
        return is_half and not is_last and not saving_forbidden(self.state)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save the policy to `output_dir` (None: the run's folder), and the critic to `critic/` in it."""
        # Under DeepSpeed and FSDP `state_dict` has the whole weights of both, else they are read from the models
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        actor_critic = self._actor_critic
        with self._as_policy(), saving_policy_adapter_only(actor_critic.policy):
            super()._save(output_dir, state_dict=weights_of("policy", state_dict))
        if self.args.should_save and actor_critic.critic is not None:
            actor_critic.save_critic(os.path.join(output_dir, "critic"), state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # DeepSpeed leaves frozen weights out of a checkpoint only if the Trainer sees a PeftModel
        hidden = self._as_policy() if self.is_deepspeed_enabled and self._is_peft else nullcontext()
        with self._without_base(), hidden:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self._load_models(load, resume_from_checkpoint, self.is_fsdp_enabled)

    def _load_best_model(self) -> None:
        self._last_loaded_step = -1  # else vLLM would be evaluated with the last weights
        best = self.state.best_model_checkpoint
        self._load_models(super()._load_best_model, best, self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _load_models(self, load: Callable[[], None], checkpoint: str, loads_all: bool) -> None:
        """Load policy and critic. The Trainer's `load` `loads_all` of them, or else only a policy without adapters."""
        if loads_all:
            with self._without_base():
                return load()
        if not self._is_peft:
            with self._as_policy():
                load()
        self._actor_critic.load_adapters(checkpoint)
        if self._actor_critic.has_own_critic:
            super()._load_from_checkpoint(os.path.join(checkpoint, "critic"), self._actor_critic.critic)

    def _as_policy(self) -> AbstractContextManager:
        """Return a context in which the Trainer's model is the policy only."""
        return temporarily(self, model=self._actor_critic.policy)

    def _without_base(self) -> AbstractContextManager:
        """Return a context in which FSDP neither saves nor loads the frozen base of adapters."""
        return without_base(self.is_fsdp_enabled and self._is_peft)

    # Not in `_save_own_state`: what it saves is loaded before the Trainer sets the sums of the loss to 0

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        state = {
            "learning_rate": self.args.learning_rate,
            "rewards": self._rewards_and_weights,
            **{name: getattr(self, name).state_dict() for name in _WITH_STATE},
            "trl_metrics": dict(self._metrics["train"]),  # what TRL's own code has noted since the last log
            # The Trainer would start its loss sums anew, and the first log after resuming would cover fewer steps
            "tr_loss": self._tr_loss.cpu(),
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
            "environments": self._environment_states(),
        }
        torch.save(state, self._state_file(output_dir))
        if state["environments"]:  # what users' classes return: whatever cannot be loaded is refused now
            torch.load(self._state_file(output_dir), map_location="cpu", weights_only=True)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        state = torch.load(self._state_file(checkpoint), map_location="cpu", weights_only=True)
        # Checkpoints fall on a rollout's end, but for the last one of a run whose steps are no multiple. Resumed with
        # more steps, such a run samples that rollout again
        self._step = self.state.global_step // self.args.steps_per_rollout * self._micro_steps_per_rollout
        for name in _WITH_STATE:
            getattr(self, name).load_state_dict(state[name])
        if state["rewards"] != self._rewards_and_weights:
            self.reward_normalizer.reference_mean = None
        if state["learning_rate"] and self.args.learning_rate:
            self.learning_rate_controller.rescale(state["learning_rate"] / self.args.learning_rate)
        self._metrics["train"].update(state["trl_metrics"])
        self._tr_loss = state["tr_loss"].to(self.args.device)
        self._total_loss_scalar = state["total_loss"]
        self._globalstep_last_logged = state["last_logged"]
        self._load_environments(state["environments"])

    @property
    def _rewards_and_weights(self) -> list:
        return [self.reward_func_names, self.reward_weights.tolist()]

    def _state_file(self, checkpoint: str) -> str:
        return os.path.join(checkpoint, f"ppo_state_{self.args.process_index}.pt")
