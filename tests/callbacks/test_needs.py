"""What a monitor lacks is said before training."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer
from trl_ext.callbacks import GoldGapCallback, KLBudgetCallback, RepetitionCallback, check_monitors
from trl_ext.rewards import GoldJudgeReward, repetition_watch

ROWS = prompts(8)
HELD_OUT = ROWS.add_column("held_out", [True] * 8)


def stock(callbacks, rewards=(), eval_dataset=None, eval_strategy="steps"):
    """What `check_monitors` asks of a trainer."""
    return SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=callbacks),
        reward_funcs=[*rewards],
        train_dataset=ROWS,
        eval_dataset=eval_dataset,
        args=SimpleNamespace(process_index=0, eval_strategy=eval_strategy),
    )


@pytest.mark.parametrize(
    ("callbacks", "rewards", "given", "said"),
    [
        ([RepetitionCallback()], [length_reward], {}, ["`repetition_watch` is not among the reward functions"]),
        ([RepetitionCallback(), KLBudgetCallback()], [length_reward, repetition_watch], {}, []),
        ([GoldGapCallback()], [length_reward], {}, ["GoldGapCallback has no gold score to read"]),
        ([GoldGapCallback(gold="eval_mine")], [length_reward], {"eval_strategy": "no"}, ["`eval_strategy` is 'no'"]),
        ([], [GoldJudgeReward(length_reward)], {"eval_dataset": ROWS}, ["has no column `held_out`"]),
        ([], [GoldJudgeReward(length_reward)], {}, ["has no column `held_out`"]),
        ([GoldGapCallback()], [GoldJudgeReward(length_reward)], {"eval_dataset": {"a": ROWS, "b": HELD_OUT}}, []),
        ([], [GoldJudgeReward(length_reward)], {"eval_dataset": ROWS.to_iterable_dataset()}, ["no column"]),
        ([], [GoldJudgeReward(length_reward)], {"eval_dataset": SimpleNamespace(column_names=None)}, []),
    ],
)
def test_what_finds_nothing_is_named(callbacks, rewards, given, said):
    found = check_monitors(stock(callbacks, rewards, **given))
    assert len(found) == len(said) and all(part in sentence for part, sentence in zip(said, found, strict=True))


def test_our_trainer_says_it_once_when_it_is_built(tmp_path, caplog):
    def warned():
        return [record.message for record in caplog.records if record.name == "trl_ext.runs.needs"]

    trainer = PPOTrainer(
        model=tiny_llama(),
        reward_funcs=[length_reward, GoldJudgeReward(length_reward)],
        args=tiny_config(tmp_path, reward_weights=[1.0, 0.0], max_steps=1),
        train_dataset=ROWS,
        eval_dataset=Dataset.from_list([*ROWS]),
        processing_class=tiny_tokenizer(),
        callbacks=[RepetitionCallback()],
    )
    assert ["repetition_watch" in said for said in warned()] == [True, False]
    trainer.add_callback(GoldGapCallback(gold="eval_mine"))
    trainer.train()
    assert len(warned()) == 3 and "`eval_strategy` is 'no'" in warned()[2]
