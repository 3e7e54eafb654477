"""Write the folder of an exported network, whole or not at all; each format's outputs are checked."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.catalogue.formats import FORMATS as FORMAT_ROWS
from orchestrator.catalogue.models import MODELS
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import markdown
from orchestrator.deploy.formats.format import FORMATS, ExportError, Format
from orchestrator.deploy.formats.pretrained import NAME as HUGGINGFACE
from orchestrator.deploy.latency_measuring import calibration_inputs, metrics_of
from orchestrator.deploy.shrunk_network import check_outputs
from orchestrator.export.pretrained_directory import complete, generation_code, metadata
from orchestrator.export.stored_network import StoredNetwork
from orchestrator.planning.number_formats import scientific, whole_number


@dataclass(frozen=True)
class Written:
    """A format that was written into the folder.

    Args:
        format: the format.
        bytes: size of its files.
        difference: largest difference from the masked network's outputs, relative to the largest output.
        code: Python code that loads it.
        achieved: its metrics by split, such as `val/rmse`, if the format changes outputs; else empty.
        whole: whether the network has its full size, with zeros, because the format cannot express the smaller one.
        network: the network that was written, if it is another one than that of the other formats.
    """

    format: Format
    bytes: int
    difference: float
    code: str
    achieved: Mapping[str, float]
    whole: bool = False
    network: nn.Module | None = None

    @property
    def differs(self) -> tuple[str, ...]:
        """Why the smaller network computes other outputs than the masked one, besides rounding."""
        found: tuple[str, ...] = getattr(getattr(self.network, "resized", None), "differs", ())
        return found


def size(network: nn.Module) -> int:
    """Return the bytes of a network's parameters and buffers; what several places share counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in network.state_dict().values()}.values())


def writable(output: str) -> Path:
    """Return the folder to write; raise ExportError if it exists and is not an empty folder."""
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"`--output` (={output!r}) must be a new or empty folder; name another folder.")
    return folder


def chosen_formats(names: Sequence[str]) -> list[Format]:
    """Return the formats with these names, each once; raise ExportError if one is unknown."""
    for name in names:
        if name not in FORMATS:
            close = get_close_matches(name, FORMATS, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise ExportError(f"`--to` (={name!r}) must be one of {', '.join(FORMATS)}{hint}")
    return [FORMATS[name] for name in dict.fromkeys(names)]


def require_builder(formats: Sequence[Format], model: Mapping[str, Any]) -> None:
    """Raise ExportError if a format cannot hold networks of a sweep's `model`.

    A model of the user's own is checked when its network is written.
    """
    row = MODELS.get(str(model.get("kind")))
    for each in formats:
        if row is not None and not FORMAT_ROWS[each.name].holds(row.packages):
            raise ExportError(
                f"`--to` (={each.name}) must be another format for `model.kind` (={row.name}), because it is for "
                f"networks that {each.builder} builds, as model=huggingface; type --to safetensors, for example."
            )


def write_folder(
    kept: StoredNetwork, smaller: nn.Module, formats: Sequence[Format], folder: Path, head: str
) -> list[Written]:
    """Write a network in some formats into a new folder.

    Args:
        kept: the masked network, whose outputs are the reference.
        smaller: the shrunk network to write.
        formats: the formats to write it in.
        folder: missing, or empty.
        head: first part of README.md; the formats follow.

    Raises:
        ExportError: a format cannot be written, or its outputs differ; no folder is left then
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        written = [_written(kept, smaller, each, aside) for each in formats]
        page = _page(written, kept.record, head)
        if FORMATS[HUGGINGFACE] in formats:
            (own,) = (each.network for each in written if each.network is not None)
            complete(replace(kept, model=own), aside)
            page = f"{metadata(kept.model)}{page}{generation_code(kept.model, aside)}"
        (aside / "README.md").write_text(page, encoding="utf-8")
        aside.chmod(0o755)
        if folder.exists():
            folder.rmdir()  # the folder is empty
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return written


def _written(kept: StoredNetwork, smaller: nn.Module, chosen: Format, folder: Path) -> Written:
    inputs = kept.inputs()
    shrinks: Any = getattr(smaller, "shrunk", None)
    whole, own, tolerance, differs = False, None, chosen.tolerance, chosen.changes_outputs
    if chosen.smaller is not None:
        own = smaller if hasattr(smaller, "resized") else chosen.smaller(kept.model)
        resized = getattr(own, "resized", None)
        whole = bool(shrinks and shrinks.removed) and not (resized and resized.config)
        smaller = own
        if resized and resized.differs:
            tolerance, differs = math.inf, True
    example = (
        calibration_inputs(kept.model, kept.data, kept.spec, chosen.calibration) if chosen.calibration else inputs[0]
    )
    chosen.write(smaller, example, folder, batch_sizes=kept.batch_sizes)
    run, remedy = chosen.load(folder, torch.get_num_threads()), "take another format"
    worst = check_outputs(run, kept.model, inputs, tolerance, name=chosen.name, remedy=remedy)
    held = sum((folder / name).stat().st_size for name in chosen.files)
    code = chosen.code(smaller, inputs[0])
    imports = "".join(line for line in code.splitlines(keepends=True) if line.startswith("import "))
    made = f"{chosen.zeros(smaller, inputs[0])}\n{code.removeprefix(imports).lstrip()}"
    code = f"import {chosen.arrays}\n{imports}\n{made}"
    found = metrics_of(kept.model, run, kept.data, kept.spec) if differs else {}
    return Written(chosen, held, worst, code, found, whole, own)


def _page(written: Sequence[Written], record: StageRecord, head: str) -> str:
    rows = "".join(
        f"| {each.format.name} | {', '.join(each.format.files)} | {whole_number(each.bytes)} "
        f"| {scientific(each.difference)} |\n"
        for each in written
    )
    blocks = "".join(
        f"\n### {each.format.name}\n\n{each.format.title[0].upper()}{each.format.title[1:]}.{_notes(each)}\n\n"
        f"```python {each.format.name}\n{each.code}```\n"
        for each in written
    )
    return (
        f"{head}\n## Files\n\n| format | files | bytes | difference of outputs |\n|---|---|---:|---:|\n{rows}"
        "\nThe difference is the largest one from the masked network's outputs, relative to the largest output, on "
        "batches of\nthe test split and on one example, in float32 on the CPU of the machine that wrote the files.\n"
        f"{''.join(_achieved(written, record))}"
        "\n## Loading\n\nRun the code in this folder. It needs only the packages that it imports, and takes batches of "
        f"any size.\n{blocks}"
    )


def _notes(written: Written) -> str:
    """Return sentences on a format: its size, and what must be installed besides the packages that the code imports."""
    if written.whole:
        return (
            "\nThe network has its full size, with zeros: no configuration of its class has the sizes without the "
            "empty units."
        )
    if written.differs:
        return f"\nThe outputs are not those of the masked network: {'; '.join(written.differs)}."
    if not written.format.needs_engine:
        return ""
    return (
        "\nThe code needs this project: `pip install pruning-orchestrator`. Kernels were chosen by measurement on the "
        "machine\nthat wrote the files; for another kind of processor, export the network there."
    )


def _achieved(written: Sequence[Written], record: StageRecord) -> Iterator[str]:
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
