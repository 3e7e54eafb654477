"""Make docs/reference/configuration.md and commands.md, and the files of conf/ that rows have, again."""

from __future__ import annotations

from pathlib import Path

from orchestrator.__main__ import CONF
from scripts.reference import commands, conf_files, configuration

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"

conf_files.write(Path(str(CONF)))
(REFERENCE / "configuration.md").write_text(configuration.page(CONF), encoding="utf-8")
(REFERENCE / "commands.md").write_text(commands.page(), encoding="utf-8")
