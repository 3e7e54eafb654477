"""Catalogues of built-ins: scores, method classes, repairs, allocations and presets as rows of plain data; no torch."""
