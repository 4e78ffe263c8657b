"""Check that a model exists, in a folder or on the hub, before anything is loaded."""

import json
import os
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open

from ..runs import near_path

_CONFIGS = ("config.json", "adapter_config.json")
_TOKENIZERS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")


def check_model(
    setting: str,
    name: str | os.PathLike[str] | None,
    revision: str | None = None,
    *,
    tokenizer: bool = False,
    weights: bool = True,
) -> None:
    """
    Check that a model exists, with at most one request to the hub. Nothing is loaded.

    Args:
        setting: name of the setting, for error messages.
        name: folder or hub name of the model; None for no model.
        revision: revision of a hub model.
        tokenizer: whether a folder must hold a tokenizer, too.
        weights: whether a folder must hold weights, too.

    Raises:
        FileNotFoundError: the model, or a part of it, is missing; the message has the setting, its value, and what to
            do.
        ValueError: a file is broken.
    """
    if name is None:
        return
    path, what = Path(name).expanduser(), f"`{setting}` {name}"
    if path.is_dir():
        has_tokenizer = any(file for pattern in _TOKENIZERS for file in path.glob(pattern))
        is_adapter = _check_folder(path, what, weights, tokenizer and not has_tokenizer)
        if tokenizer and not (has_tokenizer or is_adapter):  # an adapter may use its base's tokenizer
            raise FileNotFoundError(f"{what} has no tokenizer: save one there with `tokenizer.save_pretrained`")
    elif path.exists():
        raise FileNotFoundError(f"{what} is a file: give the folder that holds it")
    elif not is_cached(str(name), revision):
        _ask_hub(str(name), what, revision)


def is_cached(name: str, revision: str | None = None) -> bool:
    """Return whether the hub's cache has the configuration of this model."""
    try:
        return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in _CONFIGS)
    except HFValidationError:
        return False


def _check_folder(path: Path, what: str, weights: bool, base_tokenizer: bool) -> bool:
    """Check a model's folder and, if it holds an adapter, the adapter's base; return whether it holds an adapter."""
    found = [path / file for file in _CONFIGS if (path / file).is_file()]
    if not found:
        below = sorted({str(file.parent) for name in _CONFIGS for file in path.glob(f"*/{name}")})
        hint = f"; did you mean {' or '.join(below[:3])}?" if below else ""
        raise FileNotFoundError(f"{what} is a folder without a model: it has no config.json{hint}")
    for file in found:
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{what}: {file.name} is not valid JSON ({error}): save the model again") from error
        if file.name == "adapter_config.json" and len(found) == 1:
            base = config.get("base_model_name_or_path")
            setting = f"base_model_name_or_path` of the adapter `{path}"
            check_model(setting, base, config.get("revision"), tokenizer=base_tokenizer, weights=weights)
    if weights and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise FileNotFoundError(f"{what} has no weights (no .safetensors and no .bin file): save the model there")
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, "np"):  # reads the header
                pass
        except SafetensorError as error:
            raise ValueError(f"{what}: {file.name} is damaged ({error}): copy or save it again") from error
    return found[0].name == "adapter_config.json"


def _ask_hub(name: str, what: str, revision: str | None) -> None:
    is_path = name.startswith((".", "~", os.sep)) or name.count("/") != 1
    here = f"there is no such folder in {Path.cwd()}" if not os.path.isabs(name) else "there is no such folder"
    here += near_path(name)
    try:
        HfApi().model_info(name, revision=revision, timeout=5)
    except HFValidationError as error:
        raise FileNotFoundError(f"{what}: {here}") from error
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"{what} is gated: ask for access at https://huggingface.co/{name}, and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"{what} has no revision {revision!r}: give one of its branches, tags or commits"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{what}: {here}, and no such model on the hub (for a private model log in with `hf auth login`)"
        ) from error
    except Exception as error:  # httpx's, requests' or sockets', by the version of the hub's client
        if is_path and not name.replace("-", "").replace(".", "").replace("_", "").isalnum():
            raise FileNotFoundError(f"{what}: {here}") from error
        is_off = isinstance(error, OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set, so the hub cannot be asked" if is_off else "the hub cannot be reached"
        raise FileNotFoundError(f"{what}: {here}; it is not in the hub's cache, and {why}") from error
