"""Hold `pruning.shrink` to Torch-Pruning on networks of timm, with random weights.

    python scripts/benchmarks/shrink_architectures.py [NAME ...] [--amount 0.5]

Torch-Pruning names the groups of channels that go together; half of each are set to zero, and a row says how many of
the parameters that it removes for them `shrink` removes, and how far outputs are apart. Groups that a LayerNorm or a
GroupNorm counts in its statistics are left alone: no smaller network computes what the masked one does. Exits with 1
where less than 95% goes, or the network does not come back smaller. Needs timm and torch-pruning, installed by pip with
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
    """Return timm, with something in torchvision's place where it is not installed, and Torch-Pruning."""
    if importlib.util.find_spec("torchvision") is None:
        for name in VISION:
            sys.modules[f"torchvision{name}"] = MagicMock(FrozenBatchNorm2d=nn.BatchNorm2d)
    return importlib.import_module("timm"), importlib.import_module("torch_pruning")


def randomise(model: nn.Module) -> None:
    """Give BatchNorm statistics, scales and shifts, as training does."""
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
    """Yield Torch-Pruning's groups of channels that no statistics count, so much of each."""
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
    """Set all members of a group to zero, which Torch-Pruning would cut away."""
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
    """Print a row, and return whether it holds."""
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
    parser.add_argument("names", nargs="*", default=ARCHITECTURES, help="of networks in timm")
    parser.add_argument("--amount", type=float, default=0.5, help="of each group that goes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    timm, oracle = load()
    rows = [compared(timm, oracle, name, given.amount) for name in given.names]
    sys.exit(not all(rows))


if __name__ == "__main__":
    main()
