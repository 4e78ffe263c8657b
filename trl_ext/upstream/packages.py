"""Check that optional packages which a run needs are installed, and say how to install them."""

from importlib.util import find_spec

OPTIONAL = {  # package -> what needs it, and what pip installs
    "deepspeed": ("ZeRO, `--accelerate_config zero2` or `zero3`", "deepspeed"),
    # Each vLLM so far asks for an older transformers than we do, which pip installs, or refuses to mix
    "vllm": ("generation by vLLM, `use_vllm: true`", "vllm==0.32.0 && pip install 'transformers>=5.23'"),
    "wandb": ("`report_to: wandb`", "wandb"),
    "tensorboard": ("`report_to: tensorboard`", "tensorboard"),
    "trackio": ("`report_to: trackio`", "trackio"),
    "matplotlib": ("curves in reports, `MonitoringPlotCallback`", "matplotlib"),
    "redis": ("`CachedReward` with `redis_url`", "'trl-ext[rewards]'"),
    "prometheus_client": ("`PrometheusCallback`, `trl-ext serve-reward`", "prometheus-client"),
    "starlette": ("`trl-ext serve-reward`", "'trl-ext[rewards]'"),
    "uvicorn": ("`trl-ext serve-reward`", "'trl-ext[rewards]'"),
}


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it; tensorboardX counts as tensorboard."""
    if package == "tensorboard" and find_spec("tensorboardX"):
        return True
    spec = find_spec(package)
    return bool(spec and spec.origin)  # a plain folder has no origin: W&B writes its runs to a folder `wandb`


def need(package: str, what: str) -> None:
    """
    Raise an `ImportError` if a package is not installed; the message has the command that installs it.

    Args:
        package: the package's name in `import`.
        what: what needs the package, as the beginning of the error's sentence.
    """
    if not is_installed(package):
        install = OPTIONAL[package][1] if package in OPTIONAL else package
        raise ImportError(f"{what} needs {package}, which is not installed: `pip install {install}`")
