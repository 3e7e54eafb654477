"""Layers of random networks, written as people write them; each draws its own options."""

from __future__ import annotations

import math
from random import Random
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.Mish, nn.Tanh, nn.PReLU)


def activation(draw: Random) -> nn.Module:
    """Draw an activation."""
    return draw.choice(ACTIVATIONS)()


def divisor(draw: Random, width: int) -> int:
    """Draw a number of heads or groups: a divisor of the width."""
    return draw.choice([each for each in (1, 2, 4) if width % each == 0])


def image_norm(draw: Random, width: int) -> nn.Module:
    """Draw a normalisation of images."""
    return draw.choice(
        (
            lambda: nn.BatchNorm2d(width),
            lambda: nn.BatchNorm2d(width),
            lambda: nn.GroupNorm(divisor(draw, width), width),
            lambda: nn.InstanceNorm2d(width, affine=True),
            nn.Identity,
        )
    )()


class ConvBlock(nn.Module):
    """Convolution of any kind, normalisation and activation."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width = draw.choice((8, 12, 16))
        kernel, dilation = draw.choice((1, 3, 3, 5)), draw.choice((1, 1, 2))
        groups = draw.choice((1, 1, math.gcd(width, self.width)))
        self.conv = nn.Conv2d(
            width,
            self.width,
            kernel,
            stride=draw.choice((1, 1, 2)),
            padding=draw.choice((dilation * (kernel // 2), dilation * (kernel // 2), 0)),
            dilation=dilation,
            groups=groups,
            bias=draw.random() < 0.5,
            padding_mode=draw.choice(("zeros", "zeros", "zeros", "reflect", "circular")),
        )
        self.norm, self.act = image_norm(draw, self.width), activation(draw)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.act(self.norm(self.conv(x))))


class Inverted(nn.Module):
    """Inverted residual block with a depthwise convolution and squeeze-and-excitation."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, inner = width, width * draw.choice((1, 2, 3))
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), activation(draw))
        self.depth = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.down, self.up = nn.Conv2d(inner, 4, 1), nn.Conv2d(4, inner, 1)
        self.project = nn.Conv2d(inner, width, 1)
        self.gated, self.means = draw.random() < 0.7, draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        if self.gated:
            pooled = y.mean((2, 3), keepdim=True) if self.means else F.adaptive_avg_pool2d(y, 1)
            y = y * torch.sigmoid(self.up(F.relu(self.down(pooled))))
        return cast(Tensor, x + self.project(y))


class Residual(nn.Module):
    """Residual block of ResNets, perhaps with a stride and a shortcut."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, stride = draw.choice((width, 12, 16)), draw.choice((1, 1, 2))
        inner = draw.choice((8, 12))
        self.one = nn.Conv2d(width, inner, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(inner, self.width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(inner), image_norm(draw, self.width)
        self.downsample = None
        if stride > 1 or self.width != width:
            self.downsample = nn.Sequential(nn.Conv2d(width, self.width, 1, stride), nn.BatchNorm2d(self.width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.two(F.relu(self.bn1(self.one(x)))))
        out += identity
        return F.relu(out)


class Dense(nn.Module):
    """Block of a DenseNet: each layer reads the concatenation of all before it."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        growth, count = draw.choice((4, 6)), draw.choice((2, 3))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width + i * growth), nn.ReLU(), nn.Conv2d(width + i * growth, growth, 3, 1, 1))
            for i in range(count)
        )
        self.width = width + count * growth

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, dim=1)


class CrossStage(nn.Module):
    """Block of YOLO: halves or pieces of a convolution, of which some go through further layers."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.piece, self.how = draw.choice((6, 8)), draw.choice(("chunk", "split", "sizes", "slices"))
        self.one = nn.Conv2d(width, 2 * self.piece, 1)
        self.inner = nn.ModuleList(ConvSame(draw, self.piece) for _ in range(draw.choice((1, 2))))
        self.width = draw.choice((8, 16))
        self.two = nn.Conv2d((2 + len(self.inner)) * self.piece, self.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.one(x))
        if self.how == "chunk":
            pieces = list(x.chunk(2, 1))
        elif self.how == "split":
            pieces = list(torch.split(x, self.piece, 1))
        elif self.how == "sizes":
            pieces = list(torch.split(x, [self.piece, x.shape[1] - self.piece], dim=1))
        else:
            pieces = [x[:, : self.piece], x[:, self.piece :]]
        for layer in self.inner:
            pieces.append(layer(pieces[-1]))
        return cast(Tensor, self.two(torch.cat(pieces, 1)))


class ConvSame(nn.Module):
    """Convolution that keeps width and size, perhaps with a shortcut."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.add = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.conv(x)))
        return x + y if self.add else y


class ConvNext(nn.Module):
    """Block of ConvNeXt: channels last, LayerNorm, a scale for each channel."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width = width
        self.depth, self.norm = nn.Conv2d(width, width, 5, padding=2, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5)) if draw.random() < 0.7 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y)))
        if self.gamma is not None:
            y = self.gamma * y
        return cast(Tensor, x + y.permute(0, 3, 1, 2))


class Up(nn.Module):
    """Larger image: a transposed convolution, an interpolation, or a shuffle of pixels."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.how = draw.choice((8, 12)), draw.choice(("transposed", "transposed", "nearest", "shuffle"))
        if self.how == "transposed":
            kernel, groups = draw.choice((2, 3, 4)), draw.choice((1, math.gcd(width, self.width)))
            self.conv: nn.Module = nn.ConvTranspose2d(
                width, self.width, kernel, 2, padding=kernel // 3, output_padding=kernel % 2, groups=groups
            )
        else:
            self.conv = nn.Conv2d(width, self.width * (4 if self.how == "shuffle" else 1), 3, padding=1)
        self.norm = image_norm(draw, self.width)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "shuffle":
            x = F.pixel_shuffle(self.conv(x), 2)
        elif self.how == "nearest":
            x = self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))
        else:
            x = self.conv(x)
        return F.relu(self.norm(x))


class Focus(nn.Module):
    """Smaller image: every second pixel becomes a channel."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.slices = draw.choice((8, 12)), draw.random() < 0.5
        self.conv = nn.Conv2d(4 * width, self.width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.slices:
            x = torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
        else:
            x = F.pixel_unshuffle(x, 2)
        return F.silu(self.conv(x))


class ChannelShuffle(nn.Module):
    """Unit of ShuffleNet: a branch beside the other half, and channels shuffled."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, half = width, width // 2
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1),
            nn.ReLU(),
            nn.Conv2d(half, half, 3, padding=1, groups=half),
            nn.Conv2d(half, half, 1),
        )
        self.own = draw.random() < 0.7

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=1)
        x = torch.cat((one, self.branch(two)), dim=1)
        if not self.own:
            return F.channel_shuffle(x, 2)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, channels // 2, height, width)
        return torch.transpose(x, 1, 2).contiguous().view(batch, -1, height, width)


class PixelAttention(nn.Module):
    """Attention over the pixels of an image, with convolutions of one pixel."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.heads = width, divisor(draw, width)
        self.norm, self.qkv = nn.GroupNorm(divisor(draw, width), width), nn.Conv2d(width, 3 * width, 1)
        self.proj, self.sdpa = nn.Conv2d(width, width, 1), draw.random() < 0.5
        self.temperature = nn.Parameter(torch.ones(self.heads, 1, 1)) if draw.random() < 0.4 else None

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 3, self.heads, channels // self.heads, height * width).unbind(1)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT
        else:
            scores = q.transpose(-2, -1) @ k * (channels // self.heads) ** -0.5
            if self.temperature is not None:
                scores = scores * self.temperature
            y = v @ scores.softmax(-1).transpose(-2, -1)
        return cast(Tensor, x + self.proj(y.reshape(batch, channels, height, width)))


class Windows(nn.Module):
    """Attention in windows of an image, with a learned bias for each head and position (Swin)."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.heads, self.window = width, divisor(draw, width), 2
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        size, shift = self.window, self.window - 1
        self.table = nn.Parameter(torch.randn((2 * size - 1) ** 2, self.heads) / 4)
        places = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None] + shift
        self.register_buffer("index", apart[0] * (2 * size - 1) + apart[1], persistent=draw.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y, size = self.norm(x.permute(0, 2, 3, 1)), self.window
        _, height, width, channels = y.shape
        y = F.pad(y, (0, 0, 0, -width % size, 0, -height % size))
        batch, high, wide, _ = y.shape
        y = y.view(batch, high // size, size, wide // size, size, channels).transpose(2, 3)
        y = y.reshape(-1, size * size, channels)
        qkv = self.qkv(y).reshape(len(y), size * size, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        bias = self.table[self.index.view(-1)].view(size * size, size * size, -1).permute(2, 0, 1)  # type: ignore[operator]
        y = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + bias).softmax(-1) @ v
        y = self.proj(y.transpose(1, 2).reshape(len(y), size * size, channels))
        y = y.view(batch, high // size, wide // size, size, size, channels).transpose(2, 3)
        y = y.reshape(batch, high, wide, channels)[:, :height, :width]
        return cast(Tensor, x + y.permute(0, 3, 1, 2))


class Inception(nn.Module):
    """Branches of several kernels, put together along the channels."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(width, 4, 1), nn.Conv2d(width, 6, 3, padding=1)
        self.five = nn.Sequential(nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, (1, 3), padding=(0, 1)))
        self.pooled, self.norm, self.width = nn.Conv2d(width, 4, 1), image_norm(draw, 18), 18

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.max_pool2d(x, 3, stride=1, padding=1))
        return F.relu(self.norm(torch.cat([self.one(x), self.three(x), self.five(x), pooled], 1)))


class Unfolded(nn.Module):
    """Weighted sum over the neighbours of each pixel, whose weights another convolution computes (involution)."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.groups = width, divisor(draw, width)
        self.weights, self.mix = nn.Conv2d(width, self.groups * 9, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        weights = self.weights(x).view(batch, self.groups, 1, 9, height, width)
        patches = F.unfold(self.mix(x), 3, padding=1)
        patches = patches.view(batch, self.groups, channels // self.groups, 9, height, width)
        return cast(Tensor, (weights * patches).sum(3).view(batch, channels, height, width))


class Twice(nn.Module):
    """One convolution for an image and for its mirror image."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), image_norm(draw, width)
        self.sum = draw.random() < 0.5
        self.width = width if self.sum else 2 * width

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.norm(self.conv(x)), self.norm(self.conv(x.flip(-1)))
        return F.relu(one + two) if self.sum else torch.cat([one, two], 1)


class Pyramid(nn.Module):
    """Pooling in a row, put together (SPPF)."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.one, self.width = nn.Conv2d(width, 6, 1), draw.choice((8, 12))
        self.two = nn.Conv2d(24, self.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = [F.silu(self.one(x))]
        found.extend(F.max_pool2d(found[-1], 3, 1, 1) for _ in range(3))
        return F.silu(self.two(torch.cat(found, 1)))


class GatedConv(nn.Module):
    """Convolution whose other half is its gate."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.how = draw.choice((8, 12)), draw.choice(("glu", "chunk", "maxout"))
        self.conv = nn.Conv2d(width, 2 * self.width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.how == "glu":
            return F.glu(x, dim=1)
        if self.how == "chunk":
            value, gate = x.chunk(2, dim=1)
            return torch.tanh(value) * torch.sigmoid(gate)
        batch, channels, height, width = x.shape
        return x.view(batch, channels // 2, 2, height, width).amax(2)


class Hourglass(nn.Module):
    """Step of a U-Net: down, up to the size before, put together with what was before."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, inner = draw.choice((8, 12)), draw.choice((8, 16))
        self.down, self.middle = nn.Conv2d(width, inner, 3, 2, 1), ConvSame(draw, inner)
        self.up, self.out = nn.ConvTranspose2d(inner, 8, 2, 2), nn.Conv2d(8 + width, self.width, 3, padding=1)
        self.resize = draw.random() < 0.6

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.middle(F.relu(self.down(x))))
        if self.resize:
            y = F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False)
        elif y.shape[2:] != x.shape[2:]:
            y = y[:, :, : x.shape[2], : x.shape[3]]
        return F.relu(self.out(torch.cat([x, y], 1)))


class Coordinates(nn.Module):
    """Channels with the positions of the pixels, made in the forward (CoordConv)."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.how = draw.choice((8, 12)), draw.choice(("linspace", "arange", "zeros"))
        self.conv = nn.Conv2d(width + 2, self.width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        if self.how == "linspace":
            rows = torch.linspace(-1, 1, height, dtype=x.dtype, device=x.device).view(1, 1, height, 1)
            columns = torch.linspace(-1, 1, width, dtype=x.dtype, device=x.device).view(1, 1, 1, width)
            places = torch.cat([rows.expand(batch, 1, height, width), columns.expand(batch, 1, height, width)], 1)
        elif self.how == "arange":
            rows = torch.arange(height, device=x.device).type_as(x)[:, None].expand(height, width) / height
            columns = torch.arange(width, device=x.device).type_as(x)[None].expand(height, width) / width
            places = torch.stack([rows, columns]).unsqueeze(0).repeat(batch, 1, 1, 1)
        else:
            places = torch.zeros_like(x[:, :2])
        return F.relu(self.conv(torch.cat([x, places], dim=1)))


class ImageBranches(nn.Module):
    """Branches on the sizes of an image or batch."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.how = width, draw.choice(("odd", "square", "large", "batch", "rank", "small"))
        self.conv, self.other = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "odd":
            if x.shape[-1] % 2 != 0 or x.shape[-2] % 2 != 0:
                x = F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2))
            return F.relu(self.conv(x))
        if self.how == "square" and x.shape[-1] == x.shape[-2]:
            return F.relu(self.conv(x) + self.other(x).transpose(-1, -2))
        if self.how == "large" and x.shape[-1] > 10:
            return F.avg_pool2d(F.relu(self.conv(x)), 2)
        if self.how == "batch" and len(x) > 2:
            return F.relu(self.conv(x) - self.other(x))
        if self.how == "rank" and x.dim() != 4:
            raise ValueError(f"expected images, got {x.dim()} dimensions")
        if self.how == "small" and min(x.shape[-2:]) < 3:
            return F.relu(self.other(x))
        return F.relu(self.conv(x))


class Blur(nn.Module):
    """Depthwise convolution with fixed weights, a buffer."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.fixed = width, draw.random() < 0.5
        kernel = torch.tensor([1.0, 2.0, 1.0])
        kernel = (kernel[:, None] * kernel[None]) / 16
        self.register_buffer("kernel", kernel[None, None].repeat(width if self.fixed else 1, 1, 1, 1))
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, kernel = F.relu(self.conv(x)), cast(Tensor, self.kernel)
        weight = kernel if self.fixed else kernel.expand(x.shape[1], 1, 3, 3)
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), weight, stride=2, groups=x.shape[1])


IMAGE_LAYERS = (
    *(ConvBlock, ConvBlock, Inverted, Residual, Dense, CrossStage, ConvNext, Up, Focus, ChannelShuffle),
    *(PixelAttention, Windows, Inception, Unfolded, Twice, Pyramid, GatedConv, Hourglass, Coordinates, ImageBranches),
    Blur,
)


class Mlp(nn.Module):
    """Two linear layers with a shortcut."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, inner, self.post = width, draw.choice((16, 24)), draw.random() < 0.3
        self.norm = draw.choice((nn.LayerNorm, nn.LayerNorm, nn.RMSNorm))(width)
        self.fc1, self.fc2, self.act = nn.Linear(width, inner), nn.Linear(inner, width), activation(draw)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            return cast(Tensor, self.norm(x + self.drop(self.fc2(self.act(self.fc1(x))))))
        return cast(Tensor, x + self.drop(self.fc2(self.act(self.fc1(self.norm(x))))))


class GatedMlp(nn.Module):
    """MLP of Llama: a gate and a value, as two layers or as one packed layer."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.inner, self.packed = width, draw.choice((16, 24)), draw.choice(("", "chunk", "glu", "slices"))
        self.norm, self.down = nn.RMSNorm(width), nn.Linear(self.inner, width, bias=False)
        if self.packed:
            self.gate_up = nn.Linear(width, 2 * self.inner, bias=False)
        else:
            self.gate, self.up = nn.Linear(width, self.inner), nn.Linear(width, self.inner)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.packed == "glu":
            return cast(Tensor, x + self.down(F.glu(self.gate_up(y), -1)))
        if self.packed == "chunk":
            gate, up = self.gate_up(y).chunk(2, dim=-1)
        elif self.packed:
            both = self.gate_up(y)
            gate, up = both[..., : self.inner], both[..., self.inner :]
        else:
            gate, up = self.gate(y), self.up(y)
        return cast(Tensor, x + self.down(F.silu(gate) * up))


class SelfAttention(nn.Module):
    """Attention with queries, keys and values from one packed layer, and perhaps a mask made in the forward."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.heads, self.mask = width, divisor(draw, width), draw.choice(("", "triu", "buffer", "causal"))
        self.how = draw.choice(("permute", "chunk", "split", "einops"))
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        if self.mask == "buffer":
            self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x))
        if self.how == "permute":
            q, k, v = qkv.reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        elif self.how == "einops":
            q, k, v = (each.transpose(1, 2) for each in qkv.view(batch, length, 3, self.heads, -1).unbind(2))
        else:
            parts = qkv.chunk(3, -1) if self.how == "chunk" else qkv.split(self.width, dim=2)
            q, k, v = (each.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for each in parts)
        if self.mask == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            if self.mask == "triu":
                scores = scores + torch.triu(torch.full((length, length), float("-inf"), dtype=x.dtype), diagonal=1)
            elif self.mask:
                scores = scores.masked_fill(cast(Tensor, self.bias)[:, :, :length, :length] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return cast(Tensor, x + self.out(y.transpose(1, 2).contiguous().view(batch, length, width)))


class GroupedQueries(nn.Module):
    """Attention with fewer keys than queries, rotary positions and norms of queries and keys."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.size, self.heads, self.keys = width, 4, 4, draw.choice((1, 2))
        self.q, self.o = nn.Linear(width, self.heads * self.size, bias=False), nn.Linear(self.heads * self.size, width)
        self.k, self.v = (nn.Linear(width, self.keys * self.size, bias=False) for _ in range(2))
        self.how, self.rotary = draw.choice(("interleave", "expand", "enable")), draw.random() < 0.6
        self.norm_q = nn.RMSNorm(self.size) if draw.random() < 0.4 else nn.Identity()
        self.norm = nn.RMSNorm(width)

    def turned(self, x: Tensor) -> Tensor:
        """Return queries or keys turned by their positions."""
        steps = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
        angles = torch.outer(steps, 1.0 / 100 ** (torch.arange(0, self.size, 2, dtype=x.dtype) / self.size))
        angles = torch.cat([angles, angles], dim=-1)
        one, two = x[..., : self.size // 2], x[..., self.size // 2 :]
        return x * angles.cos() + torch.cat((-two, one), dim=-1) * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        batch, length, _ = y.shape
        q = self.norm_q(self.q(y).view(batch, length, self.heads, self.size)).transpose(1, 2)
        k, v = (each(y).view(batch, length, self.keys, self.size).transpose(1, 2) for each in (self.k, self.v))
        if self.rotary:
            q, k = self.turned(q), self.turned(k)
        times = self.heads // self.keys
        if self.how == "interleave":
            k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
        elif self.how == "expand":
            k, v = (
                each[:, :, None]
                .expand(batch, self.keys, times, length, self.size)
                .reshape(batch, -1, length, self.size)
                for each in (k, v)
            )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.how == "enable")
        return cast(Tensor, x + self.o(y.transpose(1, 2).reshape(batch, length, -1)))


class StockAttention(nn.Module):
    """`nn.MultiheadAttention`, with batch or length first, weights or none, and perhaps a mask."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.first, self.masked = width, draw.random() < 0.6, draw.random() < 0.4
        self.weights = draw.random() < 0.3
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, divisor(draw, width), batch_first=self.first)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) if self.first else self.norm(x).transpose(0, 1)
        mask = None
        if self.masked:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y, _ = self.attention(y, y, y, attn_mask=mask, need_weights=self.weights)
        return cast(Tensor, x + (y if self.first else y.transpose(0, 1)))


class StockEncoder(nn.Module):
    """`nn.TransformerEncoderLayer`."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.TransformerEncoderLayer(
            width, divisor(draw, width), 24, batch_first=True, norm_first=draw.random() < 0.5, activation="gelu"
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x))


class Recurrent(nn.Module):
    """Recurrent layers of any kind, with batch or length first."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        kind, units = draw.choice((nn.LSTM, nn.LSTM, nn.GRU, nn.RNN)), draw.choice((6, 10))
        both, self.first = draw.random() < 0.4, draw.random() < 0.6
        projected = {"proj_size": draw.choice((3, 4))} if kind is nn.LSTM and draw.random() < 0.3 else {}
        self.rnn = kind(
            width, units, num_layers=draw.choice((1, 1, 2)), bidirectional=both, batch_first=self.first, **projected
        )
        self.width, self.out = draw.choice((width, 12)), nn.Identity()
        self.out = nn.Linear((1 + both) * projected.get("proj_size", units), self.width)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x if self.first else x.transpose(0, 1))
        return cast(Tensor, self.out(y if self.first else y.transpose(0, 1)))


class Temporal(nn.Module):
    """Convolutions over time: causal, depthwise, gated."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.dilation, self.gated = width, draw.choice((1, 2)), draw.random() < 0.5
        inner = 2 * width if self.gated else width
        self.conv = nn.Conv1d(width, inner, 3, dilation=self.dilation, groups=draw.choice((1, width)))
        self.norm, self.point = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(F.pad(x.transpose(1, 2), (2 * self.dilation, 0)))
        if self.gated:
            y = F.glu(y, dim=1)
        return cast(Tensor, x + self.point(F.silu(self.norm(y))).transpose(1, 2))


class TransposedLinear(nn.Module):
    """Linear layer whose weight has inputs first, as in GPT-2."""

    def __init__(self, inputs: int, outputs: int, add: bool) -> None:
        super().__init__()
        self.outputs, self.add = outputs, add
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 4), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.add:
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.outputs)
        return x @ self.weight + self.bias


class TransposedMlp(nn.Module):
    """MLP of GPT-2."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, inner, add = width, draw.choice((16, 24)), draw.random() < 0.6
        self.norm = nn.LayerNorm(width)
        self.fc, self.proj = TransposedLinear(width, inner, add), TransposedLinear(inner, width, add)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.proj(F.gelu(self.fc(self.norm(x)), approximate="tanh")))


class Experts(nn.Module):
    """Mixture of experts whose matrices lie in one tensor."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.how, experts = width, draw.choice(("einsum", "bmm", "matmul", "loop")), 3
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 12) / 4)
        self.down = nn.Parameter(torch.randn(experts, 12, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        batch, length, width = x.shape
        if self.how == "einsum":
            hidden = F.silu(torch.einsum("btc,ech->bteh", x, self.up))
            y = torch.einsum("bteh,ehc,bte->btc", hidden, self.down, weights)
        elif self.how == "bmm":
            flat = x.reshape(1, -1, width).expand(len(self.up), -1, -1)
            each = torch.bmm(F.silu(torch.bmm(flat, self.up)), self.down)
            y = (each * weights.reshape(-1, len(self.up)).t()[..., None]).sum(0).view(batch, length, width)
        elif self.how == "matmul":
            each = F.silu(x.unsqueeze(1) @ self.up) @ self.down
            y = (each * weights.transpose(1, 2).unsqueeze(-1)).sum(1)
        else:
            y = torch.zeros_like(x)
            for i in range(len(self.up)):
                y = y + weights[..., i : i + 1] * (F.silu(x @ self.up[i]) @ self.down[i])
        return x + y


class Biased(nn.Module):
    """Attention with a bias for each head: learned by distance, or ALiBi's slopes."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.heads = width, divisor(draw, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.table = nn.Embedding(33, self.heads) if draw.random() < 0.5 else None
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 1 + self.heads))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        steps = torch.arange(length, device=x.device)
        apart = steps[None, :] - steps[:, None]
        if self.table is not None:
            bias = self.table(apart.clamp(-16, 16) + 16).permute(2, 0, 1)[None]
        else:
            bias = -apart.abs().to(x.dtype)[None] * cast(Tensor, self.slopes).view(-1, 1, 1)
        y = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]) + bias, -1) @ v
        return cast(Tensor, x + self.o(y.transpose(1, 2).flatten(2)))


class LinearAttention(nn.Module):
    """Attention without a softmax over positions."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.heads = width, divisor(draw, width)
        self.to_qkv, self.out, self.sum = nn.Linear(width, 3 * width), nn.Linear(width, width), draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in self.to_qkv(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.sum:
            both = torch.einsum("bthd,bthe->bhde", k, v)
            y = torch.einsum("bthd,bhde->bthe", q, both)
        else:
            y = (q.transpose(1, 2) @ (k.permute(0, 2, 3, 1) @ v.transpose(1, 2))).transpose(1, 2)
        return cast(Tensor, x + self.out(y.flatten(-2) / x.shape[1]))


class Latents(nn.Module):
    """Attention of learned queries to a sequence, and back."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.latents = width, nn.Parameter(torch.randn(1, 3, width) / 4)
        self.read, self.write = (nn.MultiheadAttention(width, divisor(draw, width), batch_first=True) for _ in range(2))
        self.repeat = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        own = self.latents.repeat(x.shape[0], 1, 1) if self.repeat else self.latents.expand(len(x), -1, -1)
        own = own + self.read(own, x, x, need_weights=False)[0]
        return cast(Tensor, x + self.write(x, own, own, need_weights=False)[0])


class RunningMean(nn.Module):
    """Mean of all steps so far, with counts made in the forward."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.mix, self.like = width, nn.Linear(2 * width, width), draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.like:
            counts = torch.ones_like(x[..., :1]).cumsum(1)
        else:
            counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device).view(1, -1, 1)
        return cast(Tensor, self.mix(torch.cat([x, x.cumsum(1) / counts], dim=-1)))


class Shared(nn.Module):
    """One layer that is called twice."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.layer = width, draw.choice((Mlp, GatedMlp, SelfAttention))(draw, width)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(self.layer(x)))


class UnevenPieces(nn.Module):
    """Pieces of unequal sizes with a layer each."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.sizes, self.mix = [4, width, 6], nn.Linear(width, 10 + width)
        self.one, self.two = nn.Linear(4, 6), nn.Linear(width, 6)
        self.width, self.stack = 6, draw.random() < 0.4

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.mix(x).split(self.sizes, dim=-1)
        if self.stack:
            return torch.stack([self.one(one), F.relu(self.two(two)), three]).mean(0)
        return cast(Tensor, self.one(one) + F.relu(self.two(two)) * torch.sigmoid(three))


class SequenceNorm(nn.Module):
    """Normalisation of a sequence by GroupNorm or BatchNorm over transposed channels."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.mix = draw.choice((8, 12)), nn.Identity()
        self.mix = nn.Linear(width, self.width)  # type: ignore[assignment]
        self.norm = draw.choice((lambda: nn.GroupNorm(4, self.width), lambda: nn.BatchNorm1d(self.width)))()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.mix(x).permute(0, 2, 1))).permute(0, 2, 1)


class SequenceBranches(nn.Module):
    """Branches on the length or batch of a sequence."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.how = width, draw.choice(("even", "longer", "one", "batch", "hooked"))
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "even" and x.size(1) % 2 == 0:
            return torch.tanh(self.one(x) + self.two(x).flip(1))
        if self.how == "longer" and x.shape[1] > 7:
            x = x[:, -7:]
        if self.how == "one" and x.size(1) != 1:
            x = x - x.mean(1, keepdim=True)
        if self.how == "batch" and x.shape[0] == 2:
            x = x * 2
        return F.relu(self.one(x))


class Heads(nn.Module):
    """A list of heads, each with layers of its own."""

    def __init__(self, _: Random, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, 4) for _ in range(3))
        self.mix, self.width, self.scales = nn.Linear(12, width), width, nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        found = [F.relu(head(x)) * scale for head, scale in zip(self.heads, self.scales, strict=True)]
        return cast(Tensor, x + self.mix(torch.cat(found, -1)))


SEQUENCE_LAYERS = (
    *(Mlp, GatedMlp, SelfAttention, SelfAttention, GroupedQueries, StockAttention, StockEncoder, Recurrent, Recurrent),
    *(Temporal, TransposedMlp, Experts, Biased, LinearAttention, Latents, RunningMean, Shared, UnevenPieces),
    *(SequenceNorm, SequenceBranches, Heads),
)


class LinearBlock(nn.Module):
    """Linear layer, normalisation and activation."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width = draw.choice((12, 16, 24))
        self.fc = nn.Linear(width, self.width, bias=draw.random() < 0.7)
        self.norm = draw.choice((nn.BatchNorm1d, nn.LayerNorm, nn.Identity))(self.width)
        self.act = activation(draw)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.act(self.norm(self.fc(x))))


class Highway(nn.Module):
    """Gate between a layer and its input."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.value, self.gate = width, nn.Linear(width, width), nn.Linear(width, width)
        self.lerp = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        value = F.relu(self.value(x))
        return torch.lerp(x, value, gate) if self.lerp else gate * value + (1 - gate) * x


class Ensemble(nn.Module):
    """Several matrices in one tensor, each with a bias."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.width, self.how = 10, draw.choice(("einsum", "baddbmm", "matmul"))
        self.weight = nn.Parameter(torch.randn(3, width, self.width) / 3)
        self.bias = nn.Parameter(torch.zeros(3, 1, self.width))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "einsum":
            each = torch.einsum("bi,eio->ebo", x, self.weight) + self.bias
        elif self.how == "baddbmm":
            each = torch.baddbmm(self.bias, x.expand(3, *x.shape), self.weight)
        else:
            each = x @ self.weight + self.bias
        return F.relu(each).mean(0)


class Cross(nn.Module):
    """Products of features (deep and cross network), or a bilinear layer."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.bilinear, self.width = draw.random() < 0.4, width
        self.fc: nn.Module = nn.Bilinear(width, width, width) if self.bilinear else nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x, x)) if self.bilinear else x + x * self.fc(x)


class Folded(nn.Module):
    """Vector that becomes an image, goes through a convolution, and becomes a vector."""

    def __init__(self, draw: Random, width: int) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(width, 6 * 16), nn.Conv2d(6, 8, 3, padding=1)
        self.literal, self.width = draw.random() < 0.5, 8 * 4

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y = y.view(-1, 6, 4, 4) if self.literal else y.unflatten(1, (6, 4, 4))
        return F.max_pool2d(F.relu(self.conv(y)), 2).flatten(1)


VECTOR_LAYERS = (LinearBlock, LinearBlock, LinearBlock, Highway, Ensemble, Cross, Folded)


def width_of(layer: Any) -> int:
    """Return the number of channels that a layer puts out."""
    return int(layer.width)
