"""A `TrlParser` that refuses what it does not know."""

import difflib
import sys
from collections.abc import Hashable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser


class StrictTrlParser(TrlParser):
    """[`trl.TrlParser`] whose mistakes are one-line errors with exit status 2.

    TRL reads the YAML file given by `--config` into argparse's defaults, which bypasses argparse's checks of types
    and choices. Here every value of the file is converted to its field's type or refused; an unknown key or flag is
    refused with the nearest valid names; flags cannot be abbreviated. The command line overrides the file. `env:` in
    the file sets environment variables, as in TRL.

    Args:
        dataclass_types: dataclass, or dataclasses, whose fields are the arguments.
        **kwargs: passed to `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(dataclass_types, **kwargs)
        # Not `field.type`: HfArgumentParser overwrites it with a simplified type.
        self._hints: dict[str, Any] = {}
        for dataclass_type in self.dataclass_types:
            hints = get_type_hints(dataclass_type)
            self._hints.update({field.name: hints[field.name] for field in fields(dataclass_type) if field.init})
        for action in self._actions:
            options = _options(self._hints.get(action.dest))
            hint = next((option for option in options if get_origin(option) is tuple), None)
            if hint is not None:  # HfArgumentParser would call tuple("12"), which is ("1", "2")
                action.type, action.nargs = get_args(hint)[0], len(get_args(hint))
            elif str in options and bool in options:  # HfArgumentParser would turn even the default "no" into False
                action.type = str

    def parse_args_and_config(self, args: Iterable[str] | None = None, *rest: Any, **kwargs: Any) -> tuple[Any, ...]:
        args = list(args) if args is not None else sys.argv[1:]
        # TRL only understands `--config PATH`.
        args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
        if args.count("--config") > 1:
            self.error("--config was given more than once; one file is read, so merge the files")
        if "--config" in args:
            index = args.index("--config") + 1
            if index == len(args):
                self.error("--config needs the path of a YAML file after it")
            self._check_file(Path(args[index]))
        try:
            return super().parse_args_and_config(args, *rest, **kwargs)
        except ValueError as error:  # a dataclass' own __post_init__ check
            where = f"; the working directory is {Path.cwd()}, give an absolute path or start from the right one"
            self.error(f"{error}{where if 'existing deepspeed config' in str(error) else ''}")
        except ImportError as error:  # of a package that a setting needs
            what = str(error)
            if "deepspeed" in what.lower():
                what = "DeepSpeed is asked for, but not installed: `pip install 'trl-ext[deepspeed]'`"
            self.error(what)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        actions = {action.dest: action for action in self._actions}
        for key, value in kwargs.items():
            if key not in self._hints:
                self.error(f"unknown key {key!r} in the configuration file{self._nearest(key, self._hints)}")
            try:
                value = _convert(value, self._hints[key])
                choices = actions[key].choices
                if choices is not None and value is not None and value not in choices:
                    raise ValueError(f"one of {', '.join(map(repr, choices))}")
            except ValueError as error:
                self.error(f"{key!r} in the configuration file must be {error}, got {value!r}")
            kwargs[key] = value
        return super().set_defaults_with_config(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, remaining = super().parse_known_args(args, namespace)
        unknown = [arg.split("=", 1)[0] for arg in remaining if arg.startswith("-")]
        if unknown:
            # Every option also exists with hyphens; one spelling is enough in a suggestion.
            options = [option for option in self._option_string_actions if "-" not in option[2:]]
            name = "--" + unknown[0].lstrip("-").replace("-", "_")
            self.error(f"unknown flag {unknown[0]!r}{self._nearest(name, [*options, '--config'])}")
        if remaining:
            self.error(f"stray value {remaining[0]!r}: a flag before it takes fewer values; quote a value with spaces")
        return namespace, remaining

    def error(self, message: str) -> NoReturn:
        # In one line, and without argparse's usage, which is some 300 flags long and hides the message.
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)

    def _check_file(self, path: Path) -> None:
        """Find what TRL's own reading would miss (repeated keys) or answer with a traceback."""
        try:
            config = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoRepeatedKeys)
        except OSError as error:
            self.error(f"--config {path}: cannot be read ({error.strerror}); the working directory is {Path.cwd()}")
        except yaml.YAMLError as error:
            self.error(f"--config {path}: not valid YAML: {error}")
        if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
            got = f"the keys {list(config)}" if isinstance(config, dict) else type(config).__name__
            self.error(f"--config {path}: must be a mapping of argument names to values, got {got}")
        if not isinstance(config.get("env", {}), dict):
            self.error(f"--config {path}: 'env' must be a mapping of variables to values, got {config['env']!r}")

    @staticmethod
    def _nearest(name: str, names: Iterable[str]) -> str:
        nearest = difflib.get_close_matches(name, list(names))
        return f"; did you mean {' or '.join(nearest)}?" if nearest else "; --help lists the valid ones"


class _NoRepeatedKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [(key.value, key.start_mark) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, (key, mark) in enumerate(keys):
            if key in (earlier for earlier, _ in keys[:index]):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} given twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _convert(value: Any, hint: Any) -> Any:
    """Return a YAML value as the type `hint`; raise a `ValueError` that says what `hint` takes."""
    options = _options(hint)
    if any(isinstance(option, type) and issubclass(option, Enum) for option in options):
        options = tuple(option for option in options if option is not str)  # `Enum | str` means the enum's values
    for option in options:
        try:
            return _convert_to(value, option)
        except (TypeError, ValueError):
            continue
    quote = " (quote a string that YAML reads as something else)" if str in options and value is not None else ""
    raise ValueError(" or ".join(map(_describe, options)) + quote)


def _convert_to(value: Any, kind: Any) -> Any:
    origin = get_origin(kind) or kind
    choices = _choices(kind)
    if choices:
        if isinstance(value, bool) and value not in choices:  # a bare `no` is False in YAML
            value = next((c for c in choices if isinstance(c, str) and yaml.safe_load(c) is value), value)
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
    elif kind is Any:
        return value
    elif origin is float and not isinstance(value, bool):
        return float(value)  # YAML reads 1e-5 as a string: its floats need a dot
    elif origin is int and not isinstance(value, bool) and float(value).is_integer():
        return int(float(value)) if isinstance(value, str) else int(value)
    elif origin is list and isinstance(value, list):
        return [_convert(item, get_args(kind)[0]) if get_args(kind) else item for item in value]
    elif origin is tuple and isinstance(value, list):
        return tuple(_convert(item, hint) for item, hint in zip(value, get_args(kind), strict=True))
    elif isinstance(value, (dict, origin) if is_dataclass(kind) else origin) and origin not in (float, int):
        return value
    raise ValueError


def _choices(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(member.value for member in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()


def _describe(kind: Any) -> str:
    if _choices(kind):
        return f"one of {', '.join(map(repr, _choices(kind)))}"
    if kind is NoneType:
        return "null"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
