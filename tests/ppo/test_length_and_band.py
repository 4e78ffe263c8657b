"""`lam_alpha` in training."""

from torch.testing import assert_close

from tests.tiny import scripted, tiny_ppo
from trl_ext.functional import gae


def test_lam_follows_the_length_for_the_advantages_and_is_1_for_the_returns(tmp_path):
    for kwargs, lam_value in [({}, 1.0), ({"lam_value": 0.5}, 0.5)]:
        config = {"baseline": "critic", "lam_alpha": 0.4, "normalize_advantages": False, "max_steps": 1} | kwargs
        trainer = scripted(tiny_ppo(tmp_path, **config))
        seen = []
        trainer.rollout_metrics = lambda *args, seen=seen: seen.append(args) or {}
        trainer.train()
        ((rollout, rewards, advantages, returns),) = seen
        for row, length in enumerate(rollout.mask.sum(1).tolist()):
            own = [each[row : row + 1] for each in (rewards, rollout.values, rollout.mask)]
            lam = max(0.0, 1 - 1 / (0.4 * length))
            assert_close(advantages[row : row + 1], gae(*own, 1.0, lam))
            assert_close(returns[row : row + 1], own[1] + gae(*own, 1.0, lam_value))
        assert len({*rollout.mask.sum(1).tolist()}) > 3  # 0.4 · length is below and above 1
