"""The files that masks are stored in: npz or safetensors, read without pickle (or torch), equal for equal masks.

A file has one member a tensor that holds the packed mask (`packing`) as uint8, and the member `HEADER`: JSON with the
format's name and version, each tensor's shape and the CRC-32 of its member, and the digest of the whole. A member is
named as the parameter; where the formats cannot hold that name, the header says which member it is.
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

from pruning.masks.packing import Bytes, pack, unpack

FORMAT = "pruning-masks"
VERSION = 1
HEADER = "__header__"
RESERVED = (HEADER, "__metadata__")
"""Beginnings of members' names that are this format's own, or that of safetensors."""
LONGEST = 60_000
"""Bytes of a member's name: zip has room for 65,535."""

DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError),
    *(OSError, EOFError, struct.error, zlib.error, zipfile.BadZipFile),
)
"""What reading a truncated or altered file raises, somewhere below."""

Writer = Callable[[Mapping[str, Bytes]], bytes]
Members = Callable[[str], Bytes]
"""Reads a member of a file by its name; raises one of `DAMAGE`."""
Reader = Callable[[bytes], Members]


def encode(masks: Mapping[str, NDArray[np.bool_]], digest: str) -> dict[str, Bytes]:
    """Return the members of a file: the header first, then the packed masks.

    Raises:
        ValueError: a name is not text that UTF-8 can hold.
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
    """Say whether a member of a file may be named as a tensor; zip ends names at NUL and may replace backslashes."""
    try:
        size = len(name.encode())
    except (AttributeError, UnicodeEncodeError) as error:
        raise ValueError(
            f"`{name!r}` cannot name a mask in a file ({error}); rename it to text that UTF-8 can hold."
        ) from error
    return size <= LONGEST and not name.startswith(RESERVED) and not set(name) & {"\0", "\\"}


def decode(
    members: Members, check: Callable[[str, Sequence[int]], object] | None = None
) -> tuple[dict[str, NDArray[np.bool_]], str]:
    """Return the masks and the digest that `encode` was given.

    Args:
        members: of a file.
        check: is called with the name and the shape of every mask before memory is taken for any, and raises
            `ValueError` if it is not the one expected.

    Raises:
        ValueError: a member is missing or damaged, and then it is named; or the header is not one of ours.
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
                raise ValueError("its checksum is wrong")
            masks[name] = unpack(packed, math.prod(shape)).reshape(shape)
        except DAMAGE as error:
            raise ValueError(f"The mask of `{name}` is damaged: {error}.") from error
    return masks, digest


def write_npz(members: Mapping[str, Bytes]) -> bytes:
    """Return an npz file that `numpy.load` reads, without the time of writing."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in members.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # else the bytes would tell on which system they were written
            archive.writestr(info, member.getvalue())
    return file.getvalue()


def read_npz(data: bytes) -> Members:
    """Open what `write_npz` wrote; members are read when they are asked for."""
    try:
        archive = np.load(io.BytesIO(data), allow_pickle=False)
    except DAMAGE as error:
        raise ValueError(f"These masks are no npz file, or a damaged one: {error}.") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError("These masks are no npz file but a single array.")
    zipped: Any = archive.zip
    if sum(member.file_size for member in zipped.infolist()) > len(data):
        raise ValueError("These masks are no npz file of ours, which is never compressed.")
    return lambda name: archive[f"{name}.npy"]  # as it stands: without .npy, `a` is found for `a.npy`


def write_safetensors(members: Mapping[str, Bytes]) -> bytes:
    """Return a safetensors file of the members."""
    from safetensors.numpy import save

    return bytes(save(dict(members)))


def read_safetensors(data: bytes) -> Members:
    """Read what `write_safetensors` wrote."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        members: dict[str, Bytes] = load(data)
    except (SafetensorError, *DAMAGE) as error:  # a dtype that NumPy lacks, among others
        raise ValueError(f"These masks are no safetensors file, or a damaged one: {error}.") from error
    return members.__getitem__


FORMATS: Mapping[str, tuple[Writer, Reader]] = {
    ".npz": (write_npz, read_npz),
    ".safetensors": (write_safetensors, read_safetensors),
}
"""Suffix -> how to write and how to read such a file."""


def format_of(path: str | Path) -> tuple[Writer, Reader]:
    """Return how to write and how to read the file at `path`, by its suffix."""
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
            raise ValueError(f"version {header['version']!r} is not {VERSION}; use the release that wrote them")
        tensors = {
            str(name): (str(t.get("member", name)), [int(n) for n in t["shape"]], int(t["crc"]))
            for name, t in header["tensors"].items()
        }
        if any(n < 0 for _, shape, _ in tensors.values() for n in shape):
            raise ValueError("a shape is negative")
        return tensors, str(header["digest"])
    except DAMAGE as error:
        raise ValueError(f"The header of these masks is damaged, or not of this format: {error}.") from error
