"""Greedy generation: the continuation of prompts, always by the most probable token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from orchestrator.core.errors import DataError
from orchestrator.workloads.tasks.batch import answer_of, outputs_of
from orchestrator.workloads.tasks.task import TestInputs


def greedy_generations(
    model: nn.Module, prompts: Sequence[str], count: int, inputs: TestInputs
) -> list[dict[str, str]]:
    """Return `prompt` and `text` for each prompt: its continuation by `count` tokens.

    The network reads the last `inputs.length` tokens, so each step costs a forward pass.

    Raises:
        DataError: the data have no codec, or a prompt has no tokens
    """
    if prompts and inputs.codec is None:
        raise DataError(
            "`task.prompts` needs the tokens of a text; use data=text, or return a `codec` with `encode` and `decode` "
            "from the data target."
        )
    return [{"prompt": prompt, "text": _continued(model, prompt, count, inputs)} for prompt in prompts]


def _continued(model: nn.Module, prompt: str, count: int, inputs: TestInputs) -> str:
    assert inputs.codec is not None
    tokens = inputs.codec.encode(prompt)
    if not tokens:
        raise DataError(f"`task.prompts` (={prompt!r}) must have at least one token; pass a text.")
    start = len(tokens)
    for _ in range(count):
        read = torch.tensor([tokens[-inputs.length :]], device=inputs.device)
        tokens.append(int(outputs_of(answer_of(model, read))[0, -1].argmax()))
    return inputs.codec.decode(tokens)[len(inputs.codec.decode(tokens[:start])) :]
