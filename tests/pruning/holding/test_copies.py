"""Fast copies of networks equal the copies of `copy.deepcopy`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

import pruning
from pruning.holding.copies import copied


class Odd(nn.Module):
    """A module with tied modules, lists, a hook bound to itself, and a reference to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.missing = None
        self.register_module("none", None)
        self.register_buffer("nothing", None)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.sizes = [3, {"a": (1, 2)}]
        self.steps = [self.first, torch.tensor(3.0)]
        self.me = [self]
        self.register_forward_hook(self.note)
        self.calls = 0

    def note(self, _module: nn.Module, _given: Any, answer: Tensor) -> Tensor:
        self.calls += 1
        return answer

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.first(x)) * self.scale


class Own(nn.Linear):
    """A layer that defines its own copying."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        made = type(self)(3, 3)
        made.load_state_dict(self.state_dict())
        made.is_own = True  # type: ignore[assignment]
        return made


def test_a_copy_has_the_structure_of_the_network_and_shares_nothing_with_it() -> None:
    model = Odd()
    made = copied(model, {})
    assert made.first is made.again is made.steps[0] is not model.first
    assert made.me[0] is made
    assert made.sizes == model.sizes
    assert made.sizes[1] is not model.sizes[1]
    assert vars(made).keys() == vars(copy.deepcopy(model)).keys()
    assert [(name, type(m)) for name, m in made.named_modules()] == [(n, type(m)) for n, m in model.named_modules()]

    torch.testing.assert_close(made(torch.ones(2, 3)), model(torch.ones(2, 3)), rtol=0, atol=0)
    assert (made.calls, model.calls) == (1, 1)  # the hook of the copy is bound to the copy
    theirs = [*model.parameters(), *model.buffers(), model.steps[1]]
    ours = [*made.parameters(), *made.buffers(), made.steps[1]]
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(theirs, ours, strict=True))
    made.first.register_forward_hook(lambda *_: None)
    assert not model.first._forward_hooks


def test_what_has_a_way_of_its_own_to_be_copied_takes_it() -> None:
    model = nn.Sequential(OrderedDict(own=Own(3, 3), rnn=nn.GRU(3, 3)))
    made = copied(model, {})
    assert made.own.is_own
    assert made.rnn._flat_weights[0] is made.rnn.weight_ih_l0 is not model.rnn.weight_ih_l0


def test_what_stands_in_the_memo_is_taken() -> None:
    model, mine = nn.Linear(3, 3), nn.Parameter(torch.zeros(3, 3))
    made = copied(model, {id(model.weight): mine})
    assert made.weight is mine
    assert made.bias is not model.bias


def test_a_layer_that_is_held_pruned_computes_the_same_and_prunes_itself_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    pruning.l1_unstructured(model[0], "weight", 4)
    model(torch.ones(1, 3)).sum().backward()
    model[0].weight = model[0].weight.detach()
    made = copied(model, {})
    assert torch.equal(made(torch.ones(1, 3)), model(torch.ones(1, 3)))
    pruning.remove(made[0], "weight")
    assert hasattr(model[0], "weight_orig")


class Adding(nn.Linear):
    """A layer that appends a term to a list that it shares with other modules."""

    def __init__(self, terms: list[Tensor]) -> None:
        super().__init__(3, 3)
        self.terms = terms

    def forward(self, x: Tensor) -> Tensor:
        answer = super().forward(x)
        self.terms.append(answer.square().sum())
        return answer


class Regularised(nn.Module):
    """A network that sums the terms that its layers append to an empty list."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: list[Tensor] = []
        self.layer = Adding(self.terms)

    def forward(self, x: Tensor) -> Tensor:
        self.terms.clear()
        self.layer(x)
        return sum(self.terms, torch.zeros(()))


def test_an_empty_list_that_modules_share_is_one_in_the_copy() -> None:
    model = Regularised()
    made = copied(model, {})
    assert made.terms is made.layer.terms is not model.terms
    assert made(torch.ones(1, 3)) == model(torch.ones(1, 3)) > 0


class Caching(nn.Module):
    """A network that writes to a buffer and reads it through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("cache", torch.zeros(2, 3))
        self.first = self.cache[0]

    def forward(self, x: Tensor) -> Tensor:
        self.cache.copy_(x.detach().mean(0))
        return self.layer(x) + self.first


def test_buffers_of_own_modules_share_storage_as_they_did() -> None:
    model = Caching()
    made = copied(model, {})
    assert made.first.data_ptr() == made.cache.data_ptr() != model.cache.data_ptr()
    assert torch.equal(made(torch.ones(1, 3)), model(torch.ones(1, 3)))
