"""Weights of one block at a time: read from safetensors files by memory map, written to others when they are pruned."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pruning.holding.parameter import hooked, unwrapped
from pruning.reconstruction.block_order import Part
from pruning.reconstruction.converted_weights import Conversion, conversions, originals

WHOLE, INDEX, OTHERS = "model.safetensors", "model.safetensors.index.json", "others.safetensors"


def tensor_files(place: str | Path) -> dict[str, Path]:
    """Return name -> the safetensors file that holds the tensor.

    Args:
        place: a file, or a directory with model.safetensors, or with the files of model.safetensors.index.json.

    Raises:
        ValueError: `place` holds no such files.
        ImportError: the package safetensors is missing.
    """
    folder = Path(place)
    file = folder if folder.is_file() else folder / WHOLE
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): folder / str(each) for name, each in listed.items()}
        if missing := sorted({each.name for each in found.values() if not each.is_file()}):
            raise ValueError(f"`offload` (={place}) must hold the files that {INDEX} lists; {missing[0]} is missing.")
        return found
    if not file.is_file():
        raise ValueError(f"`offload` (={place}) must be a safetensors file, or a directory with {WHOLE} or {INDEX}.")
    with _opened(file) as opened:
        return dict.fromkeys(opened.keys(), file)


class StreamedWeights:
    """Weights of a network's parts, in memory only from the call of a part until another is called or it is pruned.

    Other weights and all buffers stay in memory.

    Args:
        model: plain network; its parameters and persistent buffers get the values of the files, and may be on the meta
            device.
        parts: parts of the network.
        source: safetensors file, or directory of them, with a tensor for each parameter.
        target: directory for the weights of the pruned network.
        device: device of the computation.
        done: names of parts whose pruned weights are in `target`.

    Raises:
        ValueError: a tensor is missing or has another shape, a buffer has no values, or `target` is the source.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        source: str | Path,
        target: str | Path,
        device: torch.device,
        done: Collection[str],
    ) -> None:
        self._model, self._target, self._device = unwrapped(model), Path(target), device
        files = tensor_files(source)
        if self._target.resolve() in {each.parent.resolve() for each in files.values()}:
            raise ValueError(f"`output` (={target}) must be another directory than that of `offload`.")
        self._files: dict[str, Path] = {}
        self._made: dict[str, Conversion] = {}
        self._written: dict[str, str] = {}
        self._used = self._convert(files)
        self._places = _places(self._model, self._made)
        self._names = {part.name: self._inside(part) for part in parts}
        self._require_shapes()
        self._empty = {name: _empty(self._get(name)) for names in self._names.values() for name in names}
        self._resident: str | None = None
        for name in done:
            self._read_written(f"{name}.safetensors")

    @contextmanager
    def streaming(self, parts: Sequence[Part]) -> Iterator[None]:
        """Load the weights of a part when it is called, inside the context; then the parts are on the meta device."""
        self._target.mkdir(parents=True, exist_ok=True)
        others = [name for name in self._places if name not in self._empty]
        self._load([name for name in others if name in self._made])
        for part in parts:
            self._free(part.name)
        handles = [
            part.module.register_forward_pre_hook(lambda *_, part=part: self.require(part), prepend=True)
            for part in parts
        ]
        handles.append(self._model.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            with hooked(handles):
                yield
        finally:
            self._leave()
        self._write(OTHERS, others)
        for part in parts:
            if f"{part.name}.safetensors" not in self._written.values():  # no batch called it
                self.require(part)
                self.save(part)
        text = json.dumps({"metadata": {}, "weight_map": self._written}, indent=1)
        (self._target / INDEX).write_text(text, encoding="utf-8")

    def save(self, part: Part) -> None:
        """Write the weights of a part to the target, and free them."""
        file = f"{part.name}.safetensors"
        self._write(file, self._names[part.name])
        self._leave()

    def require(self, part: Part) -> None:
        """Load the weights of a part, and free those of another."""
        if self._resident != part.name:
            self._leave()
            with _disable_current_modes():
                self._load(self._names[part.name])
            self._resident = part.name

    def _leave(self) -> None:
        if self._resident is not None:
            self._free(self._resident)
            self._resident = None

    def _free(self, part: str) -> None:
        for name in self._names[part]:
            self._set(name, self._empty[name])

    def _inside(self, part: Part) -> list[str]:
        """Return the parameters whose every place is in a part."""
        held = {id(module) for module in part.module.modules()}
        parameters = [name for name in self._places if isinstance(self._get(name), nn.Parameter)]
        return [name for name in parameters if all(id(module) in held for module, _ in self._places[name])]

    def _convert(self, files: Mapping[str, Path]) -> tuple[Any, ...]:
        """Note the conversions of the tensors in files to those of the network; return the rules that were used."""
        plan = conversions(self._model, _shapes(files))
        for name, found, expected in plan.faults:
            raise ValueError(_lacking(name, ()) if found is None else _misshapen(name, found, expected))
        self._files |= files
        self._made |= {target: each for each in plan.each for target in each.targets}
        return plan.used

    def _read_written(self, file: str) -> None:
        """Take the tensors of a file in the target from it."""
        written = dict.fromkeys(tensor_files(self._target / file), self._target / file)
        self._convert(written)
        self._written |= dict.fromkeys(written, file)

    def _require_shapes(self) -> None:
        single = {name: made.sources[0] for name, made in self._made.items() if made.convert is None}
        held = _shapes({name: self._files[name] for name in single.values()})
        for name in self._places.keys() & single.keys():
            found, expected = tuple(held[single[name]].shape), tuple(self._get(name).shape)
            if found != expected:
                raise ValueError(_misshapen(name, found, expected))

    def _get(self, name: str) -> Tensor:
        module, leaf = self._places[name][0]
        found: Tensor = getattr(module, leaf)
        return found

    def _set(self, name: str, value: Tensor) -> None:
        for module, leaf in self._places[name]:
            (module._parameters if isinstance(value, nn.Parameter) else module._buffers)[leaf] = value  # type: ignore[assignment]

    def _load(self, names: Sequence[str]) -> None:
        for made in {id(self._made[name]): self._made[name] for name in names}.values():
            with ExitStack() as stack:  # closed after each tensor, so that no pages stay mapped
                opened = {file: stack.enter_context(_opened(file)) for file in {self._files[n] for n in made.sources}}
                found = made.tensors(partial(self._read, opened))
                for name in [each for each in made.targets if each in names]:
                    self._set_value(name, found[name])

    def _read(self, opened: Mapping[Path, Any], name: str) -> Tensor:
        found: Tensor = opened[self._files[name]].get_tensor(name)
        return found

    def _set_value(self, name: str, value: Tensor) -> None:
        """Give a parameter or buffer a copy of a value, on the device and in its dtype."""
        now = self._get(name)
        value = value.to(self._device, now.dtype, copy=True)
        is_parameter = isinstance(now, nn.Parameter)
        self._set(name, nn.Parameter(value, requires_grad=now.requires_grad) if is_parameter else value)

    def _write(self, file: str, names: Sequence[str]) -> None:
        """Write tensors to a file of the target, whole or not at all."""
        from safetensors.torch import save_file

        part = self._target / f"{file}.part"
        tensors = {name: self._get(name).detach() for name in names}
        buffers = {
            name: tensor.clone() for name, tensor in tensors.items() if not isinstance(self._get(name), nn.Parameter)
        }
        held = originals(self._model, tensors | buffers, self._used)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, part, {"format": "pt"})
        part.replace(self._target / file)
        self._read_written(file)


def _places(model: nn.Module, files: Collection[str]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return name -> modules and attributes that hold a parameter or buffer: those that are loaded or written.

    The name is one in the files; a persistent buffer with values may be missing there.

    Raises:
        ValueError: the files lack a parameter, or a buffer on the meta device.
    """
    found: dict[int, list[tuple[str, nn.Module, str, Tensor]]] = {}
    known: set[str] = set()
    for path, module in model.named_modules():
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            name = f"{path}.{leaf}" if path else leaf
            known.add(name)
            if tensor is not None and (leaf not in module._non_persistent_buffers_set or tensor.is_meta):
                found.setdefault(id(tensor), []).append((name, module, leaf, tensor))
    places = {}
    for held in found.values():
        names = [name for name, *_ in held]
        name, tensor = next((name for name in names if name in files), None), held[0][3]
        if name is None and isinstance(tensor, nn.Parameter):
            raise ValueError(_lacking(names[0], sorted(set(files) - known)))
        if name is None and tensor.is_meta:
            raise ValueError(
                f"`model` (with the buffer {names[0]!r} on the meta device) must have values in its buffers; build it "
                "with its parameters alone on that device, as by accelerate.init_empty_weights."
            )
        places[name or names[0]] = [(module, leaf) for _, module, leaf, _ in held]
    return places


def _lacking(name: str, unknown: Sequence[str]) -> str:
    """Return the refusal of files without a parameter of the network.

    Args:
        name: the parameter.
        unknown: names in the files that the network does not have.
    """
    if not unknown:
        return f"`offload` must have a tensor for {name!r}; pass the files of this network."
    like = get_close_matches(name, unknown, 1, 0)[0]
    return (
        f"`offload` (with {like!r}) must have the names of the network (such as {name!r}), or names that transformers "
        "converts to them; pass the files of this network."
    )


def _misshapen(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return (
        f"`offload` (with {name!r} of the shape {found}) must have the shapes of the network ({expected}); pass the "
        "files of this network."
    )


def _shapes(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Return the tensors of files on the meta device, for their shapes."""
    found: dict[str, Tensor] = {}
    for file in set(files.values()):
        with _opened(file) as opened:
            names = [name for name, place in files.items() if place == file]
            found |= {name: torch.empty(opened.get_slice(name).get_shape(), device="meta") for name in names}
    return found


def _empty(tensor: Tensor) -> Tensor:
    found = tensor.detach().to("meta")
    return nn.Parameter(found, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file by memory map."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError("`offload` needs the package safetensors; pip install safetensors.") from error
    with safe_open(file, framework="pt") as opened:
        yield opened
