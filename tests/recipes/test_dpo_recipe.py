import json
import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from recipes.demo.model import make_model, make_tokenizer
from recipes.demo.world import make_world
from recipes.dpo import main

ROOT = Path(__file__).parents[2]
FAST = ["--per_device_train_batch_size", "16", "--max_steps", "4", "--disable_tqdm", "true", "--use_cpu", "true"]
DRIFT = ["--beta_controller", "drift", "--drift_target", "0.001", "--drift_horizon", "100", "--warmup_steps", "0"]


def write(folder, rows):
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[split]))
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write(folder / "preferences", make_world(0, demonstrations=1, pairs=100, prompts=1, held_out=40)["preferences"])
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer, 0).save_pretrained(folder / "model")
    return folder


def arguments(inputs, output_dir, *more):
    return [
        *("--config", str(ROOT / "recipes/demo/dpo.yaml"), "--model_name_or_path", str(inputs / "model")),
        *("--dataset_name", str(inputs / "preferences"), "--output_dir", str(output_dir), *FAST, *more),
    ]


def weights(folder):
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.slow
def test_it_trains_reports_and_goes_on_where_it_stopped(inputs, tmp_path, capsys):
    saving = ["--save_strategy", "steps", "--save_steps", "2", *DRIFT]
    main(arguments(inputs, tmp_path / "whole", *saving))
    report = json.loads((tmp_path / "whole" / "eval_results.json").read_text())
    assert f"held-out preference accuracy {report['eval_rewards/accuracies']:.1%}" in capsys.readouterr().out
    assert report["eval_logps/drift"] > 0 and report["eval_beta"] > 0.1

    part = arguments(inputs, tmp_path / "part", *saving)
    main(part)
    for name in ("checkpoint-4", "eval_results.json", "model.safetensors"):  # interrupted after step 2
        path = tmp_path / "part" / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            file.unlink()
    main(part)
    assert json.loads((tmp_path / "part" / "train_results.json").read_text())["epoch"] > 0.5
    again = json.loads((tmp_path / "part" / "eval_results.json").read_text())
    for name in ("eval_loss", "eval_beta", "eval_logps/drift"):
        assert again[name] == report[name]
    assert_close(weights(tmp_path / "part"), weights(tmp_path / "whole"), rtol=0, atol=0)


@pytest.mark.slow
def test_reference_model_and_held_out_size(inputs, tmp_path):
    tokenizer = make_tokenizer()
    make_model(tokenizer, 1).save_pretrained(tmp_path / "reference")
    more = ["--ref_model_name_or_path", str(tmp_path / "reference"), "--eval_size", "20", "--learning_rate", "0"]
    main(arguments(inputs, tmp_path / "out", *more))
    report = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert report["eval_logps/drift"] > 0.05  # without a step: the reference is another model
    assert report["eval_samples_per_second"] and torch.isfinite(torch.tensor(report["eval_loss"]))
    main(arguments(inputs, tmp_path / "none", "--eval_size", "0"))
    assert not (tmp_path / "none" / "eval_results.json").exists()


@pytest.mark.slow
def test_lora(inputs, tmp_path):
    main(arguments(inputs, tmp_path, "--use_peft", "--lora_target_modules", "q_proj", "v_proj"))
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_mistakes_are_one_line(subtests, inputs, tmp_path, capsys):
    for more, message in [
        (["--dataset_test_split", "dev"], "dev"),
        (["--eval_size", "-1"], "`eval_size` must be >= 0, got -1"),
        (["--beta_controller", "drift"], "needs `drift_target`, in nats per sequence"),
    ]:
        with subtests.test(more=more):
            with pytest.raises(SystemExit, match="2"):
                main(arguments(inputs, tmp_path, *more))
            error = capsys.readouterr().err.strip().splitlines()[-1]
            assert re.search(message, error)


@pytest.mark.slow
def test_unusable_pairs_stop_it_or_are_dropped(inputs, tmp_path, capsys):
    rows = [json.loads(line) for line in (inputs / "preferences" / "train.jsonl").read_text().splitlines()]
    rows[3]["rejected"] = rows[3]["chosen"]
    folder = write(tmp_path / "data", {"train": rows, "test": rows[:40]})
    with pytest.raises(SystemExit):
        main([*arguments(inputs, tmp_path / "out"), "--dataset_name", str(folder)])
    assert (
        "the split 'train': 1 of 100 pairs have no prompt or no two different answers (first row 3)"
        in capsys.readouterr().err
    )
    more = ["--dataset_name", str(folder), "--drop_unusable_pairs", "true", "--max_steps", "1"]
    main([*arguments(inputs, tmp_path / "out"), *more])
