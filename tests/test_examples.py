"""The examples run unchanged, on tiny models in place of the hub's."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from tests.tiny import prompts, tiny_llama, tiny_reward_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]


def test_each_example_is_a_script_for_uv_with_a_link(subtests):
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    for path in (ROOT / "examples").glob("*.py"):
        with subtests.test(path=path):
            block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", path.read_text())[1]
            metadata = tomllib.loads(re.sub(r"(?m)^# ?", "", block))
            source = metadata["tool"]["uv"]["sources"][metadata["dependencies"][0]]
            assert (path.parent / source["path"] / "pyproject.toml").is_file() and source["editable"]
            assert f"](examples/{path.name})" in (ROOT / "README.md").read_text()
            assert any(f"](../examples/{path.name})" in page for page in pages)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run an example as a script in an empty folder, in this process, which has the imports."""
    monkeypatch.chdir(tmp_path)

    def run(name, words=""):
        monkeypatch.setattr("sys.argv", [name, "--output_dir", str(tmp_path / "out"), *words.split()])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")

    return run


@pytest.fixture
def local(tmp_path):
    """A folder with a policy, a reward model and prompts."""
    policy = tiny_llama()
    policy.save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    reward = tiny_reward_model(policy)
    reward.save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    prompts(128).to_json(tmp_path / "prompts.jsonl")
    return tmp_path


@pytest.mark.slow
def test_ppo_lora(local, run):
    words = "--model policy --reward_model reward --dataset prompts.jsonl --max_completion_length 8"
    run("ppo_lora.py", f"{words} --total_episodes 128")
    assert (local / "out/adapter_model.safetensors").is_file() and (local / "out/critic").is_dir()
    assert (local / "out/report.html").is_file()


@pytest.mark.slow
def test_grpo_with_monitors(local, run):
    run("grpo_with_monitors.py", "--model policy --dataset prompts.jsonl --max_steps 2")
    rows = [json.loads(line) for line in (local / "out/metrics.rank0.jsonl").read_text().splitlines()]
    assert any("repetition/top_phrase_share" in row.get("logs", {}) for row in rows)


@pytest.mark.slow
def test_reward_hack_alarm(tmp_path, run):
    run("reward_hack_alarm.py")
    alerts = [json.loads(line) for line in (tmp_path / "out/alerts.jsonl").read_text().splitlines()]
    assert {(each["monitor"], each["action"]) for each in alerts} == {
        ("HackWatch", "warn"),
        ("RepetitionCallback", "stop"),
    }
    page = (tmp_path / "out/report.html").read_text()
    assert "RepetitionCallback" in page
