"""Image data sets: idx files, their checks and downloads; Hugging Face sets through a stand-in for the package."""

from __future__ import annotations

import gzip
import hashlib
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.config.config_groups import schema_of
from orchestrator.core.errors import DataError
from orchestrator.workloads import data_loading, node_cache
from orchestrator.workloads.data_sets import huggingface, idx_files
from orchestrator.workloads.data_sets.idx_files import FILES, IdxSet
from orchestrator.workloads.data_sets.named import Normalisation
from orchestrator.workloads.splits import Split

ARRAYS = [
    np.arange(6 * 2 * 3, dtype=np.uint8).reshape(6, 2, 3),
    np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8),
    np.full((2, 2, 3), 255, dtype=np.uint8),
    np.array([2, 9], dtype=np.uint8),
]


def encode(array: NDArray[np.uint8]) -> bytes:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(head + array.tobytes(), mtime=0)


def publish(folder: Path) -> IdxSet:
    """Write the four files into `folder` and return their `IdxSet`, with `folder` as its mirror."""
    folder.mkdir(parents=True)
    sums = {}
    for name, array in zip(FILES, ARRAYS, strict=True):
        content = encode(array)
        (folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return IdxSet("tiny", sums, (folder.as_uri() + "/",))


def read(published: IdxSet, root: Path) -> list[NDArray[np.uint8]]:
    return idx_files.read(published, idx_files.find(published, root, download=True))


def test_files_are_downloaded_once_and_read(tmp_path: Path) -> None:
    published = publish(tmp_path / "mirror")
    root = tmp_path / "made" / "root"

    found = read(published, root)

    assert all(np.array_equal(a, b) and a.dtype == np.uint8 for a, b in zip(found, ARRAYS, strict=True))
    assert sorted(path.name for path in (root / "tiny").iterdir()) == sorted(FILES)
    away = replace(published, mirrors=())
    assert all(np.array_equal(a, b) for a, b in zip(read(away, root), ARRAYS, strict=True))


def test_the_second_mirror_serves_when_the_first_has_another_file(tmp_path: Path) -> None:
    published = publish(tmp_path / "good")
    publish(tmp_path / "bad")
    (tmp_path / "bad" / FILES[0]).write_bytes(b"an error page")
    both = replace(published, mirrors=((tmp_path / "bad").as_uri() + "/", *published.mirrors))

    assert np.array_equal(read(both, tmp_path / "root")[0], ARRAYS[0])


def test_no_mirror_leaves_no_file_and_says_what_was_tried(tmp_path: Path) -> None:
    published = publish(tmp_path / "mirror")
    (tmp_path / "mirror" / FILES[0]).write_bytes(b"an error page")
    nowhere = (tmp_path / "nowhere").as_uri() + "/"
    tried = replace(published, mirrors=(*published.mirrors, nowhere))

    with pytest.raises(DataError) as caught:
        read(tried, tmp_path / "root")

    for word in (FILES[0], "the file differs from the published one", nowhere, "`data.root`", "tiny"):
        assert word in str(caught.value)
    assert not list((tmp_path / "root").rglob("*.gz*"))


def test_an_answer_is_read_no_further_than_a_file_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = publish(tmp_path / "mirror")
    monkeypatch.setattr(idx_files, "LARGEST", (tmp_path / "mirror" / FILES[0]).stat().st_size - 1)

    with pytest.raises(DataError, match="the file differs from the published one"):
        read(published, tmp_path / "root")


def test_absent_files_are_not_downloaded_against_the_users_word(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"`data\.root` .*must hold .*data\.download=true"):
        idx_files.find(publish(tmp_path / "mirror"), tmp_path / "root", download=False)


def test_a_root_that_cannot_be_written_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")

    with pytest.raises(DataError, match=r"cannot be written.*writable directory"):
        read(publish(tmp_path / "mirror"), tmp_path / "root")


def test_a_damaged_file_is_refused_with_both_checksums(tmp_path: Path) -> None:
    published = publish(tmp_path / "tiny")
    path = tmp_path / "tiny" / FILES[1]
    damaged = path.read_bytes()[:-1]
    path.write_bytes(damaged)

    with pytest.raises(DataError) as caught:
        read(published, tmp_path)

    for word in (str(path), hashlib.md5(damaged).hexdigest(), published.md5[FILES[1]], "delete the file"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "begins with"),
        (b"\0\0\x0d\1" + struct.pack(">I", 1) + b"\0\0\0\0", "begins with 00000d01"),  # type 0x0d, floats
        (b"\0\0\x08\3" + struct.pack(">I", 1), "begins with"),
        (b"\0\0\x08\2" + struct.pack(">II", 2, 3) + bytes(5), "5 entries, but its header says 2x3"),
    ],
)
def test_what_is_no_idx_file_of_bytes_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=re.escape(words)):
        idx_files.parse(content, Path("some-file"))


def huggingface_set(**changes: Any) -> dict[str, Any]:
    """Return the configuration of a Hugging Face data set."""
    return {**vars(schema_of("data", "huggingface")()), **changes}


@pytest.mark.parametrize(("kind", "constant"), [("mnist", "MNIST"), ("fashion_mnist", "FASHION_MNIST")])
def test_named_sets_are_normalised_and_split(
    kind: str, constant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idx_files, constant, publish(tmp_path / "tiny"))

    config = vars(schema_of("data", kind)())

    found = data_loading.load({**config, "root": str(tmp_path), "val_size": 2})

    assert (found.input_shape, found.classes) == ((1, 2, 3), 10)
    assert (len(found.train), len(found.val), len(found.test)) == (4, 2, 2)
    inputs, labels = next(iter(found.test.batches(2, device=torch.device("cpu"))))
    assert torch.allclose(inputs, torch.tensor((1 - config["mean"][0]) / config["std"][0]))
    assert labels.tolist() == [2, 9]


@pytest.mark.parametrize("published", [idx_files.MNIST, idx_files.FASHION_MNIST])
def test_published_sets_name_every_file_and_a_mirror(published: IdxSet) -> None:
    assert set(published.md5) == set(FILES)
    assert all(re.fullmatch(r"https?://\S+/", mirror) for mirror in published.mirrors)
    assert published.mirrors[0].startswith("https:")


def test_normalisation_is_per_channel() -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1)

    assert Normalisation.of([0.5, 0.0], [0.5, 2.0], channels=2)(pixels).flatten().tolist() == [-1.0, 0.5]
    assert pixels.flatten().tolist() == [0, 255]
    with pytest.raises(DataError, match=r"`data\.mean` .* 1 or 2 entries"):
        Normalisation.of([0.1] * 3, [1.0], channels=2)
    with pytest.raises(DataError, match=r"`data\.std` .* positive"):
        Normalisation.of([0.1], [0.0], channels=2)


class Rows:
    """Stand-in for `datasets.Dataset`, with the members that are used."""

    def __init__(self, sizes: list[tuple[int, int]], labels: list[int], arrow: Path | None = None) -> None:
        from PIL import Image

        rng = np.random.default_rng(len(sizes))
        pixels = [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]
        self.columns: dict[str, list[Any]] = {"img": pixels, "label": labels}
        self.column_names = list(self.columns)
        self.cache_files = [{"filename": str(arrow)}] if arrow else []
        self.features = {"label": SimpleNamespace(num_classes=5)}

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        assert rows.stop - rows.start <= huggingface.CHUNK
        return {name: column[rows] for name, column in self.columns.items()}


def inputs(split: Split) -> Tensor:
    """Return every example of a split, normalised."""
    return torch.cat([batch for batch, _ in split.batches(100, device=torch.device("cpu"))])


Serve = Callable[..., list[Any]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Install a stand-in for the package `datasets` that serves images of these sizes; return its calls."""

    def put(sizes: list[tuple[int, int]], arrow: Path | None = None) -> list[Any]:
        calls: list[Any] = []

        def load_dataset(*args: Any, **options: Any) -> Rows:
            calls.append((args, options))
            return Rows(sizes, [index % 3 for index in range(len(sizes))], arrow)

        module = ModuleType("datasets")
        module.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        data_loading._load.cache_clear()
        return calls

    return put


def test_hugging_face_images_are_normalised_by_the_training_split(serve: Serve) -> None:
    calls = serve([(4, 6)] * 8)

    found = data_loading.load({**huggingface_set(subset="plain", revision="v1"), "val_fraction": 0.25})

    assert calls[0] == (("uoft-cs/cifar10", "plain"), {"split": "train", "revision": "v1"})
    assert (found.input_shape, found.classes, len(found.val)) == ((3, 4, 6), 5, 2)
    together = torch.cat([inputs(split) for split in (found.train, found.val)])
    assert torch.allclose(together.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(together.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_hugging_face_images_are_the_same_however_many_are_decoded_at_a_time(
    mode: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "CHUNK", 3)
    serve([(4, 6)] * 8)
    found = data_loading.load({**huggingface_set(), "val_fraction": 0.25, "mode": mode})
    rows = Rows([(4, 6)] * 8, [0] * 8).columns["img"]
    pixels = np.stack([np.asarray(image.convert(mode)).reshape(4, 6, -1) for image in rows]).transpose(0, 3, 1, 2) / 255
    mean, std = (each.reshape(1, -1, 1, 1) for each in (pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))))

    assert np.allclose(inputs(found.test).numpy(), (pixels - mean) / std, atol=1e-5)
    assert [int(label) for _, labels in found.test.batches(8, device=torch.device("cpu")) for label in labels] == [
        index % 3 for index in range(8)
    ]


def test_images_of_the_hugging_face_hub_are_decoded_once_a_node(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(node_cache, "WORTHWHILE", 1)
    arrow = tmp_path / "rows.arrow"
    arrow.write_bytes(b"1")
    config = {**huggingface_set(), "val_fraction": 0.25}
    serve([(4, 6)] * 8)
    in_memory = data_loading.load(config)
    serve([(4, 6)] * 8, arrow)
    expected = inputs(data_loading.load(config).train)
    assert torch.equal(expected, inputs(in_memory.train))

    monkeypatch.setattr(Rows, "__getitem__", pytest.fail)
    data_loading._load.cache_clear()
    assert torch.equal(inputs(data_loading.load(config).train), expected)

    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arrow.write_bytes(b"22")
    serve([(4, 6)] * 4, arrow)
    assert len(data_loading.load(config).test) == 4
    serve([(4, 6)] * 6, arrow)
    monkeypatch.chdir(tmp_path)
    Path(config["path"]).mkdir(parents=True)
    assert len(data_loading.load(config).test) == 6, "images in a directory may change without a change of its rows"


def test_hugging_face_images_of_several_sizes_need_a_size(serve: Serve) -> None:
    serve([(4, 6), (5, 5), (4, 6)])
    config = {**huggingface_set(), "val_fraction": None, "val_size": 1}

    with pytest.raises(DataError, match=r"`data\.size` .* have 2, from \[4, 6\] to \[5, 5\]"):
        data_loading.load(config)
    assert data_loading.load({**config, "size": [2, 3], "mode": "L"}).input_shape == (1, 2, 3)


def test_hugging_face_column_that_is_not_there(serve: Serve) -> None:
    serve([(4, 6)] * 4)

    with pytest.raises(DataError, match=r"`data\.image_key` \(=image\) is no column .*img, label"):
        data_loading.load({**huggingface_set(), "image_key": "image"})


def test_hugging_face_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    data_loading._load.cache_clear()

    with pytest.raises(DataError, match=re.escape("pip install 'pruning-orchestrator[hf]'")):
        data_loading.load(huggingface_set())
