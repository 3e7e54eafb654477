"""Networks from transformers, timm and ultralytics, with random weights; `model.weights` loads others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.catalogue.models import PLAIN_NAME, TIMM_SIZES, only
from orchestrator.config.sources import file_digest
from orchestrator.core.errors import ModelError
from orchestrator.planning.file_places import GGUF
from orchestrator.workloads.networks.gguf_files import read_gguf
from pruning.catalogue.rows import Rule


def huggingface(
    input_shape: Sequence[int],
    classes: int,
    path: str,
    architecture: str = "AutoModelForCausalLM",
    overrides: Mapping[str, Any] | None = None,
    content: str | None = None,
) -> nn.Module:
    """Return the network that the config.json in a directory describes, built by one of transformers' Auto classes.

    Args:
        input_shape: shape of one example.
        classes: number of classes or tokens; a classifier gets one output per class.
        path: the directory, of which only config.json is read, or a .gguf file.
        architecture: the Auto class, such as AutoModelForImageClassification.
        overrides: other values for keys of that configuration.
        content: SHA-256 that config.json or the .gguf file must have; None accepts any.

    Raises:
        ModelError: transformers cannot build the network, or its vocabulary is smaller than that of the data.
    """
    import transformers

    file = Path(path) if path.endswith(GGUF) else Path(path, "config.json")
    if content is not None and file_digest(str(file)) != content:
        raise ModelError(
            f"`model.path` (={path}) must have the {'content' if path.endswith(GGUF) else 'config.json'} that the "
            "sweep was planned with, but it has changed or this node has another; run the same command again."
        )
    outputs = {} if architecture.endswith(("LM", "AutoModel")) else {"num_labels": classes}
    try:
        if path.endswith(GGUF):
            found = {**read_gguf(path, content, f"`model.path` (={path})").config, **outputs, **(overrides or {})}
            config = transformers.AutoConfig.for_model(**found)
        else:
            _refuse_other_files(path, [json.loads(file.read_bytes()), overrides or {}])
            config = transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, **outputs, **(overrides or {})
            )
        build = getattr(transformers, architecture)
        if type(config) not in build._model_mapping:
            raise ModelError(_other_classes(path, architecture, config))
        model: nn.Module = build.from_config(config, trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:  # the library raises many types
        raise ModelError(_refusal("path", path, f"{architecture} of transformers", error)) from error
    vocabulary = getattr(config, "vocab_size", None)
    if len(input_shape) == 1 and isinstance(vocabulary, int) and vocabulary < classes:
        raise ModelError(
            f"`model.path` (={path}) has a vocabulary of {vocabulary}, but the data have {classes} tokens; pass "
            f"+model.overrides.vocab_size={classes}, or the tokenizer that belongs to the model."
        )
    return model.float()


def _other_classes(path: str, architecture: str, config: Any) -> str:
    """Return why an Auto class has no network for a configuration, and which have."""
    import transformers

    named = {name: getattr(transformers, name) for name in dir(transformers) if name.startswith("AutoModelFor")}
    found = [name for name, each in named.items() if type(config) in each._model_mapping]
    return (
        f"`model.architecture` (={architecture}) has no network of the type {config.model_type!r}, which `model.path` "
        f"(={path}) describes; pass model.architecture=NAME with one of {', '.join([*found, 'AutoModel'])}."
    )


def _refuse_other_files(path: str, values: Any) -> None:
    """Raise ModelError if a configuration names code or files that transformers would load to build the network."""
    pending = [values]
    while pending:
        value = pending.pop()
        pending += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for key, each in value.items() if isinstance(value, Mapping) else ():
            allowed = _ALLOWED.get(str(key).lstrip("_"))
            if each and allowed and not allowed.holds(each):
                raise ModelError(
                    f"`model.path` (={path}) or `model.overrides` has the key {key!r} (={each!r}), which must "
                    f"{allowed.text}: transformers would load code or files to build this network; remove the key, or "
                    "build the network in a function of your own, named by `model._target_`."
                )


_NEVER = Rule(lambda _: False, "be left out")
_NO_HUB = Rule(lambda value: "/" not in str(value), "not be a name on the hub")
_TIMM = only(TIMM_SIZES)
_ALLOWED: Mapping[str, Rule] = {
    "trust_remote_code": _NEVER,
    "configuration_files": _NEVER,
    "use_pretrained_backbone": _NEVER,
    "architecture": PLAIN_NAME,
    "backbone": PLAIN_NAME,
    "model_args": _TIMM,
    "backbone_kwargs": _TIMM,
    "attn_implementation": _NO_HUB,
    "attn_implementation_internal": _NO_HUB,
    "experts_implementation": _NO_HUB,
    "experts_implementation_internal": _NO_HUB,
}
"""Key at any depth of a config.json -> the rule for its value, for keys by which transformers finds code or files."""


def smollm2(
    input_shape: Sequence[int],
    classes: int,
    path: str,
    overrides: Mapping[str, Any] | None = None,
    content: str | None = None,
) -> nn.Module:
    """Return SmolLM2-135M; the arguments are those of `huggingface`."""
    return huggingface(input_shape, classes, path, overrides=overrides, content=content)


def timm(
    input_shape: Sequence[int],
    classes: int,
    architecture: str,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return a timm network for the images and classes of the data.

    Args:
        input_shape: [channels, height, width].
        classes: number of outputs.
        architecture: name in timm, such as resnet18 or vit_tiny_patch16_224.
        options: further arguments of timm.create_model, such as img_size.

    Raises:
        ModelError: timm cannot be imported, it has no such network, or the data are not images.
    """
    try:
        from timm import create_model
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise ModelError(_torchvision_refusal(error)) from error
        raise ModelError("`model.kind` (=timm) needs timm, which is not installed here; pip install timm.") from error
    except (
        ImportError,
        RuntimeError,
    ) as error:  # from torchvision, which loads only with its own torch release
        raise ModelError(_torchvision_refusal(error)) from error
    if len(input_shape) != 3:
        raise ModelError(
            f"`model.input_shape` (={list(input_shape)}) must be [channels, height, width] for timm; choose another "
            "model, or data of images."
        )
    try:
        model: nn.Module = create_model(
            architecture, pretrained=False, in_chans=input_shape[0], num_classes=classes, **(options or {})
        )
    except Exception as error:  # the library raises many types
        raise ModelError(_refusal("architecture", architecture, "timm.create_model", error)) from error
    return model


def yolo(input_shape: Sequence[int], classes: int, architecture: str) -> nn.Module:
    """Return a detector of ultralytics for the images and labels of the data.

    Args:
        input_shape: [channels, height, width], with sides that are multiples of the detector's largest stride.
        classes: number of labels, with label 0, which YOLOs do not have.
        architecture: name in ultralytics, such as yolo11n.

    Raises:
        ModelError: ultralytics cannot be imported or has no such detector, or the images have other sides.
    """
    try:
        from ultralytics.nn.tasks import DetectionModel, yaml_model_load
    except ImportError as error:
        raise ModelError(
            f"`model.kind` (=yolo) needs ultralytics ({error}); pip install ultralytics. Its license is "
            "AGPL-3.0, so no extra of this project installs it."
        ) from error
    try:
        described = yaml_model_load(f"{architecture}.yaml")
        model: Any = DetectionModel({**described, "nc": classes - 1}, input_shape[0], verbose=False)
        model.model[-1].dynamic = True  # else it keeps anchors of the last shape, and a trace holds for no other batch
    except Exception as error:  # the library raises many types
        raise ModelError(_refusal("architecture", architecture, "ultralytics", error)) from error
    stride = int(model.stride.max())
    if len(input_shape) != 3 or any(side % stride for side in input_shape[1:]):
        raise ModelError(
            f"`model.input_shape` (={list(input_shape)}) must be [channels, height, width] with sides that are "
            f"multiples of {stride} for {architecture}; resize the images."
        )
    return model  # type: ignore[no-any-return]


def _torchvision_refusal(error: Exception) -> str:
    return (
        f"`model.kind` (=timm) needs the torchvision release for torch {torch.__version__}, because timm imports it "
        f"({type(error).__name__}: {str(error).rstrip('.')}); install that release of torchvision."
    )


def _refusal(key: str, value: str, builder: str, error: Exception) -> str:
    said = " ".join(str(error).split()).rstrip(".")
    return (
        f"`model.{key}` (={value}) cannot be built by {builder}: {type(error).__name__}: {said}; check `model.{key}`."
    )
