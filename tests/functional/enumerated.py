"""
Exact bias and variance of the policy's gradient with importance weights for another sampler.

The policy is a table of logits, with a row for each prefix. It has 5 tokens; one is EOS. So all completions of up to
`longest` tokens can be enumerated, and expectations under any sampler are sums. The estimator is PPO's first minibatch
of one completion with γ = λ = 1 and a critic that knows the mean reward b: ĝ = Σ_t w_t (R − b) ∇ log π(y_t). Without
bias its mean is the gradient of the policy's expected reward.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from trl_ext.functional import importance_weights

TOKENS, EOS = 5, 0
MODES: dict[str, tuple | None] = {  # label: arguments of `importance_weights`
    "none": None,
    "token, no bound": ("token_truncate", None, None),
    "token_truncate, ≤ 2": ("token_truncate", None, 2.0),
    "token_mask, 0.5 to 2": ("token_mask", 0.5, 2.0),
    "sequence, no bound": ("sequence_truncate", None, None),
    "sequence_truncate, ≤ 2": ("sequence_truncate", None, 2.0),
    "sequence_mask, 0.5 to 2": ("sequence_mask", 0.5, 2.0),
}


@dataclass
class Estimate:
    """Exact properties of the gradient estimator under one sampler."""

    mean: Tensor  # (P,), of one completion's gradient
    truth: Tensor  # (P,), the gradient of the expected reward
    variance: float  # trace of the covariance of one completion's gradient

    @property
    def bias(self) -> float:
        """Length of what the mean is off by, in lengths of the true gradient."""
        return ((self.mean - self.truth).norm() / self.truth.norm()).item()


class TabularPolicy:
    """
    All completions of up to `longest` tokens, N of them, under a policy of random logits, with random rewards.

    Args:
        longest: T, tokens.
        spread: standard deviation of the policy's logits, nats.
        seed: of logits and rewards.
    """

    def __init__(self, longest: int, spread: float = 1.5, seed: int = 0):
        prefixes = [b for n in range(longest) for b in product(range(1, TOKENS), repeat=n)]
        number = {prefix: i for i, prefix in enumerate(prefixes)}
        completions = [(*b, EOS) for b in prefixes] + list(product(range(1, TOKENS), repeat=longest))
        padded = [(*completion, *[EOS] * (longest - len(completion))) for completion in completions]
        self.ids = torch.tensor(padded)  # (N, T)
        self.mask = torch.tensor([[t < len(completion) for t in range(longest)] for completion in completions])
        self.states = torch.tensor([[number.get(a[:t], 0) for t in range(longest)] for a in padded])
        generator = torch.Generator().manual_seed(seed)
        shape = (len(prefixes), TOKENS)
        self.logits = spread * torch.randn(shape, generator=generator, dtype=torch.double)
        self.noise = torch.randn(shape, generator=generator, dtype=torch.double)
        self.rewards = torch.randn(len(completions), generator=generator, dtype=torch.double)

    def sampler(self, name: str) -> Tensor:
        """Logits of a sampler: the policy's, changed as its name says."""
        kind, _, size = name.rpartition(" ")
        match kind:
            case "noise":
                return self.logits + float(size) * self.noise
            case "temperature":
                return self.logits / float(size)
            case "top-p":
                probabilities, order = self.logits.softmax(-1).sort(descending=True)
                is_left_out = (probabilities.cumsum(-1) - probabilities) >= float(size)
                return self.logits.masked_fill(is_left_out.gather(-1, order.argsort(-1)), -torch.inf)
            case _:
                return self.logits

    def logprobs(self, logits: Tensor) -> Tensor:
        """(N, T) log-probs, nats, of each completion's tokens; 0 under the mask."""
        logprobs = logits.log_softmax(-1)[self.states].gather(-1, self.ids[..., None]).squeeze(-1)
        return torch.where(self.mask, logprobs, 0.0)

    def true_gradient(self) -> Tensor:
        """(P,): of the policy's expected reward, by autograd."""
        logits = self.logits.clone().requires_grad_()
        (self.logprobs(logits).sum(1).exp() @ self.rewards).backward()
        assert logits.grad is not None
        return logits.grad.flatten()

    def gradients(self, weights: Tensor) -> Tensor:
        """(N, P): the estimator for each completion, with weights that broadcast to (N, T)."""
        probabilities = self.logprobs(self.logits).sum(1).exp()
        advantages = self.rewards - probabilities @ self.rewards
        scores = torch.nn.functional.one_hot(self.ids, TOKENS) - self.logits.softmax(-1)[self.states]  # ∇ log π(y_t)
        scores = scores * (self.mask * weights * advantages[:, None])[..., None]
        gradients = torch.zeros(len(self.ids), *self.logits.shape, dtype=torch.double)
        gradients.scatter_add_(1, self.states[..., None].expand_as(scores), scores)
        return gradients.flatten(1)

    def weights(self, sampler: str, mode: tuple | None) -> Tensor:
        """(N, T) or (N, 1); 1 for completions that cannot be sampled."""
        if mode is None:
            return torch.ones(len(self.ids), 1, dtype=torch.double)
        sampled = self.logprobs(self.sampler(sampler))
        can_be_sampled = sampled.isfinite().all(1, keepdim=True)
        return importance_weights(self.logprobs(self.logits), sampled, self.mask & can_be_sampled, *mode)[0]

    def estimate(self, sampler: str, mode: tuple | None) -> Estimate:
        probabilities = self.logprobs(self.sampler(sampler)).sum(1).exp()  # (N,)
        weights = self.weights(sampler, mode)
        gradients = self.gradients(weights)
        mean = probabilities @ gradients
        variance = probabilities @ (gradients - mean).square().sum(1)
        return Estimate(mean, self.true_gradient(), variance.item())
