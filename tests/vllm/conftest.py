"""Tests with the real vLLM on a CPU; tests/vllm/README.md describes their environment."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed here: tests/vllm/README.md says how to make an environment with it"
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=reason))
