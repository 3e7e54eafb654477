"""Large new tensors are made of NumPy's memory, and nobody can tell but by the time it takes."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

import pruning
from pruning import memory, survivors
from pruning.engines import Reparam
from pruning.masking import masked

ENGINES = ("reparam", "inplace")


@pytest.fixture
def _all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE", 0)


@pytest.fixture(params=ENGINES)
def pruned(request: pytest.FixtureRequest, _all_large: None) -> nn.Linear:
    torch.manual_seed(0)
    layer = pruning.ln_structured(nn.Linear(40, 30), "weight", 0.5, n=2, dim=1, engine=request.param)
    assert memory.is_ours(layer.weight_mask)
    assert memory.is_ours(layer.weight) == (request.param == "reparam")
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool])
@pytest.mark.parametrize(
    "like",
    [
        torch.empty(1100, 1001),
        torch.empty(1001, 1100).t(),
        torch.empty(70, 10, 40, 41).to(memory_format=torch.channels_last),
        torch.empty(2, 1100, 1001)[:, ::2],
    ],
    ids=["contiguous", "transposed", "channels_last", "strided"],
)
def test_large_tensors_are_those_that_torch_makes(dtype: torch.dtype, like: Tensor, monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "LARGE", 1 << 20)
    like = like.to(dtype).requires_grad_(dtype.is_floating_point)
    for ours, theirs in (
        (memory.zeros_like(like), torch.zeros_like(like)),
        (memory.empty_like(like).fill_(1), torch.ones_like(like)),
    ):
        assert memory.is_ours(ours)
        assert not memory.is_ours(theirs)
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
        assert ours.data_ptr() % memory.ALIGNMENT == 0
        assert ours.is_leaf
        assert not ours.requires_grad
        assert not ours._is_view()


def test_only_plain_large_tensors_on_the_cpu_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tagged(Tensor):
        pass

    assert memory.is_large(torch.empty(1 << 20))
    assert not memory.is_large(torch.empty((1 << 20) - 1))
    monkeypatch.setattr(memory, "LARGE", 0)
    assert memory.is_large(nn.Parameter(torch.empty(3)))
    for other in (
        torch.empty(3).as_subclass(Tagged),
        torch.empty(3, device="meta"),
        torch.empty(3, dtype=torch.cfloat),
    ):
        assert not memory.is_large(other)
        made = memory.zeros_like(other)
        assert (type(made), made.device, made.dtype) == (type(other), other.device, other.dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_large_tensors_on_a_gpu_are_torchs_own() -> None:
    layer = nn.Linear(1100, 1100, device="cuda")
    pruning.l1_unstructured(layer, "weight", 0.99)
    pruning.l1_unstructured(layer, "weight", 0.2)
    assert layer.weight_mask.device.type == layer.weight.device.type == "cuda"


def test_a_layer_of_large_tensors_is_copied_and_stored(pruned: nn.Linear, tmp_path: Path) -> None:
    inputs = torch.randn(3, 40)
    expected = pruned(inputs)
    copies = [copy.deepcopy(pruned), pickle.loads(pickle.dumps(pruned)), cloudpickle.loads(cloudpickle.dumps(pruned))]
    file = io.BytesIO()
    torch.save(pruned, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    stored = {name: tensor.contiguous() for name, tensor in pruned.state_dict().items()}
    safetensors.torch.save_file(stored, tmp_path / "layer.safetensors")
    copies.append(copy.deepcopy(pruned))
    copies[-1].load_state_dict(safetensors.torch.load_file(tmp_path / "layer.safetensors"))
    for copied in copies:
        assert torch.equal(copied(inputs), expected)
        pruning.l1_unstructured(copied, "weight", 0.5)
        assert int(copied.weight_mask.sum()) == 300
        assert int(pruned.weight_mask.sum()) == 600


def test_a_layer_of_large_tensors_can_be_shared_converted_and_resized(pruned: nn.Linear) -> None:
    kept = pruned.weight_mask.clone()
    pruned.share_memory()
    assert pruned.weight_mask.is_shared()
    assert torch.equal(pruned.weight_mask, kept)
    pruned(torch.randn(1, 40)).sum().backward()
    pruned.to(torch.bfloat16)
    pruning.random_unstructured(pruned, "weight", 80)
    assert pruned.weight_mask.dtype == torch.bfloat16
    assert int(pruned.weight_mask.sum()) == 520
    mask = memory.empty_like(torch.empty(6, 4)).fill_(1)
    assert mask.resize_(3, 8).shape == mask.resize_(3, 8).shape == (3, 8)
    assert mask.resize_(2, 4).sum() == 8
    with pytest.raises(RuntimeError, match="not resizable"):
        mask.resize_(100)


@pytest.mark.usefixtures("_all_large")
def test_removing_gives_the_parameter_memory_of_torch() -> None:
    layer = nn.Linear(40, 30)
    pruning.l1_unstructured(layer, "weight", 0.9)
    pruning.remove(layer, "weight")
    assert layer.weight.untyped_storage().resizable()


@pytest.mark.usefixtures("_all_large")
@pytest.mark.parametrize("sparse", [False, True])
def test_the_first_product_is_differentiable_like_the_others(sparse: bool) -> None:
    orig = torch.randn(5, 40, dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(40, 5, dtype=torch.float64)
    pruning.random_structured(layer, "weight", 0.9 if sparse else 0.5, dim=1)
    if sparse:
        pruning.l1_unstructured(layer, "weight", 0.9)
        pruning.l1_unstructured(layer, "weight", 0)
    start, mask = partial(Reparam("weight").start, layer), layer.weight_mask
    assert (survivors.recall(mask) is not None) == sparse
    for act in (lambda t: t, torch.sin, lambda t: functional.linear(orig, t) ** 2):
        found, expected = act(start(orig, mask)), act(masked(orig, mask))
        assert torch.equal(found, expected)
        grads = [torch.autograd.grad(value.square().sum(), orig, create_graph=True)[0] for value in (found, expected)]
        assert torch.equal(*grads)
        seconds = [torch.autograd.grad(grad.square().sum(), orig)[0] for grad in grads]
        assert torch.equal(*seconds)
    with torch.no_grad():
        orig[mask == 0] = float("nan")
    value = start(orig, mask)
    assert not value[mask == 0].any()
    assert value.requires_grad
    assert not start(orig.detach(), mask).requires_grad
