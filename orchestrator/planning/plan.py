"""Plans: trial configurations to a forest of stages in which equal work appears once. Pure; needs no torch.

A dense stage depends on model, data, training, seed, device kind and thread count. A round depends on its parent, on
its pruning, and on its training or the step of the dense training from which it continues. Trials with equal prefixes
share stages, as their specs and so their keys are equal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.catalogue.tasks import AGAINST_DENSE
from orchestrator.config import sources
from orchestrator.config.parallel import processes
from orchestrator.config.round_schema import is_identity
from orchestrator.config.schema import Config, ConfigError
from orchestrator.core.plain_data import digest, read_as
from orchestrator.core.redact import redact_argument
from orchestrator.core.specs import (
    CHOICES,
    DENSE,
    NETWORK,
    OF_SCORING_DATA,
    RATES,
    REWIND,
    TEACHER,
    Job,
    Key,
    Plan,
    StageSpec,
    TrialSpec,
    identity_of,
    start_of,
)
from orchestrator.core.stage_kinds import Place
from orchestrator.planning import harness_tasks, pinned_content
from orchestrator.planning.file_places import absolute
from orchestrator.planning.number_formats import first_few
from orchestrator.planning.round_parts import parts_of, rung_violations
from orchestrator.planning.versions import version_of, version_of_restart, versions_of, versions_of_deployment
from orchestrator.trial import rules
from orchestrator.trial.canonical import TRAININGS, canonical, outside_keys
from orchestrator.trial.choices import decides_itself, order_of
from orchestrator.trial.names import names_of_trials, normal
from orchestrator.trial.restarts import restart_of
from pruning import schedule as schedules
from pruning.catalogue.dynamics import DYNAMICS
from pruning.choices import axes

DENSE_PARTS = ("model", "data", "task", "train")
ROUND_PARTS = ("method", *CHOICES, "prune", "task", "finetune")
RETRAINED_PARTS = ("method", *CHOICES, "prune", "task", "train")
"""Parts of a round that continues from a step of the dense training."""
AT_STEPS = {"step": REWIND, "rates": RATES}
"""Field of a restart with a step -> role of the start that ends at this step."""
UNPRUNED: Mapping[str, Any] = {
    "method": {"kind": "identity"},
    "score": {"kind": "magnitude", **dict.fromkeys(OF_SCORING_DATA)},
    "unit": vars(axes.Unit()),
    "scope": vars(axes.Scope()),
    "dynamics": {"kind": "nested"},
    "repair": {"kind": "none"},
}
"""Choices of rounds that prune nothing: those of `method=longer`."""
LISTED = 20
"""Maximum number of reasons that a refusal lists; the rest are counted."""


def make_plan(jobs: Sequence[Job]) -> Plan:
    """Plan the trials of a sweep; raise one `ConfigError` that lists the errors of all trials."""
    sources.look_again()
    pinned_content.look_again()
    if not jobs:
        raise ConfigError("The sweep has no trials, as one of its axes is empty; give every axis at least one value.")
    wrong: dict[str, list[str]] = {}
    stages: dict[str, StageSpec] = {}
    identities: dict[str, str] = {}
    trials: list[TrialSpec] = []
    names = names_of_trials(jobs)
    seen: dict[str, list[str]] = {}
    for job, name in zip(map(normal, jobs), names, strict=True):
        reasons = str(job.error).splitlines() if job.config is None else _violations(job.config, seen)
        for reason in dict.fromkeys(reasons):  # two files that are missing may be one
            from orchestrator.config.refusals.refused_choices import name_typed_choice  # imports hydra

            wrong.setdefault(name_typed_choice(reason, job.overrides), []).append(name)
        if not reasons and job.config is not None:
            specs, keys, dense, measured, parts = _stages(job.config)
            for spec in specs:
                known = stages.setdefault(spec.key, spec)
                if spec.starts_from and (more := set(spec.starts_from) - set(known.starts_from)):
                    stages[spec.key] = replace(known, starts_from=(*known.starts_from, *sorted(more)))
                if spec.key not in identities:
                    identities[spec.key] = identity_of(spec, identities)
            overrides = tuple(map(redact_argument, job.overrides))
            trials.append(TrialSpec(name, overrides, job.config, keys, dense, identities[keys[-1]], measured, parts))
    if wrong:
        raise ConfigError(refusal(wrong, len(jobs), "cannot be planned; nothing was started"))
    ordered: dict[str, StageSpec] = {}
    for key, spec in stages.items():  # what a stage may continue from comes before it
        ordered |= {start: stages[start] for start in spec.starts_from if start not in ordered}
        ordered[key] = spec
    return Plan(ordered, tuple(trials))


def round_targets(config: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the request of each round: `{"target": overall sparsity}` or `{"amount": amount of the survivors}`.

    The sizes of a unit are a request by themselves, with a target of None.
    With given densities, the request is the `scope` with the densities of the round, and a target of None; densities
    of a file prune to the overall sparsity in the last round.
    """
    schedule, scope = config["schedule"], config["scope"]
    if is_identity(config["method"]):
        return ({"target": 0.0},) * int(schedule["rounds"])
    if scope["kind"] == "window":
        return ({"target": 1 - scope["n"] / scope["m"]},)
    row = DYNAMICS.get(str(config["dynamics"].get("kind")))
    if config["unit"]["kind"] == "sizes" or (row is not None and not row.has_target):
        return ({"target": None},) * int(schedule["rounds"])
    if scope["allocation"] == "given":
        paths = {
            name: schedules.targets(schedule["kind"], 1 - density, schedule["rounds"]) if density else None
            for name, density in scope["densities"].items()
        }
        last, plain = int(schedule["rounds"]) - 1, canonical(config, ["scope"])["scope"]
        return tuple(
            {
                "target": schedule["sparsity"] if k == last else None,
                "scope": {**plain, "densities": {n: 1 - p[k] if p else 0.0 for n, p in paths.items()}},
            }
            for k in range(last + 1)
        )
    if schedule["amount"] is not None:
        return ({"amount": schedule["amount"]},) * int(schedule["rounds"])
    targets = schedules.targets(schedule["kind"], schedule["sparsity"], schedule["rounds"])
    return tuple({"target": target} for target in targets)


def device_kind(config: Mapping[str, Any]) -> str:
    """Return `cuda` if a trial uses a GPU, else `cpu`: results are bit-equal only within a kind."""
    return "cuda" if config["cluster"]["gpus_per_trial"] > 0 else "cpu"


def threads(config: Mapping[str, Any]) -> int:
    """Return the intra-op threads of a process: results depend on them through the order of float reductions."""
    cluster = config["cluster"]
    return int(cluster["threads"] or max(1, int(cluster["cpus_per_trial"] / processes(config))))


def _stages(
    config: Mapping[str, Any],
) -> tuple[list[StageSpec], tuple[Key, ...], Key, tuple[Key, ...], tuple[Key, ...]]:
    """Return the stages of a trial, inputs first; the keys of its chain; the key of its dense training; the keys of the
    measurements of its last network; and the keys of the parts of its last round.
    """
    trial = read_as(Config, config)
    pinned, location = pinned_content.pinned(config)
    config = {**config, "task": pinned["task"]}
    if config["schedule"]["amount"] is None and not decides_itself(config["method"]):
        config = {**config, "method": {}}  # the name adds nothing to the choices
    location |= {part: outside_keys(config[part]) for part in TRAININGS}
    compares = bool(config["task"].get("kind") and config["task"].get(AGAINST_DENSE))
    task = {**config["task"], AGAINST_DENSE: False} if compares else config["task"]  # dense is not compared with itself
    fields = _parts({**config, **pinned, "task": task}, DENSE_PARTS) | {
        "device": device_kind(config),
        "threads": threads(config),
    }
    fields["sources"] = _sources(config, DENSE_PARTS)
    if (count := processes(config)) > 1:
        own = {"processes": count, "sync_batch_norm": config["parallel"]["sync_batch_norm"]}
        fields["parallel"] = own | {"version": version_of("ranks")}
    dense = StageSpec("dense", fields, location=location)
    starts: dict[Place, StageSpec] = {}

    def start(place: Place) -> StageSpec:
        return starts.setdefault(place, start_of(dense, place))

    chain = [dense if config["schedule"]["at"] == "trained" else start(0)]
    compared = {DENSE: dense.key} if compares else {}
    order = _order(config)
    shared: dict[tuple[str, ...], dict[str, Any]] = {}
    targets = round_targets(config)
    tuned = _tuned_dense(config, dense, compared, len(targets)) if config["finetune"]["teacher"] == "tuned" else []
    taught = tuned or [dense] * len(targets) if config["finetune"]["teacher"] else []
    for index, target in enumerate(targets, start=1):
        restart = restart_of(trial, last=index == len(targets))
        parts = RETRAINED_PARTS if "rates" in restart else ROUND_PARTS
        if parts not in shared:
            shared[parts] = _parts(config, parts) | {"sources": _sources(config, DENSE_PARTS + parts)}
        inputs = {NETWORK: chain[-1].key, **compared} | ({TEACHER: taught[index - 1].key} if taught else {})
        inputs |= {role: start(restart[name]).key for name, role in AT_STEPS.items() if name in restart}
        place = {"round": index, "inner": config["schedule"]["inner"]} | order
        fields = shared[parts] | ({"restart": restart} if restart else {}) | place | target
        fields["versions"] = fields["versions"] | version_of_restart(restart)
        chain.append(StageSpec("round", fields, inputs, location=location))
    saving = tuple(spec.key for place, spec in starts.items() if place)
    begun = parts_of(chain[-1], config["search"])
    cut = tuple(spec.key for spec in begun)
    ends = [*begun, replace(chain[-1], starts_from=cut)] if cut else chain[-1:]
    deployed, measured = deployments(config["deploy"], dense, chain[-1])
    stages = [*starts.values(), replace(dense, starts_from=saving), *tuned, *chain[1:-1], *ends, *deployed]
    evaluated = evaluations(config, dense, chain[1:])
    measured += tuple(spec.key for spec in evaluated)
    return [*stages, *evaluated], tuple(spec.key for spec in chain), dense.key, measured, cut


def _tuned_dense(
    config: Mapping[str, Any], dense: StageSpec, compared: Mapping[str, Key], rounds: int
) -> list[StageSpec]:
    """Return the stages that fine-tune the dense network, unpruned and untaught, for as long as each round ends.

    They have the choices of a trial of `method=longer`, so that all trials of a seed share them with that control.
    """
    finetune = {**config["finetune"], "teacher": None, "lora_rank": None}
    parts = {**config, **UNPRUNED, "finetune": finetune}
    fields = _parts(parts, ROUND_PARTS) | {"sources": _sources(parts, DENSE_PARTS + ROUND_PARTS), "inner": 1}
    found = [dense]
    for index in range(1, rounds + 1):
        inputs = {NETWORK: found[-1].key, **compared}
        found.append(StageSpec("round", {**fields, "round": index, "target": 0.0}, inputs, location=dense.location))
    return found[1:]


def deployments(
    config: Mapping[str, Any], dense: StageSpec, last: StageSpec
) -> tuple[list[StageSpec], tuple[str, ...]]:
    """Return the stages for each format, inputs first, and the keys of the measurements.

    Args:
        config: the node `deploy` of a trial's configuration
        dense: the dense training, whose deployment all trials of its seed share
        last: the stage that the trial ends with
    """
    stages, measured = list[StageSpec](), []
    for name in config["formats"]:
        whole, smaller = (_deployment(name, dense, of) for of in (dense, last))
        what = {
            "batch_sizes": config["batch_sizes"],
            "seconds": config["seconds"],
            "blocks": config["blocks"],
            "threads": config["threads"] or dense.typed.threads,
        }
        inputs = {NETWORK: smaller.key, DENSE: whole.key}
        latency = StageSpec("measure", {**smaller.fields, "measure": what}, inputs, location=dense.location)
        stages += [whole, smaller, latency]
        measured.append(latency.key)
    return stages, tuple(measured)


def _deployment(name: str, dense: StageSpec, network: StageSpec) -> StageSpec:
    known = {part: dense.fields[part] for part in ("device", "sources")}
    fields = {"format": name, **known, "versions": versions_of_deployment(name)}
    return StageSpec("deploy", fields, {NETWORK: network.key}, location=dense.location)


def evaluations(config: Mapping[str, Any], dense: StageSpec, rounds: Sequence[StageSpec]) -> list[StageSpec]:
    """Return a stage for each task of lm-evaluation-harness and network: dense, and the last round's or all rounds'.

    Args:
        config: configuration of the trial
        dense: the dense training
        rounds: stages of the rounds
    """
    networks = [dense, *(rounds if config["harness"]["each"] == "all" else rounds[-1:])]
    known = {part: dense.fields[part] for part in ("device", "threads", "sources")}
    known["versions"] = {"stage/harness": version_of("stage/harness")}
    own = config["harness"]["include_path"]
    location = {**dense.location, "harness": {"include_path": own and absolute(own), "directory": os.getcwd()}}
    return [
        StageSpec("harness", {"harness": fields, **known}, {NETWORK: network.key}, location=location)
        for fields in harness_tasks.fields(config, dense.location)
        for network in networks
    ]


def _order(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the order of the layers as a field of a round, which rounds without it have at once."""
    found = order_of(config)
    return {} if found == "at_once" else {"order": found}


def _parts(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that a result depends on: the seed, our code, and the canonical form of these parts."""
    parts: dict[str, Any] = canonical(config, names)
    sequential = "method" in names and bool(_order(config))
    versions = versions_of(parts, sequential=sequential, model=config["model"])
    return parts | {"seed": config["seed"], "versions": versions}


def _sources(config: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Return the digests of the custom code and files behind these parts.

    A round includes the parts of model and data, as they build its network. A worker checks each stage against the
    digests of its plan.
    """
    found = sources.fingerprint({name: config[name] for name in names})
    return {**found, "packages": {**found["packages"], **pinned_content.releases(config)}}


def _violations(config: Mapping[str, Any], seen: dict[str, list[str]]) -> list[str]:
    """Return the broken rules of a configuration; equal configurations are checked once."""
    key = digest(repr(config))  # not canonical JSON: a wrong value may not exist in JSON
    if key not in seen:
        own = (pinned_content.violations, rung_violations, harness_tasks.violations)
        seen[key] = list(rules.violations(config)) or [text for rule in own for text in rule(config)]
    return seen[key]


def refusal(wrong: Mapping[str, Sequence[str]], total: int, verdict: str) -> str:
    """Return the text of a refusal: the `verdict`, then each reason of `wrong` with the names of its trials."""
    refused = {name for names in wrong.values() for name in names}
    lines = [f"{len(refused)} of {total} trials {verdict}."]
    for reason, names in list(wrong.items())[:LISTED]:
        lines.append(f"  {reason}")
        if total > 1:
            lines.append(f"    in {first_few(names, 3)}")
    if len(wrong) > LISTED:
        lines.append(f"  and {len(wrong) - LISTED} more reasons")
    return "\n".join(lines)
