"""Head of a model card, which the Hugging Face hub reads: what was pruned, by which method, and under which license."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from orchestrator.compare.harness_scores import HarnessScore
from orchestrator.core.redact import shown
from orchestrator.deploy.formats.huggingface_format import stock_network
from orchestrator.planning.file_places import GGUF

HUB = "https://huggingface.co/"
CARD = "README.md"
LICENSE = "general.license"
SOURCES = ("general.base_model.0.repo_url", "general.source.repo_url", "general.repo_url")
"""Keys in the header of a .gguf file: of the license, and of addresses, the base model's first."""


@dataclass(frozen=True)
class Origin:
    """Network that a sweep pruned, as the hub names it.

    Args:
        base_model: its name on the hub; empty if not known.
        license: identifier of its license in the hub's list; empty if not known.
    """

    base_model: str = ""
    license: str = ""

    def lacks(self) -> Iterator[str]:
        """Yield what the card does not name, and what to type."""
        if not self.base_model:
            yield "names no base model; pass --base-model NAME, as it is called on the hub"
        if not self.license:
            yield "names no license; pass --license NAME, that of the base model, such as apache-2.0"


@dataclass(frozen=True)
class Card:
    """First parts of an exported network's README.

    Args:
        text: title, figures, and what was removed.
        origin: what was pruned.
        method: the method, as comparisons name it.
        name: name of the exported network.
        scores: its figures of lm-evaluation-harness.
    """

    text: str
    origin: Origin
    method: str
    name: str = ""
    scores: Sequence[HarnessScore] = ()


def origin(model: Mapping[str, Any], source: Path, given: Origin) -> Origin:
    """Return where a network comes from: what is given, else what its configuration and files say.

    A name on the hub is the base model; a README.md beside the weights and a .gguf file name theirs.

    Args:
        model: `model` of the trial's configuration.
        source: directory or .gguf file with the network's configuration.
        given: what the user typed.
    """
    named = str(model.get("path") or model.get("weights") or "")
    found = _of_gguf(source) if source.suffix == GGUF else _of_card(source / CARD)
    base = named if _folder_on_hub(named) in source.parts else found.base_model
    return Origin(given.base_model or shown(base), given.license or shown(found.license))


def metadata(network: nn.Module, card: Card) -> str:
    """Return the lines before the text of a model card, with its scores as the hub's model-index."""
    from huggingface_hub import EvalResult, ModelCardData

    kind = "text-generation" if stock_network(network).can_generate() else None
    results = [
        EvalResult(
            *(kind or "other", each.task, each.name, each.metric.name, each.score.mean),
            dataset_args=None if each.shots is None else {"num_few_shot": each.shots},
        )
        for each in card.scores
    ]
    data = ModelCardData(
        base_model=card.origin.base_model or None,
        license=card.origin.license or None,
        library_name="transformers",
        pipeline_tag=kind,
        tags=["pruning", "sparsity", shown(card.method)],
        model_name=shown(card.name) if results else None,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def _folder_on_hub(name: str) -> str:
    """Return the folder of a name on the hub among the downloaded files."""
    return f"models--{name.replace('/', '--')}"


def _of_card(path: Path) -> Origin:
    """Return what the lines before the text of a README.md name; nothing if they are missing or damaged."""
    try:
        parts = path.read_text(encoding="utf-8").split("---\n", 2)
        head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        head = {}
    found = head if isinstance(head, dict) else {}
    return Origin(*(_one(found.get(key)) for key in ("base_model", "license")))


def _one(value: object) -> str:
    """Return a name, or the only one of a list; empty for anything else."""
    only = value[0] if isinstance(value, list) and len(value) == 1 else value
    return only if isinstance(only, str) else ""


def _of_gguf(path: Path) -> Origin:
    """Return what the header of a .gguf file names."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    said = {key: str(fields[key].contents()) for key in (LICENSE, *SOURCES) if key in fields}
    base = next((url.removeprefix(HUB) for key in SOURCES if (url := said.get(key, "")).startswith(HUB)), "")
    return Origin(base, said.get(LICENSE, ""))
