"""`pruning.shrink`: try forms of the smaller network until one computes what the masked network does, and report."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pruning.compact.network_comparison import Comparison
from pruning.compact.smaller_network import Analysis, Form
from pruning.compact.traced_network import TracedNetwork
from pruning.compact.tried_inputs import arguments_left_out
from pruning.graph.traced_parts import retraced, traced_in_parts
from pruning.graph.tracing import (
    Example,
    Sizes,
    Traced,
    arguments_of,
    first_line,
    plain_copy,
)
from pruning.holding.copies import values_with_history
from pruning.measure.macs import Inputs
from pruning.measure.report import parameters
from pruning.mixtures.survivors import drop_removed_experts, leaves_experts_out


@dataclass(frozen=True)
class Shrunk:
    """Report of `shrink`, as plain data.

    Args:
        before, after: number of parameters of the network.
        removed: name -> (shape before, shape after) of each parameter and buffer that is smaller.
        left: name of each smaller tensor -> bool that broadcasts to the shape before: True where entries are kept.
        folded: name of a bias -> number of removed channels whose constant output was added to it; some biases are
            new.
        kept: name of a weight -> reason -> number of its empty outputs that were kept for that reason; a computed
            weight is named by its layer and operation.
        form: "module": the network's own class; "graph": a `torch.fx.GraphModule` of its operations for evaluation, in
            place of the network or of a part of it; "unchanged": a copy.
        parts: name of each part that was traced -> its form; "" is the network itself.
        outside: name -> number of entries of each matrix weight outside of these parts; they stay.
        tried: why each earlier form was rejected, why this form was compared in float32 alone, inputs at which it
            was not compared, and modules that the example's call does not run.
        error: dtype -> largest difference from the masked network's outputs, relative to the largest output.
    """

    before: int
    after: int
    removed: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    left: Mapping[str, Tensor] = field(repr=False)
    folded: Mapping[str, int]
    kept: Mapping[str, Mapping[str, int]]
    form: Form
    parts: Mapping[str, Form]
    outside: Mapping[str, int]
    tried: tuple[str, ...]
    error: Mapping[str, float]


def shrink(model: nn.Module, example: Example) -> nn.Module:
    """Remove the channels, heads and experts that pruning emptied, and return a smaller network with the same outputs.

        smaller = pruning.shrink(model, images[:2])
        smaller.shrunk.removed, smaller.shrunk.kept         # removed channels; empty channels kept, and why

    `shrink` follows values through the network. A channel is removed if it is 0, if it is a constant that the biases
    of its readers can absorb, or if nothing reads it. Experts that a router leaves out go first. The result has the
    model's own class and names if the model's forward takes its sizes from its modules; else it is a
    `torch.fx.GraphModule` for evaluation, which refuses inputs for which the example's operations do not hold. The
    outputs are compared with the masked network's, on the example and on noise in float32 and float64, and on inputs of
    other sizes, also where conditions on sizes have another outcome. If they differ by more than 1e-5 (float32) or
    1e-10 (float64) of the largest output, an unshrunk copy is returned. A network that runs in only one of these
    dtypes, for example because its forward makes a constant of that dtype, is compared in that one, and so is a graph
    that fails in float64. A warning names flags and numbers of the forward with which the smaller network computes
    something else, arguments that the example leaves out where constants went into biases, and modules that its call
    does not run.

    If `torch.export` cannot trace the model whole, its largest modules that can be traced become smaller, and all else
    stays: `smaller.shrunk.parts` and `outside`.

    Args:
        model: pruned or not; it is not changed. Its outputs in evaluation mode are preserved.
        example: input of the network: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.

    Returns:
        a network in evaluation mode; its attribute `shrunk` is the report, a `Shrunk`.

    Raises:
        ValueError: `torch.export` can trace neither the model nor a part of it, or it runs neither in float32 nor in
            float64.
        TypeError: `example` is no tensor, tuple or mapping.
    """
    plain = plain_copy(model)
    trace, experts = _traced_without_experts(plain, example)
    comparison = Comparison(plain, arguments_of(example), trace)
    tried = [f"the whole network: {trace.refusal}"] * bool(trace.refusal)
    ways = {part.path: 0 for part in trace.parts}
    while ways:
        forms = {path: FORMS[way][0] for path, way in ways.items()}
        trace, failures = retraced(trace, {path: FORMS[way][1] for path, way in ways.items()})
        counts = Counter(part.path for part in trace.parts)
        failures |= {path: SEVERAL for path, form in forms.items() if form == "graph" and counts[path] > 1}
        analysis = None
        if not failures:
            analysis, failures, notes, errors = _compared(comparison, trace, forms)
        if analysis and not failures:
            tried += [*_said(forms, notes), *comparison.untried]
            smaller = comparison.relaxed(analysis.build())
            doubts = [analysis.not_run(), *comparison.flags] if parameters(smaller) < parameters(plain) else []
            if analysis.folds and not isinstance(smaller, TracedNetwork):
                doubts.append(_constants_in_doubt(plain, arguments_of(example)))
            for said in filter(None, doubts):
                tried.append(said)
                warnings.warn(f"shrink: {said}", stacklevel=2)
            return _finished(smaller, model, plain, analysis, experts, tried, errors)
        tried += _said(forms, failures)
        ways = {path: way + (path in failures) for path, way in ways.items()}
        ways = {path: way for path, way in ways.items() if way < len(FORMS)}
    return _finished(plain, model, plain, None, {}, tried, {})


def _traced_without_experts(plain: nn.Module, example: Example) -> tuple[Traced, dict[str, tuple[int, Tensor]]]:
    """Return the trace of a network without the experts that routers leave out, and their places."""
    if not leaves_experts_out(plain):
        return traced_in_parts(plain, example, sizes="batch"), {}
    fewer = copy.deepcopy(plain, values_with_history(plain))
    experts = drop_removed_experts(fewer)
    return traced_in_parts(fewer, example, sizes="batch"), experts


FORMS: tuple[tuple[Form, Sizes], ...] = (("module", "batch"), ("graph", "any"), ("graph", "batch"))
"""Forms of a part, in the order in which they are tried, and the sizes for which it is traced."""


def _constants_in_doubt(model: nn.Module, given: Inputs) -> str:
    """Return a sentence that names arguments with which constants in biases may be wrong; empty if there are none."""
    if not (names := arguments_left_out(model, given)):
        return ""
    return (
        "channels that are constant in the example's call were added to biases, so outputs may differ in calls that "
        f"give {', '.join(f'`{name}`' for name in names)}: make another smaller network from the masked one for such "
        "calls, with an example that has them."
    )


def _compared(
    comparison: Comparison, trace: Traced, forms: Mapping[str, Form]
) -> tuple[Analysis | None, dict[str, str], dict[str, str], dict[torch.dtype, float]]:
    """Return the analysis of a smaller network, and its comparison.

    If the network fails around its parts, those are rejected that fail alone, else those in graph form, else all.
    """
    analysis = None
    try:
        analysis = Analysis.of(trace, forms)
        reasons, notes, errors = comparison.of(analysis)
    except Exception as error:  # a forward may raise anything for sizes that it was not written for
        reasons, notes, errors = {"" if len(forms) > 1 else next(iter(forms)): first_line(error)}, {}, {}
    if "" in reasons and "" not in forms:
        around, sizes = reasons.pop(""), {part.path: part.sizes for part in trace.parts}
        for path, form in forms.items() if len(forms) > 1 and not reasons else ():
            reasons |= _compared(comparison, retraced(trace, {path: sizes[path]})[0], {path: form})[1]
        graphs = [path for path, form in forms.items() if form == "graph"]
        reasons = reasons or dict.fromkeys(graphs or forms, f"the network around it: {around}")
    return analysis, reasons, notes, errors


SEVERAL = "it is called in ways for which no single graph holds"


def _said(forms: Mapping[str, Form], reasons: Mapping[str, str]) -> list[str]:
    return [f"`{path}`, {forms[path]}: {why}" if path else f"{forms[path]}: {why}" for path, why in reasons.items()]


def _finished(
    smaller: nn.Module,
    model: nn.Module,
    plain: nn.Module,
    analysis: Analysis | None,
    experts: Mapping[str, tuple[int, Tensor]],
    tried: list[str],
    errors: Mapping[torch.dtype, float],
) -> nn.Module:
    """Attach the report, freeze the parameters that are frozen in `plain`, and move to the model's device."""
    shapes, left = ({name: tuple(t.shape) for name, t in m.state_dict().items()} for m in (plain, smaller))
    removed = {name: (shapes[name], shape) for name, shape in left.items() if name in shapes and shapes[name] != shape}
    smaller.shrunk = Shrunk(  # type: ignore[assignment]
        parameters(plain),
        parameters(smaller),
        removed,
        _left(analysis, removed, experts, shapes) if analysis else {},
        {fold.name: fold.channels for fold in analysis.folds} if analysis else {},
        analysis.empty_and_kept() if analysis else {},
        analysis.form if analysis else "unchanged",
        dict(analysis.forms) if analysis else {},
        analysis.outside() if analysis else {},
        tuple(tried),
        {str(dtype).removeprefix("torch."): error for dtype, error in errors.items()},
    )
    frozen = {name for name, each in plain.named_parameters() if not each.requires_grad}
    for name, parameter in smaller.named_parameters():
        parameter.requires_grad_(name not in frozen and parameter.is_floating_point())
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return smaller.to(device).eval()


def _left(
    analysis: Analysis,
    removed: Iterable[str],
    experts: Mapping[str, tuple[int, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Tensor]:
    """Return name -> bool, where entries of the masked network are kept, also in tensors of experts."""
    found = analysis.left(removed)
    for name, (dim, kept) in experts.items():
        whole = torch.zeros(shapes[name], dtype=torch.bool)
        own = found.get(name, torch.ones((), dtype=torch.bool))
        size = [len(kept) if each == dim else length for each, length in enumerate(whole.shape)]
        found[name] = whole.index_copy(dim, kept, own.expand(size))
    return found
