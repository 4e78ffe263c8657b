import torch
import yaml

from recipes.demo import steps
from recipes.demo.stages import HERE
from recipes.demo.steps import ARMS, FIRST, SHIPPED, main
from trl_ext import PPOConfig


def test_episodes_are_compared_with_those_of_the_first_arm(monkeypatch, tmp_path):
    """Scores rise by 0.1 a measurement, in the arms with a higher rate by 0.2, and end at 1."""
    asked = []

    def stage(demo, name, flags):
        asked.append((demo.seed, name, flags))
        return 3e-4 in flags

    def curve(is_fast):
        proxy = (torch.arange(15, dtype=torch.double) * (0.2 if is_fast else 0.1)).clamp(max=1)
        return {"proxy": proxy, "gold": proxy / 2, "kl": proxy}

    monkeypatch.setattr(steps, "ppo_stage", stage)
    monkeypatch.setattr(steps, "read_curve", curve)
    main(["--seeds", "0", "1", "--output_dir", str(tmp_path)])
    assert len({name for _, name, _ in asked}) == len(ARMS) and len(asked) == 2 * len(ARMS)
    assert all(flags[flags.index("--eval_steps") + 1] in (8, 16) for *_, flags in asked)
    lines = {line.split(" | ")[0].strip("| "): line for line in (tmp_path / "steps.md").read_text().splitlines()}
    # Half of the gain is 0.5: five times 128 episodes, or two and a half times
    assert lines[FIRST].startswith(f"| {FIRST} | +640.000 ± 0.000 | +1.000 ± 0.000 | ")
    assert lines["both"].startswith("| both | +320.000 ± 0.000 | +0.500 ± 0.000 | ")
    assert lines["both"].endswith(" | +1.000 ± 0.000 | +0.500 ± 0.000 | +1.000 ± 0.000 | +1.000 ± 0.000 | 2 |")


def test_the_shipped_arm_has_the_settings_of_the_recipe():
    recipe = yaml.safe_load((HERE / "guarded.yaml").read_text())
    assert {name: recipe.get(name, getattr(PPOConfig, name)) for name in ARMS[SHIPPED]} == ARMS[SHIPPED]
