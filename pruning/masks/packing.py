"""Packing of a mask into few bytes: packed bits, or gaps between its rarer entries, whichever is smaller.

A random mask of n entries, of which a fraction p is kept, has n H(p) bits of information, with
H(p) = -p log2 p - (1 - p) log2 (1 - p). Gaps between independent entries have a geometric distribution. Each gap is
divided by a power of two into a quotient and a remainder (Golomb and Rice), and the quotients get a Huffman code. The
result is one or two percent larger than n H(p). Masks with a pattern (whole channels) are repetitive, and DEFLATE
compresses them in either form.

    byte 0      0: bits, row-major, the first entry in a byte's highest bit; DEFLATE follows
                1: gaps
    gaps        byte 1: the rarer value; byte 2: b, the bits of a remainder
                then DEFLATE of the quotients (byte 255: add 255 and read on), then the remainders, b bits each
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

BITS, GAPS = 0, 1
RARE = 0.4
"""Largest fraction of the rarer value for which gaps are tried."""

PIECE = 2**16
"""Number of bytes of quotients that are read at a time."""

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]


def pack(mask: Bools) -> bytes:
    """Pack a flat bool array into bytes; `unpack` also needs the size of the array."""
    packed = bytes([BITS]) + _deflate(np.packbits(mask).tobytes())
    kept = int(np.count_nonzero(mask))
    if min(kept, mask.size - kept) <= RARE * mask.size:
        packed = min(packed, _pack_gaps(mask, rare=kept <= mask.size - kept), key=len)
    return packed


def unpack(packed: bytes, size: int) -> Bools:
    """Unpack bytes of `pack` to a flat bool array of `size` entries.

    Raises:
        ValueError: the bytes do not encode a mask of this size.
    """
    if packed[:1] == bytes([BITS]):
        bits, rest = _inflate(packed[1:], (size + 7) // 8)
        if rest or len(bits) != (size + 7) // 8:
            raise ValueError(f"its number of bits is not that of {size} entries")
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=size).view(np.bool_)
    if packed[:1] == bytes([GAPS]) and len(packed) > 3 and packed[1] <= 1 and packed[2] < 63:
        return _unpack_gaps(packed, size)
    raise ValueError("its encoding is unknown")


def _pack_gaps(mask: Bools, rare: bool) -> bytes:
    positions = np.flatnonzero(mask == rare)
    gaps = np.diff(positions, prepend=-1) - 1
    mean = mask.size / max(1, positions.size)
    width = max(0, math.floor(math.log2(max(1.0, mean))) - 5)
    escapes, last = np.divmod(gaps >> width, 255)
    quotients = np.full(gaps.size + int(escapes.sum()), 255, np.uint8)
    quotients[np.cumsum(escapes + 1) - 1] = last
    remainders = (gaps[:, None] >> np.arange(width)) & 1
    return (
        bytes([GAPS, rare, width])
        + _deflate(quotients.tobytes())
        + np.packbits(remainders.astype(np.uint8).reshape(-1)).tobytes()
    )


def _unpack_gaps(packed: bytes, size: int) -> Bools:
    """Read gaps piece by piece, so that a forged file cannot make it use more than a few bytes per entry."""
    rare, width = bool(packed[1]), packed[2]
    inflated, rest = _inflate(packed[3:], size)
    quotients, bits = np.frombuffer(inflated, np.uint8), np.frombuffer(rest, np.uint8)
    count = int(np.count_nonzero(quotients != 255))
    if quotients[-1:].tolist() == [255]:
        raise ValueError("its last gap is cut off")
    if len(rest) != (count * width + 7) // 8:
        raise ValueError("its gaps are cut off")
    mask: Bools = np.full(size, not rare)
    done, quotient, remainder = 0, 0, 0  # gaps read so far, and the sums of their quotients and remainders
    for start in range(0, quotients.size, PIECE):
        piece = quotients[start : start + PIECE]
        ends = np.flatnonzero(piece != 255)
        upper = quotient + np.cumsum(piece, dtype=np.int64)
        if upper[-1] > size >> width:
            raise ValueError(f"its gaps reach beyond {size} entries")
        first, last = done * width, (done + ends.size) * width
        found = np.unpackbits(bits[first // 8 : (last + 7) // 8])[first % 8 :][: ends.size * width]
        lower = remainder + np.cumsum(found.reshape(ends.size, width) @ (1 << np.arange(width, dtype=np.int64)))
        positions = (upper[ends] << width) + lower + np.arange(done, done + ends.size)
        if positions.size:
            if not 0 <= positions.min() <= positions.max() < size:
                raise ValueError(f"its gaps reach beyond {size} entries")
            mask[positions] = rare
            remainder = int(lower[-1])
        done, quotient = done + ends.size, int(upper[-1])
    return mask


def _deflate(data: bytes) -> bytes:
    def with_strategy(strategy: int) -> bytes:
        stream = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, strategy)
        return stream.compress(data) + stream.flush()

    # A search for repetitions makes the code of random bytes longer, but the code of a pattern much shorter.
    return min(with_strategy(zlib.Z_HUFFMAN_ONLY), with_strategy(zlib.Z_DEFAULT_STRATEGY), key=len)


def _inflate(data: bytes, limit: int) -> tuple[bytes, bytes]:
    """Return the inflated bytes and the bytes after the stream; `limit` keeps a forged file from filling the memory.

    Raises:
        ValueError: the stream is damaged, or inflates to more than `limit` bytes.
    """
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        inflated = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise ValueError(f"it does not decompress ({error})") from error
    if not stream.eof or len(inflated) > limit:
        raise ValueError("it does not end where it should")
    return inflated, stream.unused_data
