"""README and docs/: links, files, commands, flags, settings, metrics and names exist, and Python blocks run."""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import trl

import trl_ext
from tests.tiny import ON_CPU, prompts, tiny_gpt2, tiny_ppo, tiny_reward_model, tiny_tokenizer
from trl_ext import DPOConfig, PPOConfig
from trl_ext.cli.main import TOOLS, TRAINING, run_here
from trl_ext.cli.parser import first_sentence

ROOT = Path(__file__).parents[1]
SKILL = ".agents/skills/trl-ext/SKILL.md"  # the file that coding agents read
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "trl_ext" / SKILL]
}
ROOMS = "callbacks rewards functional data evaluation models runs"
PACKAGES = [
    "trl_ext",
    *(
        f"trl_ext.{name}"
        for name in (*ROOMS.split(), "workbench", "workbench.labels", "workbench.planning", "workbench.reports")
    ),
]
FENCE = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")


def blocks(language):
    return [(page, code) for page, text in PAGES.items() for kind, code in FENCE.findall(text) if kind == language]


def table(page, heading):
    """The rows of the first table after a heading."""
    after = f"\n{PAGES[page]}".split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(?m)^\|.*\n\|[-|: ]+\n((?:\|.*\n)+)", after)[1]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


def codes(cell):
    return re.findall(r"`([^`]+)`", cell)


# ---- Links and files ----


def anchors(text):
    """The ids that GitHub gives to headings."""
    found = {}
    for heading in re.findall(r"(?m)^#+ (.+)$", FENCE.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {name if not number else f"{name}-{number}" for name, most in found.items() for number in range(most + 1)}


def test_link_targets_exist():
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            if re.match(r"https?://[\w.-]+\.\w+(/\S*)?$", link):
                continue
            target, _, anchor = link.partition("#")
            file = (ROOT / page).parent / target if target else ROOT / page
            assert ":" not in link and not link.startswith("/") and file.exists(), f"{page}: {link}"
            assert not anchor or (file.suffix == ".md" and anchor in anchors(file.read_text())), f"{page}: {link}"


def test_named_files_exist():
    pattern = r"(?<![\w/.-])((?:recipes|trl_ext|docs|tests|accelerate_configs|\.github)/[\w./-]+\w)"
    for page, text in PAGES.items():
        if page == "CHANGELOG.md":  # these pages name deleted files
            continue
        for name in re.findall(pattern, text):
            assert (ROOT / name).exists(), f"{page} names {name}"
        for module in re.findall(r"python -m ((?:trl_ext|recipes|tests)[\w.]*)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or path.is_dir(), f"{page} names {module}"


# ---- Commands ----

COMMANDS = [*TRAINING, *TOOLS]


def joined(code):
    return code.replace("\\\n", " ").splitlines()


def trl_ext_commands():
    """Each `trl-ext …` in bash blocks and inline code of the pages but the changelog, split into words."""
    for page, text in PAGES.items():
        if page == "CHANGELOG.md":
            continue
        lines = [line for kind, code in FENCE.findall(text) if kind == "bash" for line in joined(code)]
        for line in [*lines, *re.findall(r"`(trl-ext [^`]+)`", FENCE.sub("", text))]:
            for part in line.partition(" #")[0].split("&&"):
                if part.strip().startswith("trl-ext "):
                    yield page, shlex.split(part.strip())[1:]


def flags_of(command, capsys):
    """The flags that a command's help names."""
    with pytest.raises(SystemExit):
        run_here(command, ["--help", "all"])
    return {
        *re.findall(r"--(\w+)", capsys.readouterr().out),
        "config",
        "accelerate_config",
        "num_processes",
        "version",
    }


def test_commands_and_their_flags_exist(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [])  # which a command sets
    flags = {command: flags_of(command, capsys) for command in COMMANDS}
    flags["plan"] |= flags["ppo"]
    seen = set()
    for page, (command, *words) in trl_ext_commands():
        if command.startswith("-"):
            continue
        assert command in COMMANDS, f"{page}: trl-ext {command}"
        seen.add(command)
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert flag[2:] in flags[command], f"{page}: trl-ext {command} {flag}"
        for flag, folder in (("--config", "recipes"), ("--accelerate_config", "accelerate_configs")):
            name = words[words.index(flag) + 1] if flag in words else ""
            if name.islower() and not name.endswith(".yaml"):  # FILE and four.yaml are the reader's
                assert (ROOT / folder / f"{name}.yaml").is_file(), f"{page}: {flag} {name}"
    assert seen == set(COMMANDS)


# ---- Settings and metrics ----


def test_tables_of_settings_agree_with_the_fields(subtests):
    """A table has the default and the first sentence of the help of each setting that it names."""
    for config, page, heading in [
        (PPOConfig, "docs/ppo.md", "## The settings that matter"),
        (DPOConfig, "docs/dpo.md", "# DPO: what is added to TRL's trainer"),
    ]:
        known = {field.name: field for field in dataclasses.fields(config)}
        for row in table(page, heading):
            with subtests.test(row[0]):
                field = known[codes(row[0])[0]]
                default = row[1] if field.default is None else f"`{field.default}`"  # the page explains "unset"
                is_ours = type(field.metadata["help"]) is not str  # TRL's help may be reworded
                text = first_sentence(field.metadata["help"]) if is_ours else row[2]
                assert row[1:3] == [default, text], f"{page}: copy the right side"


def documented_keys(heading):
    rows = table("docs/metrics.md", heading)
    return {key.replace("<name>", "letters_reward") for row in rows for key in codes(row[0])}


@pytest.mark.slow
def test_metrics_page_names_what_ppo_logs(tmp_path):
    given = {"eval_dataset": prompts(8), "eval_strategy": "steps", "eval_steps": 2, "kl_coef": 0.1}
    given |= {"step_kl_target": 0.1}
    trainer = tiny_ppo(tmp_path, tiny_gpt2(), importance_sampling_mode="token_truncate", **given)
    trainer.train()
    logged = {key for log in trainer.state.log_history for key in log}
    mine = {key.removeprefix("eval_") for key in logged}
    of_the_trainer = {"step", "loss", "runtime", "samples_per_second", "steps_per_second", "total_flos", "train_loss"}
    of_the_trainer |= {"train_runtime", "train_samples_per_second", "train_steps_per_second", "num_input_tokens_seen"}
    of_the_trainer |= {key for key in mine if key.startswith("attribution/") and key != "attribution/rise"}  # by kind
    documented = documented_keys("## PPO")
    assert mine - of_the_trainer <= documented, "docs/metrics.md does not name these"
    # These need a setting
    ahead = {"sampling/staleness", "time/generate_wait", "time/sync_weights"}
    assert documented - mine <= {"time/score_wait", "val/baseline_weight"} | ahead


# ---- Python ----


@pytest.mark.parametrize("page, code", blocks("python"))
def test_imported_names_and_arguments_exist(page, code):
    tree = ast.parse(code)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        function = names.get(getattr(getattr(node, "func", None), "id", None))
        if function is not None and function.__module__.startswith(("trl.", "trl_ext.")):
            parameters = inspect.signature(function).parameters
            given = {keyword.arg for keyword in node.keywords if keyword.arg}  # `**` has no name
            assert given <= {*parameters} or "kwargs" in parameters, f"{page}: {given - {*parameters}}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Tiny models in place of those that the pages name."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_gpt2().save_pretrained(folder / "policy")
    tiny_reward_model(tiny_gpt2()).save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


TRAINING_CODE = [(page, code) for page, code in blocks("python") if ".train()" in code]


@pytest.mark.parametrize(
    "page, code",
    [
        pytest.param(page, code, marks=() if page in ("README.md", "docs/ppo.md") else pytest.mark.slow)
        for page, code in TRAINING_CODE
    ],
)
def test_python_runs(page, code, hub, tmp_path, monkeypatch):
    rows = prompts(96)
    if "DPOTrainer(" in code:
        rows = rows.map(lambda row: {"chosen": " the cat sat", "rejected": " a dog"})
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: rows)
    small = {**ON_CPU, "max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    if "GRPOTrainer(" in code:
        small |= {"num_generations": 2}
    if "DPOTrainer(" not in code:
        small |= {"max_completion_length": 4}
    for config in (PPOConfig, DPOConfig, trl.GRPOConfig):
        module = trl_ext if config.__module__.startswith("trl_ext") else trl
        keep = {"total_episodes": None} if config is PPOConfig else {}
        keep |= {"record_run": False} if module is trl_ext else {}  # a page takes longer than its two steps
        monkeypatch.setattr(
            module,
            config.__name__,
            lambda _, config=config, keep=keep, **given: config(str(tmp_path), **{**given, **small, **keep}),
            raising=False,
        )
    code = re.sub(r'"Qwen/[^"]+"', repr(str(hub / "policy")), code)
    code = re.sub(r'"path/to/reward[^"]*"', repr(str(hub / "reward")), code)
    space = {"__name__": "example"}
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), space)
    assert space["trainer"].state.global_step == 2


# ---- Docstrings ----


def public(package):
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", dir(module)):
        thing = getattr(module, name)
        is_ours = getattr(thing, "__module__", "").startswith("trl_ext")  # TRL documents its own
        if is_ours and (inspect.isclass(thing) or inspect.isfunction(thing)):
            yield name, thing


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package):
    assert importlib.import_module(package).__doc__
    for name, thing in public(package):
        own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        assert own and not own.startswith(f"{name}("), f"{package}.{name}"  # a dataclass's automatic docstring
        if not inspect.isclass(thing):
            continue
        for member, value in vars(thing).items():
            if not member.startswith("_") and inspect.isroutine(getattr(value, "fget", value)):
                assert inspect.getdoc(getattr(thing, member)), f"{package}.{name}.{member}"


# ---- Site and repository ----


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert "num_mini_batches" in pages["api/trl_ext.html"] and "StrictTrlParser" in pages["source/recipes/ppo.py.html"]
    for package in PACKAGES:
        page = pages[f"api/{package.removeprefix('trl_ext.')}.html"]
        for name, _ in public(package):
            assert re.search(rf'<h2 id="{package}(\.\w+)?\.{name}"', page), f"{package}.{name} is not on its page"
    for page, text in pages.items():  # nothing from another site
        assert not re.search(r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)"', text), page
