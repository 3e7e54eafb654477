"""Mask files: npz or safetensors, read without pickle or torch; equal masks give equal bytes.

A file has one member per tensor with its packed mask as uint8, and the member `HEADER`. The header is JSON with the
format's name and version, the shape of each tensor, the CRC-32 of each member, and the digest of all masks. A member
has the name of its parameter; if the formats cannot store that name, the header maps it to another member name.

A mask is packed as bits, or as gaps between its rarer entries, whichever is smaller. A random mask of n entries, of
which a fraction p is kept, has n H(p) bits of information, with H(p) = -p log2 p - (1 - p) log2 (1 - p). Gaps between
independent entries have a geometric distribution. Each gap is divided by a power of two into a quotient and a remainder
(Golomb and Rice), and the quotients get a Huffman code. The result is one or two percent larger than n H(p). Masks with
a pattern (whole channels) are repetitive, and DEFLATE compresses them in either form.

    byte 0      0: bits, row-major, the first entry in a byte's highest bit; DEFLATE follows
                1: gaps
    gaps        byte 1: the rarer value; byte 2: b, the bits of a remainder
                then DEFLATE of the quotients (byte 255: add 255 and read on), then the remainders, b bits each
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
        raise ValueError("it ends within the quotient of a gap")
    if len(rest) != (count * width + 7) // 8:
        raise ValueError("it has more or fewer remainders than gaps")
    mask: Bools = np.full(size, not rare)
    done, quotient, remainder = 0, 0, 0  # number of gaps read, the sum of their quotients, the sum of their remainders
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


FORMAT = "pruning-masks"
VERSION = 1
HEADER = "__header__"
RESERVED = (HEADER, "__metadata__")
"""Prefixes of member names that this format or safetensors reserves."""
LONGEST = 60_000
"""Maximum length of a member's name in bytes; the limit of zip is 65,535."""

DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError),
    *(OSError, EOFError, struct.error, zlib.error, zipfile.BadZipFile),
)
"""Errors that libraries raise when they read a truncated or altered file."""

Writer = Callable[[Mapping[str, Bytes]], bytes]
Members = Callable[[str], Bytes]
"""Function that reads a member of a file by its name; raises one of `DAMAGE`."""
Reader = Callable[[bytes], Members]


def encode(masks: Mapping[str, NDArray[np.bool_]], digest: str) -> dict[str, Bytes]:
    """Encode masks as the members of a file: the header first, then the packed masks.

    Raises:
        ValueError: UTF-8 cannot encode a name.
    """
    packed, tensors = dict[str, bytes](), dict[str, dict[str, Any]]()
    for index, (name, mask) in enumerate(masks.items()):
        member = name if _is_member_name(name) else f"{HEADER}{index}"
        packed[member] = pack(mask.reshape(-1))
        tensors[name] = {"shape": list(mask.shape), "crc": zlib.crc32(packed[member])}
        if member != name:
            tensors[name]["member"] = member
    header = {"format": FORMAT, "version": VERSION, "digest": digest, "tensors": tensors}
    members = {HEADER: json.dumps(header, separators=(",", ":")).encode(), **packed}
    return {name: np.frombuffer(data, np.uint8) for name, data in members.items()}


def _is_member_name(name: str) -> bool:
    """Return whether a member can have a tensor's name; zip ends names at NUL and may replace backslashes."""
    try:
        size = len(name.encode())
    except (AttributeError, UnicodeEncodeError) as error:
        raise ValueError(
            f"`{name!r}` cannot be the name of a mask in a file ({error}); rename it to text that UTF-8 can encode."
        ) from error
    return size <= LONGEST and not name.startswith(RESERVED) and not set(name) & {"\0", "\\"}


def decode(
    members: Members, check: Callable[[str, Sequence[int]], object] | None = None
) -> tuple[dict[str, NDArray[np.bool_]], str]:
    """Decode the members of a file; return the masks and their stored digest.

    Args:
        members: function that reads a member by its name.
        check: called with the name and shape of every mask before memory for any mask is allocated; raises
            `ValueError` if a mask is not expected.

    Raises:
        ValueError: a member is missing or damaged (the message names it), or the header has another format.
    """
    tensors, digest = _header(members)
    for name, (_, shape, _) in tensors.items():
        if check is not None:
            check(name, shape)
    masks = {}
    for name, (member, shape, crc) in tensors.items():
        try:
            packed = members(member).tobytes()
            if zlib.crc32(packed) != crc:
                raise ValueError("its checksum differs")
            masks[name] = unpack(packed, math.prod(shape)).reshape(shape)
        except DAMAGE as error:
            raise ValueError(f"The mask of `{name}` is damaged: {error}.") from error
    return masks, digest


def write_npz(members: Mapping[str, Bytes]) -> bytes:
    """Return an npz file that `numpy.load` reads; it holds no time stamp."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in members.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # else the bytes would depend on the operating system
            archive.writestr(info, member.getvalue())
    return file.getvalue()


def read_npz(data: bytes) -> Members:
    """Open an npz file of `write_npz`; a member is read on demand.

    Raises:
        ValueError: the file is damaged, compressed, or no npz file.
    """
    try:
        archive = np.load(io.BytesIO(data), allow_pickle=False)
    except DAMAGE as error:
        raise ValueError(f"The mask file is no npz file, or it is damaged: {error}.") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError("The mask file is no npz file but a single array.")
    zipped: Any = archive.zip
    if sum(member.file_size for member in zipped.infolist()) > len(data):
        raise ValueError("The mask file is a compressed npz file; mask files are never compressed.")
    return lambda name: archive[f"{name}.npy"]  # the full name: without .npy, NumPy would take `a` for `a.npy`


def write_safetensors(members: Mapping[str, Bytes]) -> bytes:
    """Return a safetensors file with these members."""
    from safetensors.numpy import save

    return bytes(save(dict(members)))


def read_safetensors(data: bytes) -> Members:
    """Open a safetensors file of `write_safetensors`.

    Raises:
        ValueError: the file is damaged, or no safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        members: dict[str, Bytes] = load(data)
    except (SafetensorError, *DAMAGE) as error:  # for example a dtype that NumPy lacks
        raise ValueError(f"The mask file is no safetensors file, or it is damaged: {error}.") from error
    return members.__getitem__


FORMATS: Mapping[str, tuple[Writer, Reader]] = {
    ".npz": (write_npz, read_npz),
    ".safetensors": (write_safetensors, read_safetensors),
}
"""Suffix of a file -> its writer and its reader."""


def format_of(path: str | Path) -> tuple[Writer, Reader]:
    """Return the writer and the reader for the suffix of `path`."""
    suffix = Path(path).suffix
    if suffix not in FORMATS:
        raise ValueError(f"`path` (={str(path)!r}) must end in {' or '.join(FORMATS)}.")
    return FORMATS[suffix]


def _header(members: Members) -> tuple[dict[str, tuple[str, list[int], int]], str]:
    """Return name of a tensor -> its member, shape and checksum, and the digest."""
    try:
        header: Any = json.loads(members(HEADER).tobytes())
        if header["format"] != FORMAT:
            raise ValueError(f"the format {header['format']!r} is not {FORMAT!r}")
        if header["version"] != VERSION:
            raise ValueError(f"version {header['version']!r} is not {VERSION}; use the release that wrote the file")
        tensors = {
            str(name): (str(t.get("member", name)), [int(n) for n in t["shape"]], int(t["crc"]))
            for name, t in header["tensors"].items()
        }
        if any(n < 0 for _, shape, _ in tensors.values() for n in shape):
            raise ValueError("a shape is negative")
        return tensors, str(header["digest"])
    except DAMAGE as error:
        raise ValueError(f"The header of the mask file is damaged, or has another format: {error}.") from error
