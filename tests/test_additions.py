"""The cost of a new built-in, paid in a copy of the tree: its module and one row; all else is made from the row.

A score and a published method have a line in a table of the page of methods besides. A real addition has a golden value
or a contract case; contracts run over the rows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("conf", "docs", "hydra_plugins", "orchestrator", "pruning", "scripts", "pyproject.toml")


@dataclass(frozen=True)
class Addition:
    """A built-in to add.

    Args:
        module: path of its module, None where it needs none.
        code: of the module.
        catalogue: the file of the family's rows.
        row: the text of the row.
        made: files that `python -m scripts.reference` makes or changes for it.
        tests: contract tests that must have taken it in, with a part of the names of their cases.
        line: its line in a table of `METHODS_PAGE`, and how the line before begins.
        end: text before whose last occurrence in the catalogue the row goes.
        further: another file -> the text before whose last occurrence more goes, empty for a new file; and this text.
    """

    module: str | None
    code: str
    catalogue: str
    row: str
    made: tuple[str, ...]
    tests: Mapping[str, str]
    line: tuple[str, str] | None = None
    end: str = "    )\n)\n"
    further: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def by_hand(self) -> set[str]:
        """Files that are written or changed by hand, without the page of methods."""
        return {self.catalogue, *self.further, *([self.module] if self.module else [])}


PAGE = "docs/reference/configuration.md"
METHODS_PAGE = "docs/reference/methods.md"
ADDED = {
    "score": Addition(
        "pruning/scores/added.py",
        '''
from torch import Tensor
from pruning.scores.readings.scoring_data import ScoringInput

def squared(given: ScoringInput, *, power: float = 2.0) -> dict[str, Tensor]:
    """Score each entry by its magnitude to a power."""
    return {name: weight.value.double().abs() ** power for name, weight in given.weights().items()}
''',
        "pruning/catalogue/scores.py",
        """        ScoreRow(
            "squared",
            "pruning.scores.added:squared",
            "|w|^power",
            (Option("power", float, 2.0, "Of the magnitude.", (above(0),)),),
        ),
""",
        (PAGE, "tests/orchestrator/planning/versions.json"),
        {"tests/pruning/scores/test_contract.py": "squared", "tests/pruning/catalogue/test_rows.py": "score-squared"},
        ("| `wanda` | \\|", "| `squared` | \\|w\\|^`power` | weights | |"),
    ),
    "repair": Addition(
        "pruning/repair/added.py",
        '''
from collections.abc import Mapping
from torch import Tensor
from pruning.scores.readings.scoring_data import ScoringInput

def doubled(given: ScoringInput, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return survivors of twice their values."""
    return {name: 2 * weight.value * (kept[name] != 0) for name, weight in given.weights().items()}
''',
        "pruning/catalogue/repairs.py",
        '        RepairRow("doubled", "pruning.repair.added:doubled", "survivors are doubled"),\n',
        (PAGE, "tests/orchestrator/planning/versions.json"),
        {"tests/pruning/engine/test_repair.py": "doubled", "tests/pruning/catalogue/test_rows.py": "repair-doubled"},
    ),
    "task": Addition(
        "orchestrator/workloads/tasks/added.py",
        '''
from orchestrator.workloads.tasks.classification import Classification

class Guessing(Classification):
    """Classes, with a name of its own."""
''',
        "orchestrator/catalogue/tasks.py",
        '        TaskRow("guessing", "orchestrator.workloads.tasks.added:Guessing", "One class, guessed."),\n',
        (PAGE, "conf/task/guessing.yaml", "tests/orchestrator/planning/versions.json"),
        {},
    ),
    "data": Addition(
        "orchestrator/workloads/data_sets/added.py",
        '''
import torch
from typing import Any

def noise(count: int = 64) -> dict[str, Any]:
    """Return random images of 1x8x8 with random labels."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.randn(2 * count, 1, 8, 8, generator=drawn)
    labels = torch.randint(10, (2 * count,), generator=drawn)
    return {"train": (images[:count], labels[:count]), "test": (images[count:], labels[count:]), "classes": 10}
''',
        "orchestrator/catalogue/data.py",
        """        DataSet(
            "noise",
            "orchestrator.workloads.data_sets.added:noise",
            "Random images and labels.",
            (Option("count", int, 64, "Examples of each split.", (whole(2),)),),
        ),
""",
        (PAGE, "conf/data/noise.yaml", "tests/orchestrator/planning/versions.json"),
        {"tests/orchestrator/config/test_schema.py": "noise"},
    ),
    "format": Addition(
        "orchestrator/deploy/formats/added.py",
        '''
from pathlib import Path
import torch
from torch import nn
from orchestrator.deploy.formats.format import Codec, Run, call
from pruning.graph.tracing import Example

def write(network: nn.Module, example: Example, folder: Path) -> None:
    """Write a program of torch.jit."""
    torch.jit.trace(network, example).save(str(folder / "network.jit"))

def load(folder: Path, threads: int) -> Run:
    """Return what runs it."""
    network = torch.jit.load(str(folder / "network.jit"))
    return lambda example: call(network, example)

CODEC = Codec(write, load, ("network.jit",), "torch", "outputs = torch.jit.load('network.jit')({call})")
''',
        "orchestrator/catalogue/formats.py",
        '        FormatRow("jit", "orchestrator.deploy.formats.added:CODEC", "a program of torch.jit"),\n',
        (PAGE, "docs/reference/commands.md", "tests/orchestrator/planning/versions.json"),
        {},
    ),
    "method": Addition(
        None,
        "",
        "pruning/choices/published.py",
        """        Method(
            "squares",
            Choices(Score("squared", {}), Unit("channel", spare_last=True), Scope("global", min_kept=1)),
            "channels by the sum of their squares",
            "Nobody 2026",
        ),
""",
        (PAGE, "conf/method/squares.yaml"),
        {"tests/orchestrator/config/test_method_choices.py": "squares"},
        (
            "| `n_m` | magnitude |",
            "| `squares` | squared | channel, global, `min_kept` 1 | outputs stay | Nobody 2026 |",
        ),
    ),
    "restart": Addition(
        "orchestrator/training/state/added.py",
        '''
import torch
from orchestrator.core.work_order import StageOrder
from orchestrator.training.stage_networks import Network
from pruning import MaskSet

def signs(network: Network, _masks: MaskSet, _stage: StageOrder) -> None:
    """Set each weight to its sign times the deviation of its tensor."""
    with torch.no_grad():
        for weight in (each for each in network.model.parameters() if each.ndim > 1):
            weight.copy_(weight.sign() * weight.std())
''',
        "orchestrator/core/restart_kinds.py",
        """        RestartWeights("signs", "orchestrator.training.state.added:signs", "signs of the pruned weights"),
""",
        (PAGE, "tests/orchestrator/planning/versions.json"),
        {},
        end='''    )
)
"""Name -> row, as `restart.weights`."""''',
        further={"conf/restart/signs.yaml": ("", "# Rounds keep the signs of weights alone.\nweights: signs\n")},
    ),
    "stage": Addition(
        "orchestrator/training/added.py",
        '''
from dataclasses import replace
from orchestrator.core.redact import redact_tree
from orchestrator.core.specs import NETWORK
from orchestrator.core.work_order import Result, StageOrder

def count(stage: StageOrder, _network: object) -> Result:
    """Count the pruned tensors of a finished network."""
    spec, key = stage.spec, stage.spec.inputs[NETWORK]
    above = stage.store.finished([key])[key]
    found = {"seconds": 0.0, "tensors": float(len(above.tensor_sizes))}
    plain = {"before": {}, "after": {}, "curve": (), "steps": 0, "best_step": 0, "details": {}, "files": {}}
    own = {"key": spec.key, "kind": spec.kind, "spec": redact_tree(spec.to_json()), "measurements": found}
    return Result(replace(above, started_from=above.weights_digest, **plain, **own), {}, None)
''',
        "orchestrator/core/stage_kinds.py",
        """    "count": StageKind(
        "orchestrator.training.added:count",
        "count",
        "count",
        prunes=False,
        reads_test=False,
        trains=False,
        figures=("tensors",),
        version=1,
    ),
""",
        ("tests/orchestrator/planning/versions.json",),
        {},
        end="}\n",
        further={
            "orchestrator/planning/plan.py": (
                "    return stages, tuple(measured)\n",
                """    fields = {name: dense.fields[name] for name in ("device", "sources")}
    fields["versions"] = {"stage/count": version_of("stage/count")}
    stages.append(StageSpec("count", fields, {NETWORK: last.key}, location=dense.location))
    measured.append(stages[-1].key)
""",
            )
        },
    ),
}
SWEEP = (
    *("-m", "orchestrator", "cluster=inline", "tracking=none", "data=noise", "task=guessing", "method=squares"),
    *(
        "restart=signs",
        "schedule.sparsity=0.5",
        "schedule.rounds=1",
        "repair=doubled",
        "score.power=3",
        "score.examples=8",
        "unit=entry",
    ),
    *(
        "scope=layer",
        "deploy=jit",
        "deploy.seconds=0.05",
        "deploy.batch_sizes=[2]",
        "train.epochs=1",
        "finetune.epochs=1",
    ),
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree."""
    folder = tmp_path_factory.mktemp("added") / "tree"
    folder.mkdir()
    for name in COPIED:  # with the byte code of the packages, which is not compiled again
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def python(tree: Path, *arguments: str, folder: Path | None = None) -> str:
    """Run Python on the copy; return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder or tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def contents(tree: Path) -> dict[str, bytes]:
    """Return path -> content of every file of the copy."""
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def written(tree: Path) -> dict[str, bytes]:
    """Write the additions into the copy by hand; return its files before that."""
    found = contents(tree)
    for each in ADDED.values():
        if each.module is not None:
            (tree / each.module).write_text(f'"""Added."""\n\nfrom __future__ import annotations\n{each.code}')
        for path, (end, text) in {each.catalogue: (each.end, each.row), **each.further}.items():
            rows = (tree / path).read_text() if end else ""
            place = rows.rindex(end)
            (tree / path).write_text(rows[:place] + text + rows[place:])
        if each.line is not None:
            page = (tree / METHODS_PAGE).read_text().splitlines()
            (place,) = (at for at, line in enumerate(page, 1) if line.startswith(each.line[0]))
            (tree / METHODS_PAGE).write_text("\n".join([*page[:place], each.line[1], *page[place:]]) + "\n")
    return found


@pytest.fixture(scope="module")
def before(tree: Path, written: dict[str, bytes]) -> dict[str, bytes]:
    """Make what is made of the additions, too; return the files before the additions."""
    python(tree, "-m", "scripts.reference")
    return written


def changed(tree: Path, before: dict[str, bytes]) -> set[str]:
    """Return the paths of files that are new or have another content."""
    after = contents(tree)
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


BY_HAND = {path for each in ADDED.values() for path in each.by_hand} | {METHODS_PAGE}


def test_an_addition_is_written_in_three_files_at_most(tree: Path, written: dict[str, bytes]) -> None:
    assert all(len(each.by_hand) <= 3 for each in ADDED.values())
    assert changed(tree, written) == BY_HAND


@pytest.mark.slow
def test_an_addition_costs_its_module_and_a_row(tree: Path, before: dict[str, bytes]) -> None:
    assert changed(tree, before) == BY_HAND | {path for each in ADDED.values() for path in each.made}
    after = contents(tree)
    digests = "tests/orchestrator/planning/versions.json"
    assert json.loads(before[digests]).items() <= json.loads(after[digests]).items(), "those of others are as they were"
    for name in ("squared", "doubled", "guessing", "noise", "jit", "squares", "signs"):
        assert name in after[PAGE].decode()


@pytest.mark.slow
@pytest.mark.usefixtures("before")
def test_a_sweep_runs_all_additions(tree: Path, tmp_path: Path) -> None:
    printed = python(tree, *SWEEP, folder=tmp_path)

    records = [json.loads(file.read_text())["record"] for file in (tmp_path / "store" / "stages").glob("*/record.json")]
    (last,) = [record for record in records if record["kind"] == "round"]
    assert last["details"]["scoring"]["score"] == "squared"
    assert {record["spec"]["fields"]["format"] for record in records if record["kind"] == "measure"} == {"jit"}
    assert {"score/squared": 1, "repair/doubled": 1}.items() <= last["spec"]["fields"]["versions"].items()
    assert last["spec"]["fields"]["restart"] == {"weights": "signs", "rates": 0, "optimizer": "restored"}
    assert [record["measurements"]["tensors"] for record in records if record["kind"] == "count"] == [3]
    assert "7 stages (1 dense training, 1 start, 1 round, 2 deployments, 1 measurement, 1 count)" in printed
    assert "0 stages to run" in python(tree, *SWEEP, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("before")
def test_contracts_take_additions_in(tree: Path) -> None:
    for each in ADDED.values():
        for file, name in each.tests.items():
            listed = python(
                tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "", "-k", name, file
            )
            assert " passed" in listed


@pytest.mark.slow
@pytest.mark.usefixtures("before")
@pytest.mark.parametrize(
    "file",
    [
        "tests/test_imports.py",
        "tests/pruning/engine/test_docs_of_methods.py",
        "tests/orchestrator/config/test_refusals.py",
    ],
)
def test_rooms_pages_and_refusals_take_additions_in(tree: Path, file: str) -> None:
    assert " passed" in python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file)
