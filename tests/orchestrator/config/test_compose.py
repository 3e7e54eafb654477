"""Composition of jobs: equal to Hydra's, and done once for each set of group choices."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from composition import composed as whole
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig
from sampling import sampled

from orchestrator.__main__ import CONF
from orchestrator.config import compose, hydra_options, schema
from orchestrator.core.specs import Job
from orchestrator.planning.plan import make_plan
from orchestrator.sweep.launch import check_axes

Hydra = tuple[ConfigLoader, DictConfig]


@pytest.fixture(scope="module")
def hydra() -> Hydra:
    hydra_options.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return loader, loader.load_configuration("config", [], RunMode.MULTIRUN)


def composed(hydra: Hydra, jobs: Sequence[Sequence[str]]) -> list[Job]:
    return list(compose.compose_jobs(*hydra, jobs))


JOBS = (
    [["seed=1"], ["seed=2"]],
    [
        ["method=ln_structured", "method.n=1"],
        ["method=identity", "seed=3"],
        ["method=ln_structured", "method.n=inf"],
    ],
    [["schedule.sparsity=0.5"], ["schedule.sparsity=null", "schedule.amount=3"], ["schedule=amount"]],
    [["model=mlp", "model.hidden=[8,4]"], ["model=mlp", "model.hidden=[2]"]],
    [["train.optimizer.lr=0.1"], ["optimizer@train.optimizer=adam"], ["+train.optimizer.nesterov=true"]],
    [["train.optimizer={_target_: torch.optim.SGD, lr: 1}"], ["train.optimizer.lr=0.5"]],
    [["prune.exclude=['conv1*']", "seed=1"], ["prune.exclude=[]", "seed=2"]],
    [["data.mean=[0.1]", "seed=0"], ["data.mean='${data.std}'", "seed=0"], ["data.mean='${data.std}'", "seed=1"]],
    [["model=mlp", "+width=8", "model.hidden=['${width}','${width}']", f"seed={seed}"] for seed in (0, 1)],
    [["train.epochs=3", "++train.epochs=5"], ["train.epochs=4", "++train.epochs=5"]],
    [["train.optimizer.lr=0.5", f"train.optimizer={{lr: {lr}}}"] for lr in (1, 2)],
    [["model=mlp", "model.hidden=[8,4]", f"model.hidden.0={width}"] for width in (2, 3)],
)


@sampled(16)
@pytest.mark.parametrize("job", [jobs[-1] for jobs in JOBS])
def test_the_compositions_of_the_tests_are_hydra_s(hydra: Hydra, job: list[str]) -> None:
    """The other tests of this file compare with them: Hydra takes forty times as long."""
    assert whole(*job) == compose.plain(hydra[0].load_sweep_config(hydra[1], list(job)))


@sampled(6)
@pytest.mark.parametrize("jobs", JOBS)
def test_each_config_is_what_hydra_composes(hydra: Hydra, jobs: list[list[str]]) -> None:
    for job, made in zip(jobs, composed(hydra, jobs), strict=True):
        assert made.error is None
        assert made.config == whole(*job)


@pytest.fixture
def with_widths(tmp_path: Path) -> Iterator[Hydra]:
    """Custom network whose widths are given once, and interpolated inside a list and a mapping."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "theirs.yaml").write_text(
        "_target_: theirs.Net\nwidth: 4\nhidden: ['${model.width}', '${model.width}']\n"
        "parts:\n  - {width: '${.width2}', width2: '${model.width}'}\n"
    )
    hydra_options.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        search = [f"hydra.searchpath=[file://{tmp_path}]"]
        yield loader, loader.load_configuration("config", search, RunMode.MULTIRUN)


@pytest.mark.slow
def test_an_interpolation_inside_a_list_follows_its_axis(with_widths: Hydra) -> None:
    jobs = [["model=theirs", f"model.width={width}"] for width in (8, 16, 32)]
    models = [job.config["model"] for job in composed(with_widths, jobs) if job.config]

    assert [model["hidden"] for model in models] == [[8, 8], [16, 16], [32, 32]]
    assert [model["parts"] for model in models] == [[{"width": width, "width2": width}] for width in (8, 16, 32)]


COUNTS = st.sampled_from(["1", "2", "7", "'${train.eval_batch_size}'", "'${oc.select:seed,3}'", "'${length}'"])
LISTS = st.lists(COUNTS, max_size=3).map(lambda items: f"[{','.join(items)}]")
TREES = st.builds("[{{a: {}, b: {}}},{}]".format, COUNTS, LISTS, COUNTS)
SAME_IN_ALL = {"train.epochs": COUNTS, "model.hidden": LISTS, "+model.nested": TREES, "++train.batch_size": COUNTS}
AXES = {
    "seed": COUNTS,
    "train.eval_batch_size": st.sampled_from(["3", "4"]),
    "train.epochs": COUNTS,
    "data.mean": LISTS,
}
AXES |= {"++length": st.sampled_from(["5", "6"]), "train.batch_size": COUNTS, "model.hidden": LISTS}


@st.composite
def sweeps(draw: st.DrawFn) -> list[list[str]]:
    """Return jobs of a sweep: common settings, and axes before, between and after them."""
    same = [
        f"{key}={draw(SAME_IN_ALL[key])}" for key in draw(st.sets(st.sampled_from(sorted(SAME_IN_ALL)), max_size=2))
    ]
    moving = draw(st.lists(st.sampled_from(sorted(AXES)), unique=True, min_size=1, max_size=3))
    places = [draw(st.integers(0, len(same))) for _ in moving]
    jobs = [["model=mlp", "+length=5", *same] for _ in range(2)]
    for axis, place in zip(moving, places, strict=True):
        for job in jobs:
            job.insert(2 + place, f"{axis}={draw(AXES[axis])}")
    return jobs


def composed_alike(hydra: Hydra, jobs: list[list[str]], reference: Callable[..., Any] = whole) -> None:
    """Check that each job is composed as by the reference, or refused if it refuses it."""
    for job, made in zip(jobs, composed(hydra, jobs), strict=True):
        try:
            expected = reference(*job)
        except Exception:
            assert made.error is not None, job
        else:
            assert made.config == expected, job


@pytest.mark.slow
@settings(max_examples=3)
@given(sweeps())
def test_any_sweep_is_composed_as_hydra_composes_it(hydra: Hydra, jobs: list[list[str]]) -> None:
    composed_alike(hydra, jobs)


@pytest.mark.slow
@settings(max_examples=8)
@given(sweeps())
def test_many_a_sweep_is_composed_as_hydra_composes_it(hydra: Hydra, jobs: list[list[str]]) -> None:
    composed_alike(hydra, jobs, lambda *job: compose.plain(hydra[0].load_sweep_config(hydra[1], list(job))))


@pytest.mark.slow
def test_jobs_do_not_see_each_others_values(hydra: Hydra) -> None:
    jobs = [["seed=1", "train.epochs=3"], ["seed=2"], ["train.epochs=4", "seed=1"]]

    assert [(j.config["seed"], j.config["train"]["epochs"]) for j in composed(hydra, jobs) if j.config] == [
        (1, 3),
        (2, 15),
        (1, 4),
    ]


def test_an_interpolation_follows_what_it_points_to(hydra: Hydra) -> None:
    jobs = [[f"train.epochs={n}", "finetune.epochs='${train.epochs}'"] for n in (3, 5)]

    assert [job.config["finetune"]["epochs"] for job in composed(hydra, jobs) if job.config] == [3, 5]


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("seed=range(1)", None),
        ("seed=0,1", None),
        ("seed=range(2,2)", "is an empty axis"),
        ("seed=0,1,0", r"`seed` \(=0,1,0\) has 0 twice, .*; leave one out\.$"),
        ("schedule.sparsity=0.5,0.50", "has 0.5 twice"),
        ("prune.exclude=[a],[b],[a]", r"has \['a'\] twice"),
    ],
)
def test_an_axis_has_values_each_of_them_once(axis: str, said: str | None) -> None:
    with pytest.raises(schema.ConfigError, match=said) if said else nullcontext():
        check_axes([compose.parse(axis)])


@pytest.mark.slow
def test_a_variable_of_the_users_own_may_be_an_axis(hydra: Hydra) -> None:
    jobs = [[f"+length={n}", "train.epochs='${length}'"] for n in (3, 5)]
    found = [job.config for job in composed(hydra, jobs) if job.config]
    assert [each["train"]["epochs"] for each in found] == [3, 5]
    assert all("length" not in each for each in found)
    make_plan(composed(hydra, jobs))


def test_an_own_key_that_nothing_refers_to_is_refused(hydra: Hydra) -> None:
    with pytest.raises(schema.ConfigError, match=r"`widht` \(=3\) is not a key"):
        make_plan(composed(hydra, [["+widht=3"], ["+widht=5"]]))


@pytest.mark.slow
def test_a_refused_job_carries_the_sentence_and_the_others_go_on(hydra: Hydra) -> None:
    good, wrong_type, unknown = composed(hydra, [["seed=1"], ["seed=x"], ["sed=1"]])

    assert good.error is None
    assert wrong_type.error is not None
    assert wrong_type.error.startswith("`seed` (=x) must be an integer")
    assert unknown.config is None


def test_stored_nodes_are_copied_on_lookup_alone() -> None:
    hydra_options.register()
    store = ConfigStore.instance()
    one, other = (store.load("hydra/schema/cluster.yaml").node for _ in range(2))

    assert copy.deepcopy(store.repo) is store.repo, "as Hydra does for each group of --help"
    assert one == other
    assert one is not other


def test_equal_choices_are_composed_once(hydra: Hydra, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [[f"model={model}", f"seed={seed}"] for model in ("mlp", "cnn") for seed in range(10)]
    plainly, calls = type(hydra[0]).load_configuration, list[object]()
    monkeypatch.setattr(
        type(hydra[0]), "load_configuration", lambda *given, **named: calls.append(1) or plainly(*given, **named)
    )

    assert len(make_plan(composed(hydra, jobs)).trials) == 20
    assert len(calls) == 2


@pytest.mark.slow
def test_a_thousand_trials_a_second_from_overrides_to_plan(hydra: Hydra) -> None:
    jobs = [[f"schedule.sparsity={s / 100}", f"seed={seed}"] for seed in range(20) for s in range(1, 100, 2)]
    (first,) = composed(hydra, jobs[:1])
    ratios: list[float] = []
    while min(ratios, default=20) >= 20 and len(ratios) < 3:  # once, on an idle machine
        start = time.process_time()
        plan = make_plan(composed(hydra, jobs))
        planned = time.process_time()
        for _ in jobs:  # the same number of copies: other load slows both down
            copy.deepcopy(first.config)
        ratios.append((planned - start) / (time.process_time() - planned))

    assert len(plan.trials) == 1000
    assert min(ratios) < 20, "1,000 copies take a twelfth of a second on the machine that this was set on"


def test_jobs_with_equal_settings_in_a_part_share_it(hydra: Hydra) -> None:
    settings = [[f"finetune.optimizer.lr={lr}", f"seed={seed}"] for seed, lr in enumerate((0.9, 0.5, 0.1, 0.5))]
    configs = [job.config or {} for job in composed(hydra, settings)]

    assert configs == [whole(*job) for job in settings]
    assert configs[3]["finetune"] is configs[1]["finetune"]
