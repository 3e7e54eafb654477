"""Preflight checks run a sweep on a few examples before it trains, refuse misfits, and remember what has passed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composition import composed
from safetensors.torch import load_file
from sampling import sampled

from orchestrator.config import schema as schema
from orchestrator.config.schema import ConfigError
from orchestrator.core.errors import StoreError
from orchestrator.core.specs import Job
from orchestrator.execution.inline import InlineExecutor
from orchestrator.sweep import conductor
from orchestrator.sweep.outcome import Outcome
from orchestrator.training.loop import training_loop
from orchestrator.training.preflight import rehearsal

THEIRS = """
import torch
from torch import nn
import numpy as np
import pruning
from orchestrator.core.metrics import Metric
def words(**_):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20, (120, 6), generator=draw)
    labels = (tokens.sum(1) % 2).long()
    return (tokens[:80], labels[:80]), (tokens[80:], labels[80:])
def halves(inputs, labels): return (inputs[:40], labels[:40]), (inputs[40:], labels[40:])
def doubles(**_): return halves(torch.rand(80, 6, dtype=torch.float64), torch.arange(80) % 2)
def octets(**_): return halves(torch.randint(0, 256, (80, 6), dtype=torch.uint8), torch.arange(80) % 2)
def below(**_): return halves(torch.rand(80, 6), torch.arange(80) % 2 - 1)
def shifted(**_):
    train, test = words()
    other = torch.cat([test[1][:20], torch.tensor([-100, 2])])
    return {"train": train, "test": test, "tests": {"shifted": (torch.cat([test[0][:20], test[0][:2]]), other)}}
def blocks(block, **_):
    tokens = torch.arange(block).expand(30, block)
    return {"train": (tokens, tokens), "test": (tokens[:9], tokens[:9]), "classes": block}
def narrow(**_):
    train, (tokens, labels) = words()
    return train, (tokens[:, :5], labels)
class Unreadable(torch.utils.data.Dataset):
    def __len__(self): return 10
    def __getitem__(self, index): raise OSError('no such image')
def unreadable(**_):
    train, _ = words()
    return {"train": train, "test": Unreadable(), "classes": 2}
def holes(place, value, **_):
    draw = torch.Generator().manual_seed(0)
    parts, (split, part) = ("train", "val", "test"), place.split()
    pairs = {n: (torch.rand(40, 4, generator=draw), torch.rand(40, 1, generator=draw)) for n in parts}
    pairs[split][part == "labels"][30, 0] = float(value)
    return {**pairs, "classes": 1}
class Listed(torch.utils.data.Dataset):
    def __init__(self, inputs, labels): self.inputs, self.labels = inputs, labels
    def __len__(self): return len(self.inputs)
    def __getitem__(self, index): return self.inputs[index], self.labels[index]
def listed(value, **_):
    found = holes("test inputs", 0.0)
    found["test"][0][3] = float(value)
    return {**found, "test": Listed(*found["test"])}
class Known:
    metrics = (Metric("off_by", "", "lower", margin=0.1),)
    def loss(self, model, batch):
        known = batch[1].isfinite()
        return (model(batch[0])[known] - batch[1][known]).abs().mean()
    def size(self, batch): return len(batch[1])
    def measure(self, model, batches):
        losses = [float(self.loss(model, batch)) for batch in batches]
        return {"loss": sum(losses) / len(losses), "off_by": sum(losses) / len(losses)}
CALLS = []
def unseeded(form, seed=None, **_):
    CALLS.append(form)
    draw = np.random.default_rng(None if seed is None else int(seed))
    inputs, labels = draw.normal(size=(60, 4)).astype("float32"), torch.arange(60) % 2
    fixed = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)), labels
    if form == "order":
        chosen = draw.permutation(60)
        return tuple(part[chosen[:40]] for part in fixed), tuple(part[chosen[40:]] for part in fixed)
    if form == "tensors": return (fixed[0][:40], labels[:40]), fixed, (inputs, labels)
    if form == "dataset": return {"train": Listed(torch.tensor(inputs), labels), "test": fixed, "classes": 2}
    shift = lambda x: x + torch.tensor(draw.normal(size=4)).float()
    return {"train": fixed, "test": (fixed[0] + 1, labels), "transform": shift, "classes": 2}
class Positions(nn.Module):
    def __init__(self, **_):
        super().__init__()
        self.config = type('', (), {'max_position_embeddings': 8})
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 9)
    def forward(self, tokens):
        return self.head(self.embedding(torch.arange(tokens.shape[1])).expand(len(tokens), -1, -1))
class Words(nn.Module):
    def __init__(self, width=4, depth=1, outputs=2, **_):
        super().__init__()
        if depth != 1: raise TypeError('too deep')
        self.embedding, self.head = nn.Embedding(20, width), nn.Linear(6 * width, outputs)
    def forward(self, tokens): return self.head(self.embedding(tokens).flatten(1))
def mixed(part, **_):
    found = dict(zip(("train", "test"), words()))
    found[part] = found[part][0], found[part][1].float()
    return found
class Unlisted(nn.Module):
    def __init__(self, **_):
        super().__init__()
        self.layers = [nn.Linear(6, 2)]
    def forward(self, tokens): return self.layers[0](tokens.float())
class Frozen(Words):
    def __init__(self, **_): super().__init__(); self.requires_grad_(False)
class Undefined(Words):
    def forward(self, tokens): return super().forward(tokens) * float('nan')
class Detached(Words):
    def forward(self, tokens): return super().forward(tokens).detach()
class Unflattened(Words):
    def forward(self, tokens): return self.joined(self.embedding(tokens))
    def joined(self, embedded): return self.head(embedded)
def sequence(**_): return nn.Sequential(nn.Embedding(20, 4), nn.Linear(24, 2))
class Cross(Known):
    def __init__(self, form): self.form = form
    def loss(self, model, batch):
        if self.form == 'whole': return model(batch).mean()
        if self.form == 'unknown': raise KeyError('fc9')
        if self.form == 'not finite': return model(batch[0]).mean() * float('inf')
        outputs = model(batch[0])
        if self.form == 'detached': return outputs.detach().mean()
        if self.form == 'number': return outputs.mean().item()
        return nn.functional.cross_entropy(outputs, batch[1], reduction='none')
def listed_loss(outputs, labels): return nn.functional.cross_entropy(outputs, labels, reduction='none')
def failing_loss(outputs, labels): raise KeyError('fc9')
def leaves(**_): raise SystemExit('no weights here')
def odd(model, batches, loss):
    raise KeyError('fc9')
class Half(pruning.BasePruningMethod):
    PRUNING_TYPE = 'unstructured'
    def __init__(self, amount, flavour, **_):
        self.amount = amount
        if flavour != 'sweet': raise ValueError('bitter')
    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.view(-1)[t.abs().view(-1).argsort()[:self.amount]] = 0
        return mask
"""
WORDS = (
    *("cluster=inline", "tracking=none", "model={_target_: their_words.Words,kind: null}", "train.epochs=1"),
    *("finetune=none", "data={_target_: their_words.words,kind: null}", "schedule.rounds=1", "schedule.sparsity=0.5"),
)
Run = Callable[..., Outcome]


def half(flavour: str) -> list[str]:
    """Return the overrides that choose the custom method, with a value of its option `flavour`."""
    return ["method._target_=their_words.Half", "method.kind=null", "method.name=half", f"+method.flavour={flavour}"]


def chosen(line: list[str]) -> list[str]:
    """Return the overrides of a trial; those in `line` replace the defaults."""
    keys = {override.partition("=")[0] for override in line}
    return [override for override in WORDS if override.partition("=")[0] not in keys] + line


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "their_words.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("orchestrator.views.report.report_files.report", lambda *_: {})

    def start(*trials: list[str]) -> Outcome:
        return conductor.run([Job(tuple(line), composed(*chosen(line))) for line in trials])

    return start


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of combinations that each preflight has tried."""
    counts: list[int] = []
    plainly = InlineExecutor.preflight

    def counted(self: InlineExecutor, stages: list[object], *rest: object) -> object:
        counts.append(len(stages))
        return plainly(self, stages, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(InlineExecutor, "preflight", counted)
    return counts


def test_a_network_of_tokens_is_trained_pruned_and_counted(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.sweep.first_checks.QUIET", 0.0)
    outcome = run([])
    said = capsys.readouterr().out

    assert outcome.status == "finished"
    assert {record.macs for record in outcome.records.values()} == {6 * 4 * 2}, "of the head: looking up is no product"
    assert said.index("Trying 2 new combinations") < said.index("Tried 1 of 2 combinations.") < said.index("Sweep ")


def test_all_misfits_are_listed_once_with_their_trials_before_anything_trains(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    update = training_loop._LoopRun._update
    monkeypatch.setattr(
        training_loop._LoopRun, "_update", lambda self, *batch: (steps.append(len(batch[0])), update(self, *batch))
    )
    with pytest.raises(ConfigError) as caught:
        run(
            *([*half("bitter"), f"seed={seed}"] for seed in (0, 1)),
            half("sweet"),
            ["+model.depth=2"],
        )
    text = str(caught.value)

    assert text.startswith("3 of 4 trials cannot run; nothing was trained.")
    assert text.count("cannot prune the network: ValueError: bitter; check its arguments under `method`") == 1
    assert "seed=0" in text
    assert "`model._target_` (=their_words.Words) could not be created: TypeError: too deep" in text
    assert 'their_words.py", line' in text, "where in their code"
    assert max(steps) <= rehearsal.FEW
    assert len(steps) <= 5


@sampled(12)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["model=mlp"], "`model` (=mlp) with `data` (=their_words.words) and `train` could not run on a batch"),
        (
            ["+model.outputs=1"],
            "the network has fewer outputs than the data have classes (2); change `model`, `data`",
        ),
        (
            [
                *("data._target_=null", "data=shapes", "data.train=60"),
                "task=detection",
                *("model=centernet", "model.classes=2"),
            ],
            "dimension 0 with size 2; labels of the batch go up to 3, so a network needs 4 classes or more; change",
        ),
        (
            [f"{part}._target_=their_words.{name}" for part, name in (("data", "blocks"), ("model", "Positions"))]
            + ["task=language_modelling", "+data.block=9"],
            "`data.block` (=9) must be at most 8, the number of positions of `model` (=their_words.Positions); pass "
            "data.block=8, or use a `model` with more.",
        ),
        (
            ["data._target_=their_words.shifted"],
            "`data` (=their_words.shifted) has the label 2 in its shifted test split, but `model` (=their_words.Words) "
            "has 2 outputs, for the classes 0 to 1; give the model more `classes`, or leave these examples out.",
        ),
        (
            ["data._target_=their_words.narrow"],
            "\n  `data` (=their_words.narrow) gives inputs (8, 5) int64 and labels (8,) int64 in its test split, and "
            "inputs (8, 6) int64 and labels (8,) int64 in its train split: RuntimeError: mat1 and mat2 shapes cannot "
            "be multiplied (8x20 and 24x2); give all splits examples of one shape and dtype, or use a `model` "
            "that takes both.",
        ),
        (
            ["data._target_=their_words.unreadable"],
            "\n  `data`: examples of the test split cannot be read: OSError: no such image; fix the data "
            "that `data` names.",
        ),
        (
            ["model._target_=their_words.leaves"],
            "(=their_words.leaves) could not be created: SystemExit: no weights he",
        ),
        (
            ["model=mlp", "data._target_=their_words.doubles"],
            "`data` (=their_words.doubles) gives inputs (8, 6) float64 and labels (8,) int64, and `model` (=mlp) "
            "cannot compute with float64; return float32.",
        ),
        (["model=mlp", "data._target_=their_words.octets"], "(=mlp) cannot compute with uint8; return float32."),
        (
            ["model=mlp", "data._target_=their_words.below"],
            "int64: a label is -1, but classes are numbered from 0; change",
        ),
        (
            ["train.penalty=1e-4"],
            "`train.penalty` (=0.0001) must be 0 for a network without trained BatchNorm scales, which the penalty "
            "needs; pass train.penalty=0 finetune.penalty=0, or another model.",
        ),
        (
            ["method=magnitude", "score={_target_: their_words.odd,kind: null}"],
            "\n  `score._target_` (=their_words.odd) failed with KeyError: 'fc9'; fix the function, or change its argu",
        ),
        ([*half("sweet"), "method._target_=their_words.leaves"], "must be a class derived from pruning.BasePruningMet"),
    ],
)
def test_a_misfit_is_told_once_and_before_a_report_is_announced(
    run: Run, line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(line)

    assert str(caught.value).count("\n  `") == 1
    assert said in str(caught.value)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Importing torch."
    assert re.fullmatch(r"Trying \d new combinations? on a few examples; a large network takes minutes\.", second)


def part(where: str, name: str, key: str = "kind: null") -> list[str]:
    return [f"{where}={{_target_: their_words.{name},{key}}}"]


def cross(form: str) -> list[str]:
    return ["task._target_=their_words.Cross", "task.kind=null", f"+task.form={form}"]


@sampled(3)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            ["data._target_=their_words.mixed", "+data.part=train"],
            "`data._target_` (=their_words.mixed) gives labels of float32 in its train split and int64",
        ),
        (
            ["data._target_=their_words.mixed", "+data.part=test"],
            "`data._target_` (=their_words.mixed) gives labels of int64 in its train split and float32 in its test "
            "split; give all splits labels of one dtype.",
        ),
        (
            part("model", "Unlisted"),
            "`model._target_` (=their_words.Unlisted) must have parameters to train, but it has none; keep layers in "
            "attributes or an nn.ModuleList, not in a list or a dict.",
        ),
        (
            part("model", "Frozen"),
            "`model._target_` (=their_words.Frozen) must have parameters to train, but `requires_grad` is False for",
        ),
        (
            part("model", "Undefined"),
            "`model._target_` (=their_words.Undefined) must give finite outputs, but gives nan on a first batch",
        ),
        (
            part("model", "Detached"),
            "`model._target_` (=their_words.Detached) gives a result without a gradient, so no ",
        ),
        (
            part("model", "Unflattened"),
            "`model._target_` (=their_words.Unflattened) could not run on a batch of inputs (8, 6) int64 and labels "
            "(8,) int64: RuntimeError: mat1 and mat2 shapes cannot be multiplied (48x4 and 24x2); fix it, or",
        ),
        (
            part("model", "sequence"),
            "`model._target_` (=their_words.sequence) could not run on a batch of inputs (8, 6",
        ),
        (
            cross("vector"),
            "`task._target_` (=their_words.Cross) must give a loss that is one number, the mean over the batch, not a "
            "Tensor of shape (8,); return a tensor of one number, as by losses.mean().",
        ),
        (
            cross("number"),
            "`task._target_` (=their_words.Cross) must give a loss that is one number, the mean over the b",
        ),
        (
            cross("detached"),
            "`task._target_` (=their_words.Cross) gives a result without a gradient, so no step can tr",
        ),
        (cross("unknown"), "`task._target_` (=their_words.Cross) could not run on a batch of inputs (8, 6) int64 and"),
        (
            cross("whole"),
            "`model._target_` (=their_words.Words), which `task._target_` (=their_words.Cross) called, could not run",
        ),
        (
            part("+train.loss", "listed_loss", "_partial_: true"),
            "`train.loss._target_` (=their_words.listed_loss) must give a loss that is one number, the mean",
        ),
        (
            part("+train.loss", "failing_loss", "_partial_: true"),
            "`train.loss._target_` (=their_words.failing_loss) could not run on a batch of inputs (8, 6) int64",
        ),
    ],
)
def test_the_part_at_fault_is_named_alone(run: Run, line: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(line)

    assert str(caught.value).count("\n  `") == 1
    assert f"\n  {said}" in str(caught.value)


def test_a_loss_that_is_not_finite_at_the_first_step_is_no_matter_of_the_learning_rate(run: Run) -> None:
    outcome = run(cross("not finite"))
    (said,) = (failure.message for failure in outcome.causes.values())

    assert said.startswith("the training loss is ")
    assert said.endswith("before any weight was changed; fix the outputs of `model` or the loss of `task`.")


def holes(place: str, value: str, target: str = "holes") -> list[str]:
    data = [f"data._target_=their_words.{target}", f"+data.place='{place}'", f"+data.value='{value}'"]
    return [*data, "data.val_fraction=null", "model=mlp", "model.hidden=[4]", "task=regression"]


@sampled(8)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            holes("train inputs", "nan"),
            "(=their_words.holes) must give finite numbers, but the inputs of example 30 (counted ",
        ),
        (
            holes("val inputs", "inf"),
            "the inputs of example 30 (counted from 0) of its val split contain inf; replace such val",
        ),
        (
            holes("test inputs", "-inf"),
            "the inputs of example 30 (counted from 0) of its test split contain -inf; replace such",
        ),
        (holes("train labels", "nan"), "the labels of example 30 (counted from 0) of its train split contain nan; rep"),
        (
            holes("", "nan", "listed"),
            "the inputs of example 3 (counted from 0) of its test split contain nan; replace",
        ),
        (
            [*holes("train inputs", "nan"), "method=snip", "schedule=at_start"],
            "the inputs of example 30 (counted from 0)",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_told_before_anything_trains(run: Run, line: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(line)

    assert str(caught.value).count("\n  `data._target_`") == 1
    assert said in str(caught.value)
    assert "lr" not in str(caught.value)


def drawn(form: str, *more: str) -> list[str]:
    data = ["data._target_=their_words.unseeded", f"+data.form={form}"]
    return [*data, "model=mlp", "model.hidden=[4]", *more, *(["data.val_fraction=null"] if form == "tensors" else [])]


@pytest.mark.parametrize(
    ("form", "splits"),
    [("tensors", "test"), ("order", "train and val and test"), ("dataset", "train and val"), ("transform", "train")],
)
@pytest.mark.parametrize("dry", [True, False])
def test_data_that_are_drawn_anew_in_each_process_are_refused(run: Run, form: str, splits: str, dry: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        run(drawn(form, f"dry_run={dry}"), drawn(form, f"dry_run={dry}", "seed=1"))

    assert str(caught.value) == (
        "2 of 2 trials cannot run; nothing was trained.\n"
        "  `data._target_` (=their_words.unseeded) must return the same data each time it is called, but returned "
        f"another {splits} split; seed its random draws, as in numpy.random.default_rng(0), or save the data once and "
        "load them from a file.\n    in trial; seed=1"
    )


def test_data_that_are_seeded_are_loaded_twice_in_a_process_and_no_more(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_repeated", set())
    monkeypatch.delitem(sys.modules, "their_words", raising=False)
    outcome = run(*(drawn(form, "+data.seed=3") for form in ("tensors", "order", "dataset", "transform")))
    calls = sys.modules["their_words"].CALLS

    assert outcome.status == "finished"
    assert {form: calls.count(form) for form in calls} == dict.fromkeys(("tensors", "order", "dataset", "transform"), 2)
    assert all(record.data_digest for record in outcome.records.values())


def test_data_that_fill_the_memory_are_loaded_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "LARGE", 60 * 4 * 4)
    monkeypatch.delitem(sys.modules, "their_words", raising=False)

    assert run(drawn("tensors")).status == "finished"
    assert sys.modules["their_words"].CALLS == ["tensors"]


def test_labels_that_a_task_of_one_s_own_leaves_out_may_be_nan(run: Run) -> None:
    line = [*holes("train labels", "nan")[:-1], "task={_target_: their_words.Known,kind: null}"]

    assert run(line).status == "finished"


def test_a_store_that_cannot_be_is_refused_with_the_status_of_a_refusal(run: Run) -> None:
    with pytest.raises(StoreError, match=r"`store.uri` \(=/proc/nothere\): could not write .* permission") as caught:
        run(["store.uri=/proc/nothere"])

    assert caught.value.exit_status == 2


def test_what_passed_is_not_tried_again(run: Run, tried: list[int]) -> None:
    run([])
    run(["seed=1"])
    run(["seed=2"], ["seed=2", "schedule.sparsity=0.7"], ["seed=2", "method=random_unstructured"])
    (keys,) = (sorted(path.name for path in (Path("store") / "preflights").iterdir()),)
    for key in keys:
        (Path("store") / "preflights" / key).unlink()
    run(["seed=3"])

    assert tried == [2, 0, 1, 2]


def test_a_dry_run_tries_what_is_the_users_own(run: Run, tried: list[int]) -> None:
    with pytest.raises(ConfigError, match="ValueError: bitter"):
        run(["dry_run=true", *half("bitter")])
    run(["dry_run=true"])
    run(["dry_run=true", "model=mlp", "data=digits"])

    assert tried == [2, 2, 0]


def test_a_gpu_that_is_not_here_is_refused_by_a_dry_run_and_one_that_torch_cannot_use_before_training(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["cluster.gpus_per_trial=1", "model=mlp", "data=digits"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("orchestrator.execution.placement.lacks_gpu", lambda: "this machine has none")
    with pytest.raises(ConfigError, match=r"^`cluster.gpus_per_trial` \(=1\) needs a GPU on this machine"):
        run([*asked, "dry_run=true"])
    monkeypatch.setattr("orchestrator.execution.placement.lacks_gpu", lambda: None)
    with pytest.raises(ConfigError) as caught:
        run(asked)

    assert "`cluster.gpus_per_trial` must be 0 on a machine whose GPU torch cannot use" in str(caught.value)
    assert "`model`" not in str(caught.value)


def test_a_pattern_must_name_a_parameter_of_some_network(run: Run) -> None:
    pattern = "prune.exclude=['fc2*']"
    with pytest.raises(ConfigError, match=r"`prune.exclude` \(='fc2\*'\) matches no parameter"):
        run([pattern])

    assert run([pattern], [pattern, "model=mlp", "data=digits"]).status == "finished"


def test_what_may_pass_by_itself_is_left_to_the_trials(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise ConnectionError("the hub is away")

    monkeypatch.setattr(rehearsal._Rehearsal, "fits", away)

    assert run([]).status == "finished"


def test_a_checkpoint_is_evaluated_where_nothing_is_trained_and_that_of_another_network_refused(
    run: Run, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = {"embedding.weight": (20, 4), "head.weight": (2, 24), "head.bias": (2,)}
    torch.save({name: torch.randn(shape, generator=draw) for name, shape in weights.items()}, "base.pt")
    outcome = run(["+model.weights=base.pt", "train=none", "train.epochs=0"])
    dense = next(record for record in outcome.records.values() if record.kind == "dense")
    stored = load_file(next(tmp_path.glob(f"store/stages/{dense.key}/weights.safetensors")))

    assert outcome.status == "finished"
    assert (dense.steps, dense.best_step, dense.curve) == (0, 0, ())
    assert set(dense.after) == {f"{split}/{name}" for split in ("val", "test") for name in ("loss", "accuracy")}
    assert all(torch.equal(stored[name], value) for name, value in torch.load("base.pt").items())
    with pytest.raises(ConfigError, match=r"(?s)cannot run; nothing was trained.*`head.weight` is \[2, 24"):
        run(["+model.weights=base.pt", "+model.outputs=3"])
    with pytest.raises(ConfigError, match=r"`model.weights` \(=lost.pt\) cannot be read: there is no such file"):
        run(["+model.weights=lost.pt"])
