"""Parse a script's YAML file and flags strictly, and write its `--help`."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from trl import TrlParser

from ..runs import Hold, check_output_dir, config_file, did_you_mean, redacted
from ..runs.settings import conditions
from ..upstream import quiet

# Inherited flags that `--help` describes, because most runs set them
USUAL = (
    *("output_dir", "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "save_steps"),
    "max_completion_length",
    *("gradient_accumulation_steps", "logging_steps", "eval_strategy", "use_cpu", "use_peft", "lora_r", "dtype"),
)
_WRONG_INPUT = (ValueError, TypeError, ArithmeticError, OSError, ImportError, yaml.YAMLError, argparse.ArgumentError)


class StrictTrlParser(TrlParser):
    """Extend [`trl.TrlParser`]: a user's mistake gives a one-line error and exit status 2.

    A `key: value` in the YAML file that `--config` names is read as the flag `--key=value`, so argparse checks its
    type and choices; lists and mappings are used unchanged. A flag on the command line overrides the file. Unknown
    keys and flags are refused with the nearest valid names. Flags cannot be abbreviated. `env:` in the file sets
    environment variables, as in TRL.

    - `--help` describes the script's own flags, and lists the names of the inherited ones.
    - `--help all` describes all flags.
    - `--help WORD` describes the flags with that word in their names.

    Args:
        dataclass_types: one or more dataclasses whose fields are the arguments; or names of such dataclasses, as
            `"trl_ext.PPOConfig"`.
        without_arguments: text that a call without any argument prints before it exits with status 2. If None, such a
            call gives all fields their defaults.
        **kwargs: passed to `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Any = None, without_arguments: str | None = None, **kwargs: Any) -> None:
        several = isinstance(dataclass_types, Iterable) and not isinstance(dataclass_types, str)
        given = list(dataclass_types) if several else [dataclass_types] if dataclass_types else []
        kwargs.setdefault("prog", Path(sys.argv[0]).name)  # Python 3.14 would say `python -m trl_ext`
        self.without_arguments = without_arguments
        kinds = [resolve_name(kind) if isinstance(kind, str) else kind for kind in given]
        super().__init__(
            kinds,
            **{"allow_abbrev": False, "description": without_arguments, "formatter_class": _formatter, **kwargs},
        )
        self._negative_number_matcher = re.compile(r"-[\d.]+(e[+-]?\d+)?$", re.I)  # argparse takes -1e-3 for a flag
        # Not `field.type`: HfArgumentParser overwrites it with a simplified type
        hints = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        self._names = [action.dest for action in self._actions if action.dest in hints]
        for action in self._actions:
            for kind in _types_of(hints.get(action.dest)):
                if get_origin(kind) is tuple:  # HfArgumentParser would call tuple("12"): ("1", "2")
                    action.type = get_args(kind)[0]
                    action.nargs = len(get_args(kind))

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
        with self.one_line_errors():
            given, args = files.parse_known_args(args)
            if len(given.config) > 1:  # the last one would win in silence
                self.error("--config was given more than once, but only one file is read: merge the files")
            flags = self._flags(given.config[0]) if given.config else []
            return self.parse_args_into_dataclasses([*flags, *args], look_for_args_file=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, but refuse unknown flags and stray values, and suggest the nearest flag."""
        namespace, left = super().parse_known_args(args, namespace)
        if left:
            flag = left[0].split("=")[0]
            nearest = did_you_mean(flag.replace("-", "_"), [f"__{name}" for name in self._names]).replace("__", "--")
            self.error(f"unknown flag or stray value {flag!r}{nearest}")
        return namespace, left

    @contextmanager
    def one_line_errors(self, *kinds: type[Exception]) -> Iterator[None]:
        """
        Turn exceptions of these `kinds` in the `with` block into a one-line error that ends the program.

        Without `kinds`, these are the exceptions of wrong input, such as `ValueError`, `OSError` and `ImportError`.
        """
        kinds = kinds or _WRONG_INPUT
        try:
            yield
        except kinds as error:
            on_cpu = "support bf16" in str(error)
            self.error(f"{error}{'; on a CPU add `--use_cpu true --bf16 false`' if on_cpu else ''}")

    def error(self, message: str) -> NoReturn:
        # In one line, and without argparse's usage, which is some 300 flags long and hides the message
        print(f"{self.prog}: error: {redacted(' '.join(message.split()))}", file=sys.stderr)
        sys.exit(2)

    def _flags(self, path: str) -> list[str]:
        """Return a YAML file's scalars as flags; make its other values defaults; set the variables under `env:`."""
        with open(config_file("--config", path), encoding="utf-8") as file:
            loader = _Loader(file)
            root = loader.get_single_node()
            if not isinstance(root, yaml.MappingNode):
                raise ValueError(f"the configuration file {path} has no `key: value` lines")
            config: dict[str, Any] = loader.construct_document(root)
        variables = config.pop("env", None) or {}
        os.environ.update({str(name): str(value) for name, value in variables.items()})
        flags = []
        # Keys and scalars as they are written: YAML takes `on` for true, `no`, one of a field's strings, for false
        nodes = {key.value: node for key, node in root.value if key.value != "env"}  # `<<` has merged: the last counts
        for (key, node), value in zip(nodes.items(), config.values(), strict=True):
            if key not in self._names:
                raise ValueError(f"unknown key {key!r} in the configuration file{did_you_mean(key, self._names)}")
            if isinstance(node, yaml.ScalarNode) and value is not None:
                flags.append(f"--{key}={node.value}")
            else:
                self.set_defaults_with_config(**{key: value})
        return flags

    def help(self, asked: str | None = None) -> str:
        """Return what `--help` (`asked` is None), `--help all` or `--help WORD` prints."""
        known = {each.name: (kind, each) for kind in self.dataclass_types for each in fields(kind)}
        inherited = []
        for action in self._actions:
            if action.dest not in known:
                continue
            kind, each = known[action.dest]
            owner = next(cls for cls in kind.__mro__ if each.name in vars(cls).get("__annotations__", {}))
            action.option_strings = action.option_strings[:1]  # not --like-this, too
            if not action.choices:
                action.metavar = getattr(action.type, "__name__", "str").replace("string_to_bool", "bool")
            is_own = not owner.__module__.startswith(("trl.", "transformers.")) or each.name in USUAL
            if asked != "all" and not (is_own if asked is None else asked in each.name):
                inherited.append(each.name)
                action.help = argparse.SUPPRESS
            else:
                text = str(each.metadata.get("help", "")).replace("%%", "%").replace("%", "%%")
                is_whole = asked not in (None, "all")
                action.help = f"{text} {conditions(each)}" if is_whole else first_sentence(" ".join(text.split()))
        self.usage = "%(prog)s [--config FILE.yaml] [--FLAG VALUE ...]"
        if asked is None:
            names = ", ".join(dict.fromkeys(inherited))  # a boolean field is two flags
            names = textwrap.fill(names, 120, initial_indent="  ", subsequent_indent="  ")
            self.epilog = f"Inherited from TRL and transformers:\n{names}\n\n"
            self.epilog += "`--help all` describes them all, `--help WORD` those with WORD in their names."
        return super().format_help()


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text."""
    return re.split(r"(?<!e\.g\.)(?<!i\.e\.)(?<!et al\.)(?<=\.) ", text)[0]


def _types_of(hint: Any) -> tuple:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


_formatter = partial(_HelpFormatter, width=120, max_help_position=8)


def parse_and_run(
    kind: Any, doc: str | None, run: Callable[[Any], Any], arguments: list[str] | None
) -> tuple[Any, Any]:
    """
    Parse a command line, run the command while its output folder is locked, and return the options and the result.

    Args:
        kind: dataclass of the command's options, with `output_dir`.
        doc: text that a call without any argument prints before it exits with status 2; the command does not run. If
            None, such a call runs with the options' defaults.
        run: function that takes the options, an instance of `kind`, and returns the result.
        arguments: words of the command line; None takes those of `sys.argv`.
    """
    quiet()
    parser = StrictTrlParser(kind, without_arguments=doc)
    (args,) = parser.parse_args_and_config(arguments)
    with parser.one_line_errors(ValueError, OSError, ImportError, RuntimeError, yaml.YAMLError):
        check_output_dir(args.output_dir, "false")
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        with Hold(args.output_dir):
            return args, run(args)


# ---- YAML ----


class _Loader(yaml.SafeLoader):
    """Load YAML, but refuse duplicate keys, and read 1e-5 as a number, as flags do (PyYAML reads it as a string)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text; raise a `yaml.YAMLError` if it is not valid, or has a key twice."""
    return yaml.load(text, _Loader)


def entry_of(entry: Any) -> Any:
    """
    Parse a text that begins with `{` or `[` as YAML; return any other text, such as a path, unchanged.

    Each entry of a Python list is treated so; any other value is returned unchanged.
    """
    if isinstance(entry, list):
        return [entry_of(each) for each in entry]
    if isinstance(entry, str) and entry.lstrip().startswith(("{", "[")):
        return read_yaml(entry)
    return entry


def pairs(option: str, given: list[str], form: str = "NAME=SHARE") -> dict[str, str]:
    """
    Return the `given` texts NAME=VALUE as a dict from each NAME to its VALUE.

    Raises:
        ValueError: a text has another form, or a NAME is given twice. The message names the command line's `option`
            and the wanted `form`.
    """
    found = {name: value for name, _, value in (each.partition("=") for each in given) if name and value}
    if len(found) < len(given):
        raise ValueError(f"`{option}`: write each as {form}, and each name once, got {given}")
    return found


def path_and_split(given: str) -> tuple[str, str]:
    """Return a dataset's path and its split, given as PATH:SPLIT, or as PATH for the split `train`."""
    path, colon, split = given.partition(":")
    if colon and not Path(given).exists():
        return path, split
    return given, "train"
