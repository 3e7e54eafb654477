"""Mask sets: collected from all kinds of hooks, applied completely or not at all, compared with values by hand."""

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from mask_cases import model, some_masks
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pruning import MaskKeeper, MaskSet, custom_from_mask, l1_unstructured
from pruning.measure import report
from pruning.measure.macs import LayerMacs, macs


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def test_collect_finds_our_hooks_and_torch_s_in_the_order_of_the_model():
    net = model()
    torch_prune.random_unstructured(net[2], "weight_hh_l0", 0.5)
    l1_unstructured(net[1][0], "weight", 0.2)
    l1_unstructured(net[1][0], "weight", 3)
    custom_from_mask(net[0], "weight", torch.zeros(4, 1, 3, 3))
    net[1].register_buffer("other_mask", torch.zeros(3))
    masks = MaskSet.collect(net)
    assert list(masks) == ["0.weight", "1.0.weight", "2.weight_hh_l0"]
    assert masks.sparsities() == {"0.weight": 1.0, "1.0.weight": 9 / 30, "2.weight_hh_l0": 0.5}
    assert masks.sparsity() == (36 + 9 + 18) / (36 + 30 + 36)
    assert masks.sizes() == {"0.weight": 36, "1.0.weight": 30, "2.weight_hh_l0": 36}
    assert masks.kept() == {"0.weight": 0, "1.0.weight": 21, "2.weight_hh_l0": 18}
    assert torch.equal(masks["1.0.weight"], net[1][0].weight_mask.bool())


def test_a_collected_set_is_a_snapshot():
    net = model()
    l1_unstructured(net[0], "weight", 0.5)
    masks = MaskSet.collect(net)
    net[0].weight_mask.zero_()
    assert masks.sparsity() == 0.5


def test_a_dense_model_has_no_masks():
    assert len(MaskSet.collect(model())) == 0
    assert MaskSet({}).sparsity() == 0.0


def test_apply_to_a_plain_model():
    net = model()
    dense = {name: p.detach().clone() for name, p in net.named_parameters()}
    masks = some_masks()
    masks.apply(net)
    assert MaskSet.collect(net) == masks
    net[0](torch.randn(1, 1, 3, 3))
    assert torch.equal(net[0].weight, dense["0.weight"] * masks["0.weight"])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"3.weight": torch.ones(2)}, r"`3\.weight` is in the masks, but Sequential has no such parameter"),
        ({"0.scale": torch.ones(2)}, r"`0\.scale` is in the masks"),
        ({"1.0.weight": torch.ones(6, 5)}, r"`1\.0\.weight` has the shape \(5, 6\) in the model but \(6, 5\)"),
    ],
)
def test_masks_of_another_model_are_refused_and_nothing_is_pruned(bad, message):
    net = model()
    with pytest.raises(ValueError, match=message):
        MaskSet({"0.weight": torch.zeros(4, 1, 3, 3), **bad}).apply(net)
    assert len(MaskSet.collect(net)) == 0


def test_overlap_by_hand():
    first = MaskSet({"a": tensor([1, 1, 0, 0]), "b": tensor([0, 0])})
    second = MaskSet({"b": tensor([0, 0]), "a": tensor([1, 0, 1, 0])})
    assert first.ious(second) == {"b": 1.0, "a": 1 / 3}
    assert first.iou(second) == 1 / 3
    assert first.iou(first) == 1.0
    assert MaskSet({}).iou(MaskSet({})) == 1.0


def test_nesting_by_hand():
    outer = MaskSet({"a": tensor([1, 1, 0, 1]), "b": tensor([1, 1])})
    inner = MaskSet({"a": tensor([1, 0, 0, 1]), "b": tensor([1, 0])})
    assert inner.nested_in(outer)
    assert not outer.nested_in(inner)
    assert outer.nestings(inner) == {"a": False, "b": False}
    assert outer.nested_in(outer)
    assert outer.nested_in(MaskSet({})), "nothing was pruned before"
    assert not MaskSet({}).nested_in(inner), "what was pruned has come back"
    assert MaskSet({"a": inner["a"]}).nestings(outer) == {"a": True, "b": True}


def test_sets_of_different_models_do_not_compare():
    with pytest.raises(ValueError, match="`b` is in only one of the two"):
        MaskSet({"a": tensor([1])}).iou(MaskSet({"a": tensor([1]), "b": tensor([1])}))
    with pytest.raises(ValueError, match=r"`a` has the shapes \(1, 1\) and \(1, 2\)"):
        MaskSet({"a": tensor([1])}).nested_in(MaskSet({"a": tensor([1, 1])}))


def test_equality_and_digest_are_of_names_shapes_and_bits():
    base = {"a": torch.tensor([1.0, 0.0, 2.0]), "b": torch.ones(2, 3)}
    same = [MaskSet(base), MaskSet(dict(reversed(base.items()))), MaskSet({k: v.bool() for k, v in base.items()})]
    assert same[0] == same[1] == same[2]
    with pytest.raises(TypeError, match="unhashable"):
        hash(same[0])
    assert len({masks.digest() for masks in same}) == 1
    for other in (
        {**base, "a": torch.tensor([1.0, 1.0, 2.0])},
        {**base, "b": torch.ones(3, 2)},
        {"a": base["a"]},
        {"a": base["a"], "c": base["b"]},
    ):
        assert MaskSet(other) != same[0]
        assert MaskSet(other).digest() != same[0].digest()
    # SHA-256 of '["a", [3]]', the byte 0b10100000, '["b", [2, 3]]', the byte 0b11111100
    assert same[0].digest() == "2f007c45a9e5601bfa9b99ef5d62a68f2ea1712fd5438b980eaff688801847cf"


def compiled(net):
    return torch.compile(net, backend="eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda net: nn.DataParallel(compiled(net))])
def test_wrappers_are_no_part_of_a_name(wrap):
    net = model()
    l1_unstructured(net[1][0], "weight", 0.5)
    net[1][0] = wrap(net[1][0])
    masks = MaskSet.collect(wrap(net))
    assert list(masks) == ["1.0.weight"]
    plain, wrapped = model(), wrap(model())
    for other in (plain, wrapped):
        masks.apply(other)
        assert MaskSet.collect(other) == masks
    MaskKeeper(wrap(model()), masks).release()
    assert report.sizes(wrapped)["1.0.weight"] == report.sizes(plain)["1.0.weight"]
    assert report.remaining_parameters(wrapped) == report.remaining_parameters(plain) == report.parameters(plain) - 15
    counted = macs(nn.Sequential(net[1][0]), torch.zeros(1, 6))
    assert counted.layers == {"0": LayerMacs(30, 15)}


def test_a_submodule_of_that_name_keeps_it():
    net = nn.ModuleDict({"module": nn.Linear(2, 2)})
    l1_unstructured(net["module"], "weight", 1)
    assert list(MaskSet.collect(net)) == ["module.weight"]


def test_all_masks_apply_or_none():
    plain = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    plain[1].weight_mask = "mine"
    masks = MaskSet({"0.weight": torch.zeros(4, 5), "1.weight": torch.zeros(3, 4)})
    with pytest.raises(
        ValueError, match=r"`1\.weight` cannot be pruned: Linear already has an attribute 'weight_mask'"
    ):
        masks.apply(plain)
    assert list(plain.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert plain[0].weight.all()


def test_tied_parameters_get_one_mask():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    rows, columns = torch.ones(4, 4), torch.ones(4, 4)
    rows[0], columns[:, 0] = 0, 0
    MaskSet({"0.weight": rows, "1.weight": columns}).apply(tied)
    assert tied[0].weight_mask is tied[1].weight_mask
    assert torch.equal(tied[0].weight_mask, rows * columns)
    assert torch.equal(tied[0].weight, tied[1].weight)


def test_a_tied_parameter_is_pruned_wherever_it_stands():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    masks = MaskSet({"0.weight": torch.eye(4)})
    for _ in range(2):
        masks.apply(tied)
        assert not tied[1].weight[~masks["0.weight"]].any()
        assert tied[1].weight_mask is tied[0].weight_mask


def test_masks_of_bools_cost_a_copy_of_them():
    mask = torch.ones(1 << 20, dtype=torch.bool)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        MaskSet({"weight": mask})
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profiler.events())
    assert mask.numel() <= allocated < 1.1 * mask.numel()  # the profiler sees only memory of torch
