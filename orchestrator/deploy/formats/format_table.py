"""The table of deployment formats: rows of the catalogue with their codecs."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.catalogue import formats as catalogue
from orchestrator.deploy.formats.format import Format

FORMATS: Mapping[str, Format] = {name: Format.of(row) for name, row in catalogue.FORMATS.items() if row.code}
TOLERANCES: Mapping[str, float] = {name: row.tolerance for name, row in catalogue.FORMATS.items()}
"""Name of a format -> largest allowed difference of its outputs from the masked network's, relative to the largest."""
