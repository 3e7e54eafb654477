"""Schema of the node `harness`: tasks of EleutherAI's lm-evaluation-harness that networks are evaluated on."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.key_rules import key
from pruning.catalogue.rows import Rule, one_of, whole


@dataclass
class Harness:
    """Tasks of lm-evaluation-harness for language models of transformers. Without tasks, nothing is evaluated."""

    tasks: list[str] = key([], Rule(lambda given: len(set(given)) == len(given), "name each task once"))
    """Tasks, groups or tags, as in [arc_easy,hellaswag]; each one is a stage, which a kill costs at most."""
    shots: int | None = key(
        None, whole(0, ": the number of examples in a prompt, or null for the task's own").or_null("")
    )
    """Few-shot examples in each prompt; null: the number in the task's definition."""
    limit: int | None = key(None, whole(1, ", or null for all documents").or_null(""))
    """Maximum number of documents of each task; null: all."""
    include_path: str | None = None
    """Directory with task definitions of your own (YAML); they take precedence over the library's."""
    batch_size: int = key(8, whole(1))
    """Number of requests that the network answers at once."""
    each: str = key("final", one_of("final", "all"))
    """`final`: evaluate the last network of each trial; `all`: each round's network. Dense networks always are."""
