"""Masked training in a loop that Accelerate prepares gives the same bits as a loop without Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from sampling import sampled
from torch.utils.data import DataLoader

from pruning import MaskKeeper, MaskSet
from pruning.dynamics import Dynamics


class Run:
    """Train with the loop of Accelerate's documentation."""

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], masks: MaskSet, dynamics: Dynamics | None = None
    ) -> None:
        accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
        from pruning.integrations.accelerate import change_masks, keep_masks

        self.accelerator: Any = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=reference.ACCUMULATE)
        network = reference.Network()
        self.model, self.optimizer, self.batches = self.accelerator.prepare(
            network, make(network.parameters()), DataLoader(reference.Examples(), batch_size=reference.BATCH)
        )
        given = (self.accelerator, self.model, self.optimizer, masks)
        self.keeper: MaskKeeper | Dynamics
        if dynamics is None:
            self.keeper = keep_masks(*given)
        else:
            self.keeper = change_masks(*given, dynamics, length=reference.LENGTH, generator=reference.drawn())

    def steps(self, epochs: int) -> Iterator[None]:
        for _ in range(epochs):
            for batch in self.batches:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(**batch)["loss"])
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), reference.CLIP)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                yield


@pytest.mark.parametrize("make", reference.OPTIMIZERS.values(), ids=reference.OPTIMIZERS)
def test_a_prepared_loop_gives_the_bits_of_a_plain_one(make: Callable[..., torch.optim.Optimizer]) -> None:
    run = Run(make, reference.masks())

    pruned_after = [reference.is_pruned(run.model) for _ in run.steps(reference.EPOCHS)]
    run.keeper.release()

    assert pruned_after == [True] * 12
    assert reference.same(run.model.state_dict(), reference.trained_by_hand(make))
    assert all(not parameter._post_accumulate_grad_hooks for parameter in run.model.parameters())


def test_a_resumed_loop_keeps_the_masks_of_its_checkpoint(tmp_path: Path) -> None:
    make, masks = reference.OPTIMIZERS["AdamW"], reference.masks()
    first = Run(make, masks)
    assert len([*first.steps(1)]) == 6
    first.accelerator.save_state(str(tmp_path))

    second = Run(make, masks)
    second.accelerator.load_state(str(tmp_path))
    pruned_after = [reference.is_pruned(second.model) for _ in second.steps(reference.EPOCHS - 1)]

    assert pruned_after == [True] * 6
    assert reference.same(second.model.state_dict(), reference.trained_by_hand(make))
    third = Run(make, MaskSet({name: ~mask for name, mask in masks.items()}))
    with pytest.raises(ValueError, match=r"`masks` \(of sparsity 0\.\d+\) must equal those of the checkpoint"):
        third.accelerator.load_state(str(tmp_path))


def test_a_model_without_masks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^`masks` \(=\{\}\) must contain at least one mask"):
        Run(reference.OPTIMIZERS["SGD"], MaskSet({}))


@sampled(3)
@pytest.mark.parametrize("name", reference.DYNAMICS)
def test_masks_change_as_in_a_plain_loop_also_after_a_checkpoint(name: str, tmp_path: Path) -> None:
    make = reference.OPTIMIZERS["AdamW"]
    weights, masks = reference.changed_by_hand(make, reference.DYNAMICS[name]())
    first, second = (Run(make, reference.masks(), reference.DYNAMICS[name]()) for _ in range(2))

    [*first.steps(1)]
    first.accelerator.save_state(str(tmp_path))
    second.accelerator.load_state(str(tmp_path))
    for run in (first, second):
        [*run.steps(1)]
        run.keeper.release()
        assert isinstance(run.keeper, Dynamics)
        assert run.keeper.masks == masks
        assert reference.same(run.model.state_dict(), weights)
