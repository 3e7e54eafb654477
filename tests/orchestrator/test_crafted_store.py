"""One crafted store with everything planted in every text: nothing of it leaves by any way, for eyes or programs."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled
from small_trials import composed, planned, train

import orchestrator
from orchestrator.commands.compare_command import main as compare
from orchestrator.commands.export_command import main as export
from orchestrator.commands.gate_command import main as gate
from orchestrator.commands.store_command import main as keep
from orchestrator.commands.sync_command import main as sync
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Forecast, KnownAmount, SweepInfo
from orchestrator.core.stage_kinds import KINDS
from orchestrator.store.backends import seal, unseal
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store

SECRET = "hunter2-zx81"
STEERING = "\x1b[2J\x07\x9b31m\x7f\r\u202e\u2066\u061c\u2028"
PLANTED = f"=1+1{STEERING}<img src=x onerror=alert(1)>[a](javascript:b)|`c` token={SECRET}"
"""A formula, what steers a terminal or turns text round, markup of HTML and Markdown, and a secret."""
FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
TRIAL = (
    *("model=mlp", "model.hidden=[6]", "schedule=one_shot", "schedule.sparsity=0.5", "train.epochs=1"),
    *("finetune.epochs=1", "deploy=shrink", "deploy.batch_sizes=[1]", "deploy.seconds=0.02", "deploy.blocks=2"),
)


@pytest.fixture(scope="module")
def crafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store in which two sweeps of two trials each are crafted."""
    folder = tmp_path_factory.mktemp("crafted")
    store = Store(str(folder / "store"))
    plan = planned(*(composed(*TRIAL, f"method={name}") for name in ("ln_structured", "random_structured")))
    train(plan, store)
    for key in plan.stages:
        plant_record(folder / "store" / "stages" / key / "record.json", names=key == plan.trials[1].stages[-1])
    for name in ("first", "second"):
        amount = KnownAmount(1.0, 0)
        forecast = Forecast(1e9, 2, amount, amount, 1, amount, amount, basis=PLANTED)
        info = SweepInfo(name, {}, "", {}, forecast)
        saved = manifest(info, plan, {plan.trials[0].stages[-1]: PLANTED})
        store.save_sweep(name, plant_sweep(saved, name))
    return folder


def plant_sweep(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Plant in every text of a saved sweep on which nothing else depends; in `second`, in fields of stages, too.

    An export refuses a stage whose fields are not those of its key.
    """
    text = f"{PLANTED} {name}"
    data |= {"command": text, "environment": {"torch": text, "git_commit": text, text: text}}
    data["config"] = {text: [text], "password": SECRET, "deep": {"url": f"http://me:{SECRET}@host", "note": text}}
    parts, stages = data["plan"]["parts"], data["plan"]["stages"] if name == "first" else []
    kept = [parts[n][v["part"]] for _, spec in stages for n, v in spec["fields"].items() if isinstance(v, dict)]
    for group in ("model", "data", "method", "score", "scope", "train", "finetune"):
        for part in (each for each in parts.get(group, ()) if not any(each is other for other in kept)):
            part |= {"name": f"{part.get('name', group)} {PLANTED}"}
            part |= {} if group in ("model", "data") else {PLANTED: text}  # what builds these takes no more
    for number, trial in enumerate(data["plan"]["trials"]):
        trial |= {"name": f"{text} {number}", "overrides": [text, f"+model.api_key={SECRET}"]}
    return data


def plant_record(path: Path, names: bool) -> None:
    """Plant in every text of a stage's record on which nothing else depends; `names`: in those of tensors, too."""
    sealed = unseal(path.read_bytes())
    record = sealed["record"]
    record |= {"warnings": [PLANTED], "host": PLANTED, "device": PLANTED}
    record["environment"] |= {"torch": PLANTED, "processor": PLANTED, PLANTED: PLANTED}
    record["metrics"][0] |= {"unit": "=\x1b[2J\u202e<b>|`"}
    record["after"] |= {PLANTED: 0.5, f"test_{PLANTED}/accuracy": 0.5}
    record["before"] |= {PLANTED: 0.5}
    record["measurements"] |= {PLANTED: 1.0}
    planted = {"form": PLANTED, "kept": {PLANTED: {PLANTED: 1}}, "dead_tensors": [PLANTED]}
    planted |= {"scoring": {"score": PLANTED, "split": PLANTED, "examples": 1}}
    allowed = KINDS[record["kind"]].details
    record["details"] |= {PLANTED: PLANTED} | {name: each for name, each in planted.items() if name in allowed}
    for point in record["curve"]:
        point["metrics"] |= {PLANTED: 0.5}
    for of in (record["tensor_sizes"], record["tensor_sparsity"]) if names else ():
        of[PLANTED] = of.pop("fc1.weight")
    if record["kind"] == "measure":
        record["spec"]["fields"]["format"] = PLANTED
    path.write_bytes(seal(sealed))


@pytest.fixture
def folder(crafted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(crafted / "store", tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hold(text: str, where: str) -> None:
    """Assert that a text steers nothing and tells no secret."""
    found = FORBIDDEN.search(text)
    assert found is None, f"{where}: {text[max(0, found.start() - 200) : found.end() + 40]!r}"
    at = text.find(SECRET)
    assert at < 0, f"{where}: {text[max(0, at - 200) : at + 40]!r}"


class Elements(HTMLParser):
    """The elements of a page, and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(name for name, _ in attrs)}


def hold_elements(page: str) -> None:
    """Assert that a page has no element of somebody else's."""
    elements = Elements()
    elements.feed(page)
    assert not {"onerror", "script"} & elements.found


def hold_file(path: Path) -> None:
    content = path.read_bytes()
    if path.suffix in (".png", ".npz", ".safetensors"):
        assert SECRET.encode() not in content or path.suffix == ".npz", path
        return
    text = content.decode()
    hold(text, path.name)
    if path.suffix == ".csv":
        for row in csv.reader(io.StringIO(text)):
            assert not any(cell.startswith(("=", "@", "\t")) for cell in row), row
            assert all(re.fullmatch(r"[-+][\d.e+-]+", cell) for cell in row if cell.startswith(("+", "-"))), row
    if path.suffix in (".html", ".svg"):
        hold_elements(text)
    if path.suffix == ".md":
        assert not re.search(r"<img|(?<!\\)\[a(?<!\\)\]\(", text), path
    if path.suffix == ".json":
        json.loads(text)


COMMANDS: dict[str, Callable[[], object]] = {
    "compare": lambda: compare(["first", "--output", "out"]),
    "compare two": lambda: compare(["first", "second", "--output", "out"]),
    "compare merged": lambda: compare(["first", "second", "--merge"]),
    "compare none": lambda: compare([]),
    "gate --write-baseline": lambda: gate(["base.json", "first", "--write-baseline"]),
    "gate": lambda: (
        gate(["base.json", "first", "--write-baseline"]) or gate(["base.json", "second", "--junit", "gate.xml"])
    ),
    **{
        f"store {line}": lambda line=line: keep(line.split())  # type: ignore[misc]
        for line in ("list", "show first", "report", "verify", "prune", "delete first --yes", "copy first other")
    },
    "export": lambda: export(["first", "--trial", f"{PLANTED} first 0", "--to", "safetensors", "--output", "net"]),
    "export refused": lambda: export(["first", "--trial", "=1", "--to", "torch", "--output", "net"]),
    "export none": lambda: export(["first", "--best", "val/accuracy>1", "--to", "torch", "--output", "net"]),
    "sync --list": lambda: sync(["--list"]),
}


@sampled(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_says_and_writes_is_clean(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    status = COMMANDS[command]()

    said = capsys.readouterr()
    assert status == {"export refused": 2, "export none": 2, "gate": 1}.get(command, 0), said.err
    hold(said.out + said.err + caplog.text, command)
    written = [path for path in folder.rglob("*") if path.is_file() and not {"store", "other"} & set(path.parts)]
    for path in written:
        hold_file(path)
    texts = {path.name: path.read_text() for path in written if path.suffix in (".html", ".csv", ".md")}
    assert set(texts) == WRITTEN.get(command, set())
    for name, text in texts.items():
        assert r"\x1b[2J" in text.replace("\\\\", "\\").replace("\\[", "["), f"{name} shows what it was given"


WRITTEN = {
    "compare": {"report.html", "trials.csv", "summary.csv", "sensitivity.csv", "README.md"},
    "compare two": {"differences.csv"},
    "export": {"README.md"},
}
"""Command -> the files for people that it writes."""


def texts_of(database: Path) -> Iterator[str]:
    """Yield every text in a database of MLflow."""
    with closing(sqlite3.connect(database)) as connection:
        tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
        for table in tables:
            for row in connection.execute(f'select * from "{table}"'):
                yield from (value for value in row if isinstance(value, str))


@pytest.mark.filterwarnings("ignore")  # mlflow's own, on import
@pytest.mark.slow
def test_what_mlflow_holds_is_clean(
    folder: Path, empty_database: bytes, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "mlflow.db").write_bytes(empty_database)

    assert sync(["first", "--uri", f"sqlite:///{folder}/mlflow.db"]) == 0

    said = capsys.readouterr()
    hold(said.out + said.err + caplog.text, "sync")
    held = list(texts_of(folder / "mlflow.db"))
    assert sum(r"\x1b[2J" in text for text in held) > 20, "what was planted is there, and harmless"
    for text in held:
        hold(text, "the database")
    artifacts = [path for path in (folder / "mlruns").rglob("*") if path.is_file()]
    assert len(artifacts) > 20
    for path in artifacts:
        hold(str(path), "a path")
        hold_file(path)


def printed() -> Iterator[str]:
    """Yield what the Python interface prints, or a notebook shows."""
    store = orchestrator.open("store")
    yield from (repr(store), store._repr_html_(), store.sweeps().to_string())
    sweep = store.sweep("first")
    yield from (repr(sweep), str(sweep), sweep._repr_html_(), sweep.command, repr(sweep.config), repr(sweep.trials))
    for by in ("point", "trial", "round", "step"):
        yield sweep.frame(by=by).to_string()  # type: ignore[arg-type]
        yield sweep.frame(by=by)._repr_html_()  # type: ignore[arg-type, operator]
    for trial in sweep.trials:
        yield from (trial.name, str(trial.failure), repr(trial.settings), repr(trial.overrides))
        yield "\n".join(map(str, trial.settings.values()))
    yield from map(str, (*sweep.environment.values(), *sweep.environment, *sweep.config))
    for call in (lambda: sweep.trial("="), lambda: sweep.trial("x"), lambda: sweep.trials[0].record(7)):
        with pytest.raises(OrchestratorError) as refused:
            call()
        yield str(refused.value)


def test_what_python_prints_is_clean(folder: Path) -> None:
    for text in printed():
        hold(text, "Python")
        if text.startswith("<p>") or "<table" in text:
            hold_elements(text)


WAYS_OUT = {
    r"(?m)^[ \t]+(?:.*[^\w.])?print\(": {"views/terminal/standard_streams.py"},  # not the code of a README
    r"console\.print\(": {"views/report/tables.py", "views/terminal/progress.py"},
    r"std(out|err)\.write": set(),
    r"from html import|html\.escape": {"core/redact.py"},
    r"csv\.(DictW|w)riter": {"views/report/plain_files.py"},
    r"getLogger\(__name__": set(),
    r"_client\.(log_param|log_metric|log_text|log_dict|set_tags)": set(),
}
"""Ways for text to leave a sweep -> the only files that may use them."""


def test_there_is_one_way_out_of_each_kind() -> None:
    root = Path(orchestrator.__file__).parent
    for pattern, allowed in WAYS_OUT.items():
        found = {str(path.relative_to(root)) for path in root.rglob("*.py") if re.search(pattern, path.read_text())}
        assert found <= allowed, pattern
