"""Schema and files in conf/: every file composes, builds and trains; every rule has a sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from sampling import sampled
from training_cases import CLASSES, job, network

from orchestrator.catalogue.models import MODELS
from orchestrator.config import key_rules
from orchestrator.config.config_groups import DATA_SET, schema_of, violations_of, with_own_options
from orchestrator.config.hydra_options import register, shadowed
from orchestrator.config.training import Train
from orchestrator.core.specs import PruneFields
from orchestrator.training.loop import training_loop
from orchestrator.workloads import model_building
from scripts.reference import conf_files

CONF = Path(__file__).parents[3] / "conf"
GROUPS = ("model", "data", "train", "finetune", "optimizer", "scheduler")


def violations(where: str, train: dict[str, Any]) -> list[str]:
    return [*key_rules.violations(where, Train, {**vars(Train()), **train})]


def files(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.fixture
def store() -> Iterator[None]:
    """Fill the ConfigStore with the schema's nodes, and make the files of conf/ available."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(*overrides: str) -> dict[str, Any]:
    """Compose overrides, on top of conf/config.yaml if the first one is `config`."""
    name = "config" if overrides[:1] == ("config",) else None
    found = OmegaConf.to_container(compose(name, overrides=list(overrides[bool(name) :])), resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


OWN_NETWORKS = {"mixtral"}
"""Files of `conf/model` that name a `_target_`."""


def test_conf_has_a_file_for_every_built_in() -> None:
    made = conf_files.files()

    assert (
        {Path(path).stem for path in made if path.startswith("model/")}
        == set(MODELS)
        == {*files("model")} - OWN_NETWORKS
    )
    for path, content in made.items():
        assert (CONF / path).read_text() == content, "run `.venv/bin/python -m scripts.reference`"


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("name", sorted({*MODELS} - {"huggingface", "smollm2", "timm", "yolo"}))
def test_every_model_file_builds(name: str) -> None:
    config = composed(f"+model={name}")["model"]

    assert config["kind"] == name
    assert model_building.prunable(
        model_building.build(config, input_shape=(8,) if name == "gpt" else (3, 32, 32), classes=10, seed=0),
        PruneFields(("Linear", "Conv2d")),
    )


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("name", files("data"))
def test_every_data_file_composes_and_keeps_the_rules(name: str) -> None:
    config = composed(f"+data={name}")["data"]

    assert config == vars(schema_of("data", name)())
    assert not list(violations_of("data", config))


@pytest.mark.usefixtures("store")
@sampled(5)
@pytest.mark.parametrize("name", [(group, name) for group in ("train", "finetune") for name in files(group)])
def test_every_training_file_keeps_the_rules_and_trains(name: tuple[str, str]) -> None:
    config = composed(f"+{name[0]}={name[1]}")[name[0]]

    assert not list(violations(name[0], config))
    config |= {"epochs": None, "steps": 2}
    assert training_loop.fit(job(network(), CLASSES, config)).steps == 2


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("group", ["train", "finetune"])
def test_an_optimizer_is_a_choice_that_leaves_nothing_of_another(group: str) -> None:
    config = composed(f"+{group}=default", f"optimizer@{group}.optimizer=adam", f"{group}.scheduler=null")[group]

    assert config["optimizer"] == {"_target_": "torch.optim.Adam", "lr": 0.001, "fused": True}
    assert config["scheduler"] is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["model._target_=a.net"], ["model=own", "++model._target_=a.net"]),
        (
            ["seed=0", "+score._target_=a.f", "score.eps=1"],
            ["score=own", "seed=0", "++score._target_=a.f", "++score.eps=1"],
        ),
        (["method._target_=a.M", "method.kind=null"], ["method=own", "++method._target_=a.M", "++method.kind=null"]),
        (["model=mlp", "model._target_=a.net"], ["model=mlp", "model._target_=a.net"]),
        (["model.kind=mlp", "model._target_=a.net"], ["model.kind=mlp", "model._target_=a.net"]),
        (["model.kind=", "model._target_=a.net"], ["model=own", "++model.kind=", "++model._target_=a.net"]),
        (["model._target_=null", "model.width=3"], ["model._target_=null", "model.width=3"]),
        (["method._target_="], ["method._target_="]),
        (["train._target_=a.fit", "train.epochs=3"], ["train._target_=a.fit", "train.epochs=3"]),
    ],
)
def test_a_typed_target_alone_chooses_the_option_of_one_s_own(typed: list[str], meant: list[str]) -> None:
    assert with_own_options(typed) == meant


@pytest.mark.usefixtures("store")
def test_keys_of_the_default_option_do_not_reach_a_target_of_one_s_own() -> None:
    typed = ["model._target_=a.net", "model.width=3", "model.weights=w.pt", "data._target_=a.data"]
    config = composed("config", *with_own_options(typed))

    assert {**config["model"], **dict.fromkeys(["name", "depends", "revision", "reinitialise"])} == {
        **dict.fromkeys(["name", "kind", "depends", "revision", "reinitialise"]),
        "_target_": "a.net",
        "weights": "w.pt",
        "width": 3,
    }
    assert set(config["data"]) == {option.name for option in DATA_SET}


def test_a_file_that_is_called_as_an_option_of_ours_is_refused(tmp_path: Path) -> None:
    for option in ("score/snip", "model/cnn", "model/mine", "sweep/mine"):
        (tmp_path / option).parent.mkdir(exist_ok=True)
        (tmp_path / f"{option}.yaml").write_text("kind: cnn\n")

    told = [*shadowed(tmp_path, CONF)]

    assert [line.partition(" has the name of the built-in option ")[2].partition(",")[0] for line in told] == [
        "model=cnn",
        "score=snip",
    ]
    assert not [*shadowed(None, CONF)]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("override", ["model.hiden=[3]", "model.hidden=3", "model.dropout=much"])
def test_a_misspelled_key_or_a_wrong_type_is_refused_while_composing(override: str) -> None:
    with pytest.raises(HydraException):
        compose(overrides=["+model=mlp", override])


def test_the_rules_of_a_group_hold_beside_those_of_a_row() -> None:
    node = {**vars(schema_of("model", "gpt")()), "heads": 3, "width": 8, "revision": "v2"}

    said = [sentence.partition("; ")[0] for sentence in violations_of("model", node)]

    assert said == [
        "`model.revision` (=v2) is for the initial weights of the network",
        "`model.heads` (=3) must divide `model.width` (=8)",
    ]


def test_the_schema_needs_no_torch() -> None:
    code = "import sys, orchestrator.config.config_groups; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=CONF.parent, check=False).returncode == 0


SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


def test_the_defaults_lack_only_an_optimizer() -> None:
    assert not list(violations("train", {"optimizer": SGD}))
    (sentence,) = violations("finetune", {})
    assert sentence == "`finetune.optimizer` (={}) must have a `_target_`; pass one, as in torch.optim.SGD."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": -1}, "`train.epochs` (=-1) must be an integer of at least 0"),
        ({"epochs": None}, "are neither given; pass exactly one."),
        ({"steps": 5}, "are both given; pass exactly one: add `train.epochs=null` or `train.steps=null`"),
        ({"epochs": None, "steps": 2.5}, "`train.steps` (=2.5) must be an integer"),
        ({"batch_size": 0}, "`train.batch_size` (=0) must be an integer of at least 1."),
        ({"accumulate": 2**63}, "`train.accumulate` (=9223372036854775808) must be at most 9223372036854775807."),
        ({"patience": 10**30}, f"`train.patience` (={10**30}) must be at most 9223372036854775807."),
        ({"eval_batch_size": True}, "`train.eval_batch_size` (=True) must be an integer of at least 1."),
        ({"drop_last": 1}, "`train.drop_last` (=1) must be true or false."),
        ({"optimizer": None}, "`train.optimizer` (=None) must have a `_target_`"),
        ({"scheduler": {"T_max": 3}}, "`train.scheduler` (={'T_max': 3}) must have a `_target_`"),
        ({"scheduler_interval": "batch"}, "`train.scheduler_interval` (=batch) must be one of step, epoch."),
        ({"loss": "mse"}, "`train.loss` (=mse) must have a `_target_`"),
        ({"precision": "fp8"}, "`train.precision` (=fp8) must be one of fp32, bf16, fp16."),
        ({"clip_norm": 0}, "`train.clip_norm` (=0) must be greater than 0; pass null to clip nothing."),
        ({"eval_every": 0}, "`train.eval_every` (=0) must be an integer of at least 1, or null."),
        ({"select": "first"}, "`train.select` (=first) must be one of best, last."),
        ({"monitor": "val/loss"}, "`train.monitor` (=val/loss) must be loss, or a metric of the task, or null."),
        ({"patience": -2}, "`train.patience` (=-2) must be an integer of at least 1, or null."),
        ({"epoch": 3}, "`train.epoch` (=3) is not a key; the keys are _target_, accumulate, batch_size, "),
        (
            {"ema": 1},
            "`train.ema` (=1) must lie in (0, 1): the decay of an average; pass 0.999, or null for no averages.",
        ),
        ({"accumulate": 0}, "`train.accumulate` (=0) must be an integer of at least 1."),
        (
            {"penalty": -1e-4},
            "`train.penalty` (=-0.0001) must be at least 0: lambda of network slimming; pass 1e-4, for example, or 0"
            " for none.",
        ),
        (
            {"_target_": "a.b", "penalty": 1e-4},
            "`train.penalty` (=0.0001) is only for the built-in loop; leave it at 0.0 for a training function",
        ),
        ({"options": {"beta": 2}}, "`train.options` (={'beta': 2}) are for a training function of your own; pass "),
        (
            {"_target_": "a.b", "patience": 3},
            "`train.patience` (=3) is only for the built-in loop; leave it at null",
        ),
        ({"teacher": "round"}, "`train.teacher` (=round) must be one of dense, tuned, or null."),
        ({"teacher_weight": 0}, "`train.teacher_weight` (=0) must lie in (0, 1]"),
        ({"teacher_temperature": 0}, "`train.teacher_temperature` (=0) must be greater than 0"),
    ],
)
def test_each_rule_is_said_in_a_sentence(change: dict[str, Any], words: str) -> None:
    (sentence,) = violations("train", {"optimizer": SGD, **change})

    assert words in sentence


def test_every_broken_rule_is_said_at_once() -> None:
    assert len(list(violations("train", {"optimizer": SGD, "epochs": None, "batch_size": 0, "select": ""}))) == 3


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"val_fraction": 0.0}, "`data.val_fraction` (=0.0) must lie in (0, 1)"),
        ({"val_fraction": "half"}, "`data.val_fraction` (=half) must be a number, or null."),
        ({"val_size": 0}, "`data.val_size` (=0) must be an integer of at least 1"),
        ({"val_size": 3, "val_fraction": 0.5}, "are both given"),
    ],
)
def test_rules_of_the_validation_cut(node: dict[str, Any], words: str) -> None:
    (sentence,) = violations_of("data", node)

    assert words in sentence
