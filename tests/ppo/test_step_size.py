"""The learning rate follows the KL of the updates, from any start and for any micro-batches."""

import statistics

import pytest
import torch
from transformers import TrainerCallback

from tests.tiny import scripted, tiny_lora_ppo, tiny_ppo
from trl_ext.callbacks import request_rate_scale
from trl_ext.ppo.step_size import LearningRateController, StepSums

FOLLOWS = {"step_kl_target": 0.4, "lr_scheduler_type": "constant", "logging_steps": 1, "num_ppo_epochs": 2}


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


def test_within_a_step_the_optimizer_has_the_scaled_learning_rates():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [w], "lr": rate} for w, rate in zip(weights, (1.0, 10.0), strict=True)])
    controller = LearningRateController(0.05)
    for _ in range(2):  # attached once
        controller.scaler.attach(optimizer)

    def step():
        for weight in weights:
            weight.data.zero_()
            weight.grad = -torch.ones(1)
        optimizer.step()
        return [weight.item() for weight in weights]

    assert step() == pytest.approx([0.1, 1.0]) and [group["lr"] for group in optimizer.param_groups] == [1.0, 10.0]
    controller.is_on = False
    assert step() == [1.0, 10.0]
    fixed = LearningRateController(0.0)
    fixed.scaler.attach(optimizer)
    fixed.scale(0.5)
    assert step() == [0.5, 5.0]


def test_a_small_rollout_has_its_share_of_the_target(tmp_path):
    assert [LearningRateController(0.1, n).target for n in (8, 64, 256, 1024)] == pytest.approx(
        [0.0125, 0.1, 0.2, 0.2]
    )
    trainer = tiny_ppo(tmp_path, step_kl_target=0.4, num_mini_batches=2, per_device_train_batch_size=4)
    assert trainer.learning_rate_controller.target == pytest.approx(0.05)


def test_long_completions_have_a_part_of_the_kl_target(tmp_path):
    adaptive = {"kl_controller": "adaptive", "kl_coef": 0.1, "kl_target": 0.2, "max_steps": 4}
    trainer = tiny_ppo(tmp_path, **FOLLOWS, **adaptive)
    observe, seen = trainer.learning_rate_controller.observe, []
    trainer.learning_rate_controller.observe = lambda sums, *given: seen.append(sums) or observe(sums, *given)
    trainer.train()
    last = torch.tensor(seen[-trainer.args.num_mini_batches :]).sum(0)
    (_, choices, _, completions), controller = last.tolist(), trainer.learning_rate_controller
    assert completions == trainer.args.batch_size
    assert controller.present_target * choices / completions == pytest.approx(2.5 * trainer.args.step_kl_target * 0.2)
    controller.observe(StepSums(0.0, 0.01, 1.0, 1.0), 0, 1)  # near-certain tokens
    assert controller.present_target == controller.target


def test_the_factor_rises_freely_until_the_target_was_in_reach_and_then_by_half_in_a_rollout():
    controller, factors = LearningRateController(0.1), []
    for kl in (0.001, 0.03, 0.01, 0.0):  # the second KL is in reach
        for taken in (0, 1):
            controller.observe(StepSums(kl, 1.0, 1.0, 1.0), taken, 1)
        factors.append(controller.factor)
    rises = [after / before for before, after in zip([0.1, *factors], factors, strict=False)]
    assert rises == pytest.approx([10.0, (0.1 / 0.03) ** 0.5, 1.5, 1.0])


@pytest.mark.parametrize("build", [tiny_ppo, pytest.param(tiny_lora_ppo, marks=pytest.mark.slow)])
def test_learning_rates_a_factor_of_100_apart_become_equal(build, tmp_path):
    rates, kls = [], []
    for rate in (1e-3, 1e-1):
        shape = {"num_mini_batches": 2, "per_device_train_batch_size": 32, "max_steps": 24, "rows": 64}
        trainer = build(tmp_path / str(rate), **FOLLOWS, **shape, learning_rate=rate)
        trainer.train()
        rates.append(rate * statistics.median(logged(trainer, "learning_rate/factor")[-4:]))
        kls.append(statistics.median(logged(trainer, "policy/step_kl")[-4:]))
    assert rates[1] / 4 < rates[0] < 4 * rates[1]
    target = trainer.learning_rate_controller.target * 3 / 4  # before the last of four steps
    assert all(target / 4 < kl < target * 4 for kl in kls)
    assert set(logged(trainer, "policy/step_kl_target")) == {target}


@pytest.mark.parametrize("level", ["token", pytest.param("turn", marks=pytest.mark.slow)])
def test_the_kl_does_not_depend_on_the_micro_batches(level, tmp_path):
    found = []
    for size, accumulation in ((8, 1), (2, 4)):
        config = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        trainer = scripted(tiny_ppo(tmp_path / str(size), **FOLLOWS, **config, gae_level=level, max_steps=4))
        trainer.train()
        found.append(logged(trainer, "policy/step_kl") + logged(trainer, "learning_rate/factor"))
    assert len(found[0]) == 1 + 4 and found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.slow
def test_a_single_step_on_a_rollout_is_measured_after_it(tmp_path):
    single = {"num_mini_batches": 1, "num_ppo_epochs": 1, "per_device_train_batch_size": 8}
    trainer = tiny_ppo(tmp_path, **{**FOLLOWS, **single}, learning_rate=1e-3, max_steps=10)
    observe, seen = trainer.learning_rate_controller.observe, []
    trainer.learning_rate_controller.observe = lambda *given: seen.append(given[1]) or observe(*given)
    trainer.train()
    assert seen == [0, 1] * 10  # also at the ends of data epochs
    target = trainer.learning_rate_controller.target
    assert target / 2 < statistics.fmean(logged(trainer, "policy/step_kl")[-5:]) < target * 2


def test_steps_that_drop_tokens_are_taken_back():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.AdamW([weight], lr=1.0)
    controller = LearningRateController(0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 40 else 0.2)
    controller.scaler.attach(optimizer)
    places, kls = [weight.detach().clone()], []
    for taken in range(44):
        dropped = 20.0 if taken in (40, 41) else 0.0  # as if ten tokens were no longer sampled
        kls.append(controller.observe(StepSums(0.03 * (taken / 40) ** 2 * 10 + dropped, 10.0, 1.0, 1.0), taken, 64))
        weight.grad = torch.randn(5) + 1
        optimizer.step()
        schedule.step()
        places.append(weight.detach().clone())
    size = (places[40] - places[39]).norm()
    assert (places[41] - places[39]).norm() < 0.05 * size  # the weights after 39 steps
    assert (places[42] - places[38]).norm() < 0.6 * size  # about those after 38: the last step's direction, again
    assert kls[40] < 0.1 and controller.scaler.last_factor <= controller.ceiling
    assert (places[43] - places[42]).norm() < size


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_step_is_taken_back_only_where_the_optimizer_can_repeat_it(kind):
    weight = torch.nn.Parameter(torch.zeros(1))
    controller, optimizer = LearningRateController(0.1), kind([weight])
    controller.scaler.attach(optimizer)
    for taken, kl in enumerate((0.0, 99.0)):
        controller.observe(StepSums(kl, 10.0, 1.0, 1.0), taken, 4)
        weight.grad = torch.ones(1)
        optimizer.step()
    assert bool(controller.scaler.undone) == (kind is torch.optim.AdamW)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_the_loss_scaler_skips_do_not_raise_the_factor(fused):
    weight = torch.nn.Parameter(torch.zeros(1))
    controller, optimizer = LearningRateController(0.1), torch.optim.AdamW([weight], fused=fused)
    controller.scaler.attach(optimizer)
    scaler, factors = torch.amp.GradScaler("cpu"), []
    for taken in range(6):
        controller.observe(StepSums(1e-5, 10.0, 1.0, 1.0), taken, 32)  # so much by rounding alone
        factors.append(controller.factor)
        scaler.scale(torch.zeros(1))
        weight.grad = torch.full((1,), torch.inf if taken < 4 else 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert factors[:5] == [0.1] * 5 < factors[5:]


def test_the_kl_is_that_of_the_last_epoch():
    """Each minibatch's KL is c · (sum of factors)². In the second epoch the policy is certain of most tokens."""
    controller, used = LearningRateController(0.1, minibatches=4), []
    for taken, choices in enumerate([5.0, 0.5, 1.0, 9.0, 0.0, 3.0, 2.0, 7.0]):
        kl = 0.02 * sum(used) ** 2
        sums = StepSums(kl * choices, choices if taken < 4 else choices / 10, 1.0, completions=choices)
        assert controller.observe(sums, taken, 8) == pytest.approx(kl)
        used.append(controller.factor)
    assert max(used) > 2 * min(used)


def test_the_factor_comes_back_after_a_few_rollouts_in_which_the_policy_moved_far():
    """KL is c · factor², and c is a thousand times as large in three rollouts."""
    controller, factors = LearningRateController(0.1), []
    for rollout in range(20):
        c = 10.0 if 3 <= rollout < 6 else 0.01
        for taken in (0, 1):
            kl = c * controller.factor**2 * taken
            controller.observe(StepSums(kl, 1.0, 1.0, 1.0), taken, 1)
        factors.append(controller.factor)
    best = (0.1 / 0.01) ** 0.5
    assert factors[2] == pytest.approx(best, rel=0.1) and factors[5] < best / 20 and factors[-1] > best / 2


def test_equal_scores_do_not_change_the_learning_rate(tmp_path):
    def same(completions, **kwargs):
        return [1.0] * len(completions)

    trainer = tiny_ppo(tmp_path, None, same, **FOLLOWS, kl_coef=0.0, lam=1.0, max_steps=8)
    trainer.train()
    assert set(logged(trainer, "learning_rate/factor")) == {LearningRateController.FIRST_FACTOR}


@pytest.mark.parametrize(
    "shape", [{}, {"num_mini_batches": 1, "num_ppo_epochs": 1, "per_device_train_batch_size": 8}], ids=["four", "one"]
)
def test_the_logged_learning_rate_is_the_one_used(shape, tmp_path):
    trainer = tiny_ppo(tmp_path, **{**FOLLOWS, **shape}, learning_rate=1e-3, critic_warmup_rollouts=1, max_steps=8)
    used: list[float] = []

    class Reads(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            trainer.learning_rate_controller.scaler.attach(optimizer)  # so that its hook runs first
            optimizer.optimizer.register_step_pre_hook(
                lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
            )

    trainer.add_callback(Reads())
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx(used)
    factors = logged(trainer, "learning_rate/factor")  # not after the warm-up
    assert factors and factors == pytest.approx([rate / 1e-3 for rate in used[-len(factors) :]])
    assert used[0] == 1e-3 > min(used)


def test_a_schedule_and_a_callback_shrink_the_target(tmp_path):
    """A schedule scales the target, a callback its root. A KL at the target leaves the factor as it is."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=10.0)
    for schedule, requested_scale, target in ((0.1, 1.0, 0.005), (1.0, 0.1, 0.0005)):
        controller = LearningRateController(0.05)
        controller.scaler.attach(optimizer)
        optimizer.param_groups[0] |= {"initial_lr": 10.0, "lr": 10.0 * schedule}
        controller.factor, controller.requested_scale = 1.0, requested_scale
        controller.observe(StepSums(0.0, 1.0, 1.0, 1.0), 0, 1)
        optimizer.step()
        controller.observe(StepSums(target, 1.0, 1.0, 1.0), 1, 1)
        assert controller.factor == pytest.approx(1.0)

    class Asks(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            request_rate_scale(state, 0.5)

    trainer = tiny_ppo(tmp_path, max_steps=1, step_kl_target=0.0)
    trainer.add_callback(Asks())
    trainer.train()
    assert trainer.learning_rate_controller.factor_in_use == 0.5
