"""Write the page on a refreshed reward model, for `recipes/refresh_reward.py`."""
