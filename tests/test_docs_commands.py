"""Command lines and Python blocks of the pages: each command accepts its lines, and each block compiles."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from composition import Remembered
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from orchestrator.__main__ import COMMANDS, CONF
from orchestrator.catalogue.data import DATA
from orchestrator.catalogue.formats import FORMATS
from orchestrator.catalogue.models import MODELS
from orchestrator.catalogue.tasks import TASKS
from orchestrator.config import compose, config_groups, hydra_options
from orchestrator.planning.pinned_content import LOADS_GGUF
from orchestrator.trial import rules
from scripts.reference.command_pages import parser_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES.remove(ROOT / "docs" / "reference" / "commands.md")  # made from the parsers
NOT_HERE = ("was not found", "is not there", "no module", "cannot be found", "not installed", "is no file")
"""Parts of messages about the reader's own files and modules."""


def shown(start: str) -> list[tuple[str, str]]:
    """Return page and text of each command line that begins with `start`, in a block, a comment or backticks."""
    found = {}
    for page in PAGES:
        for line in re.sub(r"\\\n\s*", "", page.read_text()).splitlines():
            for text in re.findall(rf"(?<![\w/.]){start}[^`|\"]*", line):
                found[text.strip()] = page.relative_to(ROOT).as_posix()
    return [(page, text) for text, page in found.items()]


def words(text: str) -> list[str]:
    text = text.partition("  #")[0]
    text = text.replace("'", "") if text.count("'") % 2 else text  # the end of a quotation that began earlier
    return [word for word in shlex.split(text, comments=True) if word != "..."]


@cache
def own_files(folder: Path) -> Path:
    """Write the configuration files of the pages, named by their first lines, and return the folder."""
    for page in PAGES:
        for name, text in re.findall(r"^```yaml\n# mine/(\S+\.yaml)(.*?)^```$", page.read_text(), re.DOTALL | re.M):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"#{text}")
    return folder


THING = "_target_: mine.Thing"


def stand_in(folder: Path, settings: Sequence[str]) -> None:
    """Write a file for each option of the reader's own that no page shows, with the keys that the command sets."""
    stored = hydra_options.stored_options()
    for setting in settings:
        group, _, name = setting.lstrip("+").partition("=")
        group = group.partition("@")[0]
        own, keys = folder / group / f"{name}.yaml", re.findall(rf"^{group}\.(\w+)=", "\n".join(settings), re.M)
        shown_elsewhere = name in stored.get(group, ()) or (CONF / group / f"{name}.yaml").is_file()
        known = shown_elsewhere or (own.is_file() and THING not in own.read_text())
        if "." not in group and ((CONF / group).is_dir() or group in stored) and "," not in name and not known:
            own.parent.mkdir(parents=True, exist_ok=True)
            thing = f"{THING}\n" + "".join(f"{key}: null\n" for key in keys)
            own.write_text("# @package _global_\n" if group == "sweep" else thing)


def values(override: Override) -> Iterator[str]:
    """Yield an override for each value of an axis, for an interval only its start."""
    if override.is_sweep_override() and not override.is_discrete_sweep():
        yield f"{override.get_key_element()}={override.value().start}"
    else:
        yield from (line for (line,) in BasicSweeper.split_arguments([override], None)[0])


@cache
def composed(*settings: str) -> DictConfig:
    """Return the configuration that Hydra composes before a sweep; most commands share it."""
    return GlobalHydra.instance().config_loader().load_configuration("config", list(settings), RunMode.MULTIRUN)


def jobs(settings: list[str], searched: Sequence[str]) -> Iterator[str]:
    """Yield the errors of the jobs: one for each value of each axis, with the first value of all other axes."""
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create().parse_overrides(settings)
    about_hydra = [str(each.input_line) for each in parsed if each.is_hydra_override()]
    others = [each for each in parsed if not each.is_hydra_override()]
    preset = [str(each.input_line) for each in others if each.key_or_group in ("sweep", "control")]
    master = composed(*searched, *about_hydra, *preset)
    params = OmegaConf.select(master, "hydra.sweeper.params") or {}
    given = {each.key_or_group for each in others}
    others += OverridesParser.create().parse_overrides([f"{k}={v}" for k, v in params.items() if k not in given])
    axes = [list(values(each)) for each in others]
    first = [axis[0] for axis in axes]
    tried = [first, *([*first[:n], value, *first[n + 1 :]] for n, axis in enumerate(axes) for value in axis[1:])]
    for job in compose.compose_jobs(loader, master, tried):
        if job.error:
            yield job.error
        else:
            yield from rules.violations(job.config)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mine")


@pytest.mark.slow
def test_every_sweep_that_is_shown_composes(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine / "book.txt").write_text("a")
    monkeypatch.chdir(mine)
    hydra_options.register()
    wrong = []
    lines = [line for line in shown(r"(?:python -m orchestrator|scripts/run)\b(?!\.)") if "[SETTING" not in line[1]]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        loader.repository = Remembered(loader.config_search_path)
        for page, text in lines:
            given = words(text)
            options = get_args_parser().parse_args(
                given[given.index("orchestrator") + 1 :] if "-m" in given[:2] else given[1:]
            )
            searched = []
            if options.config_dir:
                stand_in(own_files(mine), options.overrides)
                searched = [f"hydra.searchpath=[file://{mine}]"]
            settings = config_groups.with_own_options(options.overrides)
            told = [each for each in jobs(settings, searched) if not any(word in each for word in NOT_HERE)]
            wrong += [f"{page}: {text}: {each}" for each in told]

    assert len(lines) > 40
    assert wrong == []


def test_every_other_command_that_is_shown_is_taken() -> None:
    wrong = []
    lines = shown(rf"python -m orchestrator\.(?:{'|'.join(COMMANDS)})\b")
    for page, text in lines:
        given = words(re.sub(r"\[([A-Z-][^\]]*)\]", r"\1", text))  # optional parts in a synopsis
        try:
            parser_of(given[2].partition(".")[2], given[3:])
        except ValueError as error:
            wrong.append(f"{page}: {error}")

    assert len(lines) > 10
    assert wrong == []


def test_every_script_that_is_shown_is_there_with_its_options() -> None:
    wrong = []
    lines = shown(r"scripts/[\w./]*\w")
    for page, text in lines:
        name, *given = words(re.split(r"[\])]", text)[0])
        path = ROOT / name.rstrip(".,:;)")
        if path.is_file() and path.name != "run":
            inside = [path, *(ROOT / "scripts" / each for each in re.findall(r"\w+/\w+\.py", path.read_text()))]
            code = "".join(each.read_text() for each in [*inside, ROOT / "tests" / "conftest.py"] if each.is_file())
            wrong += [
                f"{page}: {text}: {flag}"
                for flag in given
                if flag.startswith("--") and flag.partition("=")[0] not in code
            ]
        elif not path.exists():
            wrong.append(f"{page}: {text}")

    assert len(lines) > 20
    assert wrong == []


def test_every_extra_that_is_named_is_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"pruning-orchestrator\[(\w+)\]", page.read_text())}

    assert named
    assert named <= extras.keys()


def test_every_extra_has_what_its_code_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = [*MODELS.values(), *DATA.values(), *TASKS.values(), *FORMATS.values()]
    needed = {(row.extra, package) for row in rows if row.extra for package in row.packages}
    needed |= {("smollm", package) for package in ("gguf", LOADS_GGUF)}
    needed |= {(name, name) for name in ("accelerate", "lightning", "transformers")}  # in pruning/integrations
    held = {
        name: {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in listed} for name, listed in extras.items()
    }
    held["lightning"].add("lightning")  # under either name

    assert ("smollm", "transformers") in needed
    assert sorted((extra, package) for extra, package in needed if package not in held[extra]) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_compiles(page: Path) -> None:
    for code in re.findall(r"^```python[^\n]*\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        compile(code, str(page), "exec")
