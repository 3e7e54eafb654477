"""Compare `pruning.shrink` with Torch-Pruning on networks of timm with random weights.

    python scripts/benchmarks/shrink_architectures.py [NAME ...] [--amount 0.5]

Torch-Pruning finds the groups of dependent channels. Half of each group is set to zero. A row shows the share of the
parameters removed by Torch-Pruning that `shrink` removes, too, and the difference of outputs. Groups in the statistics
of a LayerNorm or a GroupNorm are left out: no smaller network computes the same outputs. Exit status 1 if less than 95%
is removed, or the network is not smaller. Needs timm and torch-pruning, installed by pip with
`--no-deps -c constraints.txt`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import pruning

ARCHITECTURES = (
    *("resnet18", "resnet50", "regnety_002", "mobilenetv3_small_100", "efficientnet_b0", "densenet121", "vgg11_bn"),
    *("convnext_atto", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "repvgg_a0", "dla34"),
    *("ghostnet_100", "mobileone_s0", "poolformer_s12"),
)
CLASSES, SHARE = 10, 0.95
VISION = (
    *("", ".datasets", ".models", ".models.feature_extraction", ".ops", ".ops.misc"),
    *(".transforms", ".transforms.functional"),
)


def load() -> tuple[Any, Any]:
    """Return timm and Torch-Pruning, with a substitute for torchvision if that is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        for name in VISION:
            sys.modules[f"torchvision{name}"] = MagicMock(FrozenBatchNorm2d=nn.BatchNorm2d)
    return importlib.import_module("timm"), importlib.import_module("torch_pruning")


def randomise(model: nn.Module) -> None:
    """Set statistics, scales and shifts of BatchNorm to random values, like those after training."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.1)


def groups(oracle: Any, model: nn.Module, example: torch.Tensor, amount: float) -> Iterator[Any]:
    """Yield Torch-Pruning's groups without LayerNorm and GroupNorm, with a fraction of each group's channels."""
    heads = {
        module.qkv: module.num_heads
        for module in model.modules()
        if isinstance(getattr(module, "qkv", None), nn.Linear) and hasattr(module, "num_heads")
    }
    spared = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == CLASSES]
    spared += [module for name, module in model.named_modules() if name.endswith("mlp_tokens")]  # it fails on them
    pruner = oracle.pruner.MagnitudePruner(
        model,
        example,
        importance=oracle.importance.MagnitudeImportance(p=2),
        pruning_ratio=amount,
        head_pruning_ratio=amount,
        ignored_layers=spared,
        num_heads=heads,
        prune_num_heads=True,
        prune_head_dims=False,
    )
    for group in pruner.step(interactive=True):
        modules = [dependency.target.module for dependency, _ in group]
        if not any(isinstance(each, nn.LayerNorm | nn.GroupNorm) for each in modules):
            yield group


def empty(group: Any) -> None:
    """Set all channels of a group to zero that Torch-Pruning would remove."""
    with torch.no_grad():
        for dependency, entries in group:
            module, what = dependency.target.module, dependency.handler.__name__
            if isinstance(module, _BatchNorm):
                module.weight[entries] = 0
                module.bias[entries] = 0
            elif not isinstance(module, nn.Conv2d | nn.Linear):
                continue
            elif "out_channels" in what:
                module.weight[entries] = 0
                if module.bias is not None:
                    module.bias[entries] = 0
            elif getattr(module, "groups", 1) == 1:
                module.weight[:, entries] = 0


def compared(timm: Any, oracle: Any, name: str, amount: float) -> bool:
    """Print a row; return whether it meets the bar."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES).eval()
    randomise(model)
    size = model.default_cfg["input_size"][-1] if model.default_cfg.get("fixed_input_size") else 64
    example = torch.randn(2, 3, size, size)
    masked, cut = copy.deepcopy(model), copy.deepcopy(model)
    for group in groups(oracle, masked, example, amount):
        empty(group)
    for group in groups(oracle, cut, example, amount):
        group.prune()
    begin = time.process_time()
    smaller = pruning.shrink(masked, example)
    seconds = time.process_time() - begin
    shrunk: Any = smaller.shrunk
    theirs = shrunk.before - sum(each.numel() for each in cut.parameters())
    share = (shrunk.before - shrunk.after) / theirs
    errors = " ".join(f"{shrunk.error.get(dtype, float('nan')):8.1e}" for dtype in ("float32", "float64"))
    print(
        f"{name:<24} {shrunk.before / 1e6:8.3f}M -> {shrunk.after / 1e6:8.3f}M  share {share:.4f}  {errors}  "
        f"{shrunk.form:<9} {seconds:5.1f} s {'' if share >= SHARE else shrunk.tried or shrunk.kept}",
        flush=True,
    )
    return bool(share >= SHARE and shrunk.form != "unchanged")


def main() -> None:
    """Print a row for each network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=ARCHITECTURES, help="names of networks in timm")
    parser.add_argument("--amount", type=float, default=0.5, help="fraction of each group to remove")
    given = parser.parse_args()
    torch.set_num_threads(1)
    timm, oracle = load()
    rows = [compared(timm, oracle, name, given.amount) for name in given.names]
    sys.exit(not all(rows))


if __name__ == "__main__":
    main()
