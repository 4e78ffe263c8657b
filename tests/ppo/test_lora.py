"""A LoRA policy's other roles: which adapters can take them, where they start, how they are saved and loaded."""

import copy
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import (
    AutoPeftModelForSequenceClassification,
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

from tests.ppo.worker import (
    BUILDERS,
    CRITIC_LORA,
    LORA,
    RESUMED,
    EachStep,
    collected,
    draw,
    end_state,
    lora_configs,
    lora_trainer,
    make_trainer,
    optimizer_state,
    rows_of,
    scripted,
    users_model,
    weights,
)
from tests.tiny import WORDS, prompts, tiny_llama, tiny_tokenizer
from trl_ext import save_base_fingerprint
from trl_ext.models.adapters import base_fingerprint
from trl_ext.models.identity import weights_hash
from trl_ext.models.loading import Loader
from trl_ext.ppo.roles import why_separate

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
    draw(model, seed=3, std=0.3).save_pretrained(folder)
    (tiny_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    if fingerprint:
        save_base_fingerprint(model, folder)
    return str(folder)


def classifier(folder):
    return AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()


def shared(trainer):
    return list(trainer.model.rewards)


def critic_values(trainer, ids=IDS):
    """The values of the critic's last state."""
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
    """Of answers of many lengths in batches of 3; each is also scored alone, with no padding, by the model loaded."""
    base = saved_base(tmp_path / "base", name, vocab_size=len(other_words()))
    reward = saved_reward(tmp_path / "reward", base, reward_tokenizer(), name)

    def scores(share):
        trainer = lora_trainer(
            tmp_path / share,
            name,
            model=base,
            reward=reward,
            share_reward_base=share,
            local_rollout_forward_batch_size=3,
            max_steps=1,
            trainer_kwargs={"processing_class": policy_tokenizer()},
        )
        rollouts = collected(trainer)
        scripted(trainer).train()
        return trainer, rollouts[-1].rewards_per_func[:, 0]

    (on_base, actual), (apart, expected) = scores("always"), scores("never")
    assert shared(on_base) == ["reward_0"] and not shared(apart)
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not any(p.requires_grad for p in parameters(on_base, "rewards", "reward_0").values())

    rollout, tokenizer, alone = rows_of(on_base), on_base.reward_processing_classes[0], []
    model = classifier(reward)
    model.config.pad_token_id = tokenizer.pad_token_id  # as RewardTrainer sets it
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
    torch.testing.assert_close(actual, torch.tensor(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", ["always", "never"])
def test_a_reward_adapter_whose_pad_token_is_out_of_the_vocabulary(share, base, tmp_path):
    tokenizer = tiny_tokenizer(pad=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    reward = saved_reward(tmp_path / "reward", base, tokenizer)
    trainer = lora_trainer(
        tmp_path,
        model=base,
        reward=reward,
        share_reward_base=share,
        trainer_kwargs={"processing_class": tokenizer},
        save_strategy="steps",
        save_steps=2,
        max_steps=2,
    )
    trainer.train()
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")  # the adapter on its base


@pytest.mark.slow
def test_a_base_is_shared_if_it_is_the_one_the_adapter_was_trained_on(subtests, base, tmp_path):
    cases = itertools.product(["auto", "never", "always"], [False, True], [True, False])
    for number, (share, is_other, fingerprint) in enumerate(cases):
        folder = tmp_path / str(number)
        trained_on = saved_base(folder / "other", seed=1) if is_other else base
        reward = saved_reward(folder / "reward", trained_on, fingerprint=fingerprint)
        kwargs = {"model": base, "reward": reward, "share_reward_base": share}
        with subtests.test(share=share, is_other=is_other, fingerprint=fingerprint):
            if share == "always" and is_other:
                message = "share_reward_base='always'.*cannot share the base.*other.* weights than"
                with pytest.raises(ValueError, match=message):
                    lora_trainer(folder, **kwargs)
                continue
            trainer = lora_trainer(folder, **kwargs)
            assert shared(trainer) == ([] if share == "never" or is_other else ["reward_0"])
            scripted(trainer).train()
            assert trainer.state.global_step == 4


def test_one_changed_weight_makes_another_base(base, tmp_path):
    reward = saved_reward(tmp_path / "reward", base)
    policy = AutoModelForCausalLM.from_pretrained(base)
    kwargs = {"reward": reward, "trainer_kwargs": {"processing_class": tiny_tokenizer()}}
    assert shared(lora_trainer(tmp_path, model=copy.deepcopy(policy), **kwargs)) == ["reward_0"]
    with torch.no_grad():
        policy.model.layers[1].mlp.down_proj.weight[3, 5].mul_(1 + 1e-6)
    assert not shared(lora_trainer(tmp_path, model=policy, **kwargs))


def test_a_base_in_a_wider_dtype_is_the_same_base():
    model = tiny_llama().bfloat16()
    assert weights_hash(model) == weights_hash(model.float()) != weights_hash(tiny_llama())


def test_the_lm_head_is_no_part_of_the_base(base, tmp_path):
    """A reward model has none."""
    policy = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        policy.lm_head.weight.mul_(2)
    assert shared(lora_trainer(tmp_path, model=policy, reward=saved_reward(tmp_path / "reward", base))) == ["reward_0"]


def test_an_adapter_trained_on_another_quantisation_is_not_shared(base, tmp_path, capsys):
    reward = saved_reward(tmp_path / "reward", base)
    record = tmp_path / "reward" / "trl_ext_base.json"
    fingerprint = json.loads(record.read_text())
    assert fingerprint["quantization"] == "none"
    record.write_text(json.dumps(fingerprint | {"quantization": "bitsandbytes nf4"}))
    reason = "its base's quantisation was bitsandbytes nf4, the policy's is none"
    assert not shared(lora_trainer(tmp_path, model=base, reward=reward))
    assert f"{reward} gets a base of its own: {reason}." in capsys.readouterr().out
    with pytest.raises(ValueError, match=reason):
        lora_trainer(tmp_path, model=base, reward=reward, share_reward_base="always")


def test_a_base_of_the_hub_is_known_by_name_and_commit(base, tmp_path, monkeypatch):
    """No weight is read where both name the same; another commit is another base unless its weights are the same."""
    names = {"org/base": "org/base@1", "org/newer": "org/base@2"}
    for module in ("trl_ext.models.adapters", "trl_ext.ppo.roles"):
        monkeypatch.setattr(f"{module}.hub_identity", lambda path, revision=None: names.get(path))
    reward = str(saved_reward(tmp_path / "reward", base))
    save_base_fingerprint(AutoModelForCausalLM.from_pretrained(base), reward, "org/base")
    hashed = []
    monkeypatch.setattr(
        "trl_ext.ppo.roles.base_fingerprint", lambda model: hashed.append(1) or base_fingerprint(model)
    )

    def why(path, change=0.0):
        policy = AutoModelForCausalLM.from_pretrained(base)
        policy.model.norm.weight.data += change
        policy = get_peft_model(policy, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
        return why_separate(Loader(policy, path, {}, False, Accelerator(cpu=True)), reward, "auto")

    assert why("org/base") is None and not hashed
    assert why("org/newer") is None and hashed == [1]
    assert "its base has other weights" in why("org/newer", change=1.0)


def test_a_policy_without_an_adapter_has_no_base_to_share(base, tmp_path):
    reward = saved_reward(tmp_path / "reward", base)
    trainer = make_trainer(tmp_path, reward, model=base)
    assert not shared(trainer)
    scripted(trainer).train()
    with pytest.raises(ValueError, match="trains all of its weights.*needs a base of its own: pass `peft_config`"):
        make_trainer(tmp_path, reward, model=base, share_reward_base="always")


def test_a_peft_model_as_reward_model_is_refused(base, tmp_path):
    reward = classifier(saved_reward(tmp_path / "reward", base))
    with pytest.raises(ValueError, match=r"cannot be a `PeftModel`. Pass the folder.*merge_and_unload\(\)"):
        lora_trainer(tmp_path, reward=reward)


# ---- Where the critic starts ----


@pytest.mark.slow
@pytest.mark.parametrize("change", [None, {"r": 3}, {"lora_alpha": 7}, {"target_modules": ["q_proj"]}])
def test_the_critic_starts_as_the_reward_model_if_their_adapters_are_alike(change, base, tmp_path):
    reward = saved_reward(tmp_path / "reward", base)
    config = LoraConfig(**LORA | CRITIC_LORA | (change or {}))
    trainer = lora_trainer(tmp_path, model=base, reward=reward, trainer_kwargs={"critic_peft_config": config})
    expected = torch.zeros(2) if change else classifier(reward)(IDS).logits[:, 0]
    assert expected.any() != bool(change)
    torch.testing.assert_close(critic_values(trainer), expected, rtol=1e-5, atol=1e-5)
    trained = parameters(trainer, "critic")
    assert trained and all(p.requires_grad for p in trained.values())
    assert trainer.model.critic.score.weight.dtype == torch.float32

    scripted(trainer).train()
    # A copy: the reward model's own did not move with it
    torch.testing.assert_close(trainer.model.rewards["reward_0"].score.weight, load_head(reward), rtol=0, atol=0)
    assert not torch.equal(trainer.model.critic.score.weight, load_head(reward))


def load_head(folder):
    return load_file(f"{folder}/adapter_model.safetensors")["base_model.model.score.weight"]


def test_the_critics_config_is_by_default_a_copy_of_the_policys(tmp_path):
    config = LoraConfig(**LORA, lora_dropout=0.1, use_rslora=True)
    before = copy.deepcopy(config.to_dict())
    trainer = lora_trainer(tmp_path, trainer_kwargs={"peft_config": config, "critic_peft_config": None})
    adapters = trainer.model.policy.peft_config
    for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules"):
        assert getattr(adapters["critic"], name) == getattr(adapters["default"], name) == getattr(config, name)
    assert adapters["critic"] is not adapters["default"]
    assert config.to_dict() == before
    assert not critic_values(trainer).any()
    shapes = [{n.replace(a, "x"): p.shape for n, p in parameters(trainer, a).items()} for a in ("default", "critic")]
    shapes[1].pop("x.score.weight")
    assert shapes[0] == shapes[1]


def test_a_given_value_model_is_a_critic_of_its_own(base, tmp_path):
    critic = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    trainer = lora_trainer(tmp_path, trainer_kwargs={"critic_peft_config": None, "value_model": critic})
    assert trainer.model.critic is critic and set(trainer.model.policy.peft_config) == {"default"}
    assert not trainer.model.shares_base


def four_bit(folder):
    """A PeftModel on a base in 4 bits, whose adapter GRPO rounds to bfloat16."""
    path = saved_base(folder, hidden_size=64, intermediate_size=128)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization)
    return draw(get_peft_model(model, lora_configs()[0]))


def half(folder):
    model = users_model()
    for name, parameter in model.named_parameters():
        if ".default." in name:
            parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "dtype"),
    [(lambda folder: users_model(), torch.float32), (half, torch.bfloat16), (four_bit, torch.bfloat16)],
    ids=["float32", "bfloat16", "4-bit base"],
)
def test_the_other_adapters_have_the_policys_dtype(build, dtype, tmp_path):
    """And the reference is exactly the policy: rounded as it is."""
    trainer = make_trainer(tmp_path, model=build(tmp_path / "base"), learning_rate=1e-2)
    dtypes = {n: {p.dtype for w, p in parameters(trainer, n).items() if "lora_" in w} for n in ("critic", "ref")}
    assert dtypes == {"critic": {dtype}, "ref": {dtype}}
    policy, reference = ({n.replace(a, "x"): p for n, p in parameters(trainer, a).items()} for a in ("default", "ref"))
    torch.testing.assert_close(policy, reference, **EXACT)
    trainer.train()
    assert abs(trainer.state.log_history[0]["objective/kl"]) < 1e-5


# ---- A PeftModel of the user's own ----


@pytest.mark.slow
def test_a_frozen_adapter_is_trained_on(base, tmp_path):
    """PEFT loads adapters frozen; the run is that with the adapter that was never saved."""
    users_model().save_pretrained(tmp_path / "sft")
    frozen = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "sft"))
    assert not any(p.requires_grad for p in frozen.parameters())
    ends = []
    for model in (frozen, users_model()):
        trainer = make_trainer(tmp_path, model=model)
        trainer.train()
        ends.append(end_state(trainer))
    torch.testing.assert_close(*ends, **EXACT)


def named(*names):
    model = tiny_llama()
    for name in names:
        model = (
            model.add_adapter(name, lora_configs()[0]) or model
            if isinstance(model, PeftModel)
            else get_peft_model(model, lora_configs()[0], adapter_name=name)
        )
    return model


def merged():
    model = users_model()
    model.merge_adapter()
    return model


def thawed():
    model = users_model()
    model.get_base_model().model.norm.weight.requires_grad_(True)
    return model


def test_a_peft_model_that_cannot_be_trained_on_is_refused(subtests, tmp_path):
    for build, message in [
        (lambda: named("sft"), r"must have the name 'default'. Load it with `PeftModel.from_pretrained\(base, path"),
        (lambda: named("default", "critic"), r"already has the adapters \['critic'\].*load it again"),
        (lambda: named("default", "ref"), r"already has the adapters \['ref'\].*load it again"),
        (lambda: named("default", "reward_0"), r"already has the adapters \['reward_0'\].*load it again"),
        (merged, r"merged into the base. Call `model.unmerge_adapter\(\)` first"),
        (thawed, r"trainable weights outside its adapter .*norm.weight and 0 more.*`requires_grad_\(False\)`"),
    ]:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, model=build())


def test_an_adapter_of_another_name_beside_the_policys_stays_as_it_is(tmp_path):
    model = draw(named("default", "style"))
    model.set_adapter("style")  # which also makes it the one that is trainable
    trainer = make_trainer(tmp_path, model=model)
    before = {n: p.detach().clone() for n, p in parameters(trainer, "style").items()}
    trainer.train()
    torch.testing.assert_close({n: p.detach() for n, p in parameters(trainer, "style").items()}, before, **EXACT)


# ---- Saving ----


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("is_users", [False, True], ids=["peft_config", "PeftModel"])
def test_what_is_saved_loads_with_plain_peft(is_users, base, tmp_path):
    model = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), saved_sft(tmp_path))
        if is_users
        else base
    )
    kwargs = {"model": model, "learning_rate": 1e-2, "reward": saved_reward(tmp_path / "reward", base)}
    if is_users:
        kwargs["trainer_kwargs"] = {"peft_config": None}
    trainer = lora_trainer(tmp_path / "run", **kwargs)
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
        torch.testing.assert_close(policy(input_ids=IDS).logits, own, rtol=1e-5, atol=1e-5)
        critic = classifier(str(output / "critic"))
        for n in range(1, 6):  # a classifier gives the value of the last state
            expected = critic_values(trainer, IDS[:, :n])
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(critic(input_ids=IDS[:, :n]).logits[:, 0], expected, rtol=1e-5, atol=1e-5)

    # A new run's critic begins there, on the policy's base, and is trained
    again = lora_trainer(
        tmp_path / "again",
        model=base,
        trainer_kwargs={"critic_peft_config": None, "value_model": str(output / "critic")},
    )
    assert again.model.shares_base
    torch.testing.assert_close(critic_values(again), critic_values(trainer), **EXACT)
    before = weights(again)
    scripted(again).train()
    after = weights(again)
    assert {n for n in after if not torch.equal(after[n], before[n])} == {
        n for n in after if {"default", "critic"} & set(n.split("."))
    }


def saved_sft(tmp_path):
    users_model().save_pretrained(tmp_path / "sft")
    return str(tmp_path / "sft")


def test_a_saved_critic_on_another_base_is_refused(base, tmp_path):
    trainer = lora_trainer(tmp_path, model=base)
    trainer.save_model()
    kwargs = {"critic_peft_config": None, "value_model": str(tmp_path / "critic")}
    with pytest.raises(ValueError, match="`value_model`.*cannot be an adapter on the policy's base: .*other weights"):
        lora_trainer(tmp_path, model=saved_base(tmp_path / "other", seed=1), trainer_kwargs=kwargs)
    record = tmp_path / "critic" / "adapter_config.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="names no base, and has no trl_ext_base.json .`save_base_fingerprint`"):
        lora_trainer(tmp_path, model=base, trainer_kwargs=kwargs)
    save_base_fingerprint(trainer.model.policy, tmp_path / "critic")
    assert lora_trainer(tmp_path, model=base, trainer_kwargs=kwargs).model.shares_base


def test_a_saved_critic_beside_a_policy_trained_in_full_is_a_model_of_its_own(base, tmp_path):
    trainer = lora_trainer(tmp_path, model=base)
    draw(trainer.model, std=0.3)
    trainer.save_model()
    apart = make_trainer(tmp_path / "full", model=base, trainer_kwargs={"value_model": str(tmp_path / "critic")})
    torch.testing.assert_close(critic_values(apart), critic_values(trainer), rtol=1e-5, atol=1e-5)
    assert all(p.requires_grad for p in apart.model.critic.parameters())


def test_checkpoints_hold_no_base_weights(base, tmp_path):
    """With a base of a megabyte, a checkpoint is smaller than that, and holds each adapter once."""
    large = saved_base(tmp_path / "large", intermediate_size=8192)
    reward = saved_reward(tmp_path / "reward", large, target_modules=["q_proj"])
    actor, critic = (LoraConfig(**LORA | {"target_modules": ["q_proj"], "r": r}) for r in (4, 2))
    trainer = lora_trainer(
        tmp_path,
        model=large,
        reward=reward,
        save_strategy="steps",
        save_steps=4,
        trainer_kwargs={"peft_config": actor, "critic_peft_config": critic},
    )
    scripted(trainer).train()
    checkpoint = tmp_path / "checkpoint-4"
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    base_size = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert size < 0.1 * base_size and base_size > 2**20

    saved = (
        load_file(checkpoint / "adapter_model.safetensors"),
        load_file(checkpoint / "critic/adapter_model.safetensors"),
    )
    expected = parameters(trainer, "default"), parameters(trainer, "critic")
    for tensors, own in zip(saved, expected, strict=True):
        assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in own.values())
    moments = [t.numel() for n, t in optimizer_state(trainer).items() if n.endswith("exp_avg")]
    assert sum(moments) == sum(p.numel() for own in expected for p in own.values())


# ---- Resuming ----


def resumed_trainer(folder, kind, **config):
    config = RESUMED | {"activation_checkpointing": True, "warmup_steps": 2, "learning_rate": 1e-2} | config
    if kind == "peft_config":
        return lora_trainer(folder, **config)
    return make_trainer(folder, model=users_model(), **config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["peft_config", "PeftModel"])
def test_a_resumed_run_ends_as_the_uninterrupted_one(kind, tmp_path):
    """From within a rollout of the first and of the second data epoch."""
    whole = resumed_trainer(tmp_path / "whole", kind, save_strategy="steps", save_steps=1)
    whole.train()
    expected = end_state(whole)
    for step in (3, 9):
        again = resumed_trainer(tmp_path / f"from {step}", kind)
        draw(again.model.critic, seed=step)  # nothing may come from what was before the checkpoint
        torch.manual_seed(1234)
        again.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
        torch.testing.assert_close(end_state(again), expected, **EXACT)
        for name in ("default", "critic"):
            assert all(p.requires_grad for p in parameters(again, name).values())
        assert not any(p.requires_grad for p in parameters(again, "ref").values())


@pytest.mark.slow
def test_another_reference_or_another_adapter_is_another_configuration(tmp_path):
    make_trainer(tmp_path, model=users_model(), save_strategy="steps", save_steps=2).train()
    with pytest.raises(ValueError, match="belongs to another configuration .*reference adapter's weights"):
        make_trainer(tmp_path, model=users_model(seed=10)).train(True)
    config = LoraConfig(**LORA | {"lora_alpha": 13})
    with pytest.raises(ValueError, match="another configuration .*adapter critic lora_alpha: 12 → 13"):
        make_trainer(tmp_path, model=users_model(), trainer_kwargs={"critic_peft_config": config}).train(True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["peft_config", "PeftModel"])
def test_the_best_weights_of_both_adapters_are_loaded_at_the_end(kind, tmp_path):
    falling = iter([2.0, 1.0])
    trainer = resumed_trainer(
        tmp_path,
        kind,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_objective/scores",
        greater_is_better=True,
        trainer_kwargs={"eval_dataset": prompts(4)},
    )
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: evaluate(*args, **kwargs) | {"eval_objective/scores": next(falling)}
    watch = EachStep(lambda: weights(trainer))
    trainer.add_callback(watch)
    trainer.train()
    torch.testing.assert_close(weights(trainer), watch.seen[2], **EXACT)
    assert any(not torch.equal(watch.seen[4][n], watch.seen[2][n]) for n in watch.seen[2])


# ---- Bad input ----


def with_lora(**changes):
    return LoraConfig(**LORA | changes)


PROMPTS = [
    PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
]
REFUSED = [
    (with_lora(target_modules=["q_proj", "lm_head"]), "lm_head|LM head"),
    (with_lora(target_modules=["q_proj", "embed_tokens"]), "adapts the embeddings.*Leave it out of target_modules"),
    (with_lora(modules_to_save=["lm_head"]), "adapts the LM head.*Leave it out of .*modules_to_save"),
    (with_lora(modules_to_save=["embed_tokens"]), "adapts the embeddings.*Leave it out of .*modules_to_save"),
    (with_lora(trainable_token_indices=[3, 4]), "adapts the embeddings.*Leave it out of .*trainable_token_indices"),
    (with_lora(bias="all"), "has bias='all'.*Use bias='none'"),
    (with_lora(init_lora_weights="pissa"), "has init_lora_weights='pissa'.*Use init_lora_weights=True"),
    (with_lora(layer_replication=[(0, 2), (0, 2)]), "has layer_replication.*changes the base"),
    *((config, f"is a {type(config).__name__}.*Use a `LoraConfig`") for config in PROMPTS),
]


def test_a_policys_config_that_would_not_leave_the_base_as_it_is_is_refused(subtests, tmp_path):
    for config, message in REFUSED:
        with subtests.test(message=message):
            message = f"`peft_config` {message}" if message.startswith(("has", "is")) else message
            with pytest.raises(ValueError, match=message):
                lora_trainer(tmp_path, trainer_kwargs={"peft_config": config, "critic_peft_config": None})


def test_another_kind_of_adapter_needs_a_critic_of_its_own(base, tmp_path):
    config = IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    with pytest.raises(ValueError, match="`peft_config` is a IA3Config.*only with LoRA.* as `value_model=`"):
        lora_trainer(tmp_path, trainer_kwargs={"peft_config": config, "critic_peft_config": None})
    critic = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    trainer = make_trainer(tmp_path, model=base, trainer_kwargs={"peft_config": config, "value_model": critic})
    before = weights(trainer)
    trainer.train()
    assert {n for n, p in weights(trainer).items() if n.startswith("policy.") and not torch.equal(p, before[n])} == {
        n for n in before if n.startswith("policy.") and ".default" in n
    }


def test_a_critics_config_that_cannot_be_right_is_refused(subtests, tmp_path):
    for config, message in [
        *REFUSED[:2],
        (
            with_lora(modules_to_save=["lm_head"]),
            r"`critic_peft_config` has modules_to_save=.*'lm_head'.*target_modules",
        ),
        *REFUSED[5:],
        (
            with_lora(target_modules=["q_proj", "c_attn"]),
            r"targets \['c_attn'\], which LlamaForCausalLM does not have. Choose "
            r"among \['down_proj', 'gate_proj'.*'v_proj'\]",
        ),
        (with_lora(target_modules=r".*\.c_attn"), "`critic_peft_config` does not fit LlamaForCausalLM: "),
    ]:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            lora_trainer(tmp_path, trainer_kwargs={"critic_peft_config": config})


def test_a_peft_models_config_is_checked_as_well(subtests, tmp_path):
    for change in [{"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"init_lora_weights": "pissa"}]:
        with subtests.test(change=change):
            model = get_peft_model(tiny_llama(), with_lora(**change))
            with pytest.raises(ValueError, match=next(iter(change)) if "modules_to_save" not in change else "LM head"):
                make_trainer(tmp_path, model=model)


def test_the_critics_config_needs_a_policy_with_an_adapter_and_no_value_model(base, tmp_path):
    message = r"needs a policy with an adapter \(`peft_config`\), and no `value_model`"
    critic = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    with pytest.raises(ValueError, match=message):
        lora_trainer(tmp_path, trainer_kwargs={"value_model": critic})
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, trainer_kwargs={"critic_peft_config": lora_configs()[1]})


def test_fsdps_own_activation_checkpointing_is_refused(tmp_path, monkeypatch):
    plugin = SimpleNamespace(activation_checkpointing=True)
    monkeypatch.setattr(AcceleratorState, "fsdp_plugin", plugin, raising=False)
    with pytest.raises(ValueError, match="fsdp_activation_checkpointing: false.*activation_checkpointing: true"):
        lora_trainer(tmp_path)
