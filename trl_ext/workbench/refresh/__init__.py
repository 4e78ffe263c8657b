"""The page of a refreshed reward model. `recipes/refresh_reward.py` makes it."""
