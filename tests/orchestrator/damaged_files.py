"""Files of stages as somebody hostile would write them: each operator takes a file and a random generator."""

from __future__ import annotations

import io
import json
import math
import random
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from pruning.masks import mask_files as mask_files
from pruning.masks.mask_files import HEADER

HUGE = 3 * 10**9
ODD: tuple[Any, ...] = (None, True, -1, 7, 2**62, 10**30, 1.5, "x", "\x1b[2J", [], [7], {}, {"a": 1}, [HUGE])
SHAPES: tuple[Any, ...] = (
    *([-1], [HUGE], [2**62, 4], [0, 2**62], [2**32, 2**32], [1] * 70, [1.5], ["x"], None, {}, [2**64], [True], []),
)
OFFSETS: tuple[Any, ...] = ([-4, 0], [0, 2**62], [8, 0], [0, 4], [2**63, 2**63 + 4], [1, 5], [0], [], None, "x", [4, 4])
DTYPES = ("F64", "F16", "BF16", "I64", "I8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64", "Q9", "")

Damage = Callable[[bytes, random.Random], bytes]


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 5, 50])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def longer(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(100)


def noise(_: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice([0, 1, 7, 9, 5000]))


# --- safetensors: the length of a header, the header, the bytes of all tensors ---


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def closed(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def entry(change: Callable[[dict[str, Any], str, random.Random], object]) -> Damage:
    """Return what changes the header by the name of one of its tensors."""

    def damaged(data: bytes, draw: random.Random) -> bytes:
        header, body = opened(data)
        change(header, draw.choice(sorted(header)), draw)
        return closed(header, body)

    return damaged


def reshaped(header: dict[str, Any], name: str, draw: random.Random) -> None:
    """Give a tensor another shape of as many entries: the file is sound, and another network's."""
    count = math.prod(header[name]["shape"])
    header[name]["shape"] = draw.choice([[count], [1, count], [count, 1, 1]])


TENSORS: Mapping[str, Damage] = {
    "flipped": flipped,
    "cut": cut,
    "longer": longer,
    "noise": noise,
    "length": lambda data, draw: draw.choice([0, 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:],
    "no JSON": lambda data, draw: closed(draw.choice([b"[" * 9000, b"[]", b"7", b'{"a":' * 9000]), opened(data)[1]),
    "shape": entry(lambda header, name, draw: header[name].update(shape=draw.choice(SHAPES))),
    "offsets": entry(lambda header, name, draw: header[name].update(data_offsets=draw.choice(OFFSETS))),
    "dtype": entry(lambda header, name, draw: header[name].update(dtype=draw.choice(DTYPES))),
    "key": entry(lambda header, name, draw: header[name].pop(draw.choice(sorted(header[name])))),
    "odd": entry(lambda header, name, draw: header.update({name: draw.choice(ODD)})),
    "gone": entry(lambda header, name, _: header.pop(name)),
    "renamed": entry(
        lambda header, name, draw: header.update({draw.choice(["", "\x1b[2J", "x" * 9000]): header[name]})
    ),
    "overlapping": entry(lambda header, name, _: header.update(extra=dict(header[name]))),
    "reshaped": entry(reshaped),
    "another network's": lambda _, draw: save({"fc1.weight": np.zeros(draw.choice([(0,), (3, 3)]), np.float32)}),
}


# --- masks: an npz with a member a tensor, and one that says their shapes ---


def archive(members: Mapping[str, bytes], header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    arrays = {HEADER: text, **{name: data for name, data in members.items() if name != HEADER}}
    return mask_files.write_npz({name: np.frombuffer(data, np.uint8) for name, data in arrays.items()})


def member(change: Callable[[dict[str, bytes], dict[str, Any], str, random.Random], object]) -> Damage:
    """Return what changes the members and their header by the name of one of the tensors."""

    def damaged(data: bytes, draw: random.Random) -> bytes:
        members = {name: array.tobytes() for name, array in np.load(io.BytesIO(data)).items()}
        header = json.loads(members[HEADER])
        change(members, header, draw.choice(sorted(header["tensors"])), draw)
        return archive(members, header)

    return damaged


def packed(members: dict[str, bytes], header: dict[str, Any], name: str, draw: random.Random) -> None:
    """Give a mask other bytes, whose checksum fits."""
    nothing_rare = bytes([1, 1, 0]) + zlib.compress(b"")[2:-4]
    bomb = bytes([0]) + zlib.compress(bytes(10**7))[2:-4]
    members[name] = draw.choice([b"", b"\1", b"\2abc", bytes([1, 1, 62]) + draw.randbytes(30), bomb, nothing_rare])
    header["tensors"][name] = {"shape": draw.choice([[HUGE], header["tensors"][name]["shape"]]), "crc": 0}
    header["tensors"][name]["crc"] = zlib.crc32(members[name])


def zipped(data: bytes, draw: random.Random) -> bytes:
    """Return an archive of another making: a bomb, pickled objects, a single array, a member that says it is huge."""
    file, kind = io.BytesIO(), draw.randrange(4)
    if kind == 0:
        np.savez(file, **{HEADER: np.array([{1: 2}, None], dtype=object)})
    elif kind == 1:
        np.save(file, np.zeros(10))
    else:
        head = io.BytesIO()
        says: Any = {"descr": "|u1", "fortran_order": False, "shape": (HUGE,)}
        np.lib.format.write_array_header_1_0(head, says)
        content = bytes(5 * 10**7) if kind == 2 else head.getvalue() + data[:100]
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if kind == 2 else zipfile.ZIP_STORED) as made:
            made.writestr(f"{HEADER}.npy", content)
    return file.getvalue()


MASKS: Mapping[str, Damage] = {
    "flipped": flipped,
    "cut": cut,
    "longer": longer,
    "noise": noise,
    "zipped": zipped,
    "packed": member(packed),
    "shape": member(lambda _, header, name, draw: header["tensors"][name].update(shape=draw.choice(SHAPES))),
    "checksum": member(lambda _, header, name, draw: header["tensors"][name].update(crc=draw.choice(ODD))),
    "odd": member(lambda _, header, name, draw: header["tensors"].update({name: draw.choice(ODD)})),
    "said": member(
        lambda _, header, name, draw: header.update({draw.choice(["format", "version", "tensors"]): draw.choice(ODD)})
    ),
    "gone": member(lambda members, header, name, draw: draw.choice([members, header["tensors"]]).pop(name)),
    "another": member(lambda _, header, name, __: header["tensors"].update({"\x1b[2J": {"shape": [HUGE], "crc": 0}})),
    "no JSON": lambda _, draw: archive({}, draw.choice([b"", b"[" * 9000, b"{}", b"\xff"])),
    "reshaped": member(lambda _, header, name, __: header["tensors"][name]["shape"].append(1)),
}


# --- values: any JSON ---


def places(value: object, above: Sequence[Any] = ()) -> Iterator[Sequence[Any]]:
    """Yield the path of every value in plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*above, name)
        yield from places(inner, (*above, name))


def altered(value: Any, draw: random.Random) -> Any:
    """Put something odd in the place of a value within plain data, or take it out; return the data."""
    *above, last = draw.choice(list(places(value)))
    inner = value
    for name in above:
        inner = inner[name]
    if isinstance(inner, dict) and draw.random() < 0.3:
        del inner[last]
    else:
        inner[last] = draw.choice(ODD)
    return value


VALUES: Mapping[str, Damage] = {
    "cut": cut,
    "no object": lambda _, draw: draw.choice([b"", b"7", b"[" * 9000, b"{}"]),
    "odd": lambda data, draw: json.dumps(altered(json.loads(data), draw)).encode(),
}
OPERATORS: Mapping[str, Mapping[str, Damage]] = {".safetensors": TENSORS, ".npz": MASKS, ".json": VALUES}
