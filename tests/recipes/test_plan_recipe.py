import re

import pytest
import yaml

from recipes import plan
from recipes.plan import main, origin
from tests.recipes.real_models import config_of
from tests.recipes.small_runs import ROOT, refusal
from tests.tiny import tiny_llama, tiny_tokenizer

HEAD = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write two recipes and a folder for the hub's model; the second recipe starts from the output of the first."""
    folder = tmp_path_factory.mktemp("plan")
    tiny_llama(num_hidden_layers=1).config.save_pretrained(folder / "hub")
    tiny_tokenizer().save_pretrained(folder / "hub")
    rows = "".join(f'{{"prompt": "p{i}", "completion": "c", "chosen": "a", "rejected": "b"}}\n' for i in range(8))
    (folder / "data.jsonl").write_text(rows)
    data = {"dataset_name": str(folder / "data.jsonl")}
    sft = {
        "model_name_or_path": str(folder / "hub"),
        "output_dir": "outputs/made/sft",
        "max_length": 16,
        "use_peft": True,
    }
    reward = {**sft, "model_name_or_path": "outputs/made/sft/merged", "output_dir": "outputs/made/reward"}
    ppo = {"model_name_or_path": "outputs/made/sft/merged", "reward_model_name_or_path": "outputs/made/reward"}
    ppo |= {"output_dir": "outputs/made/ppo", "max_completion_length": 8, "use_peft": True}
    lora = {"lora_target_modules": ["all-linear"], "lora_dropout": 0.0}
    for name, recipe in (("sft", sft), ("reward", reward), ("ppo", ppo)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(HEAD | data | lora | recipe))
    accelerate = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2}
    accelerate |= {"num_machines": 1, "use_cpu": False, "debug": False, "deepspeed_config": {"zero_stage": 3}}
    (folder / "zero3.yaml").write_text(yaml.safe_dump(accelerate))
    return folder


def run(folder, stage, capsys, *more):
    main(["--config", str(folder / f"{stage}.yaml"), *more])
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_printed_in_full_with_status_1(folder, capsys):
    with pytest.raises(SystemExit, match="1"):
        run(folder, "ppo", capsys, "--gpu_memory", "0.0001")
    text = capsys.readouterr().out
    assert "DOES NOT FIT in 0.0001 GiB" in text and "WARNING: 8 of PPO's 8 prompts are SFT's, too" in text
    for expected in ("policy ", "the policy's base without its adapter", "KV cache", "disk per checkpoint: "):
        assert expected in text


@pytest.mark.slow
def test_the_usual_remedies_are_tried_and_a_command_that_fits_is_printed(folder, capsys, monkeypatch):
    monkeypatch.setattr(plan, "GIB", 1024)  # the model is tiny
    flags = ["--accelerate_config", str(ROOT / "accelerate_configs/fsdp2.yaml"), "--prompt_length", "8"]
    flags += ["--share_reward_base", "false"]
    with pytest.raises(SystemExit, match="1"):
        run(folder, "ppo", capsys, *flags, "--gpu_memory", "1")
    said = capsys.readouterr()
    steps = re.findall(r"^  (--.*?) +([\d.]+) → ([\d.]+) GiB$", said.out, re.MULTILINE)
    assert [before for _, before, _ in steps[1:]] == [after for *_, after in steps[:-1]]
    assert "it does not fit so: use more GPUs" in said.out
    _, before, after = steps[0]
    enough = ["--gpu_memory", str((float(before) + float(after)) / 2)]
    with pytest.raises(SystemExit, match="1"):
        run(folder, "ppo", capsys, *flags, *enough)
    command = f"  trl-ext ppo --config {folder / 'ppo.yaml'} {' '.join([*flags[:2], *flags[4:]])} {steps[0][0]}\n"
    assert f"then it fits:\n{command}" in capsys.readouterr().out


def test_a_mistake_is_one_line_and_status_2(folder, capsys):
    words = ["--config", folder / "ppo.yaml", "--accelerate", folder / "zero3.yaml", "--critic_warmup_rollouts", "1"]
    assert "this cannot work: `critic_warmup" in refusal(capsys, main, words)


@pytest.mark.slow
def test_the_plan_has_fitting_gpus_and_times_and_measures_local_data(folder, capsys):
    text = run(folder, "ppo", capsys)
    rows = re.findall(r"^ +(\d+) GB .*yes, [\d.]+ min +yes, [\d.]+ min$", text, re.MULTILINE)
    assert len(rows) == 8 and "prompts have up to 1 tokens" in text
    assert "no" not in run(folder, "sft", capsys, "--mfu", "1").split("12 GB")[1].split("\n")[0]


def test_a_model_from_another_recipe_is_traced_to_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder)
    name, maker = origin("outputs/made/reward", folder)
    assert name == str(folder / "hub") and maker["output_dir"] == "outputs/made/reward"
    assert origin("owner/name", folder) == ("owner/name", None)


planned_for = plan.plan


# A plan of 28 or 32 layers with LoRA takes 10 to 20 s. The variants with vLLM have the memory of ppo.yaml.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["sft", "reward_deberta", "ppo", *(pytest.param(n, marks=pytest.mark.extra) for n in ("pretrain_critic", "dpo"))],
)
def test_the_memory_in_a_shipped_file_is_the_computed_one(name, capsys, monkeypatch):
    path, made = ROOT / f"recipes/qwen2.5-0.5b/{name}.yaml", []

    def first(job, what=""):  # only the file's own layout; one GPU and eight would take as long again
        made.append(made[0] if made else planned_for(job))
        return made[0]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(plan, "with_progress", first)
    accelerate = re.search(r"^# Accelerate: (\S+)$", path.read_text(), re.MULTILINE)[1]
    main(["--config", str(path), "--accelerate", accelerate], load_config=config_of)
    planned = re.search(r"peak: ([\d.]+) GiB per GPU", capsys.readouterr().out)[1]
    variants = [path, *path.parent.glob("ppo_vllm_*.yaml")] if name == "ppo" else [path]
    assert all(f"# Memory: {planned} GiB per GPU" in variant.read_text() for variant in variants)
