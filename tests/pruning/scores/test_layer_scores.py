"""Scores of whole layers, against loops over the layers of small networks of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pruning
from pruning.catalogue.scores import SCORES
from pruning.choices.axes import Schedule, Score, Unit
from pruning.choices.combining import Choices
from pruning.engine.one_call import plan
from pruning.scores import block_influence, left_out

pytest.importorskip("transformers")
from small_transformers import VOCABULARY, network_of

NAMES = [name for name, row in SCORES.items() if "layer" in row.of_units]


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(input_ids=batch).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def by_layer(scores: dict[str, Tensor], count: int, path: str = "model.layers") -> list[float]:
    """Return the sum of the scores of each layer."""
    return [sum(float(v.sum()) for n, v in scores.items() if n.startswith(f"{path}.{i}.")) for i in range(count)]


def test_block_influence_is_one_minus_the_mean_cosine_over_tokens() -> None:
    network, batches = network_of("Llama"), [tokens(3, 0), tokens(2, 1)]
    scores = block_influence(network, batches, loss)
    with torch.no_grad():
        streams = [network.model(input_ids=batch, output_hidden_states=True).hidden_states for batch in batches]
    expected = []
    for number in range(3):  # the last hidden state of transformers is normalised
        cosines = [
            torch.cosine_similarity(each[number].double(), each[number + 1].double(), dim=-1) for each in streams
        ]
        expected.append(1 - float(torch.cat([each.flatten() for each in cosines]).mean()))

    assert by_layer(scores, 3) == pytest.approx(expected, rel=1e-6)
    assert not scores["lm_head.weight"].any(), "it is in no layer"


@pytest.mark.parametrize("left", [True, False])
def test_padding_has_no_block_influence(left: bool) -> None:
    network, (long, short) = network_of("Llama"), (tokens(1, 0), tokens(1, 1)[:, :4])
    padding = torch.zeros(1, 5, dtype=torch.long)

    def padded(text: Tensor) -> Tensor:
        return torch.cat([long, torch.cat([padding, text] if left else [text, padding], 1)])

    whole, mask = padded(short), padded(torch.ones_like(short))
    mask[0] = 1
    batch = {"input_ids": whole, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    scores = block_influence(network, [batch], None)
    expected = block_influence(network, [long, short], None)

    assert by_layer(scores, 4) == pytest.approx(by_layer(expected, 4), rel=1e-5)
    with pytest.raises(ValueError, match=r"^`batches` \(with an `attention_mask` of zeros\) must hold tokens, which"):
        block_influence(network, [{"input_ids": long, "attention_mask": torch.zeros_like(long)}], None)


@pytest.mark.parametrize(("kind", "path"), [("Llama", "model.layers"), ("GPT2", "transformer.h")])
def test_left_out_is_the_loss_of_the_smaller_network_less_that_of_the_whole(kind: str, path: str) -> None:
    network, batches = network_of(kind), [tokens(3, 0), tokens(1, 1)]
    whole = sum(len(batch) * float(loss(network, batch).detach()) for batch in batches) / 4
    expected = []
    for number in range(4):
        other = copy.deepcopy(network)
        with torch.no_grad():
            for parameter in other.get_submodule(f"{path}.{number}").parameters():
                parameter.zero_()
        smaller: Any = pruning.smaller_transformer(other)
        expected.append(sum(len(batch) * float(loss(smaller, batch).detach()) for batch in batches) / 4 - whole)

    assert by_layer(left_out(network, batches, loss), 4, path) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_layer_with_the_lowest_score_goes(name: str) -> None:
    network, batches = network_of("Llama", seed=3), [tokens(4, 0)]
    scores = by_layer(getattr(pruning.scores, name)(network, batches, loss), 4)
    choices = Choices(Score(name), Unit("layer"), schedule=Schedule(0.25))
    masks = plan(network, choices, batches=batches, loss=loss).masks
    kept = [bool(masks[f"model.layers.{number}.mlp.up_proj.weight"].any()) for number in range(4)]

    assert kept == [score != min(scores) for score in scores]


@pytest.mark.parametrize("name", NAMES)
def test_a_score_changes_nothing_and_reads_batches_of_any_cut(name: str) -> None:
    network = network_of("Llama").train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    flags = [(module.training, len(module._forward_hooks)) for module in network.modules()]
    score: Callable[..., dict[str, Tensor]] = getattr(pruning.scores, name)
    whole, parts = (score(network, batches, loss) for batches in ([tokens(4, 0)], [*tokens(4, 0).split(1)]))

    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert flags == [(module.training, len(module._forward_hooks)) for module in network.modules()]
    for key, value in whole.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, parts[key], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_layer_has_no_influence(name: str) -> None:
    network = network_of("Llama")
    masks = {
        key: torch.zeros_like(value) for key, value in network.named_parameters() if key.startswith("model.layers.1.")
    }
    scores = getattr(pruning.scores, name)(network, [tokens(2, 0)], loss, masks=masks)

    assert by_layer(scores, 4)[1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_refusals_say_what_to_do(name: str) -> None:
    network, score = network_of("Llama"), getattr(pruning.scores, name)

    with pytest.raises(ValueError, match=rf"`batches` \(=None\) must hold scoring data, which `{name}` reads"):
        score(network, None, loss)
    with pytest.raises(ValueError, match=r"is for networks of transformers, and `model` is a"):
        score(nn.Linear(2, 2), [torch.ones(1, 2)], loss)
    with pytest.raises(
        ValueError, match=rf"`score.kind` \(='{name}'\) scores only whole units of kind .* use unit.kind='layer'"
    ):
        Choices(Score(name), Unit("mlp"))


def test_left_out_needs_a_loss() -> None:
    with pytest.raises(ValueError, match=r"`loss` \(=None\) must be a function .* for `left_out`"):
        left_out(network_of("Llama"), [tokens(1, 0)], None)


@pytest.mark.parametrize(
    ("method", "size"),
    [
        ("shortgpt", "num_hidden_layers"),
        ("minitron_mlp", "intermediate_size"),
        ("minitron_heads", "num_key_value_heads"),
        ("minitron", "num_hidden_layers"),
    ],
)
def test_published_methods_of_transformers_leave_a_smaller_network_that_computes_the_same(
    method: str, size: str
) -> None:
    network = network_of("Llama")
    before, texts = getattr(network.config, size), tokens(4, 0)
    pruning.prune(
        network,
        method,
        sparsity=0.3,
        scope={"budget": "parameters"} if method == "shortgpt" else {},
        batches=[texts],
        loss=loss,
    )
    smaller: Any = pruning.smaller_transformer(network)

    assert getattr(smaller.config, size) < before
    with torch.no_grad():
        torch.testing.assert_close(smaller(texts).logits, network(texts).logits, rtol=1e-4, atol=1e-5)
