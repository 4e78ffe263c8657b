"""`StrictTrlParser`: YAML and flags give the same values, and an unknown key is refused in one line."""

import os
from dataclasses import dataclass, field
from typing import Literal

import pytest
from transformers import SchedulerType
from trl import RLOOConfig, TrlParser

from trl_ext import CriticConfig, DPOConfig, PPOConfig, StrictTrlParser


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


def test_value_takes_its_fields_type(subtests, parse):
    for yaml, name, expected in [
        ("rate: 1e-5", "rate", 1e-5),  # a string to PyYAML
        ("rate: 1", "rate", 1.0),
        ("epochs: 3", "epochs", 3),
        ("limit: null", "limit", None),
        ("label: none", "label", "none"),
        ("label: 1.10", "label", "1.10"),
        ("verbose: yes", "verbose", True),
        ("cache: false", "cache", False),
        ("kind: adaptive", "kind", "adaptive"),
        ("when: no", "when", "no"),  # a bool to PyYAML
        ("schedule: cosine", "schedule", "cosine"),
        ("multiple: null", "multiple", None),
        ("weights: [1, 2e-1]", "weights", [1, 0.2]),
        ("weights: 1", "weights", [1.0]),  # as the flag
        ("span: [-1e-1, 1e0]", "span", [-0.1, 1.0]),
        ("extra: {min_lr: 1e-7, deep: {rate: 2E-3}}", "extra", {"min_lr": 1e-7, "deep": {"rate": 2e-3}}),
        ("extra: '{\"top_k\": 5}'", "extra", '{"top_k": 5}'),
        ("entries: [a.py:f, {Sum: {of: [b.py:g]}, weight: -2e-1}]", "entries",
         ["a.py:f", {"Sum": {"of": ["b.py:g"]}, "weight": -0.2}]),
    ]:  # fmt: skip
        with subtests.test(yaml=yaml):
            value = getattr(parse(yaml + "\nname: other"), name)
            assert value == expected and type(value) is type(expected)


def test_the_command_line_overrides_the_file(parse):
    parsed = parse("rate: 2.0\nepochs: 3\nweights: [1, 2]", "--rate", "-5e-1", "--span", "-1", "1", "--weights", "3")
    assert (parsed.rate, parsed.epochs, parsed.span, parsed.weights) == (-0.5, 3, [-1.0, 1.0], [3.0])
    assert parse("path: here", types=(Needed,)).path == "here"


def test_a_key_overrides_the_merged_one(parse):
    parsed = parse("name: a\n<<: [{rate: 1e-5, epochs: 2}, {rate: 3.0, label: on}]\nrate: 1e-6\nverbose: true")
    assert (parsed.name, parsed.rate, parsed.epochs, parsed.label, parsed.verbose) == ("a", 1e-6, 2, "on", True)


def test_a_mistake_is_one_line(subtests, parse, capsys):
    lora_like = "output_dir: out\nnum_generations: 3\nper_device_train_batch_size: 1\nuse_cpu: true\nbf16: false"
    for yaml, flags, message in [
        ("rate: fast", [], "argument --rate: invalid float value: 'fast'"),
        ("kind: adaptve", [], "argument --kind: invalid choice: 'adaptve' (choose from"),
        ("learning-rat: 1", [], "unknown key 'learning-rat' in the configuration file; did you mean learning_rate?"),
        ("on: 1", [], "unknown key 'on'"),
        ("rate: 1", ["--learning_rat=1"], "'--learning_rat'; did you mean --learning_rate?"),
        ("rate: 1", ["--learning-ra", "1"], "'--learning-ra'; did you mean --learning_rate?"),  # no abbreviation
        ("rate: 1", ["--name", "one", "two"], "stray value 'two'"),
        ("rate: 1", ["--config", "b.yaml"], "--config was given more than once"),
        ("rate: 1\nrate: 2", [], "key 'rate' given twice"),
        ("extra: {a: 1, a: 2}", [], "key 'a' given twice"),
        (lora_like, [], "must be divisible by"),  # the config's own check
    ]:
        with subtests.test(yaml=yaml, flags=flags):
            with pytest.raises(SystemExit, match="2"):
                parse(yaml, *flags, types=(RLOOConfig if yaml == lora_like else Arguments,))
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("prog: error: ") and message in line


def test_env_sets_environment_variables(parse, monkeypatch):
    monkeypatch.delenv("TRL_EXT_TEST", raising=False)
    parse("env: {TRL_EXT_TEST: 3}")
    assert os.environ.pop("TRL_EXT_TEST") == "3"


def test_trls_config_keeps_its_own_defaults(parse):
    yaml = "output_dir: out\nlearning_rate: 3e-4\neval_strategy: no\nreport_to: none\nuse_cpu: true\nbf16: false"
    parsed = parse(yaml, types=(RLOOConfig,))
    assert (parsed.learning_rate, parsed.eval_strategy.value, parsed.report_to) == (3e-4, "no", [])


@pytest.mark.parametrize("kind", [PPOConfig, CriticConfig, DPOConfig])
def test_trls_own_parser_shows_our_settings(kind):
    assert "--record_run" in TrlParser(kind).format_help()  # argparse reads a percent sign as a format
