"""The pages of a run and of several, and what all pages are made of."""
