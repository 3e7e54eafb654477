"""Known families of stock transformers, a row each."""

from __future__ import annotations

from pruning.dependencies.families.bert import BERT
from pruning.dependencies.families.family import Family
from pruning.dependencies.families.gpt2 import GPT2
from pruning.dependencies.families.llama_like import LLAMA, QWEN_AND_MISTRAL
from pruning.dependencies.families.vit import VIT

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN_AND_MISTRAL, GPT2, BERT, VIT)
"""All families; another one is a file of this room and its row here."""

MODEL_TYPES = ", ".join(name for family in FAMILIES for name in family.model_types)
"""Known values of `config.model_type`, for messages."""


def family_of(model_type: str) -> Family | None:
    """Return the family of a `config.model_type`; None if there is none."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
