"""Build reward functions from the entries of a configuration file."""

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from ..runs.nearest import did_you_mean
from ..runs.shipped import find
from ..upstream.names import get_callable_name
from .checks import check_finite
from .ensemble import check_model_kwargs
from .member import distinct

_MEMBERS = ("reward", "members", "judge")  # arguments that hold reward functions
_FACTORIES = ("get_repetition_penalty_reward", "get_soft_overlong_punishment")  # TRL's, which return a function


def load_reward(path: str) -> Callable:
    """
    Import a reward function from `path/to/file.py:function` or `package.module.function`.

    A path is looked for in the working directory, then among the files that ship with the package, such as
    `recipes/demo/world.py`. If `package.module` is not installed, the file `package/module.py` is looked for.

    Raises:
        ImportError: there is no such file, module or function.
        ValueError: `path` names a class, or something that cannot be called.

    Examples:
        >>> from trl_ext.rewards import load_reward
        >>> load_reward("trl.rewards.think_format_reward").__name__
        'think_format_reward'
    """
    function = load_object(path, "reward function")
    if isinstance(function, type) or not callable(function):
        raise ValueError(
            f"reward function {path!r} is of type {type(function).__name__}; name a function or an instance"
        )
    return function


def load_object(path: str, what: str) -> Any:
    """
    Import the object that `path/to/file.py:name` or `package.module.name` names, found as by [`load_reward`].

    Args:
        path: the file or module, and the object's name in it.
        what: what the error message calls the object, such as `"reward function"`.

    Raises:
        ImportError: there is no such file, module or name.
    """
    place, _, name = path.rpartition(":" if ".py:" in path else ".")
    try:
        if not (place and name):
            raise ImportError("the path has no module or no name")
        return getattr(_module(place), name)
    except (ImportError, OSError, AttributeError) as error:
        raise ImportError(
            f"{what} {path!r} cannot be imported: {error}. Tried {name!r} of {place!r} from {Path.cwd()}; "
            "write `path/to/file.py:name`, or `package.module.name` of an installed package."
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
        ValueError: a name or argument is unknown: the message suggests the nearest one, and nothing has been built.
            Or a value is refused: the message says in which entry.

    Examples:
        >>> from trl_ext.rewards import load_rewards
        >>> functions, weights = load_rewards([{"PatternReward": {"required": ["please"]}, "weight": 0.5}])
        >>> functions[0](prompts=["Ask for tea."], completions=["Tea, please!"]), weights
        ([1.0], [0.5])
    """
    known, weights = _known(), check_rewards(entries)
    functions: list[Callable] = []
    for place, entry in enumerate(entries or []):
        entry = {k: v for k, v in entry.items() if k != "weight"} if isinstance(entry, dict) else entry
        functions.append(_built(entry, known, policy_tokenizer, f"`rewards` entry {place + 1}"))
    for function, name in zip(functions, distinct([get_callable_name(f) for f in functions]), strict=True):
        if type(function).__name__ in known:  # our rewards also log metrics by this name
            function.__name__ = name
    return functions, weights


def check_rewards(entries: Sequence[str | dict[str, Any]] | None, import_functions: bool = True) -> list[float | None]:
    """
    Check the entries for [`load_rewards`], as far as that is possible without building a reward.

    Args:
        entries: the list under `rewards:`.
        import_functions: whether to import the functions that are named by path.

    Returns:
        The weight of each entry; None for an entry without `weight`.

    Raises:
        ImportError, ValueError: see [`load_rewards`].
    """
    known = _known()
    weights: list[float | None] = []
    for place, entry in enumerate(entries or []):
        where, weight = f"`rewards` entry {place + 1}", None
        if isinstance(entry, dict) and "weight" in entry:
            entry = dict(entry)
            weight = entry.pop("weight")
            try:
                check_finite(weight=weight)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        _check(entry, known, where, import_functions)
        weights.append(weight)
    return weights


def joined_weights(reward_weights: list[float] | None, weights: Sequence[float | None]) -> list[float] | None:
    """
    Return one weight for each reward: the entries' `weights`, with 1 for None; or `reward_weights` if all are None.

    Raises:
        ValueError: `reward_weights` and a weight in an entry are both given.
    """
    if all(weight is None for weight in weights):
        return reward_weights
    if reward_weights is not None:
        raise ValueError(
            f"`reward_weights` {reward_weights} and `weight` in an entry of `rewards` are both given: drop one"
        )
    return [1.0 if weight is None else float(weight) for weight in weights]


def _known() -> dict[str, Callable]:
    """Map each name that an entry may have to our reward class, or to TRL's function that makes a reward function."""
    import trl.rewards

    import trl_ext.rewards as package

    classes = {name: getattr(package, name) for name in package.__all__ if name.endswith(("Reward", "Watch"))}
    return classes | {name: getattr(trl.rewards, name) for name in _FACTORIES}


def _check(entry: Any, known: dict[str, Callable], where: str, import_functions: bool) -> None:
    """
    Raise a `ValueError` for a mistake in an entry, or in an entry within it.

    With `import_functions`, also import the functions that the entries name by path.
    """
    if isinstance(entry, str):
        if import_functions:
            load_reward(entry)
        return
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ValueError(f"{where}: write a path to a function, or one `Name: {{argument: value}}`, got {entry!r}")
    ((name, arguments),) = entry.items()
    if name not in known:
        nearest = did_you_mean(str(name), known) or f"; there are {', '.join(sorted(known))}"
        raise ValueError(f"{where}: unknown reward {name!r}{nearest}")
    if not isinstance(arguments, (dict, type(None))):
        raise ValueError(f"{where}: the arguments of {name} must be a mapping of names to values, got {arguments!r}")
    parameters = dict(_parameters(known[name]))
    for argument, value in (arguments or {}).items():
        if argument not in parameters:
            nearest = did_you_mean(str(argument), parameters) or f"; it has {', '.join(parameters)}"
            if argument == "weight":
                nearest = f"; it stands beside `{name}:`, at the same indent"
            raise ValueError(f"{where}: {name} has no argument {argument!r}{nearest}")
        texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
        if texts and _is_number(parameters[argument].annotation):
            raise ValueError(
                f"{where}: {name}'s `{argument}` must be a number, got the text {texts[0]!r}{_as_yaml(texts[0])}"
            )
        for inner in _entries(argument, value, known):
            _check(inner, known, f"{where}, {name}", import_functions)
    if name == "EnsembleReward":
        try:
            check_model_kwargs((arguments or {}).get("model_kwargs"))
        except ValueError as error:
            raise ValueError(f"{where}: {name}: {error}") from error
    missing = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    if missing := [key for key in missing if key not in (arguments or {})]:
        raise ValueError(f"{where}: {name} needs {', '.join(f'`{key}`' for key in missing)}")


def _is_number(annotation: Any) -> bool:
    """Return whether a type annotation allows numbers, or lists of numbers, but no text."""
    parts = set(_types_in(annotation))
    return bool(parts & {int, float}) and not parts & {str, Any}


def _types_in(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        yield from _types_in(type(part) if get_origin(annotation) is Literal else part)
    yield annotation


def _as_yaml(text: str) -> str:
    """Return a hint if YAML reads a number as text (write `1.0e-5` in place of `1e-5`); "" if `text` is no number."""
    try:
        return f": write {float(text)!r}"
    except ValueError:
        return ""


def _parameters(built: Any) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield name and parameter of each argument of a class or function; with `**kwargs`, also of its base class."""
    unnamed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    for base in getattr(built, "__mro__", (built,)):
        if isinstance(base, type) and "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base).parameters
        yield from ((name, p) for name, p in parameters.items() if p.kind not in unnamed)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return


def _is_entry(argument: Any, value: Any, known: dict[str, Callable]) -> bool:
    """Return whether an argument's value is itself an entry for a reward."""
    if isinstance(value, str):  # other texts may be folders or hub names for the class
        is_path = ".py:" in value or ("." in value and "/" not in value and not Path(value).exists())
        return argument in _MEMBERS and is_path
    return isinstance(value, dict) and (argument in _MEMBERS or (len(value) == 1 and next(iter(value)) in known))


def _entries(argument: Any, value: Any, known: dict[str, Callable]) -> Iterator[Any]:
    """Yield the entries for rewards that the value of an argument holds."""
    if _is_entry(argument, value, known):
        yield value
    elif isinstance(value, dict):  # a key within, such as `judge`, is not an argument of the class
        for inner in value.values():
            yield from _entries(None, inner, known)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(argument, inner, known)


def _built(entry: Any, known: dict[str, Callable], policy_tokenizer: Any, where: str) -> Any:
    if isinstance(entry, str):
        return load_reward(entry)
    ((name, arguments),) = entry.items()

    def value_of(argument: Any, value: Any) -> Any:
        if _is_entry(argument, value, known):
            return _built(value, known, policy_tokenizer, f"{where}, {name}")
        if isinstance(value, dict):
            return {key: value_of(None, inner) for key, inner in value.items()}
        return [value_of(argument, inner) for inner in value] if isinstance(value, list) else value

    given = {argument: value_of(argument, value) for argument, value in (arguments or {}).items()}
    if policy_tokenizer is not None:
        if name == "ModelReward":
            given = {"policy_tokenizer": policy_tokenizer, **given}
        elif name == "EnsembleReward" and not all(map(callable, given["members"])):  # some are models by name
            given["model_kwargs"] = {"policy_tokenizer": policy_tokenizer, **(given.get("model_kwargs") or {})}
    try:
        function = known[name](**given)
    except (TypeError, ValueError, OSError, ImportError) as error:
        raise ValueError(f"{where}: {name}: {error}") from error
    if name in _FACTORIES:  # TRL's functions are not told apart by their names alone
        function.identity = json.dumps(entry, sort_keys=True)
    return function


def _module(place: str) -> ModuleType:
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
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
