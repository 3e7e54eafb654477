"""A YOLO is trained by ultralytics' own trainer with masks, made smaller, trained again, and exported."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pruning
from pruning.masks.mask_set import MaskSet

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # ultralytics and what it imports warn

IMAGES = torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def libraries() -> Any:
    pytest.importorskip("ultralytics", reason="ultralytics is not installed: its license is AGPL-3.0")
    importlib.import_module("scripts.zoo.plain_operators")  # before torchvision, whose operators may be missing
    from ultralytics import YOLO, settings

    from pruning.integrations.ultralytics import masked_trainer

    settings.update({"mlflow": False, "raytune": False})
    return YOLO, masked_trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of squares in two grey values."""
    image_file = pytest.importorskip("PIL.Image")
    root, drawn = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True)
        for number in range(count):
            pixels, kind = drawn.integers(0, 40, (96, 96, 3), dtype=np.uint8), number % 2
            x, y, size = [*drawn.integers(0, 56, 2).tolist(), 40]
            pixels[y : y + size, x : x + size] = (120, 250)[kind]
            image_file.fromarray(pixels).save(root / "images" / split / f"{number}.png")
            box = ((x + size / 2) / 96, (y + size / 2) / 96, size / 96, size / 96)
            (root / "labels" / split / f"{number}.txt").write_text(" ".join(map(str, (kind, *box))))
    file = root / "data.yaml"
    file.write_text(f"path: {root}\ntrain: images/train\nval: images/val\nnames: {{0: dark, 1: light}}\n")
    return file


def options(data: Path, name: str) -> dict[str, Any]:
    where = {"data": str(data), "project": str(data.parent / "runs"), "name": name, "exist_ok": True}
    return {**where, "imgsz": 96, "batch": 8, "device": "cpu", "workers": 0, "plots": False, "verbose": False}


LAYERS: list[list[Any]] = [
    *([-1, 1, "Conv", [32, 3, 2]], [-1, 1, "C3k2", [32, False, 0.5]], [-1, 1, "Conv", [64, 3, 2]]),
    *([-1, 1, "C3k2", [64, False, 0.5]], [-1, 1, "Conv", [128, 3, 2]], [-1, 1, "C2PSA", [128]]),
]
"""Layers of a YOLO11, few and narrow: as many of them as one test has time for."""


def yolo_of(libraries: Any, classes: int = 2) -> Any:
    from ultralytics.nn.tasks import DetectionModel

    torch.manual_seed(0)
    yolo = libraries[0]("yolo11n.yaml")
    head = [[[3, 5], 1, "Detect", ["nc"]]]
    yolo.model = DetectionModel({"nc": classes, "backbone": LAYERS, "head": head}, verbose=False)
    yolo.model.args = yolo.overrides
    return yolo


def test_a_yolo_trains_with_masks_and_its_smaller_form_trains_validates_exports_and_is_pruned_again(
    libraries: Any, data: Path
) -> None:
    pytest.importorskip("onnxruntime")
    yolo, masked_trainer = yolo_of(libraries), libraries[1]
    pruning.prune(yolo.model.eval(), "magnitude", unit="group", sparsity=0.33, budget="macs", example=IMAGES)
    masks, seen = MaskSet.collect(yolo.model), []

    def watch(trainer: Any) -> None:
        nets = trainer.model, trainer.ema.ema
        seen.append(all(not net.get_parameter(name)[~mask].any() for net in nets for name, mask in masks.items()))

    yolo.add_callback("on_train_batch_end", watch)
    yolo.train(trainer=masked_trainer(yolo), epochs=3, **options(data, "masked"))

    assert len(seen) == 9
    assert all(seen)
    assert yolo.trainer.masks == masks == MaskSet.load(yolo.trainer.wdir / "masks.npz")
    smaller = pruning.shrink(yolo.model, IMAGES)
    assert type(smaller) is type(yolo.model)
    with torch.no_grad():
        torch.testing.assert_close(smaller(IMAGES)[0], yolo.model(IMAGES)[0], atol=1e-3, rtol=1e-4)

    yolo.model = smaller
    yolo.clear_callback("on_train_batch_end")
    yolo.train(trainer=masked_trainer(yolo), epochs=1, **options(data, "smaller"))
    counts = [sum(each.numel() for each in net.parameters()) for net in (smaller, yolo.model)]
    assert counts[0] == counts[1]
    again = libraries[0](yolo.trainer.best)
    pruning.prune(again.model, "magnitude", unit="group", sparsity=0.2, budget="macs", example=IMAGES)
    assert type(pruning.shrink(again.model, IMAGES)) is type(again.model)
    session = onnx_of(yolo)
    (found,) = session.run(None, {session.get_inputs()[0].name: IMAGES[:1].numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, yolo.model.eval()(IMAGES[:1])[0].numpy(), atol=2e-2, rtol=1e-3)


def onnx_of(yolo: Any) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(yolo.export(format="onnx", imgsz=96, simplify=False))


def worse_each_epoch(trainer: Any) -> Any:
    """Make a trainer for which the first epoch is the best, as where pruning harms."""

    class Worse(trainer):  # type: ignore[misc]
        def validate(self) -> Any:
            found, _ = super().validate()
            fitness = 1 / (1 + self.epoch)
            self.best_fitness = max(self.best_fitness or 0.0, fitness)
            return found, fitness

    return Worse


def test_a_dynamics_reaches_its_sparsity_and_a_resumed_training_goes_on_from_its_masks(
    libraries: Any, data: Path
) -> None:
    yolo, masked_trainer = yolo_of(libraries), libraries[1]
    plan = pruning.plan(yolo.model, "magnitude", sparsity=0.1)
    dynamics = pruning.dynamics.gradual(0.6, every=1)

    class Killed(Exception):
        pass

    def kill(trainer: Any) -> None:
        if trainer.epoch == 1:
            raise Killed

    yolo.add_callback("on_train_epoch_start", kill)
    own = worse_each_epoch(masked_trainer(yolo, plan.masks, dynamics))
    with pytest.raises(Killed):
        yolo.train(trainer=own, epochs=3, **options(data, "gradual"))
    alone = shutil.copy(yolo.trainer.last, data.parent / "last.pt")
    with pytest.raises(
        ValueError, match=r"masks\.npz is missing, without which masks would be lost; resume from a last"
    ):
        (copied := libraries[0](alone)).train(trainer=masked_trainer(copied), resume=True)
    resumed = libraries[0](yolo.trainer.last)
    with pytest.raises(ValueError, match=r"dynamics-0\.pt is of a training whose masks changed; pass the same `dyn"):
        resumed.train(trainer=masked_trainer(resumed), resume=True)
    resumed = libraries[0](yolo.trainer.last)
    own = masked_trainer(resumed, dynamics=pruning.dynamics.gradual(0.6, every=1))
    resumed.train(trainer=worse_each_epoch(own), resume=True)

    assert resumed.trainer.masks.sparsity() == pytest.approx(0.6, abs=1e-3)
    masks = MaskSet.load(resumed.trainer.wdir / "masks.npz")
    assert masks.sparsity() == pytest.approx(0.6, abs=1e-3), "that of best.pt, of whatever fitness"
    assert all(not resumed.model.get_parameter(name)[~mask].any() for name, mask in masks.items())
    with pytest.raises(ValueError, match=r" needs masks to start from; prune the network first, or pass `masks`\.$"):
        resumed.train(trainer=masked_trainer(resumed, dynamics=dynamics), epochs=1, **options(data, "again"))
    with pytest.warns(
        UserWarning, match=r"^60% of the network's weights are zeros, but it has no masks, so that all of"
    ):
        resumed.train(trainer=masked_trainer(resumed), epochs=1, **options(data, "again"))


def test_masks_of_the_best_epoch_are_known_after_a_resume(libraries: Any, data: Path) -> None:
    """RigL keeps its sparsity, so that the best epoch stays the first."""
    yolo, masked_trainer = yolo_of(libraries), libraries[1]
    plan, rigl = pruning.plan(yolo.model, "magnitude", sparsity=0.5), pruning.dynamics.rigl(every=1)
    yolo.add_callback("on_train_epoch_start", lambda trainer: 1 / (trainer.epoch < 1))
    own = worse_each_epoch(masked_trainer(yolo, plan.masks, rigl))
    with pytest.raises(ZeroDivisionError):
        yolo.train(trainer=own, epochs=3, nbs=8, **options(data, "rigl"))
    resumed = libraries[0](yolo.trainer.last)
    own = worse_each_epoch(masked_trainer(resumed, dynamics=pruning.dynamics.rigl(every=1)))
    resumed.train(trainer=own, resume=True)

    best = libraries[0](resumed.trainer.best).model
    masks = MaskSet.load(resumed.trainer.wdir / "masks.npz")
    assert all(not best.get_parameter(name)[~mask].any() for name, mask in masks.items())
    last = libraries[0](resumed.trainer.last).model
    assert any(last.get_parameter(name)[~mask].any() for name, mask in masks.items()), "whose masks moved on"


def test_what_is_no_yolo_is_refused(libraries: Any) -> None:
    for given in ("yolo11n.pt", yolo_of(libraries).model):
        with pytest.raises(TypeError, match=r"^`yolo` \(a .*\) must be ultralytics' YOLO or RTDETR; pass YOLO"):
            libraries[1](given)


def test_other_classes_a_fused_network_and_a_dynamics_without_masks_are_refused(libraries: Any, data: Path) -> None:
    yolo, masked_trainer = yolo_of(libraries, classes=5), libraries[1]
    with pytest.raises(ValueError, match=r"^`data` \(=.*\) has 2 classes, but the network predicts 5: train the dense"):
        yolo.train(trainer=masked_trainer(yolo), epochs=1, **options(data, "classes"))
    with pytest.raises(ValueError, match=r" needs masks to start from; prune the network first, or pass `masks`\.$"):
        masked_trainer(yolo, dynamics=pruning.dynamics.gradual(0.6))
    yolo.model.fuse()
    with pytest.raises(ValueError, match=r"^The network is fused: yolo\.val, predict and export fold"):
        masked_trainer(yolo)


def test_a_yolo_of_a_sweep_learns_its_boxes_and_runs_in_batches_of_any_size(libraries: Any) -> None:
    from orchestrator.deploy.formats.format import with_outputs_alone
    from orchestrator.deploy.formats.programs import program_of
    from orchestrator.workloads import model_building
    from orchestrator.workloads.data_sets.box_images import in_a_batch
    from orchestrator.workloads.data_sets.shapes import shapes
    from orchestrator.workloads.tasks.detection import Detection
    from orchestrator.workloads.tasks.detectors import form_of

    node = {"kind": "yolo", "input_shape": None, "classes": None, "architecture": "yolo11n"}
    drawn = shapes(size=64, train=8, val=0, test=0)["train"]
    batch, task = in_a_batch([drawn[number] for number in range(8)]), Detection()
    model = model_building.build(node, input_shape=(3, 64, 64), classes=4, seed=0)
    assert model.model[-1].nc == 3, "without label 0"
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(250):
        optimizer.zero_grad()
        task.loss(model.train(), batch).backward()
        optimizer.step()

    with torch.no_grad():
        found = task.measure(model.eval(), [batch]).figures
        loss, _ = form_of(model).measured(*batch)
    assert found["mAP_50"] > 0.1, "random weights find no box"
    assert float(loss) == pytest.approx(found["loss"])
    program = program_of(with_outputs_alone(model, batch[0]), batch[0]).module()
    for size in (1, 3, 8):
        torch.testing.assert_close(program(batch[0][:size]), model(batch[0][:size])[0])
