"""Build reward functions from the entries of a configuration file."""

import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..runs.package_files import did_you_mean, find
from ..upstream.names import get_callable_name
from .member import distinct

_MEMBERS = ("reward", "members", "judge")  # arguments that hold reward functions
_FACTORIES = ("get_repetition_penalty_reward", "get_soft_overlong_punishment")  # TRL's, which return a function


def load_reward(path: str) -> Callable:
    """
    Import a reward function from `path/to/file.py:function` or `package.module.function`.

    A file is looked for in the working directory, then among the files that ship with the package, such as
    `recipes/demo/world.py`. If `package.module` is not installed, the file `package/module.py` is looked for.

    Raises:
        ImportError: there is no such file, module or function.

    Examples:
        >>> from trl_ext.rewards import load_reward
        >>> load_reward("trl.rewards.think_format_reward").__name__
        'think_format_reward'
    """
    return load_object(path, "reward function")


def load_object(path: str, what: str) -> Any:
    """
    Import the object that `path/to/file.py:name` or `package.module.name` names.

    A file is looked for where [`load_reward`] looks for it.

    Args:
        path: the file or module, and the object's name in it.
        what: name of the kind of object for the error message, such as `"reward function"`.

    Raises:
        ImportError: there is no such file, module or name.
    """
    place, _, name = path.rpartition(":" if ".py:" in path else ".")
    try:
        return getattr(_module(place), name)
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise ImportError(
            f"{what} {path!r} cannot be imported: {error}. Write `path/to/file.py:name` or `package.module.name`; the "
            f"working directory is {Path.cwd()}"
        ) from error


def load_rewards(
    entries: Sequence[str | dict[str, Any]] | None, policy_tokenizer: Any = None
) -> tuple[list[Callable], list[float | None]]:
    """
    Build the reward functions that a configuration file lists under `rewards:`.

    An entry is one of these:

    - a path for [`load_reward`]
    - `{Name: {argument: value, …}}`, where `Name` is a class of `trl_ext.rewards`, or one of TRL's functions that
      return a reward function. `weight: number` may stand beside `Name`.

    The value of an argument may hold further entries `{Name: …}`; those of `reward`, `members` and `judge` may also
    hold paths.

    Args:
        entries: the list under `rewards:`.
        policy_tokenizer: the policy's tokenizer, given to reward models whose entry has no `policy_tokenizer`.

    Returns:
        Two lists: the reward functions, and the weight of each; None for an entry without `weight`.

    Raises:
        ImportError: there is no such file, module or function.
        ValueError: a name or argument is unknown, or a reward refuses a value.

    Examples:
        >>> from trl_ext.rewards import load_rewards
        >>> functions, weights = load_rewards([{"PatternReward": {"required": ["please"]}, "weight": 0.5}])
        >>> functions[0](prompts=["Ask for tea."], completions=["Tea, please!"]), weights
        ([1.0], [0.5])
    """
    functions = []
    weights = []
    for place, entry in enumerate(entries or [], 1):
        try:
            reward, weight = _parts(entry)
            functions.append(_built(reward, policy_tokenizer))
        except (TypeError, ValueError) as error:
            raise ValueError(f"`rewards` entry {place}: {error}") from error
        weights.append(weight)
    for function, name in zip(functions, distinct([get_callable_name(f) for f in functions]), strict=True):
        if type(function).__name__ in _known():  # our rewards also log metrics by this name
            function.__name__ = name
    return functions, weights


def joined_weights(reward_weights: list[float] | None, weights: Sequence[float | None]) -> list[float] | None:
    """
    Return one weight for each reward.

    Args:
        reward_weights: the setting of this name; None if it is not set. It is returned if no entry has a weight.
        weights: the weight in each entry of `rewards`; None, for an entry without one, becomes 1.

    Raises:
        ValueError: `reward_weights` and a weight in an entry are both given.
    """
    if all(weight is None for weight in weights):
        return reward_weights
    if reward_weights is not None:
        raise ValueError(
            f"`reward_weights` {reward_weights} and `weight` in an entry of `rewards` are both given: remove one"
        )
    return [1.0 if weight is None else float(weight) for weight in weights]


def _known() -> dict[str, Callable]:
    """Map each name that an entry may have to a class of ours, or to TRL's function that makes a reward."""
    import trl.rewards

    import trl_ext.rewards as package

    classes = {name: getattr(package, name) for name in package.__all__ if name.endswith(("Reward", "Watch"))}
    return classes | {name: getattr(trl.rewards, name) for name in _FACTORIES}


def _parts(entry: Any) -> tuple[Any, float | None]:
    """Return two values: an entry of the configuration without its weight, and the weight, None without one."""
    if not isinstance(entry, dict):
        return entry, None
    weight = entry.get("weight")
    return {k: v for k, v in entry.items() if k != "weight"}, None if weight is None else float(weight)


def _is_entry(argument: Any, value: Any) -> bool:
    """Return whether an argument's value is itself an entry for a reward."""
    if isinstance(value, str):  # other texts may be folders or hub names for the class
        is_path = ".py:" in value or ("." in value and "/" not in value and not Path(value).exists())
        return argument in _MEMBERS and is_path
    if not isinstance(value, dict):
        return False
    return argument in _MEMBERS or (len(value) == 1 and next(iter(value)) in _known())


def _mapped(argument: Any, value: Any, build: Callable[[Any], Any]) -> Any:
    """Return an argument's value with `build(entry)` in place of each reward entry within it."""
    if _is_entry(argument, value):
        return build(value)
    if isinstance(value, dict):  # a key within, such as `judge`, is not an argument of the class
        return {key: _mapped(None, inner, build) for key, inner in value.items()}
    return [_mapped(argument, inner, build) for inner in value] if isinstance(value, list) else value


def name_and_arguments(entry: Any, known: Mapping[str, Any], what: str, short: str) -> tuple[str, dict[str, Any]]:
    """
    Return the name and the arguments of an entry `{Name: {argument: value, …}}`.

    Raises a `ValueError` if the entry has another form, or if its name is not in `known`.

    Args:
        known: the names that exist, as keys.
        what: what messages call the entry, such as "reward".
        short: what else such an entry may be, for the message, such as "a path to a function".
    """
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ValueError(f"a {what} must be {short}, or one `Name: {{argument: value}}`, got {entry!r}")
    ((name, arguments),) = entry.items()
    if name not in known:
        nearest = did_you_mean(str(name), known) or f"; there are {', '.join(sorted(known))}"
        raise ValueError(f"unknown {what} {name!r}{nearest}")
    if not isinstance(arguments or {}, dict):
        raise ValueError(f"the arguments of {name} must be `argument: value`, got {arguments!r}")
    return name, arguments or {}


def _built(entry: Any, policy_tokenizer: Any) -> Any:
    """Build the reward function of an entry without its weight, and of the entries within it."""
    if isinstance(entry, str):
        return load_reward(entry)
    name, arguments = name_and_arguments(entry, known := _known(), "reward", "a path to a function")
    built = {k: _mapped(k, value, lambda inner: _built(inner, policy_tokenizer)) for k, value in arguments.items()}
    if policy_tokenizer is not None and name == "ModelReward":
        built = {"policy_tokenizer": policy_tokenizer, **built}
    if policy_tokenizer is not None and name == "EnsembleReward":
        built["model_kwargs"] = {"policy_tokenizer": policy_tokenizer, **(built.get("model_kwargs") or {})}
    function = known[name](**built)
    if name in _FACTORIES:  # TRL's closures all have one source
        function.identity = json.dumps(entry, sort_keys=True)
    return function


def _module(place: str) -> ModuleType:
    """Import a file, or a module by its name; if it is not installed, the file of that name."""
    if place.endswith(".py"):
        return _module_of_file(find(place))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        file = find(Path(*place.split(".")).with_suffix(".py"))
        if not file.is_file():
            raise
        return _module_of_file(file)


def _module_of_file(path: Path) -> ModuleType:
    """Execute a file as a module, once for all objects in it; again only if the file has changed."""
    digest = hashlib.blake2b(bytes(path.resolve()) + path.read_bytes(), digest_size=8).hexdigest()
    name = f"reward_file_{path.stem}_{digest}"  # files with one name pickle, too
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
