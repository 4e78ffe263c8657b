"""Policy and critic as one module, so that one forward, one backward and one `accelerator.prepare` serve both."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessor

from ..functional import position_ids
from ..upstream import disable_dropout_in_model
from .adapter_switch import CRITIC, POLICY, AdapterClassifier, AdapterSwitch, base_model_of, classifier_on, whole


def positions(model: nn.Module, attention_mask: Tensor) -> dict[str, Tensor]:
    """`position_ids` that make a padded row equal the row alone, for models whose forward takes them."""
    if "position_ids" in inspect.signature(type(base_model_of(model)).forward).parameters:
        return {"position_ids": position_ids(attention_mask)}
    return {}


class ActorCritic(nn.Module):
    """
    A causal language model (policy) and a critic behind one forward: a sequence classifier with one label, or an
    adapter with a head on the policy's own base. Reward models that are such adapters are here, too.

    Whatever is asked of it that it does not define, the policy answers, so that TRL and transformers may treat it as
    the policy. The policy is registered first: `parameters()` begins with the policy's.
    """

    policy: Any
    critic: Any

    def __init__(
        self,
        policy: nn.Module,
        critic: PreTrainedModel | AdapterClassifier,
        adapters: AdapterSwitch | None = None,
        rewards: dict[str, AdapterClassifier] | None = None,
    ):
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.rewards = nn.ModuleDict(rewards or {})
        self.adapters = adapters
        self.sampler_recorder: SamplerRecorder | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("policy"), name)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        with_values: bool = False,
        reward: str | None = None,
        **kwargs,
    ) -> Any:
        """
        The policy's output, or with `with_values` a plain dict of its per-token fields plus `state_values` (B, L):
        the critic's value of the state *after* each token. (A dict passes DDP, FSDP and autocast unchanged.) Or the
        (B,) scores of one of the `rewards`.
        """
        if reward is not None:
            return self.rewards[reward](input_ids, attention_mask)
        kwargs = {**positions(self.policy, attention_mask), **kwargs}
        output = self.policy(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if not with_values:
            return output
        return {
            "log_probs": output.log_probs,
            "entropy": output.entropy,
            "aux_loss": output.aux_loss,
            "state_values": self.state_values(input_ids, attention_mask),
        }

    def state_values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        backbone = self.critic.backbone if self.shares_base else self.critic.base_model
        hidden_states = backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=False,
            **positions(self.policy if self.shares_base else backbone, attention_mask),
        ).last_hidden_state
        return self.critic.score(hidden_states.to(self.critic.score.weight.dtype)).squeeze(-1).float()

    @property
    def shares_base(self) -> bool:
        return isinstance(self.critic, AdapterClassifier)

    def parameters_of(self, role: str) -> Iterator[nn.Parameter]:
        """The parameters of `"policy"` or `"critic"`; the base that both share counts as the policy's."""
        for name, parameter in self.named_parameters():
            parts = name.split(".")
            if parts[0] != "rewards" and (CRITIC in parts) == (role == "critic"):
                yield parameter

    # ---- Adapters ----

    def train_adapters(self) -> None:
        """Have the policy's adapter active, it and the critic's trainable, and no other, whatever PEFT was told."""
        assert self.adapters is not None
        if any(layer.disable_adapters for layer in self.adapters.layers):
            raise RuntimeError(
                "The policy's adapters have been switched off (`disable_adapter_layers()`) and not on again, so that "
                "nothing would be trained: use `with model.disable_adapter():`."
            )
        self.adapters.set(POLICY)
        for adapter in self.policy.peft_config:
            is_trained = adapter == POLICY or (adapter == CRITIC and self.shares_base)
            self.policy.set_requires_grad(adapter, is_trained)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As always, but that what is frozen may be missing: DeepSpeed's checkpoints do not repeat the base."""
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        wrong = [*result.unexpected_keys, *trained.intersection(result.missing_keys)]
        if strict and wrong:
            raise RuntimeError(f"The state does not fit the models of this run; missing or unexpected: {wrong[:5]}.")
        return result

    # TRL's reference pass calls these on what it takes for the policy
    @contextmanager
    def disable_adapter(self):
        assert self.adapters is not None
        with self.adapters.use():
            yield

    @property
    def active_adapter(self) -> list[str]:
        assert self.adapters is not None
        return self.adapters.active

    def set_adapter(self, names: str | list[str]) -> None:
        assert self.adapters is not None
        self.adapters.set(*([names] if isinstance(names, str) else names))

    def generate(self, *args, **kwargs) -> Any:
        # What the checkpoint's generation_config.json sets (min_p, no_repeat_ngram_size, …) would fill every field
        # that TRL leaves open, and the log-probs would not be those of the sampler
        base = base_model_of(self.policy)
        saved, base.generation_config = base.generation_config, GenerationConfig()
        try:
            if self.sampler_recorder is None:
                return self.policy.generate(*args, **kwargs)
            with self.sampler_recorder.attached(base):
                output = self.policy.generate(*args, **kwargs)
            self.sampler_recorder.finish(output)
            return output
        finally:
            base.generation_config = saved

    # TRL 1.16 uses the deprecated `gradient_*` names, the Trainer the new ones.
    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.policy.is_activation_checkpointing

    def activation_checkpointing_enable(self, **kwargs) -> None:
        self.policy.activation_checkpointing_enable(**kwargs)
        if not self.shares_base:
            self.critic.activation_checkpointing_enable(**kwargs)

    def activation_checkpointing_disable(self) -> None:
        self.policy.activation_checkpointing_disable()
        if not self.shares_base:
            self.critic.activation_checkpointing_disable()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        self.activation_checkpointing_enable(activation_checkpointing_kwargs=gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.activation_checkpointing_disable()


class LogprobForward:
    """Stands in for the model inside TRL's log-prob helper: adds positions, and keeps the values of the same pass."""

    def __init__(self, model: nn.Module, with_values: bool):
        self.model = model
        self.with_values = with_values
        self._state_values: list[Tensor] = []

    def __call__(self, attention_mask: Tensor, **kwargs) -> Any:
        if not self.with_values:
            model = getattr(self.model, "module", self.model)  # under DDP or DeepSpeed
            return self.model(attention_mask=attention_mask, **{**positions(model, attention_mask), **kwargs})
        output = self.model(attention_mask=attention_mask, with_values=True, **kwargs)
        self._state_values.append(output["state_values"])
        return SimpleNamespace(**output)

    def values(self, logits_to_keep: int) -> Tensor:
        """(B, T): V(s_t), the value of the state in which response token t is chosen, that is after token t − 1."""
        return torch.cat(self._state_values)[:, -logits_to_keep - 1 : -1]


class SamplerRecorder(LogitsProcessor):
    """Keeps the log-probs under which tokens were really drawn, after every warper. Sees one (B, V) tensor a step."""

    def __init__(self):
        self.logprobs: list[Tensor] = []  # one (B, T) a `generate` call
        self._steps: list[Tensor] = []
        self._pending: Tensor | None = None

    @contextmanager
    def attached(self, model: Any):
        get_processors = model._get_logits_processor  # `generate` puts custom processors before the warpers

        def with_recorder(*args, **kwargs):
            processors = get_processors(*args, **kwargs)
            processors.append(self)
            return processors

        model._get_logits_processor = with_recorder
        try:
            yield
        finally:
            del model._get_logits_processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        self._pending = scores.float().log_softmax(-1)
        return scores

    def finish(self, sequences: Tensor) -> None:
        self._take(sequences)
        self.logprobs.append(torch.stack(self._steps, dim=1))
        self._steps = []

    def _take(self, input_ids: Tensor) -> None:
        if self._pending is not None:
            self._steps.append(self._pending.gather(1, input_ids[:, -1:]).squeeze(1))
        self._pending = None


def disable_dropout(model: nn.Module) -> None:
    """Switch dropout off: the modules, and the rates that layers keep as numbers (Llama's `attention_dropout`)."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def unpatched_copy(model: nn.Module, what: str, load_again: Callable[[], Any] | None = None) -> Any:
    """A deep copy without the forward that TRL or accelerate patched onto the instance."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        if load_again is not None:
            return load_again()
        raise ValueError(
            f"{what} would be a copy of a {type(model).__name__} whose weights ZeRO-3 has already partitioned: pass "
            "`model` as a path, or this one (`ref_model=`, `value_model=`)."
        )
    twin = copy.deepcopy(model)
    for module in (twin, base_model_of(twin)):
        vars(module).pop("forward", None)
    return twin


def critic_from_policy(policy: nn.Module, load_again: Callable[[], Any] | None = None) -> PreTrainedModel:
    """
    A critic on a copy of the policy's backbone with a zero value head: V = 0 everywhere at the start.

    `load_again` gives a sequence classifier with the policy's backbone, for a policy that cannot be copied.
    """
    twin = unpatched_copy(policy, "the critic", load_again)
    critic = twin if hasattr(twin, "score") else classifier_on(twin)
    for parameter in critic.score.parameters():
        with whole(parameter, modifier_rank=0):
            nn.init.zeros_(parameter)
    critic.score.to(policy.dtype)
    return critic.requires_grad_(True)


def check_critic(critic: Any, policy: nn.Module) -> None:
    """Raise where `critic` cannot be the critic of `policy`."""
    score = getattr(critic, "score", None)
    if not isinstance(score, nn.Module) or not hasattr(score, "weight"):
        raise ValueError(
            "`value_model` must be a sequence classifier with a `score` head (`AutoModelForSequenceClassification` "
            f"of a causal language model), got {type(critic).__name__}."
        )
    if critic.config.num_labels != 1:
        raise ValueError(
            f"`value_model` must have one label, got num_labels={critic.config.num_labels}: load it with "
            "`num_labels=1`."
        )
    vocabulary, needed = (m.config.get_text_config().vocab_size for m in (critic, base_model_of(policy)))
    if vocabulary != needed:
        raise ValueError(
            f"`value_model` has a vocabulary of {vocabulary} tokens, the policy one of {needed}: the critic reads the "
            "policy's token ids, so it must share its tokenizer."
        )
