"""Parse a script's YAML file and flags, and refuse keys and flags that the script does not have."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser

from ..runs import config_file, did_you_mean, redacted
from ..upstream.packages import NO_DEEPSPEED, check_packages, is_of_deepspeed
from .help import help_text, types_of

_WRONG_INPUT = (ValueError, OSError, ImportError, yaml.YAMLError, argparse.ArgumentError)


class StrictTrlParser(TrlParser):
    """Extend [`trl.TrlParser`]: a user's mistake gives a one-line error and exit status 2.

    A `key: value` in the YAML file that `--config` names is read as the flag `--key=value`, so argparse checks its
    type and choices; a flag on the command line overrides it. Unknown keys and flags are refused with the nearest
    valid names. Flags cannot be abbreviated. `env:` in the file sets environment variables, as in TRL.

    - `--help` describes the script's own flags, and lists the names of the inherited ones.
    - `--help all` describes all flags.
    - `--help WORD` describes the flags with that word in their names.

    Args:
        dataclass_types: dataclass, or dataclasses, whose fields are the arguments. A dataclass that takes seconds to
            import is better given by its name, `"trl_ext.PPOConfig"`; `--help` lists its inherited flags apart.
        without_arguments: text to print, before the program ends, if there is no argument at all. If it is None, all
            fields then have their defaults.
        check: function that checks the input. It is called with instances of the dataclasses that are not given by
            name, in their order. An error of wrong input that it raises becomes a one-line error, too. With a check,
            packages and logins that the settings need are checked as well.
        **kwargs: passed to `argparse.ArgumentParser`.
    """

    def __init__(
        self,
        dataclass_types: Any = None,
        without_arguments: str | None = None,
        check: Callable[..., None] | None = None,
        **kwargs: Any,
    ) -> None:
        several = isinstance(dataclass_types, Iterable) and not isinstance(dataclass_types, str)
        self._given = list(dataclass_types) if several else [dataclass_types] if dataclass_types else []
        kwargs.setdefault("prog", Path(sys.argv[0]).name)  # Python 3.14 would say `python -m trl_ext`
        self.without_arguments = without_arguments
        self._check = check
        kinds = [resolve_name(kind) if isinstance(kind, str) else kind for kind in self._given]
        super().__init__(kinds, **{"allow_abbrev": False, "description": without_arguments, **kwargs})
        self._negative_number_matcher = re.compile(r"-[\d.]+(e[+-]?\d+)?$", re.I)  # argparse takes -1e-3 for a flag
        # Not `field.type`: HfArgumentParser overwrites it with a simplified type
        hints = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        self._fields: dict[str, tuple[argparse.Action, tuple]] = {}  # each field's flag, and the types it may have
        for action in reversed(self._actions):  # --x stands before --no_x
            if (hint := hints.get(action.dest)) is not None:
                types = types_of(hint)
                self._fields[action.dest] = action, types
                if pair := next((kind for kind in types if get_origin(kind) is tuple), None):
                    action.type, action.nargs = get_args(pair)[0], len(get_args(pair))  # else tuple("12"): ("1", "2")
                elif str in types and bool in types:  # HfArgumentParser would turn even the default "no" into False
                    action.type = str

    def parse_args_and_config(self, args: Iterable[str] | None = None) -> tuple[Any, ...]:
        args = list(sys.argv[1:] if args is None else args)
        if not args and self.without_arguments is not None:
            self.exit(2, self.without_arguments)
        if asked := {"-h", "--help"} & {*args}:
            after = args[args.index(asked.pop()) + 1 :]
            print(self.help(after[0] if after and not after[0].startswith("-") else None), end="")
            self.exit()
        files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        files.add_argument("--config", action="append", default=[])
        with self.one_line_errors(*_WRONG_INPUT, ArithmeticError, TypeError):  # what configs raise of odd values
            given, args = files.parse_known_args(args)
            if len(given.config) > 1:
                raise ValueError("--config was given more than once, but only one file is read: merge the files")
            nodes, config = _read(given.config[0]) if given.config else ({}, {})
            flags = [*self._flags(nodes, config), *args]
            parsed = self.parse_args_into_dataclasses(flags, look_for_args_file=False)
            if self._check:
                self._check(
                    *(made for made, kind in zip(parsed, self._given, strict=True) if not isinstance(kind, str))
                )
                check_packages(*parsed)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and refuse what is left over; for an unknown flag, name the nearest one."""
        namespace, remaining = super().parse_known_args(args, namespace)
        for flag in (arg.split("=", 1)[0] for arg in remaining if arg.startswith("-")):
            self._refuse_flag(flag, self._fields)
        if remaining:
            self.error(
                f"stray value {remaining[0]!r}: the flag before it takes fewer values; quote a value with spaces"
            )
        return namespace, remaining

    @contextmanager
    def one_line_errors(self, *kinds: type[Exception]) -> Iterator[None]:
        """Turn exceptions of these `kinds` in the block into a one-line error that ends the program."""
        kinds = kinds or _WRONG_INPUT
        try:
            yield
        except kinds as error:
            what = str(error)
            if is_of_deepspeed(error):
                what = NO_DEEPSPEED
            elif "support bf16" in what:
                what = "`bf16` needs a GPU that supports it: on a CPU add `--use_cpu true --bf16 false`"
            elif "existing deepspeed config" in what:
                what += (
                    f"; the working directory is {Path.cwd()}: give an absolute path, or start from another directory"
                )
            self.error(what)

    def error(self, message: str) -> NoReturn:
        # In one line, and without argparse's usage, which is some 300 flags long and hides the message
        print(f"{self.prog}: error: {redacted(' '.join(message.split()))}", file=sys.stderr)
        sys.exit(2)

    def _refuse_flag(self, flag: str, names: Iterable[str]) -> NoReturn:
        flags = [f"--{name}" for name in (*names, "config")]
        nearest = did_you_mean("--" + flag.lstrip("-").replace("-", "_"), flags)
        self.error(f"unknown flag {flag!r}{nearest or '; `--help all` lists the valid ones'}")

    def _check_key(self, key: str, names: Iterable[str]) -> None:
        if key not in names:
            nearest = did_you_mean(key, names) or "; `--help all` lists the valid ones"
            raise ValueError(f"unknown key {key!r} in the configuration file{nearest}")

    def _flags(self, nodes: dict[str, yaml.Node], config: dict[str, Any]) -> list[str]:
        """
        Return the entries of the YAML file as flags.

        A value that no flag can express becomes the default of its field instead.
        """
        lists, scalars = [], []
        for key, value in config.items():
            self._check_key(key, self._fields)
            (action, types), node = self._fields[key], nodes[key]
            if isinstance(value, list) and value and action.nargs not in (None, "?"):
                lists += [f"--{key}", *map(_text, node.value)]
            elif type(value) in {NoneType, bool, dict, list} & {get_origin(kind) or kind for kind in types}:
                self.set_defaults_with_config(**{key: value})
            elif value is not None and isinstance(node, yaml.ScalarNode):
                # As it is written: YAML takes `no`, one of a field's strings, for false, and 1e-5 for a string
                scalars.append(f"--{key}={node.value}")
            else:
                raise ValueError(f"{key!r} in the configuration file must not be {value!r}")
        return [*lists, *scalars]  # in this order no list takes a value of the command line for its own

    # ---- Help ----

    def format_help(self) -> str:
        """Return what `--help` prints."""
        return self.help()

    def help(self, asked: str | None = None) -> str:
        """Return what `--help`, `--help all` or `--help WORD` prints: see [`~trl_ext.cli.help.help_text`]."""
        apart = (isinstance(given, str) for given in self._given)
        kinds = zip(self.dataclass_types, apart, strict=False)
        return help_text(self.prog, self.description or "", kinds, asked)


def _read(path: str) -> tuple[dict[str, yaml.Node], dict[str, Any]]:
    """
    Read a YAML file, and set the environment variables in its `env`.

    Return two mappings: from each other key to its node, which has the text as written, and from the key to its value.
    """
    with open(config_file("--config", path), encoding="utf-8") as file:
        try:
            loader = _Loader(file)
            root = loader.get_single_node()
            config = loader.construct_document(root) if root else None
        except UnicodeDecodeError as error:
            raise ValueError(f"--config {path} is not a text file: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("env", {}), dict):
        raise ValueError(f"{path} must be a mapping of names to values, and so must `env` in it")
    os.environ.update({str(name): str(value) for name, value in config.pop("env", {}).items()})
    # Keys as they are written: YAML takes `on` for true
    nodes = {key.value: node for key, node in root.value if key.value != "env"}
    return nodes, dict(zip(nodes, config.values(), strict=True))


def _text(node: yaml.Node) -> str:
    """Return a list item's text: a scalar as it is written, a mapping or a list in YAML's flow style."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    inner = [node]
    for part in inner:
        if isinstance(part, yaml.CollectionNode):
            part.flow_style = True
            inner += [each for item in part.value for each in (item if isinstance(item, tuple) else (item,))]
    return yaml.serialize(node, Dumper=yaml.SafeDumper, width=math.inf, allow_unicode=True).strip()


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text; raise a `yaml.YAMLError` if a key is given twice."""
    return yaml.load(text, _Loader)


def entry_of(text: str) -> Any:
    """
    Parse a text in YAML's flow style; return it unchanged if it is not a mapping or list, such as a path.

    Raises:
        ValueError: the text begins like a mapping or list, but is not valid YAML.
    """
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not valid YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """Load YAML, but refuse a key given twice, and read 1e-5 as a number, as flags do; PyYAML reads only 1.0e-5 so."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [(key.value, key.start_mark) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, (key, mark) in enumerate(keys):
            if key in (earlier for earlier, _ in keys[:index]):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} given twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def pairs(option: str, given: list[str], form: str = "NAME=SHARE") -> dict[str, str]:
    """
    Return a mapping from NAME to VALUE, made of the values of an option, each written NAME=VALUE.

    Raises:
        ValueError: a value has another form, which the message asks to write as `form`, or a NAME is given twice.
    """
    found: dict[str, str] = {}
    for each in given:
        name, is_there, value = each.partition("=")
        if not (name and is_there and value):
            raise ValueError(f"`{option}`: write it as {form}, got {each!r}")
        if name in found:
            raise ValueError(f"`{option}` names {name!r} twice")
        found[name] = value
    return found


def path_and_split(given: str) -> tuple[str, str]:
    """Return the path of a data set and its split, written PATH:SPLIT, or PATH for the split `train`."""
    path, colon, split = given.partition(":")
    return (path, split) if colon and not Path(given).exists() else (given, "train")
