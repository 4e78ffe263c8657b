import json
import re
import shutil

import pytest
import yaml
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from recipes.demo import run, stages
from recipes.demo.stages import MARKER, DemoArguments, build, world_stage


def test_what_was_interrupted_is_never_taken_for_whole(tmp_path):
    def interrupted(folder):
        (folder / "half").write_text("…")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "stage", {}, interrupted)
    assert not (tmp_path / "stage").exists()
    build(tmp_path / "stage", {}, lambda folder: (folder / "file").write_text("whole"))
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == sorted([MARKER, "file"])
    assert not (tmp_path / "stage.partial").exists()


def test_the_two_ppo_runs_differ_in_their_guard_rails_alone():
    guarded, unguarded = (yaml.safe_load((stages.HERE / f"{n}.yaml").read_text()) for n in ("guarded", "unguarded"))
    rails = {"kl_coef", "kl_controller", "kl_target", "kl_horizon", "reward_normalization", "reward_clip_range"}
    assert {name for name in guarded if guarded[name] != unguarded.get(name)} == rails
    assert set(unguarded) == set(guarded) - rails | {"kl_coef"}
    assert unguarded["kl_coef"] == 0
    # Gold and the phrase are watched, never trained on
    assert guarded["reward_funcs"] == [
        "recipes/demo/world.py:gold_reward",
        "recipes/demo/world.py:phrase_reward",
    ]
    assert guarded["reward_weights"] == [1.0, 0.0, 0.0]


def test_the_lora_run_is_the_guarded_one_with_adapters_and_rates_of_its_own():
    guarded, lora = (yaml.safe_load((stages.HERE / f"{name}.yaml").read_text()) for name in ("guarded", "ppo_lora"))
    different = {name for name in {*guarded, *lora} if guarded.get(name) != lora.get(name)}
    assert {name for name in different if not name.startswith("lora_")} == {
        "use_peft",
        "learning_rate",
        "critic_learning_rate",
    }


@pytest.mark.slow
def test_the_lora_stage_trains_adapters_on_the_frozen_sft_model(tmp_path, monkeypatch):
    """With the untrained model and a reward model with random weights in place of the stages before it."""
    args = DemoArguments(output_dir=str(tmp_path), short=True)
    world = world_stage(args)
    shutil.copytree(world / "model", args.folder / "sft")
    policy = AutoModelForCausalLM.from_pretrained(args.folder / "sft")
    config = AutoConfig.from_pretrained(args.folder / "sft", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "reward")
    AutoTokenizer.from_pretrained(args.folder / "sft").save_pretrained(tmp_path / "reward")
    monkeypatch.setattr(stages, "reward_stage", lambda args: tmp_path / "reward")
    folder = stages.ppo_stage(args, "ppo_lora", ["--total_episodes", 128, "--max_completion_length", 8])

    trained = PeftModel.from_pretrained(policy, folder)
    adapters = {name: weight for name, weight in trained.named_parameters() if "lora_B" in name}
    assert len(adapters) == 14 and all(weight.any() for weight in adapters.values())  # 7 layers a block, from zero
    config = PeftConfig.from_pretrained(folder / "critic")
    assert config.task_type == "SEQ_CLS" and config.r == trained.peft_config["default"].r
    assert not list(folder.glob("**/model.safetensors"))  # the base is written nowhere
    assert "eval_rewards/gold_reward/mean" in json.loads((folder / "all_results.json").read_text())


@pytest.mark.slow
def test_shortened_demo_from_its_report_to_its_continuation(tmp_path, capsys):
    """One test, so that the demo is built once."""
    folder = tmp_path
    run.main(["--short", "--output_dir", str(folder)])
    demo = folder / "seed-0-short"
    summary = capsys.readouterr().out.split("Guarded PPO is better")[-1]
    assert f"Report: {demo / 'report.html'}" in summary and "|" not in summary and not (demo / "report.md").exists()
    report = (demo / "report.html").read_text()
    assert "200 held-out prompts" in report and report.count("data:image/png;base64,") == 2
    for name in ("sft", "guarded", "unguarded"):
        assert report.count(f">{name}</td>") >= 6 and f'<th scope="col">{name}</th>' in report
    links = re.findall(r'href="([^"]+)"', report)
    assert links == [*(f"{name}/report.html" for name in ("sft", "reward")), "reward/reward_report.html"] + [
        f"{name}/report.html" for name in ("guarded", "unguarded")
    ]
    assert all((demo / link).is_file() for link in links)
    for name in ("guarded", "unguarded"):
        page = (demo / name / "report.html").read_text()
        assert re.search(r'<p class="verdict">The score .* the KL .*; HackWatch (watched|warned) .*\.</p>', page)

    # Again: nothing is trained, and the report is the same
    models = {path: path.stat().st_mtime_ns for path in demo.glob("*/model.safetensors")}
    capsys.readouterr()
    run.main(["--short", "--output_dir", str(folder)])
    assert capsys.readouterr().out.count("complete already") == 5
    assert (demo / "report.html").read_text() == report
    assert {path: path.stat().st_mtime_ns for path in models} == models and len(models) == 4

    # Interrupted between training and the marker: PPOTrainer finds its own checkpoint
    (demo / "unguarded" / MARKER).unlink()
    (demo / "report.html").unlink()
    run.main(["--short", "--output_dir", str(folder)])
    output = capsys.readouterr().out
    assert output.count("complete already") == 4
    assert "Training is complete, at step 12" in output
    seconds = r'(?<=data-name="seconds">)\d+'
    assert re.sub(seconds, "", (demo / "report.html").read_text()) == re.sub(seconds, "", report)

    # A whole demo has a folder of its own; other settings are refused
    assert DemoArguments(output_dir=str(folder)).folder == folder / "seed-0"
    with pytest.raises(SystemExit, match="2"):
        run.main(["--short", "--planted_share", "0", "--output_dir", str(folder)])
    assert "world was built with other settings (" in capsys.readouterr().err

    # One stage alone builds what is missing before it, and says where it is
    before = {name: (demo / name / "model.safetensors").read_bytes() for name in ("reward", "guarded")}
    for name in before:
        shutil.rmtree(demo / name)
    for is_missing in (True, False):
        run.main(["--short", "--output_dir", str(folder), "--stage", "guarded"])
        output = capsys.readouterr().out
        assert (f"Building {demo / 'reward'}." in output) == is_missing
        assert f"guarded: {demo / 'guarded'} (" in output
    for name, weights in before.items():  # the same run as the whole demo's
        assert (demo / name / "model.safetensors").read_bytes() == weights
