"""Comparison of smaller networks with the masked one: on the example, on noise, and on other inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pruning.compact.other_inputs import OtherInputs
from pruning.compact.smaller_network import Analysis, converted
from pruning.compact.traced_network import TracedNetwork
from pruning.graph.constant_tensors import cast
from pruning.graph.operations import name_of
from pruning.graph.tracing import (
    Traced,
    difference_told,
    first_line,
    output_difference,
    outputs_of,
)
from pruning.holding.copies import values_with_history
from pruning.measure.macs import Inputs

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
"""dtype of the computation -> largest allowed difference of outputs, relative to the largest output."""


class Comparison:
    """Comparison of smaller networks with the masked one: its parts, and the network as a whole.

    Outputs of the parts are compared in float32 and float64, on the example and on noise; a forward may make constants
    of one dtype that fail with the other. If the network has other operations around its parts, these may order close
    values, as detectors do, so its outputs are compared in the wider dtype alone; on inputs of other sizes, which are
    many, only where they differ in float32.

    Args:
        model: the masked network.
        given: inputs of the example.
        trace: the parts, of a network without the experts that routers leave out.
    """

    def __init__(self, model: nn.Module, given: Inputs, trace: Traced) -> None:
        calls: dict[str, list[Inputs]] = {}
        for part in trace.parts:
            calls.setdefault(part.path, []).extend(part.calls)
        self._calls = {
            path: [*own, *(tree_map(_noise, each) for each in own)] for path, own in {**calls, "": [given]}.items()
        }
        self._expected = self._expectations(model, trace.model)
        self._whole = "" in calls
        rules = [rule for part in trace.parts for rule in part.guard.rules]
        self._model, self._dtype = model, None
        if not self._whole:
            self._dtype = next(iter(self._expected[""]))
            self._expected[""] = dict([self._expected[""].popitem()])
            model = converted(copy.deepcopy(model, values_with_history(model)), self._dtype)
            given = _cast_all(given, self._dtype)
        self._others = OtherInputs(model, given, rules)

    def _expectations(self, model: nn.Module, fewer: nn.Module) -> dict[str, dict[torch.dtype, list[list[Tensor]]]]:
        """Return path -> dtype -> outputs for the dtypes that a part runs in."""
        expected: dict[str, dict[torch.dtype, list[list[Tensor]]]] = {path: {} for path in self._calls}
        reasons: dict[str, str] = {}
        paths = [path for path in self._calls if path]
        for dtype, network, own in ((d, *each) for d in TOLERANCES for each in ((model, [""]), (fewer, paths))):
            network = converted(copy.deepcopy(network), dtype) if own else network
            for path in own:
                try:
                    expected[path][dtype] = self._outputs(network, path, dtype)
                except Exception as error:  # a forward may raise anything
                    reasons[path] = first_line(error)
        for path in (path for path, own in expected.items() if not own):
            raise ValueError(
                f"{type(model.get_submodule(path)).__name__} runs neither in float32 nor in float64 ({reasons[path]}), "
                "so the outputs of the smaller network cannot be checked; use real numbers, and create tensors in its "
                "forward with the dtype of its inputs."
            )
        return expected

    def _outputs(self, model: nn.Module, path: str, dtype: torch.dtype) -> list[list[Tensor]]:
        part = model.get_submodule(path).eval()
        return [outputs_of(part, _cast_all(given, dtype)) for given in self._calls[path]]

    def of(self, analysis: Analysis) -> tuple[dict[str, str], dict[str, str], dict[torch.dtype, float]]:
        """Compare a smaller network.

        Returns:
            path of a part, or "" -> why it is rejected; path -> why it is compared in float32 alone; dtype -> largest
            difference of outputs, relative to the largest output.
        """
        found, failed = self._errors(analysis.build)
        within = _tolerances(analysis)
        reasons, notes = dict[str, str](), dict[str, str]()
        for path, errors in found.items():
            own = within if path in analysis.forms else dict.fromkeys(TOLERANCES, max(TOLERANCES.values()))
            if any(error > max(own[dtype], self._rounding(path, dtype)) for dtype, error in errors.items()):
                reasons[path] = difference_told(max(errors.values()))
            elif not errors:
                reasons[path] = failed[path]
            elif path in failed:
                notes[path] = f"compared in float32 alone, because it fails in float64: {failed[path]}"
        if not reasons and (elsewhere := self._elsewhere(analysis)):
            reasons[""] = elsewhere
        largest = {
            dtype: max(each[dtype] for each in found.values() if dtype in each)
            for each in found.values()
            for dtype in each
        }
        return reasons, notes, largest

    def _elsewhere(self, analysis: Analysis) -> str:
        """Return where a smaller network differs on inputs of other sizes; empty if it agrees."""
        smaller, within = analysis.build(self._dtype), max(TOLERANCES.values())
        widest, model = next(iter(self._expected[""])), self._model
        if self._dtype in (None, widest):
            return self._others.disagreement(smaller, within)

        def wider(given: Inputs) -> tuple[nn.Module, nn.Module, Inputs]:
            masked = converted(copy.deepcopy(model, values_with_history(model)), widest)
            return masked, analysis.build(widest), _cast_all(given, widest)

        return self._others.disagreement(smaller, within, wider)

    def _errors(
        self, build: Callable[[torch.dtype], nn.Module]
    ) -> tuple[dict[str, dict[torch.dtype, float]], dict[str, str]]:
        """Return path -> dtype -> largest difference of outputs, and why a part failed.

        A graph whose operations make tensors in float32 fails in float64 alone.
        """
        found: dict[str, dict[torch.dtype, float]] = {path: {} for path in self._calls}
        failed: dict[str, str] = {}
        for dtype in TOLERANCES:
            paths = [path for path in self._calls if dtype in self._expected[path] and path not in failed]
            for path, error in self._differences(build(dtype), paths, dtype) if paths else ():
                if isinstance(error, str):
                    failed[path] = error
                else:
                    found[path][dtype] = error
        return found, failed

    def _differences(
        self, smaller: nn.Module, paths: Iterable[str], dtype: torch.dtype
    ) -> Iterator[tuple[str, float | str]]:
        """Yield each part with the largest difference of its outputs, or with the reason why it failed."""
        for path in paths:
            try:
                outputs = self._outputs(smaller, path, dtype)
                yield path, max(map(output_difference, outputs, self._expected[path][dtype]))
            except Exception as error:  # a forward may raise anything
                yield path, first_line(error)

    def _rounding(self, path: str, dtype: torch.dtype) -> float:
        """Return how far two results in float32 may lie apart: twice the distance of the masked one from float64."""
        expected = self._expected[path]
        if dtype is torch.float64 or len(expected) < len(TOLERANCES):
            return 0.0
        return 2 * max(map(output_difference, *expected.values()))

    @property
    def untried(self) -> list[str]:
        """Sentences that name the inputs at which outputs are not compared."""
        return [f"not compared for {each}, {why}" for each, why in self._others.untried.items()]

    @property
    def flags(self) -> list[str]:
        """Sentences that name flags and numbers with which the smaller network computes something else."""
        return [
            f"with `{flag}`, which the example's call does not have, {reason}: make another smaller network from the "
            "masked one for such calls, with an example that has it."
            for flag, reason in self._others.flags.items()
        ]

    def relaxed(self, smaller: nn.Module) -> nn.Module:
        """Return a smaller network in its final form, without conditions on sizes at which it agrees, too."""
        if isinstance(smaller, TracedNetwork):
            self._others.relax(smaller, max(TOLERANCES.values()))
        return smaller


def _tolerances(analysis: Analysis) -> dict[torch.dtype, float]:
    """Return the tolerance of each dtype; a network that casts to float32 itself gets float32's for float64 too.

    So does a graph with constants, which were traced in float32.
    """
    traced = analysis.flow.traced
    nodes = traced.graph.graph.nodes
    casts = any(
        name_of(node) in ("to", "_to_copy") and torch.float32 in (*node.args, *node.kwargs.values()) for node in nodes
    )
    if analysis.form == "graph":
        held = {id(each) for each in (*traced.model.parameters(), *traced.model.buffers())}
        read = (traced.tensor(str(node.target)) for node in traced.graph.graph.find_nodes(op="get_attr"))
        casts |= any(each.dtype is torch.float32 and id(each) not in held for each in read)
        casts |= any(node.meta["val"].dtype is torch.float32 for node in analysis.flow.made)
    return dict.fromkeys(TOLERANCES, max(TOLERANCES.values())) if casts else TOLERANCES


def _noise(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    generator = torch.Generator().manual_seed(0)
    return torch.randn(leaf.shape, generator=generator).to(leaf.device, leaf.dtype)


def _cast_all(given: Inputs, dtype: torch.dtype) -> Inputs:
    found: Inputs = tree_map(partial(cast, dtype=dtype), given)
    return found
