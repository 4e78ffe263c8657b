"""`trl-ext`: which flags go to accelerate and which to the recipe, names of configurations, and refused commands."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
from accelerate.commands.launch import launch_command_parser

import trl_ext
from recipes import dpo, online_dpo, plan, ppo, pretrain_critic, reward, sft
from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import make_world
from trl_ext.cli import main as commands
from trl_ext.cli.main import TOOLS, TRAINING, main, split
from trl_ext.upstream.names import launch_training_script  # noqa: F401 - raises if it changed

ROOT = Path(trl_ext.__file__).parents[1]
RECIPES = {"ppo": ppo, "dpo": dpo, "sft": sft, "reward": reward, "online_dpo": online_dpo} | {
    "pretrain_critic": pretrain_critic
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys, *words):
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# ---- The command ----


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    listed = re.findall(r"^  (\S+)  +\S", capsys.readouterr().out, re.M)
    assert listed == [*TRAINING, *TOOLS]
    named = "sft reward pretrain-critic ppo dpo online-dpo generate merge plan advise label constitution"
    more = "annotators prompts reward-report evaluate refresh-reward serve-reward report demo doctor"
    assert listed == [*named.split(), *more.split()]
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", "--help"])
    assert "\n    trl-ext doctor\n" in capsys.readouterr().out  # its line breaks stay


def test_commands_without_training_import_nothing_heavy(subtests):
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    code += "from trl_ext.cli.main import main; main(sys.argv[1:])"
    for words in (["--help"], ["--version"], ["ppp"], ["report", "--help"]):
        with subtests.test(words=words):
            ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
            modules = {"torch", "trl", "transformers", "accelerate", "datasets"}
            assert not modules & {*ran.stderr.splitlines()[-1].split()}


def test_mistakes_are_one_line(subtests, capsys, elsewhere):
    for words, message in [
        (["pppo"], "trl-ext: error: there is no command 'pppo'; did you mean ppo?"),
        (["online"], "trl-ext: error: there is no command 'online'; did you mean online-dpo?"),
        (["dpo", "--accelerate_config", "zero"], "there is no such file; did you mean zero2 or"),
        (["dpo", "--num_processes", "two"], "argument --num_processes"),
        (["dpo", "--accelerate_config"], "expected one argument"),
    ]:
        with subtests.test(words=words):
            assert message in refusal(capsys, *words)


# ---- Whose flag ----


def test_a_flag_of_both_goes_to_the_recipe():
    """One set has the flags that accelerate and a recipe share."""
    theirs = {action.dest for action in launch_command_parser()._actions}
    ours = {each.name for kinds in plan.ARGUMENTS.values() for kind in kinds for each in fields(kind)}
    assert theirs & ours == commands._OF_BOTH


def test_each_flag_goes_to_its_reader_with_its_values(elsewhere):
    words = (
        "--num_processes 2 --rate=3 --weights 1 -2 --config tinystories/ppo --debug x --mixed-precision=bf16 --no_eval"
    )
    launch, mine = split([*words.split(), "--accelerate_config=fsdp2", "--main_process_port", "0"])
    theirs = "--num_processes 2 --mixed-precision=bf16 --main_process_port 0 --config_file"
    assert launch == [*theirs.split(), str(ROOT / "accelerate_configs/fsdp2.yaml")]
    assert mine == "--rate=3 --weights 1 -2 --config tinystories/ppo --debug x --no_eval".split()


# ---- Through accelerate ----


def started(elsewhere, code, **kwargs):
    """Start PPO on a tiny model with `code` as its reward file; return once that was imported."""
    tokenizer = make_tokenizer()
    for part in (tokenizer, make_model(tokenizer, 0)):
        part.save_pretrained(elsewhere / "model")
    (elsewhere / "waits.py").write_text(code)
    words = "ppo --model_name_or_path model --dataset_name rows.jsonl --output_dir out --reward_funcs waits.py:reward"
    command = [sys.executable, "-m", "trl_ext", *words.split(), "--use_cpu", "true"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **kwargs)
    while not (elsewhere / "pid").exists():
        assert process.poll() is None
        time.sleep(0.1)
    return process


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process of its parent's death")
def test_killing_the_command_kills_the_run(elsewhere):
    run = started(elsewhere, "import pathlib, time\npathlib.Path('pid').touch()\ntime.sleep(300)\n")
    children = psutil.Process(run.pid).children()
    run.kill()
    assert children and not psutil.wait_procs(children, timeout=30)[1]


WAITS = """
import pathlib, time
pathlib.Path("pid").touch()
try:
    time.sleep(300)
except KeyboardInterrupt:
    time.sleep(1)  # what is nearly written is completed
    pathlib.Path("once").touch()
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("reaches", ["trl-ext alone", "the whole group, as a terminal's Ctrl-C"])
def test_an_interrupt_reaches_the_run_once(reaches, elsewhere):
    run = started(elsewhere, WAITS, stderr=subprocess.PIPE, text=True, process_group=0)
    (os.kill if reaches == "trl-ext alone" else os.killpg)(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and said.count("Interrupted.") == 1 and "Traceback" not in said
    assert (elsewhere / "once").exists()


@pytest.mark.distributed
def test_two_processes_train_together(elsewhere):
    tokenizer = make_tokenizer()
    for part in (tokenizer, make_model(tokenizer, 0)):
        part.save_pretrained(elsewhere / "model")
    rows = make_world(seed=0, demonstrations=64, pairs=2, prompts=2, held_out=2)["sft"]["train"]
    (elsewhere / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "sft --config demo/sft --model_name_or_path model --dataset_name sft.jsonl --eval_size 0 --eval_strategy no"
    )
    words += " --max_steps 1 --output_dir out --record_run false --record_answers 0"
    words += " --accelerate_config cpu --num_processes 2 --main_process_port 0"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "trl_ext", *words.split()]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr[-5000:]
    assert "not passed to `accelerate launch`" not in ran.stderr
    assert sum("next: " in line for line in ran.stdout.splitlines()) == 1  # else each ran as the only process


@pytest.mark.distributed
def test_a_mistake_on_two_processes_ends_the_command_with_status_2(elsewhere, monkeypatch, capfd):
    monkeypatch.setattr(trl_ext, "__file__", str(elsewhere / "__init__.py"))  # beside it is what accelerate starts
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (elsewhere / "__main__.py").write_text("import sys\nprint('error: no', file=sys.stderr)\nsys.exit(2)\n")
    assert main("sft --accelerate_config cpu --num_processes 2 --main_process_port 0 --max_steps 1".split()) == 2
    said = capfd.readouterr().err
    assert said.count("error: no") == 2 and "Traceback" not in said
