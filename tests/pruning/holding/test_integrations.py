"""Pruned modules in the rest of PyTorch: saving, compiling, exporting, tied weights, dtypes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from held_networks import INPUTS, dense, network, pruned, save_and_load, train
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import pruning


def test_torch_save_of_a_module() -> None:
    model = pruned()
    train(model, model, INPUTS)
    loaded = save_and_load(model)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert torch.equal(loaded(INPUTS), model(INPUTS))
    train(loaded, loaded, INPUTS)
    assert torch.equal(copy.deepcopy(loaded)(INPUTS), loaded(INPUTS))
    assert torch.equal(loaded(INPUTS), dense(loaded, network())(INPUTS))


def test_state_dict_into_a_pruned_model_and_after_remove_into_a_dense_one() -> None:
    model, other = pruned(), pruned()
    train(model, model, INPUTS)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(other(INPUTS), model(INPUTS))
    for layer in (model[0], model[2]):
        pruning.remove(layer, "weight")
    plain = network()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(INPUTS), other(INPUTS))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
def test_export(strict: bool) -> None:
    model = pruned()
    train(model, model, INPUTS)
    expected = dense(model, network())(INPUTS)
    version = model[0].weight_orig._version
    program = torch.export.export(model, (INPUTS,), strict=strict)
    assert model[0].weight_orig._version == version  # nothing was written while tracing
    assert torch.allclose(program.module()(INPUTS), expected)
    assert torch.allclose(model(INPUTS), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile(backend: str) -> None:
    torch.compiler.reset()
    model = pruned()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    train(compiled, model, INPUTS)
    assert torch.allclose(compiled(INPUTS), dense(model, network())(INPUTS), atol=1e-6)
    assert torch.allclose(model(INPUTS), dense(model, network())(INPUTS), atol=1e-6)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(INPUTS), model(INPUTS))
    pruning.l1_unstructured(model[0], "weight", 0.5)
    assert torch.allclose(compiled(INPUTS), dense(model, network())(INPUTS), atol=1e-6)


def test_a_loaded_model_that_only_compiled_code_has_run_can_be_copied() -> None:
    torch.compiler.reset()
    model = save_and_load(pruned())
    train(torch.compile(model, backend="eager"), model, INPUTS)
    for copied in (copy.deepcopy(model), save_and_load(model)):
        assert torch.equal(copied(INPUTS), dense(model, network())(INPUTS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_and_fx() -> None:
    model = pruned()
    expected = model(INPUTS)
    assert torch.allclose(torch.jit.trace(model, (INPUTS,))(INPUTS), expected)  # type: ignore[no-untyped-call]
    assert torch.allclose(torch.fx.symbolic_trace(model)(INPUTS), expected)
    assert torch.equal(model(INPUTS), expected)


def test_functional_call_masks_but_never_writes_the_callers_tensors() -> None:
    model = pruned()
    expected = model(INPUTS)
    given = {name: torch.ones_like(p).requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, (INPUTS,)).sum().backward()
    assert all(bool((tensor == 1).all()) for tensor in given.values())
    grad = given["0.weight_orig"].grad
    assert grad is not None
    assert not grad[model[0].weight_mask == 0].any()
    assert model[0].weight_orig.grad is None
    assert torch.equal(model(INPUTS), expected)
    assert torch.equal(copy.deepcopy(model)(INPUTS), expected)


def test_vmap_over_an_ensemble_and_grad() -> None:
    models = [pruned() for _ in range(3)]
    for seed, model in enumerate(models):
        pruning.random_unstructured(model[0], "weight", 3, generator=torch.Generator().manual_seed(seed))
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0]).to("meta")
    outputs = torch.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (INPUTS,)))(parameters, buffers)
    for output, model in zip(outputs, models, strict=True):
        assert torch.allclose(output, model(INPUTS), atol=1e-6)

    def loss(values: dict[str, Tensor]) -> Tensor:
        total: Tensor = torch.func.functional_call(models[0], values, (INPUTS,)).sum()
        return total

    grads = torch.func.grad(loss)(dict(models[0].named_parameters()))
    assert not grads["0.weight_orig"][models[0][0].weight_mask == 0].any()


def forward_mode(model: nn.Module) -> None:
    given = dict(model.named_parameters())
    torch.func.jvp(lambda p: torch.func.functional_call(model, p, (INPUTS,)), (given,), (given,))


def reverse_mode(model: nn.Module) -> None:
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (INPUTS,)).sum())(dict(model.named_parameters()))


def batched(model: nn.Module) -> None:
    given = {name: torch.stack([p.detach(), p.detach() + 1]) for name, p in model.named_parameters()}
    torch.vmap(lambda p: torch.func.functional_call(model, p, (INPUTS,)))(given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("transform", [batched, forward_mode, reverse_mode])
def test_a_model_can_be_copied_after_a_transform_and_saved_as_a_sentence_says(
    transform: Callable[[nn.Module], None],
) -> None:
    model = pruned()
    expected = model(INPUTS)
    transform(model)
    made = copy.deepcopy(model)
    assert torch.equal(made[0].weight, model[0].weight_orig * model[0].weight_mask)
    assert torch.equal(save_and_load(made)(INPUTS), expected)
    with pytest.raises(
        ValueError, match=r"^`weight` of Linear is a tensor of a torch.func transform.* run the model once"
    ):
        save_and_load(model)
    assert torch.equal(model(INPUTS), expected)
    assert torch.equal(save_and_load(model)(INPUTS), expected)


AVERAGES: list[dict[str, Any]] = [
    {},
    {"avg_fn": swa_utils.get_swa_avg_fn()},
    {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.999)},
]


def stepped(model: nn.Module, averaged: swa_utils.AveragedModel, steps: int) -> None:
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        averaged.update_parameters(model)


@pytest.mark.parametrize("average", AVERAGES)
def test_averages_of_buffers_hold_masks_or_are_refused(average: dict[str, Any]) -> None:
    model = pruned()
    averaged = swa_utils.AveragedModel(model, use_buffers=True, **average)
    stepped(model, averaged, 20)
    averaged.eval()(INPUTS)
    assert pruning.MaskSet.collect(averaged.module) == (before := pruning.MaskSet.collect(model))
    assert not averaged.module[0].weight[~before["0.weight"]].any()

    pruning.l1_unstructured(model[0], "weight", 3)
    stepped(model, averaged, 2)
    layer = averaged.module[0]
    for use in (
        lambda: averaged.eval()(INPUTS),
        lambda: swa_utils.update_bn([INPUTS], nn.Sequential(averaged, nn.BatchNorm1d(3))),
        lambda: pruning.MaskSet.collect(averaged.module),
        lambda: pruning.remove(layer, "weight"),
        lambda: pruning.l1_unstructured(layer, "weight", 1),
        lambda: pruning.prune(averaged.module, sparsity=0.9),
    ):
        with pytest.raises(ValueError, match=r"`weight_mask` of Linear \(with an entry 0\.\d+\).* use_buffers=False"):
            use()
    copy.deepcopy(averaged)
    averaged.train()(INPUTS)  # training steps do not check masks

    pruning.MaskSet.collect(model).apply(averaged.module, replace=True)
    stepped(model, averaged, 5)
    averaged.eval()(INPUTS)
    assert pruning.MaskSet.collect(averaged.module) == (after := pruning.MaskSet.collect(model))
    assert not layer.weight[~after["0.weight"]].any()


@pytest.mark.parametrize("average", AVERAGES)
def test_averages_of_parameters_alone_follow_the_masks(average: dict[str, Any]) -> None:
    model = pruned()
    averaged = swa_utils.AveragedModel(model, **average)
    for _ in range(3):
        stepped(model, averaged, 2)
        pruning.l1_unstructured(model[0], "weight", 3)
    stepped(model, averaged, 1)
    swa_utils.update_bn([INPUTS], averaged)
    averaged(INPUTS)
    masks = pruning.MaskSet.collect(model)
    assert pruning.MaskSet.collect(averaged.module) == masks
    assert not averaged.module[0].weight[~masks["0.weight"]].any()


def test_a_mask_is_looked_at_only_while_nothing_traces_it() -> None:
    for mode in ("real", "fake", "symbolic"):
        model = copy.deepcopy(pruned())
        traced = make_fx(model, tracing_mode=mode, _allow_non_fake_inputs=True)(INPUTS)
        assert torch.allclose(traced(INPUTS), model(INPUTS))


def test_checkpointing() -> None:
    model = pruned()
    with torch.no_grad():
        model[0].weight_orig.add_(1.0)
    inputs = INPUTS.clone().requires_grad_()
    checkpoint(model, inputs, use_reentrant=False).sum().backward()
    assert inputs.grad is not None


def test_tied_weights() -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    pairs = [(model[0], "weight"), (model[1], "weight")]
    for left in (12, 6):
        pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=0.5)
        assert int(model[0].weight_mask.sum()) == left
        assert model[0].weight_mask is model[1].weight_mask
        assert model[0].weight_orig is model[1].weight_orig
    tokens = torch.arange(6)
    train(model, model, tokens)
    model(tokens)
    assert torch.equal(model[0].weight, model[1].weight)
    assert int((model[1].weight == 0).sum()) == 18
    copied = copy.deepcopy(model)
    assert copied[0].weight_orig is copied[1].weight_orig
    assert torch.equal(copied(tokens), model(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    layer = nn.Linear(6, 4, dtype=dtype)
    pruning.l1_unstructured(layer, "weight", 6)
    pruning.random_unstructured(layer, "weight", 6)
    assert layer.weight_mask.dtype == dtype
    assert int((layer.weight == 0).sum()) == 12
    pruning.ln_structured(layer, "weight", 2, n=2, dim=0)
    layer(INPUTS.to(dtype)).abs().sum().backward()
    assert int((layer.weight_mask != 0).any(1).sum()) == 2


def test_autocast_and_conversion() -> None:
    model = pruned()
    with torch.autocast("cpu", torch.bfloat16):
        model(INPUTS).float().sum().backward()
    assert int((model.bfloat16()[0].weight_mask == 0).sum()) == 15
    assert model(INPUTS.bfloat16()).isfinite().all()


def test_channels_last() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    pruning.l1_unstructured(conv, "weight", 0.5)
    pruning.random_unstructured(conv, "weight", 0.5)
    assert int((conv.weight == 0).sum()) == 81
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    conv(torch.randn(2, 3, 8, 8)).sum().backward()
    assert conv(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).shape == (2, 4, 6, 6)
