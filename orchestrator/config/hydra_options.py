"""Options of Hydra's groups: schemas for files in `conf`, and nodes for rows and presets without a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from orchestrator.config import cluster, config_groups
from orchestrator.config.config_groups import OPEN, OWN
from orchestrator.config.deploy import MEASURED, SETS
from orchestrator.config.schema import Config
from pruning.catalogue.presets import SCOPES, UNITS


def register() -> None:
    """Put the schemas, and the options without files, into Hydra's ConfigStore.

    `/hydra/schema/config` is the root; `/hydra/schema/GROUP/KIND` is the schema of an option with a file in `conf`.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(group="hydra/schema", name="config", node=Config, package="_global_")
    store.store(group="hydra/schema", name="cluster", node=cluster.Cluster)
    for group, options in schema_options().items():
        store.repo["hydra"]["schema"][group] = _Nodes(f"hydra/schema/{group}", options)
    for group, options in stored_options().items():
        store.repo[group] = _Nodes(group, options)
    store.repo = _Uncopied(store.repo)


class _Uncopied(dict[str, Any]):
    """Hydra's stored nodes, which Hydra copies one by one on lookup, and would copy all for each group of `--help`."""

    def __deepcopy__(self, _: object) -> _Uncopied:
        return self


IN_FILES = ("model", "data", "task", "method")
"""Groups whose built-in options are files in `conf`, generated from rows."""


def schema_options() -> dict[str, dict[str, Any]]:
    """Return group -> option -> a function that returns its schema, for groups whose options are files."""
    found: dict[str, dict[str, Any]] = {
        name: {kind: partial(config_groups.schema_of, name, kind) for kind in config_groups.GROUPS[name].rows}
        for name in IN_FILES
    }
    found["method"]["base"] = partial(config_groups.schema_of, "method", None)
    return found


def stored_options() -> dict[str, dict[str, Any]]:
    """Return group -> option -> a function that returns its node, for options without a file in `conf`."""
    rows = {name: group for name, group in config_groups.GROUPS.items() if name not in IN_FILES}
    found: dict[str, dict[str, Any]] = {
        name: {kind: partial(config_groups.schema_of, name, kind) for kind in group.rows}
        for name, group in rows.items()
    }
    for name in OPEN:
        own = {option.name: option.default for option in config_groups.GROUPS[name].own}
        found.setdefault(name, {})[OWN] = partial(dict, own)
    for name, presets in {"unit": UNITS, "scope": SCOPES}.items():
        found[name] = {option: partial(dict, preset.sets) for option, preset in presets.items()}
    formats = {name: chosen for name, (chosen, _) in SETS.items()} | {name: [name] for name in MEASURED}
    found["deploy"] = {name: partial(dict, formats=chosen) for name, chosen in formats.items()}
    return found


class _Nodes(dict[str, Any]):
    """Nodes of a group in Hydra's ConfigStore, made on lookup: a node takes 2 ms, and few are looked up."""

    def __init__(self, group: str, options: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__({f"{name}.yaml": make for name, make in options.items()})
        self.group = group

    def __getitem__(self, name: str) -> Any:
        from hydra.core.config_store import ConfigNode

        made = super().__getitem__(name)()
        node = OmegaConf.structured(made) if isinstance(made, type) else OmegaConf.create(made)
        return ConfigNode(name, node, self.group, package=None, provider=None)


def shadowed(folder: Path | None, conf: Path) -> Iterator[str]:
    """Yield a sentence for each custom file with the name of a built-in option: Hydra would silently use one of them.

    Args:
        folder: the folder of `--config-dir`; None for no folder.
        conf: the packaged configuration.
    """
    if folder is None:
        return
    options = {f"{group}/{name}" for group, options in stored_options().items() for name in options}
    options |= {file.relative_to(conf).with_suffix("").as_posix() for file in conf.rglob("*.yaml")}
    for option in sorted(options):
        file = folder / f"{option}.yaml"
        if file.is_file():
            group, _, name = option.rpartition("/")
            yield (
                f"{file} has the name of the built-in option {group}={name}, and would hide it or be hidden; "
                f"rename the file, as in {file.with_name(f'my_{name}.yaml')}."
            )
