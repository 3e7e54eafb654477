"""The examples of docs/reference/methods.md run, and its table lists the methods."""

from __future__ import annotations

import re
from pathlib import Path

import pruning

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "methods.md").read_text()


def test_what_the_page_shows_runs():
    shown = dict(re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    namespace: dict = {}
    exec(shown["prune"], namespace)
    assert abs(pruning.sparsity(namespace["model"]) - 0.9) < 0.005

    exec(shown["own_score"], namespace)

    assert abs(pruning.sparsity(namespace["model"]) - 0.8) < 0.005
    again = {name: namespace[name] for name in ("batches", "loss")}  # the model in the namespace is already pruned
    pruning.prune(namespace["model"], namespace["gradient_to_weight"], sparsity=0.9, scope="global", **again)
    assert abs(pruning.sparsity(namespace["model"]) - 0.9) < 0.005
    body = shown["own_score"].split("\n\n\n")[0].strip().splitlines()
    assert len(body) <= 10


def test_the_table_lists_every_published_method():
    listed = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE))))

    assert {name for name in pruning.PUBLISHED if not name.startswith("global_")} <= listed


def test_the_table_of_scores_is_that_of_their_docstrings():
    section = PAGE.partition("## Scores\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", section, re.MULTILINE)
    rows = {name: row for names, row in found for name in re.findall(r"\w+", names)}

    assert rows.keys() == pruning.scores.SCORES.keys()
    for name, row in rows.items():
        docstring = " ".join(str(pruning.scores.SCORES[name].load().__doc__).split())
        assert set(re.findall(r"\[(\d{4}\.\d{5})\]", row)) <= set(re.findall(r"\d{4}\.\d{5}", docstring)), name
        assert ("of each batch" in row) == ("each batch's gradient" in docstring), name
        assert ("over examples" in row) == ("over examples" in docstring or "each example's" in docstring), name
