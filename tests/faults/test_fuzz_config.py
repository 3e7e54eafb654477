"""Every configuration is either planned or refused with a sentence; no value of any key ends in a traceback."""

from __future__ import annotations

import os
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from tempfile import TemporaryDirectory

import pytest
from composition import composed_tree
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from orchestrator.__main__ import CONF
from orchestrator.config import config_groups, hydra_options
from orchestrator.config import schema as schema
from orchestrator.config.cluster import Cluster
from orchestrator.config.compose import compose_jobs, plain
from orchestrator.config.refusals.refused_settings import Compose, explain, is_refusal
from orchestrator.config.well_formed import keys
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import SweepInfo
from orchestrator.core.plain_data import canonical_json
from orchestrator.core.specs import Job
from orchestrator.execution.on_ray.ray_executor import executor_of
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store
from orchestrator.sweep import conductor
from orchestrator.views.tracking.run_contents import SweepView

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "300"))
"""Number of examples of the longest test; raise it to search longer."""
SEED = int(os.environ.get("FUZZ_SEED", "0")) or secrets.randbits(32)
"""Seed of the slow tests: new in each run, and printed on a failure."""

GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in CONF.iterdir()
    if folder.is_dir() and folder.name not in ("hydra", "optimizer", "scheduler", "sweep")
}
PARTS = ("optimizer._target_", "optimizer.lr", "optimizer.momentum", "scheduler._target_", "scheduler.T_max", "loss.x")
KEYS = sorted(
    {
        f"{name}.{key}"
        for name, each in config_groups.GROUPS.items()
        for kind in each.rows
        for key in keys(config_groups.schema_of(name, kind))
    }
    | {f"{group}.{key}" for group, node in keys(schema.Config).items() if node for key in keys(node)}
    | {f"{training}.{part}" for training in ("train", "finetune") for part in PARTS}
    | {*keys(schema.Config), "cluster.resources.CPU", "store.options.key", "model.hidden.0", "data.mean.0"}
)

LIKELY: Mapping[str, Sequence[str]] = {
    "_target_": (
        "torch.optim.Adam",
        "pruning.LnStructured",
        "orchestrator.workloads.networks.classifiers.cnn",
        "no_such.Thing",
        "os",
        "os.path",
    ),
    "kind": (
        "mlp",
        "mnist",
        "ln_structured",
        "identity",
        "ray",
        "inline",
        "mlflow",
        "none",
        "linear",
        "cubic",
        "one_shot",
    ),
    "scope": ("global", "layer"),
    "n": ("1", "inf", "-inf", "fro", "nuc", "0", "-2", "0.5"),
    "dim": ("0", "1", "-1", "5", "-9", "0.5"),
    "sparsity": ("0.5", "0", "1", "1.0", "0.999999", "1e-300", "-0.1"),
    "amount": ("0.2", "1", "3", "10000000", "1.5", "-1", "0"),
    "rounds": ("1", "7", "0", "-3"),
    "address": ("auto", "local", "ray://host:10001", "host:6379", "host", ":1", "[::1]:80", "host:99999"),
    "memory_per_trial": ("2GB", "512MiB", "1e9", "0", "-1", "2 XB"),
    "uri": ("sqlite:///x.db", "http://u:p@host/", "memory://x", "foo://x", "~", "/dev/null", "file:///etc/hostname"),
}
ODD = (
    *("null", "true", "false", "nan", "inf", "-inf", "-1", "0", "0.0", "1", "2", "1.5", "-0.0", "1e308", "1e-320"),
    *("9" * 30, f"-{'9' * 30}", "''", "' '", "'\\x00'", "[]", "{}", "[1]", "[0.5,-1]", "[null]", "[[]]", "{a:1}"),
    *(
        "{1:2,a:3}",
        "[[nan]]",
        "{a:-inf}",
        "{_target_:x}",
        "{a:null}",
        "???",
        "'${seed}'",
        "'${no.such}'",
        "'${oc.env:NO_SUCH}'",
        "'${'",
        "'../../x'",
    ),
    *("'${oc.env:NO_SUCH}'", "'a=b'", "'a,b'", "é漢字", "'*'", "'['", "a/b", "0x10", "1_000", "'" + "x" * 300 + "'"),
)
RESOLVED = (
    *(
        "${oc.decode:'3'}",
        "${oc.decode:'[1'}",
        "${oc.env:HOME}",
        "${oc.env:NO,null}",
        "${oc.select:seed,3}",
        "${now:%Y}",
    ),
    *("${oc.create:{a:1}}", "${oc.create:[1,a]}", "${oc.dict.keys:model}", "${oc.dict.values:store}", "${no:such}"),
    *("${hydra:job.name}", "${oc.deprecated:seed}", "[${seed}]", "{a:${seed}}", "a${seed}", "${${name}}", "${.seed}"),
)
AXES = (
    "1,2",
    "range(3)",
    "range(0)",
    "choice(a,b)",
    "glob(*)",
    "interval(0,1)",
    "tag(a,1)",
    "sort(2,1)",
    "1,",
    "str(1)",
)
TEXTS = st.text(string.printable.replace("'", "").replace("\\", ""), max_size=12).map(lambda text: f"'{text}'")
VALUES = st.one_of(
    st.sampled_from([*ODD, *RESOLVED, *AXES]),
    st.sampled_from(KEYS).map("${{{}}}".format),
    st.lists(st.sampled_from(ODD), max_size=3).map(lambda items: f"[{','.join(items)}]"),
    st.one_of(st.integers(), st.floats()).map(str),
    TEXTS,
)


@st.composite
def overrides(draw: st.DrawFn, most_choices: int = 3) -> list[str]:
    """Strategy for command lines without axes: group choices, and keys that are set, added, removed or misspelled."""
    groups = draw(st.lists(st.sampled_from(sorted(GROUPS)), max_size=most_choices, unique=True))
    line = [f"{group}={draw(st.sampled_from(GROUPS[group]))}" for group in groups]
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)):
        sign = draw(st.sampled_from(["", "", "", "", "", "++", "++", "+", "~"]))
        likely = LIKELY.get(key.rpartition(".")[2], ODD)
        value = draw(st.one_of(st.sampled_from(likely), VALUES))
        place = draw(st.integers(0, 10 * len(key)))
        spelled = draw(st.sampled_from([key[:place] + key[place + 1 :], f"{key}.x", f"{key[:place]}.{key[place:]}"]))
        spelled = spelled if place < len(key) else key
        line.append(f"~{spelled}" if sign == "~" else f"{sign}{spelled}={value}")
    return line


@pytest.fixture(scope="module", autouse=True)
def _hydra_is_cleared() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()
    hydra.cache_clear()


@cache
def hydra() -> tuple[Hydra, DictConfig]:
    """Hydra as the command line starts it, and the configuration that its launcher gets."""
    hydra_options.register()
    GlobalHydra.instance().clear()
    started = Hydra.create_main_hydra2("orchestrator", create_config_search_path(str(CONF)))
    GlobalHydra.instance().clear()  # as it is when the command line explains an error
    return started, started.compose_config("config", [], RunMode.MULTIRUN, with_log_configuration=False)


LINES = [
    ["store.uri=''"],
    ["~seed"],
    ["sed=1", "++data.table={1:2,a:3}"],
]
LIKE_THESE = [
    ["++model.table={1:2,a:3}"],
    ["model=1.5"],
    ["prune.include=[[1]]"],
    ["prune=${model.hidden}"],
    ["+train.optimizer=${now:%Y.%m}"],
    ["schedule.rounds=1000000000"],
    ["method=ln_structured", "method.n=inf"],
    ["train.optimizer.lr=nan"],
    ["name=../../x"],
    ["+store.oaptions.x=1"],
    ["prune.exclude=${seed}"],
    ["prune.parameters=${oc.decode:'3'}"],
    ["store.options=${model.classes}"],
]


@pytest.mark.parametrize(
    "line", [*LINES, *(pytest.param(line, marks=pytest.mark.slow) for line in LIKE_THESE)], ids=" ".join
)
def test_a_configuration_plans_or_is_refused_in_a_sentence(line: list[str]) -> None:
    planned_alike(line)


@pytest.mark.slow
@seed(SEED)
@settings(max_examples=8, database=None, suppress_health_check=list(HealthCheck))
@given(line=overrides())
def test_each_way_to_compose_any_configuration_plans_or_refuses_it(line: list[str]) -> None:
    note(f"FUZZ_SEED={SEED}")
    planned_alike(line)


def planned_alike(line: list[str]) -> None:
    """Assert that each way to compose a configuration plans it, or that each way refuses it in a sentence."""
    loader, master = hydra()[0].config_loader, hydra()[1]
    with folder_of_its_own():
        as_axis = outcome([*compose_jobs(loader, master, [line])])
        alone = outcome([composed_alone(line)])
        quick = outcome([job_of(line, composed_tree)])

        planned = [said.startswith("sweep ") for said in (as_axis, alone, quick)]
        assert len(set(planned)) == 1, (as_axis, alone, quick)


@contextmanager
def folder_of_its_own() -> Iterator[None]:
    """Work in an empty directory, and assert that nothing was started there."""
    with TemporaryDirectory() as folder, chdir(folder):
        yield
        assert os.listdir(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@seed(SEED)
@settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
@given(line=overrides(most_choices=1))
def test_any_command_line_plans_or_is_refused_in_a_sentence(line: list[str]) -> None:
    note(f"FUZZ_SEED={SEED}")
    with folder_of_its_own():
        outcome([job_of(line, composed_tree)])


def composed_alone(line: list[str]) -> Job:
    """Compose as Hydra does without axes."""
    return job_of(
        line, lambda each: hydra()[0].compose_config("config", each, RunMode.RUN, with_log_configuration=False)
    )


def job_of(line: list[str], compose: Compose) -> Job:
    try:
        return Job(tuple(line), plain(compose(line)))
    except Exception as error:
        if not is_refusal(error):
            raise
        return Job(tuple(line), error=explain(error, compose, line, GROUPS))


def outcome(jobs: list[Job]) -> str:
    """Return the preview of a dry run or the refusal; stop a plan right before it would start."""
    jobs = [Job(job.overrides, job.config and {**job.config, "dry_run": True}, job.error) for job in jobs]
    try:
        with redirect_stdout(StringIO()) as printed:
            plan = conductor.run(jobs).plan
        config = plan.trials[0].config
        cluster = Cluster(**config["cluster"])
        executor_of(cluster)(cluster, Store(**config["store"]))
    except OrchestratorError as refusal:
        said, status = str(refusal), refusal.exit_status
        assert said.strip() and "Traceback" not in said  # noqa: PT018 - any refusal will do, if it reads well
        assert status == 2, f"nothing was started: {said}"
        return said
    info = SweepInfo("fuzz", config, "python -m orchestrator")
    canonical_json(manifest(info, plan))
    assert SweepView(info, plan, {}).opening().tags
    return printed.getvalue()
