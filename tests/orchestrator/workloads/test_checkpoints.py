"""Initial weights from checkpoints: any file of torch or safetensors, matched by name; one-sentence errors."""

from __future__ import annotations

import math
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from orchestrator.config.sources import file_digest
from orchestrator.workloads.networks.initial_weights import initialise
from orchestrator.workloads.weight_files import CheckpointError


class Code:
    """Object that would print if it were unpickled."""

    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def network(seed: int, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def equal(first: nn.Module, second: nn.Module) -> bool:
    theirs = second.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in first.state_dict().items())


def begin(model: nn.Module, path: Path | str, keep: tuple[str, ...] = ()) -> nn.Module:
    initialise(model, str(path), file_digest(str(path)), keep)
    return model


SAVED: dict[str, Callable[[dict[str, Tensor], Path], object]] = {
    "plain.pt": torch.save,
    "older.pth": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "lightning.bin": lambda state, path: torch.save({"state_dict": state, "epoch": 3}, path),
    "parallel.pt": lambda state, path: torch.save({f"module.{name}": value for name, value in state.items()}, path),
    "compiled.pt": lambda state, path: torch.save({f"_orig_mod.{name}": value for name, value in state.items()}, path),
    "plain.safetensors": save_file,
}


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_as_torch_or_safetensors_wrote_it_is_loaded(name: str, tmp_path: Path) -> None:
    theirs, path = network(1), tmp_path / name
    SAVED[name](theirs.state_dict(), path)

    assert equal(begin(network(0), path), theirs)


def test_a_checkpoint_in_half_precision_takes_the_dtype_of_the_network(tmp_path: Path) -> None:
    theirs, path = network(1).half(), tmp_path / "half.safetensors"
    save_file(theirs.state_dict(), path)

    assert equal(begin(network(0), path), theirs.float())


def test_a_checkpoint_is_fetched_once_from_a_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs, uri = network(1), f"memory://{uuid.uuid4().hex}/a.pt"
    torch.save(theirs.state_dict(), tmp_path / "a.pt")
    with fsspec.open(uri, "wb") as file:
        file.write((tmp_path / "a.pt").read_bytes())
    expected = file_digest(str(tmp_path / "a.pt"))
    first, second = network(0), network(0)
    initialise(first, uri, expected)
    fsspec.filesystem("memory").rm(uri.removeprefix("memory:/"))
    initialise(second, uri, expected)

    assert equal(first, theirs)
    assert equal(second, theirs)
    with pytest.raises(CheckpointError, match="cannot be read on this node"):
        initialise(network(0), uri, "0" * 64)


def test_what_is_to_be_initialised_keeps_its_draw(tmp_path: Path) -> None:
    theirs, path, ours = network(1, width=5), tmp_path / "a.pt", network(0, width=5)
    state = {name: value for name, value in theirs.state_dict().items() if name != "2.bias"}
    torch.save({**state, "2.weight": torch.zeros(1000, 5)}, path)
    begin(ours, path, ("2.*",))

    assert torch.equal(ours.get_parameter("0.weight"), theirs.get_parameter("0.weight"))
    assert torch.equal(ours.get_parameter("2.weight"), network(0, width=5).get_parameter("2.weight"))
    with pytest.raises(CheckpointError, match=r"`model.reinitialise` \(=head\.\*\) matches no parameter"):
        begin(ours, path, ("head.*",))


class Tied(nn.Module):
    """Network whose head shares the embedding's weights, around a base whose prefix checkpoints may leave out."""

    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Embedding(5, 2))
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.base[0].weight


def test_one_name_of_tied_weights_suffices_and_a_base_needs_no_prefix(tmp_path: Path) -> None:
    weights = torch.arange(10.0).view(5, 2)
    torch.save({"0.weight": weights}, tmp_path / "a.pt")
    model = begin(Tied(), tmp_path / "a.pt")

    assert torch.equal(model.get_parameter("head.weight"), weights)


def test_misfits_are_told_in_one_sentence_of_which_the_first_are_spelled_out(tmp_path: Path) -> None:
    state = network(1).state_dict()
    del state["1.running_var"]
    torch.save({**state, "3.weight": torch.zeros(2)}, tmp_path / "a.pt")
    model = network(0, width=5)
    before = model.get_parameter("2.bias").clone()
    with pytest.raises(CheckpointError) as caught:
        begin(model, tmp_path / "a.pt")

    assert "`0.weight` is [4, 3] in the file and [5, 3] in the network; `0.bias` is [4] in" in str(caught.value)
    assert "and 5 more; choose the model that it was saved from" in str(caught.value)
    assert str(caught.value).count("\n") == 0
    assert torch.equal(model.get_parameter("2.bias"), before), "nothing is copied from a file that fits only in part"


def test_missing_and_unknown_names_are_told(tmp_path: Path) -> None:
    state = network(1).state_dict()
    state["extra"] = state.pop("2.bias")
    torch.save(state, tmp_path / "a.pt")

    with pytest.raises(CheckpointError, match=r"the file lacks `2.bias`; the network lacks `extra`; choose"):
        begin(network(0), tmp_path / "a.pt")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "code.pt": (
        lambda path: torch.save({"a": Code()}, path),
        "contains code, which is never run, or is damaged",
    ),
    "pickle.pt": (lambda path: path.write_bytes(pickle.dumps(Code())), "is damaged, or not a file of weights"),
    "module.pt": (lambda path: torch.save(network(0), path), "contains code"),
    "number.pt": (lambda path: torch.save(3, path), "holds int, not tensors by name"),
    "numbered.pt": (lambda path: torch.save({0: torch.zeros(1)}, path), "holds dict, not tensors by name"),
    "list.pt": (lambda path: torch.save([torch.zeros(1)], path), "holds list, not tensors by name"),
    "empty.pt": (lambda path: path.write_bytes(b""), "is damaged, or not a file of weights"),
    "empty.safetensors": (lambda path: path.write_bytes(b""), "is damaged, or not a file of weights"),
    "nan.pt": (
        lambda path: torch.save({**network(1).state_dict(), "2.bias": torch.tensor([math.nan, 0.0])}, path),
        "contains NaN or infinity in `2.bias`",
    ),
    "text.pt": (lambda path: path.write_text("weights"), "is damaged, or not a file of weights"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_checkpoint_is_told_and_nothing_in_it_is_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, said = BROKEN[name]
    write(tmp_path / name)
    with pytest.raises(CheckpointError, match=said) as caught:
        begin(network(0), tmp_path / name)

    assert str(caught.value).startswith(f"`model.weights` (={tmp_path / name}) ")
    assert str(caught.value).count("\n") == 0
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["plain.pt", "older.pth", "plain.safetensors"])
def test_a_truncated_checkpoint_is_told(name: str, tmp_path: Path) -> None:
    SAVED[name](network(1).state_dict(), tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    for length in (7, len(whole) // 2, len(whole) - 3):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            begin(network(0), tmp_path / name)


def test_a_file_that_is_not_the_planned_one_is_refused(tmp_path: Path) -> None:
    torch.save(network(1).state_dict(), tmp_path / "a.pt")
    planned = file_digest(str(tmp_path / "a.pt"))
    torch.save(network(2).state_dict(), tmp_path / "a.pt")

    with pytest.raises(CheckpointError, match="must be the file that the sweep was planned with"):
        initialise(network(0), str(tmp_path / "a.pt"), planned)
    with pytest.raises(CheckpointError, match="cannot be read on this node"):
        initialise(network(0), str(tmp_path / "b.pt"), planned)
