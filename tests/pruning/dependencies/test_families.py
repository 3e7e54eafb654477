"""The table of families: stock classes load each size that it allows, and none that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled

from pruning.choices.axes import FamilyUnit
from pruning.dependencies.families.family import FAMILIES, Family, family_of

pytest.importorskip("transformers", reason="transformers is not installed")

from small_transformers import KINDS, UNITS_OF_KINDS, class_of, config_of, inputs_of, network_of


def fewer(family: Family, unit: FamilyUnit, kind: str) -> dict[str, Any]:
    """Return the sizes of a network that has lost some of a unit, by the keys of the family."""
    keys, sizes = family.keys, {}
    head = {} if keys.head_size is None else {keys.head_size: 4}
    if unit == "layer":
        sizes = {keys.layers: 2} | {
            key: ["full_attention"] * 2 for key in keys.by_layer if hasattr(config_of(kind), key)
        }
    elif unit == "heads":
        sizes = {keys.heads: 1} | ({keys.key_value_heads: 1} if keys.key_value_heads else {}) | head
    elif unit == "mlp":
        sizes = {keys.mlp: 7}
    else:
        sizes = {keys.residual: 9, keys.norm_eps: 2e-3} | head
    return sizes


CELLS = [(kind, unit) for kind in KINDS for unit in UNITS_OF_KINDS]


@sampled(3)
@pytest.mark.parametrize(("kind", "unit"), CELLS)
def test_stock_classes_load_exactly_what_the_table_allows(kind: str, unit: FamilyUnit, tmp_path: Path) -> None:
    family = family_of(config_of(kind).model_type)
    assert family is not None
    whole, sizes = network_of(kind), fewer(family, unit, kind)
    if unit in family.refused:
        assert not family.expresses(unit)
        assert not _keeps_the_size_of_heads(kind, {**sizes, "head_dim": 4})
        return

    network_of(kind, **sizes).save_pretrained(tmp_path)
    loaded, said = class_of(kind).from_pretrained(tmp_path, output_loading_info=True)

    assert not any(said.values())
    assert {name: value for name, value in sizes.items() if getattr(loaded.config, name) != value} == {}
    assert set(sizes) <= set(family.expresses(unit))
    assert _parameters(loaded) < _parameters(whole)
    assert loaded.eval()(**inputs_of(loaded)).logits.isfinite().all()


def _keeps_the_size_of_heads(kind: str, sizes: dict[str, Any]) -> bool:
    """Return whether a stock class builds a network of these sizes whose heads have four entries each."""
    try:
        network = class_of(kind)(config_of(kind, **sizes))
    except ValueError:
        return False
    heads = network.config.num_attention_heads
    names = ("attention.self.query.weight", "attn.c_proj.weight")
    (weight, *_) = (each for name, each in network.named_parameters() if name.endswith(names))
    return bool(weight.shape[0] == 4 * heads)


def _parameters(network: torch.nn.Module) -> int:
    return sum(each.numel() for each in network.parameters())


def test_a_number_of_heads_that_does_not_divide_the_width_is_no_llama() -> None:
    with pytest.raises(Exception, match="not a multiple of the number of attention"):
        config_of("Llama", hidden_size=10)
    assert config_of("Qwen2", hidden_size=10).num_attention_heads == 3


def test_each_model_type_has_one_family() -> None:
    types = [each for family in FAMILIES for each in family.model_types]

    assert len(types) == len(set(types))
    assert family_of("mamba") is None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_refusal_says_what_to_do(family: Family) -> None:
    for said in family.refused.values():
        assert "; prune unit=" in said
