"""Random networks from a seed: inputs, 3 to 10 layers of `random_layers`, and outputs, put together at random."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from scripts.zoo.libraries import Built, calibrate, called, randomise
from scripts.zoo.random_layers import (
    IMAGE_LAYERS,
    SEQUENCE_LAYERS,
    VECTOR_LAYERS,
    activation,
    image_norm,
    width_of,
)

ATTEMPTS = 50
"""Networks drawn for one seed until one runs on its example."""
VOCABULARY, CLASSES, MOST_STEPS = 30, 5, 64
BATCHES = (1, 2, 3, 5)
"""Batch sizes of the comparisons; the example has 1."""
Make = Callable[[Any, int, torch.Generator], Any]
"""(size, batch, generator) -> inputs of one call."""


@dataclass(frozen=True)
class RandomNetwork(Built):
    """A random network, and inputs of several sizes.

    Args:
        sizes: sizes of inputs; the first is the example's.
        make: makes inputs of a size.
        kinds: names of its parts.
    """

    sizes: tuple[Any, ...]
    make: Make
    kinds: tuple[str, ...]

    def calls(self) -> Iterator[tuple[str, Any]]:
        """Yield (words, inputs) of calls besides the example: other batches, sizes and dtypes."""
        for batch in BATCHES:
            yield f"a batch of {batch}", self.inputs(batch, 10 + batch)
        for place, size in enumerate(self.sizes[1:]):
            for batch in (1, 3):
                generator = torch.Generator().manual_seed(20 + place)
                yield f"a batch of {batch} of size {size}", self.make(size, batch, generator)


class Images(nn.Module):
    """Convolution at the start, perhaps of images of whole numbers."""

    names = ("x",)
    kind = "image"

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.channels, self.width, self.how = draw.choice((1, 3)), draw.choice((8, 12)), draw.choice(("", "", "dtype"))
        self.conv, self.norm = nn.Conv2d(self.channels, self.width, 3, padding=1), image_norm(draw, self.width)
        self.whole = self.how == "dtype" and draw.random() < 0.5
        self.sizes: tuple[Any, ...] = ((8, 8), (10, 6), (7, 9))

    def forward(self, x: Tensor) -> Tensor:
        if self.how:
            x = x.float() / 255 if x.dtype == torch.uint8 else x * 2 - 1
        return F.relu(self.norm(self.conv(x)))

    def make(self, size: Any, batch: int, generator: torch.Generator) -> Any:
        """Return images; those of other sizes have the other dtype, too."""
        images = torch.rand(batch, self.channels, *size, generator=generator)
        whole = self.whole != (bool(self.how) and size == self.sizes[-1])
        return (images * 255).to(torch.uint8) if whole else images


class Pairs(nn.Module):
    """Two images, encoded by one convolution, and compared."""

    kind = "image"

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 8, 3, padding=1), draw.choice(("cat", "difference", "product", "tuple"))
        self.width, self.sizes = 16 if self.how in ("cat", "tuple") else 8, ((8, 8), (6, 10))

    def forward(self, one: Any, two: Tensor | None = None) -> Tensor:
        if two is None:
            one, two = one
        one, two = F.relu(self.conv(one)), F.relu(self.conv(two))
        if self.how in ("cat", "tuple"):
            return torch.cat((one, two), dim=1)
        return torch.abs(one - two) if self.how == "difference" else one * two

    def make(self, size: Any, batch: int, generator: torch.Generator) -> Any:
        """Return two images, as two arguments or as one tuple."""
        both = tuple(torch.randn(batch, 3, *size, generator=generator) for _ in range(2))
        return (both,) if self.how == "tuple" else both


class Conditioned(nn.Module):
    """Image and a condition that scales and shifts its channels, given by name."""

    kind = "image"

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.width = draw.choice((8, 12))
        self.conv, self.film = nn.Conv2d(3, self.width, 3, padding=1), nn.Linear(4, 2 * self.width)
        self.time, self.sizes = draw.random() < 0.5, ((8, 8), (6, 10))

    def forward(self, image: Tensor, condition: Tensor) -> Tensor:
        if self.time:  # positions of a step, as in diffusion
            rates = torch.exp(-torch.arange(2, dtype=image.dtype, device=image.device))
            angles = condition[:, None].to(image.dtype) * rates[None]
            condition = torch.cat([angles.sin(), angles.cos()], dim=-1)
        scale, shift = self.film(condition)[:, :, None, None].chunk(2, dim=1)
        return F.silu(self.conv(image) * (1 + scale) + shift)

    def make(self, size: Any, batch: int, generator: torch.Generator) -> Any:
        """Return an image and a condition by name."""
        image = torch.randn(batch, 3, *size, generator=generator)
        if self.time:
            return {"image": image, "condition": torch.randint(0, 100, (batch,), generator=generator)}
        return {"image": image, "condition": torch.randn(batch, 4, generator=generator)}


class Tokens(nn.Module):
    """Embedded tokens with positions of several kinds, and perhaps a mask."""

    kind = "sequence"

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.width, self.how = draw.choice((8, 16)), draw.choice(("learned", "table", "sines", ""))
        self.embedding, self.masked = nn.Embedding(VOCABULARY, self.width), draw.random() < 0.3
        self.positions = nn.Parameter(torch.randn(MOST_STEPS, self.width) / 4)
        self.table, self.sizes = nn.Embedding(MOST_STEPS, self.width), (6, 4, 9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        length = x.shape[1]
        if self.how == "learned":
            x = x + self.positions[:length]
        elif self.how == "table":
            x = x + self.table(torch.arange(length, device=x.device)).unsqueeze(0)
        elif self.how == "sines":
            steps = torch.arange(length, dtype=x.dtype, device=x.device).unsqueeze(1)
            rates = torch.exp(torch.arange(0, self.width, 2, dtype=x.dtype) * (-math.log(100.0) / self.width))
            places = torch.zeros(length, self.width, dtype=x.dtype)
            places[:, 0::2], places[:, 1::2] = torch.sin(steps * rates), torch.cos(steps * rates)
            x = x + places
        return cast(Tensor, x if attention_mask is None else x * attention_mask[..., None].to(x.dtype))

    def make(self, size: Any, batch: int, generator: torch.Generator) -> Any:
        """Return tokens, with their mask by name if there is one."""
        tokens = torch.randint(0, VOCABULARY, (batch, size), generator=generator)
        return {"input_ids": tokens, "attention_mask": (tokens > 3).long()} if self.masked else tokens


class Features(nn.Module):
    """Sequence of numbers, such as measurements."""

    kind = "sequence"

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.width, self.how = draw.choice((8, 12)), draw.choice(("linear", "conv", "patches"))
        self.fc: nn.Module = nn.Linear(6, self.width)
        if self.how == "conv":
            self.fc = nn.Conv1d(6, self.width, 3, padding=1)
        elif self.how == "patches":
            self.fc = nn.Linear(12, self.width)
        self.sizes: tuple[Any, ...] = (6, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "conv":
            return F.relu(self.fc(x.transpose(1, 2))).transpose(1, 2)
        if self.how == "patches":
            x = x.unfold(1, 2, 2).flatten(2)
        return cast(Tensor, self.fc(x))

    def make(self, size: Any, batch: int, generator: torch.Generator) -> Any:
        """Return a sequence."""
        return torch.randn(batch, size, 6, generator=generator)


class Table(nn.Module):
    """Numbers and categories of a table, as a tuple of arguments."""

    kind = "vector"

    def __init__(self, _: Random) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(10, 3) for _ in range(2))
        self.width, self.fc, self.sizes = 14, nn.Linear(5, 8), (0,)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        found = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        return torch.cat([F.relu(self.fc(numbers)), *found], dim=-1)

    def make(self, _: Any, batch: int, generator: torch.Generator) -> Any:
        """Return numbers and categories."""
        return torch.randn(batch, 5, generator=generator), torch.randint(0, 10, (batch, 2), generator=generator)


class Vectors(nn.Module):
    """A vector of numbers."""

    kind = "vector"

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.width, self.sizes = draw.choice((12, 16)), (0,)
        self.fc, self.act = nn.Linear(10, self.width), activation(draw)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.act(self.fc(x)))

    def make(self, _: Any, batch: int, generator: torch.Generator) -> Any:
        """Return vectors."""
        return torch.randn(batch, 10, generator=generator)


STARTS = (*[Images] * 3, Pairs, Conditioned, *[Tokens] * 3, *[Features] * 3, Table, Vectors)


class ToSequence(nn.Module):
    """Image to sequence: pixels or patches, perhaps with a token for the class."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width = draw.choice((8, 12))
        self.conv = nn.Conv2d(width, self.width, 2, draw.choice((1, 2, 2)))
        self.token = nn.Parameter(torch.randn(1, 1, self.width)) if draw.random() < 0.5 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).transpose(1, 2)
        return x if self.token is None else torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)


class ToVector(nn.Module):
    """Image or sequence to vector."""

    def __init__(self, draw: Random, width: int, kind: str) -> None:
        super().__init__()
        self.width, self.kind = width, kind
        if kind == "image":
            self.how = draw.choice(("pool", "mean", "max", "four", "both"))
            self.width = width * {"four": 4, "both": 2}.get(self.how, 1)
            self.pool = nn.AdaptiveAvgPool2d(2 if self.how == "four" else 1)
        else:
            self.how = draw.choice(("mean", "first", "last", "weights", "state"))
            if self.how == "weights":
                self.score = nn.Linear(width, 1)
            elif self.how == "state":
                self.rnn = draw.choice((nn.GRU, nn.LSTM))(width, 8, batch_first=True)
                self.width = 8

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "image":
            if self.how in ("pool", "four"):
                return torch.flatten(self.pool(x), 1)
            if self.how == "mean":
                return x.mean(dim=(2, 3))
            largest = x.amax((-2, -1))
            return largest if self.how == "max" else torch.cat([largest, x.mean((-2, -1))], dim=1)
        if self.how == "mean":
            return x.mean(1)
        if self.how in ("first", "last"):
            return x[:, 0] if self.how == "first" else x[:, -1, :]
        if self.how == "weights":
            return (x * torch.softmax(self.score(x), dim=1)).sum(dim=1)
        _, state = self.rnn(x)
        return cast(Tensor, (state[0] if isinstance(state, tuple) else state)[-1])


class Ends(nn.Module):
    """Outputs: one or several, in any container."""

    def __init__(self, draw: Random, width: int, kind: str, embedding: nn.Embedding | None) -> None:
        super().__init__()
        self.kind, self.how = kind, draw.choice(("one", "one", "tuple", "dict", "list", "log"))
        self.out: nn.Module = nn.Conv2d(width, CLASSES, 1) if kind == "image" else nn.Linear(width, CLASSES)
        if embedding is not None and embedding.embedding_dim == width and draw.random() < 0.7:
            self.out = nn.Linear(width, VOCABULARY, bias=False)
            self.out.weight = embedding.weight
        self.other = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Any:
        found = self.out(x)
        pooled = x.mean((2, 3)) if self.kind == "image" else x
        if self.how == "tuple":
            return found, self.other(pooled)
        if self.how == "dict":
            return {"logits": found, "features": pooled, "extra": self.other(pooled).sigmoid()}
        if self.how == "list":
            return [found, self.other(torch.tanh(pooled))]
        return F.log_softmax(found, dim=1) if self.how == "log" else found


class Network(nn.Module):
    """Start, layers and outputs, one after another."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        start: Any = draw.choice(STARTS)(draw)
        self.start = start
        kind, width, parts = str(start.kind), width_of(start), list[nn.Module]()
        for _ in range(draw.randint(1, 5)):
            parts.append(_layer(draw, kind, width))
            width = width_of(parts[-1])
            if kind == "vector" and kind != start.kind:
                break
            if (new := _next_kind(draw, kind)) != kind:
                parts.append(ToVector(draw, width, kind) if new == "vector" else ToSequence(draw, width))
                kind, width = new, width_of(parts[-1])
        if kind != "vector" and draw.random() < 0.6:
            parts.append(ToVector(draw, width, kind))
            kind, width = "vector", width_of(parts[-1])
        self.layers = nn.ModuleList(parts)
        self.ends = Ends(draw, width, kind, getattr(self.start, "embedding", None))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = self.start(*args, **kwargs)
        for layer in self.layers:
            x = layer(x)
        return self.ends(x)


class OneInput(Network):
    """Network of one input."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class TwoInputs(Network):
    """Network of two inputs."""

    def forward(self, first: Any, second: Any = None) -> Any:
        return super().forward(first, second)


class ImageAndCondition(Network):
    """Network of two inputs by name."""

    def forward(self, image: Tensor, condition: Tensor) -> Any:
        return super().forward(image=image, condition=condition)


class TokensAndMask(Network):
    """Network of tokens and their mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask)


def _layer(draw: Random, kind: str, width: int) -> nn.Module:
    table: Any = {"image": IMAGE_LAYERS, "sequence": SEQUENCE_LAYERS, "vector": VECTOR_LAYERS}[kind]
    layer: nn.Module = draw.choice(table)(draw, width)
    return layer


def _next_kind(draw: Random, kind: str) -> str:
    """Draw the kind of values after a layer."""
    if kind == "image":
        return draw.choice(("image",) * 6 + ("sequence", "vector"))
    return draw.choice(("sequence",) * 6 + ("vector",)) if kind == "sequence" else kind


FORWARDS = {
    Pairs: TwoInputs,
    Table: TwoInputs,
    Conditioned: ImageAndCondition,
    Tokens: TokensAndMask,
}
"""First layer of a network -> class of the network with its inputs; else `OneInput`."""


def drawn(seed: int) -> RandomNetwork:
    """Draw the network of a seed, with random weights and statistics, in evaluation mode.

    Draws whose network does not run on its own example, or puts out no numbers, are left out.
    """
    last: Exception | None = None
    for attempt in range(ATTEMPTS):
        draw = Random(f"{seed} {attempt}")
        torch.manual_seed(seed)
        try:
            built = _built(draw)
            with torch.no_grad():
                found = called(built.model, built.inputs(1, 0))
        except (RuntimeError, ValueError, IndexError) as error:
            last = error
            continue
        values = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        if all(bool(leaf.isfinite().all()) for leaf in values) and any(
            float(leaf.abs().max()) > 1e-6 for leaf in values
        ):
            return built
    raise RuntimeError(f"no network of seed {seed} runs on its example") from last


def _built(draw: Random) -> RandomNetwork:
    model = Network(draw)
    start: Any = model.start
    model.__class__ = FORWARDS.get(type(start), OneInput)

    def inputs(batch: int, seed: int) -> Any:
        return start.make(start.sizes[0], batch, torch.Generator().manual_seed(seed))

    parts: tuple[Any, ...] = (start, *model.layers, model.ends)
    kinds = [type(each).__name__ + (f" {each.how}" if getattr(each, "how", "") else "") for each in parts]
    built = RandomNetwork(model.eval(), inputs, (), str(start.sizes[0]), start.sizes, start.make, tuple(kinds))
    randomise(model)
    calibrate(built)
    return built
