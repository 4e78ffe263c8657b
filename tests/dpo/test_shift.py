"""Whether the pairs look like what the reference would write, and what is said where they do not."""

import warnings

import pytest
import torch
from datasets import Dataset

from tests.dpo.worker import logged, make_trainer
from tests.tiny import WORDS, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.slow


def own_pairs(model, n=200):
    """Answers that the model itself samples."""
    torch.manual_seed(1)
    tokenizer = tiny_tokenizer()
    ids = tokenizer(["the cat"] * (2 * n), return_tensors="pt").input_ids
    samples = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=8)[:, ids.shape[1] :]
    texts = tokenizer.batch_decode(samples, skip_special_tokens=True)
    rows = [{"prompt": "the cat ", "chosen": a, "rejected": b} for a, b in zip(texts[:n], texts[n:], strict=True)]
    return Dataset.from_list([row for row in rows if row["chosen"] and row["rejected"] != row["chosen"]])


def sharp_llama():
    """Some words are far more likely than others."""
    return tiny_llama(seed=2, initializer_range=1.0)


def test_own_answers_pass_and_foreign_ones_are_warned_of(tmp_path):
    own = own_pairs(sharp_llama())
    # The opposite: every answer made of words that the model finds unlikely
    with torch.no_grad():
        unlikely = sharp_llama()(torch.tensor([tiny_tokenizer()("the cat").input_ids])).logits[0, -1].argsort()
    words = [tiny_tokenizer().convert_ids_to_tokens(int(i)) for i in unlikely]
    word = next(word for word in words if word in WORDS)
    foreign = own.map(lambda row: {"chosen": f"{word} {word} {word} {word}"})
    shares = []
    for data in (own, foreign):
        trainer = make_trainer(
            tmp_path,
            sharp_llama(),
            {"train_dataset": data},
            distribution_shift_samples=150,
            per_device_eval_batch_size=64,
            max_steps=1,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        warned = [str(w.message) for w in caught if "have a lower mean log-prob per token" in str(w.message)]
        shares.append((trainer.distribution_shift["chosen_below_sampled"], warned))
    assert shares[0][0] < 0.1 and not shares[0][1]
    assert shares[1][0] > 0.5 and "`use_weighting=True`, WPO" in shares[1][1][0]


def test_the_figures_are_means_per_token_under_the_reference(tmp_path):
    trainer = make_trainer(
        tmp_path, trainer_kwargs={"ref_model": tiny_llama(seed=5)}, distribution_shift_samples=16, ld_alpha=0.5
    )
    trainer.train()
    for name in ("chosen", "rejected"):
        total = 0.0
        for row in trainer.train_dataset:
            ids, start = torch.tensor([row["prompt_ids"] + row[f"{name}_ids"]]), len(row["prompt_ids"])
            with torch.no_grad():
                logprobs = trainer.ref_model(input_ids=ids).logits.log_softmax(-1)
            tokens = range(start, ids.shape[1])
            total += sum(logprobs[0, t - 1, ids[0, t]].item() for t in tokens) / len(tokens)
        assert trainer.distribution_shift[name] == pytest.approx(total / 16, rel=1e-5)
    assert logged(trainer, "shift/chosen")[0] == trainer.distribution_shift["chosen"]
    assert len(logged(trainer, "shift/sampled")) == 1  # before training, once
