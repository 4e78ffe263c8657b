"""Switch, check, add, save and load several adapters on one base, and record which base an adapter belongs to."""

import copy
import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate.utils import fsdp_utils
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..upstream.names import AuxiliaryTrainingWrapper, BaseTunerLayer
from ..upstream.statements import refuse, temporarily
from .weights import base_model_of, hash_of, hub_identity, weights_hash

POLICY, CRITIC, REFERENCE = "default", "critic", "ref"  # PEFT names the first adapter, we the second, TRL the third
FINGERPRINT = "trl_ext_base.json"
HEAD = "base_model.model.score."  # under which PEFT saves the head of a sequence classifier

# `init_lora_weights` that leave the base weights, and so the reference, as they are
_KEEP_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")


class AdapterSwitch:
    """
    Choose the active adapters of a PEFT model, in all of its layers.

    PEFT's own `set_adapter` and `disable_adapter` also freeze the adapters that they switch off. TRL switches adapters
    off for its reference pass, after which the critic's adapter would stay frozen. This class freezes nothing.

    Gradient checkpointing recomputes layers in the backward pass with the adapters that are active then. If other
    adapters were active in the forward pass, gradients are wrong, without an error. With this class, a layer is
    recomputed with the adapters that were active in its forward pass.

    Make it after all adapters are there: an adapter that is added later may adapt layers that it does not know.
    """

    def __init__(self, model: Any):
        # Listed once: under checkpointing each layer switches twice, and a search takes 10 ms in a model of 24 layers
        self.layers: list[Any] = [
            module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ]
        base = base_model_of(model)
        set_checkpointing = base._set_gradient_checkpointing

        def set_pinned(enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, **kwargs: Any) -> None:
            set_checkpointing(
                enable=enable, gradient_checkpointing_func=self._pinned(gradient_checkpointing_func), **kwargs
            )

        base._set_gradient_checkpointing = set_pinned
        for module in base.modules():  # in case checkpointing is on already
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = self._pinned(module._gradient_checkpointing_func)

    @property
    def active(self) -> list[str]:
        """Return the names of the active adapters."""
        return self.layers[0].active_adapters

    def set(self, *names: str) -> None:
        """Activate the adapters `names`, and deactivate all others; without names, the base runs alone."""
        for layer in self.layers:
            layer._active_adapter = list(names)

    @contextmanager
    def use(self, *names: str) -> Iterator[None]:
        """
        Activate only the adapters `names` within the `with` block, then restore the adapters that were active before.
        """
        previous = self.active
        self.set(*names)
        try:
            yield
        finally:
            self.set(*previous)

    @contextmanager
    def inputs_as_they_are(self, kind: str) -> Iterator[None]:
        """
        Keep PEFT from casting inputs within the `with` block, if autocast is on for the device type `kind`.

        PEFT would cast each layer's input to float32, the adapters' dtype. Autocast would then cast it back to 16
        bits, and each layer would keep this copy of its input for the backward pass.
        """
        if not torch.is_autocast_enabled(kind):
            yield
            return
        before = [layer.cast_input_dtype_enabled for layer in self.layers]
        for layer in self.layers:
            layer.cast_input_dtype_enabled = False
        try:
            yield
        finally:
            for layer, casts in zip(self.layers, before, strict=True):
                layer.cast_input_dtype_enabled = casts

    def _pinned(self, checkpoint_function: Callable) -> Callable:
        def pinned(function: Callable, *args: Any, **kwargs: Any) -> Any:
            names = self.active

            def run_under_them(*args: Any, **kwargs: Any) -> Any:
                with self.use(*names), self.inputs_as_they_are(args[0].device.type):
                    return function(*args, **kwargs)

            return checkpoint_function(run_under_them, *args, **kwargs)

        return pinned


def merge_exactly(policy: Any) -> None:
    """
    Make `policy.unmerge_adapter` restore the base's weights exactly as they were before `policy.merge_adapter`.

    TRL calls the two methods around each weight sync to vLLM. PEFT's methods add the adapter's product to the base's
    weights and subtract it again, which would change the reference by a rounding error at each sync.
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

    policy.merge_adapter = merge_adapter
    policy.unmerge_adapter = unmerge_adapter


# ---- Checks ----


def check_config(config: Any, name: str, shares_base: bool = True) -> None:
    """
    Raise a `ValueError` for an adapter that would train wrongly, such as one that changes the base (the reference).

    Args:
        name: the argument's name, for the message.
        shares_base: whether other adapters will be on the same base.
    """
    is_lora = isinstance(config, peft.LoraConfig)
    unusable = f"`{name}` ({type(config).__name__}) cannot be used:"
    refuse(
        (
            config.is_prompt_learning or config.is_adaption_prompt,
            f"{unusable} a learned prompt would shift the positions of log-probs and values. Use a `LoraConfig`.",
        ),
        (
            shares_base and not is_lora,
            f"{unusable} actor and critic can share a base only with LoRA. Use a `LoraConfig`, or pass a critic with "
            "a base of its own as `value_model=`.",
        ),
        (
            is_lora and config.bias != "none",
            f"{unusable} bias={getattr(config, 'bias', None)!r} trains the base's biases, and so changes the "
            "reference. Use bias='none'.",
        ),
        (
            is_lora and (config.init_lora_weights not in _KEEP_THE_BASE or config.layer_replication),
            f"{unusable} init_lora_weights={getattr(config, 'init_lora_weights', None)!r} or layer_replication "
            "changes the base, so that the base alone is no longer the reference. Use init_lora_weights=True and no "
            "layer_replication, or merge that adapter first (`trl-ext merge`).",
        ),
    )


def check_modules(policy: Any, name: str) -> None:
    """
    Raise a `ValueError` for a policy's adapters on embeddings or LM head, since log-probs are computed without these
    adapters. `name` is what the message calls the adapter.
    """
    base = base_model_of(policy)
    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            raise ValueError(
                f"`{name}` adapts the embeddings or the LM head, but log-probs are computed with the base's. Leave "
                "these out of target_modules, modules_to_save and trainable_token_indices, or merge that adapter "
                "first (`trl-ext merge`) and train a new one."
            )


def check_head(folder: str, revision: str | None = None) -> None:
    """Raise a `ValueError` if an adapter was saved without a `score` head: loading it would make a random one."""
    if not any(key.startswith(HEAD) for key in peft.load_peft_weights(folder, device="cpu", revision=revision)):
        raise ValueError(f"{folder} has no `score` head: give the adapter of a sequence classifier.")


def prepare_peft_model(model: Any, shares_base: bool) -> None:
    """
    Make the adapter `default` of a user's PeftModel trainable; raise a `ValueError` if it cannot be trained here.
    `shares_base` says whether the critic is an adapter on the same base.
    """
    check_config(model.peft_config[POLICY], "model.peft_config['default']", shares_base)
    is_merged = any(isinstance(layer, BaseTunerLayer) and layer.merged for layer in model.modules())
    model.peft_config[POLICY].inference_mode = False  # as PEFT sets it without `is_trainable=True`
    model.set_adapter(POLICY)
    taken = [name for name in model.peft_config if name in (REFERENCE, CRITIC) or name.startswith("reward_")]
    base = [n for n, p in model.named_parameters() if p.requires_grad and f".{POLICY}" not in n]
    refuse(
        (is_merged, "`model` has its adapter merged into the base. Call `model.unmerge_adapter()` first."),
        (taken, f"`model` has the adapters {taken}, whose names the trainer uses itself. Load it again without them."),
        (
            base,
            f"`model` trains weights outside its adapter, such as {base[:1]}, which the reference shares: freeze "
            "them.",
        ),
    )


# ---- Adding them ----


def _add(policy: Any, name: str, config: peft.LoraConfig) -> None:
    config.task_type = policy.peft_config[POLICY].task_type  # else PEFT looks for a head to train
    config.modules_to_save = None  # the head is ours
    # PEFT sets the base's name when it wraps or saves a model, but not when it adds an adapter
    config.base_model_name_or_path = _name_of_base(policy)
    policy.add_adapter(name, config)
    check_modules(policy, name)
    dtype = next(p.dtype for n, p in policy.named_parameters() if POLICY in n.split("."))
    for parameter_name, parameter in policy.named_parameters():
        if name in parameter_name.split("."):
            parameter.data = parameter.data.to(dtype)


def _name_of_base(policy: Any) -> str | None:
    return policy.peft_config[POLICY].base_model_name_or_path or base_model_of(policy).name_or_path or None


def add_critic(policy: Any, config: peft.LoraConfig | None) -> None:
    """
    Add the critic's adapter to the policy's base; if `config` is None, copy the settings of the policy's adapter.
    """
    if config is None:
        config = copy.deepcopy(policy.peft_config[POLICY])
        config.init_lora_weights = True
    else:
        config = copy.deepcopy(config)  # PEFT writes into it
        check_config(config, "critic_peft_config")
    config.inference_mode = False
    _add(policy, CRITIC, config)


def add_saved(policy: Any, name: str, folder: str) -> nn.Linear:
    """
    Load the classifier's adapter in `folder` as the policy's adapter `name`; return the classifier's head. Adapter and
    head are frozen unless `name` is the critic's.
    """
    check_head(folder)
    config = peft.PeftConfig.from_pretrained(folder)
    check_config(config, folder)
    config.inference_mode = name != CRITIC
    if name != CRITIC:
        config.lora_dropout = 0.0
    _add(policy, name, config)
    weights = load_adapter(policy, name, folder)
    head = nn.Linear(weights["weight"].shape[1], len(weights["weight"]), bias="bias" in weights)
    head.load_state_dict(weights)
    return head.requires_grad_(name == CRITIC).to(torch.float32 if name == CRITIC else base_model_of(policy).dtype)


def copy_adapter(policy: Any, source: str, target: str) -> bool:
    """
    Copy the policy's adapter `source` to its adapter `target` if shapes and scalings (α ÷ rank) are equal; return
    whether it was copied.
    """
    # `save_embedding_layers="auto"` would ask the hub for the size of the base's vocabulary
    a = peft.get_peft_model_state_dict(policy, adapter_name=source, save_embedding_layers=False)
    b = peft.get_peft_model_state_dict(policy, adapter_name=target, save_embedding_layers=False)
    layers: list[Any] = [layer for layer in policy.modules() if isinstance(layer, BaseTunerLayer)]
    scalings = [[layer.scaling.get(name) for layer in layers] for name in (source, target)]
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (a, b)]
    if scalings[0] != scalings[1] or shapes[0] != shapes[1]:
        return False
    peft.set_peft_model_state_dict(policy, a, adapter_name=target)
    return True


# ---- Loading and saving them ----


def load_adapter(policy: Any, name: str, folder: str) -> dict[str, Tensor]:
    """
    Load the weights in `folder` into the policy's adapter `name`, without freezing it.

    Return the weights of the score head in `folder`, as `weight` and, if there is one, `bias`; {} if there is no head.
    """
    weights = peft.load_peft_weights(folder, device="cpu")
    head = {key.removeprefix(HEAD): weights.pop(key) for key in list(weights) if key.startswith(HEAD)}
    check_loaded(peft.set_peft_model_state_dict(policy, weights, adapter_name=name), name, folder)
    return head


def check_loaded(result: Any, name: str, path: str) -> None:
    """
    Raise a `ValueError` if the saved adapter lacked weights of adapter `name`, or held weights that PEFT did not load.
    `result` is what PEFT returned when it loaded them; `path`, the folder or hub name they are from, is for the
    message.
    """
    missing = [key for key in result.missing_keys if name in key.split(".")]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"The adapter in {path} does not fit the model: missing {missing[:3] or 'none'}, unexpected "
            f"{result.unexpected_keys[:3] or 'none'}. Use the configuration and the base that it was trained with."
        )


@contextmanager
def saving_policy_adapter_only(policy: Any) -> Iterator[None]:
    """Make PEFT save only the policy's adapter within the `with` block, not those of critic, reference or rewards."""
    if not hasattr(policy, "peft_config"):
        yield
        return
    policy.save_pretrained = functools.partial(policy.save_pretrained, selected_adapters=[POLICY])
    try:
        yield
    finally:
        del policy.save_pretrained


def without_base(is_needed: bool) -> AbstractContextManager:
    """
    Return a context in which accelerate leaves the frozen base out of an FSDP checkpoint, if `is_needed`.

    By itself accelerate leaves it out only for a PeftModel.
    """
    return temporarily(fsdp_utils, is_peft_model=lambda model: True) if is_needed else nullcontext()


# ---- The base that they fit ----


def adapter_facts(policy: Any) -> dict[str, Any]:
    """
    Return the settings of the policy's adapters, by keys such as "adapter default r". If there is a reference adapter,
    the key "reference adapter's weights" has a hash of its weights.

    A run that resumes compares them with the checkpoint's: the hash, rank, α and modules must be the same, other
    settings are printed.
    """
    # These settings tell where an adapter came from, or are set by PEFT while the adapter is used
    left_out = ("base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version")
    facts: dict[str, Any] = {}
    for name, config in policy.peft_config.items():
        settings = {key: value for key, value in config.to_dict().items() if key not in left_out}
        # Sorted, since sets have no order
        facts |= {f"adapter {name} {key}": sorted(v) if isinstance(v, set) else v for key, v in settings.items()}
    if REFERENCE in policy.peft_config:
        reference = peft.get_peft_model_state_dict(policy, adapter_name=REFERENCE)
        facts["reference adapter's weights"] = f"xxh3:{hash_of(reference)}"
    return facts


def quantization_of(model: Any) -> str:
    """Return how a model's base is quantised, such as "bitsandbytes nf4"; "none" if it is not."""
    quantization = getattr(base_model_of(model).config, "quantization_config", None)
    settings = quantization if isinstance(quantization, dict) else getattr(quantization, "to_dict", dict)()
    kind = settings.get("quant_method", "none")
    return f"{getattr(kind, 'value', kind)} {settings.get('bnb_4bit_quant_type', '')}".strip()


def base_fingerprint(model: Any) -> dict[str, str]:
    """Return a dict that identifies a model's base: a hash of its backbone's `weights`, and its `quantization`."""
    return {"weights": weights_hash(base_model_of(model).base_model), "quantization": quantization_of(model)}


def save_base_fingerprint(
    model: Any, output_dir: str | Path, path: str | None = None, revision: str | None = None
) -> None:
    """
    Write `trl_ext_base.json` beside a LoRA adapter, a file that identifies the base that the adapter was trained on.

    `PPOTrainer` reads the file to check that its policy has the same base (`share_reward_base`). Call this on every
    process.

    Args:
        model: the model with the adapter.
        output_dir: folder of the adapter.
        path: folder or hub name that the base was loaded from. Two bases with the same hub name and commit are the
            same; otherwise their weights are compared.
        revision: revision of the base on the hub.
    """
    fingerprint = {"base": hub_identity(path, revision), **base_fingerprint(model)}
    if int(os.environ.get("RANK", "0")) == 0:
        (Path(output_dir) / FINGERPRINT).write_text(json.dumps(fingerprint, indent=2))


def recorded_base(folder: str) -> dict[str, str | None]:
    """
    Return what [`save_base_fingerprint`] wrote beside an adapter; {} if it wrote nothing.

    The keys are `base`, as [`hub_identity`] returns it, and `weights` and `quantization`, as [`base_fingerprint`]
    returns them.
    """
    record = Path(folder) / FINGERPRINT
    return json.loads(record.read_text()) if record.is_file() else {}


def check_same_base(policy: Any, folder: str, hub_base: str | None) -> None:
    """
    Raise a `ValueError` if the adapter in `folder` was trained on another base than the policy's.

    If no fingerprint lies beside the adapter, the bases are compared by name. Every process must call this, since
    ZeRO-3 gathers the weights for a fingerprint. `hub_base` is the policy's base as [`hub_identity`] returns it.
    """
    recorded = recorded_base(folder)
    if not recorded:
        theirs = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
        ours = _name_of_base(policy)
        is_same = theirs is not None and ours is not None and os.path.realpath(theirs) == os.path.realpath(ours)
        why = (
            f"the adapter names the base {theirs or '(none)'}, the policy's base is {ours or 'unnamed'}, and no "
            "fingerprint lies beside the adapter. If the bases have the same weights, write a fingerprint by "
            "`trl_ext.models.save_base_fingerprint`"
        )
    elif recorded["quantization"] != (ours := quantization_of(policy)):
        is_same = False
        why = f"the bases differ in quantisation, {recorded['quantization']} and {ours}"
    else:
        is_same = hub_base is not None and recorded.get("base") == hub_base
        is_same = is_same or recorded["weights"] == base_fingerprint(policy)["weights"]
        why = "the bases differ in weights"
    if not is_same:
        raise ValueError(
            f"{folder} cannot be an adapter on the policy's base, since it was trained on another base: {why}. A "
            "reward model may load its own base (`share_reward_base=False`). For a critic give a `value_model` that "
            "was trained on the policy's base, or none."
        )
