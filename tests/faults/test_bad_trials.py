"""Trials that cannot run are refused before any training; trials that fail in training fail alone."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from composition import composed
from fault_commands import Command
from sampling import sampled

from orchestrator.config import schema as schema
from orchestrator.config.schema import ConfigError
from orchestrator.core.specs import Job
from orchestrator.sweep import conductor
from orchestrator.sweep.outcome import Outcome, own_frames
from orchestrator.training.loop import training_loop

SMALL = (
    *("cluster=inline", "tracking=none", "model=mlp", "model.hidden=[8]", "train.epochs=1", "finetune=none"),
    *("schedule.rounds=1", "schedule.sparsity=0.5"),
)
Run = Callable[..., Outcome]


def small(line: list[str]) -> list[str]:
    """Return the overrides of a small trial; overrides that choose a model replace the default model."""
    own = any(override.startswith("model=") for override in line)
    return [override for override in SMALL if not (own and override.startswith("model"))] + line


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def start(*trials: list[str]) -> Outcome:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(
            "orchestrator.views.report.report_files.report", lambda *_: {}
        )  # drawing figures takes longer than the rest of the test
        return conductor.run([Job(tuple(line), composed(*small(line))) for line in trials])

    return start


@sampled(8)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            ["method=ln_structured", "prune.parameters=[bias]"],
            "is no weight of a known layer, or of layers that differ; prune it by single entries",
        ),
        (["method=ln_structured", "method.n=nuc"], "`n` (='nuc') needs channels with 2 dimensions"),
        (["method={_target_: torch.optim.SGD, kind: null}"], "must be a class derived from pruning.BasePruningMethod"),
        (["method={_target_: torch.manual_seed, kind: null}"], "(=torch.manual_seed) must be a class derived from"),
        (["+train.optimizer.speed=9"], "unexpected keyword argument 'speed'"),
        (["data.mean=[0.1,0.2]"], "`data.mean`"),
        (["model=lenet5"], "with at least 16 pixels"),
        (["train.precision=fp16"], "`train.precision` (=fp16) must be fp32 or bf16 on cpu"),
        (["method=random_structured", "method.dim=5"], "`method.dim` (=5) must be a channel dimension of every tensor"),
        (["schedule.sparsity=null", "schedule.amount=41", "schedule.rounds=2"], "over 2 rounds takes 82 entries"),
        (
            ["method=random_structured", "schedule.sparsity=null", "schedule.amount=6", "schedule.rounds=2"],
            "takes 12 entries or channels, but ",
        ),
        (["prune.types=[Conv9d]"], "leaves nothing to prune"),
        (["prune.exclude=[fc9.weight]"], "names no parameter of the network"),
        (["prune.exclude=['fc9*']"], "`prune.exclude` (='fc9*') matches no parameter"),
        (["+method.depth=3"], "`method.depth` (=3) is not an argument of l1_unstructured"),
        (["train.optimizer.lr=-1"], "`train.optimizer.lr` (=-1) must be a number of at least 0"),
    ],
)
def test_what_does_not_fit_the_network_is_refused_before_anything_starts(
    run: Run, line: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(line)

    assert said in str(caught.value)
    assert caught.value.exit_status == 2
    assert "Traceback" not in str(caught.value)
    kept = {path.name for path in tmp_path.glob("*/*")}
    assert not kept & {"stages", "sweeps", "preflights"}, "nothing was started"
    assert not (tmp_path / "outputs").exists()


def test_a_diverging_trial_fails_alone(run: Run) -> None:
    outcome = run(["seed=0"], ["seed=0", "train.optimizer.lr=1e10"], ["seed=1"])

    assert [outcome.complete(trial) for trial in range(3)] == [True, False, True]
    assert len(outcome.failures) == 2, "its dense stage, and the round below with the cause"
    assert all("training diverged" in reason for reason in outcome.failures.values())


def test_a_trial_that_diverged_is_not_tried_again_unless_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit, begun, line = training_loop.fit, list[int](), ["train.optimizer.lr=1e10"]
    monkeypatch.setattr(training_loop, "fit", lambda *given, **more: begun.append(1) or fit(*given, **more))

    def dense(*more: str) -> tuple[int, str]:
        begun.clear()
        outcome = run([*line, *more])
        return len(begun), next(iter(outcome.failures.values()), "")

    assert dense()[1].startswith("the training loss is ")
    trained, reason = dense()
    assert trained == 0
    assert reason.startswith("the stage failed before, on 2")
    assert reason.endswith("pass retry_failed=true to try it again.")
    capsys.readouterr()
    assert dense("dry_run=true") == (0, "")
    assert "failed    1 before, skipped on an equal worker" in capsys.readouterr().out
    trained, reason = dense("retry_failed=true")
    assert trained == 1
    assert reason.startswith("the training loss is ")


def test_infinite_norms_are_pruned_by(run: Run) -> None:
    outcome = run(*(["method=ln_structured", f"method.n={n}"] for n in ("inf", "-inf", "1", "'inf'")))

    assert outcome.status == "finished"
    assert outcome.plan.trials[0].stages == outcome.plan.trials[3].stages, "a number or its text"
    assert len({trial.stages for trial in outcome.plan.trials}) == 3


def test_of_a_traceback_only_the_users_own_lines_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs_broken.py").write_text("import json\njson.loads('{')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        importlib.import_module("theirs_broken")
    told = "".join(traceback.format_exception(caught.value)).replace(
        os.path.dirname(os.__file__), "/else/lib/python3.9"
    )
    shown = own_frames(told)

    assert "<frozen importlib._bootstrap>" in told
    assert "/else/lib/python3.9/json/decoder.py" in told
    assert [line for line in shown if f'File "{tmp_path}/theirs_broken.py", line 2' in line]
    assert not [line for line in shown if "File" in line and str(tmp_path) not in line and __file__ not in line]


@pytest.mark.slow  # with a log, as Ray passes one
def test_an_error_in_the_users_code_is_told_with_their_lines_and_the_log(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "theirs.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, **_): super().__init__(64, 10)\n"
        "    def forward(self, images): return self.helper(images)\n"
        "    def helper(self, images): raise RuntimeError('their mistake')\n"
    )
    command = start(
        tmp_path / "sweep", "tracking=none", "cluster.num_cpus=1", "model={_target_: theirs.Net, kind: null}"
    )

    assert command.wait() == 2
    assert "`model._target_` (=theirs.Net) could not run on a batch" in command.stderr
    assert "RuntimeError: their mistake" in command.stderr
    assert 'theirs.py", line 4, in forward' in command.stderr
    assert 'theirs.py", line 5, in helper' in command.stderr
    assert "orchestrator/training/" not in command.stderr, "their lines alone"
    log, _ = sorted((tmp_path / "sweep").glob("outputs/*/logs/preflight-*.log"))
    assert "Traceback" in log.read_text()
