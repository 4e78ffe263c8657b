"""Test a reward model before it is trusted."""
