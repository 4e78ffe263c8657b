"""The trainer as a whole: it learns, holds its KL, and works as a Trainer of transformers."""

import math

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM, TrainerCallback

from tests.tiny import WORDS, prompts, rows_of, tiny_gpt2, tiny_llama, tiny_ppo, tiny_tokenizer


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def share_of_cats(completion_ids, **kwargs):
    cat = tiny_tokenizer().convert_tokens_to_ids("cat")
    return [sum(i == cat for i in ids) / 8 for ids in completion_ids]


def learning(tmp_path, **config):
    return tiny_ppo(
        tmp_path,
        **{
            "reward_funcs": share_of_cats,
            "train_dataset": prompts(64),
            "per_device_train_batch_size": 16,
            "num_mini_batches": 2,
            "num_ppo_epochs": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "max_steps": 14 * 8,
            "logging_steps": 8,
            "kl_coef": 0.0,
            **config,
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("generations", [1, pytest.param(2, marks=pytest.mark.extra)])
def test_learns_one_word(tmp_path, generations):
    """A policy that samples "cat" once in 29 tokens learns to sample little else."""
    # Enough rollouts for any CPU: each rounds, and so samples, differently
    trainer = learning(tmp_path, num_generations=generations, max_steps=24 * 8)
    trainer.train()
    scores = logged(trainer, "objective/scores")
    assert scores[0] < 0.1
    assert sum(scores[-3:]) / 3 > 0.6


@pytest.mark.slow
def test_the_adaptive_controller_holds_its_target(tmp_path):
    """The reward always pulls away; the controller finds the coefficient that keeps the KL at its target."""
    trainer = learning(
        tmp_path,
        kl_coef=0.02,
        kl_controller="adaptive",
        kl_target=1.5,
        kl_horizon=60,
        num_ppo_epochs=2,
        max_steps=40 * 4,
        logging_steps=4,
        learning_rate=5e-3,
    )
    trainer.train()
    kl = logged(trainer, "objective/kl")
    assert kl[0] == pytest.approx(0, abs=1e-4)
    assert max(kl) > 2 * 1.5  # it overshot before
    assert sum(kl[-15:]) / 15 == pytest.approx(1.5, rel=0.25)
    scores = logged(trainer, "objective/scores")
    assert sum(scores[-15:]) / 15 > 1.5 * scores[0]


def tiny_mixtral(**kwargs):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
        **kwargs,
    )
    return MixtralForCausalLM(config)


@pytest.mark.slow
def test_mixture_of_experts(tmp_path):
    """The load-balancing loss reaches the routers with its coefficient, summed over the micro-batches."""
    grads = {}
    for coef in (0.0, 0.5, 1.0):

        class Keep(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, coef=coef, **kwargs):
                if state.global_step == 0:
                    grads[coef] = torch.cat(
                        [p.grad.flatten() for n, p in model.policy.named_parameters() if "gate." in n]
                    )

        trainer = tiny_ppo(
            tmp_path / str(coef),
            tiny_mixtral(),
            router_aux_loss_coef=coef,
            callbacks=[Keep()],
            gradient_accumulation_steps=2,
            per_device_train_batch_size=2,
            max_grad_norm=0.0,
        )
        assert trainer.aux_loss_enabled == (coef > 0)
        trainer.train()
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
        assert logged(trainer, "objective/kl")[0] == pytest.approx(0, abs=1e-5)
    balance = grads[1.0] - grads[0.0]
    assert balance.norm() > 0
    assert_close(grads[0.5] - grads[0.0], 0.5 * balance, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_llama, pytest.param(tiny_gpt2, marks=pytest.mark.extra)])
def test_bf16_autocast(tmp_path, build):
    """Weights stay fp32; the first minibatch's log-probs agree with the rollout's within bf16's precision."""
    trainer = tiny_ppo(tmp_path, build(), bf16=True)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert rows_of(trainer)["old_values"].dtype == torch.float32
    assert logged(trainer, "policy/approxkl_avg")[0] < 1e-3
    assert abs(logged(trainer, "objective/kl")[0]) < 1e-2
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))


def test_learning_rates(tmp_path):
    """Linear decay to 0 for the policy; the critic's learning rate decays with it."""
    trainer = tiny_ppo(tmp_path, learning_rate=1e-3, critic_learning_rate=1e-2)
    rates = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            rates.append(sorted({group["lr"] for group in optimizer.param_groups}))

    trainer.add_callback(Keep())
    trainer.train()
    for step, (policy, critic) in enumerate(rates):
        assert policy == pytest.approx(1e-3 * (1 - step / 4)) and critic == pytest.approx(1e-2 * (1 - step / 4))
    critic_parameters = {id(p) for p in trainer.model.critic.parameters()}
    n = 0
    for group in trainer.optimizer.param_groups:
        of_critic = [id(p) in critic_parameters for p in group["params"]]
        assert all(of_critic) if group["initial_lr"] == 1e-2 else not any(of_critic)
        n += len(of_critic)
    assert n == len(list(trainer.model.parameters()))
    trainer.train(resume_from_checkpoint=False)  # again, with the same optimizer
    assert len(rates) == 8


@pytest.mark.parametrize("build", [tiny_llama, pytest.param(tiny_gpt2, marks=pytest.mark.slow)])
def test_saved_policy_is_a_plain_model(tmp_path, build):
    """Equal logits from AutoModelForCausalLM, no extra keys; the critic beside it is a `value_model`."""
    trainer = tiny_ppo(tmp_path, build())
    trainer.train()
    trainer.save_model()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([[6, 7, 8, 9]])
    trainer.model.eval()
    assert_close(loaded.eval()(ids).logits, trainer.model.policy(ids).logits, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path)("cat sat")["input_ids"] == tiny_tokenizer()("cat sat")["input_ids"]

    # FSDP and DeepSpeed pass a state dict of the wrapper: the same files are saved
    trainer._save(str(tmp_path / "gathered"), state_dict=trainer.model.state_dict())
    for file in ("model.safetensors", "critic/model.safetensors"):
        assert (tmp_path / "gathered" / file).read_bytes() == (tmp_path / file).read_bytes()

    again = tiny_ppo(tmp_path / "again", str(tmp_path), value_model=str(tmp_path / "critic"), processing_class=None)
    assert_close(again.model.critic.state_dict(), trainer.model.critic.state_dict(), rtol=0, atol=0)


def test_messages_as_prompts(tmp_path):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    rows = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS[:8]]
    trainer = tiny_ppo(tmp_path, reward_funcs=reward, train_dataset=Dataset.from_list(rows), max_steps=1)
    trainer.train()
    assert {prompt[0]["content"] for prompt, _ in seen} == set(WORDS[:8])
    assert all(set(completion[0]) == {"role", "content"} for _, completion in seen)
    row = rows_of(trainer)["prompt_ids"][0][rows_of(trainer)["prompt_mask"][0].bool()]
    assert trainer.processing_class.decode(row).split()[0::3][:1] == ["<user>"]
