"""Stages that evaluate a network on a task of lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from orchestrator.core.errors import Cancelled, DataError
from orchestrator.core.specs import NETWORK
from orchestrator.core.stage_kinds import ANSWERS
from orchestrator.core.work_order import Result, StageOrder
from orchestrator.planning.file_places import GENERATION, TOKENIZER_SETTINGS
from orchestrator.training.stage_networks import finished, restored
from orchestrator.training.stage_record import begin, reading_record, timed
from orchestrator.workloads.harness_library import evaluation
from orchestrator.workloads.tokenizer_files import copy_tokenizer
from pruning.graph.tracing import quiet


def evaluate(order: StageOrder, _network: object) -> Result:
    """Evaluate a finished network, masked, on its device; the figures are those of the library.

    Raises:
        DataError: the task has changed since planning, the library fails, or the tokenizer has no last token
        Cancelled: between two batches, once the stage is cancelled
    """
    begun, spec = begin(order), order.spec
    network: Any = restored(spec.inputs[NETWORK], order).model
    source, tokenizer = (spec.location[part][name] for part, name in (("model", "path"), ("data", "tokenizer")))
    if (Path(source) / GENERATION).is_file():
        from transformers import GenerationConfig

        network.generation_config = GenerationConfig.from_pretrained(source)

    def keep_on(*_: object) -> None:
        if order.cancelled():
            raise Cancelled

    network.register_forward_pre_hook(keep_on)
    found = evaluation(network, _tokenizer(tokenizer, source), spec.typed.harness, spec.location["harness"])
    above = finished(spec.inputs[NETWORK], order)
    record = replace(
        reading_record(above, order, begun),
        metrics=found.metrics or above.metrics,
        after=found.figures,
        details={ANSWERS: {name: asdict(each) for name, each in found.answers.items()}},
        warnings=found.warnings,
    )
    return Result(timed(record, {"documents": found.documents}), {}, None)


def _tokenizer(file: str, source: str) -> Any:
    """Return the tokenizer that an exported directory of the network has."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder, quiet():
        copy_tokenizer(file, Path(source), Path(folder))
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if found.eos_token is None and found.bos_token is None:
        raise DataError(
            f"`harness.tasks` needs a tokenizer with an `eos_token`, which {TOKENIZER_SETTINGS} beside {file} must "
            "name; add it, and run the same command again."
        )
    return found
