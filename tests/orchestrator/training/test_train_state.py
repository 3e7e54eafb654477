"""Training state: a training resumed from its state in another process ends with the bits of one that never stopped."""

from __future__ import annotations

import io
import json
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from sampling import sampled
from torch import Tensor, nn
from torch.utils.data import Dataset
from training_cases import EPOCH, fit, metrics, network, problem, same, state

from orchestrator.training.loop import training_loop
from orchestrator.training.state.resuming import Unfit
from orchestrator.training.state.train_state import NotPlain, TrainState, generators, restore_generators
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.splits import LoaderSplit
from orchestrator.workloads.tasks.classification import Classification
from orchestrator.workloads.tasks.distilled import with_teacher
from orchestrator.workloads.tasks.task import Task
from orchestrator.workloads.tasks.torch_metrics import TorchMetrics
from orchestrator.workloads.weight_files import write_state
from pruning import MaskKeeper


def elsewhere(found: TrainState) -> TrainState:
    """Return the state as another process would read it."""
    file = io.BytesIO()
    write_state(found.tensors, file)
    return TrainState(load(file.getvalue()), json.loads(json.dumps(found.values, allow_nan=False)))


class Stop:
    """Stores the state before each batch and cancels before the `at`-th."""

    def __init__(self, at: int) -> None:
        self.at, self.asked, self.state = at, 0, TrainState()

    def cancelled(self) -> bool:
        self.asked += 1
        return self.asked > self.at

    def keep(self, current: Any, ending: bool) -> None:
        assert ending == (self.asked > self.at)
        if ending:
            self.state = elsewhere(current())


class Counting(torch.optim.SGD):
    """Optimizer of the user's own whose step depends on a number outside its torch state."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.taken
        return super().step(closure)


class Secretive(torch.optim.SGD):
    """Optimizer of the user's own with an attribute that a state cannot hold."""

    def step(self, closure: Any = None) -> Any:
        self.memory: object = iter(())
        return super().step(closure)


class Drawing(nn.Module):
    """Network that draws from every global generator and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        noise = random.random() + np.random.rand()  # noqa: NPY002
        outputs: Tensor = self.inner(inputs + noise * torch.rand(()) / (1 + self.calls))
        return outputs

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Curriculum(nn.Module):
    """Loss weighted by the running mean of earlier losses, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        if torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss * self.mean


class Counted:
    """Loss that is not a module, and remembers a count of batches, class weights and an inner loss."""

    def __init__(self) -> None:
        self.counts, self.weights, self.inner = {"batches": 0}, torch.ones(3), [Curriculum(), len]

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.counts["batches"] += 1
            self.weights = self.weights * 1.01
        loss: Tensor = self.inner[0](outputs, labels) + nn.functional.cross_entropy(outputs, labels, self.weights)
        return loss * self.counts["batches"]


class CountingTask(Classification):
    """Task of the user's own that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.batches += 1
        return super().loss(model, batch) * self.batches


class OwnDefault(Classification):
    """Task of the user's own whose default loss has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.default = Curriculum()


def torch_metrics() -> Task:
    score = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 3}
    return TorchMetrics({"accuracy": score}, criterion={"_target_": f"{__name__}.Curriculum"})


TASKS: dict[str, Callable[[], Task]] = {
    "criterion, a module": lambda: Classification().with_loss(Curriculum()),
    "criterion, an object": lambda: Classification().with_loss(Counted()),
    "criterion, a method": lambda: Classification().with_loss(Counted().__call__),
    "counting task": CountingTask,
    "own default": OwnDefault,
    "torchmetrics": torch_metrics,
    "distilled": lambda: with_teacher(OwnDefault(), network(), 0.5, 2.0),
}


class Noisy(Dataset[tuple[Tensor, int]]):
    """Dataset that augments each example with draws from all global generators."""

    def __init__(self) -> None:
        self.images, self.labels = problem().train.batches(50, device=torch.device("cpu")).__iter__().__next__()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = random.random() * np.random.rand() * torch.rand(())  # noqa: NPY002
        return self.images[index] + noise, int(self.labels[index])


ADAM = {"_target_": "torch.optim.Adam", "lr": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "momentum": {},
    "adam, cosine": {
        "optimizer": ADAM,
        "scheduler": {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": None},
    },
    "amsgrad by epochs": {
        "optimizer": {**ADAM, "amsgrad": True},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.MultiStepLR", "milestones": [1, 1]},
        "scheduler_interval": "epoch",
    },
    "plateau": {
        "scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "factor": 0.1},
        "eval_every": 2,
    },
    "one cycle": {
        "scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1, "total_steps": None},
        "clip_norm": 1.0,
    },
    "early stop": {"lr": 3.0, "eval_every": 1, "patience": 4},
    "last, by loss": {"select": "last", "monitor": "loss", "eval_every": 3},
    "bf16": {"precision": "bf16"},
    "own optimizer": {"optimizer": {"_target_": f"{__name__}.Counting", "lr": 0.1}},
    "accumulation, averages": {"accumulate": 2, "ema": 0.9, "epochs": 4},
    "nadam": {"optimizer": {"_target_": "torch.optim.NAdam", "lr": 0.01}},
}


def goes_on(at: int, make: Any = network, data: Data | None = None, **options: Any) -> None:
    """Check that a training stopped before its `at`-th batch and resumed elsewhere equals one that never stops."""
    whole = make()
    expected = fit(whole, data=data, **options)
    stop = Stop(at)
    with pytest.raises(training_loop.Cancelled):
        fit(make(), data=data, cancelled=stop.cancelled, keep=stop.keep, **options)
    torch.manual_seed(at)
    model = make()
    found = fit(model, data=data, state=stop.state, **options)

    assert metrics(found) == metrics(expected)
    assert replace(found, curve=()) == replace(expected, curve=())
    assert same(state(model), state(whole))


@pytest.mark.parametrize("case", CASES)
@sampled(quick=lambda at: at == EPOCH + 4)
@pytest.mark.parametrize("at", [0, 3, EPOCH, EPOCH + 4])
def test_a_training_goes_on_bit_for_bit(case: str, at: int) -> None:
    goes_on(min(at, 4) if case == "early stop" else at, **CASES[case])


@pytest.mark.parametrize("case", TASKS)
def test_what_a_task_and_its_loss_remember_goes_on(case: str) -> None:
    whole, stop, found = network(), Stop(EPOCH + 3), network()
    expected = fit(whole, task=TASKS[case]())
    with pytest.raises(training_loop.Cancelled):
        fit(network(), task=TASKS[case](), cancelled=stop.cancelled, keep=stop.keep)

    assert metrics(fit(found, task=TASKS[case](), state=stop.state)) == metrics(expected)
    assert same(state(found), state(whole))


def test_what_a_task_remembers_and_no_state_can_say_is_named() -> None:
    task, stop = CountingTask(), Stop(3)
    task.memory = iter(())  # type: ignore[attr-defined]
    with pytest.raises(NotPlain, match="memory"):
        fit(network(), task=task, cancelled=stop.cancelled, keep=stop.keep)


def test_a_teacher_is_in_no_state() -> None:
    found = fit(network(), task=with_teacher(Classification(), network(), 0.5, 2.0), until=1).state
    assert found is not None
    assert not [name for name in found.tensors if "eacher" in name]


def test_what_a_network_draws_and_its_extra_state_go_on() -> None:
    goes_on(EPOCH + 2, make=Drawing)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_goes_on_in_the_middle_of_an_epoch(workers: int) -> None:
    goes_on(EPOCH + 3, data=replace(problem(), train=LoaderSplit(Noisy(), workers)))


def test_a_pruned_network_goes_on_under_its_masks() -> None:
    masks = {"0.weight": torch.arange(64).view(16, 4) % 3 != 0}
    models = []
    for at in (None, 9):
        model, stop = network(), Stop(9)
        if at is not None:
            held = network()
            with pytest.raises(training_loop.Cancelled):
                fit(held, on_optimizer=MaskKeeper(held, masks).attach, cancelled=stop.cancelled, keep=stop.keep)
        fit(model, on_optimizer=MaskKeeper(model, masks).attach, state=stop.state if at else None)
        models.append(model)

    assert same(state(models[0]), state(models[1]))
    assert not models[1][0].weight[~masks["0.weight"]].any()


def test_an_optimizer_whose_state_is_not_plain_says_so() -> None:
    stop = Stop(5)
    with pytest.raises(NotPlain, match="memory"):
        fit(
            network(),
            optimizer={"_target_": f"{__name__}.Secretive", "lr": 0.1},
            cancelled=stop.cancelled,
            keep=stop.keep,
        )


@pytest.mark.parametrize("at", [None, EPOCH + 3])
def test_the_extra_state_that_is_selected_is_that_of_the_best_step(at: int | None) -> None:
    options: dict[str, Any] = {"epochs": 6, "lr": 0.5, "eval_every": 2}
    model, stop = Drawing(), Stop(at or 0)
    if at is not None:
        with pytest.raises(training_loop.Cancelled):
            fit(Drawing(), cancelled=stop.cancelled, keep=stop.keep, **options)
    found = fit(model, state=None if at is None else stop.state, **options)

    assert model.calls == found.best_step < found.steps


def test_the_state_of_another_network_changes_nothing() -> None:
    stop = Stop(3)
    with pytest.raises(training_loop.Cancelled):
        fit(network(), cancelled=stop.cancelled, keep=stop.keep)
    other = nn.Linear(4, 3)
    before = state(other)

    with pytest.raises(Unfit, match="another network"):
        fit(other, state=stop.state)
    assert same(state(other), before)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("generators", lambda found: {**found, "torch": torch.zeros(3, dtype=torch.uint8)}),
        ("generators", lambda found: {**found, "torch": found["torch"].float()}),
        ("optimizer", lambda found: _with_buffer(found, torch.zeros(3, 4))),
        ("optimizer", lambda found: _with_buffer(found, torch.zeros(2))),
        ("averages", lambda found: found[1:]),
        ("averages", lambda found: [torch.zeros(1) for _ in found]),
        ("best_state", lambda found: found[:-1]),
        ("best_state", lambda found: [torch.zeros(1) for _ in found]),
        ("best_state", lambda _: "text"),
        ("best", lambda _: None),
        ("best", lambda _: "high"),
        ("step", lambda _: "3"),
        ("step", lambda _: None),
        ("step", lambda _: -1),
        ("step", lambda found: found + 2 * EPOCH),
        ("stale", lambda _: 0.5),
        ("selected_step", lambda found: found + EPOCH),
        ("curve", lambda found: [{**found[0], "metrics": None}]),
    ],
)
def test_a_state_that_does_not_fit_is_set_aside_before_any_step(part: str, change: Callable[[Any], Any]) -> None:
    stop = Stop(EPOCH + 3)
    with pytest.raises(training_loop.Cancelled):
        fit(network(), ema=0.9, cancelled=stop.cancelled, keep=stop.keep)
    parts = {name: stop.state.part(name) for name in stop.state.values}

    fit(network(), ema=0.9, state=elsewhere(TrainState.of(parts)))
    with pytest.raises(Unfit):
        fit(network(), ema=0.9, state=elsewhere(TrainState.of({**parts, part: change(parts[part])})))


def _with_buffer(optimizer: dict[str, Any], buffer: Tensor) -> dict[str, Any]:
    inner = optimizer["state"]
    return {**optimizer, "state": {**inner, "state": {**inner["state"], 0: {"momentum_buffer": buffer}}}}


@pytest.mark.parametrize("name", ["Adafactor", "Adagrad", "ASGD", "Rprop", "RMSprop"])
def test_optimizers_of_torch_go_on(name: str) -> None:
    goes_on(5, optimizer={"_target_": f"torch.optim.{name}", "lr": 0.01})


def test_parts_come_back_as_they_were() -> None:
    parts = {
        "numbers": {0: (1, 0.1, -0.0, True, None), "inf": [math.inf, -math.inf], "big": 2**62},
        "kinds": {"counter": Counter({3: 2}), "ordered": OrderedDict(b=1, a=2), "empty": ((), [], {})},
        "tensors": [torch.tensor(1.5), torch.zeros(0, 3), torch.tensor([True]), torch.ones(2, 3).t()],
        "numpy": np.float32(0.5),
    }
    found = elsewhere(TrainState.of(parts))

    assert found.part("numbers") == parts["numbers"]
    assert str(found.part("numbers")[0]) == "(1, 0.1, -0.0, True, None)"
    assert found.part("kinds") == parts["kinds"]
    assert type(found.part("kinds")["counter"]) is Counter
    assert found.part("numpy") == 0.5
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found.part("tensors"), parts["tensors"], strict=True)
    )
    with pytest.raises(ValueError, match="no valid state of the part 'other'"):
        found.part("other")


def test_tensors_whose_paths_read_alike_stay_apart() -> None:
    one, two, three = (torch.tensor(float(value)) for value in (1, 2, 3))
    parts = {"a": {"b": one, 0: two, "0": three}, "a/b": two, "a/b'": three}
    found = elsewhere(TrainState.of(parts))

    assert {name: found.part(name) for name in parts} == parts


UNPLAIN = [
    object(),
    iter(()),
    {1, 2},
    2**70,
    torch.zeros(2).to_sparse(),
    torch.zeros(2, dtype=torch.complex128),
    nn.UninitializedParameter(),
    lambda: None,
]


@pytest.mark.parametrize("value", UNPLAIN)
def test_what_is_not_plain_is_named(value: object) -> None:
    with pytest.raises(NotPlain, match="optimizer/state/0/memory"):
        TrainState.of({"optimizer": {"state": [{"memory": value}]}})


def draws() -> Iterator[float]:
    yield from (random.gauss(0, 1), np.random.normal(), float(torch.randn(())))  # noqa: NPY002


def test_generators_go_on() -> None:
    device = torch.device("cpu")
    list(draws())  # the normal generators now hold a second draw in store
    before = elsewhere(TrainState.of({"generators": generators(device)}))
    expected = list(draws())
    list(draws())
    restore_generators(before.part("generators"), device)

    assert list(draws()) == expected


@pytest.mark.parametrize("case", CASES)
@sampled(quick=lambda until: until == 5)
@pytest.mark.parametrize("until", [0, 5, EPOCH])
def test_a_training_up_to_a_step_is_a_prefix_of_the_whole(case: str, until: int) -> None:
    """The start has the schedule of the whole training, which resumes from it with the same bits as without it."""
    whole, start, rest = network(), network(), network()
    expected = fit(whole, **CASES[case])
    begun = fit(start, until=until, selects=False, **CASES[case])
    assert begun.state is not None
    found = fit(rest, state=elsewhere(begun.state), **CASES[case])

    assert begun.steps == begun.best_step == min(until, expected.steps)
    assert metrics(begun) == [point for point in metrics(expected) if point[0] <= until]
    assert same(state(start), state(network())) == (until == 0)
    assert metrics(found) == metrics(expected)
    assert replace(found, curve=()) == replace(expected, curve=())
    assert same(state(rest), state(whole))


@pytest.mark.parametrize("case", CASES)
def test_a_part_of_a_training_leaves_the_selected_weights_and_the_state_of_the_last_step(case: str) -> None:
    start, part = network(), network()
    begun, found = fit(start, until=EPOCH, selects=False, **CASES[case]), fit(part, until=EPOCH, **CASES[case])
    assert begun.state is not None
    assert found.state is not None
    kept = elsewhere(found.state)

    names = sorted(begun.state.tensors)
    assert same([kept.tensors[each] for each in names], [elsewhere(begun.state).tensors[each] for each in names])
    assert found.steps == begun.steps
    is_last = found.best_step == found.steps and CASES[case].get("ema") is None
    assert same(state(part), state(start)) == is_last
