"""Write the folder of an exported network, whole or not at all; each format's outputs are checked."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.catalogue.models import MODELS
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import markdown
from orchestrator.deploy.checked_writing import CODECS, Deployed, other_outputs, write_checked
from orchestrator.deploy.formats.format import Codec, ExportError
from orchestrator.deploy.formats.huggingface_format import NAME as HUGGINGFACE
from orchestrator.export.completed_directory import complete, generation_code
from orchestrator.export.model_card import Card, metadata
from orchestrator.export.stored_network import StoredNetwork
from orchestrator.planning.number_formats import scientific, whole_number
from pruning.graph.tracing import Example


def size(network: nn.Module) -> int:
    """Return the bytes of a network's parameters and buffers; what several places share counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in network.state_dict().values()}.values())


def writable(output: str) -> Path:
    """Return the folder to write; raise ExportError if it exists and is not an empty folder."""
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"`--output` (={output!r}) must be a new or empty folder; name another folder.")
    return folder


def chosen_formats(names: Sequence[str]) -> list[Codec]:
    """Return the formats with these names, each once; raise ExportError if one is unknown."""
    for name in names:
        if name not in CODECS:
            close = get_close_matches(name, CODECS, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise ExportError(f"`--to` (={name!r}) must be one of {', '.join(CODECS)}{hint}")
    return [CODECS[name] for name in dict.fromkeys(names)]


def require_builder(formats: Sequence[Codec], model: Mapping[str, Any]) -> None:
    """Raise ExportError if a format cannot hold networks of a sweep's `model`.

    A model of the user's own is checked when its network is written.
    """
    row = MODELS.get(str(model.get("kind")))
    for each in formats:
        if row is not None and not each.row.holds(row.packages):
            raise ExportError(
                f"`--to` (={each.name}) must be another format for `model.kind` (={row.name}), because it is for "
                f"networks that {each.row.builder} builds, as model=huggingface; type --to safetensors, for example."
            )


def write_folder(
    kept: StoredNetwork, smaller: nn.Module, formats: Sequence[Codec], folder: Path, card: Card
) -> list[Deployed]:
    """Write a network in some formats into a new folder.

    Args:
        kept: the masked network, whose outputs are the reference.
        smaller: the shrunk network to write.
        formats: the formats to write it in.
        folder: missing, or empty.
        card: first parts of README.md; the formats follow.

    Raises:
        ExportError: a format cannot be written, or its outputs differ; no folder is left then
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        threads, remedy = torch.get_num_threads(), "take another format"
        written = [write_checked(kept, smaller, each, aside, threads=threads, remedy=remedy) for each in formats]
        page = _page(written, kept, card.text)
        for each in (each for each in written if each.format.name == HUGGINGFACE):
            complete(replace(kept, model=each.network), aside)
            page = f"{metadata(kept.model, card)}{page}{generation_code(kept.model, aside)}"
        (aside / "README.md").write_text(page, encoding="utf-8")
        aside.chmod(0o755)
        if folder.exists():
            folder.rmdir()  # the folder is empty
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return written


def _code(written: Deployed, example: Example) -> str:
    """Return Python code that loads a written network, and runs it on a batch of zeros."""
    code, chosen = written.format.code(written.network, example), written.format
    imports = "".join(line for line in code.splitlines(keepends=True) if line.startswith("import "))
    made = f"{chosen.zeros(written.network, example)}\n{code.removeprefix(imports).lstrip()}"
    return f"import {chosen.arrays}\n{imports}\n{made}"


def _page(written: Sequence[Deployed], kept: StoredNetwork, head: str) -> str:
    rows = "".join(
        f"| {each.format.name} | {', '.join(each.format.files)} | {whole_number(each.bytes)} "
        f"| {scientific(each.difference)} |\n"
        for each in written
    )
    blocks = "".join(
        f"\n### {each.format.name}\n\n{_title(each.format)}.{_notes(each)}\n\n"
        f"```python {each.format.name}\n{_code(each, kept.inputs[0])}```\n"
        for each in written
    )
    return (
        f"{head}\n## Files\n\n| format | files | bytes | difference of outputs |\n|---|---|---:|---:|\n{rows}"
        "\nThe difference is the largest one from the masked network's outputs, relative to the largest output, on "
        "batches of\nthe test split and on one example, in float32 on the CPU of the machine that wrote the files.\n"
        f"{''.join(_achieved(written, kept.record))}"
        "\n## Loading\n\nRun the code in this folder. It needs only the packages that it imports, and takes batches of "
        f"any size.\n{blocks}"
    )


def _title(chosen: Codec) -> str:
    return f"{chosen.row.meaning[0].upper()}{chosen.row.meaning[1:]}"


def _notes(written: Deployed) -> str:
    """Return sentences on a format: its size, and what must be installed besides the packages that the code imports."""
    if written.whole:
        return (
            "\nThe network has its full size, with zeros: no configuration of its class has the sizes without the "
            "empty units."
        )
    if differs := other_outputs(written.network):
        return f"\nThe outputs are not those of the masked network: {'; '.join(differs)}."
    if not written.format.needs_engine:
        return ""
    return (
        "\nThe code needs this project: `pip install pruning-orchestrator`. Kernels were chosen by measurement on the "
        "machine\nthat wrote the files; for another kind of processor, export the network there."
    )


def _achieved(written: Sequence[Deployed], record: StageRecord) -> Iterator[str]:
    """Yield a line with the metrics in each format that changes the network's outputs."""
    for each in written:
        figures = [
            f"{metric.title} {markdown(metric.said(each.achieved[figure]))} on {title}"
            for metric in record.metrics
            for split, title in (("val", "validation"), ("test", "test"))
            if (figure := f"{split}/{metric.name}") in each.achieved
        ]
        if figures:
            yield f"\nThe outputs in the format {each.format.name} differ, and reach: {', '.join(figures)}.\n"
