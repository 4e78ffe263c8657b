"""Report on prompt sets, on a reward model, and on policies' answers to held-out prompts."""

from .prompt_sets import REASONS, PromptReport, PromptSet, divide, examine_prompts, left_out, strata
