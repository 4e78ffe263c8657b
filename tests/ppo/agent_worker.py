"""Runs of PPO on an environment, for tests that need separate processes."""

import os
import random
import signal
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests.agents import Counter, byte_tokenizer, call, counts, played_by
from tests.launch import spare_time
from tests.tiny import tiny_llama, tiny_ppo
from trl_ext.runs.checkpoints import checkpoint_to_resume


class Slippery(Counter):
    """Sometimes adds another number, by a generator that `reset` does not seed."""

    def __init__(self):
        self._random = random.Random(0)

    def add(self, number: int) -> str:
        """
        Add a number, or 2.

        Args:
            number: what to add.

        Returns:
            The sum.
        """
        return super().add(2 if self._random.random() < 0.3 else number)


class Kept(Slippery):
    def _state_dict(self):
        version, numbers, gauss = self._random.getstate()
        return {"version": version, "numbers": list(numbers), "gauss": gauss}

    def _load_state_dict(self, state):
        self._random.setstate((state["version"], tuple(state["numbers"]), state["gauss"]))


def player(history):
    """Add a random number, up to four times."""
    if history.count("The sum is") == 4 or torch.rand(()) < 0.2:
        return "Done.<|im_end|>"
    return call("add", number=int(torch.randint(3, ())))


class KillAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


TOGETHER = {"save_strategy": "no", "max_steps": 2, "shuffle_dataset": False, "num_mini_batches": 1}


def rows(targets):
    return Dataset.from_list([{"prompt": [{"role": "user", "content": "Count. "}], "target": n} for n in targets])


def make(folder, environment=Kept, callbacks=None, policy=None, **config):
    tokenizer = byte_tokenizer()
    model = policy or tiny_llama(len(tokenizer), max_position_embeddings=2048)
    given = {"train_dataset": rows([n % 3 for n in range(16)]), "eval_dataset": rows([2] * 4), "callbacks": callbacks}
    given |= {"processing_class": tokenizer, "environment_factory": environment, "max_completion_length": 400}
    given |= {"max_steps": 8, "save_strategy": "steps", "save_steps": 3, **config}
    return played_by(tiny_ppo(folder, model, None, **given), player)


def run(folder, kill):
    """Start or resume the run in this folder, until it is killed after a step or ends."""
    trainer = make(folder, callbacks=[KillAfter(kill)] if kill else None)
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(trainer.args))
    torch.save(trainer.model.state_dict(), folder / "end.pt")


if __name__ == "__main__":
    spare_time()
    match sys.argv[1:]:
        case ["killed", folder]:  # each run in a fork, since imports take longer
            for name, kill in (("whole", 0), ("killed", 5), ("killed", 0)):
                if not (child := os.fork()):
                    run(Path(folder, name), kill)
                    os._exit(0)
                print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        case ["distributed", folder]:
            trainer = make(folder, **TOGETHER | {"per_device_train_batch_size": 4})
            played_by(trainer, counts).train()
            rank, unwrap = trainer.accelerator.process_index, trainer.accelerator.unwrap_model
            results = {"weights": unwrap(trainer.model).state_dict(), "logs": trainer.state.log_history}
            played_by(trainer, lambda history: "Done.<|im_end|>")
            results["evaluated"] = trainer.evaluate(rows([0, 1, 2, 0, 1]))
            for name, start in (("whole", None), ("resumed", f"{folder}/whole/checkpoint-8")):
                trainer = make(Path(folder, "whole"), max_steps=12, save_steps=8, per_device_train_batch_size=4)
                trainer.train(resume_from_checkpoint=start)
                results[name] = unwrap(trainer.model).state_dict()
            torch.save(results, Path(folder, f"process {rank}.pt"))
