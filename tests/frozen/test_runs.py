"""What trl_ext 0.2.0 has left on the disk is read, and gone on with, as it was then."""

import json
import platform
import re
import shutil
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import trl_ext.callbacks
import trl_ext.data
import trl_ext.rewards
import trl_ext.workbench
from recipes import online_dpo, refresh_reward, reward
from tests.frozen import commands
from trl_ext.cli.main import main
from trl_ext.ppo.snapshot import Snapshot
from trl_ext.runs.checkpoints import CannotResume, RolledBack

DATA = Path(__file__).parent / "data"
VERSIONS = json.loads((DATA / "versions.json").read_text())
# Which settings a run has, and how source is written again, are theirs to change
OTHERS = [
    f"{name} {now}, written with {VERSIONS[name]}"
    for name in VERSIONS
    if (now := platform.python_version() if name == "python" else version(name)).split(".")[:2]
    != VERSIONS[name].split(".")[:2]
]
of_these_versions = pytest.mark.skipif(bool(OTHERS), reason="; ".join(OTHERS))


@pytest.fixture
def frozen(tmp_path, monkeypatch):
    """A copy of all that is frozen, as the working directory."""
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@of_these_versions
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "ppo_ahead" else ()) for name in commands.COMMANDS]
)
def test_a_run_goes_on_by_the_same_command(frozen, name, capsys, monkeypatch):
    monkeypatch.setattr("trl_ext.workbench.write_report", lambda folder: None)  # see below; it takes seconds
    command = commands.COMMANDS[name]
    trainer = command(name)
    trainer.train(resume_from_checkpoint=True)
    assert f"Resuming from {name}/checkpoint-3, step 3 of 6." in capsys.readouterr().out
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [1, 2, 3, 4, 5, 6]
    command(name).train(resume_from_checkpoint=True)  # what is written now is of the same run, too
    assert f"Training is complete, at step 6: loading {name}/checkpoint-6." in capsys.readouterr().out


@of_these_versions
def test_a_run_of_another_reward_is_still_refused(frozen, monkeypatch):
    monkeypatch.setattr(commands, "SCALE", 11.0)  # of which `shortness` depends
    with pytest.raises(CannotResume, match="reward 1, `shortness`, has changed"):
        commands.ppo_lora("ppo_lora").train(resume_from_checkpoint=True)


def test_what_a_checkpoint_remembers_is_taken_up(frozen):
    """Not only the same settings: the state of controllers and monitors, and the rest of a rollout."""
    saved = torch.load("ppo/checkpoint-3/ppo_state_0.pt", weights_only=True)
    trainer = commands.ppo("ppo")
    Snapshot.load("ppo/checkpoint-3", 0).restore(trainer)
    assert trainer.kl_controller.state_dict() == saved["kl_controller"]
    assert str(trainer.reward_normalizer.state_dict()) == str(saved["reward_normalizer"])
    assert saved["rollout"] is not None and trainer._step == saved["step"] == 3
    saved = torch.load("dpo/checkpoint-3/dpo_state.pt", weights_only=True)
    trainer = commands.dpo("dpo")
    trainer._load_own_state("dpo/checkpoint-3")
    assert trainer.beta == saved["beta"] != 0.1
    assert str(trainer.margin_normalizer.state_dict()) == str(saved["source"])


@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "sft", "reward", "rolled_back"))]
)
def test_a_page_is_written_of_a_run(frozen, name):
    assert main(["report", name]) in (None, 0)
    page = Path(name, "report.html").read_text()
    said = {
        "ppo": ["big over log sat", "rewards/doubled/mean", "ref_model_sync_steps"],
        "rolled_back": ["EntropyFloorCallback", "its floor"],
    }
    assert len(page) > 10_000 and all(each in page for each in said.get(name, []))


@pytest.mark.slow
@of_these_versions
def test_a_rollback_holds_until_a_setting_is_changed(frozen, capsys):
    with pytest.raises(RolledBack, match="EntropyFloorCallback rolled this run back at step 2"):
        commands.rolled_back("rolled_back").train()
    with pytest.raises(RolledBack, match="step 2 "):  # the monitor finds it again
        commands.rolled_back("rolled_back", learning_rate=2e-3).train()
    assert "Going on after the rollback at step 2, with learning_rate: 0.001 → 0.002." in capsys.readouterr().out


def test_arguments_are_unpickled(frozen):
    for name, kind in [("ppo", trl_ext.PPOConfig), ("dpo", trl_ext.DPOConfig), ("critic", trl_ext.CriticConfig)]:
        args = torch.load(f"{name}/checkpoint-3/training_args.bin", weights_only=False)
        assert type(args) is kind and args.max_steps == 6


def test_a_critic_is_taken_from_what_ppo_has_saved(frozen, tmp_path):
    for name, peft_config in (("saved_ppo", None), ("saved_ppo_lora", "lora")):
        trainer = trl_ext.PPOTrainer(
            model="start/policy",
            reward_funcs=[commands.shortness],
            args=trl_ext.PPOConfig(str(tmp_path / name), **commands.PPO, record_run=False),
            train_dataset=commands.rows("prompts"),
            value_model=f"{name}/critic",
            peft_config=peft_config and commands.LoraConfig(**commands.LORA),
        )
        assert f"{name}/critic" in trainer._critic_origin


def test_reward_models_are_read(frozen):
    """Their record of pairs, their reports, and an ensemble of them."""
    ensemble = trl_ext.rewards.EnsembleReward("ensemble", normalize=True)
    assert len(ensemble(["the cat "], ["sat on the mat"], finished=[True])) == 1
    trained = trl_ext.data.TrainedPairs.load("ensemble/member-0")
    assert trained.is_complete and len(trained.pairs) == 6
    pairs = Dataset.from_list([json.loads(line) for line in Path("start/pairs/train.jsonl").read_text().splitlines()])
    assert len(trl_ext.data.not_trained_on(pairs, trained)) == 6
    said = trl_ext.workbench.objections(["ensemble/member-0"])
    assert said and "reward_report.json says no" in said[0]


def done_again(command, words, folder):
    """Run a command that is complete; return which of its files it changed, but for the last digits of its figures."""
    before = {path: content_of(path) for path in Path(folder).rglob("*") if path.is_file()}
    command(words)
    return {str(path) for path, content in before.items() if content_of(path) != content}


def content_of(path):
    """A report is computed anew, and another CPU rounds otherwise: of JSON's numbers nine digits count."""
    content = path.read_bytes()
    if path.suffix == ".json":
        content = re.sub(rb"-?\d+\.\d+(e-?\d+)?", lambda number: b"%.9g" % float(number[0]), content)
    return content


@of_these_versions
@pytest.mark.parametrize(
    ("command", "words", "folder"),
    [
        (online_dpo.main, [*commands.ONLINE_DPO, "--num_rounds", "1"], "online_dpo"),
        (reward.main, commands.REWARD, "ensemble"),
        (refresh_reward.main, [*commands.REFRESH, *commands.REFRESH_TRAIN], "round-1"),
    ],
    ids=["online_dpo", "reward ensemble", "refresh_reward"],
)
def test_a_recipe_that_is_complete_is_left_as_it_is(frozen, command, words, folder, capsys):
    assert done_again(command, words, folder) == set()
    assert "Resuming" not in capsys.readouterr().out
    assert not list(Path(folder).rglob("checkpoint-*"))


@pytest.mark.slow
@of_these_versions
def test_online_dpo_goes_on_with_another_round(frozen):
    first = Path("online_dpo/round-1/model.safetensors").read_bytes()
    online_dpo.main([*commands.ONLINE_DPO, "--num_rounds", "2"])
    assert [entry["round"] for entry in json.loads(Path("online_dpo/online_dpo.json").read_text())] == [0, 1, 2]
    assert Path("online_dpo/round-1/model.safetensors").read_bytes() == first


def test_the_next_round_of_labels_knows_the_one_before(frozen):
    words = [*commands.REFRESH[:-2], "--earlier", "round-1", "--seed", "1", "--num_prompts", "12"]
    words[words.index("round-1")] = "round-2"
    refresh_reward.main(words)
    queued = [
        {row["item"] for row in refresh_reward.read_rows(Path(name, "queue.jsonl"))} for name in ("round-1", "round-2")
    ]
    assert queued[1] and not queued[0] & queued[1]


def test_advice_reads_the_reports(frozen, capsys):
    words = ["--annotators", "annotators", "--prompts_report", "prompts"]
    assert main(["advise", *words, "--reward_report", "ensemble/member-0"]) in (None, 0)
    assert capsys.readouterr().out


def test_a_gold_judge_compares_with_the_start_that_is_there(frozen):
    judge, logged = trl_ext.rewards.GoldJudgeReward(commands.shortness, folder="gold"), {}
    state = type("State", (), {"global_step": 5})()
    judge(["a", "b"], ["sat", "cat dog"], held_out=[True, True], trainer_state=state, log_metric=logged.__setitem__)
    assert logged["gold/win_rate"] == 0.5  # one is shorter than at the start, one is longer


@of_these_versions
def test_identities_are_those_of_0_2_0(frozen, monkeypatch):
    """A move, another order of attributes, a comment, a docstring: nothing of that is another reward."""
    monkeypatch.setattr(trl_ext.rewards.repetition_watch, "top_phrase", "")  # of the last test that used it
    expected = json.loads(Path("identities.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert {name: trl_ext.rewards.source_identity(each) for name, each in commands.told().items()} == expected
