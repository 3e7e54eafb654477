"""Masked training with a transformers Trainer gives the same bits as a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch

from pruning import MaskSet


@pytest.fixture(scope="module")
def cases() -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    import transformers_cases

    return transformers_cases


@pytest.mark.parametrize("make", reference.OPTIMIZERS.values(), ids=reference.OPTIMIZERS)
def test_a_training_gives_the_bits_of_a_loop_by_hand(
    cases: Any, make: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, watch = reference.Network(), cases.Watch()

    cases.trainer(tmp_path, make, cases.KeepMasks(model, reference.masks()), watch, model=model).train()

    assert watch.pruned_after == [True] * 6
    assert reference.same(model.state_dict(), reference.trained_by_hand(make))
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_resumed_training_keeps_the_masks_of_its_checkpoint(cases: Any, tmp_path: Path) -> None:
    make = reference.OPTIMIZERS["AdamW"]
    first, second, third = reference.Network(), reference.Network(), reference.Network()
    cases.trainer(tmp_path, make, cases.KeepMasks(first, reference.masks()), model=first, epochs=1).train()
    masks = MaskSet.load(tmp_path / "checkpoint-3" / "masks.npz")

    cases.trainer(tmp_path, make, cases.KeepMasks(second, masks), model=second).train(resume_from_checkpoint=True)

    assert masks == reference.masks()
    assert reference.same(second.state_dict(), reference.trained_by_hand(make))
    others = cases.KeepMasks(third, MaskSet({name: ~mask for name, mask in masks.items()}))
    with pytest.raises(ValueError, match=r"`masks` \(of sparsity 0\.\d+\) must equal those of the checkpoint"):
        cases.trainer(tmp_path, make, others, model=third, epochs=3).train(resume_from_checkpoint=True)


def test_a_model_without_masks_is_refused(cases: Any) -> None:
    with pytest.raises(ValueError, match=r"^`masks` \(=\{\}\) must contain at least one mask"):
        cases.KeepMasks(reference.Network(), {})


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("rigl", "soft_movement") else pytest.param(name, marks=pytest.mark.slow)
        for name in reference.DYNAMICS
    ],
)
def test_masks_change_as_in_a_loop_by_hand_also_after_a_checkpoint(cases: Any, name: str, tmp_path: Path) -> None:
    make = reference.OPTIMIZERS["AdamW"]
    weights, masks = reference.changed_by_hand(make, reference.DYNAMICS[name]())
    for resumed in (False, "checkpoint-3"):
        model = reference.Network()
        keeping = cases.KeepMasks(model, reference.masks(), reference.DYNAMICS[name](), generator=reference.drawn())
        path = str(tmp_path / resumed) if resumed else None
        cases.trainer(tmp_path, make, keeping, model=model).train(resume_from_checkpoint=path)
        assert keeping.masks == masks
        assert reference.same(model.state_dict(), weights)


def test_the_best_weights_keep_the_masks_that_they_had(cases: Any, tmp_path: Path) -> None:
    model, make = reference.Network(), reference.OPTIMIZERS["SGD"]
    keeping = cases.KeepMasks(model, reference.masks(), reference.DYNAMICS["set"](), generator=reference.drawn())
    trainer = cases.trainer(tmp_path, make, keeping, model=model)
    trainer.args.load_best_model_at_end = True
    trainer.add_callback(cases.Best(tmp_path / "checkpoint-3"))
    trainer.train()

    assert keeping.masks == MaskSet.load(tmp_path / "checkpoint-3" / "masks.npz")
    assert keeping.masks != MaskSet.load(tmp_path / "checkpoint-6" / "masks.npz")
    for name, mask in keeping.masks.items():
        assert torch.equal(model.get_parameter(name) != 0, mask)


def test_a_checkpoint_without_the_state_of_the_dynamics_is_refused(cases: Any, tmp_path: Path) -> None:
    make, first, second = reference.OPTIMIZERS["SGD"], reference.Network(), reference.Network()
    cases.trainer(tmp_path, make, cases.KeepMasks(first, reference.masks()), model=first, epochs=1).train()
    moving = cases.KeepMasks(second, reference.masks(), reference.DYNAMICS["rigl"]())
    with pytest.raises(ValueError, match=r"dynamics\.pt is missing; resume from a checkpoint"):
        cases.trainer(tmp_path, make, moving, model=second).train(resume_from_checkpoint=True)


def test_masks_that_stay_are_compared_with_those_that_a_checkpoint_ended_with(cases: Any, tmp_path: Path) -> None:
    make, first, second = reference.OPTIMIZERS["SGD"], reference.Network(), reference.Network()
    moving = cases.KeepMasks(first, reference.masks(), reference.DYNAMICS["set"](), generator=reference.drawn())
    cases.trainer(tmp_path, make, moving, model=first).train()
    for masks, resumes in ((reference.masks(), False), (moving.masks, True)):
        keeping = cases.trainer(tmp_path, make, cases.KeepMasks(second, masks), model=second, epochs=3)
        if resumes:
            keeping.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
            assert all(not second.get_parameter(name)[~mask].any() for name, mask in masks.items())
        else:
            with pytest.raises(ValueError, match="must equal those of the checkpoint"):
                keeping.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
