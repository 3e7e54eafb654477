"""Sensitivity: curves of layers that are pruned alone, and the densities that are solved from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from factories import SIZES, config, make_records, plan_of, sweep_info
from omegaconf import OmegaConf

from orchestrator.commands.allocate_command import main
from orchestrator.compare.sensitivity import allocation, sensitivity_curves, sensitivity_rows
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store
from orchestrator.views.report.figures.layer_data import layers_alone

LAYERS = {"conv": ("conv1.weight", "conv2.weight"), "fc1": ("fc1.weight",), "fc2": ("fc2.weight",)}
STEEP = {"conv": 8.0, "fc1": 0.5, "fc2": 2.0}
LEVELS = (0.5, 0.9)


def alone(methods: tuple[str, ...] = ("magnitude",)) -> tuple[Plan, Mapping[str, StageRecord]]:
    """Return a sweep of layers pruned alone, with losses that grow by `STEEP` times the squared sparsity."""
    plan = plan_of(
        [
            config(method, sparsity, seed, 1, prune={"include": [f"{layer}*"], "exclude": []})
            for method in methods
            for layer in LAYERS
            for sparsity in LEVELS
            for seed in (0, 1)
        ]
    )
    records = make_records(plan)
    for key, record in records.items():
        spec = plan.stages[key]
        after = {**record.after, "val/loss": 1.0 + spec.fields["seed"]}
        if record.round:
            layer = spec.fields["prune"]["include"][0].rstrip("*")
            sizes = {name: SIZES[name] for name in LAYERS[layer]}
            level = float(record.requested_sparsity or 0)
            after["val/loss"] += STEEP[layer] * level**2
            record = replace(record, tensor_sizes=sizes, tensor_sparsity=dict.fromkeys(sizes, level), sparsity=level)
        records[key] = replace(record, after=after, files={})
    return plan, records


def test_a_curve_begins_at_dense_and_pairs_the_loss_by_seed() -> None:
    curves = sensitivity_curves(*alone())

    assert [curve.layer for curve in curves] == ["conv1.weight, conv2.weight", "fc1.weight", "fc2.weight"]
    assert [curve.entries for curve in curves] == [72 + 1152, 8192, 640]
    for curve, steep in zip(curves, STEEP.values(), strict=True):
        increases = [point.loss_increase for point in curve.points]
        assert [point.sparsity for point in curve.points] == [0.0, *LEVELS]
        assert [each and each.mean for each in increases] == pytest.approx([0.0, 0.25 * steep, 0.81 * steep])
        assert [each and each.std for each in increases] == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    assert len([*sensitivity_rows(curves)]) == 9
    assert [len(plot.series) for plot in layers_alone(curves)] == [3, 3]


def test_a_sweep_whose_trials_prune_the_same_tensors_has_no_curves() -> None:
    plan = plan_of([config("magnitude", 0.5, 0), config("random", 0.5, 0)])

    assert sensitivity_curves(plan, make_records(plan)) == ()


def test_an_allocation_reaches_the_total_and_spares_steep_layers() -> None:
    found = allocation(sensitivity_curves(*alone()), 0.75)
    counts = {name: round((1 - density) * SIZES[name]) for name, density in found.densities.items()}

    assert sum(counts.values()) == round(0.75 * sum(SIZES.values()))
    assert counts["fc1.weight"] == round(0.9 * 8192)  # its measured end
    assert found.uniform_increase is not None
    assert found.increase < found.uniform_increase
    with pytest.raises(OrchestratorError, match="outside of the measured sparsities"):
        allocation(sensitivity_curves(*alone()), 0.95)


def saved(plan: Plan, records: Mapping[str, StageRecord]) -> None:
    store = Store("store")
    for record in records.values():
        store.commit(record, {})
    store.save_sweep("alone", manifest(sweep_info("alone"), plan))


def test_the_command_writes_a_file_by_sparsity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(*alone())

    assert main(["--sparsity", "0.5,0.75", "--output", "here.yaml"]) == 0

    content = OmegaConf.to_container(OmegaConf.load("here.yaml"))
    assert isinstance(content, dict)
    assert [*content["densities"]] == [0.5, 0.75]
    assert content["densities"][0.75] == dict(allocation(sensitivity_curves(*alone()), 0.75).densities)
    assert content["entries"] == SIZES
    told = capsys.readouterr().out
    assert "scope.densities_file=here.yaml" in told
    assert f"add 'prune.include=[{','.join(SIZES)}]'" in told


@pytest.mark.parametrize(
    ("arguments", "methods", "lost", "said"),
    [
        (["--sparsity", "0.99"], ("magnitude",), False, "outside of the measured sparsities"),
        (["--sparsity", "half"], ("magnitude",), False, "`--sparsity` (=half) must be fractions"),
        (["--sparsity", "0.5"], ("magnitude", "random"), False, "`--method` (=None) must be one of magnitude, random"),
        (["--sparsity", "0.5", "--network", "mlp"], ("magnitude",), False, "must be one of cnn on digits"),
        (["--sparsity", "0.5"], ("magnitude",), True, "trials that have not finished"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    arguments: list[str],
    methods: tuple[str, ...],
    lost: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    plan, records = alone(methods)
    saved(plan, {key: record for key, record in records.items() if not lost or key != plan.trials[0].stages[-1]})

    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not Path("densities.yaml").exists()
