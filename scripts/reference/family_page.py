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

## By structure

A network of any other stock class of transformers is read from shapes, and proven before it is pruned, for
`layer`, `heads` and `mlp`:

1. The class is built without memory with one key of the configuration changed. Tensors that vanish are a layer, and
   dimensions that shrink hold heads or hidden units. A key inside `text_config` counts, too, and in a network of images
   (CLIP, SigLIP) one inside `vision_config`.
2. A network of the same class with random values, at most eight layers where all are of one kind, loses units. The
   reading is proven if the class builds the smaller configuration as it is saved, takes exactly the tensors that are
   left, and computes what the masked network computes, in float32 and float64 (in float32 where the class computes in
   nothing else). Otherwise the unit is refused, with what failed. If only some of several parts are proven, such as
   attention beside Mamba's heads, or a decoder of text beside an encoder of speech that the example does not reach, the
   others stay whole, and a warning names them.

A proof takes 5 to 15 seconds for small networks, once in a process for each unit, and about five times the memory of
the layers that it builds, in float32. A network that reads tokens is proven on drawn ones if there is no `example`;
others need an example. Networks that normalise after each addition (BART, RoBERTa) are compared with the network
without the layers, since the masked one keeps their norms, and `resized.differs` says so. Three things are other than
in the table: hidden units of experts go from all experts of a mixture alike, T5's heads from all layers alike, and the
last layer of each list stays in a network with several lists, as in an encoder and a decoder.

Heads can go where a key of the configuration keeps their size (`head_dim`, `d_kv`, `v_head_dim`). Classes that divide
the residual width by the number of heads (BERT, GPT-NeoX, OPT, BART, Whisper) would build fewer, larger ones, so that
`heads` is refused. [One by one](transformers-by-structure.md) lists what each model type can lose.

## By the table

A family is a row of `pruning/dependencies/families/family.py`, and this table is made from these rows; a test builds
and loads random networks of the stock classes for each line. A family covers all classes of transformers with its
`model_type`, whatever their head, except that `residual` knows the heads that the row names.

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
