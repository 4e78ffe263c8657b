"""The runs that tests of DPOTrainer share; as a script, the runs of two processes."""

import sys
from pathlib import Path

import torch
import trl
from accelerate import PartialState
from datasets import Dataset

from tests.dpo.test_row_means import KINDS, ROWS, evaluated, trainer_of
from tests.launch import spare_time
from tests.tiny import ON_CPU, WORDS, tiny_llama, tiny_tokenizer, weights
from trl_ext import DPOConfig, DPOTrainer

QUIET = {
    **ON_CPU,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-5,  # with 1e-8 a gradient that is only rounding moves a weight by a whole step
    "max_steps": 6,
}


def pairs(n=16, seed=0):
    """Random pairs with each column that an option reads; one source has short completions, one long ones."""
    generator = torch.Generator().manual_seed(seed)

    def text(low, high):
        length = int(torch.randint(low, high, (), generator=generator))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))

    rows = []
    for i in range(n):
        high = (4, 12)[i % 2]
        chosen = text(2, high)
        rejected = chosen
        while rejected == chosen:
            rejected = text(2, high)
        rows.append(
            {
                "prompt": f"{text(1, 5)} ",
                "chosen": chosen,
                "rejected": rejected,
                "score_chosen": 1.0 + i % 3,
                "score_rejected": 0.5,
                "confidence": 0.5 + 0.1 * (i % 6),
                "weight": 0.25 * (i % 5),
                "source": ("short", "long")[i % 2],
            }
        )
    return Dataset.from_list(rows)


def config(output_dir, **kwargs):
    return DPOConfig(str(output_dir), **{**QUIET, "record_run": False, **kwargs})


def make_trainer(output_dir, model=None, trainer_kwargs=None, **kwargs):
    arguments = {"train_dataset": pairs(), "processing_class": tiny_tokenizer()} | (trainer_kwargs or {})
    model = tiny_llama() if model is None else model
    return DPOTrainer(model=model, args=config(output_dir, **kwargs), **arguments)


def make_trl_trainer(output_dir, model=None, trainer_kwargs=None, **kwargs):
    """Build TRL's trainer, which needs a reference: it cannot copy a model that was built in memory."""
    arguments = {"train_dataset": pairs(), "processing_class": tiny_tokenizer()} | (trainer_kwargs or {})
    if "peft_config" not in arguments:
        arguments.setdefault("ref_model", tiny_llama())
    model = tiny_llama() if model is None else model
    return trl.DPOTrainer(model=model, args=trl.DPOConfig(str(output_dir), **{**QUIET, **kwargs}), **arguments)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def controller_state(trainer):
    """The numbers, to be compared with `torch.testing.assert_close`."""
    if (normalizer := trainer.margin_normalizer) is None:
        return {}
    return {"moments": normalizer.state_dict()["moments"], "factors": normalizer.factors}


DRIFT = {"beta_controller": "drift", "drift_target": 0.3, "drift_horizon": 20}
NORMALIZED = {"margin_normalization": "source", "margin_warmup_pairs": 4}
WITH_SFT = {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 1.0]}
INFORMED = {"use_margin": True, "use_confidence": True, "use_weight": True, "dpop_lambda": 2.0}


def run(folder, processes, **kwargs):
    """Return the end state of six steps of 8 pairs on any number of processes."""
    kwargs = {"per_device_train_batch_size": 8 // processes, **kwargs}
    trainer = make_trainer(folder, **kwargs)
    trainer.train()
    return {
        "processes": trainer.accelerator.num_processes,
        "wrapper": type(trainer.model_wrapped).__name__,
        "weights": weights(trainer),
        "state": controller_state(trainer),
        "beta": trainer.beta,
        "betas": logged(trainer, "beta"),
        "losses": logged(trainer, "loss"),
        "drift": logged(trainer, "logps/drift"),
        "displacement": logged(trainer, "logps/displacement_rate"),
    }


def resumed(folder, **kwargs):
    """The end states of an uninterrupted run, and of one resumed from its third checkpoint."""
    kwargs = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 3, **kwargs}
    whole = make_trainer(folder, **kwargs)
    whole.train()
    again = make_trainer(folder, **kwargs)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3"))
    return [end_of(t) for t in (whole, again)]


def end_of(trainer):
    return {"weights": weights(trainer), "state": controller_state(trainer), "beta": trainer.beta}


def saved(folder, processes, checkpoint=None, **kwargs):
    """The end state of six steps of 8 pairs, saved at the third; or of a run resumed from a checkpoint."""
    kwargs = {"per_device_train_batch_size": 8 // processes, "save_strategy": "steps", "save_steps": 3, **kwargs}
    trainer = make_trainer(folder, **kwargs)
    trainer.train(checkpoint and str(checkpoint))
    return end_of(trainer)


def broken_weight(folder):
    """What training raises if the policy's embedding of one word, which is in one completion only, is NaN."""
    rows = [
        {name: text.replace("sky", "log") for name, text in row.items() if isinstance(text, str)} for row in pairs()
    ]
    rows = [{**row, "rejected": row["rejected"] + " big"} for row in rows]  # no two pairs became identical
    rows[5]["chosen"] = "sky"
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[tiny_tokenizer().convert_tokens_to_ids("sky")] = torch.nan
    kwargs = {"ref_model": tiny_llama(), "train_dataset": Dataset.from_list(rows)}
    trainer = make_trainer(folder, model, kwargs, per_device_train_batch_size=2, max_steps=8)
    try:
        trainer.train()
    except FloatingPointError as error:
        return str(error)
    return None


def on_two_processes(output_dir):
    """Run every check in one launch: imports take longer than all of them."""
    folder = Path(output_dir)
    results = {
        "drift": run(folder / "drift", 2, **DRIFT, **NORMALIZED, **INFORMED),
        "resumed": resumed(folder / "resumed", **DRIFT, **NORMALIZED),
        "broken": broken_weight(folder / "broken"),
        "sft": run(folder / "sft", 2, **WITH_SFT),
        "evaluated": {kind: evaluated(trainer_of(kind, folder / kind, ROWS, 2)) for kind in KINDS},
        "from one": saved(folder / "from one", 2, folder / "by one" / "checkpoint-3", **DRIFT, **NORMALIZED),
    }
    torch.save(results, folder / f"process {PartialState().process_index}.pt")


if __name__ == "__main__":
    spare_time()
    on_two_processes(sys.argv[1])
