"""Bad input ends in one clear error that names the row, before anything is trained."""

import math

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig
from trl import DPOConfig as TRLConfig

from tests.dpo.worker import DRIFT, NORMALIZED, broken_weight, make_trainer, pairs
from tests.tiny import tiny_llama, tiny_tokenizer
from trl_ext import DPOTrainer


def changed(row, **values):
    rows = pairs().to_list()
    rows[row] |= values
    return Dataset.from_list(rows)


def talk(prompt):
    say = {name: [[{"role": "assistant", "content": name}]] * 8 for name in ("chosen", "rejected")}
    return Dataset.from_dict({"prompt": [prompt] * 8, **say})


def as_text(row):
    return {name: row[name][0]["content"] for name in ("chosen", "rejected")}


SAYS = {"use_margin": True, "use_confidence": True, "use_weight": True}


@pytest.mark.slow
def test_rows_and_columns_are_named(subtests, tmp_path):
    for data, options, message in [
        (changed(3, chosen=""), {}, "The train dataset has unusable pairs: row 3: `chosen` is empty"),
        (changed(4, rejected=None), {}, "row 4: `rejected` is empty"),
        (changed(5, chosen="a", rejected="a"), {}, "row 5: `chosen` and `rejected` are identical"),
        (changed(2, chosen="  "), {}, "row 2: `chosen` is empty"),
        (changed(2, prompt=None), {}, "row 2: `prompt` must be text or messages, got None"),
        (pairs().map(lambda row: {"chosen": 3}), {}, "row 0: `chosen` must be text or messages, got 3"),
        (changed(6, confidence=0.4), SAYS, r"row 6: `confidence` must be in \[0.5, 1\].*, got 0.4"),
        (changed(7, confidence=math.nan), SAYS, "row 7: `confidence` .* got nan"),
        (changed(8, weight=-0.5), SAYS, "row 8: `weight` must be a finite number >= 0, got -0.5"),
        (changed(9, weight=None), SAYS, "row 9: `weight` must be a finite number >= 0, got None"),
        (changed(10, score_chosen=math.inf), SAYS, "row 10: `score_chosen` must be a finite number, got inf"),
        (changed(11, source=None), NORMALIZED, "row 11: `source` must be a string, got None"),
        (pairs().remove_columns("rejected"), {}, r"lacks the column\(s\) `rejected`; it has \['prompt', 'chosen'"),
        (pairs().remove_columns("confidence"), SAYS, r"lacks the column\(s\) `confidence`.*unset the option"),
        (pairs().remove_columns("score_chosen"), SAYS, r"lacks the column\(s\) `score_chosen`"),
        (pairs().add_column("margin", [1.0] * 16), SAYS, "`margin` and `score_chosen`, `score_rejected`, .* both say"),
        (pairs().select([]), {}, "The train dataset is empty"),
        (talk(prompt=[{"role": None, "content": "a"}]), {}, "row 0: `prompt` must be text or messages, got"),
        (talk(prompt=[{"role": "user", "content": None}]), {}, "row 0: `prompt` must be text or messages, got"),
        (
            talk(prompt="the " * 9).map(as_text),
            {"max_length": 9},
            "`max_length=9` leaves no answer token in any pair .* Raise `max_length`",
        ),
    ]:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, trainer_kwargs={"train_dataset": data}, **options)


def test_pairs_whose_answers_are_cut_away_are_counted(tmp_path, capsys):
    rows = [*pairs(7), {**pairs()[7], "prompt": "the " * 20}]
    make_trainer(tmp_path, trainer_kwargs={"train_dataset": Dataset.from_list(rows)}, max_length=20)
    assert "1 of 8 pairs are left out: `max_length=20` leaves no answer token in them." in capsys.readouterr().out
    evaluated = {"train_dataset": pairs(8), "eval_dataset": {"hard": Dataset.from_list(rows)}}
    make_trainer(tmp_path, trainer_kwargs=evaluated, max_length=20)
    assert "1 of 8 pairs of the eval 'hard' dataset are left out" in capsys.readouterr().out
    evaluated["eval_dataset"] = Dataset.from_list(rows[-1:])
    with pytest.raises(ValueError, match="leaves no answer token in any pair of the eval dataset"):
        make_trainer(tmp_path, trainer_kwargs=evaluated, max_length=20)


def test_an_adapter_that_rounds_its_steps_away_stops_the_run(tmp_path):
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")}
    trainer = make_trainer(tmp_path, trainer_kwargs=lora, learning_rate=1e-6, optim="sgd")
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.full_like(parameter, 0.5, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"The policy's adapter \(torch.bfloat16\) had a gradient .* at step 1"):
        trainer.train()


def test_a_model_and_a_tokenizer_that_cannot_be_right(subtests, tmp_path):
    without_eos, more = tiny_tokenizer(), tiny_tokenizer(pad=False)
    without_eos.eos_token = None
    more.add_special_tokens({"pad_token": "[PAD]"})
    for model, tokenizer, message in [
        (tiny_llama(), without_eos, "The tokenizer has no EOS token"),
        (tiny_llama(), more, r"token ids up to 29, but the policy's vocabulary has only 29 .*\[PAD\]"),
        (3, tiny_tokenizer(), "`model` must be a path or a causal language model, got 3"),
    ]:
        with subtests.test(message=message), pytest.raises((TypeError, ValueError), match=message):
            make_trainer(tmp_path, model, {"processing_class": tokenizer})


@pytest.mark.parametrize("from_path", [False, True])
def test_messages_need_a_chat_template(tmp_path, from_path):
    tokenizer, model = tiny_tokenizer(), tiny_llama()
    tokenizer.chat_template = None
    if from_path:
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        model, tokenizer = str(tmp_path / "model"), None
    say = [[{"role": "user", "content": "the"}, {"role": "assistant", "content": word}] for word in ("cat", "dog")]
    data = Dataset.from_dict({"chosen": say[:1] * 8, "rejected": say[1:] * 8})
    with pytest.raises(ValueError, match="answers of the train dataset are messages, but .* has no chat template"):
        make_trainer(tmp_path, model, {"train_dataset": data, "processing_class": tokenizer})


def test_evaluation_data_are_checked_too(tmp_path):
    bad = changed(2, rejected="")
    for given, name in ((bad, "eval"), ({"first": pairs(), "train": bad}, "eval 'train'")):
        with pytest.raises(ValueError, match=f"The {name} dataset .* row 2: `rejected` is empty"):
            make_trainer(tmp_path, trainer_kwargs={"eval_dataset": given})
        with pytest.raises(ValueError, match=f"The {name} dataset .* row 2: `rejected` is empty"):
            make_trainer(tmp_path).evaluate(given)
    with pytest.raises(ValueError, match=r"The eval dataset lacks the column\(s\) `score_chosen`"):
        make_trainer(tmp_path, use_margin=True).evaluate(pairs().rename_column("score_chosen", "margin"))


def test_messages_without_content_are_empty(tmp_path):
    def talk(text):
        return [{"role": "assistant", "content": text}]

    rows = [{"prompt": [{"role": "user", "content": "the cat"}], "chosen": talk("sat"), "rejected": talk("ran")}] * 3
    rows.append({**rows[0], "rejected": talk("")})
    with pytest.raises(ValueError, match="row 3: `rejected` is empty"):
        make_trainer(tmp_path, trainer_kwargs={"train_dataset": Dataset.from_list(rows)})
    trainer = make_trainer(tmp_path, trainer_kwargs={"train_dataset": Dataset.from_list(rows[:3])}, max_steps=1)
    trainer.train()


def test_only_the_first_of_many_rows_are_shown(tmp_path):
    data = pairs().map(lambda row: {"weight": -1.0})
    with pytest.raises(ValueError, match=r"row 4: [^;]*; and 11 more\."):
        make_trainer(tmp_path, trainer_kwargs={"train_dataset": data}, use_weight=True)


def test_a_stream_is_checked_as_it_is_read(tmp_path):
    kwargs = {"trainer_kwargs": {"train_dataset": changed(6, confidence=0.2).to_iterable_dataset()}}
    trainer = make_trainer(tmp_path, use_confidence=True, **kwargs, max_steps=2)
    with pytest.raises(ValueError, match=r"The train dataset, row 6: `confidence` must be in \[0.5, 1\]"):
        trainer.train()
    for options in (NORMALIZED, {"beta_controller": "drift", "drift_target": 1.0}):
        with pytest.raises(ValueError, match="the train dataset is a stream"):
            make_trainer(tmp_path, **kwargs, **options)
    stream = {"train_dataset": pairs().to_iterable_dataset()}
    make_trainer(tmp_path, trainer_kwargs=stream, use_confidence=True, **DRIFT, max_steps=2).train()


def test_other_kinds_of_arguments_are_named(tmp_path):
    with pytest.raises(TypeError, match="train dataset must be a `datasets.Dataset`, got `DatasetDict`: pass one of"):
        make_trainer(tmp_path, trainer_kwargs={"train_dataset": DatasetDict({"train": pairs()})})
    for data in (pairs().to_list(), None):
        with pytest.raises(TypeError, match=f"must be a `datasets.Dataset`, got `{type(data).__name__}`"):
            make_trainer(tmp_path, trainer_kwargs={"train_dataset": data}, use_margin=True)
    with pytest.raises(TypeError, match="must be a `trl_ext.DPOConfig`, got trl"):
        DPOTrainer(tiny_llama(), args=TRLConfig(str(tmp_path), use_cpu=True), train_dataset=pairs())
    with pytest.raises(ValueError, match="built in memory, so its tokenizer is not known: pass `processing_class`"):
        make_trainer(tmp_path, trainer_kwargs={"processing_class": None})


@pytest.mark.slow
def test_log_probs_that_are_not_finite_name_the_row_and_who_gave_them(tmp_path):
    message = broken_weight(tmp_path)
    assert (
        "At step " in message
        and "the policy's log-prob of the chosen answer of row 5 of the prepared train dataset (" in message
    )
    assert message.count("row ") == 1 and "sky </s>" in message

    reference = tiny_llama()
    with torch.no_grad():
        reference.lm_head.weight.fill_(torch.inf)
    for options in ({}, DRIFT, {"precompute_ref_log_probs": True}):
        trainer = make_trainer(tmp_path, trainer_kwargs={"ref_model": reference}, **options)
        with pytest.raises(
            FloatingPointError, match=r"the reference's log-prob .*row \d+ of the prepared .* and 4 more"
        ):
            trainer.train()
    trainer = make_trainer(tmp_path, trainer_kwargs={"ref_model": reference})
    with pytest.raises(FloatingPointError, match="answer of the row '"):  # a dataset that it does not keep
        trainer.evaluate(pairs(4, seed=9))
