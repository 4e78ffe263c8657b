"""`reward_funcs:` of the recipes."""

import pickle
from pathlib import Path

import pytest
import torch
import yaml

import trl_ext.rewards
from tests.rewards.http_stub import serving
from tests.tiny import tiny_llama, tiny_ppo, tiny_reward_model, tiny_tokenizer
from trl_ext.rewards import joined_weights, load_reward, load_rewards, reward_identity

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def repository_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_reward_is_loaded_by_name_or_file(subtests):
    for path in ["recipes.tinystories.rewards.repetition_reward", "recipes/tinystories/rewards.py:repetition_reward"]:
        with subtests.test(path=path):
            assert load_reward(path)(completions=["a b c a b c"]) == [-0.25]


@pytest.mark.optional
def test_rewards_of_every_shipped_file_load_from_any_folder(subtests):
    files = [yaml.safe_load(path.read_text()) for path in ROOT.glob("recipes/*/*.yaml")]
    for name in {name for file in files for name in file.get("reward_funcs", [])}:
        with subtests.test(name=name):
            assert ".py:" in name or name.startswith("trl_ext.")
            try:
                assert callable(load_reward(name))
            except ImportError as error:  # except for rewards of an extra
                assert getattr(error.__cause__, "name", None) in ("gymnasium", "reasoning_gym", "textarena"), error


CLASS = "class Fixed:\n    __name__ = 'fixed'\n    def __call__(self, completions, **_):\n        return [0.0]\n"


def test_a_file_is_executed_once_and_its_rewards_pickle(tmp_path):
    files = [tmp_path / folder / "rewards.py" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"{CLASS}one, two = Fixed(), Fixed()\n")
    one, two = (load_reward(f"{files[0]}:{name}") for name in ("one", "two"))
    assert type(one) is type(two)
    assert type(load_reward(f"{files[1]}:one")) is not type(one)
    assert type(pickle.loads(pickle.dumps(one))) is type(one)
    files[0].write_text("1 / 0")
    for _ in range(2):  # an edited file is executed again, and one that fails is not cached
        with pytest.raises(ZeroDivisionError):
            load_reward(f"{files[0]}:one")


# ---- `rewards:` ----

LENGTH, WORLD = "tests/tiny.py:length_reward", "recipes/demo/world.py:gold_reward"
NESTED = {
    "ConstitutionReward": {
        "reward": {"EnsembleReward": {"members": [LENGTH, LENGTH], "name": "half"}},
        "members": [{"get_soft_overlong_punishment": {"max_completion_len": 4, "soft_punish_cache": 2}}],
        "minimum": 0.0,
        "cap": -3.0,
    }
}
CALL = {"prompts": ["", ""], "completions": ["a b", "a b c d e f"], "completion_ids": [[1, 2], [1, 2, 3, 4, 5]]}


def test_nested_entries_are_built_and_numbered():
    entries = [{**NESTED, "weight": 0.5}, LENGTH, {"ScoreWatch": {"reward": WORLD, "bound": 0.8}}, NESTED]
    functions, weights = load_rewards(entries)
    # Two words; six words, but more than four tokens
    assert functions[0](**CALL) == functions[3](**CALL) == [2.0, -3.0]
    assert weights == [0.5, None, None, None]
    name = "constitution_half"
    assert [f.__name__ for f in functions] == [f"{name}_0", "length_reward", "gold_reward", f"{name}_3"]
    assert joined_weights(None, [None, *weights]) == [1.0, 0.5, 1.0, 1.0, 1.0]
    assert joined_weights([1.0, 2.0], [None, None]) == [1.0, 2.0] and joined_weights(None, [None]) is None
    with pytest.raises(ValueError, match=r"`reward_weights` \[1.0\] and `weight` in an entry of `rewards` are both"):
        joined_weights([1.0], [2.0])


def test_a_mistyped_entry_is_refused(subtests):
    for entry, message in [
        ({"EnsembleRewrad": {}}, "entry 2: unknown reward 'EnsembleRewrad'; did you mean EnsembleReward"),
        ({"ModelReward": ["path"]}, "entry 2: the arguments of ModelReward must be `argument: value`"),
        ({"EnsembleReward": {"member": []}}, "entry 2: .*'members?'"),
        ({"EnsembleReward": None}, "entry 2: .*missing 1 required positional argument: 'members'"),
        ({"EnsembleReward": {"members": [LENGTH, {"EnsembleRewrad": {}}]}}, "entry 2: unknown reward"),
        ({"EnsembleReward": {"members": [{"EnsembleReward": {"x": 1}}]}}, "entry 2: .*'x'"),
        ({**NESTED, "weight": "a"}, "could not convert string to float: 'a'"),
        ({**NESTED, "name": "a"}, "entry 2: a reward must be a path to a function, or one `Name: {argument: value}`"),
        (3, "entry 2: a reward must be a path to a function"),
        ("absent.module.reward", "'absent.module.reward' cannot be imported: No module named 'absent'"),
        ("tests/tiny.py:length_rewards", "'tests/tiny.py:length_rewards' cannot be imported"),
        ({"EnsembleReward": {"members": ["tests/tinny.py:x"]}}, "No such file or directory: .*tinny.py"),
    ]:
        with subtests.test(message), pytest.raises((ValueError, ImportError), match=message):
            load_rewards([LENGTH, entry])


# ---- All rewards together ----

EVERY = """
- ConstitutionReward:
    name: rules
    reward:
      EnsembleReward:
        members:
          - ModelReward: {model: MODEL, max_batch_tokens: 64, truncation: left}
          - MODEL
        combine: uncertainty
        uncertainty_coef: 0.5
        max_disagreement: 100.0
        model_kwargs: {dtype: float32}
    members:
      - PatternReward: {forbidden: [zebra], timeout: 1.0}
      - PatternReward: {required: [cat], name: wanted}
    minimum: [0.5, 0.0]
    cap: -1.0
    judge:
      JudgeReward: {url: URL, model: m, rubric: Be kind., scale: [1, 10], on_error: skip}
  weight: 2
- CachedReward:
    reward:
      RemoteReward: {url: URL, name: served, retries: 0}
    columns: [finished]
- get_soft_overlong_punishment: {max_completion_len: 8, soft_punish_cache: 4}
- get_repetition_penalty_reward: {ngram_size: 2, max_penalty: -1.0}
- ScoreWatch: {reward: "tests/tiny.py:length_reward", bound: 3.0}
  weight: 0.5
- GoldJudgeReward: {judge: recipes/demo/world.py:gold_reward, score: 0.0}
  weight: 0
- PhraseReviewReward: {phrases: [cat], veto: -1.0}
- RepetitionWatch: {n: 2}
  weight: 0
"""


def names_in(value):
    if isinstance(value, list):
        return {name for each in value for name in names_in(each)}
    return set(value).union(*map(names_in, value.values())) if isinstance(value, dict) else set()


@pytest.mark.slow
def test_every_reward_can_be_named_in_yaml_and_all_train_together(tmp_path):
    torch.manual_seed(0)
    tiny_reward_model(tiny_llama()).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)

    def answer(body, handler):
        if "messages" in body:
            return {"choices": [{"message": {"content": '{"score": 7}'}}]}
        return {"scores": [float(len(text)) for text in body["completions"]]}

    with serving(answer) as (url, came):
        entries = yaml.safe_load(EVERY.replace("MODEL", str(tmp_path)).replace("URL", url))
        public = {name for name in trl_ext.rewards.__all__ if name.endswith(("Reward", "Watch"))}
        assert public <= names_in(entries)
        functions, weights = load_rewards(entries, str(tmp_path))
        assert [reward_identity(f) for f in functions] == [
            reward_identity(f) for f in load_rewards(entries, str(tmp_path))[0]
        ]
        trainer = tiny_ppo(
            tmp_path / "run", None, functions, reward_weights=joined_weights(None, weights), max_steps=1
        )
        trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/rules/violations"] == log["rewards/rules/unchecked"] == 0
    shares = {"rules": 2, "cached_served": 1, "soft_overlong_punishment_reward": 1}
    shares |= {"repetition_penalty_reward": 1, "length_reward": 0.5, "phrase_review": 1}
    whole = sum(weight * log[f"rewards/{name}/mean"] for name, weight in shares.items())
    assert log["objective/scores"] == pytest.approx(whole, rel=1e-4) and log["rewards/cached_served/mean"] > 0
    assert sum("messages" in body for body in came) == 8  # one request per completion
