"""The catalogue of dynamics: whether pruned entries return in a pruning, or how masks change within a training.

A row without code belongs to a pruning. The code of the others is in `pruning/dynamics`; each is a function
(**options) -> `pruning.dynamics.Dynamics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import REQUIRED, Option, Row, Rule, above, at_least, is_number, named, one_of, whole, within


@dataclass(frozen=True)
class DynamicsRow(Row):
    """A dynamics.

    Args:
        keeps_counts: the number of kept entries of each tensor never changes.
        nested: pruned entries stay pruned.
        ranking: what decides which entries are kept if the dynamics decides itself; empty: the choice of the score.
        units: the units that the dynamics can change.
        scopes: the scopes in which it works.
        has_target: a sparsity can be requested, by the schedule or by a window.
        is_control: masks stay, so that a line shows what changing them adds.
    """

    FAMILY: ClassVar[str] = "dynamics"

    keeps_counts: bool = False
    nested: bool = False
    ranking: str = ""
    units: tuple[str, ...] = ("entry",)
    scopes: tuple[str, ...] = ("layer", "global", "row")
    has_target: bool = True
    is_control: bool = False

    @property
    def ranks(self) -> bool:
        """Whether the choice of the score decides the first masks, or each update."""
        return not self.ranking

    @property
    def in_training(self) -> bool:
        """Whether the dynamics changes masks within a training."""
        return bool(self.code)


_EVERY = Option("every", int, 100, "Steps between two updates.", (whole(1),))
_PLACE = Rule(
    lambda value: is_number(value) and value >= 0 and (value <= 1 or value == int(value)),
    "be a fraction of the training up to 1, or else a whole number: a step",
)
_FIRST = Option(
    "begin", float, 0.0, "Place of the first update: a fraction of the training up to 1, else a step.", (_PLACE,)
)


def _until(default: float, meaning: str) -> Option:
    text = f"{meaning}: a fraction of the training up to 1, else a step."
    return Option("until", float, default, text, (_PLACE,))


_LAST = _until(0.75, "Place of the last update")
_STAYS = _until(0.75, "Place from which masks stay")
_FRACTION = (within(": the fraction of kept entries that is dropped"),)
_DENSITY = Rule(lambda value: is_number(value) and 0 <= value < 1, "lie in [0, 1): the fraction that is pruned")
_N = Option("n", int, 2, "Number of entries that a window keeps.", (whole(0),))
_M = Option("m", int, 4, "Number of entries of a window; must divide the input dimension.", (whole(1),))
_ANY_UNIT = ("entry", "block", "channel", "group", "layer", "heads", "mlp", "residual")
_SIZE = Option("size", int, 1, "Inputs of a block, which go and return together; 1: single entries.", (whole(1),))
_OUTPUTS = Option("outputs", int, 1, "Outputs of a block.", (whole(1),))
_OF_BLOCKS = {"size": "unit.size", "outputs": "unit.outputs"}
_OF_SCHEDULE = {"sparsity": "schedule.sparsity"}
_OF_WINDOW = {"n": "scope.n", "m": "scope.m"}

DYNAMICS: Mapping[str, DynamicsRow] = named(
    (
        DynamicsRow("nested", "", "only survivors are ranked", nested=True),
        DynamicsRow(
            "free",
            "",
            "all entries compete at every re-scoring within a round, pruned ones with the weights that they had",
        ),
        DynamicsRow(
            "static",
            "pruning.dynamics.gradual_pruning:Static",
            "masks stay: the baseline",
            paper="Evci et al. 2020, arXiv 1911.11134",
            is_control=True,
            keeps_counts=True,
            nested=True,
            units=_ANY_UNIT,
            scopes=("layer", "global", "row", "window"),
        ),
        DynamicsRow(
            "gradual",
            "pruning.dynamics.gradual_pruning:Gradual",
            "more and more is pruned, along a cubic",
            (
                Option(
                    "sparsity", float | None, None, "Fraction of all units pruned in the end.", (_DENSITY.or_null(),)
                ),
                _EVERY,
                _FIRST,
                _LAST,
            ),
            "Zhu & Gupta 2017, arXiv 1710.01878",
            unlisted=("method", "batches", "loss", "size", "example"),
            nested=True,
            units=_ANY_UNIT,
            scopes=("layer", "global", "row", "window"),
            elsewhere=_OF_SCHEDULE,
        ),
        DynamicsRow(
            "set",
            "pruning.dynamics.regrowth:Set",
            "the weights nearest to 0 move to random places",
            (
                Option(
                    "every",
                    int | None,
                    None,
                    "Steps between two updates; null: an epoch, in a sweep.",
                    (whole(1).or_null(),),
                ),
                Option("fraction", float, 0.3, "Fraction of the weights that is dropped.", _FRACTION),
                Option("scale", float, 0.1, "Standard deviation of regrown weights.", (at_least(0),)),
                _until(1.0, "Place from which masks stay"),
            ),
            "Mocanu et al. 2018, arXiv 1707.04780",
            keeps_counts=True,
            scopes=("layer", "global"),
        ),
        DynamicsRow(
            "rigl",
            "pruning.dynamics.regrowth:RigL",
            "the smallest weights move to the places of the largest gradients",
            (
                _EVERY,
                _STAYS,
                Option("fraction", float, 0.3, "Fraction of the kept entries that the first update drops.", _FRACTION),
                _FIRST,
                _SIZE,
                _OUTPUTS,
            ),
            "Evci et al. 2020, arXiv 1911.11134",
            keeps_counts=True,
            units=("entry", "block"),
            scopes=("layer", "global"),
            elsewhere=_OF_BLOCKS,
        ),
        DynamicsRow(
            "sr_ste",
            "pruning.dynamics.trained_scores:StraightThrough",
            "the largest weights of each window, chosen in each step; the others train on, and decay",
            (_N, _M, Option("decay", float, 2e-4, "Pulls weights that are not kept to 0.", (at_least(0),))),
            "Zhou et al. 2021, arXiv 2102.04010",
            ranking="magnitude",
            scopes=("window",),
            elsewhere=_OF_WINDOW,
        ),
        DynamicsRow(
            "ste",
            "pruning.dynamics.trained_scores:ste",
            "the largest weights of each window, chosen in each step; the others train on",
            (_N, _M),
            "Bengio et al. 2013, arXiv 1308.3432",
            ranking="magnitude",
            scopes=("window",),
            elsewhere=_OF_WINDOW,
        ),
        DynamicsRow(
            "movement",
            "pruning.dynamics.trained_scores:Movement",
            "entries whose weights move to 0 are pruned, along a cubic",
            (
                Option("sparsity", float, REQUIRED, "Fraction of all entries pruned in the end.", (_DENSITY,)),
                _EVERY,
                _FIRST,
                _LAST,
                Option(
                    "scope",
                    str,
                    "layer",
                    "Ranks each tensor separately, or all together.",
                    (one_of("layer", "global"),),
                ),
                _SIZE,
                _OUTPUTS,
            ),
            "Sanh, Wolf & Rush 2020, arXiv 2005.07683",
            ranking="movement",
            units=("entry", "block"),
            scopes=("layer", "global"),
            elsewhere={**_OF_SCHEDULE, **_OF_BLOCKS, "scope": "scope.kind"},
        ),
        DynamicsRow(
            "soft_movement",
            "pruning.dynamics.trained_scores:SoftMovement",
            "entries whose scores fall below a threshold are pruned, in each step",
            (
                Option("threshold", float, 0.1, "Sigmoid of the score above which an entry is kept.", (within(""),)),
                Option("penalty", float, 1.0, "Factor of the sum of sigmoid(score) in the loss.", (at_least(0),)),
                Option("rate", float, 1e-2, "Learning rate of the scores.", (above(0),)),
                _STAYS,
            ),
            "Sanh, Wolf & Rush 2020, arXiv 2005.07683",
            ranking="movement",
            scopes=("layer",),
            has_target=False,
        ),
    )
)
"""Name -> dynamics."""


def own_row(name: str, *, keeps_counts: bool = False, nested: bool = False) -> DynamicsRow:
    """Return the row of a class of the user's own, derived from `pruning.dynamics.Dynamics`."""
    return DynamicsRow(
        name,
        "pruning.dynamics.changing_masks:Dynamics",
        "your own",
        keeps_counts=keeps_counts,
        nested=nested,
        units=_ANY_UNIT,
        scopes=("layer", "global", "row", "window"),
    )
