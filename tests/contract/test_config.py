"""GRPOConfig's check whose error PPOConfig catches, and what `to_dict` hides of a setting."""

import ast
import inspect
import textwrap

from trl import GRPOConfig

from tests.contract.observed import require
from trl_ext.ppo.config import REFUSED, PPOConfig


def test_later_checks_of_grpo_config_are_covered():
    """We catch the error about `num_generations`, so later checks are skipped: PPOConfig must make them itself."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(GRPOConfig.__post_init__))).body
    texts = [ast.unparse(statement) for statement in function.body]
    place = next(i for i, text in enumerate(texts) if "at least 2 generations" in text)
    for node in (node for statement in function.body[place + 1 :] for node in ast.walk(statement)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            require(node.attr in REFUSED, f"GRPOConfig continues with `{node.attr}`", "`PPOConfig`")


def test_to_dict_hides_no_setting(tmp_path):
    config = PPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    hidden = {name for name, value in config.to_dict().items() if str(value).startswith("<")}
    require(not hidden, f"`to_dict` of TrainingArguments hides {hidden}", "`PPOConfig`, when it is copied,")
