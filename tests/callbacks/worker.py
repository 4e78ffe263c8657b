"""All runs of two processes, in one launch."""

import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer, SFTTrainer

from tests.callbacks.replay import SIZES, sft
from tests.launch import spare_time
from tests.tiny import length_reward, prompts
from trl_ext.callbacks import CanaryCallback, GoldGapCallback, JSONLCallback, KLBudgetCallback
from trl_ext.callbacks.monitor import alerts_of
from trl_ext.rewards import GoldJudgeReward, repetition_watch
from trl_ext.runs.checkpoints import CannotResume, ResumableRun, checkpoint_to_resume
from trl_ext.runs.control import STOPPED

COMMON = {"max_steps": 6, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}


class Numbers(TrainerCallback):
    """Logs a number that differs between processes, as `step_time` does; 0 before step 4."""

    def __init__(self, *values):
        self.value = values[PartialState().process_index]

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs["mine"] = self.value if state.global_step >= 4 else 0.0


class ResumableSFTTrainer(ResumableRun, SFTTrainer):
    pass


def outcome(trainer, folder):
    start = time.monotonic()
    trainer.train()
    return {
        "step": trainer.state.global_step,
        "alerts": [(a["monitor"], a["what"], a["step"]) for a in alerts_of(trainer.state)],
        "checkpoints": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
        "history": trainer.state.log_history,
        "seconds": time.monotonic() - start,
    }


def same_command_again(folder, cls):
    """
    Process 0, which decides, reads a number over the limit at step 4; then the same command again, and again
    without the stop's file. In that last run only process 1 reads such a number.
    """
    ends = []
    for _ in range(3):
        monitor = KLBudgetCallback(keys={"kl": "mine"}, tolerance=99, action="stop")
        numbers = Numbers(50.0, 5.0) if len(ends) < 2 else Numbers(5.0, 50.0)
        trainer = sft(folder, numbers, monitor, cls=cls, **COMMON, save_strategy="steps", save_steps=2)
        again = checkpoint_to_resume(trainer.args) if cls is ResumableSFTTrainer else bool(ends)
        try:
            trainer.train(resume_from_checkpoint=again)
            ends.append(trainer.state.global_step)
        except CannotResume as error:
            ends.append(type(error).__name__)
        PartialState().wait_for_everyone()
        ends[-1] = (ends[-1], sorted(path.name for path in Path(folder).glob("checkpoint-*")))
        if len(ends) == 2 and PartialState().is_main_process:
            Path(folder, STOPPED).unlink()
        PartialState().wait_for_everyone()
    return ends


def canary(folder):
    """Each process has its own clock. By process 1's, no canary is ever due."""
    trainer = sft(folder, **COMMON, learning_rate=0.0, eval_strategy="steps", eval_steps=3)
    minutes = (0.0, 1e9)[PartialState().process_index]
    trainer.add_callback(CanaryCallback(trainer=trainer, prompts=["the cat"], minutes=minutes, max_new_tokens=4))
    calls = []

    def judge(completions, **kwargs):
        calls.append(len(completions))
        return [float(len(text)) for text in completions]

    trainer.add_callback(GoldGapCallback(trainer=trainer, judge=judge, num_prompts=3, max_new_tokens=4))
    return outcome(trainer, folder) | {"judged": calls}


def rloo(folder, model):
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=[length_reward, repetition_watch, GoldJudgeReward(length_reward)],
        args=RLOOConfig(
            str(folder),
            **SIZES
            | COMMON
            | {"num_generations": 2, "max_completion_length": 6, "reward_weights": [1.0, 0.0, 0.0], "beta": 0.05}
            | {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 1, "learning_rate": 1e-2},
        ),
        train_dataset=prompts(16),
        eval_dataset=prompts(8, seed=1).add_column("held_out", [True] * 8),
    )
    trainer.add_callback(JSONLCallback())
    trainer.add_callback(KLBudgetCallback(warn=1e-6, limit=1e-5, tolerance=99, action="stop"))
    return outcome(trainer, folder)


def main(folder):
    model = str(folder / "model")
    results = {
        "canary": canary(folder / "canary"),
        "rloo": rloo(folder / "rloo", model),
        "again": {
            cls.__name__: same_command_again(folder / cls.__name__, cls) for cls in (SFTTrainer, ResumableSFTTrainer)
        },
    }
    torch.save(results, folder / f"process {PartialState().process_index}.pt")


if __name__ == "__main__":
    spare_time()
    main(Path(sys.argv[1]))
