"""The training and evaluation loop of transformers, observed on a plain GRPOTrainer."""

import inspect

import pytest
import torch
from transformers import Trainer, TrainerCallback
from trl.trainer.callbacks import SyncRefModelCallback

from tests.contract.observed import grpo, names_of, require
from tests.tiny import prompts


@pytest.mark.parametrize(
    "max_grad_norm, expected", [(1.0, ["_clip_grad_norm", "_get_grad_norm"]), (0.0, ["_get_grad_norm"])]
)
def test_gradients_are_complete_before_they_are_clipped(tmp_path, max_grad_norm, expected):
    trainer = grpo(tmp_path, max_grad_norm=max_grad_norm, gradient_accumulation_steps=2, max_steps=2)

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            trainer.events.append(("step", (), {}))

    trainer.add_callback(Note())
    trainer.train()
    order = names_of(trainer, "training_step", "_clip_grad_norm", "_get_grad_norm", "step")
    reader = "PPOTrainer, to look at whole gradients,"
    require(order == ["training_step", "training_step", *expected, "step"] * 2, f"the loop runs {order}", reader)
    norms = [kwargs.get("grad_norm") for name, _, kwargs in trainer.events if name == "_get_grad_norm"]
    require(
        all((norm is None) == (max_grad_norm == 0) for norm in norms), f"`_get_grad_norm` is given {norms}", reader
    )


def test_an_optimizer_leaves_parameters_without_gradient_alone():
    """Without a gradient, weight decay and moments do not change: skipped steps and critic warm-up rely on that."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=1.0, weight_decay=0.5)
    optimizer.step()
    require(torch.equal(parameter.detach(), torch.ones(3)), "AdamW moves a weight without gradient")
    require(not optimizer.state, "AdamW makes state for a weight without gradient")


@pytest.mark.parametrize("scaled, factor", [(True, 2.0), (False, 1.0)])
def test_loss_is_scaled_for_ga(tmp_path, scaled, factor):
    trainer = grpo(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.0)
    trainer.loss_is_scaled_for_ga = scaled
    trainer._compute_loss = lambda model, inputs: sum(p.sum() for p in model.parameters())
    grads = []

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            grads.append(next(trainer.model.parameters()).grad.flatten()[0].item())

    trainer.add_callback(Note())
    trainer.train()
    reader = "`loss_is_scaled_for_ga` of PPOTrainer"
    require(grads == [factor], f"with `loss_is_scaled_for_ga={scaled}` the gradient of Σp twice is {grads}", reader)


def test_requests_are_read_after_they_are_carried_out(tmp_path):
    """`AgreedControl` may change them just before the loop reads them."""
    loop = inspect.getsource(Trainer._run_epoch)
    done, read = (loop.find(text) for text in ("self._maybe_log_save_evaluate(", "control.should_training_stop:"))
    require(0 < done < read, "the loop reads requests before `_maybe_log_save_evaluate`", "`AgreedControl`")


def test_evaluation_calls(tmp_path):
    trainer = grpo(tmp_path, eval_dataset=prompts(6), per_device_eval_batch_size=4, num_generations_eval=2)
    trainer.prediction_step = lambda *args, **kwargs: trainer.events.append(("step", args, kwargs)) or (None,) * 3
    metrics = trainer.evaluate()
    order = names_of(trainer, "evaluation_loop", "step", "log")
    reader = "`evaluation_loop` of PPOTrainer"
    require(order == ["evaluation_loop", *["step"] * 3, "log"], f"`evaluate()` runs {order}", reader)
    batches = [args[1] for name, args, _ in trainer.events if name == "step"]
    require(all(isinstance(batch, list) and len(batch) == 4 for batch in batches), "batches are other", reader)
    require(not trainer.model.training, "`evaluate()` does not leave the model in eval mode", "What PPOTrainer logs")
    require("eval_loss" not in metrics, "an evaluation without a loss reports one", reader)
    loader = next(args[0] for name, args, _ in trainer.events if name == "evaluation_loop")
    require(len(loader.dataset) == 6, "the evaluation's loader has another dataset", reader)


def test_log_averages_and_clears_the_metrics(tmp_path):
    trainer = grpo(tmp_path)
    reader = "`log` of PPOTrainer"
    trainer.model.train()
    trainer._metrics["train"]["a"] = [1.0, 3.0]
    trainer.log(logs := {"loss": 0.0})
    require(logs["a"] == 2.0 and not trainer._metrics["train"], f"`log` makes {logs} of the metrics", reader)
    trainer.model.eval()
    trainer._metrics["eval"]["a"] = [1.0]
    trainer.log(logs := {"eval_b": 0.0})
    require(logs["eval_a"] == 1.0 and not trainer._metrics["eval"], f"`log` makes {logs} in evaluation", reader)


def test_sync_callback_reads_the_model_from_its_keywords():
    calls = []

    class Sync(SyncRefModelCallback):
        @staticmethod
        def sync_target_model(model, target_model, alpha):
            calls.append((model, target_model, alpha))

    model, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    args = type("Args", (), {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6})
    callback = Sync(ref_model=reference, accelerator=None)
    for step in (1, 2):
        callback.on_step_end(args, type("State", (), {"global_step": step}), None, model=model)
    require(calls == [(model, reference, 0.6)], f"it synchronises {calls}", "The moving reference of PPOTrainer")
