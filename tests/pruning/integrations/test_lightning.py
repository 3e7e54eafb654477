"""Masked training with a Lightning Trainer gives the same bits as a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from sampling import sampled

from pruning import MaskSet

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",
)


@pytest.fixture(scope="module")
def cases() -> Any:
    pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    import lightning_cases

    return lightning_cases


@pytest.mark.parametrize("make", reference.OPTIMIZERS.values(), ids=reference.OPTIMIZERS)
def test_a_fit_gives_the_bits_of_a_loop_by_hand(
    cases: Any, make: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    module = cases.Module(make)

    cases.trainer(tmp_path, cases.KeepMasks(module.network, reference.masks())).fit(module, cases.batches())

    assert module.pruned_after == [True] * 12
    assert reference.same(module.network.state_dict(), reference.trained_by_hand(make))


def test_a_resumed_fit_keeps_the_masks_of_its_checkpoint(cases: Any, tmp_path: Path) -> None:
    make, file = reference.OPTIMIZERS["SGD"], tmp_path / "half.ckpt"
    first, second = cases.Module(make), cases.Module(make)
    begun = cases.trainer(tmp_path, cases.KeepMasks(first.network, reference.masks()), epochs=1)
    begun.fit(first, cases.batches())
    begun.save_checkpoint(file)

    cases.trainer(tmp_path, cases.KeepMasks(second.network, reference.masks())).fit(
        second, cases.batches(), ckpt_path=file
    )

    assert second.pruned_after == [True] * 6
    assert reference.same(second.network.state_dict(), reference.trained_by_hand(make))
    others = MaskSet({name: ~mask for name, mask in reference.masks().items()})
    third = cases.Module(make)
    with pytest.raises(ValueError, match=r"`masks` \(of sparsity 0\.\d+\) must equal those of the checkpoint"):
        cases.trainer(tmp_path, cases.KeepMasks(third.network, others)).fit(third, cases.batches(), ckpt_path=file)


def test_a_model_is_plain_after_a_fit(cases: Any, tmp_path: Path) -> None:
    module = cases.Module(reference.OPTIMIZERS["SGD"])
    cases.trainer(tmp_path, cases.KeepMasks(module.network, reference.masks()), epochs=1).fit(module, cases.batches())

    cases.trainer(tmp_path, epochs=1).fit(module, cases.batches())

    assert not reference.is_pruned(module.network)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in module.parameters())


def test_masks_that_are_missing_or_fit_nothing_are_refused(cases: Any) -> None:
    network = reference.Network()

    with pytest.raises(ValueError, match=r"^`masks` \(=\{\}\) must contain at least one mask"):
        cases.KeepMasks(network, {})
    with pytest.raises(ValueError, match=r"^`other` is in the masks, but Network has no such parameter"):
        cases.KeepMasks(network, {"other": torch.ones(1)})


@sampled(3)
@pytest.mark.parametrize("name", reference.DYNAMICS)
def test_masks_change_as_in_a_loop_by_hand_also_after_a_checkpoint(cases: Any, name: str, tmp_path: Path) -> None:
    make, file = reference.OPTIMIZERS["AdamW"], tmp_path / "half.ckpt"
    weights, masks = reference.changed_by_hand(make, reference.DYNAMICS[name]())

    def callback(module: Any) -> Any:
        return cases.KeepMasks(
            module.network, reference.masks(), reference.DYNAMICS[name](), generator=reference.drawn()
        )

    class Half(cases.Callback):  # type: ignore[misc,name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(file)

    first, second = cases.Module(make), cases.Module(make)
    for module, path in ((first, None), (second, file)):
        keeping = callback(module)
        cases.trainer(tmp_path, keeping, Half()).fit(module, cases.batches(), ckpt_path=path)
        assert keeping.masks == masks
        assert reference.same(module.network.state_dict(), weights)


def test_a_fit_without_an_end_keeps_masks_and_cannot_change_them(cases: Any, tmp_path: Path) -> None:
    class Stop(cases.Callback):  # type: ignore[misc,name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    make = reference.OPTIMIZERS["SGD"]
    module = cases.Module(make)
    cases.trainer(tmp_path, cases.KeepMasks(module.network, reference.masks()), Stop(), epochs=-1).fit(
        module, cases.batches()
    )
    assert module.pruned_after == [True] * 6
    moving = cases.KeepMasks(module.network, reference.masks(), reference.DYNAMICS["rigl"]())
    with pytest.raises(ValueError, match=r"`max_epochs` \(=-1\) must be a number"):
        cases.trainer(tmp_path, moving, epochs=-1).fit(module, cases.batches())
