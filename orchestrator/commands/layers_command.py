"""Command `pruning-orchestrator layers SWEEP`: the axis `prune.include` that prunes each layer, or block, alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import dropwhile

from orchestrator.commands.arguments import CommandParser, add_sweep, named_sweep, run_command
from orchestrator.core.errors import OrchestratorError
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.views.terminal.standard_streams import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the axis for each network of a sweep; return 0, or 2 for a mistake."""
    return run_command(_parser(), _layers, arguments)


def _layers(options: argparse.Namespace) -> int:
    for network, tensors in _networks(named_sweep(options)[1]).items():
        say(f"{network}: add to +sweep=sensitivity")
        say(axis(tensors, blocks=options.blocks))
    return 0


def axis(tensors: Iterable[str], *, blocks: bool) -> str:
    """Return the argument `prune.include=...` in quotes, with one value for each layer or block.

    A block is the part of a name up to its first number, as in `blocks.0` of `blocks.0.attn.q.weight`; tensors outside
    of blocks are taken one by one.

    Args:
        tensors: qualified names of the tensors that are pruned
        blocks: take the tensors of a block together
    """
    values = dict.fromkeys(_block(name) if blocks else name for name in tensors)
    return f"'prune.include={','.join(f'[{value}]' for value in values)}'"


def _block(name: str) -> str:
    """Return the pattern of a tensor's block; the name itself if it lies in none."""
    parts = name.split(".")
    after = [*dropwhile(lambda part: not part.isdigit(), parts)][1:]
    return ".".join([*parts[: len(parts) - len(after)], "*"]) if len(after) > 1 else name


def _networks(sweep: SavedSweep) -> dict[str, list[str]]:
    """Return the model's name -> the tensors that trials of the sweep prune, in the order of the network.

    Raises:
        OrchestratorError: no trial has pruned a network
    """
    found: dict[str, dict[str, None]] = {}
    for trial in sweep.plan.trials:
        record = sweep.records.get(trial.stages[-1])
        if record is not None and record.round:
            names = record.typed.scoring.units or record.tensor_sizes
            found.setdefault(str(trial.config.get("model", {}).get("name")), {}).update(dict.fromkeys(names))
    if not found:
        raise OrchestratorError(
            f"{sweep.info.name} has no pruned network yet, whose record names the layers; run one trial first, as in "
            "method=magnitude schedule=one_shot finetune=none: the sensitivity sweep reuses its dense network."
        )
    return {name: [*tensors] for name, tensors in found.items()}


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pruning-orchestrator layers",
        description="Print the axis prune.include for +sweep=sensitivity, from a sweep that has pruned the network.",
    )
    add_sweep(parser)
    parser.add_argument("--blocks", action="store_true", help="take each block together, as in blocks.0.*")
    return parser
