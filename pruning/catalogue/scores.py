"""The catalogue of importance scores, by which methods rank. The code is in `pruning/scores`.

To add a score, write a function in a module there and a row here. The function's docstring has its equation, arguments
and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from pruning.catalogue.rows import BaselineRole, Option, Row, Rule, above, named, one_of, whole

Need: TypeAlias = Literal["weights", "gradient", "per_example", "hvp", "inputs", "trained"]


@dataclass(frozen=True)
class ScoreRow(Row):
    """A score.

    Args:
        needs: "weights" reads no data; "gradient", "per_example" (gradients of each example) and "hvp" (products with
            the Hessian) read batches and a loss; "inputs" reads batches; "trained" is meant for a trained network.
        signed: scores may be negative, and rank with their sign.
        units: one score for each channel instead of each entry.
        of_batch_norm: scores are named by the scales of BatchNorm layers, each for the layer before it.
        across_layers: scores compare between tensors.
        of_units: the only units that the score ranks: whole layers of a transformer, or experts; empty: all that its
            scores of entries or channels add up to.
        for_units: unit -> name of the score that ranks it in its place.
        draws: the score is random and draws from `generator`.
        session: "module:class" with a method `scores(masks)`, built once for several re-scorings under shrinking masks.
        keeps_head: the paper leaves the head of a language model dense.
        baseline: what comparisons use the score as.
    """

    FAMILY: ClassVar[str] = "score"

    needs: frozenset[Need] = frozenset({"weights"})
    signed: bool = False
    units: bool = False
    of_batch_norm: bool = False
    across_layers: bool = True
    of_units: tuple[str, ...] = ()
    for_units: Mapping[str, str] = field(default_factory=dict)
    draws: bool = False
    session: str = ""
    keeps_head: bool = False
    baseline: BaselineRole = ""

    @property
    def reads_data(self) -> bool:
        """Whether the score needs batches."""
        return bool(self.needs & {"gradient", "per_example", "hvp", "inputs"})

    @property
    def calibrated(self) -> bool:
        """Whether the score reads the inputs of layers over calibration data, without labels."""
        return "inputs" in self.needs

    @property
    def reads_batch_norm(self) -> bool:
        """Whether the score has the option `batch_norm`."""
        return any(option is BATCH_NORM for option in self.options)


_NULL_MODE = ", or null: train for a network at initialisation, eval for a trained one"
BATCH_NORM = Option(
    "batch_norm",
    str | None,
    "train",
    "`train` normalises by the statistics of each batch, `eval` by the running statistics.",
    (one_of("train", "eval").or_null(_NULL_MODE),),
)
_COUNT = whole(1).or_null(", or null")
_FLAG = Rule(lambda value: isinstance(value, bool), "be true or false")
_BY_EXAMPLE = {"examples": 1000, "batch_size": 100}


def _of_tokens(name: str, meaning: str, paper: str = "") -> ScoreRow:
    """Return the row of a score of experts by the tokens that are routed to them."""
    needs: frozenset[Need] = frozenset({"inputs", "trained"})
    code, in_sweeps = f"pruning.scores.experts:{name}", {"examples": 128}
    return ScoreRow(name, code, meaning, (), paper, needs=needs, of_units=("expert",), in_sweeps=in_sweeps)


SCORES: Mapping[str, ScoreRow] = named(
    (
        ScoreRow(
            "magnitude",
            "pruning.scores.weight_scores:magnitude",
            "|w|",
            paper="Han et al. 2015, arXiv 1506.02626",
            baseline="magnitude",
        ),
        ScoreRow(
            "random",
            "pruning.scores.weight_scores:random",
            "a random number, drawn again in each round",
            draws=True,
            baseline="random",
        ),
        ScoreRow(
            "gradient",
            "pruning.scores.gradients:gradient",
            "|g|, g the gradient of the mean loss",
            (BATCH_NORM,),
            needs=frozenset({"gradient"}),
            in_sweeps={"examples": 128, "batch_norm": None},
        ),
        ScoreRow(
            "snip",
            "pruning.scores.gradients:snip",
            "|w g|, g the gradient of the mean loss",
            (BATCH_NORM,),
            "Lee et al. 2019, arXiv 1810.02340",
            needs=frozenset({"gradient"}),
            in_sweeps={"examples": 128, "batch_norm": None},
        ),
        ScoreRow(
            "grasp",
            "pruning.scores.gradients:grasp",
            "w (H g), an entry's contribution to the gradient flow; signed",
            (BATCH_NORM, Option("temperature", float, 200.0, "Divides the network's outputs.", (above(0),))),
            "Wang et al. 2020, arXiv 2002.07376",
            needs=frozenset({"gradient", "hvp"}),
            signed=True,
            in_sweeps={"per_class": 10, "batch_norm": None},
        ),
        ScoreRow(
            "synflow",
            "pruning.scores.weight_scores:synflow",
            "the flow of an input of ones through |w|; no data",
            (Option("bias", bool, False, "Add biases as |b|; the paper sets them to 0.", (_FLAG,)),),
            "Tanaka et al. 2020, arXiv 2006.05467",
            session="pruning.scores.weight_scores:Flow",
            in_sweeps={"examples": 1},
        ),
        ScoreRow(
            "taylor",
            "pruning.scores.gradients:taylor",
            "(w g)^2 of each mini-batch's gradient g, averaged over mini-batches",
            (
                BATCH_NORM,
                Option(
                    "form",
                    str,
                    "entry",
                    "Score each `entry`, or each filter: by its weights (`filter`), a `gate` after it, or its `bn`.",
                    (one_of("entry", "filter", "gate", "bn"),),
                ),
                Option(
                    "per_example",
                    bool,
                    False,
                    "With `gate`: square each example's gradient instead of each batch's.",
                    (_FLAG,),
                ),
            ),
            "Molchanov et al. 2019, arXiv 1906.10771",
            needs=frozenset({"gradient"}),
            in_sweeps={"examples": 1920, "batch_size": 64},
            version=2,
        ),
        ScoreRow(
            "fisher",
            "pruning.scores.curvature:fisher",
            "w^2 F_ii / 2, F_ii the mean of the squared gradients of all examples",
            paper="Theis et al. 2018, arXiv 1801.05787",
            needs=frozenset({"per_example", "trained"}),
            in_sweeps=_BY_EXAMPLE,
            version=3,
        ),
        ScoreRow(
            "obd",
            "pruning.scores.curvature:obd",
            "w^2 H_ii / 2, H_ii the Gauss-Newton diagonal of the Hessian; signed",
            paper="LeCun et al. 1990",
            needs=frozenset({"per_example", "trained"}),
            signed=True,
            in_sweeps=_BY_EXAMPLE,
            version=3,
        ),
        ScoreRow(
            "obs",
            "pruning.scores.curvature:obs",
            "w^2 / (2 [F^-1]_ii), the cost of removing an entry when the others adapt",
            (
                Option("damping", float, 1e-5, "Added to the diagonal of the Fisher matrix.", (above(0),)),
                Option(
                    "block",
                    int | None,
                    None,
                    "Invert blocks of this many consecutive entries; null: the whole matrix.",
                    (_COUNT,),
                ),
            ),
            "Hassibi & Stork 1993; Singh & Alistarh 2020, arXiv 2004.14340",
            needs=frozenset({"per_example", "trained"}),
            unlisted=("form", "matrix"),
            in_sweeps=_BY_EXAMPLE,
            version=3,
        ),
        ScoreRow(
            "lamp",
            "pruning.scores.weight_scores:lamp",
            "w^2 over the sum of all w^2 of the tensor that are not smaller",
            paper="Lee et al. 2021, arXiv 2010.07611",
        ),
        ScoreRow(
            "bn_scale",
            "pruning.scores.weight_scores:bn_scale",
            "|gamma| of the BatchNorm after a channel",
            paper="Liu et al. 2017, arXiv 1708.06519",
            needs=frozenset({"weights", "trained"}),
            units=True,
            of_batch_norm=True,
        ),
        ScoreRow(
            "fpgm",
            "pruning.scores.weight_scores:fpgm",
            "the sum of a filter's distances from the other filters of its tensor",
            paper="He et al. 2019, arXiv 1811.00250",
            units=True,
            across_layers=False,
            unlisted=("dim",),
        ),
        ScoreRow(
            "wanda",
            "pruning.scores.input_norms:wanda",
            "|w| times the norm of its input over the examples",
            paper="Sun et al. 2023, arXiv 2306.11695",
            needs=frozenset({"inputs", "trained"}),
            in_sweeps={"examples": 128},
            keeps_head=True,
            version=4,
        ),
        ScoreRow(
            "activation",
            "pruning.scores.input_norms:activation",
            "the norm of an entry's input over the examples, for units of transformers",
            paper="Muralidharan et al. 2024, arXiv 2407.14679",
            needs=frozenset({"inputs", "trained"}),
            in_sweeps={"examples": 128},
            version=2,
        ),
        ScoreRow(
            "block_influence",
            "pruning.scores.input_norms:block_influence",
            "1 minus the mean cosine between the residual stream before and after a layer of a transformer",
            paper="Men et al. 2024, arXiv 2403.03853",
            needs=frozenset({"inputs", "trained"}),
            of_units=("layer",),
            in_sweeps={"examples": 128},
            version=2,
        ),
        ScoreRow(
            "minitron",
            "pruning.scores.input_norms:minitron",
            "block_influence for whole layers of a transformer, activation for its other units",
            paper="Muralidharan et al. 2024, arXiv 2407.14679",
            needs=frozenset({"inputs", "trained"}),
            for_units={"layer": "block_influence"},
            in_sweeps={"examples": 128},
        ),
        ScoreRow(
            "left_out",
            "pruning.scores.input_norms:left_out",
            "the loss without a layer of a transformer, or without an expert, less the loss with it; signed",
            needs=frozenset({"inputs", "trained"}),
            signed=True,
            of_units=("layer", "expert"),
            for_units={"expert": "left_out_expert"},
            in_sweeps={"examples": 128},
        ),
        ScoreRow(
            "left_out_expert",
            "pruning.scores.experts:left_out_expert",
            "left_out for experts: the loss of the network that routes among the others; signed",
            needs=frozenset({"inputs", "trained"}),
            signed=True,
            of_units=("expert",),
            in_sweeps={"examples": 128},
        ),
        _of_tokens("expert_frequency", "the number of tokens that are routed to an expert"),
        _of_tokens("router_weight", "the sum of an expert's gate weights over the tokens routed to it"),
        _of_tokens("ean", "the sum of the norms of an expert's outputs", "Jaiswal et al. 2025, arXiv 2504.05586"),
        _of_tokens("man", "the mean norm of an expert's outputs", "a study of 2026, arXiv 2606.15716"),
        _of_tokens("msan", "the mean squared norm of an expert's outputs", "a study of 2026, arXiv 2606.15716"),
        _of_tokens(
            "reap",
            "the mean norm of an expert's outputs times their gate weights",
            "Lasby et al. 2025, arXiv 2510.13999",
        ),
        ScoreRow(
            "expert_magnitude",
            "pruning.scores.experts:expert_magnitude",
            "the norm of an expert's weights",
            of_units=("expert",),
            baseline="magnitude",
        ),
    )
)
"""Name -> score."""
