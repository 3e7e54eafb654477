"""MaskSet: collected from any hook, packed near the entropy limit, refused when damaged, compared by hand."""

import io
import math
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.utils.prune as torch_prune
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pruning import MaskKeeper, custom_from_mask, l1_unstructured
from pruning.masks import MaskSet
from pruning.masks import files as mask_files
from pruning.masks.files import HEADER
from pruning.masks.packing import pack, unpack
from pruning.measure import report
from pruning.measure.macs import LayerMacs, macs


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.LSTM(5, 3))


def some_masks(density=0.5):
    generator = torch.Generator().manual_seed(1)
    shapes = {"0.weight": (4, 1, 3, 3), "1.0.weight": (5, 6), "1.0.bias": (5,), "2.weight_hh_l0": (12, 3)}
    return MaskSet({name: torch.rand(shape, generator=generator) < density for name, shape in shapes.items()})


# --- packing ----------------------------------------------------------------------------------------------------------


@st.composite
def bit_arrays(draw):
    size = draw(st.integers(0, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = rng.random(size) < draw(st.sampled_from([0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999, 1]))
    return np.repeat(mask, draw(st.sampled_from([1, 7])))


@given(bit_arrays())
def test_packing_round_trip(mask):
    assert np.array_equal(unpack(pack(mask), mask.size), mask)


@pytest.mark.parametrize("sparsity", [0.01, 0.2, 0.5, 0.7, 0.9, 0.99])
def test_packed_size_is_within_five_percent_of_the_entropy(sparsity):
    size = 1_000_000
    mask = np.ones(size, bool)
    mask[np.random.default_rng(3).permutation(size)[: round(sparsity * size)]] = False
    entropy = -sparsity * math.log2(sparsity) - (1 - sparsity) * math.log2(1 - sparsity)
    assert len(pack(mask)) < 1.05 * entropy * size / 8


def test_patterns_pack_far_below_the_entropy():
    rows = np.random.default_rng(4).random(400) < 0.5
    assert len(pack(np.repeat(rows, 500))) < 2000
    assert len(pack(np.tile(rows, 500))) < 2000


@given(bit_arrays(), st.integers(0, 2**16), st.integers(1, 255))
def test_damaged_bytes_are_refused_or_still_a_mask_of_that_size(mask, position, change):
    packed = bytearray(pack(mask))
    packed[position % len(packed)] ^= change
    try:
        found = unpack(bytes(packed), mask.size)
    except ValueError:
        return
    assert found.dtype == np.bool_
    assert found.size == mask.size


# --- collect and apply ------------------------------------------------------------------------------------------------


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


# --- compare ----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="`b` is in one of the two"):
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


# --- files ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_forged_file_takes_no_memory(tmp_path, suffix):
    plain, path = nn.Linear(5, 4), tmp_path / f"masks{suffix}"
    good = MaskSet({"weight": torch.eye(4, 5)})
    good.save(path)
    assert MaskSet.load(path, plain) == good
    write, _ = mask_files.format_of(path)
    gaps = {"weight": np.broadcast_to(np.ones((), bool), (1 << 20,))}
    members = mask_files.encode(gaps, "0" * 64)
    header = members[HEADER].tobytes().replace(b"[1048576]", b"[900000000000000]")
    path.write_bytes(write({**members, HEADER: np.frombuffer(header, np.uint8)}))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"`weight` has the shape \(4, 5\) in the model but \(900000000000000,\)"):
        MaskSet.load(path, plain)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_masks_of_bools_cost_a_copy_of_them():
    mask = torch.ones(1 << 20, dtype=torch.bool)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        MaskSet({"weight": mask})
    assert sum(max(0, event.self_cpu_memory_usage) for event in profiler.events()) < 1.1 * mask.numel()


def test_a_checkpoint_is_no_file_of_masks(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(3, dtype=torch.bfloat16)}, path)
    with pytest.raises(ValueError, match="no safetensors file, or a damaged one"):
        MaskSet.load(path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
def test_files_round_trip_byte_for_byte(suffix, density, tmp_path):
    masks = some_masks(density)
    masks.save(tmp_path / f"one{suffix}")
    loaded = MaskSet.load(str(tmp_path / f"one{suffix}"))
    assert loaded == masks
    assert list(loaded) == list(masks)
    loaded.save(tmp_path / f"two{suffix}")
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_the_bytes_know_no_clock(monkeypatch):
    first = some_masks().to_bytes()
    monkeypatch.setattr(time, "time", lambda: 2e9)
    monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(2e9))
    assert some_masks().to_bytes() == first


def test_scalars_and_empty_tensors_are_masks_too():
    masks = MaskSet({"scalar": torch.tensor(1.0), "empty": torch.ones(0, 3), "none": torch.tensor(0)})
    assert MaskSet.from_bytes(masks.to_bytes()) == masks
    assert masks.sparsities() == {"scalar": 0.0, "empty": 0.0, "none": 1.0}


def test_any_altered_byte_is_noticed():
    """Flip each byte in turn: refused with a ValueError, or, in zip's own small print, without effect."""
    masks = some_masks()
    data = masks.to_bytes()
    refused = 0
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x55
        try:
            found = MaskSet.from_bytes(bytes(damaged))
        except ValueError:
            refused += 1
        else:
            assert found == masks
    assert refused > len(data) / 2


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_truncated_and_foreign_files_are_refused(suffix, tmp_path):
    path = tmp_path / f"masks{suffix}"
    some_masks().save(path)
    data = path.read_bytes()
    for content in (data[: len(data) // 2], data[:-1], b"", b"hello", b"\x80\x04K\x01."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="damaged"):
            MaskSet.load(path)


def rewritten(data, change):
    """Return an npz with its members changed, its own checksums right again."""
    members = dict(np.load(io.BytesIO(data)))
    change(members)
    file = io.BytesIO()
    np.savez(file, **members)
    return file.getvalue()


def test_the_damaged_tensor_is_named():
    def flip(members):
        members["1.0.weight"] = members["1.0.weight"] ^ 1

    def drop(members):
        del members["1.0.weight"]

    for change in (flip, drop):
        with pytest.raises(ValueError, match=r"The mask of `1\.0\.weight` is damaged"):
            MaskSet.from_bytes(rewritten(some_masks().to_bytes(), change))


def test_a_forged_header_is_refused():
    def edit(old, new):
        def change(members):
            header = members["__header__"].tobytes()
            assert old in header
            members["__header__"] = np.frombuffer(header.replace(old, new), np.uint8)

        return change

    data = some_masks().to_bytes()
    for old, new, message in [
        (b'"version":1', b'"version":2', "version 2 is not 1; use the release that wrote them"),
        (b"pruning-masks", b"prunes", "the format 'prunes' is not 'pruning-masks'"),
        (b"[5,6]", b"[6,5]", "have not the digest"),
        (b"[5,6]", b"[5,7]", r"`1\.0\.weight` is damaged"),
        (b"[5,6]", b"[-5,-6]", "a shape is negative"),
        (b"[5,6]", b"[99999999999,99999999999]", r"`1\.0\.weight` is damaged"),
    ]:
        with pytest.raises(ValueError, match=message):
            MaskSet.from_bytes(rewritten(data, edit(old, new)))


def test_nothing_is_unpickled():
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    file = io.BytesIO()
    np.savez(file, __header__=np.array([Evil()], dtype=object))
    with pytest.raises(ValueError, match="damaged"):
        MaskSet.from_bytes(file.getvalue())
    file = io.BytesIO()
    np.save(file, np.ones(3))
    with pytest.raises(ValueError, match="single array"):
        MaskSet.from_bytes(file.getvalue())


def test_numpy_alone_reads_the_members():
    members = np.load(io.BytesIO(some_masks().to_bytes()), allow_pickle=False)
    assert set(members) == {"__header__", *some_masks()}
    with zipfile.ZipFile(io.BytesIO(some_masks().to_bytes())) as archive:
        assert archive.testzip() is None


def test_other_suffixes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.npz or \.safetensors"):
        some_masks().save(tmp_path / "masks.pt")
    with pytest.raises(ValueError, match=r"must end in"):
        MaskSet.load(tmp_path / "masks.pkl")
