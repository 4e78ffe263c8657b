"""A `TrlParser` that refuses what it does not know."""

import argparse
import os
import re
import sys
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser

from .nearest import did_you_mean
from .redaction import redacted

_WRONG_INPUT = (ValueError, OSError, ImportError, yaml.YAMLError, argparse.ArgumentError)


class StrictTrlParser(TrlParser):
    """[`trl.TrlParser`] whose mistakes are one-line errors with exit status 2.

    A `key: value` of the YAML file that `--config` names stands for the flag `--key=value`, so argparse checks its
    type and choices; the command line overrides it. Unknown keys and flags are refused with the nearest valid names.
    Flags cannot be abbreviated. `env:` in the file sets environment variables, as in TRL.

    Args:
        dataclass_types: dataclass, or dataclasses, whose fields are the arguments.
        without_arguments: what to print if there is no argument at all; if unset, the fields' defaults are taken.
        **kwargs: passed to `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Any = None, without_arguments: str | None = None, **kwargs: Any) -> None:
        super().__init__(dataclass_types, **{"allow_abbrev": False, **kwargs})
        self.without_arguments = without_arguments
        self._negative_number_matcher = re.compile(r"-[\d.]+(e[+-]?\d+)?$", re.I)  # argparse takes -1e-3 for a flag
        # Not `field.type`: HfArgumentParser overwrites it with a simplified type
        hints = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        self._fields: dict[str, tuple[argparse.Action, tuple]] = {}  # the types that each may have
        for action in reversed(self._actions):  # --x stands before --no_x
            if (hint := hints.get(action.dest)) is not None:
                types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
                self._fields[action.dest] = action, types
                if pair := next((kind for kind in types if get_origin(kind) is tuple), None):
                    action.type, action.nargs = get_args(pair)[0], len(get_args(pair))  # else tuple("12"): ("1", "2")
                elif str in types and bool in types:  # HfArgumentParser would turn even the default "no" into False
                    action.type = str

    def parse_args_and_config(self, args: Iterable[str] | None = None) -> tuple[Any, ...]:
        args = list(sys.argv[1:] if args is None else args)
        if not args and self.without_arguments is not None:
            self.exit(2, self.without_arguments)
        files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        files.add_argument("--config", action="append", default=[])
        with self.one_line_errors():
            given, args = files.parse_known_args(args)
            if len(given.config) > 1:
                raise ValueError("--config was given more than once; one file is read, so merge the files")
            flags = [flag for path in given.config for flag in self._flags_of(path)]
            return self.parse_args_into_dataclasses([*flags, *args], look_for_args_file=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, remaining = super().parse_known_args(args, namespace)
        for flag in (arg.split("=", 1)[0] for arg in remaining if arg.startswith("-")):
            # Every option also exists with hyphens; one spelling is enough in a suggestion
            options = [option for option in self._option_string_actions if "-" not in option[2:]]
            nearest = did_you_mean("--" + flag.lstrip("-").replace("-", "_"), [*options, "--config"])
            self.error(f"unknown flag {flag!r}{nearest or '; --help lists the valid ones'}")
        if remaining:
            self.error(f"stray value {remaining[0]!r}: a flag before it takes fewer values; quote a value with spaces")
        return namespace, remaining

    @contextmanager
    def one_line_errors(self, *kinds: type[Exception]) -> Iterator[None]:
        """End the program with a one-line error for what `kinds` name; by default, for what a wrong input raises."""
        kinds = kinds or _WRONG_INPUT
        try:
            yield
        except kinds as error:
            what = str(error)
            if isinstance(error, ImportError) and "deepspeed" in what.lower():
                what = "DeepSpeed is asked for, but not installed: `pip install 'trl-ext[deepspeed]'`"
            elif "existing deepspeed config" in what:
                what += f"; the working directory is {Path.cwd()}, give an absolute path or start from the right one"
            self.error(what)

    def error(self, message: str) -> NoReturn:
        # In one line, and without argparse's usage, which is some 300 flags long and hides the message
        print(f"{self.prog}: error: {redacted(' '.join(message.split()))}", file=sys.stderr)
        sys.exit(2)

    def _flags_of(self, path: str) -> list[str]:
        """The file as flags; what no flag can say (null, a mapping, `on`) becomes its field's default instead."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"--config {path}: there is no such file; the working directory is {Path.cwd()}")
        with open(path, encoding="utf-8") as file:
            loader = _NoRepeatedKeys(file)
            root = loader.get_single_node()
            config = loader.construct_document(root) if root else None
        if not isinstance(config, dict) or not isinstance(config.get("env", {}), dict):
            raise ValueError(f"{path} must be a mapping of names to values, and so must `env` in it")
        os.environ.update({name: str(value) for name, value in config.pop("env", {}).items()})
        lists, scalars = [], []
        for key, node in ((key.value, node) for key, node in root.value if key.value != "env"):
            if key not in self._fields:
                nearest = did_you_mean(key, self._fields) or "; --help lists the valid ones"
                raise ValueError(f"unknown key {key!r} in the configuration file{nearest}")
            value, (action, types) = config[key], self._fields[key]
            if isinstance(value, list) and value and action.nargs not in (None, "?"):
                lists += [f"--{key}", *(str(item.value) for item in node.value)]
            elif type(value) in {NoneType, bool, dict, list} & {get_origin(kind) or kind for kind in types}:
                self.set_defaults_with_config(**{key: value})
            elif value is not None and isinstance(node, yaml.ScalarNode):
                # As it is written: YAML takes `no`, one of a field's strings, for false, and 1e-5 for a string
                scalars.append(f"--{key}={node.value}")
            else:
                raise ValueError(f"{key!r} in the configuration file must not be {value!r}")
        return [*lists, *scalars]  # in this order no list takes a value of the command line for its own


class _NoRepeatedKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [(key.value, key.start_mark) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, (key, mark) in enumerate(keys):
            if key in (earlier for earlier, _ in keys[:index]):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} given twice", problem_mark=mark)
        return super().construct_mapping(node, deep)
