"""Measure what scores cost, as ratios to passes of the same network over the same examples; one process, one thread.

    python scripts/benchmarks/bench_scores.py [--seconds 0.7] [--only WORD] [--json FILE]

Each row runs the plain pass and the score in turns for about `--seconds`, and takes the median ratio of neighbours in
processor time, which other processes disturb less than wall time. A pass is a plain loop over the batches:
forward, mean cross-entropy, and `backward` into all parameters; only forward for Wanda; 100 passes of one example in
float64 for SynFlow's 100 rounds. Pass and score use the same mode: BatchNorm in training mode if all examples are one
batch. ResNet-20 gets an eighth of the examples. The selection after SynFlow's scores has a separate row.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from orchestrator.catalogue.models import MODELS
from pruning import scores
from pruning.scores.readings.scoring_data import ScoringInput
from pruning.scores.weight_scores import Flow
from pruning.selection.smallest import prune_smallest_across_

Batch = tuple[Tensor, Tensor]
IMAGE, CLASSES = (1, 28, 28), 10
NETWORKS = ("lenet_300_100", "lenet5", "resnet20")


@dataclass(frozen=True)
class Row:
    """Row of the table: milliseconds of the passes and of the score, their ratio, and its bar."""

    what: str
    passes: float
    score: float
    ratio: float
    bar: float | None

    def __str__(self) -> str:
        bar = "" if self.bar is None else f"<= {self.bar:g}"
        short = "SHORT" if self.bar is not None and self.ratio > self.bar else ""
        return f"{self.what:<50} {self.passes:10.2f} {self.score:10.2f} ms {self.ratio:7.2f}  {bar:<7}{short}".rstrip()


def compared(
    what: str, passes: Callable[[], object], score: Callable[[], object], bar: float | None, seconds: float
) -> Row:
    """Run both in turns until `seconds` have passed (twice at least), and compare their medians."""
    taken: tuple[list[float], list[float]] = ([], [])
    began = time.monotonic()
    passes()  # to warm up
    score()
    while len(taken[0]) < 2 or time.monotonic() - began < seconds:
        for action, times in zip((passes, score), taken, strict=True):
            gc.collect()
            start = time.process_time()
            action()
            times.append(time.process_time() - start)
    of_passes, of_score = (1e3 * statistics.median(times) for times in taken)
    ratio = statistics.median(after / before for before, after in zip(*taken, strict=True))
    return Row(what, of_passes, of_score, ratio, bar)


def network(name: str) -> nn.Module:
    """Build a well-known network."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[name].load()(IMAGE, CLASSES)
    return model.eval()


def examples(count: int, at_once: int) -> list[Batch]:
    """Draw images and labels in batches of `at_once`."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, *IMAGE, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return list(zip(torch.split(images, at_once), torch.split(labels, at_once), strict=True))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return cross_entropy(model(batch[0]), batch[1])


def forward_backward(model: nn.Module, batches: list[Batch]) -> None:
    """Pass all batches, and sum the gradients of their losses."""
    model.zero_grad()
    for batch in batches:
        torch.autograd.backward(loss(model, batch))


def forward(model: nn.Module, batches: list[Batch]) -> None:
    """Pass all batches without gradients."""
    with torch.no_grad():
        for batch in batches:
            loss(model, batch)


def of_scores(seconds: float, only: str) -> Iterator[Row]:
    """Compare each score that reads data."""
    cases: list[tuple[str, dict[str, Any], int, int, float | None, float | None]] = [
        ("snip", {}, 128, 128, 1.3, 1.3),
        ("snip", {}, 1024, 128, 1.3, 1.3),
        ("taylor", {}, 128, 128, 1.3, 1.3),
        ("taylor", {"form": "gate"}, 128, 128, 1.3, 1.3),
        ("grasp", {}, 128, 128, 5, 5),
        ("grasp", {}, 256, 64, 5, 5),
        ("fisher", {}, 1000, 200, 3, 6),
        ("wanda", {}, 1024, 128, 1.2, 1.2),
    ]
    for score, own, count, at_once, linear_bar, conv_bar in cases:
        for name in NETWORKS:
            share = 8 if name == "resnet20" else 1
            options = "".join(f" {key}={value}" for key, value in own.items())
            what = f"{score}{options} {name}, {count // share} examples by {at_once // share}"
            if only not in what:
                continue
            model, batches, given = network(name), examples(count // share, at_once // share), dict(own)
            passes = forward if score == "wanda" else forward_backward
            if scores.SCORES[score].reads_batch_norm:  # the passes and the score in one mode
                norm = "train" if count == at_once else "eval"
                model.train(norm == "train")
                given["batch_norm"] = norm
            bar = linear_bar if name == "lenet_300_100" else conv_bar
            call = partial(getattr(scores, score), model, batches, loss, **given)
            yield compared(what, partial(passes, model, batches), call, bar, seconds)


def of_synflow(seconds: float, only: str) -> Iterator[Row]:
    """Compare 100 rounds of SynFlow, and time one selection beside one round."""
    for name in NETWORKS[:2]:
        if only not in (what := f"synflow {name}, 100 rounds"):
            continue
        model, (one,) = network(name), examples(1, 1)
        doubled, batch = copy.deepcopy(model).double(), (one[0].double(), one[1])
        masks = {key: torch.ones_like(value, dtype=torch.bool) for key, value in scores.magnitude(model).items()}

        def passes(model: nn.Module = doubled, batch: Batch = batch) -> None:
            for _ in range(100):
                forward_backward(model, [batch])

        def rounds(model: nn.Module = model, batch: Batch = one, masks: dict[str, Tensor] = masks) -> None:
            flow = Flow(ScoringInput(model, [batch]))
            for _ in range(100):
                flow.scores(masks)

        yield compared(what, passes, rounds, 1.3, seconds)
        call = partial(scores.synflow, model, [one], masks=masks)
        yield compared("  one by itself", partial(forward_backward, doubled, [batch]), call, None, seconds)
        found = call()

        def select(masks: dict[str, Tensor] = masks, found: dict[str, Tensor] = found) -> None:
            prune_smallest_across_([mask.clone() for mask in masks.values()], list(found.values()), lambda n: n // 20)

        yield compared("  a selection of 5%, to one round", call, select, None, seconds)


def main() -> None:
    """Print the table, then the rows that miss their bars."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.7, help="seconds of each row")
    parser.add_argument("--only", default="", help="run only rows that contain this word")
    parser.add_argument("--json", type=Path, help="file for the rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # garbage collection between the runs then skips existing objects
    rows = []
    print(f"{'':<50} {'passes':>10} {'score':>10}    {'ratio':>7}  bar")
    for measure in (of_scores, of_synflow):
        for row in measure(given.seconds, given.only):
            print(row, flush=True)
            rows.append(row)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
