"""Write a shrunk network of transformers with `save_pretrained`, if its configuration can express the new sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.deploy.formats.format import call
from orchestrator.deploy.formats.format_table import FORMATS
from orchestrator.deploy.shrunk_network import check_outputs
from orchestrator.export.stored_network import StoredNetwork
from pruning.graph.tracing import quiet

FOLDER = "pretrained"
KEYS = 6
"""Maximum number of configuration keys that are tried together."""


def save_pretrained(kept: StoredNetwork, smaller: nn.Module, folder: Path) -> str:
    """Write `pretrained/` into a folder, and return the name of the class that loads it.

    Returns "" and writes nothing if the network is not from transformers, or no configuration has its sizes.

    Raises:
        ExportError: the written network does not run, or its outputs differ from those of the masked network
    """
    network: Any = getattr(smaller, "network", smaller)
    if not hasattr(network, "save_pretrained") or not hasattr(network, "config"):
        return ""
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    config = next((each for each in _configs(network.config, smaller) if _shapes(type(network), each) == shapes), None)
    if config is None:
        return ""
    with quiet():
        own, network.config = network.config, config
        network.save_pretrained(folder / FOLDER)
        network.config = own
        loaded = type(network).from_pretrained(folder / FOLDER).eval()
    texts = {"name": "save_pretrained writes it", "remedy": "take another format than safetensors"}
    check_outputs(partial(call, loaded), kept.model, kept.inputs(), FORMATS["safetensors"].tolerance, **texts)
    return type(network).__name__


def _configs(config: Any, smaller: nn.Module) -> Iterator[Any]:
    """Yield the configuration, then copies in which sizes that shrank are replaced: one key first, then more."""
    yield config
    report = getattr(smaller, "shrunk", None)
    removed = report.removed.values() if report else ()
    sizes = {one: other for old, new in removed for one, other in zip(old, new, strict=True) if one != other}
    plain = config.to_dict()
    keys = [key for key, value in plain.items() if type(value) is int and value in sizes][:KEYS]
    for count in range(1, len(keys) + 1):
        for changed in combinations(keys, count):
            yield type(config).from_dict({**plain, **{key: sizes[plain[key]] for key in changed}})


def _shapes(kind: Any, config: Any) -> dict[str, torch.Size] | None:
    try:
        with torch.device("meta"), quiet():
            return {name: tensor.shape for name, tensor in kind(config).state_dict().items()}
    except Exception:  # these sizes do not fit together
        return None
