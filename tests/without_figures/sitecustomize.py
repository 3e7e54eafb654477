"""For commands in tests, whose PYTHONPATH leads here: Python imports this by itself, and their reports have no figures.

To draw them takes longer than a small sweep trains.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder


class _WithoutFigures:
    """Finds the module that makes reports, and no other, and has it draw nothing."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "orchestrator.views.report.report_files" or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            module.draw = lambda *_: {}

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, _WithoutFigures)
