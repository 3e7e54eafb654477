"""Text data: contiguous parts, no token predicted twice, small in memory, and errors."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.workloads import data_loading
from orchestrator.workloads.splits import TensorSplit

CPU = torch.device("cpu")


def load(root: Path, **options: Any) -> data_loading.Data:
    return data_loading.load({"kind": "text", "root": str(root), "block": 5, "val_fraction": 0.25, **options})


def whole(split: Any) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*split.batches(3, device=CPU), strict=True)
    return torch.cat(inputs), torch.cat(labels)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(random.Random(0).choices("abcdefghij \n", k=2000)))
    return path


def test_blocks_are_the_text_in_its_order_and_labels_what_follows(book: Path) -> None:
    found, text = load(book), book.read_text()
    letters = sorted(set(text))

    def said(split: Any) -> str:
        return "".join(letters[token] for token in whole(split)[0].flatten())

    assert (found.input_shape, found.classes) == ((5,), len(letters))
    assert said(found.train) + said(found.val) == text[: 5 * (1799 // 5)]
    assert said(found.test) == text[1800 : 1800 + 5 * (199 // 5)]
    for split in (found.train, found.val, found.test):
        inputs, labels = whole(split)
        assert inputs.dtype == labels.dtype == torch.int64
        assert torch.equal(labels.flatten()[:-1], inputs.flatten()[1:])


def test_no_token_is_predicted_in_two_splits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 500))), encoding="utf-8")
    found = load(tmp_path / "a.txt")
    targets = [set(whole(split)[1].flatten().tolist()) for split in (found.train, found.val, found.test)]

    assert not any(first & second for first in targets for second in targets if first is not second)
    assert max(targets[0]) < min(targets[1]) <= max(targets[1]) < min(targets[2])
    assert all(len(each) % 5 == 0 for each in targets)


def test_an_epoch_has_every_block_once_and_its_batches_follow_from_the_seed(book: Path) -> None:
    split = load(book).train
    orders = [list(chain.from_iterable(x.tolist() for x, _ in split.batches(4, device=CPU, seed=s))) for s in (1, 1, 2)]

    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(whole(split)[0].tolist())


@pytest.mark.parametrize(
    ("letters", "dtype"), [("ab", torch.uint8), ([chr(256 + i) for i in range(300)], torch.uint16)], ids=["few", "many"]
)
def test_tokens_take_the_smallest_type_that_holds_them(tmp_path: Path, letters: Any, dtype: torch.dtype) -> None:
    (tmp_path / "a.txt").write_text("".join(letters) * 100, encoding="utf-8")
    train = load(tmp_path / "a.txt", block=2).train

    assert isinstance(train, TensorSplit)
    assert train.images.dtype == dtype


def test_a_large_text_is_mapped_from_a_file_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("orchestrator.workloads.node_cache.WORTHWHILE", 100)
    (tmp_path / "a.txt").write_text("some text " * 200)
    first = load(tmp_path / "a.txt")
    monkeypatch.setattr(
        "orchestrator.workloads.data_sets.text._tokenised", None
    )  # fails if the text is tokenised again
    data_loading._load.cache_clear()
    again = load(tmp_path / "a.txt")

    assert list(tmp_path.glob("pruning-orchestrator-*/*.safetensors"))
    assert torch.equal(whole(first.train)[0], whole(again.train)[0])


def test_a_directory_is_its_texts_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, text in (("b.txt", "world" * 20), ("a/z.txt", "hello" * 20), ("a/notes.md", "###")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = load(tmp_path, tokenizer="bytes")

    assert found.classes == 256
    assert bytes(whole(found.train)[0][0].tolist()) == b"hello"
    assert bytes(whole(found.test)[0][0].tolist()) == b"world"


def test_bytes_need_no_encoding_and_characters_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe" * 200)

    assert whole(load(tmp_path / "a.txt", tokenizer="bytes").train)[0][0].tolist() == [255, 254, 255, 254, 255]
    with pytest.raises(DataError, match=r"`data.root` .* must be text in UTF-8 \(byte 0: .*data.tokenizer=bytes"):
        load(tmp_path / "a.txt")


def test_a_tokenizer_of_the_package_tokenizers_is_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("one two three " * 40)
    found = load(tmp_path / "a.txt", tokenizer=str(tmp_path / "words.json"))

    assert found.classes == 3
    assert whole(found.train)[0][:2].tolist() == [[1, 2, 0, 1, 2], [0, 1, 2, 0, 1]]
    (tmp_path / "words.json").write_text("{}")
    with pytest.raises(DataError, match=r"`data.tokenizer` \(=.*words.json\) cannot be read as a file of the package"):
        load(tmp_path / "a.txt", tokenizer=str(tmp_path / "words.json"), block=4)


def test_what_was_changed_since_the_plan_is_refused(book: Path) -> None:
    with pytest.raises(DataError, match="must be those that the sweep was planned with"):
        load(book, content={"root": "0" * 64})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block": 300}, r"`data.block` \(=300\) must be less than 200, the tokens of the test part of the text"),
        (
            {"block": 199, "val_fraction": 0.01},
            r"`data.val_size` \(=0, from data.val_fraction=0.01\) must lie between",
        ),
    ],
)
def test_too_little_text_is_told(book: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(book, **options)


def test_further_texts_have_the_same_tokens_and_are_tested_only(book: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("badge ace bead\n")
    found = load(book, tests={"other": str(tmp_path / "other.txt")})
    letters = sorted(set(book.read_text()))

    assert list(found.tests) == ["other"]
    assert "".join(letters[token] for token in whole(found.tests["other"])[0].flatten()) == "badge ace "
    assert found.codec is not None
    assert found.codec.decode(whole(found.tests["other"])[1][1].tolist()) == "ace b"
    assert torch.equal(whole(found.test)[0], whole(load(book).test)[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("badge xyz", r"`data.tests.other` \(=.*other.txt\) must have only .*, but has 'x' 'y' 'z';"),
        ("bad", r"`data.block` \(=5\) must be less than 3, the tokens of the text `data.tests.other`; pass a smaller"),
    ],
)
def test_a_further_text_that_does_not_fit_is_told(book: Path, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "other.txt").write_text(text)
    with pytest.raises(DataError, match=said):
        load(book, tests={"other": str(tmp_path / "other.txt")})


@pytest.mark.parametrize(("tokenizer", "tokens"), [("characters", [2, 1, 3]), ("bytes", [98, 97, 99])])
def test_a_codec_writes_and_reads_the_tokens_of_a_text(tmp_path: Path, tokenizer: str, tokens: list[int]) -> None:
    (tmp_path / "a.txt").write_text(" abc" * 50)
    codec = load(tmp_path / "a.txt", tokenizer=tokenizer).codec

    assert codec is not None
    assert codec.encode("bac") == tokens
    assert codec.decode(tokens) == "bac"


def test_a_number_of_blocks_is_the_test_split(book: Path) -> None:
    found, text = load(book, test_size=7, val_fraction=None, val_size=4), book.read_text()
    letters = sorted(set(text))
    said = "".join(letters[token] for token in whole(found.test)[0].flatten())

    assert (len(found.test), len(found.val)) == (7, 4)
    assert said == text[-36:-1]
    assert torch.equal(whole(found.train)[0], whole(load(book, test_size=7, val_size=4, val_fraction=None).train)[0])
    with pytest.raises(
        DataError, match=r"`data.test_size` \(=400\) blocks of 5 tokens must leave a block for training"
    ):
        load(book, test_size=400)


def test_the_text_in_a_module_is_its_longest_string(book: Path, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(f"from nowhere import Book\n\nbook = Book('short', {book.read_text()!r})\n")

    for split in ("train", "val", "test"):
        assert torch.equal(whole(getattr(load(module), split))[0], whole(getattr(load(book), split))[0])
