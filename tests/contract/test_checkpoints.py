"""What is saved and loaded, and when."""

import inspect

import pytest
import torch
from accelerate.utils import fsdp_utils
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from tests.contract.observed import grpo, names_of, require
from tests.tiny import prompts


@pytest.mark.parametrize(
    "stop_at",
    [
        pytest.param(1, id="mid-rollout"),
        pytest.param(2, id="a rollout's end", marks=pytest.mark.slow),
        pytest.param(8, id="an epoch's end"),
    ],
)
def test_resume_loads_rng_state_after_the_loop_sets_its_counters(tmp_path, stop_at):
    config = {"save_strategy": "steps", "save_steps": stop_at, "max_steps": stop_at + 1, "steps_per_generation": 2}
    grpo(tmp_path, **config).train()
    resumed = grpo(tmp_path, **config)
    load, train_step, seen = resumed._load_rng_state, resumed.training_step, []

    def record_load(checkpoint):
        load(checkpoint)
        seen.append((resumed._tr_loss.item(), resumed._total_loss_scalar, resumed._globalstep_last_logged))
        seen.append(bool(resumed.optimizer.state_dict()["state"]))
        resumed._tr_loss, resumed._total_loss_scalar = torch.tensor(100.0), 7.0
        resumed._step = stop_at

    def record_train_step(*args):
        seen.append((resumed._tr_loss.item(), resumed._total_loss_scalar, resumed._step))
        return train_step(*args)

    resumed._load_rng_state, resumed.training_step = record_load, record_train_step
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"{PREFIX_CHECKPOINT_DIR}-{stop_at}"))
    reader = "`_load_rng_state` of PPOTrainer"
    require(seen[0] == (0.0, 0.0, stop_at), f"the counters are {seen[0]} when it is called", reader)
    require(seen[1], "the optimizer is loaded after it", reader)
    require(seen[2] == (100.0, 7.0, stop_at), f"what it set is {seen[2]} in the first step", reader)
    order = names_of(resumed, "_load_from_checkpoint", "_load_rng_state", "training_step")
    require(
        order[:2] == ["_load_from_checkpoint", "_load_rng_state"] and order.count("_load_rng_state") == 1,
        f"resuming runs {order}",
        reader,
    )


def test_saving(tmp_path):
    trainer = grpo(tmp_path, save_strategy="steps", save_steps=1, max_steps=2, save_total_limit=1)
    trainer.train()
    order = names_of(trainer, "_save_checkpoint", "_save", "_save_rng_state")
    reader = "PPOTrainer"
    require(order[:3] == ["_save_checkpoint", "_save", "_save_rng_state"], f"a checkpoint is {order}", reader)
    folder = tmp_path / "out" / f"{PREFIX_CHECKPOINT_DIR}-2"
    require((folder / "trainer_state.json").is_file(), "the state is not in trainer_state.json", reader)
    saves = [(args, kwargs) for name, args, kwargs in trainer.events if name == "_save"]
    require(saves[1][0] == (str(folder),), f"`_save` is called with {saves[1]}", reader)
    require(not folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-1").exists(), "`save_total_limit` is not applied", reader)


def test_load_best_model_loads_into_self_model(tmp_path):
    trainer = grpo(
        tmp_path,
        eval_dataset=prompts(4),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        per_device_eval_batch_size=4,
        max_steps=2,
        learning_rate=0.1,
    )
    trainer.train()
    require("_load_best_model" in names_of(trainer), "`_load_best_model` is not called")
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    require(
        torch.equal(best.lm_head.weight, trainer.model.lm_head.weight),
        "`_load_best_model` does not load `state.best_model_checkpoint` into `self.model`",
    )


def test_fsdp_checkpoints_ask_whether_a_model_is_peft():
    for function in (fsdp_utils._get_model_state_dict, fsdp_utils._set_model_state_dict):
        asks = "if adapter_only and is_peft_model(model):" in inspect.getsource(function)
        require(
            asks,
            f"`{function.__name__}` of accelerate asks otherwise",
            "Saving of adapters",
        )
