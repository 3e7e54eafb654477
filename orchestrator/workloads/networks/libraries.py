"""Networks that transformers and timm build, with random weights: `model.weights` gives them others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.config.sources import file_digest
from orchestrator.core.errors import ModelError


def huggingface(
    input_shape: Sequence[int],
    classes: int,
    path: str,
    architecture: str = "AutoModelForCausalLM",
    overrides: Mapping[str, Any] | None = None,
    content: str | None = None,
) -> nn.Module:
    """Return the network that the config.json in a directory describes, by one of transformers' Auto classes.

    Args:
        input_shape: of one example.
        classes: number of classes or tokens; a classifier gets so many outputs.
        path: the directory; of the files in it config.json alone is read.
        architecture: the Auto class, such as AutoModelForImageClassification.
        overrides: keys of that configuration that are to have other values.
        content: SHA-256 that config.json must have; None takes it as it is.

    Raises:
        ModelError: transformers does not build it, or its vocabulary is smaller than that of the data.
    """
    import transformers

    file = Path(path, "config.json")
    if content is not None and file_digest(str(file)) != content:
        raise ModelError(
            f"`model.path` (={path}) is not what the sweep was planned with: its config.json was changed since, or "
            "this node has another; run the same command again."
        )
    outputs = {} if architecture.endswith(("LM", "AutoModel")) else {"num_labels": classes}
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, **outputs, **(overrides or {})
        )
        build = getattr(transformers, architecture)
        model: nn.Module = build.from_config(config, trust_remote_code=False)
    except Exception as error:  # of many kinds
        raise ModelError(_refusal("path", path, f"{architecture} of transformers", error)) from error
    vocabulary = getattr(config, "vocab_size", None)
    if len(input_shape) == 1 and isinstance(vocabulary, int) and vocabulary < classes:
        raise ModelError(
            f"`model.path` (={path}) has a vocabulary of {vocabulary}, and the data have {classes} tokens; pass "
            f"+model.overrides.vocab_size={classes}, or the tokenizer that belongs to it."
        )
    return model.float()


def timm(
    input_shape: Sequence[int],
    classes: int,
    architecture: str,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return a network that timm names, for the images and classes of the data.

    Args:
        input_shape: [channels, height, width].
        classes: number of outputs.
        architecture: such as resnet18 or vit_tiny_patch16_224.
        options: further arguments of timm.create_model, such as img_size.

    Raises:
        ModelError: timm cannot be imported, there is no such network, or the data are no images.
    """
    try:
        from timm import create_model
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise ModelError(_of_vision(error)) from error
        raise ModelError("`model.kind` (=timm) needs timm, which is not installed here; pip install timm.") from error
    except (ImportError, RuntimeError) as error:  # it imports torchvision, which loads beside its own torch alone
        raise ModelError(_of_vision(error)) from error
    if len(input_shape) != 3:
        raise ModelError(
            f"`model.input_shape` (={list(input_shape)}) must be [channels, height, width] for timm; choose another "
            "model, or data of images."
        )
    try:
        model: nn.Module = create_model(
            architecture, pretrained=False, in_chans=input_shape[0], num_classes=classes, **(options or {})
        )
    except Exception as error:  # of many kinds
        raise ModelError(_refusal("architecture", architecture, "timm.create_model", error)) from error
    return model


def _of_vision(error: Exception) -> str:
    return (
        f"`model.kind` (=timm) needs a torchvision that belongs to this torch {torch.__version__}, as timm imports it "
        f"({type(error).__name__}: {str(error).rstrip('.')}); install that release of torchvision."
    )


def _refusal(key: str, value: str, builder: str, error: Exception) -> str:
    said = " ".join(str(error).split()).rstrip(".")
    return f"`model.{key}` (={value}) cannot be built by {builder}: {type(error).__name__}: {said}; check it."
