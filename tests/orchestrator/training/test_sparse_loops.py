"""One training with changing masks, by the built-in loop, a function of the user's own, plain PyTorch and Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import load
from sampling import sampled
from small_trials import composed, planned, train
from test_own_loop import resumable
from test_sparse_training import METHODS, SHORT, bits, chain, interrupted, masks_of, pruned
from torch import Tensor, nn

import pruning
from orchestrator.core.seeding import derive
from orchestrator.core.specs import Plan
from orchestrator.store.store import Store
from orchestrator.workloads import data_loading, model_building
from orchestrator.workloads.tasks.classification import Classification
from pruning import MaskSet
from pruning.dynamics import Dynamics

CHANGING = ("set", "rigl", "gradual", "sr_ste", "movement")
A_FEW = [name if name in ("rigl", "movement") else pytest.param(name, marks=pytest.mark.slow) for name in CHANGING]
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "set": {"every": 4},
    "rigl": {"every": 4},
    "gradual": {"sparsity": 0.9, "every": 4, "begin": 0.2},
    "sr_ste": {},
    "movement": {"sparsity": 0.9, "every": 4},
}


def asked(method: str, *overrides: str) -> Plan:
    return planned(
        composed(*SHORT, "train.select=last", "train.scheduler=null", f"method={method}", *METHODS[method], *overrides)
    )


def trained(method: str, store: Store) -> tuple[MaskSet, Mapping[str, Tensor]]:
    """Return the masks and the weights that a trial ends with."""
    record = pruned(asked(method), store)
    return masks_of(record, store), load(store.read(record.key, "weights.safetensors"))


class Beginning:
    """Network, masks, optimizer settings, batches and draws with which the built-in loop begins."""

    def __init__(self, method: str, store: Store) -> None:
        plan = asked(method)
        start, last = plan.trials[0].stages
        records = train(plan, store)
        fields = plan.stages[start].fields
        data = data_loading.load(fields["data"])
        self.network = model_building.build(fields["model"], input_shape=data.input_shape, classes=10, seed=0)
        self.network.load_state_dict(load(store.read(start, "weights.safetensors")))
        pruned_names = records[last].tensor_sizes
        static = planned(composed(*SHORT, "method=static"))
        first = train(static, store)[static.trials[0].stages[-1]]
        whole = MaskSet({name: torch.ones_like(self.network.get_parameter(name)) for name in pruned_names})
        self.masks = masks_of(first, store) if pruning.dynamics.DYNAMICS[method].keeps_counts else whole
        seed = int(fields["seed"])
        self.generator = torch.Generator().manual_seed(derive(seed, "1/dynamics"))
        batches = data.train.batches(32, device=torch.device("cpu"), seed=derive(derive(seed, "0/fit"), "order"))
        self.batches = [batch for epoch in range(2) for batch in batches.epoch(epoch)][:20]
        self.optimizer: torch.optim.Optimizer = instantiate(fields["train"]["optimizer"], self.network.parameters())
        self.dynamics: Dynamics = getattr(pruning.dynamics, method)(**OPTIONS[method])


@sampled(3)
@pytest.mark.parametrize("method", CHANGING)
def test_a_plain_loop_gives_the_same_masks(method: str, store: Store) -> None:
    masks, weights = trained(method, store)
    begun = Beginning(method, store)
    made, model = begun.dynamics, begun.network

    made.attach(model, begun.masks, begun.optimizer, length=20, generator=begun.generator)
    for batch in begun.batches:
        begun.optimizer.zero_grad()
        Classification().loss(model, batch).backward()
        begun.optimizer.step()
    made.release()

    assert made.masks.digest() == masks.digest()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@sampled(2)
@pytest.mark.parametrize("method", A_FEW)
def test_a_function_of_ones_own_gives_the_same_masks_and_goes_on_from_checkpoints(
    method: str, store: Store, tmp_path: Path
) -> None:
    own = asked(
        method, f"train._target_={resumable.__module__}.{resumable.__name__}", "train.steps=null", "train.epochs=1"
    )
    built_in = asked(method, "train.steps=null", "train.epochs=1")
    found, expected = pruned(own, store), pruned(built_in, store)

    assert found.mask_digest == expected.mask_digest
    assert found.weights_digest == expected.weights_digest
    assert found.details["training_macs"].keys() == expected.details["training_macs"].keys()
    assert found.details["mask_updates"] == expected.details["mask_updates"]
    other = Store(str(tmp_path / "other"))
    assert bits(interrupted(chain(own), other, 7), other) == bits(found, store)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning", "ignore:.*isinstance.treespec, LeafSpec:FutureWarning"
)
@pytest.mark.parametrize("method", A_FEW)
def test_lightning_gives_the_same_masks(method: str, store: Store, tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    from pruning.integrations.lightning import KeepMasks

    masks, weights = trained(method, store)
    begun = Beginning(method, store)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network: nn.Module = begun.network

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return Classification().loss(self.network, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return begun.optimizer

    module = Module()
    keep = KeepMasks(module.network, begun.masks, begun.dynamics, begun.generator)
    loader = torch.utils.data.DataLoader(begun.batches, batch_size=None)  # type: ignore[arg-type]
    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[keep], default_root_dir=tmp_path, **off)
    trainer.fit(module, loader)

    assert begun.dynamics.masks.digest() == masks.digest()
    assert all(torch.equal(value, weights[name]) for name, value in module.network.state_dict().items())
