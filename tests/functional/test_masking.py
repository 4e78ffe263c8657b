import pytest
import torch
from torch.testing import assert_close

from trl_ext import functional
from trl_ext.functional import last_token_index, masked_mean, masked_sum, position_ids

GARBAGE = [float("nan"), float("inf"), -float("inf")]


def test_masked_sum_and_mean_of_worked_example(subtests):
    for dtype in [torch.bool, torch.int64, torch.float32]:
        with subtests.test(dtype=dtype):
            values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
            mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=dtype)
            # 1 + 2 + 4 = 7 over 3 tokens
            assert_close(masked_sum(values, mask), torch.tensor(7.0))
            assert_close(masked_mean(values, mask), torch.tensor(7 / 3))


def test_garbage_under_the_mask_changes_neither_value_nor_gradient(subtests):
    for garbage in GARBAGE:
        for reduce in [masked_sum, masked_mean]:
            with subtests.test(garbage=garbage, reduce=reduce):
                torch.manual_seed(0)
                mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
                clean = torch.where(mask.bool(), torch.randn(2, 4), 0.0).requires_grad_()
                dirty = torch.where(mask.bool(), clean.detach(), garbage).requires_grad_()
                clean_result, dirty_result = reduce(clean, mask), reduce(dirty, mask)
                clean_result.backward()
                dirty_result.backward()
                assert_close(dirty_result, clean_result, rtol=0, atol=0)
                assert_close(dirty.grad, clean.grad, rtol=0, atol=0)
                assert_close(clean.grad, mask / (5.0 if reduce is masked_mean else 1.0))


def test_masked_mean_without_real_tokens_is_zero_with_zero_gradient():
    values = torch.full((2, 3), float("nan"), requires_grad=True)
    mean = masked_mean(values, torch.zeros(2, 3))
    mean.backward()
    assert_close(mean, torch.tensor(0.0))
    assert_close(values.grad, torch.zeros(2, 3))


def test_half_precision_and_bool_are_summed_in_float32():
    # bfloat16 holds no integer between 256 and 258, float16 nothing above 65504.
    ones = torch.ones(257, 257)
    assert_close(masked_sum(ones[0].bfloat16(), ones[0].bfloat16()), torch.tensor(257.0))
    assert_close(masked_mean(ones.half(), ones.half()), torch.tensor(1.0))
    assert_close(masked_mean(torch.tensor([True, False, True]), torch.tensor([1, 1, 0])), torch.tensor(0.5))


def test_position_ids_start_at_the_first_real_token_and_stay_in_range():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    expected = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1], [0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 0, 0]])
    assert_close(position_ids(mask), expected)
    assert_close(position_ids(mask.bool()), expected)
    trl_form = mask.cumsum(dim=1) - mask
    assert_close(position_ids(mask)[mask.bool()], trl_form[mask.bool()])


def test_last_token_index_with_padding_on_either_side_and_holes():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    assert_close(last_token_index(mask), torch.tensor([1, 3, 1, 2, -1]))
    assert_close(last_token_index(mask.float()), torch.tensor([1, 3, 1, 2, -1]))
    assert_close(last_token_index(torch.ones(2, 0)), torch.tensor([-1, -1]))


def test_shapes_are_never_broadcast(subtests):
    x, y = torch.zeros(2, 3), torch.zeros(2, 1)
    for call in [
        lambda: masked_sum(x, y),
        lambda: functional.policy_loss(x, x, y, 0.2, 0.2),
        lambda: functional.value_loss(x, y, x),
        lambda: functional.kl_estimate(x, y, "k1"),
        lambda: functional.gae(x, y, x, 1.0, 1.0),
        lambda: functional.token_rewards(x[:, 0], x, y, 0.1),
        lambda: functional.token_rewards(x[:, 0], x, x, 0.1, y),
        lambda: functional.mean_baselines(x, y),
        lambda: functional.importance_weights(x, y, x, "token_mask"),
        lambda: functional.turn_sums(x, y),
        lambda: functional.whiten(x, y, functional.moments(x)),
        lambda: functional.preference_logits(x[0], y[0], 0.1),
        lambda: functional.preference_loss(x[0], y[0]),
        lambda: functional.margin_scales(x[0], y[0]),
    ]:
        with subtests.test(), pytest.raises(ValueError, match="shapes must be equal"):
            call()
