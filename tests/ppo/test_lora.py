"""The other roles on a LoRA policy's base: which adapters fit, where they start, and how they are saved and loaded."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import (
    AutoPeftModelForSequenceClassification,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.ppo.worker import users_model
from tests.tiny import (
    BUILDERS,
    LORA,
    WORDS,
    collected,
    lora_configs,
    randomize,
    rows_of,
    scripted,
    tiny_llama,
    tiny_lora_ppo,
    tiny_ppo,
    tiny_tokenizer,
    weights,
)
from trl_ext import save_base_fingerprint
from trl_ext.models import adapters
from trl_ext.models.weights import weights_hash

EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
IDS = torch.tensor([[6, 7, 8, 9, 10], [11, 6, 6, 20, 2]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_base(tmp_path_factory.mktemp("base"))


def saved_base(folder, name="llama", **kwargs):
    BUILDERS[name](**kwargs).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def saved_reward(folder, base, tokenizer=None, name="llama", fingerprint=True, **changes):
    """A sequence classifier as `trl.RewardTrainer` saves it with a `peft_config`, and `recipes/reward.py`."""
    config = lora_configs(name)[1]
    for field, value in {"task_type": "SEQ_CLS", **changes}.items():
        setattr(config, field, value)
    model = get_peft_model(AutoModelForSequenceClassification.from_pretrained(base, num_labels=1), config)
    randomize(model, seed=3, std=0.3).save_pretrained(folder)
    (tiny_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    if fingerprint:
        save_base_fingerprint(model, folder)
    return str(folder)


def classifier(folder):
    return AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()


def shared(trainer):
    return list(trainer.model.rewards)


def critic_values(trainer, ids=IDS):
    """The critic's values of the last state."""
    with torch.no_grad():
        return trainer.model.eval().state_values(ids, torch.ones_like(ids))[:, -1]


def parameters(trainer, *words):
    return {n: p for n, p in trainer.model.named_parameters() if set(words) & set(n.split("."))}


# ---- Reward models that are adapters ----


def other_words():
    return tiny_tokenizer(["moon", *reversed(WORDS)])


def pad_is_eos():
    tokenizer = tiny_tokenizer(pad=False)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.extra)])
@pytest.mark.parametrize(
    ("policy_tokenizer", "reward_tokenizer"),
    [
        (tiny_tokenizer, tiny_tokenizer),
        (tiny_tokenizer, other_words),
        (pad_is_eos, pad_is_eos),
        (tiny_tokenizer, lambda: tiny_tokenizer(pad=False)),
    ],
    ids=["one tokenizer", "two", "pad is EOS", "no pad"],
)
def test_scores_on_the_shared_base_are_those_of_the_reward_model_alone(
    policy_tokenizer, reward_tokenizer, name, tmp_path
):
    """Completions of many lengths in batches of 3, against the loaded model on each row alone, without padding."""
    base = saved_base(tmp_path / "base", name, vocab_size=len(other_words()))
    reward = saved_reward(tmp_path / "reward", base, reward_tokenizer(), name)

    def scores(share):
        trainer = tiny_lora_ppo(
            tmp_path / str(share),
            name,
            model=base,
            reward_funcs=reward,
            share_reward_base=share,
            local_rollout_forward_batch_size=3,
            max_steps=1,
            processing_class=policy_tokenizer(),
        )
        rollouts = collected(trainer)
        scripted(trainer).train()
        return trainer, rollouts[-1].rewards_per_func[:, 0]

    (on_base, actual), (apart, expected) = scores(True), scores(False)
    assert shared(on_base) == ["reward_0"] and not shared(apart)
    assert expected.std() > 0.1
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not any(p.requires_grad for p in parameters(on_base, "rewards", "reward_0").values())

    rollout, tokenizer, alone = rows_of(on_base), on_base.reward_processing_classes[0], []
    model = classifier(reward)
    model.config.pad_token_id = tokenizer.pad_token_id  # as RewardTrainer does
    for prompt, mask, answer, length in zip(
        rollout["prompt_ids"],
        rollout["prompt_mask"].bool(),
        rollout["completion_ids"],
        rollout["completion_mask"].sum(1),
        strict=True,
    ):
        ids = torch.cat([prompt[mask], answer[:length]])
        if reward_tokenizer is other_words:
            words = on_base.processing_class.decode(ids, skip_special_tokens=True)
            finished = ids[-1] == on_base.processing_class.eos_token_id
            ids = torch.tensor(tokenizer(words + (tokenizer.eos_token if finished else ""))["input_ids"])
        alone.append(model(input_ids=ids[None]).logits.item())
    assert_close(actual, torch.tensor(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_base_is_shared_only_with_an_adapter_trained_on_it(subtests, base, tmp_path, monkeypatch):
    """The fingerprint, which ignores the LM head, decides; without one the name; on the hub name and commit."""
    reward, named = (saved_reward(tmp_path / name, base, fingerprint=name == "reward") for name in ("reward", "named"))
    moved = saved_base(tmp_path / "moved")  # the same weights in another folder
    other = saved_base(tmp_path / "other", seed=1)
    policy = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        policy.lm_head.weight.mul_(2)
    changed = copy.deepcopy(policy)
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight[3, 5].mul_(1 + 1e-6)
    quantized = saved_reward(tmp_path / "quantized", base)
    record = tmp_path / "quantized" / "trl_ext_base.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"quantization": "bitsandbytes nf4"}))
    for model, path, is_same in [
        (base, reward, True),
        (moved, reward, True),
        (policy, reward, True),
        (base, named, True),
        (changed, reward, False),
        (other, reward, False),
        (moved, named, False),
        (base, quantized, False),
    ]:
        with subtests.test(model=str(model)[:60], path=path):
            if is_same:
                assert shared(tiny_lora_ppo(tmp_path, model=model, reward_funcs=path)) == ["reward_0"]
            else:
                with pytest.raises(ValueError, match=f"{path} cannot be an adapter.*share_reward_base=False"):
                    tiny_lora_ppo(tmp_path, model=model, reward_funcs=path)
                assert not shared(tiny_lora_ppo(tmp_path, model=model, reward_funcs=path, share_reward_base=False))
    monkeypatch.setattr(adapters, "hub_identity", lambda path, revision=None: path and f"{path}@1")
    save_base_fingerprint(policy, reward, "org/base")
    loaded = get_peft_model(changed, lora_configs()[0])
    adapters.check_same_base(loaded, reward, "org/base@1")  # no weights are read
    with pytest.raises(ValueError, match="another base"):
        adapters.check_same_base(loaded, reward, "org/base@2")
    assert weights_hash(policy.bfloat16()) == weights_hash(policy.float())


# ---- A user's PeftModel ----


def named(*names):
    model = tiny_llama()
    for name in names:
        model = (
            model.add_adapter(name, lora_configs()[0]) or model
            if isinstance(model, PeftModel)
            else get_peft_model(model, lora_configs()[0], adapter_name=name)
        )
    return model


# ---- Saving ----


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("is_users", [False, True], ids=["peft_config", "PeftModel"])
def test_saved_adapters_load_with_plain_peft(is_users, base, tmp_path):
    model = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), saved_sft(tmp_path))
        if is_users
        else base
    )
    kwargs = {"model": model, "learning_rate": 1e-2, "reward_funcs": saved_reward(tmp_path / "reward", base)}
    if is_users:
        kwargs["peft_config"] = None
    trainer = tiny_lora_ppo(tmp_path / "run", **kwargs)
    scripted(trainer).train()
    trainer.save_model()

    output = tmp_path / "run"
    saved = files(output)
    assert {f for f in saved if f.endswith(("safetensors", "adapter_config.json"))} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "critic/adapter_config.json",
        "critic/adapter_model.safetensors",
    }
    own = {n.removeprefix("policy.").replace(".default", "") for n in parameters(trainer, "default")}
    assert load_file(output / "adapter_model.safetensors").keys() == own
    with torch.no_grad():
        own = trainer.model.eval().policy(input_ids=IDS).logits
        policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(output)).eval()
        assert_close(policy(input_ids=IDS).logits, own, rtol=1e-5, atol=1e-5)
        critic = classifier(str(output / "critic"))
        for n in range(1, 6):  # a classifier gives the value of the last state
            expected = critic_values(trainer, IDS[:, :n])
            assert expected.abs().max() > 1e-3
            assert_close(critic(input_ids=IDS[:, :n]).logits[:, 0], expected, rtol=1e-5, atol=1e-5)

    # A new run's critic starts from it, on the policy's base, and is trained
    again = tiny_lora_ppo(tmp_path / "again", model=base, critic_peft_config=None, value_model=str(output / "critic"))
    assert again.model.shares_base
    assert_close(critic_values(again), critic_values(trainer), **EXACT)
    before = weights(again)
    scripted(again).train()
    after = weights(again)
    assert {n for n in after if not torch.equal(after[n], before[n])} == {
        n for n in after if {"default", "critic"} & set(n.split("."))
    }


def saved_sft(tmp_path):
    users_model().save_pretrained(tmp_path / "sft")
    return str(tmp_path / "sft")


# ---- Resuming ----


@pytest.mark.slow
def test_a_changed_reference_or_adapter_is_refused(tmp_path):
    tiny_ppo(tmp_path, users_model(), save_strategy="steps", save_steps=2).train()
    with pytest.raises(ValueError, match="cannot be resumed with reference adapter's weights"):
        tiny_ppo(tmp_path, users_model(seed=10)).train(True)
    config = LoraConfig(**LORA | {"lora_alpha": 13})
    with pytest.raises(ValueError, match="cannot be resumed with adapter critic lora_alpha: 12 → 13"):
        tiny_ppo(tmp_path, users_model(), critic_peft_config=config).train(True)


# ---- Refused: adapters that would train wrongly in silence ----


def with_lora(**changes):
    return LoraConfig(**LORA | changes)


REFUSED = [
    (with_lora(target_modules=["q_proj", "lm_head"]), "lm_head|LM head"),
    (with_lora(target_modules=["q_proj", "embed_tokens"]), "embed"),
    (with_lora(trainable_token_indices=[3, 4]), "embed"),
    (with_lora(bias="all"), "bias='all' trains the base's biases"),
    (with_lora(init_lora_weights="pissa"), "changes the base"),
    (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "a learned prompt"),
    (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "only with LoRA"),
]


def merged():
    model = users_model()
    model.merge_adapter()
    return model


def thawed():
    model = users_model()
    model.get_base_model().model.norm.weight.requires_grad_(True)
    return model


def test_adapters_that_would_train_wrongly_are_refused(subtests, base, tmp_path, monkeypatch):
    critic = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    cases = [
        *(({"peft_config": config, "critic_peft_config": None}, message) for config, message in REFUSED),
        *(({"critic_peft_config": config}, message) for config, message in REFUSED),
        ({"peft_config": with_lora(modules_to_save=["lm_head"]), "critic_peft_config": None}, "LM head|lm_head"),
        ({"value_model": critic}, "needs a policy with an adapter"),
    ]
    for kwargs, message in cases:
        with subtests.test(kwargs=kwargs), pytest.raises(ValueError, match=message):
            tiny_lora_ppo(tmp_path, **kwargs)
    for model, message in [
        (merged(), "merged into the base"),
        (thawed(), "norm.weight"),
        (named("default", "critic"), "has the adapters"),
    ]:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            tiny_ppo(tmp_path, model)
    with pytest.raises(ValueError, match="needs a policy with an adapter"):
        tiny_ppo(tmp_path, critic_peft_config=lora_configs()[1])
    monkeypatch.setattr(AcceleratorState, "fsdp_plugin", SimpleNamespace(activation_checkpointing=True), raising=False)
    with pytest.raises(ValueError, match="fsdp_activation_checkpointing: false"):
        tiny_lora_ppo(tmp_path)
