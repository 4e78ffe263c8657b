"""Load models: plain models, saved adapters with the base that they name, and models beside the policy."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, patch_environment, set_seed
from peft import PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import Tensor, nn
from transformers.integrations import deepspeed
from transformers.utils import cached_file

from ..upstream.names import (
    create_model_from_path,
    find_adapter_config_file,
    is_deepspeed_zero3_enabled,
    prepare_deepspeed,
    prepare_fsdp,
)
from ..upstream.statements import refuse, temporarily
from .adapters import HEAD, POLICY, AdapterSwitch, check_config, check_loaded, recorded_base
from .weights import base_model_of

# Under FSDP, transformers would load a head that the base lacks on the first process alone
_ON_EACH_PROCESS = partial(patch_environment, FSDP_CPU_RAM_EFFICIENT_LOADING="false")


# ---- What a path names ----


def is_adapter(path: Any, revision: str | None = None) -> bool:
    """
    Return whether `path` is the folder or hub name of an adapter; False if it is not a string. `revision` is that of
    `path` on the hub, None for the default branch.
    """
    try:
        return isinstance(path, str) and find_adapter_config_file(path, revision=revision) is not None
    except OSError:  # nothing is there: loading it will say so
        return False


def base_of(path: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return the path and revision of an adapter's base; for a model that is no adapter, its own path and revision."""
    if not is_adapter(path, revision):
        return path, revision
    config = PeftConfig.from_pretrained(path, revision=revision)
    return config.base_model_name_or_path, config.revision


def has_head(path: str, revision: str | None = None) -> bool:
    """
    Return whether `path` is an adapter of a sequence classifier, which PEFT saves with its head. `revision` is that of
    `path` on the hub.
    """
    return is_adapter(path, revision) and PeftConfig.from_pretrained(path, revision=revision).task_type == "SEQ_CLS"


def load_config(path: str, revision: str | None = None, **kwargs: Any) -> Any:
    """
    Load a model's configuration; for an adapter, load its base's. `revision` is that of `path` on the hub; `kwargs`
    are passed to `AutoConfig.from_pretrained`.
    """
    path, revision = base_of(path, revision)
    return transformers.AutoConfig.from_pretrained(path, revision=revision, **kwargs)


def load_tokenizer(
    path: str, revision: str | None = None, auto: Any = transformers.AutoTokenizer, **kwargs: Any
) -> Any:
    """
    Load a model's tokenizer; for an adapter that was saved without one, load its base's tokenizer.

    Args:
        path: folder or hub name of the model.
        auto: the class that loads it; `AutoProcessor` loads a processor instead.
        **kwargs: passed to `from_pretrained`.
    """
    if is_adapter(path, revision):
        try:
            cached_file(path, "tokenizer_config.json", revision=revision)
        except OSError:  # plain PEFT saves none
            path, revision = base_of(path, revision)
    return auto.from_pretrained(path, revision=revision, **kwargs)


# ---- A model, plain or a saved adapter ----


def load_model(name: str, device: Any = None, revision: str | None = None, dtype: str = "auto") -> Any:
    """
    Load a causal language model, plain or an adapter, in evaluation mode.

    Args:
        name: folder or hub name.
        device: where to move it; None for the GPU if there is one, else the CPU.
        revision: revision of the model on the hub; None for the default branch.
        dtype: dtype of the weights, `"auto"` for the saved one.

    Raises:
        ValueError: the model is a classifier, such as a reward model. Its LM head would be random.
    """
    if is_adapter(name, revision):
        model = load_adapted(name, revision, dtype=dtype, device_map=None)
    else:
        kind = (transformers.AutoConfig.from_pretrained(name, revision=revision or "main").architectures or [""])[0]
        if kind.endswith("Classification"):
            raise ValueError(f"{name} is a {kind}, not a language model: name the policy, not a reward model.")
        model = transformers.AutoModelForCausalLM.from_pretrained(name, revision=revision or "main", dtype=dtype)
    return model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_adapted(
    path: str, revision: str | None = None, *, is_classifier: bool = False, is_trainable: bool = False, **kwargs: Any
) -> Any:
    """
    Load an adapter on the base that it names, unmerged.

    Args:
        path: folder or hub name of the adapter.
        revision: revision of the adapter; the base's revision is read from the adapter's configuration.
        is_classifier: load a sequence classifier with one label. An adapter of a language model gets a new head, which
            must be trained and is saved with the adapter; so `is_trainable` must be set.
        is_trainable: whether the adapter will be trained further.
        **kwargs: passed to the base's `from_pretrained`.

    Raises:
        ValueError: the adapter is for another task, does not fit its base, or would have to be merged before it is
            trained further.
    """
    config = PeftConfig.from_pretrained(path, revision=revision)
    base, base_revision = base_of(path, revision)
    kind = config.task_type or "CAUSAL_LM"
    needs_head = is_classifier and kind == "CAUSAL_LM"
    is_whole = not is_deepspeed_zero3_enabled()  # else no process has a whole weight
    auto: Any = transformers.AutoModelForSequenceClassification if is_classifier else None
    labels = {"num_labels": 1} if is_classifier else {}
    with _ON_EACH_PROCESS() if is_classifier else nullcontext():
        model = create_model_from_path(base, auto, revision=base_revision or "main", **labels, **kwargs)
    weights = load_peft_weights(path, device="cpu", revision=revision)
    refuse(
        (
            kind != ("SEQ_CLS" if is_classifier else "CAUSAL_LM") and not (needs_head and is_trainable),
            f"{path} is an adapter of task type {kind}, but a "
            f"{'sequence classifier' if is_classifier else 'causal language model'} is needed here.",
        ),
        (
            is_trainable and bool(_saved_embeddings(model, weights)),
            f"{path} was saved with its own embeddings: merge it first (`trl-ext merge`), and train the merged model.",
        ),
        (needs_head and not is_whole, f"{path} cannot get a head under ZeRO-3: merge it first (`trl-ext merge`)."),
    )
    fit_vocabulary(model, weights)
    kinds = {"config": config, "autocast_adapter_dtype": is_whole}  # ZeRO-3 gathers parameters of one dtype only
    if needs_head:  # PEFT cannot load a classifier's adapter without a head
        config.task_type = "SEQ_CLS"
        config.modules_to_save = [*(config.modules_to_save or []), "score"]
        config.inference_mode = False
        config.init_lora_weights = True  # the saved weights follow; another value might change the base
        weights[f"{HEAD}weight"] = model.score.weight.detach().clone()
        adapted = get_peft_model(model, config, autocast_adapter_dtype=is_whole)
    else:
        adapted = PeftModel.from_pretrained(model, path, revision=revision, is_trainable=is_trainable, **kinds)
    if is_whole and not config.is_prompt_learning:
        check_loaded(set_peft_model_state_dict(adapted, weights), POLICY, path)  # which PEFT passes over
    adapted.adapter_path = path  # the report of a training run compares with what is recorded at this path
    return adapted


def load_merged(path: str, **kwargs: Any) -> Any:
    """
    Load an adapter merged into the base that it names; `kwargs` are the arguments of [`load_adapted`].

    Under ZeRO-3 the adapter stays unmerged, since no process has a whole weight to merge into.
    """
    model = load_adapted(path, **kwargs)
    if is_deepspeed_zero3_enabled():
        return model
    model = merge(model)
    for weight in model.parameters():  # as of a model that was loaded whole; PEFT has frozen them
        weight.requires_grad_(weight.is_floating_point())
    return model


def load_separately(path: str, **kwargs: Any) -> Any:
    """
    Load a sequence classifier with one label that was saved as an adapter, by [`load_merged`], with a base of its own.
    `kwargs` are further arguments of [`load_adapted`].
    """
    model = load_merged(path, is_classifier=True, **{"device_map": None, **kwargs})
    model.config.name_or_path = model.name_or_path = path
    return model


def merge(model: Any) -> Any:
    """
    Merge an adapter into its base, and return the base; if the adapter changes one of two tied weights, untie them.
    """
    base = base_model_of(model)
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    is_adapted = any(hasattr(end, "base_layer") for end in ends)
    if is_adapted and ends[1] is not None and ends[0].weight is ends[1].weight:
        head = getattr(ends[1], "base_layer", ends[1])
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        base.config.get_text_config().tie_word_embeddings = base.config.tie_word_embeddings = False
        base.all_tied_weights_keys = {}  # else transformers would save one of the two
    return model.merge_and_unload(safe_merge=True)


def fit_vocabulary(model: Any, weights: dict[str, Tensor]) -> None:
    """
    If an adapter was saved with embeddings, resize its base's embeddings to their size. `weights` has the tensors of
    the adapter's file by name.
    """
    for name in _saved_embeddings(model, weights):
        if len(weights[name]) != model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(weights[name]))


def _saved_embeddings(model: Any, weights: dict[str, Tensor]) -> list[str]:
    """Return the names of the embeddings and LM heads that `weights`, the tensors of an adapter's file, contain."""
    own = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [name for name, module in model.named_modules() if any(module is each for each in own)]
    return [key for key in weights for name in names if key == f"base_model.model.{name}.weight"]


def load_to_train(
    model: Any,
    args: Any,
    processing_class: Any = None,
    peft_config: Any = None,
    quantization_config: Any = None,
    *,
    is_classifier: bool = False,
) -> tuple[Any, Any]:
    """
    If `model` is the path of an adapter, load the adapter and its tokenizer, to train the adapter further.

    The base is frozen.

    Args:
        model: path of the adapter; anything else is returned unchanged.
        args: the trainer's configuration, or None.
        processing_class: a tokenizer to use instead of the adapter's; None for the adapter's.
        peft_config: ignored, with a warning, since the adapter keeps its own settings.
        quantization_config: how to quantise the base; None for not at all.
        is_classifier: whether to load a sequence classifier instead of a language model.

    Returns:
        The model and the tokenizer to train with. If `model` is not the path of an adapter, they are `model` and
        `processing_class`.
    """
    kwargs = dict(getattr(args, "model_init_kwargs", None) or {})
    revision = kwargs.pop("revision", None)
    if not is_adapter(model, revision):
        return model, processing_class
    if peft_config is not None:
        warnings.warn(
            f"{model} is an adapter and keeps its own rank, modules and dropout: `peft_config` is ignored (in a "
            "recipe: `use_peft`). To train a new adapter, merge this adapter first (`trl-ext merge`).",
            UserWarning,
            stacklevel=3,
        )
    trusted = {"trust_remote_code": getattr(args, "trust_remote_code", False)}
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    if args is not None and args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs["device_map"] = None  # as TRL: "auto" fails
    if is_classifier and args is not None:
        set_seed(args.seed)  # a new head is drawn
    adapted = load_adapted(model, revision, is_classifier=is_classifier, is_trainable=True, **trusted | kwargs)
    if processing_class is None:
        auto = transformers.AutoTokenizer if is_classifier else transformers.AutoProcessor
        processing_class = load_tokenizer(model, revision, auto, **trusted)
    return adapted, processing_class


# ---- Reward models that share a base ----


class SharedBaseClassifier(nn.Module):
    """Run a sequence classifier that is an adapter with a head on a [`SharedBase`]."""

    def __init__(self, shared: "SharedBase", name: str):
        super().__init__()
        self.model = shared.model
        self.config = shared.model.config
        self.shared = shared
        self.name = name

    @property
    def device(self) -> Any:
        """Return the device of the base."""
        return self.model.device

    def forward(self, **inputs: Any) -> Any:
        with self.shared.switch.use(self.name):
            return self.model(**inputs)


class SharedBase:
    """
    Load several sequence classifiers with one label that were saved as adapters of one base; load the base only once.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.base: Any = None
        self.switch: Any = None

    def add(self, path: str, **kwargs: Any) -> SharedBaseClassifier:
        """
        Load the adapter in `path`; return a classifier that scores by it.

        The first call also loads the base; `kwargs` are then arguments of [`load_adapted`]. Later calls read only
        `revision`.

        Raises:
            ValueError: the adapter has another base than the adapter added first, or cannot share a base.
        """
        revision = kwargs.get("revision")
        base = base_named_by(path, revision)
        name = POLICY
        if self.model is None:
            self.base = base
            self.model = load_adapted(path, is_classifier=True, **kwargs)
        elif base is None or base != self.base:
            raise ValueError(
                f"{path} cannot share a base with the adapter loaded first. Both must be LoRA adapters that leave the "
                f"base as it is, with the same base, revision and hash of weights; here {base or 'no such adapter'} "
                f"and {self.base or 'no such adapter'}. Load each by a `ModelReward` of its own"
            )
        else:
            name = f"member_{len(self.model.peft_config)}"
            self.model.load_adapter(path, name, revision=revision)
        self.switch = AdapterSwitch(self.model)  # made anew, since each adapter may adapt other layers
        return SharedBaseClassifier(self, name)


def base_named_by(path: str, revision: str | None = None) -> tuple[str | None, str | None, str | None] | None:
    """
    Return three values: the name and the revision of an adapter's base, and a hash of the base's weights, None if
    none was recorded. Return a single None if the adapter cannot share a base with others.
    """
    config = PeftConfig.from_pretrained(path, revision=revision)
    try:
        check_config(config, path)
    except ValueError:
        return None
    return config.base_model_name_or_path, config.revision, recorded_base(path).get("weights")


# ---- Beside the policy ----


@dataclass(frozen=True)
class Loader:
    """
    Load other models as the policy was loaded, and place them on their devices.

    Args:
        policy: the policy, plain or with adapters.
        path: path or hub name that the policy was loaded from; None if it was passed in as an object.
        init_kwargs: the keyword arguments that the policy was loaded with.
        trust_remote_code: as in transformers.
    """

    policy: Any
    path: str | None
    init_kwargs: dict[str, Any]
    trust_remote_code: bool
    accelerator: Accelerator

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` to load a model as the policy was loaded, but no `revision`."""
        kwargs = {"dtype": self.policy.dtype, "trust_remote_code": self.trust_remote_code, **self.init_kwargs}
        kwargs.pop("revision", None)
        if self.accelerator.num_processes > 1 or self.is_deepspeed:
            kwargs["device_map"] = None  # by default TRL spreads a model over all GPUs
        return kwargs

    @property
    def is_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def reloader(self, load: Callable[..., Any]) -> Callable[[], Any] | None:
        """
        Return a function that loads the policy's weights again by `load`; None if the policy has no path.

        `load` gets the policy's path, and by name its `revision` and [`Loader.kwargs`]. ZeRO-3 needs such a function,
        since a model that it has partitioned cannot be copied.
        """
        if self.path is None:
            return None
        return partial(load, self.path, revision=self.init_kwargs.get("revision"), **self.kwargs)

    def placed(self, model: nn.Module, shard: bool = True) -> Any:
        """Place a frozen model on its device; return it. ZeRO-3 shards it; FSDP shards it only if `shard` is set."""
        if self.is_deepspeed:
            return prepare_deepspeed(model, self.accelerator)
        if shard and self.accelerator.distributed_type == DistributedType.FSDP:
            return prepare_fsdp(model, self.accelerator)
        return self.accelerator.prepare_model(model, evaluation_mode=True, device_placement=True)


@contextmanager
def whole_on_each_process() -> Iterator[None]:
    """
    Load whole models on every process within the `with` block.

    Otherwise FSDP would load the weights on the first process alone, and ZeRO-3 would shard them.
    """
    from ..upstream.names import _hf_deepspeed_config_weak_ref as zero  # its present value

    without_zero3 = nullcontext() if zero is None else temporarily(deepspeed, _hf_deepspeed_config_weak_ref=None)
    with _ON_EACH_PROCESS(), without_zero3:
        yield
