"""Serve a reward over HTTP."""
