"""A mask as few bytes: packed bits, or the gaps between its rarer entries, whichever is smaller.

A mask of n entries of which a fraction p is kept carries n H(p) bits, H(p) = -p log2 p - (1 - p) log2 (1 - p), if
nothing is known of it. Gaps between independent entries are geometrically distributed; cut into quotient and
remainder by a power of two (Golomb and Rice) and with the quotients under a Huffman code they take a percent or two
more than that. Masks with a pattern (whole channels) are repetitive, which DEFLATE finds in either form.

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
"""Gaps are tried where the rarer value takes up to this fraction of the entries."""

PIECE = 2**16
"""Gaps that are read at a time."""

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]


def pack(mask: Bools) -> bytes:
    """Return the bytes of a flat bool array; `unpack` needs its size as well."""
    packed = bytes([BITS]) + _deflate(np.packbits(mask).tobytes())
    kept = int(np.count_nonzero(mask))
    if min(kept, mask.size - kept) <= RARE * mask.size:
        packed = min(packed, _pack_gaps(mask, rare=kept <= mask.size - kept), key=len)
    return packed


def unpack(packed: bytes, size: int) -> Bools:
    """Return the flat bool array of `size` entries that `pack` was given.

    Raises:
        ValueError: the bytes are not those of such a mask.
    """
    if packed[:1] == bytes([BITS]):
        bits, rest = _inflate(packed[1:], (size + 7) // 8)
        if rest or len(bits) != (size + 7) // 8:
            raise ValueError(f"its bits are not those of {size} entries")
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
    """Read gaps piece by piece: however many a forged file claims, memory is a few bytes for each entry."""
    rare, width = bool(packed[1]), packed[2]
    inflated, rest = _inflate(packed[3:], size)
    quotients, bits = np.frombuffer(inflated, np.uint8), np.frombuffer(rest, np.uint8)
    count = int(np.count_nonzero(quotients != 255))
    if quotients[-1:].tolist() == [255]:
        raise ValueError("its last gap is cut off")
    if len(rest) != (count * width + 7) // 8:
        raise ValueError("its gaps are cut off")
    mask: Bools = np.full(size, not rare)
    done, quotient, remainder = 0, 0, 0  # gaps, and the sums of both their parts
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

    # Searching for repetitions in random bytes only spoils their Huffman code; in a pattern it is everything.
    return min(with_strategy(zlib.Z_HUFFMAN_ONLY), with_strategy(zlib.Z_DEFAULT_STRATEGY), key=len)


def _inflate(data: bytes, limit: int) -> tuple[bytes, bytes]:
    """Return at most `limit` inflated bytes, so that a forged file cannot fill the memory, and what follows them."""
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        inflated = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise ValueError(f"it does not decompress ({error})") from error
    if not stream.eof or len(inflated) > limit:
        raise ValueError("it does not end where it should")
    return inflated, stream.unused_data
