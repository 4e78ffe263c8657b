"""Compare what policies answer to the same held-out prompts."""
