"""Calls of single blocks give the bits of whole passes; other networks are pruned by whole passes."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled
from torch import Tensor, nn

import pruning

pytestmark = pytest.mark.filterwarnings("ignore:11% of the network's matrix weights stay dense")  # the layers around

BLOCKS, BATCHES = 4, 3
CHAIN = BATCHES + 3
"""Whole passes of a chain: the capture of each batch, and comparisons with the first batch, then the first and last."""
FEW = 1 + CHAIN
"""Whole passes of a network that is one chain: the first finds the order of its parts."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, *_others: Any, **_named: Any) -> Tensor:
        out: Tensor = x + self.two(torch.tanh(self.one(x)))
        return out


class Network(nn.Module):
    """Embedding by a linear layer, blocks, and a head. A subclass changes how the blocks are called."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([block() for _ in range(BLOCKS)])
        self.last = nn.Linear(8, 8)

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def begin(self, x: Tensor) -> None:
        """Prepare for the inputs of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        self.begin(x)
        out: Tensor = self.last(self.blocks(self.first(x)))
        return out


class Positions(Network):
    """Arguments computed from the batch: a scale, shared by all blocks, and a slice for each; tuples as outputs."""

    def blocks(self, x: Tensor) -> Tensor:
        scale, slices = x.mean().expand(5, 8), x[..., :1] * torch.arange(BLOCKS)
        for index, layer in enumerate(self.layers):
            x = layer((x, 0.5), scale=scale, own=slices[..., index], index=index)[0]
        return x


class Scaled(Block):
    def forward(self, x: Any, *_others: Any, scale: Tensor, own: Tensor, index: int) -> Any:
        return super().forward(x[0] * x[1] + scale) * torch.sigmoid(own)[..., None] + index, None


class EncoderDecoder(Network):
    def blocks(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.layers[:2]:
            memory = layer(memory)
        memory, x = torch.sin(memory), torch.cos(x)
        for layer in self.layers[2:]:
            x = layer(x, memory)
        return x


class Attending(Block):
    def forward(self, x: Tensor, *others: Any, **_named: Any) -> Tensor:
        return super().forward(x + sum(others))


class Passed(Network):
    """Second output of each block that the next gets too, as T5 passes the bias of positions."""

    def blocks(self, x: Tensor) -> Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class Passing(Block):
    def forward(self, x: Tensor, bias: Tensor | None = None, **_named: Any) -> Any:
        bias = torch.sin(self.two.bias) if bias is None else bias
        return super().forward(x + bias), bias


class EarlyExit(Network):
    """Branch on values that pruning does not turn."""

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if float(x.detach().abs().max()) < 1e9:
                x = layer(x)
        return x


class Branches(Network):
    def blocks(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)  # type: ignore[return-value]


def with_a_hook() -> nn.Module:
    model = Network()
    model.layers[0].register_forward_hook(lambda _m, _args, out: out * 0.5)
    model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
    return model


REPEATED: dict[str, Callable[[], nn.Module]] = {
    "plain": Network,
    "arguments of a batch": lambda: Positions(Scaled),
    "several outputs": lambda: Passed(Passing),
    "branches": Branches,
    "early exit": EarlyExit,
    "hooks": with_a_hook,
    "a Sequential": lambda: nn.Sequential(*(Block() for _ in range(BLOCKS))),
}


class Between(Network):
    """Residual computed between blocks."""

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return x


class InPlaceBetween(Network):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).mul_(0.5)
        return x


class ArgumentOfOutputs(Network):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x.mean())
        return x


class NumberOfOutputs(Network):
    """Number that Python reads by `item`, or by `tolist`, which no mode sees."""

    reads = staticmethod(lambda x: x.abs().max().item())

    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.reads(x))
        return x


class ListOfOutputs(NumberOfOutputs):
    reads = staticmethod(lambda x: x.flatten().tolist()[0])


class Twice(Network):
    def blocks(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        return x


class Cache:
    """Values that blocks keep for later blocks, in an object that is no container."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []


class Cached(Network):
    def blocks(self, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return x


class Caching(Block):
    def forward(self, x: Tensor, cache: Any, **_named: Any) -> Tensor:
        cache.values.append(x)
        return super().forward(x + sum(cache.values))


class Listed(Network):
    def blocks(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, skips)
        return x


class Skipping(Block):
    def forward(self, x: Tensor, skips: Any, **_named: Any) -> Tensor:
        skips.append(x)
        return super().forward(x + sum(skips))


class InPlace(Block):
    def forward(self, x: Tensor, *_others: Any, **_named: Any) -> Tensor:
        x += 0.5
        return super().forward(x)


class SharedTensor(Network):
    """Tensor of the batch that blocks read without getting it as an argument; it differs in the last batch only."""

    def __init__(self) -> None:
        self.box: dict[str, Any] = {}
        box = self.box

        class Reading(Block):
            def forward(self, x: Tensor, *_others: Any, **_named: Any) -> Tensor:
                return super().forward(x) + box["level"]

        super().__init__(Reading)

    def level(self, x: Tensor) -> Any:
        return (x[0, 0, 0] > 1.5).float()

    def begin(self, x: Tensor) -> None:
        self.box["level"] = self.level(x)


class SharedNumber(SharedTensor):
    def level(self, x: Tensor) -> Any:
        return float(x.mean())


class AttributeOfBlocks(Network):
    def __init__(self) -> None:
        class Reading(Block):
            level: Any = None

            def forward(self, x: Tensor, *_others: Any, **_named: Any) -> Tensor:
                return super().forward(x) + self.level

        super().__init__(Reading)

    def begin(self, x: Tensor) -> None:
        for layer in self.layers:
            layer.level = float(x[0, 0, 0] > 1.5)


class BufferOfBlocks(Network):
    def __init__(self) -> None:
        super().__init__(Attending)
        self.register_buffer("count", torch.zeros(()))

    def blocks(self, x: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            x = layer(x, self.count)
        return x


class Autocast(Network):
    def blocks(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().blocks(x).float()


class Noisy(Block):
    def forward(self, x: Tensor, *_others: Any, **_named: Any) -> Tensor:
        return super().forward(x + torch.randn(8))


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "residual between blocks": Between,
    "written between blocks": InPlaceBetween,
    "argument from outputs": lambda: ArgumentOfOutputs(Attending),
    "number from outputs": lambda: NumberOfOutputs(Attending),
    "list from outputs": lambda: ListOfOutputs(Attending),
    "called twice": Twice,
    "cache": lambda: Cached(Caching),
    "list of skips": lambda: Listed(Skipping),
    "in place": lambda: Network(InPlace),
    "shared tensor": SharedTensor,
    "shared number": SharedNumber,
    "attribute": AttributeOfBlocks,
    "buffer": BufferOfBlocks,
    "autocast inside": Autocast,
    "random numbers": lambda: Network(Noisy),
}


def batches(count: int = BATCHES) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = [{"x": torch.randn(2, 5, 8, generator=generator)} for _ in range(count)]
    for at, batch in enumerate(found):
        batch["x"][0, 0, 0] = at
    return found


def pruned(model: nn.Module, given: list[Any], **options: Any) -> tuple[nn.Module, pruning.Layerwise, int]:
    """Prune a copy; return it, its result, and the number of whole passes."""
    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1

    handle = model.register_forward_pre_hook(count)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    result = pruning.layerwise(model, "sparsegpt", given, **{"sparsity": 0.5, **options})
    after = copy.deepcopy(model)
    handle.remove()
    model.load_state_dict(before)
    return after, result, passes[0]


def equal(one: tuple[nn.Module, pruning.Layerwise, int], other: tuple[nn.Module, pruning.Layerwise, int]) -> bool:
    same = all(torch.equal(a, b) for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True))
    errors = [[(name, each.error, each.rows) for name, each in result.layers.items()] for _, result, _ in (one, other)]
    return same and one[1].masks == other[1].masks and errors[0] == errors[1]


def called(model: nn.Module) -> list[Any]:
    return [(batch["x"],) for batch in batches()] if isinstance(model, nn.Sequential) else batches()


@pytest.mark.parametrize("kind", REPEATED)
def test_repeated_calls_give_the_bits_of_whole_passes(kind: str) -> None:
    torch.manual_seed(1)
    model = REPEATED[kind]()
    whole = pruned(model, called(model), replay=False)
    repeated = pruned(model, called(model))

    assert equal(repeated, whole)
    assert repeated[2] == FEW
    assert whole[2] == 1 + BLOCKS * BATCHES


@sampled(3)
@pytest.mark.parametrize("kind", WHOLE)
def test_networks_that_keep_more_than_arguments_are_pruned_by_whole_passes(kind: str) -> None:
    torch.manual_seed(1)
    model = WHOLE[kind]()
    whole = pruned(model, called(model), replay=False)
    found = pruned(model, called(model))

    assert equal(found, whole)
    assert found[2] >= 1 + BLOCKS * BATCHES


def test_each_list_of_an_encoder_and_a_decoder_is_a_chain() -> None:
    torch.manual_seed(1)
    model = EncoderDecoder(Attending)
    found, whole = pruned(model, batches()), pruned(model, batches(), replay=False)

    assert equal(found, whole)
    assert found[2] == 1 + 2 * CHAIN


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_interrupted_chain_goes_on_to_the_same_bits(after: int) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(result: pruning.Layerwise) -> None:
        seen.append(result)
        if len(seen) == after:
            raise Interrupted

    torch.manual_seed(1)
    model, seen = Positions(Scaled), list[pruning.Layerwise]()
    expected = pruned(copy.deepcopy(model), batches())

    with pytest.raises(Interrupted):
        pruning.layerwise(model, "sparsegpt", batches(), sparsity=0.5, on_block=interrupt)

    assert equal(pruned(model, batches(), done=seen[-1]), expected)


@pytest.mark.parametrize(("limit", "most"), [(0, 2 * BATCHES), (1300, 2)])
def test_activations_beyond_the_limit_go_to_files(
    limit: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(1)
    model, files = Positions(Scaled), list[int]()
    expected = pruned(model, batches())

    found = pruned(
        model, batches(), activation_bytes=limit, on_block=lambda _: files.append(len([*tmp_path.rglob("*.pt")]))
    )

    assert equal(found, expected)
    assert max(files) == most
    assert not [*tmp_path.iterdir()]


def test_batches_of_other_forms_are_proven_too() -> None:
    """Blocks read the mask of a batch from their network; the first batch has none, like all of its form."""

    class Masked(SharedTensor):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            self.box["level"] = 0.0 if attention_mask is None else 1.0
            return self.last(self.blocks(self.first(x)))  # type: ignore[no-any-return]

    torch.manual_seed(1)
    model, given = Masked(), batches()
    given[1]["attention_mask"] = torch.ones(2, 5)
    found, whole = pruned(model, given), pruned(model, given, replay=False)

    assert equal(found, whole)
    assert found[2] >= 1 + BLOCKS * BATCHES


def test_calls_are_repeated_under_the_autocast_of_the_caller() -> None:
    torch.manual_seed(1)
    model = Positions(Scaled)
    with torch.autocast("cpu", torch.bfloat16):
        found, whole = pruned(model, batches()), pruned(model, batches(), replay=False)

    assert equal(found, whole)
    assert found[2] == FEW


@sampled(3)
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_models_of_transformers_are_repeated_without_their_caches(kind: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(1)
    cls = getattr(transformers, kind)
    sizes = {"vocab_size": 16, "num_layers": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_heads": 2}
    widths = {"hidden_size": 8, "d_model": 8, "n_embd": 8, "d_kv": 4, "intermediate_size": 16, "d_ff": 16}
    model = cls(cls.config_class(**sizes, **widths, n_layer=2, n_head=2, decoder_start_token_id=0)).eval()
    given = [{"input_ids": torch.randint(16, (2, 5)), "attention_mask": torch.ones(2, 5).long()} for _ in range(3)]
    given[0]["attention_mask"][0, 3:] = 0
    for batch in given if kind.startswith("T5") else ():
        batch["labels"] = batch["input_ids"]
    assert model.config.use_cache
    found, whole = pruned(model, given), pruned(model, given, replay=False)

    assert equal(found, whole)
    assert found[2] == (1 + 2 * CHAIN if kind.startswith("T5") else FEW)
    assert model.config.use_cache
