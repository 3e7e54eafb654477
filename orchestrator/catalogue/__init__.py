"""Catalogues of built-in networks, data sets, tasks and formats, a row for each; no torch."""
