"""Methods that read data or neighbouring layers: golden masks, rows, scales of BatchNorm, dead paths."""

from __future__ import annotations

import pytest
import torch
from golden_network import BATCHES, Golden, bits, loss
from torch import nn

import pruning
from pruning.choices.axes import Schedule, Scope, Score, Unit
from pruning.choices.combining import Choices

DATA = {"batches": BATCHES, "loss": loss}


@pytest.mark.parametrize(
    ("method", "options", "want"),
    [
        ("grasp", {"temperature": 1}, "0110100011111010001010010011"),
        ("grasp", {}, "1110110011010100001010010011"),
        ("taylor", {}, "1100110001001110101011000011"),  # ranks as SNIP
        ("fisher", {}, "0110100001100110101011010011"),
        ("obd", {}, "0110100001101110101010010011"),
        ("obs", {"damping": 0.01}, "1110110101110110100000000011"),
        ("obs", {"damping": 0.01, "block": 4}, "1110100101100110101010000011"),
    ],
)
def test_golden_masks_of_half_the_weights(method, options, want):
    assert bits(pruning.prune(Golden(), method, sparsity=0.5, **DATA, **options).masks) == want


def test_obs_ranks_blocks_that_go_at_once_by_what_all_of_each_costs():
    masks = pruning.prune(Golden(), "obs", sparsity=3 / 7, block=4, unit="block", damping=0.01, **DATA).masks

    assert masks["fc1.weight"].all(1).tolist() == [True, False, True, True]
    assert masks["fc2.weight"].any(1).tolist() == [False, False, True]


@pytest.mark.parametrize("given", [{"sparsity": 0.5}, {"scope": "window"}])
def test_wanda_by_rows_and_windows(given):
    asked = {"parameters": ["fc1.weight"], "batches": [BATCHES[0][0]], "order": "at_once", **given}
    masks = pruning.prune(Golden(), "wanda", **asked).masks

    assert "".join(str(int(kept)) for kept in masks["fc1.weight"].flatten()) == "0110110001100110"


def test_wanda_takes_remembered_norms_which_are_smaller_than_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(54, 8))
    batches, held = [torch.randn(4, 2, 5, 5)], {}

    def remember(key, make):
        if tuple(key) not in held:
            held[tuple(key)] = make()
        return held[tuple(key)]

    for sparsity in (0.25, 0.5):
        choices = Choices(Score("wanda"), scope=Scope("row"), schedule=Schedule(sparsity))
        fresh = pruning.plan(model, choices, batches=batches).masks
        assert pruning.plan(model, choices, batches=batches, remember=remember).masks == fresh
    (norms,) = held.values()
    assert {name: tuple(each.shape) for name, each in norms.items()} == {"0.weight": (1, 2, 3, 3), "2.weight": (54,)}


def with_batch_norms():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU())
    model.append(nn.Linear(4, 3))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -0.9, 0.1, 0.8, 0.2, 0.7]))
        model[4].weight.copy_(torch.tensor([0.03, 0.02, 0.01, 0.04]))
    return model


def test_slimming_prunes_the_layers_before_the_smallest_scales_and_leaves_one_channel():
    masks = pruning.prune(with_batch_norms(), "slimming", sparsity=0.5).masks

    assert list(masks) == ["0.weight", "3.weight"]
    assert masks["0.weight"].any(1).tolist() == [True, True, False, True, False, True]
    assert masks["3.weight"].any(1).tolist() == [False, False, False, True]


def test_scores_of_channels_rank_whole_channels():
    model = Golden()
    masks = pruning.prune(model, "fpgm", sparsity=0.25).masks
    assert list(masks) == ["fc1.weight"]
    assert masks["fc1.weight"].any(1).tolist() == [True, True, True, False]  # 3.45 is the least of the distances

    form = Choices(
        Score("taylor", {"form": "gate"}), Unit("channel", spare_last=True), schedule=Schedule(sparsity=0.25)
    )
    assert not pruning.plan(Golden(), form, **DATA).masks["fc1.weight"][0].any()  # 4.1e-5
    of_scales = Choices(Score("taylor", {"form": "bn"}), Unit("channel"), schedule=Schedule(sparsity=0.5))
    batches = [(torch.randn(8, 4), torch.randint(3, (8,)))]
    found = pruning.plan(with_batch_norms(), of_scales, batches=batches, loss=loss)
    assert found.details["kept"] == {"0.weight": 3, "3.weight": 2}


def test_scales_that_no_layer_has_are_refused():
    for model, names in ((Golden(), None), (with_batch_norms(), ["6.weight"])):
        with pytest.raises(ValueError, match="no layer is followed by one"):
            pruning.prune(model, "slimming", sparsity=0.5, parameters=names)
    some = pruning.prune(with_batch_norms(), "slimming", sparsity=0.5, parameters=["3.weight", "6.weight"])
    assert list(some.masks) == ["3.weight"]
    with pytest.raises(ValueError, match="scores whole channels, not units of kind"):
        pruning.prune(Golden(), "fpgm", sparsity=0.5, unit="entry")
    with pytest.raises(ValueError, match=r"`scope.kind` \(='global'\) ranks filters of all tensors together"):
        pruning.prune(Golden(), "fpgm", sparsity=0.5, scope="global")


class Crossed(nn.Module):
    """A network that calls layers and BatchNorms in another order than it defines them; `fork` prevents tracing."""

    def __init__(self, *, fork: bool = False) -> None:
        super().__init__()
        self.fork = fork
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bn1, self.bn2 = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        with torch.no_grad():
            self.bn1.weight.copy_(torch.tensor([1.0, 2.0, 0.1, 0.2]))
            self.bn2.weight.copy_(torch.tensor([0.1, 0.2, 1.0, 2.0]))

    def forward(self, x):
        x = x.abs() if self.fork and x.sum() > 0 else x
        x = self.bn1(torch.relu(self.fc1(x)))
        return self.last(self.bn2(self.fc2(x)) + x)


def test_a_layer_goes_by_the_batch_norm_that_reads_it_not_by_the_order_of_definition():
    masks = pruning.prune(Crossed(), "slimming", sparsity=0.5).masks
    assert masks["fc1.weight"].any(1).tolist() == [True, True, False, False]
    assert masks["fc2.weight"].any(1).tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match=r"`model` \(Crossed\) cannot be traced by torch.fx \(.* finds the BatchNorm"):
        pruning.prune(Crossed(fork=True), "slimming", sparsity=0.5)


def test_windows_and_rows_of_a_transposed_convolution_follow_its_inputs():
    layer = nn.ConvTranspose2d(8, 3, 2)

    pairs = pruning.prune(layer, "n_m").masks["weight"]
    rows = pruning.prune(nn.ConvTranspose2d(8, 3, 2), "magnitude", sparsity=0.25, scope="row").masks["weight"]

    assert (pairs.view(2, 4, 3, 2, 2).sum(1) == 2).all()
    assert (rows.sum((0, 2, 3)) == 24).all()


def test_entries_on_dead_paths_count_as_pruned():
    model = Golden()
    kept = {"fc1.weight": torch.ones(4, 4), "fc2.weight": torch.ones(3, 4)}
    kept["fc1.weight"][0] = 0  # nothing flows into unit 0, so its 3 weights in the next layer do nothing
    kept["fc2.weight"][:, 1] = 0  # nothing flows out of unit 1, so its 4 weights before do nothing
    pruning.commit(model, pruning.PruningPlan(pruning.MaskSet(kept)))

    assert pruning.sparsity(model) == pytest.approx(7 / 28)
    assert pruning.effective_sparsity(model) == pytest.approx(14 / 28)


def test_a_collapsed_network_is_pruned_whole():
    model = Golden()
    with pytest.warns(UserWarning, match=r"every entry of fc1.weight is pruned, so nothing passes through") as warned:
        decided = pruning.prune(model, "magnitude", scope=Scope("layer", "given", densities={"fc1*": 0, "fc2*": 1}))

    assert warned[0].filename == __file__
    assert decided.details["dead"] == ["fc1.weight"]
    assert pruning.effective_sparsity(model) == 1.0
