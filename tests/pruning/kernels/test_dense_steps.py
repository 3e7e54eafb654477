"""Steps between sparse layers compute what PyTorch does, with the same bits for all processors and threads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pruning.kernels import dense_steps
from pruning.kernels.compiling import KernelsUnavailable
from pruning.kernels.dense_steps import OPERATIONS, DenseStep, StepPlan

ACTIVATIONS = [name for name, row in OPERATIONS.items() if row.inputs == 1 and not row.arrays]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, start: int = 0, scale: float = 1.0) -> Tensor:
    """Return numbers between -4 and 4 that no generator of a machine decides."""
    count = torch.arange(start, start + math.prod(shape), dtype=torch.float64)
    return (scale * 4 * torch.sin(count * 12.9898) * torch.cos(count * 0.7)).float().view(shape)


def exact(plan: StepPlan, *given: Tensor) -> Tensor:
    return OPERATIONS[plan.operation].in_torch(plan, *(x.double() for x in given))


def is_close(found: Tensor, target: Tensor, bound: float) -> bool:
    return found.dtype is torch.float32 and float((found - target).abs().max()) <= bound * float(target.abs().max())


def is_compiled(step: DenseStep, *given: Tensor) -> bool:
    return step.compiled([(x.shape, x.dtype) for x in given]) is not None


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4, 5), (1, 17), (130, 70)])
def test_activations(name: str, shape: tuple[int, ...]) -> None:
    step, x = DenseStep(StepPlan(name)), numbers(*shape, scale=3)

    assert is_compiled(step, x)
    assert is_close(step(x), exact(step.plan, x), 3e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_float_of_an_activation_is_close(name: str) -> None:
    x = torch.cat([torch.linspace(-14, 14, 400_001), torch.logspace(-30, 30, 2001), -torch.logspace(-30, 1, 2001)])
    step = DenseStep(StepPlan(name))
    found, target = step(x).double(), exact(step.plan, x)

    assert float((found - target).abs().max() / 1e30) < 1e-6
    small = x.abs() < 20
    assert float(((found - target).abs() / (1 + target.abs()))[small].max()) < 5e-7


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_odd_numbers_of_an_activation(name: str) -> None:
    inf, nan = math.inf, math.nan
    found = DenseStep(StepPlan(name))(torch.tensor([nan, inf, -inf, 3e38, -3e38, 0.0, -0.0, 1e-40])).tolist()

    assert math.isnan(found[0])
    assert found[1] == inf
    assert found[3] == pytest.approx(3e38)
    assert all(abs(each) < 1e-30 for each in (found[2], *found[4:]))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 16), (40, 17), (5, 384), (1, 2000)])
def test_layer_norm(shape: tuple[int, ...]) -> None:
    x, weight, bias = numbers(*shape) + 7, numbers(shape[-1], start=5), numbers(shape[-1], start=9)
    step = DenseStep(StepPlan("layer_norm", number=1e-5), weight, bias)

    assert is_compiled(step, x)
    target = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double(), 1e-5)
    assert is_close(step(x), target, 1e-5 if shape[-1] < 3 else 2e-6)


def test_layer_norm_of_nan_and_of_equal_entries() -> None:
    x = torch.stack([torch.full((9,), 3.0), torch.full((9,), math.nan), numbers(9)])
    found = DenseStep(StepPlan("layer_norm", number=1e-5), torch.ones(9), torch.full((9,), 2.0))(x)

    assert found[0].tolist() == [2.0] * 9
    assert found[1].isnan().all()
    assert found[2].isfinite().all()


@pytest.mark.parametrize(
    ("batch", "rows", "count", "heads", "width"),
    [(1, 1, 1, 1, 1), (2, 16, 16, 3, 32), (1, 7, 19, 2, 20), (3, 33, 5, 1, 64), (1, 50, 130, 4, 48), (2, 6, 17, 5, 3)],
)
def test_attention(batch: int, rows: int, count: int, heads: int, width: int) -> None:
    plan = StepPlan("attention", heads, 0.3)
    q = numbers(batch, rows, heads * width, scale=0.2)
    k, v = (numbers(batch, count, heads * width, start=place) for place in (11, 23))
    step = DenseStep(plan)

    assert is_compiled(step, q, k, v)
    found, target = step(q, k, v), exact(plan, q, k, v)
    assert found.shape == q.shape
    assert is_close(found, target, 2e-6)


@pytest.mark.parametrize("number", [1e-5, 1e-12])
@pytest.mark.parametrize("value", [0.1, 1.1, 100.7, 1e4, 1e5])
def test_layer_norm_of_equal_entries_is_its_bias(value: float, number: float) -> None:
    step = DenseStep(StepPlan("layer_norm", number=number), torch.ones(768), torch.zeros(768))
    found = step(torch.full((1, 768), value))
    off = torch.full((1, 768), value) + torch.linspace(0, value, 768)

    assert float(found.abs().max()) < 1e-3
    assert is_close(step(off), F.layer_norm(off.double(), (768,), eps=number), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    targets = [step(*given) for step, given in all_steps()]
    torch.set_default_dtype(dtype)
    try:
        assert all(
            torch.equal(step(*given), target) for (step, given), target in zip(all_steps(), targets, strict=True)
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_other_tensors_of_a_step_are_refused_or_computed_by_pytorch() -> None:
    step, x = DenseStep(StepPlan("layer_norm", number=1e-5), torch.ones(9), torch.zeros(9)), numbers(2, 9)
    target = step(x)
    for convert in (step.double, step.half, lambda: step.to("meta")):
        with pytest.raises(ValueError, match="must stay float32 on the CPU"):
            convert()
    step.load_state_dict({"weight": torch.full((9,), 2.0, dtype=torch.float64), "bias": torch.zeros(9)}, assign=True)
    assert torch.equal(step(x), target * 2)
    meta = {"weight": torch.empty(9, device="meta")}
    with pytest.raises(ValueError, match=r"float32 on meta.* must be float32 on the CPU"):
        torch.func.functional_call(step, meta, (x,))
    assert step.compiled([(x.shape, torch.int32)]) is None, "bytes are no floats"


def test_attention_to_one_key_and_to_nan() -> None:
    step = DenseStep(StepPlan("attention", 1, 1.0))
    q, k, v = torch.ones(1, 2, 1), torch.tensor([[[300.0], [0.0], [-300.0]]]), torch.tensor([[[1.0], [2.0], [3.0]]])
    assert step(q, k, v).flatten().tolist() == pytest.approx([1.0, 1.0])
    k[0, 1, 0] = math.nan
    assert step(q, k, v).isnan().all()


def all_steps() -> list[tuple[DenseStep, list[Tensor]]]:
    norm = DenseStep(StepPlan("layer_norm", number=1e-5), numbers(37, start=3), numbers(37, start=4))
    heads = [numbers(3, 21, 40, start=place) for place in (0, 5, 9)]
    own = [(DenseStep(StepPlan(name)), [numbers(60, 150, scale=2)]) for name in ACTIVATIONS]
    return [*own, (norm, [numbers(40, 37)]), (DenseStep(StepPlan("attention", 5, 0.4)), heads)]


DIGESTS = {
    "gelu": "37315d9649142d8a",
    "gelu_tanh": "3c736efc833b745f",
    "silu": "abed8dd27890992d",
    "layer_norm": "9175807c178904b9",
    "attention": "a7a011e3f3855ac3",
}
"""Operation -> digest of its outputs' bits, on each instruction set that test_sanitizers.py compiles for."""


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bits_depend_neither_on_the_processor_nor_on_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    found = {
        step.plan.operation: hashlib.sha256(step(*given).numpy().tobytes()).hexdigest()[:16]
        for step, given in all_steps()
    }
    assert found == DIGESTS


@pytest.mark.parametrize("place", range(len(OPERATIONS)))
def test_calls_that_are_recorded_have_the_same_bits(place: int) -> None:
    step, given = all_steps()[place]
    graph = torch.fx.experimental.proxy_tensor.make_fx(step)(*given)

    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.pruning.dense_step.default)) == 1
    assert torch.equal(graph(*given), step(*given))


@pytest.mark.parametrize("place", range(len(OPERATIONS)))
def test_pytorch_computes_what_c_does_not(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, given = all_steps()[place]
    target = step(*given)
    assert step(*(x[:0] for x in given)).shape == (0, *given[0].shape[1:])

    def unavailable(*_: Any) -> None:
        raise KernelsUnavailable("no compiler")

    monkeypatch.setattr(dense_steps, "compiled_call", unavailable)
    assert is_close(step(*given), target, 2e-6)


@pytest.mark.parametrize(
    ("step", "given", "said"),
    [
        (DenseStep(StepPlan("gelu")), torch.ones(3, dtype=torch.float64), "must be float32 on the CPU"),
        (DenseStep(StepPlan("gelu")), torch.ones(3, requires_grad=True), "computes no gradients"),
        (DenseStep(StepPlan("layer_norm"), torch.ones(4), torch.ones(4)), torch.ones(2, 3), "normalized_shape"),
    ],
)
def test_inputs_that_are_refused(step: DenseStep, given: Tensor, said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        step(given)
