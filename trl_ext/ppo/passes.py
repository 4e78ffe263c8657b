"""Run the policy, the critic and the reference over the rows of a rollout."""

from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from ..models.actor_critic import position_kwargs
from ..models.packing import VARLEN, Packed, keeps_rows_apart, pack, use_varlen
from ..models.weights import base_model_of, evaluating, unwrapped

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Passes:
    """
    Run a model on (B, P + T) rows, and return its outputs for the completion tokens as (B, T).

    Rows are packed into fewer, longer sequences where `padding_free` and the model allow it; else each row is padded
    to the longest row of its forward pass. In every call all processes make the same number of forward passes, as
    sharded models need.

    Args:
        args: the trainer's configuration. Only `padding_free`, `pad_to_multiple_of` and `max_completion_length` are
            used.
    """

    def __init__(self, accelerator: Any, args: Any):
        self.accelerator = accelerator
        self.args = args
        self._keeps_apart: dict[int, bool] = {}  # by the id of a model that is prepared

    def __call__(
        self,
        model: Any,
        ids: Tensor,
        token_counts: list[tuple[int, int]],
        width: int,
        size: int | None = None,
        **asked: Any,
    ) -> dict[str, Tensor]:
        """
        Run a model on rows.

        Args:
            model: the actor-critic, the reference, or a critic alone ([`add_value_forward`]), as the accelerator has
                wrapped it.
            ids: (B, P + T), prompts padded on the left, completions on the right.
            token_counts: for each row, its numbers of real prompt tokens and completion tokens.
            width: T.
            size: number of rows in one forward pass, which takes rows of similar length; None runs all rows at once.
            asked: further arguments of [`ActorCritic.forward`], such as which outputs to compute. The reference
                ignores them and computes log-probs.

        Returns:
            The model's outputs by name. `logprobs`, `entropies` and `values`, if they were computed, are (B, T), with
            0 where there is no completion token; the scalar `aux_loss` is that of the first forward pass.
        """
        module = unwrapped(model)
        config = module.config.get_text_config()
        may_pack = self.args.padding_free and "output_router_logits" not in asked
        if may_pack and id(module) not in self._keeps_apart:
            self._prepare(model)
        hidden_size = config.hidden_size if may_pack and self._keeps_apart[id(module)] else None
        order = sorted(range(len(token_counts)), key=lambda row: sum(token_counts[row]))
        outputs: list[dict[str, Tensor]] = []
        for start in range(0, len(order), size or len(order)):
            rows = order[start : start + (size or len(order))]
            packed = pack(
                ids[rows],
                [token_counts[row] for row in rows],
                width,
                hidden_size,
                self.args.pad_to_multiple_of,
                one_sequence="flash" in str(config._attn_implementation),
                with_starts=config._attn_implementation == VARLEN,
            )
            output = self._forward(model, packed, **asked)
            outputs.append({k: packed.unpack(v) if v.ndim else v for k, v in output.items()})
        back = torch.tensor(order).argsort().to(ids.device)
        return {
            name: torch.cat([output[name] for output in outputs])[back] if value.ndim else value
            for name, value in outputs[0].items()
        }

    def _forward(self, model: Any, packed: Packed, **asked: Any) -> dict[str, Tensor]:
        """Run one forward pass over packed rows; return the model's outputs by name, still packed."""
        inputs = {**packed.inputs, "predicts": packed.predicts, "targets": packed.targets}
        is_critic = hasattr(unwrapped(model), "score")  # a critic alone
        is_sharded = self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
        if is_sharded and not is_critic:
            inputs["budget_tokens"] = packed.shape[0] * self.args.max_completion_length
        with self.accelerator.autocast():
            if "output_router_logits" in asked:  # the experts' loss is over real tokens
                inputs["attention_mask"] = packed.mask
            if is_critic or hasattr(unwrapped(model), "critic"):
                return {name: value for name, value in model(**inputs, **asked).items() if value is not None}
            if not position_kwargs(unwrapped(model), packed.position_ids):
                del inputs["position_ids"]
            return {"logprobs": model(**inputs, fused_lm_head=True).log_probs}

    def _prepare(self, model: Any) -> None:
        """Test whether the model keeps packed rows apart; if so, set the attention that packed rows are fast with."""
        # Before its first pass, not when it is built: the test runs a sharded model as the accelerator has wrapped it
        module = unwrapped(model)
        keeps_apart = self._test_apart(model, module.config.get_text_config().vocab_size)
        self._keeps_apart[id(module)] = keeps_apart
        if keeps_apart:
            use_varlen(module, _HALF.get(self.accelerator.mixed_precision))
        else:
            name = type(base_model_of(module)).__name__
            self.accelerator.print(f"{name} lets packed rows affect each other, so its rows are padded instead.")

    @torch.no_grad()
    def _test_apart(self, model: Any, vocabulary: int) -> bool:
        """Return whether the model's outputs of packed rows are those of the rows alone."""
        module = unwrapped(model)
        if not position_kwargs(module, None, torch.empty(0)):
            return False
        asked = {"with_values": True} if getattr(module, "critic", None) is not None else {}

        def outputs_of(packed: Packed) -> list[Tensor]:
            return [x for x in self._forward(model, packed, **asked).values() if x.ndim]

        with evaluating(module):  # with dropout, equal outputs would differ
            return keeps_rows_apart(outputs_of, vocabulary, self.accelerator.device)
