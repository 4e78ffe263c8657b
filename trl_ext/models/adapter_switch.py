"""Several roles on one set of base weights: an adapter each, and a head for those that give a number."""

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from ..upstream import AuxiliaryTrainingWrapper, BaseTunerLayer, set_zero3_state

POLICY, CRITIC, REFERENCE = "default", "critic", "ref"  # PEFT's name for the only adapter, ours, TRL's


def base_model_of(model: Any) -> Any:
    """The transformers model under a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def size_of(parameters: Iterable[Tensor]) -> int:
    """How many weights these are, also where ZeRO-3 has partitioned them."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


def whole(parameter: Tensor, modifier_rank: int | None = None) -> Any:
    """The context in which a parameter is there in full, if ZeRO-3 has partitioned it."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier_rank)


class AdapterSwitch:
    """
    Chooses the active adapter of a PEFT model, in all of its layers.

    PEFT's own `set_adapter` and `disable_adapter` also freeze what they switch off, so that after TRL's reference pass
    the critic would not train. And the layers that gradient checkpointing replays in `backward` would run under
    whatever adapter is active by then, with wrong gradients and no error: here they run under that of their forward.
    """

    def __init__(self, model: Any):
        self.layers: list[Any] = [
            module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ]
        self._pin_checkpointing(base_model_of(model))

    @property
    def active(self) -> list[str]:
        return self.layers[0].active_adapters

    def set(self, *names: str) -> None:
        """Make these adapters active; none leaves the base alone."""
        for layer in self.layers:
            layer._active_adapter = list(names)

    @contextmanager
    def use(self, *names: str):
        previous = self.active
        self.set(*names)
        try:
            yield
        finally:
            self.set(*previous)

    def _pin_checkpointing(self, base: Any) -> None:
        set_checkpointing = base._set_gradient_checkpointing

        def set_pinned(enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, **kwargs: Any) -> None:
            set_checkpointing(
                enable=enable, gradient_checkpointing_func=self._pinned(gradient_checkpointing_func), **kwargs
            )

        base._set_gradient_checkpointing = set_pinned
        for module in base.modules():  # where checkpointing was switched on already
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = self._pinned(module._gradient_checkpointing_func)

    def _pinned(self, checkpoint_function: Callable) -> Callable:
        def pinned(function: Callable, *args: Any, **kwargs: Any) -> Any:
            names = self.active

            def replay(*args: Any, **kwargs: Any) -> Any:
                with self.use(*names):
                    return function(*args, **kwargs)

            return checkpoint_function(replay, *args, **kwargs)

        return pinned


def classifier_on(base: Any, head: nn.Module | None = None, pad_token_id: int | None = None) -> PreTrainedModel:
    """
    The sequence classifier of one label that has `base`'s backbone itself, not a copy, and `head`.

    Without a head: a zero one, in float32, since small updates to bfloat16 weights are rounded away.
    """
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    if pad_token_id is not None:
        config.get_text_config().pad_token_id = pad_token_id
    try:
        with torch.device("meta"), set_zero3_state():  # only the structure is needed, nothing for ZeRO-3 to partition
            classifier = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ValueError(
            f"transformers has no sequence classifier for {type(base).__name__}, so no critic can be built from the "
            "policy: pass one as `value_model=`."
        ) from error
    setattr(classifier, classifier.base_model_prefix, base.base_model)
    if head is None:
        head = nn.Linear(classifier.score.in_features, 1, bias=classifier.score.bias is not None)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
    classifier.score = head.to(base.device)
    return classifier


class AdapterClassifier(nn.Module):
    """A sequence classifier of one label on the policy's own base: an adapter and a head, which alone is its child."""

    classifier: Any

    def __init__(self, policy: Any, adapters: AdapterSwitch, name: str, head=None, pad_token_id: int | None = None):
        super().__init__()
        classifier = classifier_on(base_model_of(policy), head, pad_token_id)
        self.score = classifier.score
        self.config = classifier.config
        self.adapters = adapters
        self.name = name
        # The base's weights are the policy's: registered twice, they would be sharded and saved twice
        object.__setattr__(self, "classifier", classifier)

    def backbone(self, **inputs: Any) -> Any:
        with self.adapters.use(self.name):
            return self.classifier.base_model(**inputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B,) scores of right-padded rows (B, L), as the sequence classifier's own forward gives them."""
        with self.adapters.use(self.name):
            return self.classifier(input_ids=input_ids, attention_mask=attention_mask).logits[:, 0]


def merge_exactly(policy: Any) -> None:
    """
    Make `merge_adapter` and `unmerge_adapter`, which TRL calls around each weight sync to vLLM, leave the base as it
    was: adding an adapter's product and subtracting it again would move the reference by rounding, a little each time.
    """
    merge = policy.merge_adapter
    kept: list[tuple[Any, nn.Parameter, Tensor]] = []

    @functools.wraps(merge)
    def merge_adapter(*args: Any, **kwargs: Any) -> None:
        for layer in policy.modules():
            if isinstance(layer, BaseTunerLayer):
                base = layer.get_base_layer()
                kept.extend((layer, parameter, parameter.data) for parameter in base.parameters(recurse=False))
        merge(*args, **{**kwargs, "safe_merge": True})  # which adds to a copy

    def unmerge_adapter() -> None:
        for layer, parameter, data in kept:
            parameter.data = data
            layer.merged_adapters.clear()
        kept.clear()

    policy.merge_adapter, policy.unmerge_adapter = merge_adapter, unmerge_adapter
