"""DDP, FSDP2, ZeRO-2 and ZeRO-3 with the files of accelerate_configs/, on CPU: training, saving, resuming, failing."""

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForSequenceClassification, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed.worker import CANARY, COVERED_ELSEWHERE, make_pairs, run, write_inputs
from tests.rounding import bound
from tests.tiny import tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.models import answer_texts, prompt_token_ids, sample
from trl_ext.models.actor_critic import ActorCritic
from trl_ext.workbench.planning.stages import sharded_layers

ROOT = Path(__file__).parents[2]
MODES = {  # shipped file -> the mode that must be on: accelerate's type, the wrapper, a process's share of the weights
    "multi_gpu": ("DistributedType.MULTI_CPU", "DistributedDataParallel", (1.0, 1.0)),
    "fsdp2": ("DistributedType.FSDP", "FSDP", (0.45, 0.55)),
    "zero2": ("DistributedType.DEEPSPEED", "DeepSpeedEngine", (1.0, 1.0)),
    "zero3": ("DistributedType.DEEPSPEED", "DeepSpeedEngine", (0.0, 0.0)),
}


def cases(*names):
    """Each case in each mode; cases that another one covers are `extra`."""
    marks = {True: pytest.mark.extra, False: ()}
    return pytest.mark.parametrize(
        ("launched", "name"),
        [pytest.param(mode, n, marks=marks[n in COVERED_ELSEWHERE[mode]]) for mode in MODES for n in names],
        indirect=["launched"],
    )


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def on_cpu(name, folder):
    """The shipped file for two processes on CPU, with thresholds so small that ZeRO shards every weight."""
    config = yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text())
    config |= {"num_processes": 2, "mixed_precision": "no", "use_cpu": config["distributed_type"] != "DEEPSPEED"}
    config.pop("gpu_ids", None)
    if "deepspeed_config" in config:
        config.pop("mixed_precision")
        settings = json.loads((ROOT / config["deepspeed_config"]["deepspeed_config_file"]).read_text())
        zero = settings["zero_optimization"]
        zero |= {key: 1000 for key in zero if key.endswith("bucket_size")}
        if zero["stage"] == 3:
            zero |= {key: 0 for key in zero if key.startswith("stage3_") and "gather" not in key}
        (folder / f"{name}.json").write_text(json.dumps(settings))
        config["deepspeed_config"]["deepspeed_config_file"] = str(folder / f"{name}.json")
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    write_inputs(folder / "inputs")
    return folder


@pytest.fixture(scope="module")
def one_process(folder):
    return functools.cache(lambda workload: run(workload, folder / "inputs", folder / "one", 1))


@pytest.fixture(scope="module")
def split(folder):
    """One process again, with its micro-batches cut in two: how far rounding alone drives two runs apart."""
    return functools.cache(lambda workload: run(workload, folder / "inputs", folder / "split", 1, parts=2))


@pytest.fixture(scope="module", params=MODES)
def launched(request, folder):
    """
    Launch once, since imports take longer than most checks: train every workload, resume each from its checkpoint, and
    end when one process does something that the other does not. DDP is launched by accelerate, the others by
    tests.launch, which imports once. Return the mode, its folder, the results, stderr, and for how many seconds
    process 0 outlived process 1.
    """
    mode = request.param
    if mode.startswith("zero"):
        pytest.importorskip("deepspeed", reason="needs pip install -e '.[deepspeed]'")
    output = folder / mode
    output.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    kinds = ["train", "resume", "fail"]
    launcher = "accelerate.commands.launch --main_process_port 0 -m" if mode == "multi_gpu" else "tests.launch"
    module, *flags = launcher.split()
    launch = [sys.executable, "-m", module, "--config_file", str(on_cpu(mode, folder)), *flags]
    done = subprocess.run(
        [*launch, "tests.distributed.worker", str(output), *kinds],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    ended = time.time()
    assert done.returncode != 0 and (output / "died").exists(), done.stderr[-20000:]
    results = {
        what: [torch.load(output / f"{what} {rank}.pt", weights_only=False) for rank in range(2)] for what in kinds
    }
    return mode, output, results, done.stderr, ended - float((output / "died").read_text())


@pytest.fixture(scope="module")
def failed(launched):
    """Only the part "fail": the mode, the results, stderr, and for how many seconds process 0 outlived process 1."""
    mode, _, results, errors, seconds = launched
    return mode, results["fail"], errors, seconds


def saved(folder):
    """The weights of policy and critic, by file."""
    return {
        str(path.relative_to(folder)): load_file(path)
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("critic/*.safetensors")])
    }


def test_the_mode_is_on(launched):
    mode, _, results, *_ = launched
    kind, wrapper, (least, most) = MODES[mode]
    for rank in results["train"]:
        for workload, result in rank.items():
            assert (result["type"], result["processes"]) == (kind, 2), workload
            assert result["wrapper"].startswith(wrapper), workload
            assert least <= result["resident"] <= most, workload


@pytest.mark.parametrize("launched", ["fsdp2"], indirect=True)
def test_fsdp2_gathers_the_pieces_that_the_memory_plan_counts(launched):
    """Policy and critic layer by layer, a separate reference at once."""
    actor_critic = ActorCritic(tiny_llama(), tiny_reward_model(tiny_llama()))
    names = {id(module): name for name, module in actor_critic.named_modules()}
    for rank in launched[2]["train"]:
        trained, reference = rank["ppo"]["pieces"]
        assert [names[id(layer)] for layer in sharded_layers(actor_critic)] == [n for n in trained if ".layers." in n]
        assert not any(name.startswith("critic") and ".layers." not in name for name in trained)  # the root has it
        assert reference == rank["dpo"]["pieces"][1] == [""]


def test_two_processes_train_as_one(launched, folder, one_process, split):
    _, output, results, *_ = launched
    trained = results["train"]

    def factors(run):  # as the root of a KL, the small difference of two log-probabilities, each is rounded more
        return [values["factor"] for values in run["state"] if "factor" in values]

    def rest(run):
        return [{name: value for name, value in values.items() if name != "factor"} for values in run["state"]]

    for workload in trained[0]:
        expected, rounded = one_process(workload), split(workload)
        for result in (rank[workload] for rank in trained):
            assert_close(result["logs"], expected["logs"], **bound(expected["logs"], rounded["logs"]))
            assert_close(rest(result), rest(expected), **bound(rest(expected), rest(rounded)))
            assert_close(factors(result), factors(expected), rtol=2e-3, atol=0)
            assert_close(result["state"], trained[0][workload]["state"], rtol=0, atol=0)
        expected, rounded = saved(folder / "one" / workload), saved(folder / "split" / workload)
        assert expected
        assert_close(saved(output / workload), expected, **bound(expected, rounded))


@cases("gradient", "gradient lora")
def test_gradients_are_those_of_one_process(launched, folder, one_process, name):
    _, output, *_ = launched
    one_process(name)
    lora, expected = name.endswith("lora"), saved(folder / "one" / name)
    before = saved(folder / "inputs/policy") | {"critic/model.safetensors": {}}
    steps = {  # the new weights are the old ones minus the gradient; an adapter's B was 0
        weight: (tensor - before[path][weight] if not lora else tensor).abs().max().item()
        for path, tensors in expected.items()
        for weight, tensor in tensors.items()
        if (weight in before[path] if not lora else "lora_B" in weight)
    }
    largest = max(steps.values())
    assert largest > 0.01 and min(steps.values()) > 0
    for path, tensors in saved(output / name).items():
        for weight, tensor in tensors.items():
            assert_close(tensor, expected[path][weight], rtol=0, atol=1e-5 * largest, msg=weight)


def test_saved_models_load_with_plain_transformers(launched):
    _, output, *_ = launched
    for kind, auto in (("ppo", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        _, info = auto.from_pretrained(output / kind, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
    policy = AutoModelForCausalLM.from_pretrained(output.parent / "inputs/policy")
    adapted = PeftModel.from_pretrained(policy, output / "ppo lora")
    for name, tensor in load_file(output / "ppo lora/adapter_model.safetensors").items():
        assert_close(get_peft_model_state_dict(adapted)[name], tensor, rtol=0, atol=0)


def test_a_resumed_run_ends_with_the_bits_of_the_uninterrupted_one(launched):
    _, output, results, *_ = launched
    trained, resumed = results["train"], results["resume"]
    for workload in resumed[0]:
        assert resumed[0][workload]["logs"][:-1] == trained[0][workload]["logs"][:-1], workload
        for name, tensors in saved(output / workload).items():
            assert_close(saved(output / f"{workload} resumed")[name], tensors, rtol=0, atol=0)


def test_a_lora_checkpoint_does_not_hold_the_base(launched):
    _, output, *_ = launched
    files = [path for path in (output / "ppo lora").glob("checkpoint-*/**/*") if path.is_file()]
    states = [load_file(path) for path in files if path.suffix == ".safetensors"]
    states += [torch.load(path, weights_only=True) for path in files if path.name == "pytorch_model_fsdp.bin"]
    names = [path for path in files if path.name.endswith("model_states.pt")]  # DeepSpeed's file has more
    states += [torch.load(path, weights_only=False)["module"] for path in names]
    assert states
    for state in states:
        assert not [name for name in state if "lora_" not in name and "score" not in name]


@cases("generation", "generation lora")
def test_a_rollout_gathers_each_weight_once(failed, name):
    mode, results, _, _ = failed
    lengths = [sum(rollout[1]) for rank in results for rollout in rank[name]]
    assert len(set(lengths)) > 1  # the processes run unequal numbers of forward passes
    # FSDP2: embeddings, two layers, the head, and the rest; ZeRO-3: each parameter of the policy
    expected = {"fsdp2": 5, "zero3": 45 if name.endswith("lora") else 21}.get(mode, 0)
    for rank in results:
        assert [gathers for gathers, _ in rank[name]] == [expected, expected]


@cases("canary", "canary lora")
def test_canaries_are_generated_though_lengths_differ_between_processes(failed, folder, name):
    rows = [json.loads(line) for line in (folder / failed[0] / name / "canary.jsonl").open()]
    assert [row["step"] for row in rows] == [step for step in range(5) for _ in CANARY]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "inputs/policy"), tiny_tokenizer()
    answers = sample(model, prompt_token_ids(tokenizer, CANARY), [2], max_new_tokens=12, temperature=0.0)
    assert [len(ids) for ids in answers] == [1, 1, 12]
    assert [row["answer"] for row in rows[:3]] == answer_texts(tokenizer, answers, [2])


@cases("best", "best lora")
def test_the_best_weights_are_loaded_at_the_end(failed, folder, name):
    mode, results, _, _ = failed
    output = folder / mode / name
    assert results[0][name] == str(output / "checkpoint-2")
    end, good, last = (saved(output / name) for name in (".", "checkpoint-2", "checkpoint-4"))
    assert end.keys() == good.keys() and len(end) == 2
    for path, tensors in end.items():
        for weight, tensor in tensors.items():
            assert_close(tensor, good[path][weight], rtol=0, atol=0, msg=f"{path}: {weight}")
        assert any(not torch.equal(tensor, last[path][weight]) for weight, tensor in tensors.items())


@torch.no_grad()
@cases("recipes", "recipes lora")
def test_the_reward_recipe_saves_a_centred_head(failed, folder, name):
    lora, output = name.endswith("lora"), folder / failed[0] / name / "reward"
    auto = AutoPeftModelForSequenceClassification if lora else AutoModelForSequenceClassification
    model = auto.from_pretrained(output, num_labels=1, pad_token_id=0).eval()
    texts = [f"{pair['prompt']}{pair['chosen']}</s>" for pair in make_pairs()]
    batch = tiny_tokenizer()(texts, padding=True, padding_side="right", return_tensors="pt")
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert_close(scores.mean(), torch.zeros(()), rtol=0, atol=1e-5)
    assert scores.std() > 1e-2 and (output / "reward_report.json").exists()
    assert (output / "trl_ext_base.json").exists() == lora


@cases("recipes", "recipes lora")
def test_models_of_the_recipes_load_with_plain_transformers(failed, folder, name):
    start = saved(folder / "inputs/policy")["model.safetensors"]
    for stage in ("sft", "ppo", "dpo"):
        output = folder / failed[0] / name / stage
        if name.endswith("lora"):
            (weights,) = (tensors for path, tensors in saved(output).items() if "critic" not in path)
            assert any(tensor.any() for weight, tensor in weights.items() if "lora_B" in weight), stage
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "inputs/policy"), output)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"]
            assert not torch.equal(model.state_dict()["lm_head.weight"], start["lm_head.weight"]), stage


@cases("stop ppo", "stop dpo")
def test_a_stop_of_one_process_stops_both_at_one_step(failed, name):
    mode, results, _, _ = failed
    for rank in results:
        (error, message, seconds), step = rank[name]
        assert error is None, message
        assert step == {"stop ppo": 4, "stop dpo": 2}[name] and seconds < 60  # PPO waits for the end of the rollout


@cases("warm-up")
def test_a_warm_up_does_not_train_the_policy_or_is_refused(failed, name):
    mode, results, _, _ = failed
    for rank in results:
        if mode.startswith("zero"):
            assert "`critic_warmup_rollouts` skips updates of the policy, but DeepSpeed" in rank[name]
        else:
            assert rank[name] == [["critic"], *2 * [["critic", "policy"]]]


@pytest.mark.parametrize("gathers", ["", " layer by layer"])
@pytest.mark.parametrize("launched", ["fsdp2", "zero3"], indirect=True)
def test_a_process_whose_episodes_have_ended_still_generates(failed, gathers):
    """Process 1 takes two more turns, of 3 rows and of 1. For each it needs the other process's shards."""
    results = [rank[f"episodes{gathers}"] for rank in failed[1]]
    assert [result["rows"] for result in results] == [[4, 1, 1], [4, 3, 1]]
    assert [result["scores"] for result in results] == [0.75, 0.75]


@cases("reward raises")
def test_an_error_on_one_process_ends_both(failed, name):
    for rank in failed[1]:
        error, message, took = rank[name]
        assert error == "RuntimeError" and "process 1: reward function" in message and took < 60


@cases("not finite")
def test_a_gradient_that_is_not_finite_on_one_process_ends_both(failed, name):
    for rank in failed[1]:
        error, message, took = rank[name]
        assert error == "FloatingPointError" and "at step 2" in message and "loss/policy_avg" in message and took < 60


def test_a_crash_of_one_process_ends_the_launch(failed):
    _, _, errors, seconds = failed
    assert "ValueError: process 1 has had enough" in errors and seconds < 60
