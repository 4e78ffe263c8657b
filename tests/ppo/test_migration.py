"""`stop_token_id`."""

from tests.tiny import rows_of, tiny_llama, tiny_ppo, tiny_tokenizer


def test_stop_token_id_ends_completions(tmp_path):
    tokenizer, stop = tiny_tokenizer(), 9
    model = tiny_llama()
    model.lm_head.weight.data[stop] *= 4  # so that it is sampled often
    config = {"stop_token_id": stop, "missing_eos_score": -7.0, "max_completion_length": 20}
    trainer = tiny_ppo(tmp_path, model, max_steps=1, **config)
    trainer.train()
    ids, mask = rows_of(trainer)["completion_ids"], rows_of(trainer)["completion_mask"].bool()
    ended = 0
    for row, real in zip(ids, mask, strict=True):
        tokens = row[real].tolist()
        assert not {stop, tokenizer.eos_token_id} & set(tokens[:-1])
        ended += tokens[-1] == stop
    assert ended >= 1
    log = trainer.state.log_history[0]
    assert log["val/num_eos_tokens"] >= ended  # it counts as EOS
    assert log["completions/clipped_ratio"] == 1 - log["val/num_eos_tokens"] / 8
