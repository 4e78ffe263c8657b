from .actor_critic import ActorCritic
from .adapters import save_base_fingerprint

__all__ = ["ActorCritic", "save_base_fingerprint"]
