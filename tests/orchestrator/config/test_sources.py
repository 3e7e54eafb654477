"""Fingerprints of custom code and files: found without an import, by content, with all their imports."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import sources
from orchestrator.core.plain_data import digest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "their_package"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\nfrom .nets import Reexported\n")
    (folder / "nets.py").write_text("class Net: ...\nReexported = Net\n")
    (folder / "sub" / "__init__.py").write_text("from ..nets import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sources.look_again()
    yield folder
    assert "their_package" not in sys.modules


def of(target: str, **keys: Any) -> Mapping[str, Any]:
    sources.look_again()
    return sources.fingerprint({"model": {"_target_": target, **keys}})


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_target_is_found_without_being_imported(package: Path) -> None:
    assert sources.locate("their_package.nets.Net") == "their_package.nets"
    assert sources.locate("their_package.Reexported") == "their_package"
    assert sources.locate("their_package.sub.Anything") == "their_package.sub"
    write(package / "__init__.py", "from .nets import nets\n")
    sources.look_again()
    assert sources.locate("their_package.nets") == "their_package", "a function that hides the module of its name"


def test_the_whole_module_path_counts(package: Path) -> None:
    files = {"their_package": "__init__.py", "their_package.nets": "nets.py"}

    assert of("their_package.nets.Net")["modules"] == {
        name: digest((package / file).read_bytes()) for name, file in files.items()
    }


@pytest.mark.parametrize(
    ("statement", "helper"),
    [
        ("import helpers", "helpers.py"),
        ("import helpers.deep.layers as layers", "helpers/deep/layers.py"),
        ("from helpers import layers", "helpers/layers.py"),
        ("from their_package.blocks import Block", "their_package/blocks.py"),
        ("from .blocks import Block", "their_package/blocks.py"),
        ("from . import blocks", "their_package/blocks/__init__.py"),
        ("from their_package.parts import *", "their_package/parts/named_in_all.py"),
        ("def build():\n    from .blocks import Block", "their_package/blocks.py"),
        ("try:\n    import helpers\nexcept ImportError: ...", "helpers.py"),
        ("import importlib\nx = importlib.import_module('.blocks', __package__)", "their_package/blocks.py"),
        ("from importlib import import_module as load\nx = load(name='helpers')", "helpers.py"),
    ],
)
def test_what_a_module_imports_counts(package: Path, statement: str, helper: str) -> None:
    path = package.parent / helper
    write(package / "nets.py", f"{statement}\nclass Net: ...\n")
    write(path, "import second_helper\n")
    write(package.parent / "second_helper.py", "width = 1\n")
    before = of("their_package.nets.Net")
    write(path, "import second_helper  # changed\n")
    after = of("their_package.nets.Net")
    write(package.parent / "second_helper.py", "width = 2\n")

    assert before != after
    assert of("their_package.nets.Net") != after


def test_a_module_in_a_folder_without_an_init_has_a_fingerprint(package: Path) -> None:
    write(package.parent / "loose" / "inner" / "nets.py", "from . import blocks\nclass Net: ...\n")
    write(package.parent / "loose" / "inner" / "blocks.py", "")

    assert sources.locate("loose.inner.nets.Net") == "loose.inner.nets"
    assert sorted(of("loose.inner.nets.Net")["modules"]) == ["loose.inner.blocks", "loose.inner.nets"]
    with pytest.raises(sources.SourceError, match="has no 'Net'"):
        sources.locate("loose.inner.Net")


def test_an_absolute_reexport_counts_with_the_file_that_it_comes_from(package: Path) -> None:
    write(package / "__init__.py", "from their_package.nets import Net\n")
    before = of("their_package.Net")
    write(package / "nets.py", "class Net: changed = True\n")

    assert of("their_package.Net") != before


def test_of_installed_packages_the_versions_count(package: Path) -> None:
    write(package / "nets.py", "import json, torch, rich.console, pruning\nclass Net: ...\n")
    found = of("their_package.nets.Net")

    assert list(found["packages"]) == ["rich"]
    assert sorted(found["modules"]) == ["their_package", "their_package.nets"]
    assert list(of("rich.console.Console")["packages"]) == ["rich"]


def test_nested_targets_count_and_built_ins_do_not(package: Path) -> None:
    node = {
        "kind": "mlp",
        "parts": [{"_target_": "their_package.nets.Net"}],
        "o": {"_target_": "torch.optim.SGD"},
    }
    found = sources.fingerprint({"model": node})

    assert sorted(found["modules"]) == ["their_package", "their_package.nets"]
    assert not found["packages"]
    del node["parts"]
    assert sources.fingerprint({"model": node}) == {"modules": {}, "packages": {}, "files": {}}


def _replaced(path: Path) -> None:
    times = path.stat()
    path.with_suffix(".new").write_text("other text!")
    os.utime(path.with_suffix(".new"), ns=(times.st_atime_ns, times.st_mtime_ns))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("other"),
        _replaced,
        lambda path: path.rename(path.with_name("renamed")),
        lambda path: (path.parent / "more").write_text(""),
    ],
)
def test_the_contents_of_what_a_node_depends_on_count(package: Path, change: Callable[[Path], object]) -> None:
    data = package.parent / "images"
    write(data / "deep" / "a.bin", "first text!")
    (data / "loop").symlink_to(data)
    before = of("their_package.nets.Net", depends=["images"])
    write(data / "__pycache__" / "x.pyc", "what importing leaves")

    assert of("their_package.nets.Net", depends=["images"]) == before
    change(data / "deep" / "a.bin")
    assert of("their_package.nets.Net", depends=["images"]) != before


@pytest.mark.parametrize(
    ("depends", "said"),
    [
        (["images", "lost.pt"], r"`model.depends` \(=lost.pt\) cannot be read: No such file or directory"),
        ("lost.pt", r"`model.depends` \(='lost.pt'\) must be a list"),
        ([3], r"`model.depends` \(=\[3\]\) must be a list"),
    ],
)
def test_what_cannot_be_read_is_said(package: Path, depends: Any, said: str) -> None:
    write(package.parent / "images" / "a.bin", "")
    (sentence,) = sources.unreadable("model", {"_target_": "x.Y", "depends": depends})

    assert re.match(said, sentence)


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("Net", "dotted path"),
        ("no_such_package.Net", "no module 'no_such_package'"),
        ("their_package.nets.Nett", "has no 'Nett'"),
        ("their_package.nets", "is a module"),
        ("their package.Net", "dotted path"),
        ("their_package.broken.Net", "has a syntax error"),
    ],
)
def test_what_leads_nowhere_is_said(package: Path, target: str, rule: str) -> None:
    write(package / "broken.py", "class Net(:\n")
    sources.look_again()
    with pytest.raises(sources.SourceError, match=rule):
        sources.locate(target)


def test_what_is_passed_by_a_path_of_hydra_s_counts(package: Path) -> None:
    write(package / "nets.py", "class Net: ...\n")
    write(package.parent / "activations.py", "def smooth(x): return x\n")
    act = {"_target_": "hydra.utils.get_method", "path": "activations.smooth"}
    before = of("their_package.nets.Net", act=act)
    write(package.parent / "activations.py", "def smooth(x): return 2 * x\n")

    assert of("their_package.nets.Net", act=act) != before
