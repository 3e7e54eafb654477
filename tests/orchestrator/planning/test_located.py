"""What lies somewhere is pinned by content, and what does not is told before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from orchestrator.__main__ import CONF
from orchestrator.config import schema
from orchestrator.config.compose import plain
from orchestrator.core.specs import Job, Plan
from orchestrator.planning.plan import make_plan


@pytest.fixture
def composed() -> Mapping[str, Any]:
    schema.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return plain(compose("config"))


def planned(composed: Mapping[str, Any], **model: Any) -> Plan:
    return make_plan([Job((), {**composed, "model": {**composed["model"], **model}})])


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay a cache of the hub's out as its library does, with one model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    commit = "c" * 40
    write(folder / "models--them--net" / "snapshots" / commit / "model.safetensors", b"weights")
    write(folder / "models--them--net" / "refs" / "main", commit.encode())


def test_the_bytes_of_a_checkpoint_count_and_not_where_it_lies(composed: Mapping[str, Any], tmp_path: Path) -> None:
    here, there = write(tmp_path / "a.pt", b"one"), write(tmp_path / "folder" / "model.safetensors", b"one")
    plans = [planned(composed, weights=place) for place in (here, str(Path(there).parent), f"file://{here}")]

    assert len({tuple(plan.stages) for plan in plans}) == 1
    places = [{spec.location["model"]["weights"] for spec in plan.stages.values()} for plan in plans]
    assert places == [{here}, {there}, {f"file://{here}"}]
    write(tmp_path / "a.pt", b"two")
    assert not set(plans[0].stages) & set(planned(composed, weights=here).stages)
    assert not set(plans[0].stages) & set(planned(composed).stages)


def test_a_name_on_the_hub_is_the_commit_that_is_here(
    composed: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(tmp_path / "hub", monkeypatch)
    first = planned(composed, weights="them/net")
    place = next(iter(first.stages.values())).location["model"]["weights"]

    assert place == str(tmp_path / "hub/models--them--net/snapshots" / ("c" * 40) / "model.safetensors")
    for same in ("main", "c" * 40):
        assert list(planned(composed, weights="them/net", revision=same).stages) == list(first.stages)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"weights": "lost.pt"}, r"`model.weights` \(=lost.pt\) cannot be read: there is no such file"),
        ({"weights": "a/b/c"}, r"`model.weights` \(=a/b/c\) cannot be read: there is no such file"),
        ({"weights": "notes.txt"}, r"`model.weights` \(=notes.txt\) must end in one of .safetensors, .pt"),
        ({"weights": "empty"}, r"`model.weights` \(=empty\) is a directory without model.safetensors or pytorch"),
        ({"weights": "memory://none.pt"}, r"`model.weights` \(=memory://none.pt\) cannot be read: "),
        ({"weights": "nosuch://me:pass@there/a.pt"}, r"`model.weights` \(=nosuch://me:\*\*\*@there/a.pt\) cannot be"),
        (
            {"weights": "gpt2"},
            r"\(=gpt2\) is no file or directory, and of .* no commit; run `hf download gpt2`",
        ),
        (
            {"weights": "them/net", "revision": "v2"},
            r"\(=them/net\) is no file .* no commit at revision v2; run `hf download them/net --revision v2`",
        ),
        ({"revision": "v2"}, r"`model.revision` \(=v2\) is about the weights that the network begins with; pass"),
        ({"reinitialise": ["fc"]}, r"`model.reinitialise` \(=\['fc'\]\) is about the weights"),
        ({"weights": ["a.pt"]}, r"`model.weights` \(=\['a.pt'\]\) must be text, or null"),
    ],
)
def test_what_does_not_lie_there_is_told(
    composed: Mapping[str, Any], model: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(tmp_path / "hub", monkeypatch)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "notes.txt", b"")
    (tmp_path / "empty").mkdir()

    with pytest.raises(schema.ConfigError, match=said) as caught:
        planned(composed, **model)
    assert len(str(caught.value).splitlines()) == 2
