"""Generated pages of docs/reference: they are current and complete."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from composition import composed

from orchestrator.__main__ import CONF
from orchestrator.config.config_groups import GROUPS, schema_of
from orchestrator.config.hydra_options import stored_options
from orchestrator.config.schema import Config
from scripts.reference import command_pages, configuration, family_page

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
REMEDY = "run `.venv/bin/python -m scripts.reference`"


def test_the_configuration_reference_is_current() -> None:
    assert (REFERENCE / "configuration.md").read_text() == configuration.page(CONF), REMEDY


def test_the_reference_of_the_commands_is_current() -> None:
    assert (REFERENCE / "commands.md").read_text() == command_pages.page(), REMEDY


def test_the_table_of_transformers_is_current() -> None:
    assert (REFERENCE / "transformers.md").read_text() == family_page.page(), REMEDY


def keys(schema: type, where: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for each in fields(schema):
        if is_dataclass(kind := hints[each.name]) and isinstance(kind, type):
            yield from keys(kind, f"{where}{each.name}.")
        elif where or each.name not in GROUPS:
            yield f"{where}{each.name}"


def test_every_key_has_a_sentence() -> None:
    page = (REFERENCE / "configuration.md").read_text()
    told = dict(re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]*(?:\\\|[^|]*)*) \|$", page, re.MULTILINE))
    ours = {key for key in keys(Config) if not key.startswith("finetune.")}  # same keys as `train`
    kinds = [(group, kind) for group, each in GROUPS.items() for kind in each.rows]
    ours |= {key for group, kind in kinds for key in keys(schema_of(group, kind), f"{group}.")}

    assert len(ours) > 150
    assert sorted(ours - told.keys()) == []
    assert [key for key in ours if len(told[key].split()) < 2] == []
    assert "## finetune" in page


@pytest.mark.slow
def test_the_examples_of_the_first_keys_compose() -> None:
    for key, (example, _) in configuration.FIRST.items():
        settings = [word for word in shlex.split(example) if word != "-m"]
        assert key in {setting.partition("=")[0] for setting in settings}
        composed(*(setting for setting in settings if "range" not in setting))

    assert len(configuration.FIRST) == 20


def test_an_interval_is_told_whole() -> None:
    page = (REFERENCE / "configuration.md").read_text()
    told = re.findall(r"lie in(.*?)(?:;| \|)", page)

    assert len(told) > 10
    assert [each for each in told if not re.match(r" [\[(]\S+, \S+[\])]", each)] == []


def test_every_option_of_a_group_is_listed() -> None:
    page = (REFERENCE / "configuration.md").read_text()
    files = [path.relative_to(CONF).with_suffix("") for path in CONF.rglob("*.yaml")]
    options = [f"{file.parent}={file.name}" for file in files if file.parent.parts and file.parts[0] != "hydra"]
    options += [f"{group}={name}" for group, names in stored_options().items() for name in names]

    assert len(options) > 90
    assert [
        option for option in options if not re.search(rf"^\| `\+?{re.escape(option)}` \|", page, re.MULTILINE)
    ] == []


def test_every_variable_that_is_read_is_listed() -> None:
    """Variables that the code reads, except those that this project sets itself."""
    page = (REFERENCE / "commands.md").read_text()
    text = "\n".join(path.read_text() for path in (ROOT / "orchestrator").rglob("*.py"))
    read = set(re.findall(r"""environ\.get\(\s*"(\w+)"|"(\w+)" (?:not )?in os\.environ""", text))
    names = {name for pair in read for name in pair if name} - {"RAY_JOB_CONFIG_JSON_ENV_VAR"}

    assert len(names) >= 6
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("line", [["store", "lst"], ["gate"], ["export", "--too", "onnx", "--output", "here"]])
def test_a_wrong_command_line_is_told(line: list[str]) -> None:
    with pytest.raises(ValueError, match=f"orchestrator.{line[0]} refuses"):
        command_pages.parser_of(line[0], line[1:] or ["--no-such"])
