"""A plain `GRPOTrainer` that records the calls of its methods, so that the contract tests do not run our own code."""

from trl import GRPOConfig, GRPOTrainer

from tests.tiny import ON_CPU, length_reward, prompts, tiny_llama, tiny_tokenizer
from trl_ext.upstream.names import METHODS


def require(condition, changed, reader="PPOTrainer"):
    assert condition, f"Upstream changed: {changed}. {reader} relies on it."


class Observed(GRPOTrainer):
    """Records in `events` the calls of the methods that we rely on: (name, arguments, keywords)."""

    def __init__(self, *args, **kwargs):
        self.events = []
        super().__init__(*args, **kwargs)


def _observed(name):
    method = getattr(GRPOTrainer, name)

    def observed(self, *args, **kwargs):
        self.events.append((name, args, kwargs))
        return method(self, *args, **kwargs)

    return observed


for _name in METHODS["trl.GRPOTrainer"]:
    if _name != "__init__" and hasattr(GRPOTrainer, _name):  # test_names.py reports one that is gone
        setattr(Observed, _name, _observed(_name))


def grpo_config(output_dir, cls=GRPOConfig, **kwargs):
    return cls(
        str(output_dir),
        **{
            **ON_CPU,
            "activation_checkpointing": False,
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 5,
            "max_steps": 1,
        }
        | kwargs,
    )


def grpo(tmp_path, reward_funcs=length_reward, eval_dataset=None, peft_config=None, **config):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "policy")
    model.config._name_or_path = str(tmp_path / "policy")  # where GRPO loads its reference from
    return Observed(
        model=model,
        reward_funcs=reward_funcs,
        args=grpo_config(tmp_path / "out", **config),
        train_dataset=prompts(),
        eval_dataset=eval_dataset,
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )


def returned_by(trainer, name):
    """Return a list of what a method of the trainer returns, call by call."""
    method, returned = getattr(trainer, name), []
    setattr(trainer, name, lambda *args: returned.append(method(*args)) or returned[-1])
    return returned


def names_of(trainer, *wanted):
    """Return the names of the calls, or of the wanted ones, in order."""
    return [name for name, _, _ in trainer.events if not wanted or name in wanted]
