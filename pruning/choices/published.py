"""The catalogue of methods: published combinations of the seven choices, one row for each.

`conf/method/NAME.yaml` is generated from a row and shows the method's choices, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pruning.catalogue.reconstructions import RECONSTRUCTIONS
from pruning.catalogue.rows import named
from pruning.catalogue.scores import SCORES
from pruning.choices.axes import Dynamics, Repair, Schedule, Scope, Score, Unit
from pruning.choices.combining import Choices

_GLOBAL = Scope("global")
_ERK = Scope("layer", "erk")
_FILTERS = Unit("channel", spare_last=True)


@dataclass(frozen=True)
class Method:
    """A published method.

    Args:
        name: the name that users type.
        choices: the choices of the pruning engine.
        words: one sentence; may be empty if there is a paper, or the dynamics says it.
        source: the paper, if it is not that of the dynamics or the score.
        schedule: the schedule preset of a sweep (a file in `conf/schedule`) that the paper prescribes.
        restart: the preset for the weights from which a sweep's rounds train on (a file in `conf/restart`) that the
            paper prescribes.
    """

    name: str
    choices: Choices
    words: str = ""
    source: str = ""
    schedule: str = ""
    restart: str = ""

    @property
    def meaning(self) -> str:
        """One sentence; may be empty if there is a paper."""
        row = self.choices.dynamics.row
        return self.words or (row.meaning if row.in_training else "")

    @property
    def paper(self) -> str:
        """The source, such as "Lee et al. 2019, arXiv 1810.02340"; empty for a class that selects."""
        if self.source or self.choices.select is not None:
            return self.source
        rows = {**RECONSTRUCTIONS, **SCORES}
        row = self.choices.dynamics.row
        return row.paper if row.in_training else rows[str(self.choices.score.kind)].paper

    @property
    def at(self) -> str:
        """The network that the paper prunes first: `start`, `trained` or `during`, as for `schedule.at`."""
        return next((at for at in ("at_start", "during") if self.schedule.startswith(at)), "trained").removeprefix(
            "at_"
        )


PUBLISHED: Mapping[str, Method] = named(
    (
        Method("magnitude", Choices(), "the smallest weights of each tensor"),
        Method("random", Choices(Score("random")), "random weights of each tensor"),
        Method("lamp", Choices(Score("lamp"), scope=_GLOBAL)),
        Method(
            "erk",
            Choices(scope=Scope("layer", "erk")),
            "magnitude, with Erdos-Renyi-Kernel densities",
            "Evci et al. 2020, arXiv 1911.11134",
        ),
        Method("snip", Choices(Score("snip"), scope=_GLOBAL), schedule="at_start"),
        Method(
            "iterative_snip",
            Choices(Score("snip"), scope=_GLOBAL, schedule=Schedule(inner=60)),
            source="de Jorge et al. 2021, arXiv 2006.09081",
            schedule="at_start_60",
        ),
        Method(
            "force",
            Choices(Score("snip"), scope=_GLOBAL, schedule=Schedule(inner=60), dynamics=Dynamics("free")),
            "entries may return",
            "de Jorge et al. 2021, arXiv 2006.09081",
            schedule="at_start_60",
        ),
        Method("grasp", Choices(Score("grasp"), scope=_GLOBAL), schedule="at_start"),
        Method(
            "synflow", Choices(Score("synflow"), scope=_GLOBAL, schedule=Schedule(inner=100)), schedule="at_start_100"
        ),
        Method("taylor", Choices(Score("taylor"), scope=_GLOBAL), "weights; unit=channel for filters"),
        Method("fisher", Choices(Score("fisher"), scope=_GLOBAL)),
        Method("obd", Choices(Score("obd"), scope=_GLOBAL)),
        Method("obs", Choices(Score("obs"), scope=_GLOBAL, repair=Repair("obs"))),
        Method(
            "wanda",
            Choices(Score("wanda"), scope=Scope("row"), schedule=Schedule(order="sequential")),
            "layer by layer, each with the pruned layers before it; order=at_once takes norms of the dense network",
        ),
        Method(
            "sparsegpt",
            Choices(Score("sparsegpt"), schedule=Schedule(order="sequential")),
            "layer by layer; the columns to the right make up for pruned weights",
        ),
        Method(
            "alps",
            Choices(Score("alps"), schedule=Schedule(order="sequential")),
            "layer by layer; weights and their sparse copy approach each other, then least squares",
        ),
        Method("shortgpt", Choices(Score("block_influence"), Unit("layer")), "whole layers of a transformer"),
        Method(
            "reap",
            Choices(Score("reap"), Unit("expert")),
            "the experts that add least to their tokens, gate weights counted",
            "Lasby et al. 2025, arXiv 2510.13999",
        ),
        Method(
            "man",
            Choices(Score("man"), Unit("expert")),
            "the experts that add least to their tokens, without gate weights",
            "a study of 2026, arXiv 2606.15716",
        ),
        Method(
            "expert_frequency",
            Choices(Score("expert_frequency"), Unit("expert")),
            "the experts that routers send the fewest tokens to",
        ),
        Method(
            "expert_magnitude",
            Choices(Score("expert_magnitude"), Unit("expert")),
            "the experts with the smallest weights: the magnitude baseline",
        ),
        Method("random_experts", Choices(Score("random"), Unit("expert")), "random experts: the control"),
        Method(
            "minitron_mlp",
            Choices(Score("activation"), Unit("mlp")),
            "hidden units of a transformer's MLPs, in all layers equally many",
        ),
        Method(
            "minitron_heads",
            Choices(Score("activation"), Unit("heads")),
            "attention heads of a transformer, in all layers equally many",
        ),
        Method(
            "minitron",
            Choices(Score("minitron"), Unit("layer_and_mlp"), Scope(budget="parameters")),
            "whole layers of a transformer, then hidden units of the others, half of the parameters each",
        ),
        Method(
            "minitron_sizes",
            Choices(Score("minitron"), Unit("sizes"), Scope(budget="parameters")),
            "a transformer of the sizes unit.layers, unit.heads, unit.mlp and unit.residual, all ranked by activations",
            schedule="sizes",
        ),
        Method("fpgm", Choices(Score("fpgm"), _FILTERS)),
        Method(
            "slimming",
            Choices(Score("bn_scale"), Unit("channel"), Scope("global", min_kept=1)),
            "channels followed by a BatchNorm; the network's outputs need not be spared",
        ),
        Method(
            "n_m",
            Choices(scope=Scope("window")),
            "2 of each 4, by magnitude",
            "Mishra et al. 2021, arXiv 2104.08378",
            schedule="half",
        ),
        Method(
            "wanda_n_m",
            Choices(Score("wanda"), scope=Scope("window"), schedule=Schedule(order="sequential")),
            "layer by layer, 2 of each 4",
            schedule="half",
        ),
        Method(
            "sparsegpt_n_m",
            Choices(Score("sparsegpt"), scope=Scope("window"), schedule=Schedule(order="sequential")),
            "layer by layer, 2 of each 4",
            schedule="half",
        ),
        Method(
            "alps_n_m",
            Choices(Score("alps"), scope=Scope("window"), schedule=Schedule(order="sequential")),
            "layer by layer, 2 of each 4",
            schedule="half",
        ),
        Method("lottery_ticket", Choices(), source="Frankle & Carbin 2019, arXiv 1803.03635", restart="rewind"),
        Method(
            "lr_rewinding",
            Choices(scope=_GLOBAL),
            source="Renda, Frankle & Carbin 2020, arXiv 2003.02389",
            restart="lr_rewind",
        ),
        # masks that change within the training
        Method(
            "static",
            Choices(Score("random"), scope=_ERK, dynamics=Dynamics("static")),
            "a random mask with Erdos-Renyi-Kernel densities, which stays: the baseline of sparse training",
            schedule="during",
        ),
        Method(
            "gradual",
            Choices(dynamics=Dynamics("gradual")),
            "magnitude, more and more along a cubic",
            schedule="during",
        ),
        Method("set", Choices(Score("random"), scope=_ERK, dynamics=Dynamics("set")), schedule="during"),
        Method("rigl", Choices(Score("random"), scope=_ERK, dynamics=Dynamics("rigl")), schedule="during"),
        Method(
            "sr_ste",
            Choices(scope=Scope("window"), dynamics=Dynamics("sr_ste")),
            "2 of each 4 by magnitude, chosen in each step; the others train on, and decay",
            schedule="during_own",
        ),
        Method(
            "ste",
            Choices(scope=Scope("window"), dynamics=Dynamics("ste")),
            "2 of each 4 by magnitude, chosen in each step; the others train on",
            schedule="during_own",
        ),
        Method("movement", Choices(dynamics=Dynamics("movement")), schedule="during"),
        Method(
            "soft_movement",
            Choices(dynamics=Dynamics("soft_movement")),
            "entries whose scores fall below a threshold; the sparsity follows",
            schedule="during_own",
        ),
        # the methods of `torch.nn.utils.prune`
        Method("identity", Choices(select="identity"), "nothing is pruned"),
        Method("random_unstructured", Choices(select="random_unstructured"), "random entries of each tensor"),
        Method("l1_unstructured", Choices(select="l1_unstructured"), "entries of each tensor with the smallest |w|"),
        Method(
            "global_random_unstructured",
            Choices(scope=_GLOBAL, select="random_unstructured"),
            "random entries of all prunable tensors together",
        ),
        Method(
            "global_l1_unstructured",
            Choices(scope=_GLOBAL, select="l1_unstructured"),
            "entries with the smallest |w|; all prunable tensors ranked together",
        ),
        Method(
            "random_structured",
            Choices(unit=Unit("channel"), select="random_structured"),
            "random channels along `dim`; 0 is the dimension of output channels",
        ),
        Method(
            "ln_structured",
            Choices(unit=Unit("channel"), select="ln_structured", arguments={"n": 2}),
            "channels along `dim` with the smallest L_n norm; 0 is the dimension of output channels",
        ),
    )
)
"""Name of a method -> its row; `docs/reference/methods.md` lists our values for choices that a paper leaves open."""
