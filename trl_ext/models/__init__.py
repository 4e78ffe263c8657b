"""Load, adapt, run and identify a run's models: policy and critic in one module, and several adapters on one base."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from ..upstream.names import add_fused_lm_head as add_fused_lm_head
    from .actor_critic import ActorCritic as ActorCritic
    from .actor_critic import AdapterClassifier as AdapterClassifier
    from .actor_critic import add_value_forward as add_value_forward
    from .adapters import CRITIC as CRITIC
    from .adapters import AdapterSwitch as AdapterSwitch
    from .adapters import add_critic as add_critic
    from .adapters import save_base_fingerprint as save_base_fingerprint
    from .centring import centre as centre
    from .centring import centring_shift as centring_shift
    from .centring import head_of as head_of
    from .generation import answer_texts as answer_texts
    from .generation import completion_logprobs as completion_logprobs
    from .generation import eos_token_ids as eos_token_ids
    from .generation import prompt_token_ids as prompt_token_ids
    from .generation import sample as sample
    from .lm_head import add_dense_lm_head as add_dense_lm_head
    from .lm_head import lm_head_in_place as lm_head_in_place
    from .loading import base_of as base_of
    from .loading import fit_vocabulary as fit_vocabulary
    from .loading import has_head as has_head
    from .loading import is_adapter as is_adapter
    from .loading import load_config as load_config
    from .loading import load_merged as load_merged
    from .loading import load_model as load_model
    from .loading import load_tokenizer as load_tokenizer
    from .loading import merge as merge
    from .weights import base_model_of as base_model_of
    from .weights import check_same_ids as check_same_ids
    from .weights import disable_dropout as disable_dropout
    from .weights import keep_unpacked as keep_unpacked
    from .weights import path_identity as path_identity
    from .weights import tokenizer_identity as tokenizer_identity
    from .weights import vocabulary_of as vocabulary_of
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
