"""Small random networks of the model types of transformers, from their own configurations with smaller sizes."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

TASKS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image": "IMAGE_CLASSIFICATION",
    "ctc": "CTC",
    "audio": "AUDIO_CLASSIFICATION",
    "speech": "SPEECH_SEQ_2_SEQ",
    "vision": "IMAGE_TEXT_TO_TEXT",
}
"""Task -> the name of its table in transformers."""
OF_ZOO = ("causal", "masked", "seq2seq", "image", "ctc", "audio", "speech")
"""Tasks whose networks the zoo runs."""
VOCABULARY, KNOWN, POSITIONS, LENGTH = 96, 30, 64, 12
WIDTHS = (
    *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "d_embed", "model_dim"),
    *("hidden_dim", "word_embed_proj_dim", "output_hidden_size", "classifier_proj_size", "attention_hidden_size"),
    *("lru_width", "decoder_hidden_size", "encoder_hidden_size", "cross_attention_hidden_size", "project_dim"),
    *("hidden_channels", "conv_dim", "output_dim", "codevector_dim", "proj_codevector_dim"),
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "linear_num_value_heads")
"""Endings of names of numbers of heads."""
FEWER_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "linear_num_key_heads", "multi_query_group_num")
HEAD_SIZES = ("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "attention_head_size", "d_head", "kv_channels")
INNER = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "inner_dim", "ffn_size", "mlp_dim")
INNER_PARTS = ("intermediate_size", "ffn_dim", "d_inner", "shared_expert_size")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks")
SMALL: dict[str, int] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "rotary_dim": 8,
    "num_mel_bins": 16,
    "max_position_embeddings": POSITIONS,
    "n_positions": POSITIONS,
    "max_source_positions": POSITIONS,
    "max_target_positions": POSITIONS,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "num_experts_per_token": 2,
    "num_codebooks": 2,
    "num_kv_shared_layers": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "encoder_hash_byte_group_vocab": VOCABULARY,
    "expand": 1,
    "topk_group": 1,
    "sliding_window": 16,
    "state_size": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "time_step_rank": 4,
    "num_codevectors_per_group": 8,
    "relative_attention_num_buckets": 8,
    "first_k_dense_replace": 1,
    "num_conv_pos_embeddings": 15,
    "num_conv_pos_embedding_groups": 4,
    "image_size": 64,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_nextn_predict_layers": 0,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "pad_token_id": 0,
}
STAGES = ("hidden_size", "dims", "channels", "embed_dim", "conv_dim", "widths")
"""Parts of names of lists with the width of each stage."""
LARGEST = 30_000_000
"""Number of parameters above which a network does not count as small."""
BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "num_mels", "input_dim")
"""Keys with the number of features of a step of speech."""
UNSET: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "attn_layer_indices": [1],
    "default_language": "en_XX",
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "layer_types": ["full_attention", "full_attention"],
}
"""Keys that some configurations leave unset, although the network cannot be built without a value."""
ALWAYS = (
    *("vocab_size", "attn_layer_indices", "default_language"),
    *("indexer_budget", "indexer_compress_ratio", "indexer_n_heads", "indexer_kv_heads", "indexer_head_dim"),
)
"""Those of them that all small networks set."""
WIDTH, HEAD_COUNT, HEAD_SIZE, HIDDEN = 32, 4, 8, 48
SECTIONS = [2, 1, 1]
"""Frequencies of a head's positions in time, height and width, one for two of its values; no configuration has them."""


def names(tasks: Sequence[str] = OF_ZOO) -> list[str]:
    """Return `task-model_type` for each model type with a class for one of the tasks."""
    from transformers.models.auto import modeling_auto

    return [
        f"{task}-{kind}" for task in tasks for kind in getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES")
    ]


def build_small(name: str) -> tuple[nn.Module, Callable[[int, int], Any], str]:
    """Build the network of `task-model_type`, and return it with its inputs.

    Raises:
        RuntimeError: it cannot be built in a small size, or runs with none of the inputs.
    """
    transformers: Any = importlib.import_module("transformers")
    task, _, kind = name.partition("-")
    table = getattr(transformers, f"MODEL_FOR_{TASKS[task]}_MAPPING")
    config = transformers.CONFIG_MAPPING[kind]()
    model_class = table[type(config)]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    if task == "causal" and not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    reasons = []
    for level in range(4):
        try:
            small = _small(config, level)
            _check_is_small(model_class, small)
            torch.manual_seed(0)
            model = model_class(small).float().eval()
            size, inputs = _that_run(model, task)
        except Exception as error:  # a configuration may refuse sizes in any way
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200])
            continue
        return model, inputs, size
    raise RuntimeError(f"no small {model_class.__name__} was found: {reasons[0]}")


def _check_is_small(model_class: Any, config: Any) -> None:
    """Raise ValueError if a network is large, without the memory that it would take."""
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"):  # some need values to be built
        size = sum(each.numel() for each in model_class(copy.deepcopy(config)).parameters())
        if size > LARGEST:
            raise ValueError(f"it has {size} parameters with smaller sizes")


def _small(config: Any, level: int) -> Any:
    """Return a configuration with small sizes; each level leaves more of them as they are."""
    changed = dict(_changes(config, level))
    if level % 2 == 0:
        return type(config)(**changed)  # which derives further sizes from these
    smaller = copy.deepcopy(config)
    for name, value in changed.items():
        setattr(smaller, name, value)
    return smaller


def _changes(config: Any, level: int) -> Iterator[tuple[str, Any]]:
    """Yield each key whose value gets smaller, with the new value."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield name, _small(value, level)
        elif (new := _smaller(config, name, value, level)) is not None and new != value:
            yield name, new


def _smaller(config: Any, name: str, value: Any, level: int) -> Any:
    """Return the new value of a key; None: it stays."""
    if value is None and (name in ALWAYS or level >= 2):
        return UNSET.get(name)
    if name == "is_decoder" and level == 3:
        return True
    if name == "rope_parameters" and level and isinstance(value, dict) and "rope_type" in value:
        return {**value, "mrope_section": SECTIONS}
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, list | tuple) and value:
        return _smaller_list(config, name, value, level)
    if not isinstance(value, int):
        return None
    if name in SMALL:
        if name == "image_size" and level >= 2:
            return None
        return min(value, SMALL[name])
    if name.endswith("_token_id"):
        return min(value, 3)
    if "vocab_size" in name:
        return min(value, VOCABULARY)
    if name.endswith(FEWER_HEADS):
        many = next((getattr(config, each) for each in HEADS if isinstance(getattr(config, each, None), int)), 0)
        return HEAD_COUNT if value > HEAD_COUNT else min(value, 2 if many else value)
    if name.endswith(HEADS):
        return min(value, HEAD_COUNT)
    if name in HEAD_SIZES:
        return HEAD_SIZE
    if name.endswith(LAYERS):
        return _layers(config, value)
    if name.endswith((*INNER, *INNER_PARTS)):
        return min(value, HIDDEN)
    if name.endswith(WIDTHS) and value > WIDTH and not (level >= 2 and _is_staged(config)):
        return WIDTH
    return None


def _is_staged(config: Any) -> bool:
    """Return whether a network has stages of other widths, whose heads and groups fit only these widths."""
    return any(isinstance(value, list | tuple) and "layer" not in name for name, value in vars(config).items())


def _layers(config: Any, value: int) -> int:
    """Return the fewest of so many layers that have all kinds of layers."""
    kinds = [each for name, each in vars(config).items() if _is_by_layer(each, value) and isinstance(each[0], str)]
    needed = [2, *(1 + max(each.index(kind) for kind in set(each)) for each in kinds)]
    return int(min(value, max(needed)))


def _is_by_layer(value: Any, layers: int) -> bool:
    """Return whether a value is a list with an entry for each layer."""
    return isinstance(value, list | tuple) and len(value) == layers > 4


def _smaller_list(config: Any, name: str, value: Any, level: int) -> Any:
    kinds = type(value)
    if name == "block_types":
        return kinds(dict.fromkeys(value))  # one of each kind
    if name == "layer_types" and {*value} == {"linear_attention"}:  # whose cache needs a layer of attention
        value = kinds(["linear_attention", "full_attention", *value[2:]])
    for key in ("num_hidden_layers", "n_layer", "n_layers"):
        count = getattr(config, key, None)
        if isinstance(count, int) and _is_by_layer(value, count):
            return kinds(value[: _layers(config, count)])
    if all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        if level < 2 and any(word in name for word in STAGES):
            return kinds(max(8, each // 8 // 8 * 8) if each > 8 else each for each in value)
        if "depth" in name or name.endswith("layers"):
            return kinds(min(each, 1 if level < 3 else 2) for each in value)
    return None


def _that_run(model: nn.Module, task: str) -> tuple[str, Callable[[int, int], Any]]:
    """Return the first inputs with which the network runs."""
    last: Exception | None = None
    for size, inputs in _inputs(model, task):
        try:
            with torch.no_grad():
                found = model(**copy.deepcopy(inputs(2, 0)))
        except Exception as error:  # a forward may raise anything
            last = error
            continue
        first = found[0] if not isinstance(found, Mapping) else next(iter(found.values()))
        if isinstance(first, Tensor) and not bool(first.isfinite().all()):
            raise ValueError("its outputs are no numbers")
        return size, inputs
    raise RuntimeError(f"runs with none of its inputs ({type(last).__name__}: {last})") from last


def _inputs(model: Any, task: str) -> Iterator[tuple[str, Callable[[int, int], Any]]]:
    """Yield the inputs that a network of a task may take."""
    main = str(getattr(model, "main_input_name", "input_ids"))
    taken = inspect.signature(model.forward).parameters
    decoder = {"decoder_input_ids": 6} if task in ("seq2seq", "speech") and "decoder_input_ids" in taken else {}
    if task in ("causal", "masked", "seq2seq") or main == "input_ids":
        tokens = {main: LENGTH, **decoder}
        yield f"{LENGTH} tokens", lambda batch, seed: _tokens(tokens, batch, seed)
        if decoder:
            yield f"{LENGTH} tokens", lambda batch, seed: _tokens({main: LENGTH}, batch, seed)
        return
    config = copy.copy(model.config)

    def of(shape: tuple[int, ...]) -> Callable[[int, int], Any]:
        return lambda batch, seed: {main: _noise((batch, *shape), seed), **_tokens(decoder, batch, seed)}

    yield from ((" x ".join(map(str, shape)) + " values", of(shape)) for shape in _shapes(config, task))


def _shapes(config: Any, task: str) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of one item that a network for images or speech may take."""
    if task == "image":
        channels = getattr(config, "num_channels", 3) or 3
        own = getattr(config, "image_size", None)
        own = own[0] if isinstance(own, list | tuple) else own
        sizes = dict.fromkeys((own, 64, 128, 224, 256) if isinstance(own, int) else (64, 128, 224, 256))
        yield from ((channels, size, size) for size in sizes)
        return
    yield (4000,)
    bins = next((getattr(config, name) for name in BINS if isinstance(getattr(config, name, None), int)), 16)
    for length in (2 * POSITIONS, 64, 200, 1024):
        yield (bins, length)
        yield (length, bins)
    for wide in (80, 160, 128):
        yield (128, wide)


def _noise(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tokens(lengths: Mapping[str, int], batch: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(4, KNOWN, (batch, length), generator=generator) for name, length in lengths.items()}
