"""Load, adapt, run and identify a run's models: policy and critic in one module, and several adapters on one base."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from ..upstream.names import add_fused_lm_head as add_fused_lm_head
    from .actor_critic import (
        ActorCritic as ActorCritic,
        AdapterClassifier as AdapterClassifier,
        add_value_forward as add_value_forward,
    )
    from .adapters import (
        CRITIC as CRITIC,
        AdapterSwitch as AdapterSwitch,
        add_critic as add_critic,
        save_base_fingerprint as save_base_fingerprint,
    )
    from .generation import (
        answer_rows as answer_rows,
        answer_texts as answer_texts,
        completion_logprobs as completion_logprobs,
        eos_token_ids as eos_token_ids,
        prompt_token_ids as prompt_token_ids,
        sample as sample,
    )
    from .lm_head import add_dense_lm_head as add_dense_lm_head, lm_head_in_place as lm_head_in_place
    from .loading import (
        base_of as base_of,
        fit_vocabulary as fit_vocabulary,
        has_head as has_head,
        is_adapter as is_adapter,
        load_config as load_config,
        load_merged as load_merged,
        load_model as load_model,
        load_tokenizer as load_tokenizer,
        merge as merge,
    )
    from .weights import (
        base_model_of as base_model_of,
        check_same_ids as check_same_ids,
        context_of as context_of,
        disable_dropout as disable_dropout,
        keep_unpacked as keep_unpacked,
        path_identity as path_identity,
        tokenizer_identity as tokenizer_identity,
        vocabulary_of as vocabulary_of,
    )
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
