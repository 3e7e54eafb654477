"""+sweep=smaller_lm as a user types it: lists of sizes on a tiny language model, and the answer as the last lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from small_language_models import write_gguf, write_text

import orchestrator

pytestmark = pytest.mark.slow
pytest.importorskip("transformers", reason="transformers is not installed")


def test_lists_of_sizes_end_with_the_best_network_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from orchestrator.__main__ import main

    write_gguf(tmp_path / "tiny.gguf")
    write_text(tmp_path / "a.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})
    lists = ("unit.layers=3,2", "unit.mlp=32,16", "unit.heads=2", "unit.residual=16")
    small = ("model.weights=tiny.gguf", "data.root=a.txt", "data.block=16", "data.test_size=4", "score.examples=4")
    limits = ("+search.limits.parameters=6000", "+search.limits.active_parameters=6000")
    command = ["orchestrator", "+sweep=smaller_lm", *lists, *small, *limits, "cluster=inline", "tracking=none"]

    monkeypatch.setattr(sys, "argv", command)
    main()

    *_, best = told = [line for line in capsys.readouterr().out.splitlines() if line]
    answers = [line for line in told if line.startswith("Answer: minitron_sizes, ")]
    assert told[-len(answers) - 2].startswith("Answer: frontier of perplexity on validation against parameters: ")
    assert told[-len(answers) - 1 : -1] == answers
    points = {point.line: point for point in orchestrator.open("store").sweep().comparison().points}
    within = {line: point for line, point in points.items() if point.remaining_parameters <= 6000}
    assert 0 < len(within) < len(points) == 4
    line, point = min(within.items(), key=lambda pair: pair[1].val.mean if pair[1].val else float("inf"))
    assert best.startswith(f"Best smollm2 on text by perplexity on validation: {line}: ")
    assert f": {point.remaining_parameters:,.0f} parameters; perplexity on test {point.test.mean:.3f}, " in best
    assert re.search(r"[+-]\d\.\d{4} \[[+-]\d\.\d{4}, [+-]\d\.\d{4}\] nats per token by window of test\.$", best)
