"""BERT, and sentence encoders of its class such as MiniLM."""

from __future__ import annotations

from pruning.dependencies.families.family import DERIVED_HEAD_SIZE, Family, Keys

BERT = Family(
    name="BERT (MiniLM)",
    model_types=("bert",),
    keys=Keys(),
    refused={"heads": DERIVED_HEAD_SIZE, "residual": DERIVED_HEAD_SIZE},
    layers="encoder.layer",
    mlp_inputs=("intermediate.dense",),
    mlp_output="output.dense",
    norms=("attention.output.LayerNorm", "crossattention.output.LayerNorm", "output.LayerNorm"),
    norms_after=True,
)
