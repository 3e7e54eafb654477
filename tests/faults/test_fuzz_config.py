"""Every configuration either plans or is refused with a sentence: no value of any key ends in a traceback."""

from __future__ import annotations

import os
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stdout
from functools import cache
from io import StringIO
from tempfile import TemporaryDirectory

import pytest
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from orchestrator.__main__ import CONF
from orchestrator.config import schema as schema
from orchestrator.config.cluster import Cluster
from orchestrator.config.compose import compose_jobs, explain, is_refusal, plain
from orchestrator.core.canonical import canonical_json
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import SweepInfo
from orchestrator.core.specs import Job
from orchestrator.execution.ray_executor import make_executor
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store
from orchestrator.sweep import conductor
from orchestrator.views.tracking.run_contents import SweepView

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "30"))
"""Raise it to search longer; each takes some 0.2 s."""

GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in CONF.iterdir()
    if folder.is_dir() and folder.name not in ("hydra", "optimizer", "scheduler", "sweep")
}
KEYS = """
    name seed objective model.name model._target_ model.input_shape model.classes model.channels model.hidden
    model.batch_norm model.dropout model.width data.name data._target_ data.val_fraction data.val_size data.split_seed
    data.test_fraction data.mean data.std data.root data.download data.path data.size data.mode method.name
    method._target_ method.scope method.n method.dim schedule.kind schedule.sparsity schedule.rounds schedule.amount
    prune.types prune.parameters prune.include prune.exclude cluster.kind cluster.address cluster.cpus_per_trial
    cluster.gpus_per_trial cluster.memory_per_trial cluster.resources cluster.resources.CPU cluster.accelerator_type
    cluster.placement cluster.max_concurrent cluster.threads cluster.retries cluster.backoff cluster.on_error
    cluster.autoscaling cluster.num_cpus cluster.dashboard tracking.kind tracking.uri tracking.experiment store.uri
    store.keep store.options store.options.key compare.margin
    model.kind data.kind method.kind model data method schedule prune cluster tracking store train finetune
""".split()  # noqa: SIM905
TRAIN_KEYS = """
    epochs steps batch_size eval_batch_size drop_last optimizer optimizer._target_ optimizer.lr optimizer.momentum
    scheduler scheduler._target_ scheduler.T_max scheduler_interval loss precision clip_norm eval_every select monitor
    patience
""".split()  # noqa: SIM905
KEYS += [f"{part}.{key}" for part in ("train", "finetune") for key in TRAIN_KEYS]

LIKELY: Mapping[str, Sequence[str]] = {
    "_target_": (
        "torch.optim.Adam",
        "pruning.LnStructured",
        "orchestrator.workloads.models.cnn",
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
TEXTS = st.text(string.printable.replace("'", "").replace("\\", ""), max_size=12).map(lambda text: f"'{text}'")


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """A command line without axes: some group choices, some keys set, added or taken away."""
    groups = draw(st.lists(st.sampled_from(sorted(GROUPS)), max_size=3, unique=True))
    line = [f"{group}={draw(st.sampled_from(GROUPS[group]))}" for group in groups]
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)):
        sign = draw(st.sampled_from(["", "", "", "", "", "++", "++", "+", "~"]))
        likely = LIKELY.get(key.rpartition(".")[2], ())
        numbers = st.one_of(st.integers(), st.floats()).map(str)
        value = draw(st.one_of(st.sampled_from([*likely, *ODD]), st.sampled_from(likely or ODD), numbers, TEXTS))
        line.append(f"~{key}" if sign == "~" else f"{sign}{key}={value}")
    return line


@pytest.fixture(scope="module", autouse=True)
def _hydra_is_cleared() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()
    hydra.cache_clear()


@cache
def hydra() -> tuple[Hydra, DictConfig]:
    """Hydra as the command line starts it, and the configuration that its launcher is given."""
    schema.register()
    GlobalHydra.instance().clear()
    started = Hydra.create_main_hydra2("orchestrator", create_config_search_path(str(CONF)))
    GlobalHydra.instance().clear()  # as it is when the command line explains an error
    return started, started.compose_config("config", [], RunMode.MULTIRUN, with_log_configuration=False)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(line=overrides())
@example(line=["schedule.rounds=1000000000"])
@example(line=["store.uri=''"])
@example(line=["method=ln_structured", "method.n=inf"])
@example(line=["train.optimizer.lr=nan"])
@example(line=["++model.table={1:2,a:3}"])
@example(line=["~seed"])
@example(line=["model=1.5"])
@example(line=["name=../../x"])
def test_a_configuration_plans_or_is_refused_in_a_sentence(line: list[str]) -> None:
    loader, master = hydra()[0].config_loader, hydra()[1]
    with TemporaryDirectory() as folder, chdir(folder):
        as_axis = outcome([*compose_jobs(loader, master, [line])])
        alone = outcome([composed_alone(line)])

        assert as_axis.startswith("sweep ") == alone.startswith("sweep "), (as_axis, alone)
        assert os.listdir(folder) == [], "nothing was started"


def composed_alone(line: list[str]) -> Job:
    """Compose as Hydra does where there are no axes."""
    try:
        return Job(
            tuple(line), plain(hydra()[0].compose_config("config", line, RunMode.RUN, with_log_configuration=False))
        )
    except Exception as error:
        if not is_refusal(error):
            raise
        return Job(tuple(line), error=explain(error, CONF, line))


def outcome(jobs: list[Job]) -> str:
    """Return the preview of a dry run or the refusal, and bring what was planned to where it would start."""
    jobs = [Job(job.overrides, job.config and {**job.config, "dry_run": True}, job.error) for job in jobs]
    try:
        with redirect_stdout(StringIO()) as printed:
            plan = conductor.run(jobs).plan
        config = plan.trials[0].config
        make_executor(Cluster(**config["cluster"]), Store(**config["store"]))
    except OrchestratorError as refusal:
        said, status = str(refusal), refusal.exit_status
        assert said.strip() and "Traceback" not in said  # noqa: PT018 - any refusal will do, if it reads well
        assert status == 2, f"nothing was started: {said}"
        return said
    info = SweepInfo("fuzz", config, "python -m orchestrator")
    canonical_json(manifest(info, plan))
    assert SweepView(info, plan, {}).opening().tags
    return printed.getvalue()
