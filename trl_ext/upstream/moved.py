"""
List the names that moved since 0.2.0.

Old names can be imported until 0.4.0. The identities in checkpoints and caches keep the old names for good.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]

# Dotted name at 0.2.0 → name now. An entry is for a module, for a package with all that is in it, or for one class or
# function that moved away from the rest of its module. Where several modules became one, the first entry gives all
# that is in it its name of 0.2.0 (for identities); each class and function of the other modules needs an entry of its
# own. If one of these modules did not move, it has an entry with its own name on both sides, before the others.
MOVED: dict[str, str] = {
    "trl_ext.arguments": "trl_ext.cli.arguments",
    "trl_ext.callbacks.files": "trl_ext.runs.files",
    "trl_ext.callbacks.series": "trl_ext.callbacks.trend",
    "trl_ext.checkpoints": "trl_ext.runs.checkpoints",
    "trl_ext.commands": "trl_ext.workbench",
    "trl_ext.commands.advise": "trl_ext.workbench.planning.command",
    "trl_ext.commands.annotators": "trl_ext.workbench.labels.command",
    "trl_ext.commands.annotators_page": "trl_ext.workbench.labels.page",
    "trl_ext.commands.charts": "trl_ext.workbench.pages.charts",
    "trl_ext.commands.compare": "trl_ext.workbench.pages.compare",
    "trl_ext.commands.contract": "trl_ext.cli.contract",
    "trl_ext.commands.doctor": "trl_ext.cli.doctor",
    "trl_ext.commands.headline": "trl_ext.workbench.pages.headline",
    "trl_ext.commands.kl": "trl_ext.cli.kl",
    "trl_ext.commands.kl.load_model": "trl_ext.models.loading.load_model",
    "trl_ext.commands.main": "trl_ext.cli.main",
    "trl_ext.commands.markup": "trl_ext.workbench.pages.markup",
    "trl_ext.commands.page": "trl_ext.workbench.pages.page",
    "trl_ext.commands.prompts": "trl_ext.workbench.prompts.command",
    "trl_ext.commands.prompts_figures": "trl_ext.workbench.prompts.figures",
    "trl_ext.commands.prompts_page": "trl_ext.workbench.prompts.page",
    "trl_ext.commands.recorded": "trl_ext.workbench.pages.recorded",
    "trl_ext.commands.refresh_page": "trl_ext.workbench.pages.refresh",
    "trl_ext.commands.refresh_page.page": "trl_ext.workbench.pages.refresh.refresh_page",
    "trl_ext.commands.report": "trl_ext.workbench.pages.report",
    "trl_ext.commands.reward_app": "trl_ext.workbench.serving.app",
    "trl_ext.commands.reward_report": "trl_ext.workbench.reward_report.command",
    "trl_ext.commands.reward_report_data": "trl_ext.workbench.reward_report.data",
    "trl_ext.commands.reward_report_figures": "trl_ext.workbench.reward_report.figures",
    "trl_ext.commands.reward_report_page": "trl_ext.workbench.reward_report.page",
    "trl_ext.commands.runbook": "trl_ext.workbench.pages.runbook",
    "trl_ext.commands.serve_reward": "trl_ext.workbench.serving.command",
    "trl_ext.commands.verdict": "trl_ext.workbench.pages.verdict",
    "trl_ext.contract": "trl_ext.upstream.contract",
    "trl_ext.control": "trl_ext.runs.control",
    "trl_ext.data.annotators": "trl_ext.workbench.labels",
    "trl_ext.data.annotators.labels": "trl_ext.workbench.labels.tables",
    "trl_ext.data.copies": "trl_ext.evaluation.copies",
    "trl_ext.data.duplicates": "trl_ext.evaluation.duplicates",
    "trl_ext.data.filtering": "trl_ext.workbench.prompts.filtering",
    "trl_ext.data.identity": "trl_ext.runs.rows",
    "trl_ext.data.labelling": "trl_ext.workbench.labels.labelling",
    "trl_ext.data.prompts": "trl_ext.workbench.prompts.examine",
    "trl_ext.data.scripts": "trl_ext.evaluation.scripts",
    "trl_ext.data.shingles": "trl_ext.evaluation.shingles",
    "trl_ext.differences": "trl_ext.runs.changes",
    "trl_ext.evaluation.centring": "trl_ext.rewards.centring",
    "trl_ext.fields": "trl_ext.cli.fields",
    "trl_ext.halts": "trl_ext.runs.halts",
    "trl_ext.help": "trl_ext.cli.help",
    "trl_ext.jsonl": "trl_ext.runs.jsonl",
    "trl_ext.marker": "trl_ext.runs.marker",
    "trl_ext.metrics": "trl_ext.callbacks.metrics",
    "trl_ext.metrics.series": "trl_ext.callbacks.metrics.curve",
    "trl_ext.model_names": "trl_ext.cli.model_names",
    "trl_ext.nearest": "trl_ext.runs.nearest",
    "trl_ext.output_dir": "trl_ext.runs.output_dir",
    "trl_ext.output_dir.write_text": "trl_ext.runs.files.write_text",
    "trl_ext.packages": "trl_ext.upstream.packages",
    "trl_ext.parser": "trl_ext.cli.parser",
    "trl_ext.planning": "trl_ext.workbench.planning",
    "trl_ext.redaction": "trl_ext.runs.redaction",
    "trl_ext.resumable": "trl_ext.stages.trainers",
    "trl_ext.rewards.naming": "trl_ext.rewards.checks",
    "trl_ext.saving": "trl_ext.runs.saving",
    "trl_ext.schedule": "trl_ext.runs.schedule",
    "trl_ext.settings": "trl_ext.runs.settings",
    "trl_ext.shipped": "trl_ext.runs.shipped",
    "trl_ext.sources": "trl_ext.runs.sources",
    "trl_ext.temporarily": "trl_ext.upstream.temporarily",
    "trl_ext.terminal": "trl_ext.upstream.terminal",
    "trl_ext.writer": "trl_ext.runs.writer",
    "trl_ext.data.PromptReport": "trl_ext.workbench.prompts.PromptReport",
    "trl_ext.data.PromptSet": "trl_ext.workbench.prompts.PromptSet",
    "trl_ext.data.REASONS": "trl_ext.workbench.prompts.REASONS",
    "trl_ext.data.balance": "trl_ext.workbench.prompts.balance",
    "trl_ext.data.divide": "trl_ext.workbench.prompts.divide",
    "trl_ext.data.examine_prompts": "trl_ext.workbench.prompts.examine_prompts",
    "trl_ext.data.left_out": "trl_ext.workbench.prompts.left_out",
    "trl_ext.data.strata": "trl_ext.workbench.prompts.strata",
    "trl_ext.data.LABEL_STUDIO_CONFIG": "trl_ext.workbench.labels.labelling.LABEL_STUDIO_CONFIG",
    "trl_ext.data.answer_key": "trl_ext.workbench.labels.labelling.answer_key",
    "trl_ext.data.answers_to_label": "trl_ext.workbench.labels.labelling.answers_to_label",
    "trl_ext.data.argilla_records": "trl_ext.workbench.labels.labelling.argilla_records",
    "trl_ext.data.as_text": "trl_ext.workbench.labels.labelling.as_text",
    "trl_ext.data.label_studio_tasks": "trl_ext.workbench.labels.labelling.label_studio_tasks",
    "trl_ext.data.read_choices": "trl_ext.workbench.labels.labelling.read_choices",
    "trl_ext.data.copied_shares": "trl_ext.evaluation.copied_shares",
    "trl_ext.data.corpus_ngrams": "trl_ext.evaluation.corpus_ngrams",
    "trl_ext.data.Duplicates": "trl_ext.evaluation.Duplicates",
    "trl_ext.data.find_duplicates": "trl_ext.evaluation.find_duplicates",
    "trl_ext.data.normalised": "trl_ext.evaluation.normalised",
    "trl_ext.data.similarity_of": "trl_ext.evaluation.similarity_of",
    "trl_ext.data.SCRIPTS": "trl_ext.evaluation.SCRIPTS",
    "trl_ext.data.main_scripts": "trl_ext.evaluation.main_scripts",
    "trl_ext.data.Unit": "trl_ext.evaluation.Unit",
    "trl_ext.data.count_words": "trl_ext.evaluation.count_words",
    "trl_ext.data.in_parts": "trl_ext.evaluation.in_parts",
    "trl_ext.data.ngram_hashes": "trl_ext.evaluation.ngram_hashes",
    "trl_ext.evaluation.centre": "trl_ext.rewards.centre",
    "trl_ext.evaluation.centring_shift": "trl_ext.rewards.centring_shift",
    "trl_ext.evaluation.head_of": "trl_ext.rewards.head_of",
    "trl_ext.evaluation.write_scores": "trl_ext.rewards.write_scores",
}
# For each setting that was added since 0.2.0, the value that changes nothing. A run with these values may resume from
# a checkpoint of 0.2.0
ADDED: dict[str, object] = {
    "baseline": "critic",
    "bootstrap_truncated": False,
    "gae_level": "token",
    "max_tool_calling_iterations": None,
    "tool_timeout": 60.0,
}
# Class or function, by its name at 0.2.0 → how often the meaning of its settings has changed. Count it up if the same
# settings now give other scores or batches: earlier runs and caches are then told apart from new ones.
MEANING: dict[str, int] = {}


def settings_as_before(settings: dict[str, Any]) -> dict[str, Any]:
    """
    Return a run's settings as a checkpoint of 0.2.0 has them, so that a run may resume from such a checkpoint.

    Settings that were added since then are left out where they change nothing.
    """
    kept = {name: value for name, value in settings.items() if name not in ADDED or value != ADDED[name]}
    reads_no_lam = settings.get("lam_alpha") is not None or settings.get("baseline") == "mean"
    if reads_no_lam and "lam" in kept and kept["lam"] is None:
        kept["lam"] = 0.95  # its default in 0.2.0, which checkpoints recorded even if it was not used
    # As `PPOConfig.clip_range`. A run with a band reads no clip range, and recorded 0.2 in 0.2.0
    if "cliprange" in kept and kept["cliprange"] is None:
        others = (settings.get("epsilon_high"), settings.get("ratio_band"))
        kept["cliprange"] = 0.4 if settings.get("kl_coef") == 0 and others == (None, None) else 0.2
    return kept


def new_name(name: str) -> str:
    """Return the present dotted name of what had the dotted name `name` in 0.2.0; an unmoved name is unchanged."""
    return _renamed(name, MOVED)


def identity_name(module: str, qualname: str) -> tuple[str, str]:
    """
    Return the module and the name that identify a class or function in checkpoints and caches.

    Anything of trl_ext keeps the module and name that it had at 0.2.0. If the meaning of its settings has changed
    since then, a number is appended to the name.
    """
    if module.partition(".")[0] != _PACKAGE:
        return module, qualname
    old_names = {new: old for old, new in reversed(MOVED.items())}  # of several old names, the first one counts
    name = _renamed(f"{module}.{qualname}", old_names)
    module, *parts = name.rsplit(".", qualname.count(".") + 1)
    return module, ".".join(parts) + (f" {MEANING[name]}" if name in MEANING else "")


def _renamed(name: str, names: dict[str, str]) -> str:
    """Replace the beginning of a dotted name by its new name: the longest beginning that is a key of `names`."""
    parts = name.split(".")
    beginnings = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    known = next((beginning for beginning in beginnings if beginning in names), None)
    return name if known is None else names[known] + name.removeprefix(known)


def moved(old: str, now: str) -> Any:
    """Return the object that has moved from the name `old` to the name `now`, and warn with its new name."""
    warnings.warn(f"{old} is now {now}; the old name will be removed in 0.4.0", FutureWarning, stacklevel=3)
    place, _, name = now.rpartition(".")
    return getattr(import_module(place), name)


class OldNames(MetaPathFinder, Loader):
    """
    Import modules by their old names, and warn with the new name.

    An import by the old name gives the module of the new name itself, so that both names give the same classes. If the
    contents of the old module moved to several places, the import gives a module that looks names up in all of them.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_old = name.partition(".")[0] == _PACKAGE and new_name(name) != name
        return spec_from_loader(name, self, is_package=True) if is_old else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, new_name(module.__name__)
        try:
            found = import_module(new)
        except ModuleNotFoundError as error:
            if error.name != new:
                raise
            raise ModuleNotFoundError(
                f"No module named {old!r}, and none under its new name {new!r}", name=old
            ) from None
        elsewhere = {
            name.removeprefix(f"{old}."): to.rpartition(".")
            for name, to in MOVED.items()
            if name.rpartition(".")[0] == old and to != f"{new}.{name.removeprefix(f'{old}.')}"
        }

        def part(name: str) -> Any:
            place, _, name_there = elsewhere.get(name, (new, ".", name))
            return getattr(import_module(place), name_there)

        if elsewhere:
            module.__getattr__ = part  # type: ignore[method-assign]
        else:
            sys.modules[old] = found  # which `import` then takes
        warnings.warn(f"{old} is now {new}; the old name will be removed in 0.4.0", FutureWarning, stacklevel=2)
