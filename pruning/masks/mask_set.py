"""The masks of a model as one value: collect, compare, store, and apply again."""

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

from pruning.holding.parameter import ModuleParameter, check_has_values, place, plain_modules, pruned_names
from pruning.holding.reparam import orig_name
from pruning.masks import mask_files as mask_files
from pruning.methods.across_modules import prune_by_masks


class MaskSet(Mapping[str, Tensor]):
    """Qualified parameter name -> bool tensor on the CPU, True where the entry is kept; a value, not a view.

    The order is the model's. Two sets are equal when names, shapes and entries are, whatever their order. No set is
    hashable, for its tensors can be changed: use `digest`.

    Args:
        masks: name -> tensor of any dtype, nonzero where the entry is kept; copied.
    """

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        for name, mask in masks.items():
            check_has_values(name, mask)
        self._masks = {name: _copied(mask) for name, mask in masks.items()}

    @classmethod
    def collect(cls, model: nn.Module) -> MaskSet:
        """Return the masks of all parameters in `model` that this package or `torch.nn.utils.prune` holds pruned.

        Their names are those in a plain model, without what `torch.compile`, `nn.DataParallel` and
        `DistributedDataParallel` put before them; `apply` finds them in a wrapped model, too.
        """
        masks = {}
        for path, module in plain_modules(model):
            names = {orig_name(name): name for name in pruned_names(module)}
            for name in [names[key] for key in module._parameters if key in names]:
                mask = ModuleParameter.of(module, name).mask
                assert mask is not None
                masks[f"{path}.{name}" if path else name] = mask
        return cls(masks)

    def apply(self, model: nn.Module, *, replace: bool = False) -> None:
        """Prune the parameters of `model` by these masks, on top of what is pruned already; all of them or none.

        A parameter that several modules share is pruned in all of them, whichever of its names the masks have.

        Args:
            model: has every named parameter, with its mask's shape.
            replace: these masks stand instead of those before: entries may return, with the values that are held.

        Raises:
            ValueError: a parameter is missing or has another shape; it is named, and nothing is changed.
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
            names = {orig_name(name): name for name in pruned_names(module)}
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in wanted:
                    masks[module, names.get(name, name)] = wanted[parameter]
        prune_by_masks(masks, replace=replace)

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

    # --- what they say ---

    def sizes(self) -> dict[str, int]:
        """Return name -> number of entries."""
        return {name: mask.numel() for name, mask in self.items()}

    def kept(self) -> dict[str, int]:
        """Return name -> number of entries that are kept."""
        return {name: int(np.count_nonzero(mask.numpy())) for name, mask in self.items()}

    def sparsity(self) -> float:
        """Return the fraction of all entries that are masked; 0 where there are none."""
        return _fraction(sum(self.sizes().values()) - sum(self.kept().values()), sum(self.sizes().values()))

    def sparsities(self) -> dict[str, float]:
        """Return name -> fraction of its entries that are masked."""
        sizes = self.sizes()
        return {name: _fraction(sizes[name] - kept, sizes[name]) for name, kept in self.kept().items()}

    def digest(self) -> str:
        """Return the SHA-256, in hex, of names, shapes and bits, sorted by name."""
        hashed = hashlib.sha256()
        for name in sorted(self):
            hashed.update(json.dumps([name, list(self[name].shape)]).encode())
            hashed.update(np.packbits(self[name].numpy()).tobytes())
        return hashed.hexdigest()

    # --- how they compare ---

    def iou(self, other: MaskSet) -> float:
        """Return |A and B| / |A or B| of the entries that both and that either keep: 1 for equal masks.

        Raises:
            ValueError: names or shapes differ.
        """
        pairs = self._overlaps(other).values()
        return _fraction(sum(both for both, _ in pairs), sum(either for _, either in pairs), empty=1.0)

    def ious(self, other: MaskSet) -> dict[str, float]:
        """Return name -> `iou` of that tensor; 1 where neither keeps anything."""
        return {name: _fraction(*pair, empty=1.0) for name, pair in self._overlaps(other).items()}

    def nested_in(self, other: MaskSet) -> bool:
        """Say whether every entry that `other` prunes is pruned here too; what a set does not name is not pruned."""
        return all(self.nestings(other).values())

    def nestings(self, other: MaskSet) -> dict[str, bool]:
        """Return name -> whether `nested_in` holds of that tensor, for all names of both.

        Raises:
            ValueError: shapes differ.
        """
        return {
            **dict.fromkeys(self, True),
            **{name: not bool((self._like(name, mask) & ~mask).any()) for name, mask in other.items()},
        }

    def _like(self, name: str, mask: Tensor) -> Tensor:
        own = self.get(name, torch.ones_like(mask))
        if own.shape != mask.shape:
            raise ValueError(
                f"`{name}` has the shapes {tuple(own.shape)} and {tuple(mask.shape)}: other models' masks."
            )
        return own

    def _overlaps(self, other: MaskSet) -> dict[str, tuple[int, int]]:
        if different := sorted(self.keys() ^ other.keys()):
            raise ValueError(f"`{different[0]}` is in one of the two sets of masks only; compare masks of one model.")
        return {
            name: (int((self._like(name, mask) & mask).sum()), int((self[name] | mask).sum()))
            for name, mask in other.items()
        }

    # --- how they are kept ---

    def to_bytes(self) -> bytes:
        """Return the npz file: the same masks in the same order always give the same bytes.

        Raises:
            ValueError: a name is not text that UTF-8 can hold.
        """
        return mask_files.write_npz(mask_files.encode(self._arrays(), self.digest()))

    @classmethod
    def from_bytes(cls, data: bytes, model: nn.Module | None = None) -> MaskSet:
        """Read what `to_bytes` wrote.

        Args:
            data: the file. A few bytes may say that a mask is as large as memory, and be right.
            model: what the masks must fit, checked before memory is taken: give it where the file is not your own.

        Raises:
            ValueError: the file is damaged or none of ours, or does not fit; the tensor is named if one is to blame.
        """
        return cls._read(mask_files.read_npz(data), model)

    def save(self, path: str | Path) -> None:
        """Write a file in the format of its suffix: .npz, or .safetensors (needs the package safetensors).

        Raises:
            ValueError: any other suffix, or a name that is not text that UTF-8 can hold.
        """
        write, _ = mask_files.format_of(path)
        Path(path).write_bytes(write(mask_files.encode(self._arrays(), self.digest())))

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> MaskSet:
        """Read what `save` wrote.

        Args:
            path: of the file.
            model: what the masks must fit, see `from_bytes`.

        Raises:
            ValueError: the suffix is another, or the file is damaged or none of ours, or does not fit.
        """
        _, read = mask_files.format_of(path)
        return cls._read(read(Path(path).read_bytes()), model)

    def _arrays(self) -> dict[str, NDArray[np.bool_]]:
        return {name: mask.numpy() for name, mask in self.items()}

    @classmethod
    def _read(cls, members: mask_files.Members, model: nn.Module | None) -> MaskSet:
        masks, digest = mask_files.decode(members, None if model is None else partial(place, model))
        loaded = cls({})
        loaded._masks = {name: torch.from_numpy(mask) for name, mask in masks.items()}  # nobody else's: not copied
        if loaded.digest() != digest:
            raise ValueError("These masks are damaged: they have not the digest that their file says.")
        return loaded


def _copied(mask: Tensor) -> Tensor:
    return mask.detach().to("cpu", torch.bool, copy=True, memory_format=torch.contiguous_format)


def _fraction(part: int, whole: int, empty: float = 0.0) -> float:
    return part / whole if whole else empty
