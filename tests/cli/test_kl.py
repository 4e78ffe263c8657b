"""KL between two checkpoints."""

import json
import math
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer
from trl_ext.cli.kl import main, read_prompts, sampled_kl, sampling_of
from trl_ext.models import load_model

PROMPTS = ["the cat sat", "a", "dog ran on the mat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("a", 0), ("b", 1)):
        tiny_llama(seed=seed).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    plain = tiny_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(folder / "without template")
    tiny_llama().save_pretrained(folder / "without template")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    (folder / "chat.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "the cat"}]}) + "\n")
    return folder


def constant_model(logits):
    """A model whose next-token distribution is softmax(logits), whatever came before."""
    model = tiny_llama(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    vocabulary = model.config.vocab_size
    bias = torch.full((vocabulary,), -1e4)
    bias[6 : 6 + len(logits)] = torch.tensor(logits)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, vocabulary)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(bias)
    return model.eval()


def test_closed_form():
    """Two tokens, p = (3/4, 1/4) and q = (1/2, 1/2): 3/4 log 3/2 + 1/4 log 1/2 = 0.1308 nats a token."""
    p, q = constant_model([math.log(3.0), 0.0]), constant_model([0.0, 0.0])
    kl, tokens = sampled_kl(p, q, tiny_tokenizer(), PROMPTS * 100, max_new_tokens=20, batch_size=300)
    assert tokens.unique().tolist() == [20]  # EOS is never drawn
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl.sum() / tokens.sum() == pytest.approx(expected, abs=0.02)  # σ of a token is 0.48, of 6,000 0.006


@pytest.mark.slow
def test_answers_end_at_each_eos_of_the_checkpoint():
    """The likelier token ends an answer: 1 / (3/4) tokens in the mean, of 0.1308 nats each."""
    p, q = constant_model([math.log(3.0), 0.0]), constant_model([0.0, 0.0])
    p.generation_config.eos_token_id = [2, 6]
    kl, tokens = sampled_kl(p, q, tiny_tokenizer(), PROMPTS * 1000, max_new_tokens=20, batch_size=1000)
    assert tokens.double().mean() == pytest.approx(4 / 3, abs=0.05)  # σ of the mean is 0.012
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl.mean() == pytest.approx(4 / 3 * expected, abs=0.03)


def test_neither_the_checkpoint_s_settings_nor_a_pad_token_outside_the_vocabulary_change_anything():
    policy, reference, tokenizer = tiny_llama().eval(), tiny_llama(seed=1).eval(), tiny_tokenizer(pad=False)
    expected = sampled_kl(policy, reference, tokenizer, PROMPTS * 9, 8)
    policy.generation_config.update(min_p=0.2, typical_p=0.5, repetition_penalty=3.0)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == policy.config.vocab_size
    torch.testing.assert_close(sampled_kl(policy, reference, tokenizer, PROMPTS * 9, 8), expected, rtol=0, atol=0)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_a_model_is_at_zero_from_itself_and_padding_changes_nothing(build):
    model, other = build().eval(), build(seed=1).eval()
    assert sampled_kl(model, model, tiny_tokenizer(), PROMPTS, 8)[0].abs().max() == 0
    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    together, _ = sampled_kl(model, other, tokenizer, ["a"] + PROMPTS, 1, temperature=1e-4, batch_size=4)
    alone, _ = sampled_kl(model, other, tokenizer, ["a"] + PROMPTS, 1, temperature=1e-4, batch_size=1)
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-2)
    assert torch.equal(torch.get_rng_state(), state)


def test_command(folders, capsys):
    main([str(folders / "a"), str(folders / "b"), "--prompts", str(folders / "prompts.txt"), "--max_new_tokens", "8"])
    result = json.loads(capsys.readouterr().out)
    assert result["prompts"] == 3 and result["interval_95"][0] < result["kl"] < result["interval_95"][1]
    assert result["kl"] == pytest.approx(result["kl_per_token"] * result["mean_length"], rel=1e-5)


def test_b_may_have_more_rows_than_a(folders, capsys):
    wide = load_model(str(folders / "b"))
    wide.resize_token_embeddings(40, mean_resizing=False)
    wide.lm_head.weight.data[29:] = 0  # some of B's chance, none of A's
    wide.save_pretrained(folders / "wide")
    tiny_tokenizer().save_pretrained(folders / "wide")
    prompts = ["--prompts", str(folders / "prompts.txt"), "--max_new_tokens", "8"]
    main([str(folders / "a"), str(folders / "b"), *prompts])
    main([str(folders / "a"), str(folders / "wide"), *prompts])
    narrow, wide = map(json.loads, capsys.readouterr().out.splitlines())
    assert wide["kl"] > narrow["kl"] and wide["mean_length"] == narrow["mean_length"]
    with pytest.raises(SystemExit, match="2"):
        main([str(folders / "wide"), str(folders / "a"), *prompts])
    assert "A has a vocabulary of 40 tokens, B only 29: choose a B that has all tokens of A" in capsys.readouterr().err


def test_chat_prompts_and_adapters(folders, capsys):
    torch.manual_seed(0)
    adapter = get_peft_model(load_model(str(folders / "a")), LoraConfig(r=2, init_lora_weights=False))
    adapter.save_pretrained(folders / "adapter")
    tiny_tokenizer().save_pretrained(folders / "adapter")
    main([str(folders / "adapter"), str(folders / "a"), "--prompts", str(folders / "chat.jsonl")])
    assert json.loads(capsys.readouterr().out)["kl"] != 0
    assert read_prompts(str(folders / "prompts.txt")) == PROMPTS


def test_mistakes_are_answered_in_one_line(subtests, folders, capsys):
    for arguments, message in [
        (["--prompts", "absent.txt"], "absent.txt"),
        (["--prompts", "PROMPTS", "--temperature", "0"], "--temperature must be above 0"),
        (["--prompts", "PROMPTS", "--num_prompts", "0"], "1 or more"),
        (["--prompts", "CHAT"], "has no chat template. Pass the tokenizer of an instruct model"),
    ]:
        with subtests.test(arguments=arguments):
            files = {"PROMPTS": str(folders / "prompts.txt"), "CHAT": str(folders / "chat.jsonl")}
            arguments = [files.get(part, part) for part in arguments]
            with pytest.raises(SystemExit, match="2"):
                main([str(folders / "without template"), str(folders / "b"), *arguments])
            *_, error = capsys.readouterr().err.splitlines()  # before it, the progress of loading
            assert error.startswith("trl-ext kl: error: ") and message in error
    with pytest.raises(SystemExit, match="2"):
        main([str(folders / "a"), str(folders / "c"), "--prompts", str(folders / "prompts.txt")])
    assert f"`B` {folders}/c: there is no such folder" in capsys.readouterr().err


def test_answers_are_as_long_and_as_hot_as_the_run_s(folders, tmp_path, capsys):
    shutil.copytree(folders / "a", tmp_path / "checkpoint-3")
    begin = {"step": 0, "type": "begin", "config": {"max_completion_length": 7, "temperature": 0.5}}
    (tmp_path / "metrics.rank0.jsonl").write_text(
        json.dumps(begin) + "\n" + json.dumps({"step": 1, "logs": {}}) + "\n"
    )
    words = [str(tmp_path / "checkpoint-3"), str(folders / "b"), "--prompts", str(folders / "prompts.txt")]
    main(words)
    found = json.loads(capsys.readouterr().out)
    assert (found["max_new_tokens"], found["temperature"]) == (7, 0.5) and found["mean_length"] <= 7
    main([*words, "--max_new_tokens", "3", "--temperature", "2"])
    found = json.loads(capsys.readouterr().out)
    assert (found["max_new_tokens"], found["temperature"]) == (3, 2.0)
    assert sampling_of(str(folders / "a")) == (128, 1.0)
