import math

import pytest
import torch
from torch.testing import assert_close

from trl_ext.functional import logprobs, logprobs_and_entropies

V = 50


def by_softmax(logits, labels, temperature):
    """The definition, in float64."""
    logp = (logits.double() / temperature).log_softmax(-1)
    return logp.gather(-1, labels[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def a_batch(dtype=torch.float32, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(3, 4, V, generator=generator)).to(dtype)
    weights = torch.randn(2, 3, 4, generator=generator)
    return logits, torch.randint(V, (3, 4), generator=generator), weights


def gradient(function, logits, labels, weights, temperature):
    """Return the log-probs, the entropies, and the gradient of their sum with these weights."""
    logits = logits.clone().requires_grad_()
    made = logits * 1  # as by a layer
    result = function(made, labels, temperature)
    sum((weight * part).sum() for weight, part in zip(weights, result, strict=True) if weight.any()).backward()
    return *(part.detach() for part in result), logits.grad


def test_logprobs_and_entropies_of_worked_example():
    # softmax of log 1, log 2, log 5 is 1/8, 2/8, 5/8; at temperature 1/2 it is that of the squares: 1, 4, 25 over 30
    logits, labels = torch.tensor([[1.0, 2.0, 5.0]]).log(), torch.tensor([2])
    for temperature, p in [(1.0, [1 / 8, 2 / 8, 5 / 8]), (0.5, [1 / 30, 4 / 30, 25 / 30])]:
        result, entropies = logprobs_and_entropies(logits.clone(), labels, temperature)
        assert_close(result, torch.tensor([math.log(p[2])]))
        assert_close(entropies, torch.tensor([-sum(x * math.log(x) for x in p)]))


@pytest.mark.parametrize("rows", [1, 5, 12])
def test_equals_float64_in_values_and_gradients(subtests, monkeypatch, rows):
    """With the 12 rows in tiles of any size."""
    monkeypatch.setattr(logprobs, "_TILE", {"cpu": rows * V})
    exact = {"rtol": 1e-12, "atol": 1e-12}
    half = {"rtol": 2**-7, "atol": 1e-3}  # the gradient has one sign bit, 8 exponent and 7 mantissa bits
    for temperature in (1.0, 0.7):
        for on_logprobs, on_entropies in [(1, 0), (0, 1), (1, 0.3)]:
            with subtests.test(temperature=temperature, on_logprobs=on_logprobs, on_entropies=on_entropies):
                logits, labels, weights = a_batch(torch.float64)
                weights = weights.double() * torch.tensor([on_logprobs, on_entropies])[:, None, None]
                expected = gradient(by_softmax, logits, labels, weights, temperature)
                found = gradient(logprobs_and_entropies, logits, labels, weights, temperature)
                assert_close(found, expected, **exact)
                found = gradient(logprobs_and_entropies, logits.float(), labels, weights.float(), temperature)
                assert_close(found, tuple(x.float() for x in expected), rtol=1e-5, atol=1e-6)
                logits = logits.bfloat16()
                expected = gradient(by_softmax, logits.double(), labels, weights, temperature)
                *found, slope = gradient(logprobs_and_entropies, logits, labels, weights.float(), temperature)
                assert_close(found, [x.float() for x in expected[:2]], rtol=1e-5, atol=1e-5)  # sums in float32
                assert slope.dtype == torch.bfloat16
                assert_close(slope.double(), expected[2], **half)


def test_near_certain_and_impossible_labels_keep_their_digits():
    logits = torch.tensor([[10.0, 0.0], [0.0, 200.0]], dtype=torch.bfloat16, requires_grad=True)
    result, _ = logprobs_and_entropies(logits * 1, torch.tensor([0, 0]))
    result.sum().backward()
    # log p = -log(1 + e^-10), 1 - p = 4.5e-5, of which bfloat16's 1 would take nothing; e^-200 is 0 in float32
    assert_close(result.detach(), torch.tensor([-math.log1p(math.exp(-10)), -200.0]), rtol=1e-3, atol=0)
    rest = math.exp(-10) / (1 + math.exp(-10))
    assert_close(logits.grad, torch.tensor([[rest, -rest], [1.0, -1.0]]).bfloat16(), rtol=2**-7, atol=0)


def test_no_second_tensor_of_the_logits_size(monkeypatch):
    monkeypatch.setattr(logprobs, "_TILE", {"cpu": V})
    logits, labels, _ = a_batch()
    made = (logits.requires_grad_() * 1).view(12, V)
    place = made.data_ptr()
    given = []
    made.register_hook(lambda gradient: given.append(gradient.data_ptr()))
    result, entropies = logprobs_and_entropies(made, labels.view(12), with_entropies=False)
    assert entropies is None
    result.sum().backward()
    assert given == [place]
    with pytest.raises(RuntimeError, match="modified by an inplace operation|backward through the graph a second"):
        result.sum().backward()


def test_an_operation_that_saved_the_logits_gets_them_or_raises():
    logits, labels, weights = a_batch()
    for squash in (torch.tanh, lambda x: 30 * torch.tanh(x / 30)):
        found = gradient(
            lambda x, *args, squash=squash: logprobs_and_entropies(squash(x), *args), logits, labels, weights, 0.7
        )
        expected = gradient(lambda x, *args, squash=squash: by_softmax(squash(x), *args), logits, labels, weights, 0.7)
        assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=1e-5)
    hidden = torch.tanh(logits.clone().requires_grad_()).view(12, V)  # hidden behind the view
    result, _ = logprobs_and_entropies(hidden, labels.view(12))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
