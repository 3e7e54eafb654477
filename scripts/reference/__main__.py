"""Write everything that is made from the code: files of conf/, pages of docs/reference, digests of new components.

python -m scripts.reference            # after a change of a row, a key, a command or an option
python -m scripts.reference --renew    # also renew the digests of changed components: see test_versions.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.__main__ import CONF
from scripts.reference import code_digests, command_pages, conf_files, configuration, family_page

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"

conf_files.write(Path(str(CONF)))
(REFERENCE / "configuration.md").write_text(configuration.page(CONF), encoding="utf-8")
(REFERENCE / "commands.md").write_text(command_pages.page(), encoding="utf-8")
(REFERENCE / "transformers.md").write_text(family_page.page(), encoding="utf-8")
code_digests.write(ROOT / "tests/orchestrator/planning/versions.json", renew="--renew" in sys.argv[1:])
