"""Advice for networks that torch.export cannot trace, because of a class, of packed sequences, or of the example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pruning


@dataclass
class Answer:
    """An output of a class that torch.export does not know."""

    logits: Tensor


@dataclass
class Registered:
    """An output of a class that torch.export knows."""

    logits: Tensor


torch.export.register_dataclass(Registered)


class Net(nn.Module):
    """Linear layers, with a function before them and one after them."""

    def __init__(self, before: Callable[[Any], Tensor], after: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 3), before, after

    def forward(self, x: Any) -> Any:
        return self.after(self.last(F.relu(self.first(self.before(x)))))


class Packed(nn.Module):
    """A recurrent layer that reads a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        found: Tensor = self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])
        return found


def same(x: Any) -> Any:
    return x


X = torch.randn(2, 6)
KNOWN = r"tuple, dict or NamedTuple, or, for a dataclass, call torch\.export\.register_dataclass\(Answer\) first\.$"


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (Net(same, Answer), X, rf"; its output is of the class Answer, which .* return a tensor, {KNOWN}"),
        (Net(same, lambda y: [Answer(y)]), X, rf"; its output is of the class Answer, .* {KNOWN}"),
        (Net(lambda x: x.logits, same), (Answer(X),), rf"; an input is of the class Answer, .* pass a tensor, {KNOWN}"),
        (
            Net(same, same),
            torch.randn(2, 7),
            "; a plain call with `example` fails, too: pass an input that the network",
        ),
        (Packed(), (torch.randn(2, 4, 6), torch.tensor([4, 3])), r"; `layer` takes a packed sequence, .* padded"),
    ],
)
def test_the_cause_is_told(model: nn.Module, example: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pruning.shrink(model, example)


def test_a_class_that_is_registered_is_traced() -> None:
    smaller: Any = pruning.shrink(Net(same, Registered), X)
    assert smaller.shrunk.form == "module"
    assert isinstance(smaller(X), Registered)
