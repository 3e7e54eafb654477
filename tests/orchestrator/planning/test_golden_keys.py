"""Golden keys: the stages of every preset keep the keys that finished stages have in stores of before.

After a change that is meant to give stages other keys, write the new ones, and name the change in its commit:

    PYTHONPATH=tests python -m tests.orchestrator.planning.test_golden_keys
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from sampling import sampled

from orchestrator.__main__ import CONF
from orchestrator.config import hydra_options
from orchestrator.config.compose import compose_jobs
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.specs import Plan
from orchestrator.planning.plan import make_plan

KNOWN = Path(__file__).with_name("golden_keys.json")
SWEEPS = Path(str(CONF)) / "sweep"
PRESETS = sorted(file.relative_to(SWEEPS).with_suffix("").as_posix() for file in SWEEPS.rglob("*.yaml"))
QUICK = ("language_model", "reproduce/slimming", "restarts", "taught", "units")
"""Names whose keys are checked in each run of the tests."""
_OWN = ("model=gpt", "data.tokenizer=characters")
WITHOUT_WEIGHTS = {
    **dict.fromkeys(("smollm2", "depth_or_width", "smaller_lm", "smaller_lm_recovery"), _OWN),
    "smaller_lm_search": (*_OWN, "deploy=none"),
    "upcycled": _OWN[1:],
}
"""Presets with files of another package -> what stands for these: a network or a tokenizer of our own."""
FURTHER = {
    "longer": ["method=longer,identity", "schedule.sparsity=0.5"],
    "taught": ["finetune.teacher=dense,tuned", "schedule.rounds=2", "schedule.sparsity=0.5"],
    "low_rank": ["finetune.lora_rank=null,4", "finetune.lora_alpha=16,8", "schedule.sparsity=0.5"],
    "restarts": ["restart=rewind", "restart.step=0,2ep,0.5", "restart.control=none,small", "unit=group"],
    "units": ["method=magnitude", "unit=entry,channel,group", "scope=layer,global", "schedule.sparsity=0.5"],
    "deployed": ["deploy=shrink,sparse", "schedule.sparsity=0.5"],
}
"""Name -> a command whose keys leave out other settings than those of presets."""

Hydra = tuple[ConfigLoader, DictConfig]


@contextmanager
def composing() -> Iterator[Hydra]:
    """Compose the root once: a preset takes half a second less."""
    hydra_options.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        yield loader, loader.load_configuration("config", [], RunMode.MULTIRUN)


def golden(name: str, hydra: Hydra, folder: Path) -> str:
    """Return the number of stages of a preset with one seed, and the digest of the keys of its trials.

    Args:
        name: a preset, or a name in `FURTHER`.
        hydra: loader and root.
        folder: an empty folder, for the text that stands for those of presets.
    """
    command = FURTHER.get(name) or list(_command(name, folder))
    parsed = OverridesParser.create(config_loader=hydra[0]).parse_overrides([*command, "seed=0"])
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    plan = make_plan([*compose_jobs(*hydra, jobs)])
    keys = _keys(plan)
    chains = [[[keys[key] for key in (t.dense, *t.stages, *t.measured, *t.parts)] for t in plan.trials]]
    return f"{len(plan.stages)} stages {digest(canonical_json([sorted(keys.values()), chains]))}"


def _keys(plan: Plan) -> dict[str, str]:
    """Return key -> the key of the stage without the numbers of its versions, which are raised often."""
    found: dict[str, str] = {}
    for key, spec in plan.stages.items():
        named = {**spec.fields, "versions": sorted(spec.fields["versions"])}
        inputs = {role: found[other] for role, other in spec.inputs.items()}
        found[key] = replace(spec, fields=named, inputs=inputs).key
    return found


def _command(name: str, folder: Path) -> Iterator[str]:
    preset: Any = OmegaConf.load(SWEEPS / f"{name}.yaml")
    yield f"+sweep={name}"
    yield from WITHOUT_WEIGHTS.get(name.rpartition("/")[2], ())
    if {"override /data": "text"} in preset.get("defaults", []):
        book = folder / "book.txt"
        book.write_text("To be, or not to be")
        yield f"data.root={book}"
    yield from (f"{key}={values}" for key, values in preset.hydra.sweeper.params.items() if key != "seed")


@pytest.fixture(scope="module")
def hydra() -> Iterator[Hydra]:
    with composing() as found:
        yield found


@sampled(quick=lambda name: name in QUICK)
@pytest.mark.parametrize("name", [*PRESETS, *FURTHER])
def test_stages_keep_their_keys(name: str, hydra: Hydra, tmp_path: Path) -> None:
    assert golden(name, hydra, tmp_path) == json.loads(KNOWN.read_text()).get(name)


if __name__ == "__main__":
    with composing() as ready, tempfile.TemporaryDirectory() as made:
        found = {name: golden(name, ready, Path(made)) for name in [*PRESETS, *FURTHER]}
    KNOWN.write_text(f"{json.dumps(found, indent=1)}\n")
