import os
import sys
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError
from typing import Literal

import pytest
from transformers import SchedulerType
from trl import RLOOConfig

from trl_ext import PPOConfig, StrictTrlParser
from trl_ext.cli.parser import entry_of


@dataclass
class Arguments:
    rate: float = 0.1
    epochs: int = 1
    name: str = "run"
    label: str | None = None
    limit: float | None = None
    verbose: bool = False
    cache: bool | None = None
    kind: Literal["fixed", "adaptive"] = "fixed"
    when: Literal["no", "epoch"] = "epoch"
    schedule: SchedulerType | str = "linear"
    dtype: str = field(default="float32", metadata={"choices": ["float32", "bfloat16"]})
    multiple: int | str | None = "auto"
    weights: list[float] | None = None
    entries: list[str] | None = None
    span: tuple[float, float] | None = None
    seen: str | bool = "no"
    extra: dict | str | None = None
    learning_rate: float = 1e-6


@dataclass
class Needed:
    path: str


@pytest.fixture
def parse(tmp_path):
    def parse(yaml="", *flags, types=(Arguments,)):
        path = tmp_path / "config.yaml"
        path.write_text(yaml)
        (parsed, *_) = StrictTrlParser(types, prog="prog").parse_args_and_config(["--config", str(path), *flags])
        return parsed

    return parse


@pytest.fixture
def refusal(parse, capsys):
    def refusal(*args, **kwargs):
        with pytest.raises(SystemExit) as raised:
            parse(*args, **kwargs)
        assert raised.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return refusal


def test_value_takes_its_fields_type(subtests, parse):
    for yaml, name, expected in [
        ("rate: 1e-5", "rate", 1e-5),  # a string to PyYAML
        ("rate: 1", "rate", 1.0),
        ("epochs: 3", "epochs", 3),
        ("limit: 2e-3", "limit", 2e-3),
        ("limit: null", "limit", None),
        ("label: none", "label", "none"),
        ("verbose: yes", "verbose", True),
        ("verbose: on", "verbose", True),
        ("verbose: off", "verbose", False),
        ("label: 7", "label", "7"),
        ("limit: none", "limit", None),  # as the flag
        ("cache: false", "cache", False),
        ("kind: adaptive", "kind", "adaptive"),
        ("when: no", "when", "no"),  # a bool to PyYAML
        ("schedule: cosine", "schedule", "cosine"),
        ("dtype: bfloat16", "dtype", "bfloat16"),
        ("multiple: auto", "multiple", "auto"),
        ("multiple: 8", "multiple", "8"),  # as the flag: TRL's configs read the number
        ("weights: [1, 2e-1]", "weights", [1.0, 0.2]),
        ("weights: []", "weights", []),
        ("weights: 1", "weights", [1.0]),  # as the flag
        ("span: [-1e-1, 1e0]", "span", [-0.1, 1.0]),
        ("extra: {top_k: 5}", "extra", {"top_k": 5}),
        ("extra: {min_lr: 1e-7, deep: {rate: 2E-3}}", "extra", {"min_lr": 1e-7, "deep": {"rate": 2e-3}}),
        ("extra: '{\"top_k\": 5}'", "extra", '{"top_k": 5}'),
    ]:
        with subtests.test(yaml=yaml):
            value = getattr(parse(yaml + "\nname: other"), name)
            assert value == expected
            assert type(value) is type(expected)


def test_mappings_in_a_list_arrive_as_they_are_written(parse):
    """A list of texts holds paths as they are, and mappings as YAML in one line, of which `entry_of` makes values."""
    yaml = """
entries:
  - a.py:f
  - Outer:
      text: |
        two 'lines', "quoted"
        \\bkill\\b
      numbers: [1e-5, 1, 2.5, 1.0e3, "1e5"]
      inner: [{Inner: {on: no, "é": null, deep: {deeper: [[]]}}}, b.py:g]
      pattern: "(?i)\\\\bkill\\\\b: {x}"
    weight: -2e-1
"""
    expected = {
        "Outer": {
            "text": "two 'lines', \"quoted\"\n\\bkill\\b\n",
            "numbers": [1e-5, 1, 2.5, 1000.0, "1e5"],
            "inner": [{"Inner": {True: False, "é": None, "deep": {"deeper": [[]]}}}, "b.py:g"],
            "pattern": "(?i)\\bkill\\b: {x}",
        },
        "weight": -0.2,
    }
    path, text = parse(yaml).entries
    assert path == entry_of(path) == "a.py:f" and entry_of(text) == expected
    assert parse("name: other", "--entries", path, text).entries == [path, text]  # the same as a flag
    with pytest.raises(ValueError, match="'{a: ' is not valid YAML: .*expected the node content"):
        entry_of("{a: ")
    with pytest.raises(ValueError, match="is not valid YAML: .*'a' given twice"):
        entry_of("{a: 1, a: 2}")


def test_wrong_value_is_refused(subtests, refusal):
    for yaml, message in [
        ("rate: fast", "argument --rate: invalid float value: 'fast'"),
        ("rate: true", "argument --rate: invalid float value: 'true'"),
        ("rate:", "'rate' in the configuration file must not be None"),
        ("rate: {a: 1}", "'rate' in the configuration file must not be {'a': 1}"),
        ("rate: [1]", "'rate' in the configuration file must not be [1]"),
        ("epochs: 1.5", "argument --epochs: invalid int value: '1.5'"),
        ("verbose: 2", "argument --verbose: Truthy value expected"),
        ("kind: adaptve", "argument --kind: invalid choice: 'adaptve' (choose from"),  # Python 3.13 quotes no names
        ("schedule: cosin", "argument --schedule: invalid choice: 'cosin'"),
        ("dtype: fp32", "argument --dtype: invalid choice: 'fp32'"),
        ("weights: [a]", "argument --weights: invalid float value: 'a'"),
        ("weights: [{a: 1}]", "argument --weights: invalid float value: '{a: 1}'"),
        ("span: [1, 2, 3]", "stray value '3'"),
        ("span: [1]", "argument --span: expected 2 arguments"),
    ]:
        with subtests.test(yaml=yaml):
            assert message in refusal(yaml)


def test_unknown_key_names_the_nearest(refusal):
    assert refusal("learning-rat: 1.0") == (
        "prog: error: unknown key 'learning-rat' in the configuration file; did you mean learning_rate?"
    )


def test_unknown_or_abbreviated_flag_names_the_nearest(subtests, refusal):
    for flag in ["--learning_rat=1", "--learning-rat", "--learning-ra"]:
        with subtests.test(flag=flag):
            line = refusal("rate: 1.0", flag)
            assert f"unknown flag {flag.split('=')[0]!r}; did you mean --learning_rate?" in line


def test_the_beginning_of_a_name_is_completed(refusal):
    assert "unknown flag '--learn'; did you mean --learning_rate?" in refusal("rate: 1.0", "--learn", "1")


def test_stray_value_is_refused(subtests, refusal):
    for yaml, flags in [("rate: 1.0", ["--name", "one", "two"]), ("epochs: 1\nweights: [1.0, 2.0]", ["two"])]:
        with subtests.test(yaml=yaml):
            assert "stray value 'two'" in refusal(yaml, *flags)


def test_malformed_file_is_refused(subtests, refusal):
    for yaml, message in [
        ("rate: 1.0\nrate: 2.0", "key 'rate' given twice"),
        ("extra: {a: 1, a: 2}", "key 'a' given twice"),
        ("- rate", "config.yaml must be a mapping of names to values"),
        ("", "config.yaml must be a mapping of names to values"),
        ("on: 1", "unknown key 'on'"),
        ("help: 1", "unknown key 'help'"),
        ("rate: [1", "expected ',' or ']'"),
        ("env: 3", "must be a mapping of names to values, and so must `env` in it"),
    ]:
        with subtests.test(yaml=yaml):
            assert message in refusal(yaml)


def test_wrong_command_line_is_refused(subtests, capsys):
    for arguments, message in [
        (["--config", "absent.yaml"], "--config absent.yaml: there is no such file; the working directory is "),
        (["--config=absent.yaml"], "--config absent.yaml: there is no such file"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config was given more than once"),
        (["--rate", "fast"], "argument --rate: invalid float value: 'fast'"),
        (["--kind", "adaptve"], "argument --kind: invalid choice: 'adaptve'"),
    ]:
        with subtests.test(arguments=arguments):
            with pytest.raises(SystemExit):
                StrictTrlParser(Arguments).parse_args_and_config(arguments)
            assert message in capsys.readouterr().err


def test_command_line_overrides_file(parse):
    parsed = parse("rate: 2.0\nepochs: 3\nweights: [1, 2]", "--rate", "5e-1", "--span", "-1", "1", "--weights", "3")
    assert (parsed.rate, parsed.epochs, parsed.span, parsed.weights) == (0.5, 3, [-1.0, 1.0], [3.0])


def test_string_or_bool_keeps_its_string(parse):
    assert parse("rate: 1.0").seen == "no"
    assert parse("rate: 1.0", "--seen", "all").seen == "all"
    assert parse("seen: true").seen is True


def test_null_stands_for_none_where_the_default_is_something_else(parse):
    assert parse("multiple: null").multiple is None


def test_required_field_may_come_from_the_file(parse):
    assert parse("path: here", types=(Needed,)).path == "here"


def test_no_arguments_at_all_print_how_to_run_it(capsys):
    with pytest.raises(SystemExit, match="2"):
        StrictTrlParser(Arguments, without_arguments="Say --rate.").parse_args_and_config([])
    assert capsys.readouterr().err == "Say --rate."


def test_env_sets_environment_variables(parse, monkeypatch):
    monkeypatch.delenv("TRL_EXT_TEST", raising=False)
    parse("env: {TRL_EXT_TEST: 3, 1: null}")
    assert os.environ.pop("TRL_EXT_TEST") == "3" and os.environ.pop("1") == "None"


def test_a_configs_own_check_is_one_line(refusal):
    # 3 is the number of generations, and 1 the batch size that it must divide.
    yaml = "output_dir: out\nnum_generations: 3\nper_device_train_batch_size: 1\nuse_cpu: true\nbf16: false"
    assert "must be divisible by" in refusal(yaml, types=(RLOOConfig,))
    yaml = "output_dir: out\nuse_cpu: true\nbf16: false\nsave_steps: 1e999"
    assert "cannot convert float infinity" in refusal(yaml, types=(RLOOConfig,))


def test_trl_config_takes_its_own_defaults_from_a_file(parse):
    yaml = "output_dir: out\nlearning_rate: 3e-4\neval_strategy: no\nreport_to: none\nuse_cpu: true\nbf16: false"
    parsed = parse(yaml, types=(RLOOConfig,))
    assert (parsed.learning_rate, parsed.eval_strategy.value, parsed.report_to) == (3e-4, "no", [])


@dataclass
class Sharded:
    what: str

    def __post_init__(self):
        if self.what == "absent":
            raise PackageNotFoundError("The 'deepspeed>=0.9.3' distribution was not found")
        raise ValueError(f"Expected a string path to an existing deepspeed config. Received: {self.what}")


def test_deepspeed_that_is_not_there(subtests, capsys):
    for what, message in [
        ("absent", "not installed: `pip install deepspeed`"),
        (
            "zero3.json",
            f"Received: zero3.json; the working directory is {os.getcwd()}: give an absolute path, or start",
        ),
    ]:
        with subtests.test(what=what):
            with pytest.raises(SystemExit, match="2"):
                StrictTrlParser(Sharded).parse_args_and_config(["--what", what])
            assert message in capsys.readouterr().err


def test_check_is_given_what_is_parsed_and_refuses_it_in_one_line(capsys):
    def check(needed):  # not the config that is given by name
        raise ValueError(f"{needed.path}\nis too much")

    with pytest.raises(SystemExit, match="2"):
        words = ["--path", "x", "--use_cpu", "true", "--bf16", "false"]
        StrictTrlParser((Needed, "trl_ext.PPOConfig"), check=check).parse_args_and_config(words)
    assert capsys.readouterr().err.endswith("error: x is too much\n")


@dataclass
class Staged:
    stage: Literal["first", "second", "third", "fourth", "fifth", "sixth", "seventh"] | None = None


def test_help_names_the_choices_however_many_there_are(capsys):
    with pytest.raises(SystemExit, match="0"):
        StrictTrlParser(Staged).parse_args_and_config(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--stage str One of first, second, third, fourth, fifth, sixth, seventh." in text


def test_help_describes_ours_and_names_the_rest(capsys):
    def help_of(*given):
        with pytest.raises(SystemExit, match="0"):
            StrictTrlParser((Needed, "trl_ext.PPOConfig")).parse_args_and_config(["--help", *given])
        return capsys.readouterr().out

    text = help_of()
    assert text.index("--path str") < text.index("--kl_coef float") < text.index("Inherited from trl.GRPOConfig")
    assert "  --seed " not in text and "use_cpu" in text and len(text.splitlines()) < 240
    everything = help_of("all")
    names = {f.name for f in fields(PPOConfig)}
    assert all(f"  --{name} " in everything for name in names)
    assert [line.split()[0] for line in help_of("kl_t").splitlines() if line.startswith("  --")] == ["--kl_target"]


@dataclass
class Reported:
    report_to: list[str] | None = None


def test_script_that_is_about_to_run_is_refused_what_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trackio", None)
    words = ["--report_to", "trackio"]
    assert StrictTrlParser(Reported).parse_args_and_config(words)[0].report_to == ["trackio"]
    with pytest.raises(SystemExit):
        StrictTrlParser(Reported, prog="prog", check=lambda reported: None).parse_args_and_config(words)
    assert capsys.readouterr().err.startswith("prog: error: `report_to` trackio needs trackio, which is not installed")


def test_config_may_be_the_name_of_one_that_ships(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        StrictTrlParser(Reported, prog="prog").parse_args_and_config(["--config", "tinystories/ppo"])
    assert "unknown key 'dataset_name' in the configuration file" in capsys.readouterr().err
