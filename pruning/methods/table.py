"""The table of pruning methods: what a config may name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pruning.methods.base import BasePruningMethod
from pruning.methods.structured import LnStructured, RandomStructured
from pruning.methods.unstructured import CustomFromMask, Identity, L1Unstructured, RandomUnstructured

METHODS: Mapping[str, type[BasePruningMethod]] = MappingProxyType(
    {
        "identity": Identity,
        "random_unstructured": RandomUnstructured,
        "l1_unstructured": L1Unstructured,
        "random_structured": RandomStructured,
        "ln_structured": LnStructured,
        "custom_from_mask": CustomFromMask,
    }
)
