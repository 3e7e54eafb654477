"""Format `huggingface`: config.json and model.safetensors, which stock transformers loads with `from_pretrained`."""

from __future__ import annotations

from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pruning
from orchestrator.deploy.formats.format import Codec, ExportError, Run, call_values, input_names, running
from pruning.dependencies.families.family_groups import stock_transformer
from pruning.graph.tracing import Example, quiet
from pruning.measure.latency import Call

NAME = "huggingface"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ONE_FILE = "1000TB"
"""Size from which weights are split over several files."""
SNIPPET = """\
import transformers
network = transformers.{kind}.from_pretrained(".")
outputs = network({call}).logits
"""
"""Code that runs a written network."""
GENERATING = """\
import transformers

tokenizer = transformers.AutoTokenizer.from_pretrained(".")
network = transformers.{kind}.from_pretrained(".")
tokens = tokenizer("In the beginning", return_tensors="pt", return_token_type_ids=False)
text = tokenizer.decode(network.generate(**tokens, max_new_tokens=20)[0])
print(text)
"""
"""Code that generates a text with a written network."""


def stock_network(network: nn.Module) -> Any:
    """Return a network of transformers, without a wrapper that returns only its outputs.

    Raises:
        ExportError: the class of the network is not one of transformers
    """
    found = getattr(network, "network", network)
    kind = type(found)
    if kind.__module__.partition(".")[0] != "transformers" or not hasattr(found, "save_pretrained"):
        raise ExportError(
            f"the format {NAME} is for networks whose class comes from transformers, and `model` is "
            f"{kind.__module__}.{kind.__name__}; take another format, such as safetensors."
        )
    return found


def stock_smaller(network: nn.Module, example: Example | None = None) -> Any:
    """Return a network of transformers without what masks emptied, as far as its configuration can express the sizes.

    Raises:
        ExportError: the class of the network is not one of transformers
    """
    found = stock_network(network)
    if stock_transformer(found) is None:
        return found
    smaller: Any = pruning.smaller_transformer(network, example)
    return smaller if smaller.resized.config else found


def write(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the network's class, sizes, weights and settings of generation, as `save_pretrained` does.

    The weights go into a new network of the same class, because `save_pretrained` refuses a network that was loaded
    from quantised weights.

    Raises:
        ExportError: the network has other sizes than its configuration
    """
    del example
    found = stock_network(network)
    config = deepcopy(found.config)
    vars(config).pop("quantization_config", None)
    with quiet():
        with torch.device("meta"):
            plain = type(found)(config)
        try:
            plain.load_state_dict(found.state_dict(), assign=True)
        except RuntimeError as error:
            raise ExportError(
                f"the configuration of {type(found).__name__} has other sizes than the network; take another format."
            ) from error
        plain.tie_weights()
        plain.generation_config = getattr(found, "generation_config", None)
        plain.save_pretrained(folder, max_shard_size=ONE_FILE)


def load(folder: Path, threads: int) -> Run:
    """Return a function that runs the network."""
    return running(_loaded(folder, threads))


def next_token(folder: Path, threads: int, example: Example) -> Call | None:
    """Return a call that computes the last token of an example, from the keys and values of the tokens before it."""
    network = _loaded(folder, threads)
    tokens = dict(zip(input_names(network, example), call_values(example), strict=True)).get("input_ids")
    if tokens is None or tokens.shape[1] < 2 or not network.can_generate() or network.config.is_encoder_decoder:
        return None
    with torch.no_grad():
        cache = network(input_ids=tokens[:, :-1], use_cache=True).past_key_values

    def step() -> Tensor:
        again = copy(cache)  # a step puts new tensors into the layers of a cache, and leaves the old ones
        again.layers = [*map(copy, cache.layers)]
        with torch.no_grad():
            logits: Tensor = network(input_ids=tokens[:, -1:], past_key_values=again, use_cache=True).logits
        return logits

    return step


def _loaded(folder: Path, threads: int) -> Any:
    import transformers

    torch.set_num_threads(threads)
    with quiet():
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = getattr(transformers, config.architectures[0])
        return kind.from_pretrained(folder, local_files_only=True).eval()


CODEC = Codec(write, load, (CONFIG, WEIGHTS), "torch", SNIPPET, smaller=stock_smaller, stepper=next_token)
