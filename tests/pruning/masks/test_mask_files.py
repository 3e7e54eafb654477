"""Mask files: equal bytes for equal masks, errors for damaged files, no pickle."""

import hashlib
import io
import random
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch
from mask_cases import some_masks
from torch import nn

from pruning import MaskSet
from pruning.masks import mask_files as mask_files
from pruning.masks.mask_files import HEADER


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


def test_a_checkpoint_is_no_file_of_masks(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(3, dtype=torch.bfloat16)}, path)
    with pytest.raises(ValueError, match="no safetensors file, or it is damaged"):
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


FRAGMENTS = [
    "a",
    ".npy",
    HEADER,
    "__metadata__",
    "0",
    "/",
    "..",
    "\\",
    "\0",
    "\n",
    '"',
    " ",
    "é",
    "中",
    "😀",
    "x" * 66_000,
]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_whatever_names_are_written_can_be_read(suffix, tmp_path):
    draw, path = random.Random(0), tmp_path / f"masks{suffix}"
    sets = [
        ["a", "a.npy"],
        ["a.npy", "a"],
        [HEADER, f"{HEADER}0"],
        ["__metadata__"],
        ["", ".npy"],
        ["a\0", "a", "a\0b"],
    ]
    sets += [["".join(draw.choices(FRAGMENTS, k=draw.randint(0, 3))) for _ in range(4)] for _ in range(100)]
    for names in sets:
        masks = MaskSet({name: torch.rand(draw.randint(1, 9)) < 0.5 for name in names})
        masks.save(path)
        loaded = MaskSet.load(path)
        assert loaded == masks, names
        assert list(loaded) == list(masks)


def test_a_name_that_no_file_can_hold_is_refused_before_the_file_is_touched(tmp_path):
    path = tmp_path / "masks.npz"
    some_masks().save(path)
    with pytest.raises(
        ValueError, match=r"cannot be the name of a mask in a file .*; rename it to text that UTF-8 can encode"
    ):
        MaskSet({"\ud83d\ude00": torch.ones(2)}).save(path)  # two surrogates, which JSON would join to one character
    assert MaskSet.load(path) == some_masks()


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
    """Flip each byte in turn: loading raises ValueError, or zip ignores the byte and the masks are equal."""
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
    """Return an npz file with changed members and valid zip checksums."""
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
        (b'"version":1', b'"version":2', "version 2 is not 1; use the release that wrote the file"),
        (b"pruning-masks", b"prunes", "the format 'prunes' is not 'pruning-masks'"),
        (b"[5,6]", b"[6,5]", "do not have the digest"),
        (b"[5,6]", b"[5,7]", r"`1\.0\.weight` is damaged"),
        (b"[5,6]", b"[-5,-6]", "a shape is negative"),
        (b"[5,6]", b"[99999999999,99999999999]", r"`1\.0\.weight` is damaged"),
    ]:
        with pytest.raises(ValueError, match=message):
            MaskSet.from_bytes(rewritten(data, edit(old, new)))


def test_a_file_that_inflates_is_refused():
    file = io.BytesIO()
    np.savez_compressed(file, __header__=np.zeros(10**7, np.uint8))
    with pytest.raises(ValueError, match="never compressed"):
        MaskSet.from_bytes(file.getvalue())


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


def test_files_of_ordinary_names_have_the_bytes_that_they_always_had():
    data = MaskSet({"0.weight": torch.eye(5, 6), "1.bias": torch.ones(3), "a.npy": torch.zeros(2)}).to_bytes()
    assert hashlib.sha256(data).hexdigest() == "c1b85022fc4037714844527428abbfb7aca65f8d7f2892e3e4179fdbc57fa117"


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
