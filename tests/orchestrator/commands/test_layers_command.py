"""The command `layers` prints one value of `prune.include` for each layer, or block, of a pruned network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from factories import SIZES, make_plan, make_records, sweep_info
from hydra.core.override_parser.overrides_parser import OverridesParser

from orchestrator.commands.layers_command import axis, main
from orchestrator.core.stage_kinds import KINDS
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store


def values(argument: str) -> list[list[str]]:
    """Return the values of the axis as Hydra reads them."""
    (parsed,) = OverridesParser.create().parse_overrides([argument.strip("'")])
    return [*parsed.sweep_iterator()]  # type: ignore[arg-type]


def test_each_layer_and_each_block_is_a_value() -> None:
    tensors = (
        "embed.weight",
        "blocks.0.attn.q.weight",
        "blocks.0.mlp.up.weight",
        "blocks.1.attn.q.weight",
        "head.weight",
    )

    assert values(axis(tensors, blocks=True)) == [["embed.weight"], ["blocks.0.*"], ["blocks.1.*"], ["head.weight"]]
    assert values(axis(tensors, blocks=False)) == [[name] for name in tensors]
    assert values(axis(("0.weight", "2.weight"), blocks=True)) == [["0.weight"], ["2.weight"]], "layers of a Sequential"


def test_the_layers_of_a_sweep_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(("magnitude",), (0.5,), (0,), rounds=1)
    store = Store("store").opened()
    store.save_sweep("one", manifest(sweep_info("one"), plan))

    assert main([]) == 2
    assert "has no pruned network yet" in capsys.readouterr().err

    for record in make_records(plan).values():
        store.commit(record, {})

    assert main(["one"]) == 0
    assert capsys.readouterr().out == "cnn: add to +sweep=sensitivity\n" + axis(SIZES, blocks=False) + "\n"


def test_norms_and_biases_that_masks_of_groups_cover_are_no_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(("magnitude",), (0.5,), (0,), rounds=1)
    store = Store("store").opened()
    store.save_sweep("one", manifest(sweep_info("one"), plan))
    cut = [*SIZES][:1]
    for record in make_records(plan).values():
        details = {"scoring": {"units": dict.fromkeys(cut, 4)}} if KINDS[record.kind].prunes else {}
        store.commit(replace(record, details=details), {})

    assert main(["one"]) == 0
    assert capsys.readouterr().out.endswith(axis(cut, blocks=False) + "\n")
