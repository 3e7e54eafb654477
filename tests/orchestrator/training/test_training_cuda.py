"""Training on a GPU: every precision, batches that stay on the device, and the CPU's order of examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_cases import CLASSES, EPOCH, job, metrics, network, settings

from orchestrator.training.loop import training_loop
from orchestrator.training.loop.training_job import FitResult

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda", 0)
COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": None}


def run(device: torch.device, **changes: Any) -> FitResult:
    return training_loop.fit(job(network(), CLASSES, settings(lr=0.02, scheduler=COSINE, **changes), device=device))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_every_precision_learns(precision: str, clip: float | None) -> None:
    result = run(CUDA, precision=precision, clip_norm=clip, epochs=6)

    assert result.steps == 6 * EPOCH
    assert result.curve[-1].metrics["val/loss"] < result.curve[0].metrics["val/loss"]


def test_the_order_is_that_of_the_cpu() -> None:
    """Without dropout both devices compute the same training, up to rounding."""
    found = []
    for device in (torch.device("cpu"), CUDA):
        model = network()
        model[3].p = 0.0
        found.append(training_loop.fit(job(model, CLASSES, settings(lr=0.02), device=device)).curve[-1].metrics)

    assert found[1]["train/loss"] == pytest.approx(found[0]["train/loss"], rel=1e-3)
    assert found[1]["val/loss"] == pytest.approx(found[0]["val/loss"], rel=1e-3)


def test_dropout_follows_the_seed_and_the_generator_is_restored() -> None:
    torch.cuda.manual_seed(1)
    first, state = run(CUDA), torch.cuda.get_rng_state(CUDA)
    torch.cuda.manual_seed(2)
    second = run(CUDA)

    assert [values["train/loss"] for _, values in metrics(first)] == pytest.approx(
        [values["train/loss"] for _, values in metrics(second)], rel=1e-4
    )
    torch.cuda.manual_seed(1)
    assert torch.equal(torch.cuda.get_rng_state(CUDA), state)
