"""Tables of restarts: the weights that a round trains from, and the controls of its last round; a row for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pruning.catalogue.rows import Row, named


@dataclass(frozen=True)
class RestartWeights(Row):
    """Row of weights that a round trains from after pruning.

    Its code sets the weights of a network in place: set(network, masks, stage). The masks are applied after it.
    The key of a stage holds the name, and the version from the second one on.

    Args:
        at_step: whether `restart.step` names the place in the dense training that has the weights.
        control: whether the weights tell nothing of the training before, so that only the masks are compared.
    """

    FAMILY: ClassVar[str] = "restart"

    at_step: bool = False
    control: bool = False

    @property
    def keeps(self) -> bool:
        """Whether the round trains on from the pruned weights."""
        return not self.code


@dataclass(frozen=True)
class RestartControl(Row):
    """Row of a control experiment of the last round.

    Args:
        weights: the weights that it trains from, whatever else is asked; empty: those of `restart.weights`.
        in_key: whether a stage's key names it; otherwise its weights alone tell it.
        shuffles: whether masks are shuffled within each tensor.
        inverts: whether scores are inverted.
        small: whether the network that is left is trained from scratch, without what masks empty.
    """

    FAMILY: ClassVar[str] = "control"

    weights: str = ""
    in_key: bool = True
    shuffles: bool = False
    inverts: bool = False
    small: bool = False


_REWINDING = "orchestrator.training.state.resuming"
RESTARTS: Mapping[str, RestartWeights] = named(
    (
        RestartWeights("keep", "", "the pruned weights"),
        RestartWeights("step", f"{_REWINDING}:rewind", "those of a step of the dense training", at_step=True),
        RestartWeights("reinit", f"{_REWINDING}:redraw", "new draws", control=True),
    )
)
"""Name -> row, as `restart.weights`."""
CONTROLS: Mapping[str, RestartControl] = named(
    (
        RestartControl("none", "", "no control"),
        RestartControl("shuffle", "", "masks shuffled in each tensor", shuffles=True),
        RestartControl("reinit", "", "new weights under the masks", weights="reinit", in_key=False),
        RestartControl("invert", "", "inverted scores", inverts=True),
        RestartControl(
            "small", "", "the small dense network that remains, with new weights", weights="reinit", small=True
        ),
    )
)
"""Name -> row, as `restart.control`."""


def control_of(config: Mapping[str, Any]) -> RestartControl:
    """Return the row of a configuration's control; `none` for an unknown one, which its own rule refuses."""
    return CONTROLS.get(str(config.get("restart", {}).get("control")), CONTROLS["none"])


def any_of(rows: Mapping[str, Row]) -> str:
    """Return a pattern that exactly the names of the rows match."""
    return rf"\A({'|'.join(rows)})\Z"


def listed(rows: Mapping[str, Row]) -> str:
    """Return the rows as one text: `keep`: the pruned weights; ..."""
    return "; ".join(f"`{name}`: {row.meaning}" for name, row in rows.items())
