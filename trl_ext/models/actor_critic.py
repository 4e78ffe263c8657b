"""Hold policy and critic in one module, so that one forward, one backward and one `accelerator.prepare` serve both."""

import copy
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from ..functional import position_ids
from ..upstream.names import set_zero3_state
from .adapters import CRITIC, HEAD, POLICY, AdapterSwitch, load_adapter
from .decoding import Histories, SamplerRecorder, decode
from .generation import neutral_generation
from .weights import base_model_of, tokens_beyond, unpatched_copy, vocabulary_of, whole


def classifier_on(base: Any, head: nn.Module | None = None) -> PreTrainedModel:
    """
    Build a sequence classifier with one label from `base`'s backbone, which is not copied, and `head`.

    If `head` is None, make a head of zeros in float32: bfloat16 would round small updates away.
    """
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    with torch.device("meta"), set_zero3_state():  # only the structure is needed, nothing for ZeRO-3 to partition
        classifier = AutoModelForSequenceClassification.from_config(config)
    setattr(classifier, classifier.base_model_prefix, base.base_model)
    if head is None:
        head = nn.Linear(classifier.score.in_features, 1, bias=classifier.score.bias is not None)
        zero_(head)
    classifier.score = head.to(base.device)
    return classifier


def zero_(head: nn.Module) -> None:
    """Set the weights of a value head to 0, so that V = 0 everywhere."""
    for parameter in head.parameters():
        with whole(parameter, modifier_rank=0):
            nn.init.zeros_(parameter)


class AdapterClassifier(nn.Module):
    """
    Score rows as a sequence classifier with one label does, by an adapter and a head on the policy's base.

    Only the head is registered as a submodule: the base belongs to the policy.

    Args:
        policy: the PEFT model that holds the base.
        name: the adapter to score by.
        head: linear layer from a hidden state to a score; None for a head of zeros.
    """

    classifier: Any

    def __init__(self, policy: Any, adapters: AdapterSwitch, name: str, head: nn.Module | None = None):
        super().__init__()
        classifier = classifier_on(base_model_of(policy), head)
        self.score = classifier.score
        self.config = classifier.config
        self.adapters = adapters
        self.name = name
        # The base's weights are the policy's: registered twice, they would be sharded and saved twice
        object.__setattr__(self, "classifier", classifier)

    def backbone(self, **inputs: Any) -> Any:
        """Run the base without a head on `inputs`, with this classifier's adapter active; return the base's output."""
        with self.adapters.use(self.name):
            return self.classifier.base_model(**inputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """
        Score the right-padded rows `input_ids` (B, L), with `attention_mask`, as a sequence classifier's forward does;
        return (B,) scores.
        """
        with self.adapters.use(self.name):
            return self.classifier(input_ids=input_ids, attention_mask=attention_mask).logits[:, 0]


def critic_from_policy(policy: nn.Module, load_again: Callable[[], Any] | None = None) -> PreTrainedModel:
    """
    Build a critic on a copy of the policy's backbone with a zero value head: V = 0 everywhere at the start.

    A policy that ZeRO-3 has partitioned cannot be copied. Then call `load_again`, which loads a sequence classifier on
    the policy's weights; if it is None, raise a `ValueError`.
    """
    twin = unpatched_copy(policy, "the critic", load_again)
    critic = twin if hasattr(twin, "score") else classifier_on(twin)
    zero_(critic.score)
    critic.score.to(policy.dtype)
    return critic.requires_grad_(True)


def check_one_label(model: Any, name: str) -> None:
    """
    Raise a `ValueError` unless a model is a sequence classifier with a `score` head and one label; the message calls
    it `name`.
    """
    if not hasattr(getattr(model, "score", None), "weight") or model.config.num_labels != 1:
        raise ValueError(
            f"{name} must be a sequence classifier with a `score` head and one label, got {type(model).__name__}: "
            "load it by `AutoModelForSequenceClassification` with `num_labels=1`."
        )


def check_critic(critic: Any, tokenizer: Any) -> None:
    """
    Raise a `ValueError` if a critic is no sequence classifier with one label, or lacks an embedding for a token of the
    tokenizer.
    """
    check_one_label(critic, "`value_model`")
    if unknown := tokens_beyond(vocabulary_of(critic), tokenizer):
        raise ValueError(
            f"`value_model` has no embeddings for tokens that the policy's tokenizer has: {[*unknown.items()][:3]}. "
            "Pass a critic with the same tokenizer, or call `value_model.resize_token_embeddings`."
        )


def position_kwargs(model: nn.Module, attention_mask: Tensor | None, given: Tensor | None = None) -> dict[str, Tensor]:
    """
    Return `{"position_ids": positions}` for a model's forward, so that padding does not change a row's outputs.

    Return {} if the forward takes no `position_ids`, or if both arguments are None.

    Args:
        model: the model, plain or wrapped by PEFT.
        attention_mask: (B, L), 1 = real token. Unless positions are given, they are counted from it.
        given: (B, L) positions.
    """
    if "position_ids" not in inspect.signature(type(base_model_of(model)).forward).parameters:
        return {}
    if given is None and attention_mask is not None:
        given = position_ids(attention_mask)
    return {} if given is None else {"position_ids": given}


def _values(
    backbone: Callable[..., Any],  # without the head
    head: Any,
    input_ids: Tensor,  # (K, C), and so is the mask
    attention_mask: Tensor | None,
    predicts: Tensor | None,  # (N,) indices from 0 to K · C − 1; None for all
    **positions: Tensor,  # `position_ids`, if the backbone takes them
) -> Tensor:
    """Return the (K, C) values of the states after each token of K rows, or the (N,) values at `predicts`."""
    hidden_states = backbone(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions
    ).last_hidden_state
    if predicts is not None:
        hidden_states = hidden_states.flatten(0, 1)[predicts]
    # An adapter's head is in float32, whatever the base's dtype
    return head(hidden_states.to(head.weight.dtype)).squeeze(-1).float()


def add_value_forward(critic: Any) -> None:
    """
    Make a sequence classifier with one label callable as [`ActorCritic`] is, to train it as a critic without a policy.

    `critic(input_ids, position_ids=, predicts=)` then takes K rows of C tokens, and returns `{"values": values}`: the
    (N,) values, in score units, of the states after the N tokens whose indices, from 0 to K · C − 1, are `predicts`.
    Without `predicts`, the classifier's own forward runs.

    Args:
        critic: the classifier, plain or wrapped by PEFT.
    """
    model = base_model_of(critic)
    scores = model.forward

    @functools.wraps(type(model).forward)  # transformers reads the signature
    def forward(
        self: Any,
        input_ids: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        predicts: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if predicts is None:
            return scores(input_ids, attention_mask, position_ids=position_ids, **kwargs)
        where = position_kwargs(self.base_model, attention_mask, position_ids)
        return {"values": _values(self.base_model, self.score, input_ids, attention_mask, predicts, **where)}

    model.forward = types.MethodType(forward, model)


def weights_of(role: str, state_dict: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """
    Return the weights of "policy" or "critic" (`role`) in an actor-critic's state, under their names without the
    prefix `{role}.`; None if `state_dict` is None.
    """
    if state_dict is None:
        return None
    return {k.removeprefix(f"{role}."): v for k, v in state_dict.items() if k.startswith(f"{role}.")}


class ActorCritic(nn.Module):
    """
    Put a causal language model (policy) and a critic behind one forward.

    The critic is a sequence classifier with one label, or an adapter with a head on the policy's own base. Reward
    models that are adapters with a head on that base are held here, too. An attribute that this class does not define
    is looked up on the policy, so that TRL and transformers can treat this module as the policy. `parameters()` yields
    the policy's parameters first.

    Args:
        critic: a sequence classifier with one label, or an adapter with a head on the policy's base; None for no
            critic.
        adapters: the switch between the adapters of the policy's base; None if there are no adapters.
        rewards: reward models that are adapters on the policy's base, by name.
    """

    policy: Any
    critic: Any
    adapters: Any

    def __init__(
        self,
        policy: nn.Module,
        critic: PreTrainedModel | AdapterClassifier | None,
        adapters: AdapterSwitch | None = None,
        rewards: dict[str, AdapterClassifier] | None = None,
    ):
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.rewards = nn.ModuleDict(rewards or {})
        self.adapters = adapters
        self.sampler_recorder: SamplerRecorder | None = None  # set while a rollout records log-probs
        self.histories: Histories | None = None  # set while a rollout samples several turns

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("policy"), name)  # `self.policy` would recurse before it is set

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        predicts: Tensor | None = None,
        targets: Tensor | None = None,
        with_logprobs: bool = True,
        with_values: bool = False,
        touch_policy: bool = False,
        reward: str | None = None,
        **kwargs,
    ) -> Any:
        """
        Run the policy on (K, C) ids; or with `predicts` compute what a loss needs; or with `reward` score rows.

        Without `predicts` and `reward`, return the policy's output. With `predicts`, return a plain dict, which DDP,
        FSDP and autocast pass on unchanged:

        - with `with_values`: the critic's (N,) `values`;
        - with `with_logprobs`: the policy's (N,) `logprobs` of the targets, nats; the (N,) `entropies`, nats, which
          may be None without `with_entropies`; and the experts' `aux_loss`, None if it was not asked for.

        With `reward`, return the (K,) scores of the reward model of that name.

        Args:
            input_ids, attention_mask, position_ids: (K, C), K rows of C tokens.
            predicts: (N,), indices, from 0 to K · C − 1, of the tokens after which the targets are chosen.
            targets: (N,), the token ids that are chosen.
            with_logprobs: whether to run the policy.
            with_values: whether to compute values.
            touch_policy: whether to add 0 times the policy's trained weights to the values, so that these weights get
                a gradient of 0 in calls that do not run the policy.
            reward: name of a reward model.
            kwargs: passed on to the policy, such as `with_entropies`, see [`add_dense_lm_head`].
        """
        if reward is not None:
            return self.rewards[reward](input_ids, attention_mask)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if predicts is None:
            return self.policy(**inputs, **position_kwargs(self.policy, attention_mask, position_ids), **kwargs)
        outputs: dict[str, Any] = {}
        uncast = self.adapters.inputs_as_they_are(input_ids.device.type) if self.adapters else nullcontext()
        with uncast:
            if with_values:  # before the logits, the largest tensor: the backward pass then frees the logits first
                values = self.state_values(input_ids, attention_mask, position_ids, predicts)
                if touch_policy:
                    trained = (p for p in self.parameters_of("policy") if p.requires_grad)
                    values = values + 0.0 * sum(p.flatten()[0] for p in trained)
                outputs["values"] = values
            if with_logprobs:
                output = self.policy(
                    **inputs,
                    **position_kwargs(self.policy, attention_mask, position_ids),
                    predicts=predicts,
                    targets=targets,
                    fused_lm_head=True,
                    **kwargs,
                )
                outputs |= {"logprobs": output.log_probs, "entropies": output.entropy, "aux_loss": output.aux_loss}
        return outputs

    def state_values(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        predicts: Tensor | None = None,
    ) -> Tensor:
        """
        Return the critic's value of the state after each token. The critic reads an id beyond its vocabulary as its
        last id.

        Args:
            input_ids, attention_mask: (K, C), K rows of C tokens.
            position_ids: (K, C); None counts positions from the mask.
            predicts: (N,), indices, from 0 to K · C − 1, of the tokens to return values for; None for all tokens.

        Returns:
            (K, C), or with `predicts` (N,), score units.
        """
        if self.shares_base:
            backbone = self.critic.backbone
            where = position_kwargs(self.policy, attention_mask, position_ids)
        else:
            vocabulary = vocabulary_of(self.critic)
            if vocabulary < vocabulary_of(self.policy):  # the policy may sample ids that belong to no token
                input_ids = input_ids.clamp(max=vocabulary - 1)
            backbone = self.critic.base_model
            where = position_kwargs(backbone, attention_mask, position_ids)
        return _values(backbone, self.critic.score, input_ids, attention_mask, predicts, **where)

    @property
    def shares_base(self) -> bool:
        """Return whether the critic is an adapter on the policy's base."""
        return isinstance(self.critic, AdapterClassifier)

    @property
    def has_own_critic(self) -> bool:
        """Return whether there is a critic whose base is not the policy's."""
        return self.critic is not None and not self.shares_base

    def parameters_of(self, role: str) -> Iterator[nn.Parameter]:
        """Yield the parameters of one `role`, `"policy"` or `"critic"`; a shared base counts as the policy's."""
        for name, parameter in self.named_parameters():
            parts = name.split(".")
            if parts[0] != "rewards" and (CRITIC in parts) == (role == "critic"):
                yield parameter

    # ---- Adapters ----

    def train_adapters(self) -> None:
        """Make the adapters of policy and critic trainable, freeze all others, and activate the policy's."""
        if self.adapters is None:
            return
        self.adapters.set(POLICY)
        for adapter in self.policy.peft_config:
            self.policy.set_requires_grad(adapter, adapter == POLICY or (adapter == CRITIC and self.shares_base))

    def load_adapters(self, folder: str) -> None:
        """
        Load the policy's adapter, if there is one, from `folder`. If the critic is an adapter on the same base, also
        load this adapter and its head, from the folder `critic` in `folder`.

        Transformers' Trainer would load only the policy's adapter, and freeze it.
        """
        if self.adapters is not None:
            load_adapter(self.policy, POLICY, folder)
        if self.shares_base:
            weights = load_adapter(self.policy, CRITIC, os.path.join(folder, "critic"))
            self.critic.score.load_state_dict(weights)

    # ---- Saving and loading ----

    def save_critic(self, folder: str, state_dict: dict[str, Tensor] | None = None) -> None:
        """
        Save the critic to `folder`, as a sequence classifier, or in PEFT's format if it is an adapter on the policy's
        base.

        Under DeepSpeed and FSDP, `state_dict` holds the whole weights of this module; None takes them from the model.
        """
        weights = weights_of("critic", state_dict)
        if self.has_own_critic:
            self.critic.save_pretrained(folder, state_dict=weights)
            return
        config = copy.deepcopy(self.policy.peft_config[CRITIC])
        config.task_type = "SEQ_CLS"
        config.modules_to_save = ["score"]
        config.inference_mode = True
        config.save_pretrained(folder)
        adapter = peft.get_peft_model_state_dict(
            self.policy, state_dict=weights_of("policy", state_dict), adapter_name=CRITIC, save_embedding_layers=False
        )
        head = {f"{HEAD}{n.removeprefix('score.')}": p for n, p in (weights or self.critic.state_dict()).items()}
        tensors = {n: p.detach().cpu().contiguous() for n, p in (adapter | head).items()}
        save_file(tensors, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """
        Load weights as `torch.nn.Module` does. If `strict`, raise a `RuntimeError` for unknown weights, and for
        trained weights that are missing.

        Frozen weights may be missing: DeepSpeed leaves a frozen base out of its checkpoints.
        """
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        wrong = [*result.unexpected_keys, *trained.intersection(result.missing_keys)]
        if strict and wrong:
            raise RuntimeError(
                f"The checkpoint's weights do not fit the models of this run. Missing or unexpected: {wrong[:5]}. "
                "Resume with the models and adapters that the checkpoint was written with."
            )
        return result

    # ---- What TRL and the Trainer call on a policy ----

    def generate(self, *args: Any, **inputs: Any) -> Any:
        """Generate with the policy as transformers' `generate` does, but ignore the model's generation_config.json."""
        # `generate` would take the fields that TRL's config leaves unset from the file
        with neutral_generation(self.policy):
            return decode(self.policy, self.sampler_recorder, *args, histories=self.histories, **inputs)

    # TRL 1.16 uses the deprecated `gradient_*` names, the Trainer the new ones
    @property
    def is_gradient_checkpointing(self) -> bool:
        """Return whether the policy recomputes activations in the backward pass."""
        return self.policy.is_activation_checkpointing

    def activation_checkpointing_enable(self, **kwargs) -> None:
        """
        Let policy and critic recompute activations in the backward pass, to save memory; `kwargs` are transformers'.
        """
        self.policy.activation_checkpointing_enable(**kwargs)
        if self.has_own_critic:
            self.critic.activation_checkpointing_enable(**kwargs)

    def activation_checkpointing_disable(self) -> None:
        """Let policy and critic keep their activations for the backward pass, instead of recomputing them."""
        self.policy.activation_checkpointing_disable()
        if self.has_own_critic:
            self.critic.activation_checkpointing_disable()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        """Call `activation_checkpointing_enable`, under its older name and with its argument's older name."""
        self.activation_checkpointing_enable(activation_checkpointing_kwargs=gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Call `activation_checkpointing_disable`, under its older name."""
        self.activation_checkpointing_disable()
