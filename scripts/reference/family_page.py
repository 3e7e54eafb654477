"""Text of docs/reference/transformers.md: what the configurations of stock transformers express, from the families."""

from __future__ import annotations

from collections.abc import Iterator

from pruning.choices.axes import FAMILY_UNITS
from pruning.dependencies.families.family import FAMILIES

HEAD = """\
# Transformers that can become smaller

After this page you know which parts of a stock transformer can be pruned so that `from_pretrained` of an unmodified
transformers loads the smaller network. A stock class builds its network from the sizes in `config.json`, so a network
can only lose what these sizes express: equal numbers of heads and hidden units in all layers, and no entry of its own
for a single layer.

    unit      what goes
    layer     whole blocks: attention, MLP and norms; the blocks left are numbered anew
    heads     a key and value head with the query heads that read it, in all layers equally many
    mlp       hidden units of the MLPs, of gated ones the gate too, in all layers equally many
    residual  channels of the residual stream, in everything that reads or writes them
    expert    experts of mixtures, with what routers have for them, in all layers equally many

A family is one file of `pruning/dependencies/families/`, and this table is made from these files; a test builds and
loads random networks of the stock classes for each line. A family covers all classes of transformers with its
`model_type`, whatever their head, except that `residual` knows the heads that the file names.

"""


def page() -> str:
    """Return the page."""
    return HEAD + "\n".join(_table()) + "\n"


def _table() -> Iterator[str]:
    yield "| family | `model_type` | `unit` | keys of `config.json` that change | limits |"
    yield "|---|---|---|---|---|"
    for family in FAMILIES:
        types = ", ".join(f"`{name}`" for name in family.model_types)
        for unit in FAMILY_UNITS:
            if unit not in family.refused and not family.expresses(unit):
                continue  # a family without experts
            keys = ", ".join(f"`{key}`" for key in family.expresses(unit)) or "none"
            limit = f"refused: {family.refused[unit]}" if unit in family.refused else family.limit(unit)
            yield f"| {family.name} | {types} | `{unit}` | {keys} | {limit} |"
