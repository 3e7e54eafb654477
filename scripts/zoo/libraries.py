"""Networks of torchvision, timm, ultralytics and transformers with random weights, and inputs for them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from scripts.zoo import plain_operators as plain_operators  # before torchvision

CLASSES = 10
SIZES = (64, 96, 128, 160, 224, 299, 320)
"""Heights and widths of images, tried in this order."""
LIBRARIES = ("torchvision", "timm", "ultralytics", "transformers")
DETECTORS: dict[str, dict[str, Any]] = {
    "rcnn": {"rpn_post_nms_top_n_test": 100},
    "retinanet": {"score_thresh": 0.001},
    "fcos": {"score_thresh": 0.001},
}
"""Word in the name of a detector of torchvision that scales its images to 800 pixels -> options beside smaller images:
fewer boxes, and boxes of random weights, whose scores are low.
"""
NEEDED = {
    "torchvision": ("torchvision",),
    "timm": ("torchvision", "timm"),
    "ultralytics": ("torchvision", "ultralytics"),
    "transformers": ("transformers",),
}
"""Library -> packages that its list needs; install them with `--no-deps`, since torchvision pins another torch."""


@dataclass(frozen=True)
class Built:
    """Network and its inputs.

    Args:
        model: network in evaluation mode.
        inputs: (batch size, seed) -> inputs of one call.
        heads: names of modules that make the outputs, which Torch-Pruning is told to leave alone.
        size: what the inputs are, in words.
    """

    model: nn.Module
    inputs: Callable[[int, int], Any]
    heads: tuple[str, ...]
    size: str


def missing(library: str) -> list[str]:
    """Return the packages that a library's list needs and that are not installed."""
    return [name for name in NEEDED[library] if importlib.util.find_spec(name) is None]


def versions() -> dict[str, str]:
    """Return the releases of all packages that decide results."""
    names = ("torch", *LIBRARIES, "torch_pruning")
    return {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}


def names_of(library: str, cache: Path) -> list[str]:
    """Return the networks of a library, each as `library/name`.

    Args:
        library: one of `LIBRARIES`.
        cache: folder that remembers which network of a module of timm is the smallest.
    """
    found = {"torchvision": _torchvision, "timm": lambda: _timm(cache), "ultralytics": _ultralytics}.get(library)
    if found is None:
        from scripts.zoo.small_transformers import names

        return [f"{library}/{name}" for name in names()]
    return [f"{library}/{name}" for name in found()]


def build(name: str) -> Built:
    """Build a network by its name, with random weights and statistics."""
    library, _, own = name.partition("/")
    torch.manual_seed(0)
    if library == "transformers":
        from scripts.zoo.small_transformers import build_small

        made, inputs, size = build_small(own)
        built = Built(made, inputs, (), size)
    else:
        builders = {"torchvision": _build_torchvision, "timm": _build_timm, "ultralytics": _build_ultralytics}
        built = builders[library](own)
    randomise(built.model)
    calibrate(built)
    return built


def _torchvision() -> list[str]:
    models: Any = importlib.import_module("torchvision").models
    return [str(name) for name in models.list_models()]


def _timm(cache: Path) -> list[str]:
    """Return the network with the fewest parameters of each module, which takes some minutes to find once."""
    timm: Any = importlib.import_module("timm")
    file = cache / f"timm-{timm.__version__}.json"
    if not file.exists():
        found: dict[str, tuple[int, str]] = {}
        for module in timm.list_modules():
            for name in timm.list_models(module=module):
                with suppress(Exception), torch.device("meta"):  # a network that needs values to be built is left out
                    size = sum(each.numel() for each in timm.create_model(name, num_classes=CLASSES).parameters())
                    found[module] = min(found.get(module, (size, name)), (size, name))
            found.setdefault(module, (0, next(iter(timm.list_models(module=module)), "")))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({module: name for module, (_, name) in found.items() if name}, indent=1))
    return [f"{module}:{name}" for module, name in json.loads(file.read_text()).items()]


OWN_SIZES = ("yolov10n", "yolov9t", "yolov9c-seg", "yolov3-tiny", "rtdetr-l", "rtdetr-resnet50")
"""Networks of ultralytics whose file is of one size."""


def _ultralytics() -> list[str]:
    """Return the networks for detection, segmentation, poses, oriented boxes and classes, the smallest of each."""
    spec = importlib.util.find_spec("ultralytics")
    assert spec is not None
    assert spec.origin is not None
    found = []
    for file in sorted((Path(spec.origin).parent / "cfg" / "models").glob("*/*.yaml")):
        stem, text = file.stem, file.read_text()
        if any(word in stem for word in ("world", "yoloe", "depth", "sem")):
            continue  # they read text, or are for other tasks
        if stem in OWN_SIZES:
            found.append(stem)
        elif "\nscales:" in text and "n: [" in text and not stem.startswith("yolov10"):
            family, dash, task = stem.partition("-")
            found.append(f"{family}n{dash}{task}")
    return list(dict.fromkeys(found))


def _images(size: int, *, channels: int = 3, frames: int = 0) -> Callable[[int, int], Tensor]:
    def inputs(batch: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, channels, *[frames] * bool(frames), size, size)
        return torch.randn(shape, generator=generator)

    return inputs


def _lists(size: int) -> Callable[[int, int], Any]:
    """Return inputs of torchvision's detectors: a list of images between 0 and 1."""

    def inputs(batch: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return ([torch.rand(3, size, size, generator=generator) for _ in range(batch)],)

    return inputs


def _pairs(size: int) -> Callable[[int, int], Any]:
    """Return inputs of networks for optical flow: two images."""

    def inputs(batch: int, seed: int) -> Any:
        return (_images(size)(batch, seed), _images(size)(batch, seed + 1000))

    return inputs


def called(model: nn.Module, given: Any) -> Any:
    """Call a network with an example."""
    if isinstance(given, dict):
        return model(**given)
    return model(*given) if isinstance(given, tuple) else model(given)


def _that_run(model: nn.Module, options: Iterator[tuple[str, Callable[[int, int], Any]]]) -> tuple[str, Any]:
    """Return the first inputs with which a network runs.

    Raises:
        RuntimeError: it runs with none.
    """
    last: Exception | None = None
    for size, inputs in options:
        try:
            with torch.no_grad():
                called(model, inputs(2, 0))
        except Exception as error:  # a forward may raise anything
            last = error
            continue
        return size, inputs
    raise RuntimeError(f"runs with none of its inputs ({last})") from last


def _build_torchvision(name: str) -> Built:
    models: Any = importlib.import_module("torchvision").models
    options: dict[str, Any] = {"weights": None, "num_classes": CLASSES}
    kind = str(models.get_model_builder(name).__module__)
    if "raft" in name:
        del options["num_classes"]
    if ".detection." in kind or ".segmentation." in kind:
        options["weights_backbone"] = None
    for word, own in DETECTORS.items():
        if word in name:
            options |= {"min_size": SIZES[0], "max_size": SIZES[0], **own}
    sizes: tuple[int, ...] = SIZES
    for small in ("vit_", "maxvit"):
        if name.startswith(small):
            sizes = (224,)
    model = models.get_model(name, **options).eval()
    heads: tuple[str, ...] = ()
    if ".detection." in kind:
        heads = tuple(each for each in ("head", "rpn", "roi_heads") if hasattr(model, each))
        tried = ((f"images of {size} x {size} pixels in a list", _lists(size)) for size in sizes)
    elif ".video." in kind:
        tried = ((f"16 frames of {s} x {s} pixels", _images(s, frames=16)) for s in (64, 112, 224))
    elif "raft" in name:
        tried = ((f"two images of {size} x {size} pixels", _pairs(size)) for size in (128, 256))
    else:
        tried = ((f"{size} x {size} pixels", _images(size)) for size in sizes)
    size, inputs = _that_run(model, tried)
    return Built(model, inputs, heads, size)


def _build_timm(name: str) -> Built:
    timm: Any = importlib.import_module("timm")
    model = timm.create_model(name.partition(":")[2], num_classes=CLASSES).eval()
    channels, own, _ = model.default_cfg["input_size"]
    sizes = (own,) if model.default_cfg.get("fixed_input_size") else (*[s for s in SIZES if s < own], own)
    size, inputs = _that_run(model, ((f"{s} x {s} pixels", _images(s, channels=channels)) for s in sizes))
    return Built(model, inputs, (), size)


def _build_ultralytics(name: str) -> Built:
    ultralytics: Any = importlib.import_module("ultralytics")
    kind = ultralytics.RTDETR if "rtdetr" in name else ultralytics.YOLO
    model = kind(f"{name}.yaml").model.eval()
    size, inputs = _that_run(model, ((f"{s} x {s} pixels", _images(s)) for s in SIZES))
    last = f"model.{len(model.model) - 1}"
    return Built(model, inputs, () if "-cls" in name else (last,), size)


def randomise(model: nn.Module) -> None:
    """Set constant parameters, such as scales of 1, shifts of 0 and zeros that end a branch, to random values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            first = parameter.flatten()[0]
            if parameter.numel() == 1 or not bool((parameter != first).any()):
                parameter.copy_(first + 0.2 * (torch.rand(parameter.shape, generator=generator) - 0.5))


def calibrate(built: Built) -> None:
    """Set the statistics of batch normalisations to those of random inputs, as after training."""
    norms = [each for each in built.model.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
    momenta = {norm: norm.momentum for norm in norms}
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    with suppress(ValueError), torch.no_grad():  # one pixel of one image has no variance
        for seed in (11, 12):
            called(built.model, built.inputs(3, seed))
    for norm, momentum in momenta.items():
        norm.momentum = momentum
        norm.eval()
        if norm.running_var is not None:
            norm.running_var.clamp_(min=1e-3)
