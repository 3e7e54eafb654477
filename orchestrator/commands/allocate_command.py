"""Command `pruning-orchestrator allocate SWEEP`: densities of layers from a sweep that pruned each layer alone."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from orchestrator.commands.arguments import CommandParser, add_sweep, named_sweep, replace_named, run_command
from orchestrator.compare.sensitivity import Allocation, SensitivityCurve, allocation, sensitivity_curves
from orchestrator.core.errors import OrchestratorError
from orchestrator.planning.number_formats import percent
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.views.terminal.standard_streams import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the densities for each sparsity to a file; return 0, or 2 for a mistake."""
    return run_command(_parser(), _allocate, arguments)


def _allocate(options: argparse.Namespace) -> int:
    sparsities = _sparsities(options.sparsity)
    _, sweep = named_sweep(options)
    _refuse_unfinished(sweep)
    curves = _chosen(sweep, options.network, options.method)
    found = [allocation(curves, sparsity) for sparsity in sparsities]
    replace_named("--output", Path(options.output), _text(sweep, curves, found).encode())
    for each in found:
        say(_line(each))
    say(f"{options.output}: type scope=given scope.densities_file={options.output}")
    names = ",".join(name for curve in curves for name in curve.sizes)
    say(f"If the network would prune tensors that were not measured, add 'prune.include=[{names}]'.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pruning-orchestrator allocate",
        description="Solve densities from a finished sweep that pruned each layer alone (+sweep=sensitivity).",
    )
    add_sweep(parser)
    parser.add_argument(
        "--sparsity", required=True, metavar="S[,S]", help="total sparsities, as in 0.8,0.9: fractions of these layers"
    )
    parser.add_argument(
        "--output", default="densities.yaml", metavar="FILE", help="file to write (default: densities.yaml)"
    )
    parser.add_argument("--network", metavar="NAME", help="network, if the sweep has several, as in 'cnn on digits'")
    parser.add_argument("--method", metavar="NAME", help="method, if the sweep has several")
    return parser


def _sparsities(text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= each < 1 for each in found):
        raise OrchestratorError(f"`--sparsity` (={text}) must be fractions in [0, 1), as in 0.8,0.9.")
    return found


def _refuse_unfinished(sweep: SavedSweep) -> None:
    """Raise OrchestratorError unless all trials have finished: a missing layer would be given to the others."""
    if left := [trial.name for trial in sweep.plan.trials if not sweep.records.keys() >= {*trial.stages}]:
        raise OrchestratorError(
            f"{sweep.info.name} has {len(left)} trials that have not finished, {left[0]!r} among them; run the same "
            "command again first."
        )


def _chosen(sweep: SavedSweep, network: str | None, method: str | None) -> list[SensitivityCurve]:
    """Return the curves of one network and one method.

    Raises:
        OrchestratorError: there are no curves, several networks or methods, or several curves of a layer
    """
    curves = sensitivity_curves(sweep.plan, sweep.records)
    if not curves:
        raise OrchestratorError(
            f"{sweep.info.name} does not prune layers one by one; run +sweep=sensitivity, which varies `prune.include`."
        )
    networks: dict[str, list[SensitivityCurve]] = {}
    for curve in curves:
        networks.setdefault(f"{curve.model} on {curve.data}", []).append(curve)
    methods: dict[str, list[SensitivityCurve]] = {}
    for curve in networks[_one("--network", network, [*networks])]:
        methods.setdefault(curve.method, []).append(curve)
    found = methods[_one("--method", method, [*methods])]
    layer, times = Counter(curve.layer for curve in found).most_common(1)[0]
    if times > 1:
        lines = "; ".join(curve.line for curve in found if curve.layer == layer)
        raise OrchestratorError(
            f"{sweep.info.name} prunes {layer} alone with several settings: {lines}; run a sweep with one of them."
        )
    return found


def _one(argument: str, given: str | None, known: Sequence[str]) -> str:
    if given is None and len(known) == 1:
        return known[0]
    if given is None or given not in known:
        raise OrchestratorError(f"`{argument}` (={given}) must be one of {', '.join(known)}.")
    return given


def _text(sweep: SavedSweep, curves: Sequence[SensitivityCurve], found: Sequence[Allocation]) -> str:
    content = {
        "sweep": sweep.info.name,
        "network": f"{curves[0].model} on {curves[0].data}",
        "method": curves[0].method,
        "entries": {name: size for curve in curves for name, size in curve.sizes.items()},
        "densities": {each.sparsity: dict(each.densities) for each in found},
    }
    return f"# Fraction of each tensor that is kept, by total sparsity.\n{OmegaConf.to_yaml(OmegaConf.create(content))}"


def _line(each: Allocation) -> str:
    densities = ", ".join(f"{name} {percent(density)}" for name, density in each.densities.items())
    uniform = "not measured" if each.uniform_increase is None else f"{each.uniform_increase:.4g}"
    return (
        f"sparsity {percent(each.sparsity)}: keeps {densities}; sum of increases of the loss {each.increase:.4g}, "
        f"uniform {uniform}"
    )
