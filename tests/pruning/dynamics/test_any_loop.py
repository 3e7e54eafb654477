"""Dynamics in any loop: states, closures, skipped steps, accumulation, precision, tied and frozen weights."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from sampling import sampled
from test_plain_loops import ALTERNATELY, CASES, STEPS, batches, drawn, masks, network, optimizer, trained
from torch import Tensor, nn

import pruning
from pruning.dynamics import Dynamics


def attached(case: str = "rigl", kind: str = "sgd") -> tuple[nn.Module, torch.optim.Optimizer, Dynamics]:
    make, density, _ = CASES[case]
    model, dynamics = network(), make()
    steps = optimizer(kind, model)
    dynamics.attach(model, masks(density), steps, length=STEPS, generator=drawn(3))
    return model, steps, dynamics


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("case", "kind"), ALTERNATELY)
def test_a_training_continues_from_a_state_with_equal_bits(case: str, kind: str) -> None:
    given = batches(41)
    model, steps, dynamics = attached(case, kind)
    states: dict[int, Any] = {}
    for number, batch in enumerate(given):
        if number in (9, 10, 11, 25):
            states[number] = copy.deepcopy((model.state_dict(), steps.state_dict(), dynamics.state()))
        trained(dynamics, model, steps, [batch])

    for number, (weights, moments, state) in states.items():
        again, moved, other = attached(case, kind)
        again.load_state_dict(weights)
        moved.load_state_dict(copy.deepcopy(moments))  # torch would share its tensors
        other.load_state(state)
        trained(other, again, moved, given[number:])
        assert other.masks == dynamics.masks, number
        assert same(again, model), number
        assert other.updates == dynamics.updates

        make, density, _ = CASES[case]
        again, third = network(), make()
        again.load_state_dict(weights)
        moved = optimizer(kind, again)
        moved.load_state_dict(moments)
        third.attach(again, masks(density), moved, length=STEPS, generator=drawn(0), state=state)
        trained(third, again, moved, given[number:])
        assert same(again, model), number


@pytest.mark.parametrize("case", CASES)
def test_pruned_weights_are_zero_between_steps(case: str) -> None:
    model, steps, dynamics = attached(case)
    for batch in batches(60):
        trained(dynamics, model, steps, [batch])
        for name, mask in dynamics.masks.items():
            assert not model.get_parameter(name)[~mask].any()
            if not case.endswith("ste"):
                for moment in steps.state[model.get_parameter(name)].values():
                    assert not moment[~mask].any()
    counts = {name: int(each.sum()) for name, each in masks(CASES[case][1]).items()}
    row = pruning.dynamics.DYNAMICS[case.split()[0]]
    assert row.keeps_counts == (dynamics.masks.kept() == counts)
    assert not (row.nested and any(update.grown for update in dynamics.updates))


@pytest.mark.parametrize("case", CASES)
def test_a_closure_gives_the_same_training(case: str) -> None:
    (model, steps, dynamics), (other, moved, twin) = attached(case), attached(case)
    calls = 0
    for x, y in batches(60):
        trained(dynamics, model, steps, [(x, y)])

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            nonlocal calls
            calls += 1
            moved.zero_grad()
            loss = nn.functional.cross_entropy(other(x), y)
            loss.backward()
            return loss

        assert moved.step(closure).detach() > 0  # type: ignore[attr-defined]
    assert calls == 60
    assert same(model, other)
    assert dynamics.masks == twin.masks


def test_an_optimizer_that_calls_its_closure_again_is_refused_where_gradients_are_read_before() -> None:
    for case in ("sr_ste", "movement"):
        make, density, _ = CASES[case]
        model, dynamics = network(), make()
        steps = torch.optim.LBFGS(model.parameters())
        dynamics.attach(model, masks(density), steps, length=STEPS)
        with pytest.raises(ValueError, match=r"LBFGS computes them several times in a step"):
            steps.step(lambda: 0.0)


@pytest.mark.slow
def test_stepping_by_hand_gives_the_same_training() -> None:
    for case in CASES:
        model, steps, dynamics = attached(case)
        trained(dynamics, model, steps, batches(60))
        make, density, _ = CASES[case]
        other, twin = network(), make()
        moved = optimizer("sgd", other)
        twin.attach(other, masks(density), moved, length=STEPS, generator=drawn(3), hooks=False)
        for x, y in batches(60):
            moved.zero_grad()
            nn.functional.cross_entropy(other(x), y).backward()
            if not twin.before():
                moved.step()
            twin.after()
        assert same(model, other)


def test_a_step_that_the_scaler_skips_does_not_count() -> None:
    model, steps, dynamics = attached("rigl")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = batches(1)[0]
    for factor, count in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
        steps.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y) * factor).backward()
        scaler.step(steps)
        scaler.update()
        assert dynamics.step == count


def test_accumulated_batches_give_the_update_of_their_mean() -> None:
    (model, steps, dynamics), (other, moved, twin) = attached(), attached()
    x, y = batches(1)[0]
    trained(dynamics, model, steps, [(x, y)])
    moved.zero_grad()
    for half in range(2):
        part = slice(half * 5, half * 5 + 5)
        (nn.functional.cross_entropy(other(x[part]), y[part]) / 2).backward()
    moved.step()
    assert dynamics.masks == twin.masks
    assert len(dynamics.updates) == 1
    assert same(model, other)


def test_frozen_and_unused_weights_keep_their_masks() -> None:
    make, density, _ = CASES["rigl"]
    model = network()
    model.first.weight.requires_grad_(False)
    steps, dynamics, begun = optimizer("sgd", model), make(), masks(density)
    dynamics.attach(model, begun, steps, length=STEPS)
    trained(dynamics, model, steps, batches(30))
    assert torch.equal(dynamics.masks["first.weight"], begun["first.weight"])
    assert not torch.equal(dynamics.masks["second.weight"], begun["second.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


def test_tied_weights_have_one_mask() -> None:
    model, given = Tied().double(), torch.rand(8, 8, generator=drawn(0)) < 0.5
    steps, dynamics = torch.optim.SGD(model.parameters(), lr=0.1), pruning.dynamics.rigl(every=5)
    with pytest.raises(ValueError, match=r"first\.weight and second\.weight must be equal"):
        dynamics.attach(model, {"first.weight": given, "second.weight": ~given}, steps, length=100)
    dynamics.attach(model, {"first.weight": given, "second.weight": given}, steps, length=100)
    trained(dynamics, model, steps, batches(20))
    assert torch.equal(dynamics.masks["first.weight"], dynamics.masks["second.weight"])
    assert not torch.equal(dynamics.masks["first.weight"], given)
    assert dynamics.masks.kept()["first.weight"] == int(given.sum())


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_masked(case: str) -> None:
    make, density, _ = CASES[case]
    model, dynamics = network().bfloat16(), make()
    steps = optimizer("adam", model)
    dynamics.attach(model, masks(density), steps, length=STEPS, generator=drawn(3))
    given = [(x.bfloat16(), y) for x, y in batches(60)]
    trained(dynamics, model, steps, given)
    for name, mask in dynamics.masks.items():
        weight = model.get_parameter(name)
        assert not weight[~mask].any()
        assert weight.isfinite().all()


@pytest.mark.slow
def test_torch_compile_computes_with_the_masks_of_now() -> None:
    (model, steps, dynamics), (other, moved, _) = attached("sr_ste"), attached("sr_ste")
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager")
    for x, y in batches(30):
        trained(dynamics, model, steps, [(x, y)])
        moved.zero_grad()
        nn.functional.cross_entropy(compiled(x), y).backward()
        moved.step()
    torch._dynamo.reset()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-12)


def test_history_says_what_moved() -> None:
    model, steps, dynamics = attached("rigl")
    before = dynamics.masks
    trained(dynamics, model, steps, batches(1))
    (found,) = dynamics.updates
    after = dynamics.masks
    moved = sum(int((mask & ~before[name]).sum()) for name, mask in after.items())
    kept = sum(after.kept().values())
    assert (found.step, found.kept, found.dropped, found.grown) == (0, kept, moved, moved)
    assert found.first_overlap == found.last_overlap == (kept - moved) / kept
    assert found.explored == (kept + moved) / sum(after.sizes().values())


def test_mistakes_are_refused_in_a_sentence() -> None:
    model, steps, dynamics = attached()
    with pytest.raises(ValueError, match=r"pruning\.dynamics\.RigL is attached already; call release"):
        dynamics.attach(model, masks(0.5), steps, length=10)
    dynamics.release()
    with pytest.raises(ValueError, match=r"is not attached; call attach"):
        dynamics.release()
    for given, length, said in (({}, 10, "at least one mask"), (masks(0.5), 0, r"`length` \(=0\)")):
        with pytest.raises(ValueError, match=said):
            dynamics.attach(model, given, steps, length=length)
    with pytest.raises(ValueError, match="no such parameter"):
        dynamics.attach(model, {"third.weight": torch.ones(2)}, steps, length=10)
    for name, options, said in (
        ("rigl", {"every": 0}, r"`every` \(=0\) must be an integer of at least 1"),
        ("rigl", {"until": -0.5}, r"`until` \(=-0\.5\) must be a fraction of the training up to 1, or"),
        ("gradual", {"sparsity": 1.0}, r"`sparsity` \(=1\.0\) must lie in \[0, 1\)"),
        ("gradual", {}, r"`sparsity` \(=None\) must be given"),
        ("sr_ste", {"decay": -1.0}, r"`decay` \(=-1\.0\)"),
    ):
        with pytest.raises(ValueError, match=said):
            getattr(pruning.dynamics, name)(**options)
    with pytest.raises(AttributeError, match="no attribute 'rigel'"):
        pruning.dynamics.rigel  # noqa: B018


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.second(torch.relu(self.norm(self.first(x))))).mean((2, 3)))
        return found


@sampled(3)
@pytest.mark.parametrize(
    ("options", "sparsity"),
    [
        ({"method": "snip", "scope": "global"}, 0.75),
        ({"method": "n_m", "parameters_of": ("second.weight", "head.weight")}, 0.5),
        ({"unit": "block"}, 0.75),
        ({"unit": {"kind": "channel", "spare_last": True}}, None),
        ({"unit": "group", "scope": "global"}, None),
    ],
)
def test_gradual_pruning_takes_scores_windows_blocks_channels_and_groups(
    options: dict[str, Any], sparsity: float | None
) -> None:
    torch.manual_seed(0)
    model, given = Convolutional(), torch.randn(8, 4, 6, 6)
    labels = torch.arange(8) % 4

    def loss(network: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(network(batch[0]), batch[1])

    named = dict(model.named_parameters())
    taken = options.pop("parameters_of", ("first.weight", "second.weight", "head.weight"))
    steps = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dynamics = pruning.dynamics.gradual(
        None if options.get("method") == "n_m" else 0.75,
        every=3,
        until=20,
        batches=[(given, labels)] if options.get("method") == "snip" else None,
        loss=loss if options.get("method") == "snip" else None,
        example=given,
        **options,
    )
    dynamics.attach(model, {name: torch.ones_like(named[name]) for name in taken}, steps, length=25)
    seen = [dynamics.masks]
    for _ in range(25):
        steps.zero_grad()
        loss(model, (given, labels)).backward()
        steps.step()
        seen.append(dynamics.masks)

    assert all(later.nested_in(earlier) for earlier, later in itertools.pairwise(seen))
    assert seen[20] == seen[25] != seen[5]
    if sparsity is not None:
        assert dynamics.masks.sparsity() == pytest.approx(sparsity, abs=1e-3)
    else:
        assert 0.5 < dynamics.masks.sparsity() < 0.9
    if options.get("unit") == "group":
        assert not dynamics.masks["norm.weight"].all()
        smaller = pruning.shrink(model, given)
        assert sum(each.numel() for each in smaller.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_gradual_pruning_of_groups_continues_from_its_state() -> None:
    found = []
    for halves in (False, True):
        torch.manual_seed(0)
        model, given, labels = Convolutional(), torch.randn(8, 4, 6, 6), torch.arange(8) % 4
        steps = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        start = {"first.weight": torch.ones(8, 4, 3, 3)}
        state: Any = None
        for first, last in ((0, 8), (8, 25)) if halves else ((0, 25),):
            dynamics = pruning.dynamics.gradual(0.6, every=3, until=20, unit="group", scope="global", example=given)
            dynamics.attach(model, start, steps, length=25, state=state)
            for _ in range(first, last):
                steps.zero_grad()
                nn.functional.cross_entropy(model(given), labels).backward()
                steps.step()
            state = dynamics.state()
            dynamics.stop()
        found.append(dynamics.masks)
    assert found[0] == found[1]
    assert "norm.weight" in found[0]


def test_a_parameter_has_masks_of_one_dynamics() -> None:
    model, steps, dynamics = attached()
    with pytest.raises(ValueError, match=r"has masks of pruning\.dynamics\.RigL already; call its release\(\) first"):
        pruning.dynamics.static().attach(model, masks(0.5), steps, length=10)
    dynamics.release()
    other = pruning.dynamics.static()
    other.attach(model, masks(0.5), steps, length=10)
    other.release()


def test_no_masks_are_all_weights_of_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    dynamics = pruning.dynamics.gradual(0.5, every=1)
    dynamics.attach(model, None, torch.optim.SGD(model.parameters(), lr=0.1), length=10)

    assert dynamics.masks.sizes() == {"0.weight": 16, "2.weight": 16}
    assert dynamics.masks.sparsity() == 0


def test_an_unknown_option_is_answered_by_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"`evry` \(=3\) is not taken by the dynamics rigl, which takes every, until"):
        pruning.dynamics.rigl(evry=3)


def taught(model: nn.Module, steps: torch.optim.Optimizer, count: int) -> None:
    given = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        steps.zero_grad()
        model(given).square().mean().backward()
        steps.step()


def two_layers() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


UNEVEN = {"0.weight": torch.arange(144).reshape(12, 12) % 5 < 3, "2.weight": torch.ones(4, 12)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: pruning.dynamics.gradual(0.8, begin=4, every=2),
        lambda: pruning.dynamics.gradual(0.8, begin=0.2, every=2, scope="global"),
        lambda: pruning.dynamics.gradual(0.8, begin=4, every=2, allocation="erk"),
        lambda: pruning.dynamics.movement(0.8, begin=4, every=2),
        lambda: pruning.dynamics.rigl(begin=4, every=2),
    ],
)
def test_first_masks_of_unequal_densities_are_taken_up(make: Any) -> None:
    model, steps = two_layers()
    dynamics = make()
    dynamics.attach(model, UNEVEN, steps, length=20, generator=drawn(0))
    taught(model, steps, 4)
    first = pruning.MaskSet(UNEVEN)
    if isinstance(dynamics, pruning.dynamics.gradual_pruning.Gradual):
        assert dynamics.masks == first  # the sparsity of the place `begin` is that of the first masks
        assert dynamics.updates[0].dropped == 0
    taught(model, steps, 16)
    dynamics.release()
    if hasattr(dynamics, "sparsity"):
        assert dynamics.masks.sparsity() == pytest.approx(dynamics.sparsity, abs=0.01)


def test_first_masks_that_no_update_fits_are_refused_as_they_are_attached() -> None:
    model, steps = two_layers()
    dense = {**UNEVEN, "0.weight": torch.arange(144).reshape(12, 12) % 10 < 1}
    with pytest.raises(ValueError, match=r"the first masks \(of sparsity 0\.6719\) do not fit the method"):
        pruning.dynamics.gradual(0.8, begin=4, every=2).attach(model, dense, steps, length=20)
    windows = pruning.dynamics.gradual(begin=4, every=2, method="n_m", n=1, m=4)
    with pytest.raises(ValueError, match=r"do not fit the method: .* must keep 3 of each 4 units, but only 2 survive"):
        windows.attach(model, UNEVEN, steps, length=20)


@pytest.mark.parametrize("name", ["gradual", "movement"])
def test_a_release_before_the_last_update_says_what_is_not_reached(name: str) -> None:
    model, steps = two_layers()
    dynamics = getattr(pruning.dynamics, name)(0.8, every=2)
    dynamics.attach(model, None, steps, length=20)
    taught(model, steps, 6)
    said = (
        rf"after 6 of 20 steps, before its last update \(step 15\): .* {dynamics.masks.sparsity():.4f}, and `sparsity` "
    )
    with pytest.warns(UserWarning, match=said):
        dynamics.release()
    dynamics.attach(model, None, steps, length=20)
    taught(model, steps, 6)
    dynamics.stop()


@pytest.mark.parametrize("name", ["gradual", "movement"])
def test_an_emptied_layer_is_said_once(name: str) -> None:
    model, steps = two_layers()
    dynamics = getattr(pruning.dynamics, name)(0.999, every=2, until=4)
    dynamics.attach(model, None, steps, length=8)
    with pytest.warns(
        UserWarning, match=r"every entry of .*2\.weight is pruned after step 4.*a lower `sparsity`"
    ) as told:
        taught(model, steps, 8)
    assert len(told) == 1


@pytest.mark.parametrize("case", ["rigl", "gradual", "movement", "soft_movement", "sr_ste"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_a_copy_is_detached_says_so_and_goes_on_from_its_state(case: str, copied: Any) -> None:
    model, steps = two_layers()
    options = {"gradual": {"sparsity": 0.8}, "movement": {"sparsity": 0.8}}.get(case, {})
    every = {} if case in ("soft_movement", "sr_ste") else {"every": 2}
    dynamics = getattr(pruning.dynamics, case)(**options, **every)
    dynamics.attach(model, None if options else UNEVEN, steps, length=12, generator=drawn(0))
    taught(model, steps, 5)
    with pytest.warns(UserWarning, match="is attached, but its copy is not, because optimizers"):
        twin, moved, other = copied((model, steps, dynamics))
    with pytest.raises(ValueError, match="is not attached"):
        other.release()
    other.attach(twin, other.masks, moved, length=12, generator=other.generator, state=other.state())
    taught(model, steps, 7)
    taught(twin, moved, 7)
    assert same(model, twin)
    assert dynamics.masks == other.masks
