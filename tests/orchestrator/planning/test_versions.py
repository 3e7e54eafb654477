"""Versions in keys: code that affects bits matches the digest of its version; see `REMEDY`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from composition import composed

from orchestrator.core.specs import Job
from orchestrator.planning import plan, versions
from orchestrator.planning.versions import components, version_of
from scripts.reference.code_digests import SHARED, TRAINING, WORKLOADS, closure, closures, digest, digests, known, rows

KNOWN = Path(__file__).with_name("versions.json")
PYTHON = (3, 11)
REMEDY = """
is not the code that its version stands for. Run `python scripts/golden_bits.py --against HEAD` (HEAD~1 once the change
is committed): it runs both trees on this machine. Where lines differ, raise the component's version, in its row or in
orchestrator/planning/versions.py: the stages that use it are then other stages. Then, either way, renew the digests by
`.venv/bin/python -m scripts.reference --renew` and commit versions.json.
"""


def test_every_component_has_a_version() -> None:
    assert set(components()) == {*SHARED, *(component for component, _ in rows())}
    assert set(known(KNOWN)) == set(components())


@pytest.mark.skipif(sys.version_info[:2] != PYTHON, reason="syntax trees are those of Python 3.11")
def test_a_component_s_code_is_what_its_version_stands_for() -> None:
    before, code = known(KNOWN), digests()
    differ = [name for name in code if before.get(name) != {"version": version_of(name), "code": code[name]}]

    assert not differ, f"{', '.join(differ)} {REMEDY}"


def test_the_closure_holds_what_decides_bits() -> None:
    training, rounds = closures()
    root = dict(rows())

    assert {
        f"{WORKLOADS}.data_loading._cut",
        f"{WORKLOADS}.splits._Orders",
        f"{TRAINING}.loop.training_loop._LoopRun",
    } <= set(training)
    assert {"orchestrator.core.seeding.derive", f"{WORKLOADS}.weight_files.plain_state"} <= set(training)
    assert {"orchestrator.trial.choices.choices_of", "pruning.engine.classes.masks_of_class"} <= set(rounds)
    assert any(name.endswith(".BasePruningMethod") for name in rounds)
    assert f"{WORKLOADS}.networks.classifiers._image" in closure([root["model/cnn"]])
    assert f"{WORKLOADS}.networks.classifiers.mlp" in closure([root["model/cnn"]]), "its classifier"
    assert f"{WORKLOADS}.data_sets.idx_files.read" in closure([root["data/mnist"]])


@pytest.mark.parametrize(
    "same",
    [
        "\n\ndef f(x, *, k=1):\n    '''Add k.'''\n    from there import g\n    y = (x + k)\n    return [y for z in y]",
        "def f(x: int, *, k: int = 1) -> int:\n    y: int = x + k\n    return [y for z in y]",
        "def f(x, *, k=1):\n    total = x + k\n    return [total for each in total]",
    ],
)
def test_places_imports_docstrings_annotations_and_local_names_are_no_code(same: str) -> None:
    assert digest_of(same) == digest_of("def f(x, *, k=1):\n    y = x + k\n    return [y for z in y]")


@pytest.mark.parametrize(
    "other",
    [
        "def f(x, *, k=2):\n    y = x + k\n    return [y for z in y]",
        "def f(x, *, j=1):\n    y = x + j\n    return [y for z in y]",
        "def f(x, *, k=1):\n    y = x + k\n    return [z for z in y]",
        "def f(x, *, k=1):\n    y = k + x\n    return [y for z in y]",
    ],
)
def test_constants_arguments_and_what_is_computed_are_code(other: str) -> None:
    assert digest_of(other) != digest_of("def f(x, *, k=1):\n    y = x + k\n    return [y for z in y]")


def digest_of(text: str) -> str:
    return digest({"f": ast.parse(text).body[0]})


def test_a_raised_version_changes_the_stages_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed()

    def keys() -> tuple[str, ...]:
        return plan.make_plan([Job((), config)]).trials[0].stages

    before = keys()
    for component, changed in (
        ("data/mnist", 0),
        ("method/l1_unstructured", 0),
        ("score/magnitude", 3),
        ("round", 3),
        ("training", 4),
    ):
        known = version_of(component)
        monkeypatch.setattr(
            versions,
            "version_of",
            lambda name, at=component, known=known: known + 1 if name == at else version_of(name),
        )
        assert sum(a != b for a, b in zip(before, keys(), strict=True)) == changed


def test_the_key_of_a_round_by_an_own_class_has_the_version_of_how_the_class_is_called() -> None:
    assert set(versions.versions_of({"method": {"_target_": "mine.Largest"}})) == {"training", "round", "own_class"}
    assert "own_class" not in versions.versions_of({"method": {"kind": "l1_unstructured"}})
