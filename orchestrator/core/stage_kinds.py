"""Table of the kinds of stages, a row for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Place: TypeAlias = int | str
"""Step of a training, or epochs as in 2.5ep if the number of steps is unknown."""


@dataclass(frozen=True)
class StageKind:
    """Properties that all stages of a kind share."""

    run: str
    """`module:function` of a `Run`; a name, so that planning does not import torch."""
    title: str
    """Name of such a stage for people; `{round}` stands for its round, `{until}` for the place at which it ends,
    `{format}` for its deployment format, `{task}` for its task of lm-evaluation-harness."""
    noun: str
    """Noun by which such stages are counted, in the singular."""
    prunes: bool
    """Whether the stage makes masks."""
    own_task: bool = False
    """Whether the stage runs in its own task, apart from the stage whose network it starts from."""
    reads_test: bool = True
    """Whether the stage reads the test split."""
    keeps: Literal["always", "at_branches", "while_needed"] = "always"
    """How long a store keeps the weights: `while_needed` until every stage that needs them is finished, `at_branches`
    also if no stage or several stages need them, for later sweeps, or `always`."""
    trains: bool = True
    """Whether the stage trains a network; otherwise it reads a finished network and changes nothing."""
    validates: bool = True
    """Whether the training is measured on the validation split, and keeps the weights that are selected there."""
    part: bool = False
    """Whether the stage is the beginning of a round, which counts the cost of the stage in its own."""
    counts_steps: bool = True
    """Whether the cost of a sweep counts the steps; False if another stage always counts them."""
    alone: bool = False
    """Whether the stage runs alone: such stages run one after another at the end of a sweep."""
    figures: tuple[str, ...] = ()
    """Measurements that its record must have, all above 0."""
    figures_by_size: tuple[str, ...] = ()
    """Measurements that its record must have for each batch size, as in `speedup/64`, all above 0."""
    details: tuple[str, ...] = ()
    """Entries of `orchestrator.core.records.Details` that its record may have."""
    version: int = 0
    """Version of its own code, raised when equal inputs give other bits than before; the specs of such stages name it.
    0: a version of shared code covers it."""

    @property
    def code(self) -> str:
        """Code that `version` covers; empty if shared code's version does."""
        return self.run if self.version else ""

    @property
    def times(self) -> bool:
        """Whether the stage measures the latency of a deployed network."""
        return bool(self.figures_by_size)

    @property
    def answers(self) -> bool:
        """Whether the stage keeps a score for each document of a task."""
        return ANSWERS in self.details


def place_in_words(place: Place | None) -> str:
    """Return a place in a training for people: step 500, or epoch 3."""
    return f"epoch {place.removesuffix('ep')}" if isinstance(place, str) else f"step {place}"


ANSWERS = "answers"
"""Detail of a stage that evaluates a network by lm-evaluation-harness."""
START = "start"
"""Kind of a dense training that ends at a place, for rounds that rewind to it."""
PART = "part"
"""Kind of a round that ends at a place of its training, for a search; the round continues from there."""
TRAINED = ("measured", "training_macs", "generations", "active_parameters")
"""Details of a stage that trains a network."""
PRUNED = (*TRAINED, "rounding", "dead_tensors", "scoring", "mask_updates", "matrix_weights")
"""Details of a round."""
KINDS: Mapping[str, StageKind] = {
    "dense": StageKind(
        "orchestrator.training.training_stages:train_dense",
        "dense training",
        "dense training",
        prunes=False,
        details=(*TRAINED, "shared_examples"),
    ),
    START: StageKind(
        "orchestrator.training.training_stages:train_dense",
        "start of the training",
        "start",
        prunes=False,
        reads_test=False,
        keeps="while_needed",
        validates=False,
        counts_steps=False,
        details=(*TRAINED, "shared_examples"),
    ),
    "round": StageKind(
        "orchestrator.training.training_stages:prune_and_finetune",
        "round {round}",
        "round",
        prunes=True,
        keeps="at_branches",
        details=PRUNED,
    ),
    PART: StageKind(
        "orchestrator.training.training_stages:prune_and_finetune",
        "round {round} up to {until}",
        "part",
        prunes=True,
        reads_test=False,
        keeps="while_needed",
        part=True,
        details=PRUNED,
    ),
    "deploy": StageKind(
        "orchestrator.deploy.deployment_stages:deploy",
        "deployment as {format}",
        "deployment",
        prunes=False,
        own_task=True,
        trains=False,
        figures=("bytes", "parameters"),
        details=("form", "kept"),
    ),
    "measure": StageKind(
        "orchestrator.deploy.deployment_stages:measure",
        "latency as {format}",
        "measurement",
        prunes=False,
        own_task=True,
        reads_test=False,
        trains=False,
        alone=True,
        figures=("bytes", "dense_bytes"),
        details=("dense",),
        figures_by_size=("latency_ms", "dense_ms", "speedup", "speedup_low", "speedup_high"),
    ),
    "harness": StageKind(
        "orchestrator.training.harness_stages:evaluate",
        "lm_eval {task}",
        "evaluation",
        prunes=False,
        own_task=True,
        trains=False,
        figures=("documents",),
        details=(ANSWERS,),
        version=1,
    ),
}
