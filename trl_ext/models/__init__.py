"""Load, adapt, run and identify a run's models: policy and critic in one module, and several adapters on one base."""

from ..upstream.names import add_fused_lm_head
from .actor_critic import ActorCritic, AdapterClassifier, add_value_forward
from .adapters import CRITIC, AdapterSwitch, add_critic, save_base_fingerprint
from .generation import answer_rows, answer_texts, completion_logprobs, eos_token_ids, prompt_token_ids, sample
from .lm_head import add_dense_lm_head, lm_head_in_place
from .loading import base_of, fit_vocabulary, has_head, is_adapter, load_config, load_merged, load_model
from .loading import load_tokenizer, merge
from .weights import base_model_of, check_same_ids, context_of, disable_dropout, keep_4bit_layout, path_identity
from .weights import tokenizer_identity, vocabulary_of
