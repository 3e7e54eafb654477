"""MNIST-like data sets from the published idx .gz files: find or download the files, verify their MD5, parse them."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import DataError

TIMEOUT = 60.0
"""Seconds to wait for an answer of a mirror."""
LARGEST = 2**26
"""Largest number of bytes read from an answer: over twice the size of the largest file."""

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


@dataclass(frozen=True)
class IdxSet:
    """Published data set: its folder under the root, the MD5 of each file in the order of `FILES`, and its mirrors."""

    folder: str
    md5: Mapping[str, str]
    mirrors: Sequence[str]


MNIST = IdxSet(
    "mnist",
    {
        FILES[0]: "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        FILES[1]: "d53e105ee54ea40749a09fcbcd1e9432",
        FILES[2]: "9fb629c4189551a2d022fa330f9573f3",
        FILES[3]: "ec29112dd5afa0611ce80d1b7f02629c",
    },
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
)
FASHION_MNIST = IdxSet(
    "fashion-mnist",
    {
        FILES[0]: "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        FILES[1]: "25c81989df183df01b3e8a0aad5dffbe",
        FILES[2]: "bef4ecab320f06d8554ea6380940ec79",
        FILES[3]: "bb300cfdad3c16e7a12a480ee83cd310",
    },
    (
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
)


def find(published: IdxSet, root: Path, *, download: bool) -> list[Path]:
    """Return the paths of the four files in the order of `FILES`; download absent files if `download`.

    Raises:
        DataError: a file is absent and cannot be downloaded; the text names the file and the remedy.
    """
    folder = root / published.folder
    for name in FILES:
        if not (folder / name).is_file():
            if not download:
                raise DataError(
                    f"`data.root` (={root}) must hold {folder / name}; put the file there, or pass data.download=true."
                )
            _download(name, published, folder)
    return [folder / name for name in FILES]


def read(published: IdxSet, paths: Sequence[Path]) -> list[NDArray[np.uint8]]:
    """Return training images, training labels, test images and test labels from the files that `find` returned.

    Raises:
        DataError: a file is not the published one; the text names the file and the remedy.
    """
    arrays = []
    for path in paths:
        content = _bytes(path)
        _check(path, content, published.md5[path.name])
        arrays.append(parse(gzip.decompress(content), path))
    return arrays


def parse(content: bytes, path: Path) -> NDArray[np.uint8]:
    """Return the array in an idx file of unsigned bytes: 0, 0, type 8, rank; big-endian uint32 extents; entries."""
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise DataError(
            f"{path} begins with {content[:4].hex()}, not with the header of an idx file of bytes; replace the file."
        )
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    entries = np.frombuffer(content, np.uint8, offset=4 + 4 * content[3])
    if entries.size != np.prod(shape, dtype=np.int64):
        raise DataError(
            f"{path} holds {entries.size} entries, but its header says {'x'.join(map(str, shape))}; replace the file."
        )
    return entries.reshape(shape)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; check its permissions.") from error


def _check(path: Path, content: bytes, expected: str) -> None:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise DataError(
            f"{path} has MD5 {found}, but the published file has {expected}: it is damaged or another file; "
            "delete the file and run again to download it, or put the published file there."
        )


def _download(name: str, published: IdxSet, folder: Path) -> None:
    """Download one file into `folder`; it gets its name only when it is complete and its MD5 is right."""
    tried = []
    for mirror in published.mirrors:
        try:
            with urllib.request.urlopen(mirror + name, timeout=TIMEOUT) as response:
                content: bytes = response.read(LARGEST)
        except (OSError, HTTPException) as error:
            tried.append(f"{mirror}: {error}")
            continue
        if hashlib.md5(content, usedforsecurity=False).hexdigest() == published.md5[name]:
            _commit(content, folder / name)
            return
        tried.append(f"{mirror}: the file differs from the published one")
    raise DataError(
        f"{folder / name} is absent and could not be downloaded ({'; '.join(tried)}); put the four .gz files of "
        f"{published.folder} into {folder}, or pass the directory that holds {published.folder}/ as `data.root`."
    )


def _commit(content: bytes, path: Path) -> None:
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_bytes(content)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"`data.root`: {path} cannot be written: {error.strerror or error}; pass a writable directory."
        ) from error
