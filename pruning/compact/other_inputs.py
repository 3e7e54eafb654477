"""Agreement of a smaller network with the masked one on inputs of other sizes than the example's."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pruning.compact.traced_network import TracedNetwork
from pruning.graph.input_guard import Inputs, other_inputs
from pruning.graph.tracing import first_line, output_difference, outputs_of
from pruning.holding.copies import values_with_history


class OtherInputs:
    """Outputs of a masked network on inputs of other sizes and dtypes, as far as it runs on them.

    Args:
        model: the masked network in evaluation mode.
        given: inputs of the example.
        rules: conditions on sizes, whose other sides are tried.
    """

    def __init__(self, model: nn.Module, given: Inputs, rules: Iterable[str]) -> None:
        model = copy.deepcopy(model, values_with_history(model))
        self._expected: list[tuple[Inputs, list[Tensor]]] = []
        for each in other_inputs(given, rules):
            try:
                self._expected.append((each, outputs_of(model, each)))
            except Exception:  # a forward may raise anything for sizes that it was not written for
                continue

    def disagreement(self, smaller: nn.Module, tolerance: float) -> str:
        """Return where a smaller network differs by more than a tolerance; empty if it agrees or refuses the input.

        Args:
            smaller: the smaller network, whose buffers may change.
            tolerance: largest allowed difference, relative to the largest output.
        """
        for given, expected in self._expected:
            if isinstance(smaller, TracedNetwork) and smaller.guard.refusal(*given):
                continue
            try:
                difference = output_difference(outputs_of(smaller, given), expected)
            except Exception as error:  # as above
                return f"{first_line(error)} for {_described(given)}"
            if difference > tolerance:
                return f"outputs differ by {difference:.2g} of the largest for {_described(given)}"
        return ""


def _described(given: Inputs) -> str:
    leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return "inputs of " + ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves)
