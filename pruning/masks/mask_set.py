"""Mask set: the masks of a model as one value, to collect, compare, save, load and apply."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pruning.holding.parameter import (
    ModuleParameter,
    check_has_values,
    check_masks,
    outside_inference_mode,
    place,
    plain_parameters,
    plain_weights,
    pruned_names,
)
from pruning.masks import mask_files as mask_files
from pruning.methods.functions import prune_by_masks
from pruning.mixtures.survivors import route_among_survivors


class MaskSet(Mapping[str, Tensor]):
    """Masks of a model: qualified parameter name -> bool tensor on the CPU, True where an entry is kept.

    A mask set is a copy that does not change with the model. `collect` lists the masks in the model's order. Two sets
    are equal if their names, shapes and entries are equal, in any order. Sets are not hashable, because their tensors
    can be changed; use `digest`.

    Args:
        masks: name -> tensor of any dtype, nonzero where the entry is kept; copied.
    """

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        check_masks(masks)
        for name, mask in masks.items():
            check_has_values(name, mask)
        self._masks = {name: _copied(mask) for name, mask in masks.items()}

    @classmethod
    def collect(cls, model: nn.Module) -> MaskSet:
        """Collect the masks of all parameters in `model` that this package or `torch.nn.utils.prune` pruned.

        The names are those of a plain model, without the prefixes of `torch.compile`, `nn.DataParallel` and
        `DistributedDataParallel`; `apply` finds the names in a wrapped model, too.
        """
        masks = {}
        for name, module, leaf, _ in plain_weights(model):
            if leaf in pruned_names(module):
                mask = ModuleParameter.of(module, leaf).mask
                assert mask is not None
                masks[name] = mask
        return cls(masks)

    def apply(self, model: nn.Module, *, replace: bool = False) -> None:
        """Prune the parameters of `model` by these masks, in addition to its earlier pruning; all of them or none.

        A parameter that several modules share is pruned in all of them; the masks may use any of its names. Mixtures
        whose experts are masked as wholes, with their rows of the router, route among the others.

        Args:
            model: has every named parameter, with the shape of its mask.
            replace: replace earlier masks, so that entries may return with their stored values.

        Raises:
            ValueError: a parameter is missing, has another shape or holds no floats, as a quantised one; the message
                names it, and nothing is changed.
        """
        masks: dict[tuple[nn.Module, str], Tensor] = {}
        wanted: dict[Tensor, Tensor] = {}
        for name, mask in self.items():
            module, leaf = place(model, name, mask.shape)
            try:
                orig = ModuleParameter.of(module, leaf).orig
            except (AttributeError, ValueError) as error:
                raise ValueError(f"`{name}` cannot be pruned: {error}") from error
            wanted[orig] = wanted[orig] & mask if orig in wanted else mask
        for module in model.modules():
            masks |= {(module, name): wanted[each] for name, each in plain_parameters(module) if each in wanted}
        prune_by_masks(masks, replace=replace)
        route_among_survivors(model)

    def extended(self, masks: Mapping[str, Tensor]) -> MaskSet:
        """Return a set with further masks, in place of those of the same names; others are shared with this set."""
        found = MaskSet(masks)
        found._masks = self._masks | found._masks
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskSet):
            return NotImplemented
        return self.keys() == other.keys() and all(torch.equal(mask, other[name]) for name, mask in self.items())

    def __repr__(self) -> str:
        return f"MaskSet({len(self)} tensors, {sum(self.sizes().values())} entries, sparsity {self.sparsity():.4f})"

    # --- sizes and sparsity ---

    def sizes(self) -> dict[str, int]:
        """Return name -> number of entries."""
        return {name: mask.numel() for name, mask in self.items()}

    def kept(self) -> dict[str, int]:
        """Return name -> number of kept entries."""
        return {name: int(np.count_nonzero(mask.numpy())) for name, mask in self.items()}

    def sparsity(self) -> float:
        """Return the masked fraction of all entries; 0 if there are no entries."""
        return _fraction(sum(self.sizes().values()) - sum(self.kept().values()), sum(self.sizes().values()))

    def sparsities(self) -> dict[str, float]:
        """Return name -> masked fraction of the tensor's entries."""
        sizes = self.sizes()
        return {name: _fraction(sizes[name] - kept, sizes[name]) for name, kept in self.kept().items()}

    def digest(self) -> str:
        """Return the SHA-256, in hex, of names, shapes and bits, sorted by name."""
        hashed = hashlib.sha256()
        for name in sorted(self):
            hashed.update(json.dumps([name, list(self[name].shape)]).encode())
            hashed.update(np.packbits(self[name].numpy()).tobytes())
        return hashed.hexdigest()

    # --- comparison ---

    def iou(self, other: MaskSet) -> float:
        """Return the intersection over union of the kept entries, |A and B| / |A or B|: 1 for equal masks.

        Raises:
            ValueError: names or shapes differ.
        """
        pairs = self._overlaps(other).values()
        return _fraction(sum(both for both, _ in pairs), sum(either for _, either in pairs), empty=1.0)

    def ious(self, other: MaskSet) -> dict[str, float]:
        """Return name -> `iou` of that tensor; 1 if neither set keeps an entry of it."""
        return {name: _fraction(*pair, empty=1.0) for name, pair in self._overlaps(other).items()}

    def nested_in(self, other: MaskSet) -> bool:
        """Return whether every entry that `other` prunes is pruned here too; tensors without a mask are not pruned."""
        return all(self.nestings(other).values())

    def nestings(self, other: MaskSet) -> dict[str, bool]:
        """Return name -> whether that tensor's mask is nested, for the names of both sets; see `nested_in`.

        Raises:
            ValueError: shapes differ.
        """
        return {
            **dict.fromkeys(self, True),
            **{name: not bool((self._mask_of_shape(name, mask) & ~mask).any()) for name, mask in other.items()},
        }

    def _mask_of_shape(self, name: str, mask: Tensor) -> Tensor:
        """Return the mask `name`, ones if there is none; raise ValueError if its shape differs from that of `mask`."""
        own = self.get(name, torch.ones_like(mask))
        if own.shape != mask.shape:
            raise ValueError(
                f"`{name}` has the shapes {tuple(own.shape)} and {tuple(mask.shape)} in the two sets of masks; compare "
                "masks of one model."
            )
        return own

    def _overlaps(self, other: MaskSet) -> dict[str, tuple[int, int]]:
        if different := sorted(self.keys() ^ other.keys()):
            raise ValueError(f"`{different[0]}` is in only one of the two sets of masks; compare masks of one model.")
        return {
            name: (int((self._mask_of_shape(name, mask) & mask).sum()), int((self[name] | mask).sum()))
            for name, mask in other.items()
        }

    # --- files ---

    def to_bytes(self) -> bytes:
        """Return the masks as an npz file; equal masks in equal order always give equal bytes.

        Raises:
            ValueError: UTF-8 cannot encode a name.
        """
        return mask_files.write_npz(mask_files.encode(self._arrays(), self.digest()))

    @classmethod
    def from_bytes(cls, data: bytes, model: nn.Module | None = None) -> MaskSet:
        """Load masks from the bytes that `to_bytes` returned.

        Args:
            data: content of the file. A few bytes can encode a mask that fills the memory.
            model: model that the masks must fit, checked before memory is allocated; pass it if you do not trust the
                file.

        Raises:
            ValueError: the file is damaged, has another format, or does not fit the model; the message names the
                tensor if one tensor is wrong.
        """
        return cls._read(mask_files.read_npz(data), model)

    def save(self, path: str | Path) -> None:
        """Save the masks to a file in the format of its suffix: .npz, or .safetensors (needs the package safetensors).

        Raises:
            ValueError: the suffix is another one, or UTF-8 cannot encode a name.
        """
        write, _ = mask_files.format_of(path)
        Path(path).write_bytes(write(mask_files.encode(self._arrays(), self.digest())))

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> MaskSet:
        """Load masks from a file that `save` wrote.

        Args:
            path: path of the file.
            model: model that the masks must fit, see `from_bytes`.

        Raises:
            ValueError: the suffix is another one, or the file is damaged, has another format or does not fit the model.
        """
        _, read = mask_files.format_of(path)
        return cls._read(read(Path(path).read_bytes()), model)

    def _arrays(self) -> dict[str, NDArray[np.bool_]]:
        return {name: mask.numpy() for name, mask in self.items()}

    @classmethod
    def _read(cls, members: mask_files.Members, model: nn.Module | None) -> MaskSet:
        masks, digest = mask_files.decode(members, None if model is None else partial(place, model))
        loaded = cls({})
        loaded._masks = {name: torch.from_numpy(mask) for name, mask in masks.items()}  # new arrays need no copy
        if loaded.digest() != digest:
            raise ValueError("The mask file is damaged: its masks do not have the digest in its header.")
        return loaded


@outside_inference_mode()
def _copied(mask: Tensor) -> Tensor:
    return mask.detach().to("cpu", torch.bool, copy=True, memory_format=torch.contiguous_format)


def _fraction(part: int, whole: int, empty: float = 0.0) -> float:
    return part / whole if whole else empty
