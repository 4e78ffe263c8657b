"""TRL's buffer of a rollout, and the sampler that fills it."""

import torch

from tests.contract.observed import grpo, require
from trl_ext.upstream import names as upstream


def test_buffer_and_step_arithmetic(tmp_path):
    trainer = grpo(tmp_path, steps_per_generation=3, num_iterations=2, max_steps=13)
    generated_at, index = [], []
    generate, prepare = trainer._generate_and_score_completions, trainer._prepare_inputs

    def record_generate(inputs):
        require(len(inputs) == 12, f"a rollout gets {len(inputs)} rows")
        generated_at.append(trainer._step)
        return generate(inputs)

    def record_prepare(batch):
        inputs = prepare(batch)
        index.append(next(i for i, chunk in enumerate(trainer._buffered_inputs) if chunk is inputs))
        return inputs

    trainer._generate_and_score_completions, trainer._prepare_inputs = record_generate, record_prepare
    trainer.train()
    reader = "`_prepare_inputs` of PPOTrainer, and its resuming,"
    require(generated_at == [0, 6, 12], f"GRPO generates at `_step` {generated_at}", reader)
    require(index == [i % 3 for i in range(13)], f"GRPO takes the buffer's entries {index}", reader)
    require(trainer._step == 13, f"`_step` counts to {trainer._step} in 13 micro-batches", reader)


def test_a_replaced_buffer_is_used(tmp_path):
    """We put batches of our own there, for a new order and in a resumed run."""
    trainer = grpo(tmp_path, steps_per_generation=2, max_steps=2)
    prepare, taken = trainer._prepare_inputs, []

    def replace(batch):
        taken.append(prepare(batch))
        if trainer._step == 0:
            trainer._buffered_inputs = [dict(chunk) for chunk in trainer._buffered_inputs]
            taken.append(trainer._buffered_inputs)
        return taken[-1] if isinstance(taken[-1], dict) else taken[-2]

    trainer._prepare_inputs = replace
    trainer.train()
    require(taken[-1] is taken[1][1], "GRPO does not read `_buffered_inputs`")


def test_a_rollout_is_split_by_rows(tmp_path):
    """Each tensor that a rollout returns comes back in micro-batches, cut by rows in the same order."""
    trainer, buffers = grpo(tmp_path, steps_per_generation=3, max_steps=3), []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: {**generate(inputs), "row": torch.arange(12)}
    trainer.train()
    buffers = trainer._buffered_inputs
    require(len(buffers) == 3 and all(len(b["row"]) == 4 for b in buffers), "micro-batches have other rows")
    rows = torch.cat([batch["row"] for batch in buffers]).tolist()
    require(sorted(rows) == list(range(12)), f"micro-batches have the rows {rows}")
    keys = [{name for name, value in batch.items() if torch.is_tensor(value)} for batch in buffers]
    require({"prompt_ids", "completion_mask", "row"} <= keys[0] == keys[1], f"they have {keys[0]}")


def test_sampler_repeats_from_its_own_generator(tmp_path):
    sampler = grpo(tmp_path, steps_per_generation=2, num_iterations=3)._get_train_sampler()
    require(type(sampler) is upstream.RepeatSampler, "the train sampler is another class", "The sampler of PPOTrainer")
    orders = []
    for _ in range(2):
        sampler.generator.manual_seed(5)
        orders.append(list(sampler))
    require(sampler.shuffle and orders[0] == orders[1], "the order is not `generator`'s", "The sampler of PPOTrainer")
    first = orders[0][: 8 * 6]
    require(first == first[:8] * 6 and len(set(first)) == 4, "a rollout is not 2 × 3 times its rows")
