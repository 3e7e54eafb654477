"""Published methods as combinations of the seven choices."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pruning.choices.axes import Choices, Dynamics, Repair, Restart, Schedule, Scope, Score, Unit

_GLOBAL = Scope("global")
_AT_START = Schedule(at="start")
_FILTERS = Unit("channel", spare_last=True)

PUBLISHED: Mapping[str, Choices] = MappingProxyType(
    {
        # Han et al. 2015, arXiv 1506.02626
        "magnitude": Choices(),
        "random": Choices(Score("random")),
        # Lee et al. 2021, arXiv 2010.07611
        "lamp": Choices(Score("lamp"), scope=_GLOBAL),
        # Evci et al. 2020, arXiv 1911.11134
        "erk": Choices(scope=Scope("layer", "erk")),
        # Lee et al. 2019, arXiv 1810.02340
        "snip": Choices(Score("snip"), scope=_GLOBAL, schedule=_AT_START),
        # de Jorge et al. 2021, arXiv 2006.09081
        "iterative_snip": Choices(Score("snip"), scope=_GLOBAL, schedule=Schedule(at="start", inner=60)),
        "force": Choices(
            Score("snip"), scope=_GLOBAL, schedule=Schedule(at="start", inner=60), dynamics=Dynamics("free")
        ),
        # Wang et al. 2020, arXiv 2002.07376
        "grasp": Choices(Score("grasp"), scope=_GLOBAL, schedule=_AT_START),
        # Tanaka et al. 2020, arXiv 2006.05467
        "synflow": Choices(Score("synflow"), scope=_GLOBAL, schedule=Schedule(at="start", inner=100)),
        # Molchanov et al. 2019, arXiv 1906.10771: of weights; `unit=channel` for filters
        "taylor": Choices(Score("taylor"), scope=_GLOBAL),
        # Theis et al. 2018, arXiv 1801.05787
        "fisher": Choices(Score("fisher"), scope=_GLOBAL),
        # LeCun et al. 1990
        "obd": Choices(Score("obd"), scope=_GLOBAL),
        # Hassibi & Stork 1993; Singh & Alistarh 2020, arXiv 2004.14340
        "obs": Choices(Score("obs"), scope=_GLOBAL, repair=Repair("obs")),
        # Sun et al. 2023, arXiv 2306.11695
        "wanda": Choices(Score("wanda"), scope=Scope("row")),
        # He et al. 2019, arXiv 1811.00250
        "fpgm": Choices(Score("fpgm"), _FILTERS),
        # Liu et al. 2017, arXiv 1708.06519
        "slimming": Choices(Score("bn_scale"), Unit("channel"), Scope("global", min_kept=1)),
        # Mishra et al. 2021, arXiv 2104.08378
        "n_m": Choices(scope=Scope("window")),
        # Frankle & Carbin 2019, arXiv 1803.03635
        "lottery_ticket": Choices(schedule=Schedule("geometric"), restart=Restart("step", step=0)),
        # Renda et al. 2020, arXiv 2003.02389
        "lr_rewinding": Choices(scope=_GLOBAL, schedule=Schedule("geometric"), restart=Restart(rates_from=0)),
        # the methods of `torch.nn.utils.prune`
        "identity": Choices(select="identity"),
        "random_unstructured": Choices(select="random_unstructured"),
        "l1_unstructured": Choices(select="l1_unstructured"),
        "global_random_unstructured": Choices(scope=_GLOBAL, select="random_unstructured"),
        "global_l1_unstructured": Choices(scope=_GLOBAL, select="l1_unstructured"),
        "random_structured": Choices(unit=Unit("channel"), select="random_structured"),
        "ln_structured": Choices(unit=Unit("channel"), select="ln_structured", arguments={"n": 2}),
    }
)
"""Name of a method -> its choices; where a paper leaves one open, that of `docs/reference/methods.md`."""
