"""Detection: COCO's figures as faster-coco-eval gives them, by batches and processes; three forms of detectors."""

from __future__ import annotations

import math
import pickle
import random
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_trials import composed
from torch import Tensor, nn

from orchestrator.core.errors import OrchestratorError
from orchestrator.training.loop.evaluation import evaluate
from orchestrator.trial.rules import violations
from orchestrator.workloads.data_sets.box_images import BoxImages, Target, in_a_batch, target
from orchestrator.workloads.data_sets.named import Normalisation
from orchestrator.workloads.networks.centernet import centernet
from orchestrator.workloads.splits import LoaderSplit, Share
from orchestrator.workloads.tasks.batch import BatchError, labels_of
from orchestrator.workloads.tasks.detection import Detection, Detections
from orchestrator.workloads.tasks.detectors import form_of

coco: Any = pytest.importorskip("faster_coco_eval", reason="the extra `detection` is not installed")

CPU = torch.device("cpu")
Known = tuple[Target, Mapping[str, Tensor]]
"""Target of an image, and the detections that a detector gives there."""


class Answers(nn.Module):
    """Detector of torchvision's form whose answers are known; an image's first pixel is its number."""

    def __init__(self, answers: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.answers, self.weight = answers, nn.Parameter(torch.zeros(()))

    def forward(self, images: Sequence[Tensor], targets: Any = None) -> Any:
        if self.training:
            return {"boxes": self.weight + 1.0, "classes": self.weight + float(len(images))}
        return [self.answers[round(float(image[0, 0, 0]) * 255 * 255)] for image in images]


def numbered(known: Sequence[Known]) -> LoaderSplit:
    """Return a split whose images hold their numbers."""

    class Numbers(BoxImages):
        def __getitem__(self, index: int) -> tuple[Tensor, Target]:
            return torch.full((3, 8, 8), index / 255 / 255), self.targets[index]

    found = Numbers(lambda _: torch.zeros(0), [each for each, _ in known], Normalisation.of([0.0], [1.0], channels=3))
    return LoaderSplit(found, collate=in_a_batch)


def boxes_of(draws: random.Random, count: int, side: float) -> list[list[float]]:
    corners = [[draws.uniform(0, side) for _ in range(4)] for _ in range(count)]
    return [[min(a, c), min(b, d), max(a, c) + 1, max(b, d) + 1] for a, b, c, d in corners]


def random_set(seed: int) -> list[Known]:
    """Return images with boxes and detections: empty ones, crowds, equal scores, many classes, thousands of boxes."""
    draws = random.Random(seed)
    classes, side = draws.choice([1, 3, 12]), draws.choice([40.0, 400.0])
    most = draws.choice([3, 12, 150]) if seed % 20 else 700
    levels = draws.choice([2, 10, 10**6])
    known: list[Known] = []
    for number in range(draws.choice([1, 5, 12])):
        count = draws.choice([0, draws.randint(0, most)])
        boxes = boxes_of(draws, count, side)
        labels = [draws.randint(1, classes) for _ in boxes]
        others: dict[str, Any] = {}
        if draws.random() < 0.5:
            others["iscrowd"] = [int(draws.random() < 0.2) for _ in boxes]
        if draws.random() < 0.3:
            others["area"] = [float(draws.randint(1, 20_000)) for _ in boxes]
        near = [[each + draws.gauss(0, 3) for each in box] for box in boxes if draws.random() < 0.8]
        near = [[a, b, max(a, c), max(b, d)] for a, b, c, d in near] + boxes_of(draws, draws.randint(0, most), side)
        draws.shuffle(near)
        scores = [draws.randint(0, levels) / levels for _ in near]
        found = {
            "boxes": torch.tensor(near).reshape(-1, 4),
            "labels": torch.tensor([draws.randint(1, classes + 1) for _ in near], dtype=torch.long),
            "scores": torch.tensor(scores),
        }
        known.append((target(number, boxes, labels, **others), found))
    return known


def of_the_library(known: Sequence[Known]) -> list[float]:
    """Return mAP, mAP at 0.5 and recall from files in COCO's form, by faster-coco-eval alone; -1 without boxes."""
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, (truth, found) in enumerate(known):
        for place, (x, y, right, low) in enumerate(truth["boxes"].tolist()):
            crowd, area = truth.get("iscrowd"), truth.get("area")
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": int(truth["labels"][place]),
                    "bbox": [x, y, right - x, low - y],
                    "area": (right - x) * (low - y) if area is None else float(area[place]),
                    "iscrowd": 0 if crowd is None else int(crowd[place]),
                }
            )
        for place, (x, y, right, low) in enumerate(found["boxes"].tolist()):
            scored = {"category_id": int(found["labels"][place]), "score": float(found["scores"][place])}
            results.append({"image_id": number, "bbox": [x, y, right - x, low - y], **scored})
    images = [{"id": number, "width": 400, "height": 400} for number in range(len(known))]
    categories = [{"id": number, "name": str(number)} for number in range(14)]
    boxes = coco.COCO({"images": images, "annotations": annotations, "categories": categories})
    evaluation = coco.COCOeval_faster(boxes, boxes.loadRes(results), "bbox")
    evaluation.run()
    return [float(evaluation.stats[place]) for place in (0, 1, 8)]


def figures_of(figures: Mapping[str, float]) -> list[float]:
    return [-1 if math.isnan(figures[name]) else figures[name] for name in ("mAP", "mAP_50", "recall")]


SETS = [pytest.param(seed, marks=[] if seed % 20 == 1 else pytest.mark.slow) for seed in range(200)]


@pytest.mark.parametrize("seed", SETS)
def test_figures_are_those_of_the_library_by_any_batches_and_two_processes(seed: int) -> None:
    known = random_set(seed)
    split, model, task = numbered(known), Answers([found for _, found in known]).eval(), Detection()

    expected = of_the_library(known)
    for size in (1, 4, 64):
        assert figures_of(evaluate(model, split, task, device=CPU, batch_size=size).figures) == expected

    parts: list[Detections] = []
    for rank in range(2):
        read = split.batches(4, device=CPU, share=Share(rank, 2))
        own = Detections() + task.totals(model, (part.batch for part in read if part.counts))
        parts.append(pickle.loads(pickle.dumps(own)))
    assert figures_of(task.figures(sum(parts, Detections()))) == expected


def test_figures_by_hand() -> None:
    truth = target(0, [[0, 0, 10, 10], [20, 20, 30, 30]], [1, 1])
    found = {
        "boxes": torch.tensor([[0.0, 0, 10, 8], [50, 50, 60, 60], [20, 20, 30, 30]]),
        "labels": torch.tensor([1, 1, 1]),
        "scores": torch.tensor([0.9, 0.8, 0.7]),
    }
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "scores": torch.zeros(0)}
    known = [(truth, found), (target(1, [], []), nothing)]

    measured = evaluate(Answers([each for _, each in known]).eval(), numbered(known), Detection(), device=CPU)

    # 101 recalls. At IoU up to 0.8, which is the first one's: precision 1 to recall 0.5 (51 of them), then 2/3.
    # Above: the third detection alone is right, precision 1/3 to recall 0.5, then none.
    to_08, above = (51 + 50 * 2 / 3) / 101, 51 / 3 / 101
    assert measured.figures["mAP_50"] == pytest.approx(to_08)
    assert measured.figures["mAP"] == pytest.approx((7 * to_08 + 3 * above) / 10)
    assert measured.figures["recall"] == pytest.approx(0.7 * 1 + 0.3 * 0.5)
    assert measured.figures["loss"] == 3.0, "one of boxes and two of classes, for both images"
    assert measured.details == {"rates": [None, measured.figures["mAP"]], "images": 2, "constant": 0.0}


def test_detections_that_are_not_finite_are_left_out_and_no_box_is_nan() -> None:
    found = {"boxes": torch.full((1, 4), math.nan), "labels": torch.tensor([1]), "scores": torch.tensor([math.inf])}

    some = evaluate(
        Answers([found]).eval(), numbered([(target(0, [[0, 0, 1, 1]], [1]), found)]), Detection(), device=CPU
    )
    none = evaluate(Answers([found]).eval(), numbered([(target(0, [], []), found)]), Detection(), device=CPU)

    assert figures_of(some.figures) == [0, 0, 0]
    assert figures_of(none.figures) == [-1, -1, -1]


def shapes_like(images: int = 2) -> tuple[Tensor, list[Target]]:
    """Return a batch with boxes in its first image alone."""
    pixels = torch.rand(images, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return pixels, [
        target(0, [[8, 8, 24, 24], [30, 10, 60, 30]], [1, 3]),
        *(target(n, [], []) for n in range(1, images)),
    ]


def small_centernet() -> nn.Module:
    return centernet((3, 64, 64), classes=4, width=8)


def yolos() -> nn.Module:
    library: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = library.YolosConfig(**sizes, image_size=[64, 64], num_detection_tokens=5, num_labels=4)
    return library.YolosForObjectDetection(config)  # type: ignore[no-any-return]


def rt_detr() -> nn.Module:
    library: Any = pytest.importorskip("transformers")
    places = {"layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
    backbone = library.RTDetrResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, **places)
    widths = {"encoder_hidden_dim": 16, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 20}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 1, "num_denoising": 4}
    inputs = {"encoder_in_channels": [8, 16, 16], "decoder_in_channels": [16] * 3, "num_labels": 4}
    return library.RTDetrForObjectDetection(  # type: ignore[no-any-return]
        library.RTDetrConfig(backbone_config=backbone, **widths, **heads, **inputs)
    )


@pytest.mark.parametrize("build", [small_centernet, yolos, pytest.param(rt_detr, marks=pytest.mark.slow)])
def test_a_detector_of_each_form_gives_a_loss_and_boxes_also_without_objects(build: Any) -> None:
    torch.manual_seed(0)
    model, batch, task = build(), shapes_like(), Detection()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = task.loss(model.train(), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses[3:]) < losses[0]

    with torch.no_grad():
        loss, found = form_of(model.eval()).measured(*batch)
        assert loss > 0
        assert task.loss(model, (batch[0][1:], batch[1][1:])) >= 0, "a batch without objects"
    for each in found:
        assert each["boxes"].shape == (len(each["scores"]), 4)
        assert each["labels"].dtype == torch.long
        assert bool((each["scores"] >= 0).all())
    assert task.size(batch) == 2
    assert 0 <= task.measure(model, [batch]).figures["mAP"] <= 1


class UltralyticsStandIn:
    """Stands for modules of ultralytics: a detector that sees one box for each image, and its suppression."""

    def __init__(self, patch: pytest.MonkeyPatch, head: str = "Detect") -> None:
        class DetectionModel(nn.Module):
            end2end = False

            def __init__(self) -> None:
                super().__init__()
                self.model = nn.ModuleList([type(head, (nn.Identity,), {"nc": 2})()])

            def loss(self, batch: dict[str, Any], _preds: Any = None) -> tuple[Tensor, None]:
                self.batch = batch
                return batch["img"].new_tensor([3.0, 4.0, 5.0]), None

            def forward(self, x: Any) -> Any:
                return self.loss(x) if isinstance(x, dict) else (x.new_zeros(len(x), 6, 1), {"boxes": x})

        DetectionModel.__module__ = "ultralytics.nn.tasks"
        self.detector, self.options = DetectionModel, dict[str, Any]()
        for name in ("ultralytics", "ultralytics.utils"):
            patch.setitem(sys.modules, name, ModuleType(name))
        parts = {"ultralytics.utils.nms": self.non_max_suppression, "ultralytics.cfg": lambda: SimpleNamespace(box=7.5)}
        for name, function in parts.items():
            made = ModuleType(name)
            made.non_max_suppression = made.get_cfg = function  # type: ignore[attr-defined]
            patch.setitem(sys.modules, name, made)

    def non_max_suppression(self, rows: Tensor, **options: Any) -> list[Tensor]:
        self.options = options
        return [torch.tensor([[1.0, 2.0, 5.0, 6.0, 0.25, 1.0]]) for _ in rows]


def test_a_yolo_gets_its_own_batches_and_gives_the_labels_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    library = UltralyticsStandIn(monkeypatch)
    model = library.detector()
    truth = [target(0, [[2.0, 0.0, 6.0, 4.0]], [1]), target(1, [], []), target(2, [[0.0, 0.0, 8.0, 16.0]] * 2, [2, 1])]
    batch = torch.zeros(3, 3, 16, 8), truth

    assert float(Detection().loss(model.train(), batch)) == 4.0, "12 for three images"
    assert model.batch["batch_idx"].tolist() == [0, 2, 2]
    assert model.batch["cls"].tolist() == [[0.0], [1.0], [0.0]]
    assert model.batch["bboxes"].tolist() == [[0.5, 0.125, 0.5, 0.25], *[[0.5, 0.5, 1.0, 1.0]] * 2]
    assert model.args.box == 7.5, "ultralytics' own weights of the parts of the loss"
    loss, found = form_of(model.eval()).measured(*batch)
    assert float(loss) == 4.0
    assert [each["labels"].tolist() for each in found] == [[2]] * 3
    assert found[0]["boxes"].tolist() == [[1.0, 2.0, 5.0, 6.0]]
    assert library.options["max_time_img"] == math.inf, "no detection depends on the time"
    for wrong in (0, 3):
        with pytest.raises(
            BatchError, match=f"a YOLO of 2 classes needs labels from 1 to 2, .* from {wrong} to {wrong}"
        ):
            Detection().loss(model, (batch[0][:1], [target(0, [[0.0, 0.0, 1.0, 1.0]], [wrong])]))


def test_yolos_with_other_losses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    detector: Any = UltralyticsStandIn(monkeypatch, "Segment").detector
    for other in (detector, type("SegmentationModel", (detector,), {})):
        said = f"needs a detector, not {other.__name__} with the head Segment: .* a YOLO of ultralytics for boxes"
        with pytest.raises(OrchestratorError, match=said):
            form_of(other())


def test_losses_of_a_detector_in_evaluation_leave_its_statistics_and_modes() -> None:
    class Normed(Answers):
        def __init__(self) -> None:
            super().__init__([])
            self.norm = nn.BatchNorm2d(3)

        def forward(self, images: Sequence[Tensor], targets: Any = None) -> Any:
            assert not self.norm.training
            return {"loss": self.norm(torch.stack([*images])).mean()}

    model = Normed().eval()
    before = model.norm.running_mean.clone()  # type: ignore[union-attr]
    Detection().loss(model, shapes_like())

    assert torch.equal(model.norm.running_mean, before)  # type: ignore[arg-type]
    assert not any(module.training for module in model.modules())


def test_what_is_no_detector_and_no_batch_of_detection() -> None:
    with pytest.raises(OrchestratorError, match=r"`task` \(=detection\) needs a detector, not Linear: a network"):
        Detection().loss(nn.Linear(1, 1), shapes_like())
    for batch in ((torch.zeros(2, 3, 8, 8), torch.zeros(2)), (torch.zeros(1), [{"boxes": torch.zeros(0)}])):
        with pytest.raises(BatchError, match=r"`task` \(=detection\) needs batches \(images, targets\)"):
            Detection().size(batch)
    with pytest.raises(BatchError, match=r" has none; return .* For images with boxes pass task=detection\.$"):
        labels_of(shapes_like())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("data=shapes",),
            r"`task` \(=classification\) needs a label for each example, but `data` \(=shapes\) has one for each box; "
            "pass task=detection, or other data",
        ),
        (("task=detection", "data=digits"), r"label for each box, .* one for each example; pass task=classification"),
        (
            ("task=detection", "data=boxes", "data.train=birds", "data.test=birds/"),
            r"`data.train` and `data.test` are both birds, but the splits must hold different images",
        ),
    ],
)
def test_data_of_another_task_and_splits_of_the_same_images_are_refused_in_the_plan(
    settings: tuple[str, ...], said: str
) -> None:
    found = [*violations(composed("model=centernet", *settings))]

    assert len(found) == 1
    assert re.search(said, found[0])


def test_a_column_of_labels_on_the_hub_may_hold_those_of_any_task() -> None:
    assert not [*violations(composed("model=cnn", "task=segmentation", "data=huggingface"))]
