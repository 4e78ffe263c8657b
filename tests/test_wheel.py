"""The built wheel in an environment without the clone: it has all files, and runs."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import trl_ext

ROOT = Path(trl_ext.__file__).parents[1]
PLACES = {"trl_ext/": "trl_ext/", "recipes/": "trl_ext/recipes/", "accelerate_configs/": "trl_ext/accelerate_configs/"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(ROOT)], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A function that runs a command of that environment in an empty folder, with this environment's dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    environment, empty = folder / "environment", folder / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install", "-q", "--no-deps"]
    subprocess.run([*command, "--no-index", str(wheel)], check=True)
    # After its own packages: the .pth of an editable install in there is not followed
    (own / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}

    def run(*words, fails=False):
        ran = subprocess.run([*words], cwd=empty, env=variables, capture_output=True, text=True, timeout=900)
        assert (ran.returncode != 0) == fails, f"{words}: {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-5000:]}"
        return ran.stdout + ran.stderr

    run.environment, run.folder = environment, empty
    return run


def test_the_wheel_has_every_file(wheel):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PLACES, "docs/runbook.md"]
    try:
        tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a copy without its history")
    moved = {next((new + name[len(old) :] for old, new in PLACES.items() if name.startswith(old)), f"trl_ext/{name}")
             for name in tracked}  # fmt: skip
    inside = {*zipfile.ZipFile(wheel).namelist()}
    assert moved <= inside
    others = {name for name in inside - moved if ".dist-info/" not in name}
    assert not others, f"the wheel has {others}, which git does not track"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)


def test_the_wheel_does_not_need_the_clone(installed):
    code = (
        "import sys, trl_ext; from trl_ext.runs.package_files import recipe; "
        "print(trl_ext.__file__, recipe('ppo').__file__)"
    )
    for path in installed("python", "-c", code).split():
        assert Path(path).is_relative_to(installed.environment)
    paths = installed("python", "-c", "import sys; print(*sys.path, sep='\\n')").split("\n")
    assert not any(Path(path).resolve() == ROOT for path in paths if path)
    installed("python", "-c", "import recipes", fails=True)


def test_commands_run_in_an_empty_folder(installed):
    assert "Training, through" in installed("trl-ext", "--help")
    model = "outputs/demo/seed-0-short/world/model"  # with random weights
    code = "import sys; from trl_ext.cli.main import main; [main(words.split()) for words in sys.argv[1:]]"
    start = f"--config tinystories/ppo --model_name_or_path {model}"
    words = "demo --short --stage world", "doctor", f"plan {start} --accelerate_config zero3"
    shown = installed("python", "-c", code, *words)  # in one process, which imports torch once
    assert "world: " in shown and "contract with TRL" in shown  # .ci/run runs the whole demo
    assert "GiB per GPU" in shown and "zero3, 8 process(es)" in shown

    # Data and reward functions that the shipped file names are found
    words = f"ppo {start} --total_episodes 32 --output_dir run"
    words += " --per_device_train_batch_size 8 --max_completion_length 8 --num_ppo_epochs 1 --eval_size 8"
    shown = installed("trl-ext", *words.split())
    assert "not passed to `accelerate launch`" not in shown and "Traceback" not in shown
    assert (installed.folder / "run/model.safetensors").is_file()

    (installed.folder / "run/report.html").unlink()
    assert "report.html" in installed("trl-ext", "report", "run")
    assert (installed.folder / "run/report.html").is_file()
