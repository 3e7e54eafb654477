"""`pruning.prune`: golden masks, rounds without training, classes, atomicity, and errors."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from golden_network import BATCHES, Golden, bits, loss
from torch import nn

import pruning
from pruning.choices.axes import Control, Dynamics, Repair, Schedule, Scope, Score, Unit
from pruning.choices.combining import Choices
from pruning.engine.one_call import chosen
from pruning.engine.scoring import share
from pruning.refused import RefusedValue

DATA = {"batches": BATCHES, "loss": loss}
UNDEFINED = {"fc1.weight": torch.full((4, 4), torch.nan), "fc2.weight": torch.ones(3, 4)}
GOLDEN_14 = {
    "magnitude": "1010100101100110100011010011",
    "global_l1_unstructured": "1010110101110110100001000011",
    "l1_unstructured": "1010100101100110100011010011",
    "lamp": "1010110101100110100011000011",
    "snip": "1100110001001110101011000011",
}


def zeros_of(model):
    return {name: p == 0 for name, p in model.named_parameters() if name.endswith("weight")}


@pytest.mark.parametrize(("method", "want"), GOLDEN_14.items())
def test_golden_masks_of_half_the_weights(method, want):
    model = Golden()

    decided = pruning.prune(model, method, sparsity=0.5, **DATA)

    assert bits(decided.masks) == want
    assert pruning.sparsity(model) == 0.5
    assert pruning.MaskSet.collect(model) == decided.masks
    pruning.remove_all(model)
    assert not pruning.is_pruned(model)
    assert pruning.sparsity(model) == 0.5
    assert bits({name: ~zero for name, zero in zeros_of(model).items()}) == want


def test_synflow_in_rounds_and_at_once():
    once = pruning.plan(Golden(), Choices(Score("synflow"), scope=Scope("global"), schedule=Schedule(sparsity=0.75)))
    model = Golden()
    four = pruning.prune(model, "synflow", sparsity=0.75, schedule={"inner": 4})

    assert bits(once.masks) == "0010000000000110100001000011"
    assert bits(four.masks) == "1010000000000110100010000001"


def test_force_brings_back_what_iterative_snip_does_not():
    """Starting from SNIP's 14 of 28 entries, FORCE keeps 14 entries again, iterative SNIP keeps 10."""
    force, nested = Golden(), Golden()
    for model in (force, nested):
        pruning.prune(model, "snip", sparsity=0.5, **DATA)
    before = pruning.MaskSet.collect(force)

    pruning.prune(force, "force", sparsity=0.5, schedule={"inner": 1}, **DATA)
    pruning.prune(nested, "snip", sparsity=18 / 28, **DATA)

    assert bits(pruning.MaskSet.collect(force)) == "1100110001011110101001000011"  # a second round, 14 again
    assert bits(pruning.MaskSet.collect(nested)) == "1100100001000110100001000011"
    assert not pruning.MaskSet.collect(force).nested_in(before)
    assert force.fc1.weight.flatten()[11] == 0.35  # the entry returns with its original weight


def test_force_of_a_network_held_pruned_is_that_of_its_weights_and_masks():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 4))
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]
    held = copy.deepcopy(plain)
    masks = pruning.prune(held, "random", sparsity=0.6, generator=torch.Generator().manual_seed(0)).masks
    choices = replace(pruning.PUBLISHED["force"].choices, schedule=Schedule(sparsity=0.7, inner=4))

    found = pruning.plan(held, choices, batches=batches, loss=loss)

    assert found.masks == pruning.plan(plain, choices, batches=batches, loss=loss, masks=masks).masks
    assert not found.masks.nested_in(masks)


@pytest.mark.parametrize("method", ["force", "iterative_snip"])
def test_one_round_is_snip(method):
    found = pruning.prune(Golden(), method, sparsity=0.6, schedule={"inner": 1}, **DATA)

    assert found.masks == pruning.prune(Golden(), "snip", sparsity=0.6, **DATA).masks


@pytest.mark.filterwarnings("ignore:every entry of 2.weight is pruned")  # by global_l1_unstructured
@pytest.mark.parametrize("method", ["magnitude", "lamp", "global_l1_unstructured", "erk"])
def test_rounds_on_frozen_weights_are_one(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 10))
    at_once, inner = copy.deepcopy(model), copy.deepcopy(model)
    for sparsity in pruning.targets("cubic", 0.9, 7):
        pruning.prune(model, method, sparsity=sparsity)
    pruning.prune(at_once, method, sparsity=0.9)
    if method in ("magnitude", "lamp"):
        pruning.prune(inner, method, sparsity=0.9, schedule={"inner": 5})
        assert pruning.MaskSet.collect(inner) == pruning.MaskSet.collect(at_once)

    assert pruning.MaskSet.collect(model) == pruning.MaskSet.collect(at_once)


def test_lamp_allocates_what_its_ranking_would():
    ranked = pruning.prune(Golden(), "lamp", sparsity=0.5)
    allotted = pruning.prune(Golden(), "magnitude", sparsity=0.5, scope=Scope("layer", "lamp"))

    assert ranked.masks == allotted.masks
    assert ranked.details["kept"] == {"fc1.weight": 9, "fc2.weight": 5}


def test_rounds_take_batches_in_turn():
    assert [share([1, 2, 3, 4, 5, 6], step, 3) for step in range(3)] == [[1, 2], [3, 4], [5, 6]]
    assert [share([1, 2, 3, 4, 5], step, 3) for step in range(3)] == [[1], [2, 3], [4, 5]]
    assert [share([1, 2], step, 3) for step in range(3)] == [[1], [2], [1]]
    assert share([1, 2], 0, 1) == [1, 2]
    assert share(None, 1, 2) is None
    seen = []

    def watching(model, batch):
        seen.append(batch)
        return loss(model, BATCHES[0])

    pruning.prune(
        Golden(), "iterative_snip", sparsity=0.5, schedule={"inner": 3}, loss=watching,
        batches=iter(range(6)), size=lambda batch: 1,
    )  # fmt: skip
    assert seen == [0, 1, 2, 3, 4, 5]


def test_n_m_keeps_n_of_every_m():
    assert bits(pruning.prune(Golden(), "n_m").masks) == "1010100101100110101011000011"
    one = pruning.prune(Golden(), "n_m", n=1, m=2).masks
    assert one == pruning.prune(Golden(), "n_m", scope={"n": 1, "m": 2}).masks
    assert all((mask.view(-1, 2).sum(1) == 1).all() for mask in one.values())
    weights = {n: p.detach().abs() for n, p in Golden().named_parameters() if n in one}
    layer = pruning.prune(Golden(), "magnitude", sparsity=0.5).masks
    assert all(float((weights[n] * one[n]).sum()) <= float((weights[n] * layer[n]).sum()) for n in one)


@pytest.mark.parametrize(
    ("density", "inner", "kept"),
    [
        (0.01, 1, (0, 1713, 949)),
        (0.01, 10, (1145, 900, 617)),
        pytest.param(0.01, 100, (1299, 786, 577), marks=pytest.mark.slow),
        (0.001, 1, (0, 0, 266)),
        (0.001, 10, (110, 74, 82)),
        pytest.param(0.001, 100, (117, 52, 97), marks=pytest.mark.slow),
    ],
)
def test_synflow_keeps_layers_alive_in_rounds_alone(density, inner, kept):
    """Kept entries in the layers of LeNet-300-100 after 1, 10 and 100 re-scorings."""
    layers = [nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)]
    model = nn.Sequential(*layers).double()
    torch.manual_seed(0)
    for layer in model[::2]:
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    schedule = Schedule(sparsity=1 - density, inner=inner)

    found = pruning.plan(model, replace(pruning.PUBLISHED["synflow"].choices, schedule=schedule))

    assert tuple(found.details["kept"].values()) == kept
    assert found.details["dead"] == [f"{2 * i}.weight" for i in range(3) if not kept[i]]


def test_a_score_of_your_own_and_its_options():
    def farthest(model, batches, loss, *, center=0.0):
        return {name: (p - center).abs() for name, p in model.named_parameters() if name.endswith("weight")}

    assert bits(pruning.prune(Golden(), farthest, sparsity=0.5).masks) == GOLDEN_14["magnitude"]
    moved = pruning.prune(Golden(), farthest, sparsity=0.5, scope="global", center=0.5)
    assert not moved.masks["fc1.weight"][0, 0]  # it is 0.5
    with pytest.raises(ValueError, match=r"`score.middle` \(=1\) is not taken by .* farthest, which takes center"):
        pruning.prune(Golden(), farthest, sparsity=0.5, middle=1)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("sparsty", "sparsity"), ("scop", "scope"), ("round_t", "round_to"), ("dampng", "damping"), ("exampl", "example")],
)
def test_a_misspelt_argument_is_answered_by_the_name_that_was_meant(typed, meant):
    with pytest.raises(ValueError, match=rf"^`{typed}` \(=1\) is no argument; did you mean `{meant}`\?$"):
        pruning.prune(Golden(), "obs", **{typed: 1})


def test_options_find_the_choice_that_they_belong_to():
    obs = chosen("obs", {"damping": 0.1, "min_kept": 2, "control": "shuffle"})
    magnitude = chosen("magnitude", {"repair": "obs_joint", "damping": 0.1, "inner": 3, "allocation": "erk"})

    assert (obs.score.options, obs.repair.options) == ({"damping": 0.1}, {})  # the score takes it
    assert (obs.scope.min_kept, obs.control.kind) == (2, "shuffle")
    assert (magnitude.score.options, magnitude.repair.options, magnitude.schedule.inner) == ({}, {"damping": 0.1}, 3)
    assert magnitude.scope == Scope("layer", "erk")
    assert chosen(pruning.LnStructured, {"n": 1}).arguments == {"n": 1}
    assert chosen(obs, {"score": {"batch_norm": "eval"}}).score.options == {"damping": 0.1, "batch_norm": "eval"}
    assert chosen(obs, {"score": {"kind": "snip"}}).score == Score("snip"), "options of another score are left behind"


def test_plain_zeros_are_entries_like_any_other_and_count_in_the_sparsity_alone():
    model = Golden()
    pruning.prune(model, "magnitude", sparsity=0.5)
    pruning.remove_all(model)
    assert pruning.sparsity(model) == 0.5

    decided = pruning.prune(model, "magnitude", sparsity=0.25)

    assert sum(decided.masks.kept().values()) == 21
    assert pruning.sparsity(model) == 0.25


def test_random_scores_move_torchs_generator_unless_they_have_their_own():
    models = [Golden() for _ in range(3)]
    torch.manual_seed(0)
    first, second = (pruning.prune(model, "random", sparsity=0.5).masks for model in models[:2])
    assert first != second
    torch.manual_seed(0)
    assert pruning.prune(models[2], "random", sparsity=0.5).masks == first
    model, state = Golden(), torch.get_rng_state()
    pruning.prune(model, "random", sparsity=0.5, generator=torch.Generator())
    pruning.prune(model, "magnitude", sparsity=0.75)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("method", ["magnitude", "erk", "random", "lamp", "l1_unstructured"])
def test_layers_without_entries_are_pruned_and_measured(method):
    model = nn.Sequential(nn.Linear(4, 0, bias=False), nn.Linear(0, 4))
    decided = pruning.prune(model, method, sparsity=0.5)
    assert decided.details["kept"] == {"0.weight": 0, "1.weight": 0}
    assert pruning.sparsity(model) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.filterwarnings("ignore:without `example`")
def test_scores_without_a_sign_can_be_inverted_and_added(dtype):
    def rising(model, batches, loss):
        return {"fc1.weight": torch.arange(16).view(4, 4) >= 8} | {"fc2.weight": torch.arange(12).view(3, 4) >= 6}

    def scores(*given):
        return {name: values.to(dtype) for name, values in rising(*given).items()}

    inverted = pruning.prune(Golden(), scores, sparsity=0.5, control="invert").masks
    assert bits(inverted) == 8 * "1" + 8 * "0" + 6 * "1" + 6 * "0"
    assert pruning.prune(Golden(), scores, sparsity=0.5, unit="channel").masks["fc1.weight"].any(1).tolist() == [
        False, False, True, True,
    ]  # fmt: skip


def test_options_of_one_choice_hold_together_in_any_order():
    assert (
        chosen("n_m", {"n": 8, "m": 16}).scope == chosen("n_m", {"m": 16, "n": 8}).scope == Scope("window", n=8, m=16)
    )
    given = {"allocation": "given", "densities": {"*": 0.5}}
    assert chosen("magnitude", given) == chosen("magnitude", dict(reversed(given.items())))
    assert chosen("erk", {"scope": {"allocation": "given"}, "densities": {"*": 0.5}}).scope.densities == {"*": 0.5}
    assert chosen("magnitude", {"scope": "window", "n": 8, "m": 16}).scope == Scope("window", n=8, m=16)


def test_the_unit_says_along_which_dimension_channels_are_scored():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    distances = pruning.scores.fpgm(model, dim=1)["0.weight"]

    mask = pruning.prune(copy.deepcopy(model), "fpgm", sparsity=0.5, dim=1).masks["0.weight"]

    assert mask.equal((distances > distances.sort().values[2]).expand(6, 6))
    with pytest.raises(
        ValueError, match=r"`unit.dim` \(=0\) must equal `dim` \(=1\) of the score, which ranks along it"
    ):
        pruning.prune(model, "fpgm", sparsity=0.5, score=Score("fpgm", {"dim": 1}))
    for score in (Score("taylor", {"form": "filter"}), Score("bn_scale")):
        network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
        with pytest.raises(
            ValueError, match=r"`unit.dim` \(=1\) must be 0, the dimension of the outputs of '0.weight'"
        ):
            pruning.prune(network, "magnitude", sparsity=0.5, score=score, unit=Unit("channel", dim=1), **DATA)


class EveryOther(torch_prune.BasePruningMethod):
    """A method written for torch that prunes every other entry it gets."""

    PRUNING_TYPE: ClassVar[str] = "unstructured"

    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


class Largest(pruning.BasePruningMethod):
    PRUNING_TYPE: ClassVar[str] = "unstructured"

    def __init__(self, amount):
        self.amount = amount

    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.view(-1)[t.abs().flatten().argsort(descending=True, stable=True)[: self.amount]] = 0
        return mask


def test_a_class_written_for_torch_selects_unchanged():
    by_hand, model = Golden(), Golden()
    for _ in range(2):
        for layer in (by_hand.fc1, by_hand.fc2):
            EveryOther.apply(layer, "weight")
        pruning.prune(model, EveryOther)

    assert pruning.MaskSet.collect(model) == pruning.MaskSet.collect(by_hand)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_class_prunes_as_many_as_it_is_told(scope):
    model = Golden()
    for sparsity, kept in ((0.25, 21), (0.5, 14)):
        pruning.prune(model, Largest, sparsity=sparsity, scope=scope)
        masks = pruning.MaskSet.collect(model)
        assert sum(masks.kept().values()) == kept
    if scope == "global":
        values = {n: p.detach() for n, p in Golden().named_parameters() if n in masks}
        highest = max(float(values[n][masks[n]].abs().max()) for n in masks)
        assert highest <= min(float(values[n][~masks[n]].abs().min()) for n in masks)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("random_unstructured", lambda m, g: pruning.random_unstructured(m, "weight", 0.5, generator=g)),
        ("random_structured", lambda m, g: pruning.random_structured(m, "weight", 0.5, 0, generator=g)),
        ("ln_structured", lambda m, g: pruning.ln_structured(m, "weight", 0.5, 2, 0, generator=g)),
        ("identity", lambda m, g: pruning.identity(m, "weight")),
    ],
)
@pytest.mark.filterwarnings("ignore:without `example`")
def test_torchs_methods_give_the_bits_of_their_functions(name, call):
    model, by_hand = Golden(), Golden()
    generator, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    pruning.prune(model, name, sparsity=None if name == "identity" else 0.5, generator=generator)
    for layer in (by_hand.fc1,) if "structured" in name.split("_") else (by_hand.fc1, by_hand.fc2):
        call(layer, other)  # channels of the last layer are the network's outputs

    assert pruning.MaskSet.collect(model) == pruning.MaskSet.collect(by_hand)
    assert torch.equal(generator.get_state(), other.get_state())


def test_global_classes_give_the_bits_of_global_unstructured():
    model, by_hand = Golden(), Golden()
    pruning.prune(model, "global_random_unstructured", sparsity=0.5, generator=torch.Generator().manual_seed(1))
    pruning.global_unstructured(
        [(by_hand.fc1, "weight"), (by_hand.fc2, "weight")],
        pruning.RandomUnstructured,
        amount=14,
        generator=torch.Generator().manual_seed(1),
    )
    assert pruning.MaskSet.collect(model) == pruning.MaskSet.collect(by_hand)


def test_channels_of_a_network_that_is_pruned_by_entries():
    model = Golden()
    pruning.prune(model, "magnitude", sparsity=0.5)
    before = pruning.MaskSet.collect(model)
    decided = pruning.prune(model, "magnitude", sparsity=0.25, unit=Unit("channel", spare_last=True))

    assert decided.masks.nested_in(pruning.MaskSet({"fc1.weight": before["fc1.weight"]}))
    assert int((~decided.masks["fc1.weight"].any(1)).sum()) == 1
    assert pruning.MaskSet.collect(model)["fc2.weight"].equal(before["fc2.weight"])


# --- a plan changes nothing, and is committed completely --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:without `example`")
def test_a_plan_changes_nothing():
    model = Golden()
    pruning.prune(model, "magnitude", sparsity=0.3)
    state, masks = copy.deepcopy(model.state_dict()), pruning.MaskSet.collect(model)
    drawn = torch.get_rng_state()

    for name in ("snip", "force", "synflow", "random_structured"):
        choices = replace(pruning.PUBLISHED[name].choices, schedule=Schedule(sparsity=0.6))
        pruning.plan(model, choices, **DATA, generator=torch.Generator())

    assert pruning.MaskSet.collect(model) == masks
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in model.parameters())


def test_values_come_into_force_with_the_masks_or_not_at_all():
    masks = pruning.MaskSet({"fc1.weight": torch.eye(4), "fc2.weight": torch.ones(3, 4)})
    model = Golden()
    values = {"fc1.weight": torch.full((4, 4), 2.0), "fc2.bias": torch.full((3,), 7.0)}

    pruning.commit(model, pruning.PruningPlan(masks, values))

    assert torch.equal(model.fc1.weight, 2 * torch.eye(4).double())
    assert model.fc2.bias.tolist() == [7.0] * 3
    state = copy.deepcopy(model.state_dict())
    values = {"fc1.weight": torch.full((4, 4), 3.0)}
    for wrong in (
        pruning.PruningPlan(masks, {**values, "fc3.bias": torch.ones(3)}),
        pruning.PruningPlan(masks, {"fc1.bias": torch.ones(4), "fc2.bias": torch.ones(4)}),
        pruning.PruningPlan(pruning.MaskSet({"fc1.weight": torch.ones(4, 4), "fc2.weight": torch.ones(4, 4)}), values),
    ):
        with pytest.raises(ValueError, match=r"fc3.bias|fc2.bias|fc2.weight"):
            pruning.commit(model, wrong)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_tied_weights_are_one():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)).double()
    model[2].weight = model[0].weight

    decided = pruning.prune(model, "snip", sparsity=0.5, batches=BATCHES, loss=loss)

    assert list(decided.masks) == ["0.weight"]
    assert torch.equal(model[0].weight_mask, model[2].weight_mask)
    assert pruning.sparsity(model) == 0.5


# --- controls ---------------------------------------------------------------------------------------------------------


def test_a_shuffled_mask_keeps_counts_and_survivors():
    model = Golden()
    pruning.prune(model, "magnitude", sparsity=0.25)
    before = pruning.MaskSet.collect(model)
    choices = Choices(schedule=Schedule(sparsity=0.5), control=Control("shuffle"))

    plain = pruning.plan(model, Choices(schedule=Schedule(sparsity=0.5))).masks
    seeds = [pruning.plan(model, choices, generator=torch.Generator().manual_seed(s)).masks for s in (1, 1, 2)]

    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[0] != plain
    for masks in seeds:
        assert masks.kept() == plain.kept()
        assert masks.nested_in(before)


def test_shuffling_fixes_all_ones_and_keeps_windows():
    cut = pruning.groups(Golden(), scope=Scope("window"))
    ones = {name: torch.ones(size, dtype=torch.bool) for name, size in cut.sizes.items()}
    assert all(mask.all() for mask in pruning.shuffle(ones, cut).values())

    masks = pruning.prune(Golden(), "n_m", control=Control("shuffle")).masks
    assert all((mask.view(-1, 4).sum(1) == 2).all() for mask in masks.values())


def test_every_shuffle_is_as_likely():
    cut = pruning.groups(nn.Linear(4, 1))
    kept = {"weight": torch.tensor([True, True, False, False])}
    generator = torch.Generator().manual_seed(0)
    drawn = [tuple(pruning.shuffle(kept, cut, generator)["weight"].tolist()) for _ in range(1200)]

    counts = [drawn.count(pattern) for pattern in set(drawn)]
    assert len(counts) == 6
    assert min(counts) > 150


def test_inverted_scores_keep_the_lowest():
    choices = Choices(schedule=Schedule(sparsity=0.5), scope=Scope("global"), control=Control("invert"))
    masks = pruning.plan(Golden(), choices).masks
    assert bits(masks) == "".join("10"[int(bit)] for bit in GOLDEN_14["global_l1_unstructured"])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("snip", {"sparsity": 0.5}, "`batches` \\(=None\\) must hold scoring data, which `snip` reads"),
        ("snip", {"sparsity": 0.5, "batches": BATCHES}, "`loss` \\(=None\\) must be a function"),
        ("snap", {"sparsity": 0.5}, "`method` \\(='snap'\\) must be one of magnitude"),
        ("magnitude", {}, r"`sparsity` \(=None\) must be a fraction"),
        ("magnitude", {"sparsity": 1.5}, "`sparsity` \\(=1.5\\) must lie in \\[0, 1\\)"),
        ("n_m", {"scope": {"m": 3}}, "`scope.m` \\(=3\\) must divide.*in a sweep by prune.exclude=.fc1.weight."),
        ("n_m", {"sparsity": 0.75}, "must be 0.5 where 2 of each 4"),
        ("n_m", {"schedule": {"inner": 2}}, "must be 1 for windows"),
        (
            "magnitude",
            {"sparsity": 0.5, "temperature": 2},
            "`score.temperature` .* not taken by the score magnitude",
        ),
        ("magnitude", {"sparsity": 0.5, "scope": {"kid": "global"}}, "`scope` has no field 'kid'; its fields are kind"),
        ("magnitude", {"sparsity": 0.5, "scope": 3}, "`scope` \\(=3\\) must be a Scope"),
        ("l1_unstructured", {"sparsity": 0.5, "n": 2}, "do not fit L1Unstructured"),
        (Choices(Score("snop")), {"sparsity": 0.5}, "`score.kind` \\(='snop'\\) must be a function, or one of"),
        (Choices(select="l7"), {"sparsity": 0.5}, "`select` \\(='l7'\\) must be a subclass"),
        (3, {"sparsity": 0.5}, "`method` \\(=3\\) must be"),
        (lambda *_: None, {"sparsity": 0.5}, "returned NoneType; it must"),
        (lambda *_: {"a": [1]}, {"sparsity": 0.5}, "returned list for 'a'; it must return a mapping"),
        (pruning.PruningContainer, {}, "that prunes by itself"),
        (
            "magnitude",
            {"scope": "global", "sparsity": 0.5, "min_kept": 1, "score": lambda *_: UNDEFINED},
            "of fc1.weight",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_changed(method, given, said):
    model = Golden()
    with pytest.raises(ValueError, match=said):
        pruning.prune(model, method, **given)
    assert not pruning.is_pruned(model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rounds": 3}, "`rounds` must not be passed to `plan` or `prune`: it schedules"),
        ({"at": "start"}, "`at` must not be passed"),
        ({"schedule": {"rounds": 2}}, "`rounds` must not be passed"),
        ({"schedule": {"sparsty": 0.5}}, "`schedule` has no field 'sparsty'; its fields are sparsity, inner"),
        ({"schedule": "cubic"}, r"`schedule` \(='cubic'\) must be a Schedule, or a dict of its fields"),
        ({"restart": "reinit"}, "`restart` must not be passed"),
        ({"rates": 0}, "`rates` must not be passed"),
    ],
)
def test_what_a_training_goes_by_is_not_taken_without_a_word(given, said):
    model = Golden()
    with pytest.raises(ValueError, match=said):
        pruning.prune(model, "magnitude", sparsity=0.5, **given)
    assert not pruning.is_pruned(model)


def test_a_score_of_your_own_may_take_a_word_of_a_training():
    def late(model, batches, loss, *, step):
        return {name: p.detach().abs() + step for name, p in model.named_parameters() if name.endswith("weight")}

    pruning.prune(Golden(), late, sparsity=0.5, step=3)


def test_a_score_of_your_own_that_lacks_its_batches_is_told_of():
    def of_batches(model, batches, loss):
        return {"fc1.weight": torch.zeros(4, 4) * len([*batches]), "fc2.weight": torch.zeros(3, 4)}

    with pytest.raises(
        ValueError, match=r"`batches` \(=None\) was passed to the score of_batches.* `batches` and `loss`"
    ):
        pruning.prune(Golden(), of_batches, sparsity=0.5)
    with pytest.raises(TypeError, match="not iterable"):
        pruning.prune(Golden(), lambda *_: iter(3), sparsity=0.5, batches=BATCHES, loss=loss)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


WITHOUT_VALUES = {
    **{
        name: lambda model, name=name: pruning.prune(model, name, sparsity=0.5, **DATA)
        for name, method in pruning.PUBLISHED.items()
        if not (
            method.choices.dynamics.row.in_training
            or method.choices.schedule.order == "sequential"
            or method.choices.unit.spans
        )
    },
    "group": lambda model: pruning.prune(model, unit="group", sparsity=0.5, example=torch.randn(2, 8)),
    "a class": lambda model: pruning.prune(model, pruning.L1Unstructured, amount=0.5),
    "an own score": lambda model: pruning.prune(model, lambda *_, **__: {"0.weight": torch.rand(8, 8)}, sparsity=0.5),
    "plan": lambda model: pruning.plan(model, Choices(schedule=Schedule(sparsity=0.5))),
    "global": lambda model: pruning.global_unstructured([(model[0], "weight")], pruning.L1Unstructured, amount=0.5),
    "channels": lambda model: pruning.global_structured([(model[0], "weight")], amount=0.5),
    "magnitude alone": pruning.scores.magnitude,
    "sparsity": pruning.sparsity,
    "shrink": lambda model: pruning.shrink(model, torch.randn(2, 8)),
    "collect": lambda model: pruning.MaskSet.collect(pruning.identity(copy.deepcopy(model)[0], "weight")),
}


@pytest.mark.parametrize("call", WITHOUT_VALUES.values(), ids=WITHOUT_VALUES)
def test_a_network_on_meta_is_told_to_load_its_values_and_nothing_is_changed(call):
    model = on_meta()

    with pytest.raises(
        ValueError, match=r"weight` is on the meta device and has no values; load values first, for example with `mod"
    ):
        call(model)

    assert list(model.state_dict()) == list(on_meta().state_dict())
    assert pruning.groups(model).sizes == {"0.weight": 64, "3.weight": 32}  # needs only shapes


def test_weights_that_have_values_are_pruned_beside_others_on_meta():
    model = on_meta()
    model[0] = nn.Linear(8, 8)

    with pytest.raises(ValueError, match=r"^`3\.weight` is on the meta device"):
        pruning.prune(model, sparsity=0.5)
    pruning.prune(model, sparsity=0.5, parameters=["0.weight"])

    assert int((model[0].weight == 0).sum()) == 32


def test_what_is_no_generator_and_no_batches_is_told():
    with pytest.raises(TypeError, match=r"`generator` \(=0\) must be a torch.Generator, not int"):
        pruning.prune(Golden(), "random", sparsity=0.5, generator=0)
    for given, named in ((3, "int"), (torch.ones(4, 3), "Tensor"), ({"x": torch.ones(4, 3)}, "dict")):
        with pytest.raises(TypeError, match=rf"`batches` \(a {named}\) must be a list of batches"):
            pruning.prune(Golden(), "snip", sparsity=0.5, batches=given, loss=loss)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Scope("globe"), "`scope.kind`"),
        (lambda: Scope("layer", "given"), "`scope.densities`"),
        (lambda: Scope("layer", "given", densities={"a": 2}), "must lie in"),
        (lambda: Scope("global", "erk"), "use kind='layer'"),
        (lambda: Scope("window", n=5), "n of each m are KEPT"),
        (lambda: Scope("row", min_kept=1), "counts within each"),
        (lambda: Scope("row", "lamp"), "not rows; use 'each' or 'uniform' or 'uniform_plus' or"),
        (lambda: Scope("layer", n=1), "use kind='window'"),
        (lambda: Unit("block", size=0), "at least 1"),
        (lambda: Schedule(inner=0), "at least 1"),
        (lambda: Schedule(1.5), r"`sparsity` \(=1.5\) must lie in"),
        (lambda: Dynamics("regrow"), "must be one of nested, free"),
        (lambda: Repair("obs", {"damping": -1.0}), r"`repair.damping` \(=-1.0\) must be above 0"),
        (lambda: Repair("obsolete"), "must be one of none, obs,"),
        (lambda: Control("twist"), "must be one of none, shuffle, invert"),
        (lambda: Choices(unit=Unit("channel"), scope=Scope("window")), "ranks single entries along"),
        (lambda: Choices(unit=Unit("channel"), scope=Scope("row")), "leaves nothing to rank for unit.kind='channel'"),
        (lambda: Choices(select=Largest, dynamics=Dynamics("free")), "'Largest'.*cannot be combined"),
        (lambda: Choices(select=Largest, control=Control("invert")), "'invert'"),
        (lambda: Choices(unit=Unit("block"), scope=Scope("layer", "lamp")), "counts single weights"),
    ],
)
def test_what_cannot_be_combined_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("magnitude", {}),
        ("l1_unstructured", {}),
        ("global_l1_unstructured", {}),
        ("ln_structured", {}),
        ("wanda", {"batches": BATCHES, "order": "at_once"}),
    ],
)
@pytest.mark.filterwarnings("ignore:without `example`")
def test_less_than_before_is_refused(method, given):
    model = Golden()
    before = pruning.prune(model, "magnitude", sparsity=0.9).masks
    with pytest.raises(ValueError, match=r"cannot be reached"):
        pruning.prune(model, method, sparsity=0.25, **given)
    assert pruning.MaskSet.collect(model) == before


@pytest.mark.parametrize("method", ["magnitude", "l1_unstructured"])
def test_rescorings_lead_tensors_that_were_pruned_unevenly_to_one_sparsity(method):
    model = Golden()
    pruning.prune(model, "magnitude", sparsity=0.5, parameters=["fc1.weight"])

    decided = pruning.prune(model, method, sparsity=0.6, schedule={"inner": 3})

    assert decided.details["kept"] == {"fc1.weight": 6, "fc2.weight": 5}


def test_a_class_is_told_how_many_to_keep_or_refuses_to_be():
    with pytest.raises(ValueError, match=r"`scope.min_kept` \(=3\) cannot be enforced where `select`"):
        pruning.prune(Golden(), "global_l1_unstructured", sparsity=0.9, scope={"min_kept": 3})
    with pytest.raises(ValueError, match=r"`scope.min_kept` \(=3\) must be 0 for EveryOther"):
        pruning.prune(Golden(), EveryOther, scope={"min_kept": 3})
    with pytest.raises(ValueError, match=r"`sparsity` \(=None\) must be a fraction"):
        pruning.prune(Golden(), "global_l1_unstructured")


def test_every_published_method_is_a_valid_combination():
    for method in pruning.PUBLISHED.values():
        if not method.choices.unit.spans:  # of one tensor each; units of transformers are tried in dependencies/
            pruning.groups(Golden(), method.choices.unit, method.choices.scope)
    assert {"snip", "iterative_snip", "force", "wanda", "slimming", "lottery_ticket"} <= set(pruning.PUBLISHED)


@pytest.mark.parametrize("method", ["ln_structured", pruning.RandomStructured])
@pytest.mark.parametrize("dim", [1, -1])
def test_channels_are_counted_along_the_dimension_that_a_class_prunes(method: Any, dim: int) -> None:
    model = nn.Sequential(nn.Linear(8, 2))

    pruning.prune(model, method, sparsity=0.5, dim=dim, generator=torch.Generator().manual_seed(0))

    assert (pruning.sparsity(model), int(model[0].weight_mask.any(0).sum())) == (0.5, 4)


class Dimmed(pruning.L1Unstructured):
    """An unstructured class whose `dim` means something of its own."""

    given: ClassVar[list[Any]] = []

    def __init__(self, amount: int, dim: Any = None) -> None:
        super().__init__(amount)
        self.given.append(dim)


def test_an_unstructured_class_gets_the_dim_that_was_given_alone() -> None:
    pruning.prune(nn.Linear(8, 2), Dimmed, sparsity=0.5)
    pruning.prune(nn.Linear(8, 2), Dimmed, sparsity=0.5, dim="rows")

    assert Dimmed.given == [None, "rows"]


class Forwarding(pruning.L1Unstructured):
    """Passes on whatever it is called with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class ByPosition(pruning.L1Unstructured):
    """Takes its amount by position."""

    def __init__(self, *args: Any, factor: int = 1) -> None:
        super().__init__(args[0] * factor)


class ByName(pruning.LnStructured):
    """Takes its amount and its dimension among other keywords."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(n=2, **kwargs)


@pytest.mark.parametrize("method", [Forwarding, ByPosition, ByName])
@pytest.mark.parametrize("asked", [{"sparsity": 0.5}, {"amount": 0.5}])
def test_a_class_that_forwards_its_arguments_is_told_how_much_to_prune(method: type, asked: dict[str, float]) -> None:
    model = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2))

    assert pruning.prune(model, method, **asked).masks.sparsity() == 0.5


@pytest.mark.parametrize("name", list(pruning.dynamics.DYNAMICS))
def test_a_method_that_changes_masks_within_a_training_says_where_it_works(name):
    with pytest.raises(ValueError, match=rf"`dynamics.kind` \(='{name}'\).*attach pruning.dynamics.{name}\("):
        pruning.prune(Golden(), name, **({} if "ste" in name or "soft" in name else {"sparsity": 0.5}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dynamics": Dynamics("rigl"), "unit": Unit("channel")}, "`unit.kind` .*must be 'entry'"),
        ({"dynamics": Dynamics("set"), "scope": Scope("window")}, "`scope.kind` .*'layer' or 'global'"),
        ({"dynamics": Dynamics("sr_ste")}, "`scope.kind` .*must be 'window'"),
        ({"dynamics": Dynamics("movement"), "score": Score("snip")}, "`score.kind` .*must be 'magnitude'"),
        ({"dynamics": Dynamics("gradual"), "repair": Repair("obs")}, "`repair.kind` .*must be 'none'"),
        ({"dynamics": Dynamics("gradual"), "schedule": Schedule(0.5, inner=2)}, "`schedule.inner` .*must be 1"),
        ({"dynamics": Dynamics("static"), "control": Control("shuffle")}, "`control.kind` .*must be 'none'"),
        ({"dynamics": Dynamics("rigl"), "select": "l1_unstructured"}, "`select` .*must be None"),
    ],
)
def test_a_dynamics_refuses_choices_that_it_cannot_change(options, said):
    with pytest.raises(ValueError, match=said):
        Choices(**options)


def test_a_dynamics_refuses_options_that_are_not_its_own():
    with pytest.raises(ValueError, match=r"`dynamics.evry` \(=3\) is not taken by the dynamics rigl"):
        Dynamics("rigl", {"evry": 3})
    with pytest.raises(ValueError, match=r"`dynamics.fraction` \(=2\) must lie in"):
        Dynamics("set", {"fraction": 2})


def test_a_module_and_a_name_are_answered_by_the_qualified_name():
    model = Golden()
    with pytest.raises(TypeError, match=r"`parameters` \(with a tuple\) must hold names .*; pass 'fc2.weight'"):
        pruning.prune(model, "magnitude", sparsity=0.5, parameters=[(model.fc2, "weight")])
    with pytest.raises(TypeError, match=r"\(with a Parameter\) must hold names .* such as 'fc1.weight'"):
        pruning.prune(model, "magnitude", sparsity=0.5, parameters=[model.fc2.weight])
    with pytest.raises(ValueError, match=r"\(='fc2.weight'\) must be names in a list; pass \['fc2.weight'\]"):
        pruning.prune(model, "magnitude", sparsity=0.5, parameters="fc2.weight")


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_what_is_no_module_is_refused_in_a_sentence():
    for model in (torch.relu, torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4), check_trace=False)):
        with pytest.raises(TypeError, match=r"^`model` \(a \w+\) must be an nn.Module; pass it as it was before"):
            pruning.prune(model, "magnitude", sparsity=0.5)


def test_plan_takes_the_call_of_prune_and_commit_applies_it():
    model, other = Golden(), Golden()
    other.load_state_dict(model.state_dict())
    assert inspect.signature(pruning.plan) == inspect.signature(pruning.prune)
    plan = pruning.plan(model, "magnitude", sparsity=0.5, scope="global", min_kept=2)
    assert not pruning.is_pruned(model)
    pruning.commit(model, plan)
    assert pruning.prune(other, "magnitude", sparsity=0.5, scope="global", min_kept=2).masks == plan.masks
    assert pruning.MaskSet.collect(model) == plan.masks


def test_prune_takes_further_masks_as_plan_does():
    model = Golden()
    name, shape = next((name, mask.shape) for name, mask in pruning.plan(model, sparsity=0.5).masks.items())
    first = torch.ones(shape)
    first[0] = 0
    found = pruning.prune(model, sparsity=0.5, masks={name: first}).masks
    assert found == pruning.plan(Golden(), sparsity=0.5, masks={name: first}).masks
    assert not found[name][0].any()


def test_a_sparsity_out_of_reach_names_only_what_can_be_changed() -> None:
    whole = nn.Sequential(nn.Conv2d(3, 6, 1), nn.GroupNorm(1, 6), nn.Conv2d(6, 3, 1))  # one norm over all channels
    images = torch.randn(2, 3, 4, 4)
    with pytest.raises(
        ValueError, match=r"must be at most 0 of the channels .* choose another unit, such as 'entry'\.$"
    ):
        pruning.prune(whole, unit="group", example=images, sparsity=0.5)
    free = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 3, 1))
    for name, reached in (("min_kept", "0"), ("round_to", "0")):
        with pytest.raises(ValueError, match=rf"at most {reached} of .*; type a lower `scope.{name}`\.$"):
            pruning.prune(free, unit="group", example=images, sparsity=0.5, **{name: 6})
    with pytest.raises(ValueError, match=r"at most 0\.833333 of .*; type a lower sparsity\.$"):
        pruning.prune(free, unit="group", example=images, sparsity=0.9)


def test_a_score_that_cannot_be_called_is_answered_by_its_signature() -> None:
    def short(model: nn.Module) -> dict[str, torch.Tensor]:
        return {}

    with pytest.raises(ValueError, match=r"takes \(model: .*.*; define it as .*short\(model, batches, loss, \*\*_\)"):
        pruning.prune(Golden(), short, sparsity=0.5)


@pytest.mark.parametrize("masks", [3, [1], {"fc.weight": 3}, {3: torch.ones(2)}])
def test_masks_must_map_names_to_tensors(masks: Any) -> None:
    model = Golden()
    for call in (
        lambda: pruning.MaskSet(masks),
        lambda: pruning.MaskKeeper(model, masks),
        lambda: pruning.plan(model, sparsity=0.5, masks=masks),
        lambda: pruning.layerwise(model, "magnitude", [(torch.ones(1, 8),)], sparsity=0.5, masks=masks),
        lambda: pruning.dynamics.static().attach(model, masks, torch.optim.SGD(model.parameters()), length=3),
    ):
        with pytest.raises(TypeError, match=r"^`masks` \((=|with ).* must map names of parameters to tensors; pass a"):
            call()


@pytest.mark.parametrize("power", [1e20, -1e20, 1e308])
def test_a_power_that_leaves_no_density_is_refused_by_its_key(power: float) -> None:
    with pytest.raises(RefusedValue, match=r"^`scope\.power` \(=.*\) must lie in \[-30, 30\]"):
        pruning.prune(Golden(), sparsity=0.5, scope={"kind": "layer", "allocation": "erk", "power": power})


def test_an_integer_beyond_64_bits_is_refused_by_its_key() -> None:
    with pytest.raises(RefusedValue, match=r"^`score\.damping` \(=10{25}\) must be at most"):
        pruning.prune(Golden(), "obs", sparsity=0.5, batches=BATCHES, loss=loss, damping=10**25)
