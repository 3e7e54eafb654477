"""Three tasks of lm-evaluation-harness with documents of random words: a choice, a likelihood, and a generation."""

from __future__ import annotations

import json
import random
from pathlib import Path

DEFINITIONS = {
    "choose": (
        "output_type: multiple_choice",
        'doc_to_text: "{{question}}"',
        'doc_to_choice: "{{choices}}"',
        "doc_to_target: gold",
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true},",
        "  {metric: acc_norm, aggregation: mean, higher_is_better: true}]",
    ),
    "complete": (
        "output_type: loglikelihood",
        'doc_to_text: "{{question}}"',
        'doc_to_target: " {{last}}"',
        "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false},",
        "  {metric: acc, aggregation: mean, higher_is_better: true}]",
    ),
    "write": (
        "output_type: generate_until",
        'doc_to_text: "{{question}}"',
        'doc_to_target: "{{last}}"',
        "process_results: !function utils.letters",
        'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 4}',
        "metric_list: [{metric: letters, aggregation: mean, higher_is_better: true}]",
    ),
}
CODE = 'def letters(doc, results):\n    return {"letters": sum(map(ord, results[0])) / 100}\n'


def write_tasks(folder: Path, count: int = 12) -> Path:
    """Write the definitions and their documents into a folder; the paths are relative to the folder above it."""
    folder.mkdir()
    draws = random.Random(0)

    def words(number: int) -> str:
        return " ".join("".join(draws.choices("abcdefgh", k=3)) for _ in range(number))

    documents = [
        {"question": words(4), "choices": [words(1), words(2), words(1)], "gold": draws.randrange(3), "last": words(1)}
        for _ in range(count)
    ]
    (folder / "documents.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in documents))
    (folder / "utils.py").write_text(CODE)
    for name, lines in DEFINITIONS.items():
        files = f"{{data_files: {{test: {folder.name}/documents.jsonl}}}}"
        head = (f"task: {name}", "dataset_path: json", f"dataset_kwargs: {files}", "test_split: test")
        (folder / f"{name}.yaml").write_text("\n".join((*head, *lines)) + "\n")
    return folder
