from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import EPOCH, config, make_plan, make_record, make_records, plan_of, sweep_info
from rich.console import Console

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.events import Forecast, KnownAmount
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.records import FileInfo, StageRecord
from orchestrator.core.specs import NETWORK, Plan, StageSpec
from orchestrator.planning.forecast import afterwards, forecast, taken, told
from orchestrator.planning.pace import Pace, length, places, processor_model, wall
from orchestrator.store.saved_sweep import manifest, read
from orchestrator.store.store import Store
from orchestrator.sweep.earlier_sweeps import earlier_forecast, edited_sources, estimated
from orchestrator.views.report import report_files
from orchestrator.views.report.tables import print_forecast


def paced(plan: Plan, records: dict[str, StageRecord]) -> Pace:
    pace, where = Pace(), places(plan)
    for key, record in records.items():
        pace.learn(where[key], record)
    return pace


def made(plan: Plan, pace: Pace, finished: dict[str, StageRecord] | None = None, slots: int | None = 2) -> Forecast:
    return forecast(plan, finished or {}, pace, made=EPOCH, slots=slots)


def trained(plan: Plan, **changes: Any) -> Plan:
    """Return the same trials with `changes` of the fine-tuning."""
    configs = [{**t.config, "finetune": {**t.config["finetune"], **changes}} for t in plan.trials]
    return plan_of(configs)


def test_other_seeds_and_sparsities_take_what_stages_alike_took() -> None:
    before, plan = make_plan(seeds=(0,)), make_plan(sparsities=(0.3, 0.7), seeds=(1, 2))
    found = made(plan, paced(before, make_records(before)))

    dense, rounds = 2, 16  # 3 s for 300 steps, 1 s for 100 steps
    assert found.stages == len(plan.stages) == dense + rounds
    assert found.work == KnownAmount(dense * 3.0 + rounds * 1.0)
    assert found.steps == KnownAmount(dense * 300 + rounds * 100)
    assert found.wall == KnownAmount((6.0 + 16.0) / 2)


def test_a_stage_that_a_search_leaves_out_is_as_long_as_in_the_whole_plan() -> None:
    """Its dense network, which tells the data, is to be run and so comes after it."""
    plan = make_plan(seeds=[0], rounds=2)
    left_out = [key for key, spec in plan.stages.items() if spec.kind == "round"]

    assert places(plan.without(left_out)) == places(plan)


def test_equal_work_is_counted_once_and_what_that_saves_is_told() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5, 0.9), seeds=(0,), rounds=1)
    found = made(plan, paced(plan, make_records(plan)))

    assert found.work == KnownAmount(3.0 + 1.0 + 1.0)
    assert found.shared == 3.0, "the dense training of the second trial"


def test_finished_stages_cost_nothing() -> None:
    plan = make_plan(seeds=(0,))
    records = make_records(plan)
    dense = plan.trials[0].dense
    pace = paced(plan, records)

    assert made(plan, pace, {dense: records[dense]}).work == KnownAmount(8.0)
    assert made(plan, pace, {dense: records[dense]}).done == 3.0
    nothing = made(plan, pace, records)
    assert (nothing.stages, nothing.work, nothing.bytes) == (0, KnownAmount(), KnownAmount())
    assert list(told(nothing)) == []


@pytest.mark.parametrize("times", [0.5, 2, 10])
def test_the_estimate_scales_with_the_steps(times: float) -> None:
    before = make_plan(seeds=(0,))
    longer = trained(before, epochs=4 * times)
    found = made(longer, paced(before, make_records(before)))

    assert found.work.known == pytest.approx(3.0 + 8 * times)
    assert found.steps == KnownAmount(300 + 8 * 100 * times)


def test_steps_that_the_configuration_gives_are_known_without_any_record() -> None:
    plan = trained(make_plan(seeds=(0,)), epochs=None, steps=50)
    found = made(plan, Pace())

    assert found.steps == KnownAmount(8 * 50, unknown=1)
    assert found.work == KnownAmount(0.0, unknown=9)
    assert list(told(replace(found, basis="nothing is there"))) == [
        "unknown: nothing is there",
        "known: at least 400 steps",
    ]


@pytest.mark.parametrize("part", ["model", "data"])
def test_another_network_and_other_data_tell_nothing(part: str) -> None:
    before = make_plan(seeds=(0,))
    other = plan_of([config("l1_unstructured", 0.5, 0, 2, **{part: {"name": "x", "kind": "x"}})])

    assert made(other, paced(before, make_records(before))).work == KnownAmount(0.0, unknown=3)


def test_another_batch_size_tells_nothing() -> None:
    before = make_plan(seeds=(0,))
    found = made(trained(before, batch_size=8), paced(before, make_records(before)))

    assert found.work == KnownAmount(3.0, unknown=8), "of the dense training alone"
    assert "at least 0:03 of work" in next(told(found))


def test_what_this_run_sees_takes_the_place_of_what_earlier_ones_saw() -> None:
    plan = make_plan(seeds=(0,))
    records, where = make_records(plan), places(plan)
    pace = paced(plan, records)
    dense = plan.trials[0].dense
    pace.learn(where[dense], records[dense], 30.0, own=True)
    pace.learn(where[dense], records[dense], 99.0)

    assert pace.expect(where[dense], plan.stages[dense]).seconds == 30.0


def test_weights_count_where_the_store_keeps_them() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,), rounds=2)
    files = {"masks.npz": FileInfo("0" * 64, 100), WEIGHTS: FileInfo("0" * 64, 5_000)}
    records = {key: replace(record, files=files) for key, record in make_records(plan).items()}
    texts = sum(record.text_bytes for record in records.values())

    found = made(plan, paced(plan, records))
    assert found.bytes.known == pytest.approx(3 * 100 + 2 * 5_000 + texts, rel=0.02), "not of the round between"
    kept = forecast(plan, {}, paced(plan, records), made=EPOCH, slots=1, keep="all")
    assert kept.bytes.known - found.bytes.known == pytest.approx(5_000)


def test_the_wall_time_is_work_over_slots_but_no_chain_is_cut_and_measurements_run_alone() -> None:
    dense = StageSpec("dense", {"seed": 0})
    rounds = [StageSpec("round", {"target": t}, {NETWORK: dense.key}) for t in (0.1, 0.2, 0.3)]
    deployed = StageSpec("deploy", {"format": "shrink"}, {NETWORK: rounds[0].key})
    measure = StageSpec("measure", {"format": "shrink"}, {NETWORK: deployed.key})
    plan = Plan({spec.key: spec for spec in (dense, *rounds, deployed, measure)}, ())
    took = dict(zip(plan.stages, (10.0, 4.0, 4.0, 4.0, 1.0, 7.0), strict=True))

    assert wall(plan, took, 1) == 30.0
    assert wall(plan, took, 2) == 10 + 4 + 1 + 7, "(10 + 12 + 1) / 2 is less than the chain"
    assert wall(plan, took, 100) == 22.0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"train": {"epochs": 3, "steps": None}}, (0.0, 3.0)),
        ({"train": {"epochs": None, "steps": 70}}, (70.0, 0.0)),
        ({"train": {"epochs": 3}, "until": "1.5ep"}, (0.0, 1.5)),
        ({"train": {"epochs": 3}, "until": 20}, (20.0, 0.0)),
        ({"train": {"epochs": 3}, "restart": {"rates": 20}}, (-20.0, 3.0)),
        ({"train": {"steps": 70}, "restart": {"rates": 20}}, (50.0, 0.0)),
        ({"train": {"_target_": "mine.fit"}}, None),
    ],
)
def test_the_length_of_a_training_in_its_own_terms(fields: dict[str, Any], expected: object) -> None:
    assert length(StageSpec("dense", fields)) == expected


def test_an_estimate_in_words() -> None:
    plan = make_plan(seeds=(0,))
    found = replace(
        made(plan, paced(plan, make_records(plan))), basis="from 9 finished stages on X", bytes=KnownAmount(1.5e6)
    )
    lines = list(told(found))

    assert lines == ["0:11 of work, 0:06 with 2 at once, 1,100 steps, 1.5 MB", f"{found.basis}; sharing saves 0:09"]


def test_what_a_run_took_counts_what_ended_after_its_estimate() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,), rounds=1)
    dense, last = plan.stages
    records = {dense: make_record(plan, dense, EPOCH - 100), last: make_record(plan, last, EPOCH)}
    estimate = replace(made(plan, paced(plan, records), {dense: records[dense]}, slots=1), ended=EPOCH + 60)

    took = taken(estimate, plan, records)
    assert (took.stages, took.work, took.steps) == (1, KnownAmount(1.0), KnownAmount(100))
    assert took.wall == KnownAmount(records[last].ended - records[last].started), "without the start of Ray"
    assert afterwards(estimate, plan, records).startswith(
        "Estimated as it began: 0:01 of work, 0:01 one at a time, 100"
    )


def test_what_another_sweep_trained_after_a_run_is_not_what_that_took() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,), rounds=1)
    dense, last = plan.stages
    records = {dense: make_record(plan, dense, EPOCH + 5), last: make_record(plan, last, EPOCH + 200_000)}
    estimate = made(plan, paced(plan, records), slots=1)

    ended = afterwards(replace(estimate, ended=EPOCH + 60), plan, records)
    assert "; taken: 0:03 of work, 0:03 one at a time, 300 steps" in ended
    killed = afterwards(estimate, plan, records)
    assert "; taken since: 0:04 of work, 400 steps" in killed, "when it ended is not known, nor how long it took"
    unknown = afterwards(replace(made(plan, Pace()), ended=EPOCH + 60), plan, records)
    assert unknown.startswith("Taken: 0:03 of work, 0:03 with 2 at once, 300 steps")


def test_what_is_known_of_a_part_is_told_as_the_least() -> None:
    found = replace(
        made(make_plan(seeds=(0,)), Pace()), work=KnownAmount(61.0, 2), wall=KnownAmount(31.0, 2), steps=KnownAmount(5)
    )

    assert next(told(found)).startswith("at least 1:01 of work, at least 0:31 with 2 at once, 5 steps")
    assert next(told(replace(found, work=KnownAmount(0.2, 2), wall=KnownAmount(0.1, 2)))) == "5 steps"


def test_the_report_says_what_was_estimated_and_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_files, "draw", lambda *_: {})
    plan = make_plan(seeds=(0, 1))
    records = {key: replace(record, started=EPOCH + 1) for key, record in make_records(plan).items()}
    info = replace(sweep_info(), forecast=made(plan, paced(plan, records)))
    console = Console(file=io.StringIO(), width=60)
    print_forecast(info, plan, records, console)
    comparison = compare_trials(plan, records)
    with_it, without = (report_files.report(each, plan, records, comparison) for each in (info, sweep_info()))

    told = "Estimated as it began: 0:22 of work, 0:11 with 2 at once, 2,200 steps"
    assert told in console.file.getvalue()  # type: ignore[attr-defined]
    assert f'<p class="quiet">{told}'.encode() in with_it["comparison/report.html"]
    assert b"Estimated" not in without["comparison/report.html"]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Store, Plan]:
    """Return a store with a sweep of four trials, computed on this processor."""
    store, plan = Store(str(tmp_path / "store")), make_plan(seeds=(0,))
    for record in make_records(plan).values():
        store.commit(replace(record, environment={"processor": f"{processor_model()}, AVX2"}), {})
    store.save_sweep("before", manifest(sweep_info("before"), plan))
    return store, plan


def located(plan: Plan, **cluster: object) -> Plan:
    cluster = {"kind": "inline", "cpus_per_trial": 1, "gpus_per_trial": 0, **cluster}
    store = {"uri": "store", "keep": "needed"}
    return plan_of([{**trial.config, "cluster": cluster, "store": store} for trial in plan.trials])


def test_a_store_tells_of_other_sweeps(stored: tuple[Store, Plan]) -> None:
    store, _ = stored
    pace, found = estimated(store, located(make_plan(seeds=(5,))), {})

    assert found.work == KnownAmount(3.0 + 8 * 1.0)
    assert found.slots == 1
    assert found.basis == f"from 9 finished stages on {processor_model()}"
    assert pace.learned == 9


def test_a_sweep_that_was_interrupted_hides_no_older_one(stored: tuple[Store, Plan]) -> None:
    store, _ = stored
    for count in range(4):  # each sweep plans more similar stages than the limit of records, and none has finished
        store.save_sweep(f"later-{count}", manifest(sweep_info("later"), make_plan(seeds=range(20, 40))))

    _, found = estimated(store, located(make_plan(seeds=(5,))), {})
    assert found.work == KnownAmount(3.0 + 8 * 1.0)


def test_stages_of_another_network_are_not_told_as_what_an_estimate_is_from(stored: tuple[Store, Plan]) -> None:
    store, _ = stored
    other = plan_of([config("l1_unstructured", 0.5, 0, 2, model={"name": "x", "kind": "x"})])
    _, found = estimated(store, located(other), {})

    assert next(told(found)) == "unknown: no stage of this network, device, threads and precision has finished"


def test_a_store_of_another_processor_tells_nothing_and_says_so(tmp_path: Path) -> None:
    store, plan = Store(str(tmp_path / "store")), make_plan(seeds=(0,))
    for record in make_records(plan).values():
        store.commit(replace(record, environment={"processor": "Z80, none"}), {})
    store.save_sweep("before", manifest(sweep_info("before"), plan))

    _, found = estimated(store, located(make_plan(seeds=(5,))), {})
    assert found.work == KnownAmount(0.0, unknown=9)
    assert found.basis.endswith("only on Z80")
    _, elsewhere = estimated(store, located(make_plan(seeds=(5,)), kind="ray", address="head:6379"), {})
    assert elsewhere.work == KnownAmount(11.0)
    assert elsewhere.slots is None
    assert "on Z80; the hardware of this run is not known yet" in elsewhere.basis


def test_a_forecast_is_saved_with_its_sweep_and_a_sweep_without_one_is_read(stored: tuple[Store, Plan]) -> None:
    store, plan = stored
    assert earlier_forecast(store, "before") is None
    found = made(plan, paced(plan, make_records(plan)))
    store.save_sweep("before", manifest(replace(sweep_info("before"), forecast=found), plan))

    assert earlier_forecast(store, "before") == found
    data = store.load_sweep("before")
    del data["forecast"]
    store.save_sweep("before", data)
    assert read(store, "before").info.forecast is None
    assert earlier_forecast(store, "none such") is None


def test_a_plan_names_the_file_whose_edit_trains_stages_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net_of_mine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    store = Store(str(tmp_path / "store"))

    def written(text: str) -> Plan:
        plan, stages, keys = make_plan(seeds=(0,), rounds=2), dict[str, StageSpec](), dict[str, str]()
        for key, spec in plan.stages.items():
            fields = (
                {**spec.fields, "sources": {"modules": {"net_of_mine": text}}} if spec.kind == "dense" else spec.fields
            )
            changed = replace(spec, fields=fields, inputs={role: keys[each] for role, each in spec.inputs.items()})
            keys[key], stages[changed.key] = changed.key, changed
        trials = [replace(t, stages=tuple(keys[key] for key in t.stages), dense=keys[t.dense]) for t in plan.trials]
        return Plan(stages, tuple(trials))

    first, second = written("a" * 64), written("b" * 64)
    assert edited_sources(store, "mine", first, ()) == [], "it never ran"
    store.save_sweep("mine", manifest(sweep_info("mine"), first))
    assert edited_sources(store, "mine", first, first.stages) == []
    file, count = tmp_path / "net_of_mine.py", len(second.stages)
    assert edited_sources(store, "mine", second, first.stages) == [
        f"{file} was edited since the last run of this sweep: {count} stages run again"
    ]
