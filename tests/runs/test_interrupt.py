"""Ctrl-C says where the same command resumes."""

import pytest
from transformers import TrainerCallback

from tests.ppo.worker import make_trainer


def test_an_interrupted_run_names_the_checkpoint_that_it_resumes_from(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    for save, words in (("steps", "resumes from .*checkpoint-4"), ("no", "restarts, since there is no complete")):
        trainer = make_trainer(tmp_path / save, max_steps=8, save_strategy=save, save_steps=4)
        trainer.add_callback(Stop())
        with pytest.raises(KeyboardInterrupt, match=f"The same command {words}"):
            trainer.train()
