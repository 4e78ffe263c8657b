"""No credential in any setting of a recipe is in its output folder."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import get_type_hints

import pytest

from recipes import dpo, ppo, reward, sft
from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import make_world
from tests.recipes.small_runs import write_rows
from trl_ext import DPOConfig, PPOConfig
from trl_ext.cli.arguments import ModelArguments
from trl_ext.dpo import RewardConfig, SFTConfig
from trl_ext.ppo.config import REFUSED
from trl_ext.runs.saving import MARKER

ROOT = Path(__file__).parents[2]
RECIPES = {
    "sft": (sft, (sft.SFTScriptArguments, SFTConfig, ModelArguments), "sft", "sft"),
    "reward": (reward, (reward.RewardScriptArguments, RewardConfig, ModelArguments), "reward", "preferences"),
    "dpo": (dpo, (dpo.DPOScriptArguments, DPOConfig, ModelArguments), "dpo", "preferences"),
    "ppo": (ppo, (ppo.PPOScriptArguments, PPOConfig, ModelArguments), "unguarded", "prompts"),
}
# Settings that cannot hold a credential: a choice, a path that is opened, a number, a name that must exist
CANNOT = set(
    """
    accelerator_config attn_implementation bnb_4bit_quant_storage bnb_4bit_quant_type cache_implementation
    chat_template_path dataloader_multiprocessing_context dataset_config dataset_name dataset_test_split
    dataset_text_field dataset_train_split ddp_backend debug deepspeed demonstrations_name dtype environment eos_token
    eval_dataset_name eval_strategy f_divergence_type fsdp fsdp_config generation_kwargs hub_model_id hub_strategy
    include_for_metrics include_num_input_tokens_seen kl_estimator label_names log_completions_hub_repo log_level
    log_level_replica
    logging_strategy
    loss_type loss_weights lr_scheduler_kwargs lr_scheduler_type metric_for_best_model model_name_or_path optim
    optim_target_modules output_dir packing_strategy pad_to_multiple_of pad_token ratio_band
    ref_model_name_or_path report_to resume_from_checkpoint reward_funcs reward_model_name_or_path
    reward_weights save_strategy staging_dir tools torch_compile_backend
    torch_compile_mode train_sampling_strategy
    transformers_continuous_batching_config truncation_mode value_model_name_or_path vllm_mode vllm_model_impl
    model_revision lora_modules_to_save lora_target_modules lora_target_parameters lora_task_type
    """.split()
)
NOT_TEXT = set("group_columns reward_group_column".split())


def text_fields(kinds):
    for kind in kinds:
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            hint = str(hints[field.name])
            if field.init and any(word in hint for word in ("str", "dict", "list")) and "Literal" not in hint:
                yield field.name, hint


def planted(recipe, generation):
    """A configuration with a secret in each setting, and the secret of each setting."""
    settings, secrets = {}, {}

    def secret(name, generation=generation):
        secrets[name] = hashlib.sha256(f"{name} {generation}".encode()).hexdigest()[:32]
        return secrets[name]

    for name, hint in text_fields(RECIPES[recipe][1]):
        if name in CANNOT | NOT_TEXT:
            continue
        if name == "monitors":
            sinks = ["jsonl", f"https://hooks.slack.com/services/{secret(name)}"]
            settings[name] = [{"NotFiniteCallback": {"sinks": sinks}}]
        elif name == "rewards":
            settings[name] = [{"PatternReward": {"forbidden": [f"hf_{secret(name, 0)}"]}}]  # another value is refused
        elif recipe == "ppo" and name in REFUSED:
            secrets.pop(name, None)
        elif "dict[str, bool]" in hint:
            settings[name] = {f"hf_{secret(name)}": True}
        elif "dict" in hint:
            settings[name] = {"token": secret(name)}
        elif "list" in hint:
            settings[name] = [f"hf_{secret(name)}"]
        elif name == "hub_token":
            settings[name] = secret(name)  # hidden because of its name
        elif name == "optim_args":
            settings[name] = f"password={secret(name)}"
        elif name.endswith("url"):
            settings[name] = f"https://me:{secret(name)}@localhost/v1?key={secret(name)}"
        else:
            settings[name] = f"my hf_{secret(name)}"
    settings["env"] = {"TRL_EXT_TEST_API_KEY": secret("env")}
    return settings, secrets


def leaks(folder, secrets):
    """`setting in file` for each secret in the folder."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()  # torch's archives are not compressed
        yield from (
            f"{name} in {path.relative_to(folder)}" for name, secret in secrets.items() if secret.encode() in content
        )


def test_each_text_setting_is_tested_or_cannot_hold_a_credential():
    known = {name for _, kinds, *_ in RECIPES.values() for name, _ in text_fields(kinds)}
    assert known >= CANNOT | NOT_TEXT, "no setting, any more"
    for recipe in RECIPES:
        settings, secrets = planted(recipe, 0)
        assert {"hub_token", "run_name", "model_init_kwargs", "env"} <= secrets.keys() == settings.keys()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_secret_is_in_the_output_folder_also_after_a_resume(recipe, tmp_path, capsys, monkeypatch):
    main, _, config, data = RECIPES[recipe]
    world = make_world(0, demonstrations=32, pairs=32, prompts=32, held_out=8)[data]
    tokenizer = make_tokenizer()
    write_rows(tmp_path / "data", **world)
    tokenizer.save_pretrained(tmp_path / "model")
    make_model(tokenizer, 0).save_pretrained(tmp_path / "model")
    base = (ROOT / "recipes" / "demo" / f"{config}.yaml").read_text()
    out, everything = tmp_path / "out", {}
    monkeypatch.setenv("TRL_EXT_TEST_API_KEY", "")  # so that it is restored after the test

    own = ["--max_steps", "2"]
    if recipe == "ppo":
        own = "--total_episodes 16 --num_ppo_epochs 1 --max_completion_length 8".split()
        own += "--reward_weights 1 0 0 --eval_strategy no --num_mini_batches 1".split()
    for generation in range(2):
        settings, secrets = planted(recipe, generation)
        everything |= {f"{name} ({generation})": secret for name, secret in secrets.items()}
        (tmp_path / "config.yaml").write_text(base + "".join(f"{k}: {json.dumps(v)}\n" for k, v in settings.items()))
        main.main(
            [
                *("--config", str(tmp_path / "config.yaml"), "--model_name_or_path", str(tmp_path / "model")),
                *("--dataset_name", str(tmp_path / "data"), "--output_dir", str(out), "--use_cpu", "true"),
                *"--per_device_train_batch_size 8 --logging_steps 1 --warmup_steps 0".split(),
                *("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2", *own),
            ]
        )
        said = capsys.readouterr()
        assert ("Resuming from" in said.out) == (generation == 1)
        assert not list(leaks(out, everything))
        assert not [name for name, secret in everything.items() if secret in said.out + said.err]
        assert "<redacted>" in (out / "metrics.rank0.jsonl").read_text()
        assert "&lt;redacted&gt;" in (out / "report.html").read_text()
        (out / "checkpoint-2" / MARKER).unlink()  # as if interrupted there
