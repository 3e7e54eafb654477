from __future__ import annotations

import io
import random
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any, get_args

import pytest
from factories import ACCURACY, EPOCH, failed, finished, make_plan, make_record, make_records
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sampling import sampled

from orchestrator.core.events import Decision, Failure, KnownAmount, Look, StageEvent
from orchestrator.core.records import NOWHERE, CurvePoint, Reached
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.planning.number_formats import duration
from orchestrator.planning.pace import Pace
from orchestrator.views.terminal.progress import Progress
from orchestrator.views.terminal.stage_lines import measured, reached, speed
from orchestrator.views.terminal.tally import Tally, TimeLeft, TrialState


def shown(
    plan: Plan,
    events: list[StageEvent],
    *,
    terminal: bool = False,
    done: tuple[str, ...] = (),
    begun_stages: int = 0,
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=terminal, highlight=False)
    clock = iter(range(100_000))
    records = {key: make_record(plan, key) for key in done}
    with Progress(plan, records, console=console, clock=lambda: EPOCH + next(clock)) as progress:
        begun = dict.fromkeys(list(plan.stages)[:begun_stages], Reached(True, 40))
        progress.opening("digits", {"store": "/data/store", "MLflow": "mlflow ui"}, begun)
        for event in events:
            progress.event(event)
        progress.closing({"store": "/data/store"})
    return out.getvalue()


def started(key: str, time: float) -> StageEvent:
    return StageEvent("started", key, time)


def test_without_a_terminal_every_event_is_one_plain_line() -> None:
    plan = make_plan(seeds=(0,))
    records = make_records(plan)
    events = [event for key in plan.stages for event in (started(key, EPOCH), finished(records[key]))]

    lines = shown(plan, events).splitlines()

    assert "\x1b" not in "\n".join(lines)
    told = [line for line in lines if line.startswith("  ") and ("started" in line or "finished" in line)]
    assert len(told) == len(events)
    assert "dense, seed 0 (shared by 4 trials)" in told[0]
    assert f"validation accuracy {records[plan.trials[0].stages[0]].after['val/accuracy']:.2%}" in told[1]
    assert "[1/9" in told[1]
    assert "sparsity 50.00%" in next(
        line for line in told if "sparsity=0.5 seed=0, round 2/2" in line and "fin" in line
    )
    assert lines[-2].startswith("4 of 4 trials done, in 0:")


def test_a_warning_of_a_finished_stage_gets_a_line() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,))
    last = plan.trials[0].stages[-1]
    record = replace(make_record(plan, last), warnings=("masks changed in 2 of 240 steps",))

    assert f"Warning of {plan.trials[0].name}, round 2/2: masks changed in 2 of 240 steps." in shown(
        plan, [started(last, EPOCH), finished(record)]
    )


def test_the_opening_says_what_runs_what_is_done_and_where_things_are() -> None:
    plan = make_plan(seeds=(0,))

    text = shown(plan, [], done=plan.trials[0].stages)

    assert "Sweep digits: 4 trials, 9 stages (1 dense training, 8 rounds), 3 saved by sharing." in text
    assert "Done already: 3 stages, 1 trial; 6 stages to run." in text
    assert "MLflow  mlflow ui" in text
    assert "/data/store" in text


@pytest.mark.parametrize(("parallel", "said"), [({"kind": "ddp", "processes": 4}, True), ({"kind": "none"}, False)])
def test_the_opening_says_that_trials_train_in_several_processes(parallel: dict[str, Any], said: bool) -> None:
    plan = make_plan(seeds=(0,))
    trials = tuple(replace(trial, config={**trial.config, "parallel": parallel}) for trial in plan.trials)

    assert (
        "Each trial trains in 4 processes (`parallel.processes`)." in shown(replace(plan, trials=trials), [])
    ) == said


@pytest.mark.parametrize(("stages", "more"), [(1, ""), (5, " and 2 more")])
def test_the_opening_says_from_which_steps_stages_go_on(stages: int, more: str) -> None:
    text = shown(make_plan(seeds=(0,)), [], begun_stages=stages)

    (line,) = (line for line in text.splitlines() if line.startswith("Resumed from checkpoints: "))
    assert line.startswith("Resumed from checkpoints: dense, seed 0 (shared by 4 trials) from step 40")
    assert line.endswith(f"from step 40{more}.")


def test_what_an_interruption_leaves_is_not_called_failed() -> None:
    plan = make_plan(seeds=(0,))
    first, *others = plan.stages
    events = [started(first, EPOCH), *(StageEvent("killed", key, EPOCH) for key in (first, *others))]

    text = shown(plan, events)

    assert "0 of 4 trials done, 4 to be finished, in" in text
    assert text.count("stopped") == 1, "what never began is not told one by one"


def test_why_a_run_ends_is_told_once_and_without_a_stage_that_never_began() -> None:
    plan = make_plan(seeds=(0,))
    why = Failure("the sweep was interrupted")

    text = shown(plan, [StageEvent("killed", key, EPOCH, failure=why) for key in plan.stages])

    (line,) = (line for line in text.splitlines() if "stopped" in line)
    assert line.split(maxsplit=1)[1] == "stopped   the sweep was interrupted"


def test_why_stages_were_stopped_is_told_once() -> None:
    plan = make_plan(seeds=(0,))
    first, *others = plan.stages
    why = Failure("the sweep was interrupted")
    killed = [StageEvent("killed", key, EPOCH, failure=why) for key in (*others, first)]

    text = shown(plan, [started(first, EPOCH), *killed])

    assert text.count("stopped") == 2, "what never began, and what ran"
    assert text.count(why.message) == 1


def test_a_failure_is_told_with_its_reason_and_log() -> None:
    plan = make_plan(seeds=(0,))
    text = shown(plan, [failed(plan.trials[0].stages[1])])

    assert "loss is nan" in text
    assert "/logs/0.log" in text
    assert "1 failed" in text


@pytest.mark.parametrize(
    ("place", "said"),
    [(NOWHERE, "attempt 2"), (Reached(True, 0), "attempt 2, from step 0"), (Reached(False, 11), "from block 11")],
)
def test_a_retry_says_from_which_place_it_goes_on(place: Reached, said: str) -> None:
    plan = make_plan(seeds=(0,))
    event = StageEvent("retried", next(iter(plan.stages)), EPOCH, failure=Failure("lost"), attempt=2, reached=place)

    (line,) = (line for line in shown(plan, [event]).splitlines() if "retried" in line)
    assert line.endswith(said)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reason_is_told_once_however_many_stages_it_stops(terminal: bool) -> None:
    plan = make_plan(seeds=(0,))
    text = shown(plan, [failed(key) for key in plan.stages], terminal=terminal)

    assert text.count("loss is nan") == 1
    assert text.count("not run, because the stage before it failed") == (0 if terminal else len(plan.stages) - 1)
    assert "0 of 4 trials done, 4 failed" in text


def test_on_a_terminal_the_display_is_live_and_failures_stay() -> None:
    plan = make_plan(seeds=(0,))
    dense, first = plan.trials[0].stages[:2]
    text = shown(plan, [finished(make_record(plan, dense)), started(first, EPOCH), failed(first)], terminal=True)

    assert "\x1b[?25l" in text
    assert "\x1b[?25h" in text, "the cursor is given back"
    assert "loss is nan" in text
    assert "1 failed, 3 waiting" in text, "what fails stands first: a narrow terminal cuts the end"


def test_the_live_display_shows_what_runs() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,))
    dense, first, _ = plan.stages
    console = Console(file=io.StringIO(), width=160)
    progress = Progress(plan, {dense: make_record(plan, dense)}, console=console, clock=lambda: EPOCH + 70)
    progress.event(started(first, EPOCH))
    with console.capture() as capture:
        console.print(progress._render())
    text = capture.get()

    assert "1/3 stages" in text
    assert "trials: 0 waiting, 1 running, 0 done; in use: 1 CPU" in text
    had = f"{make_record(plan, dense).after['val/accuracy']:.2%}"
    assert f"round 1/2  to 68.38% from 0.00%, which had validation accuracy {had}" in text
    assert "1:10" in text


def test_the_live_display_shows_how_far_a_stage_is() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,))
    dense = plan.trials[0].stages[0]
    console = Console(file=io.StringIO(), width=160)
    progress = Progress(plan, {}, console=console, clock=lambda: EPOCH + 70)
    progress.event(started(dense, EPOCH))
    progress.point(dense, CurvePoint(34, 0.34, EPOCH, {"val/accuracy": 0.912}), ACCURACY)

    def rendered() -> str:
        with console.capture() as capture:
            console.print(progress._render())
        return capture.get()

    assert " 3%, validation accuracy 91.20%" in rendered()
    progress.event(started(dense, EPOCH))
    assert "91.20%" not in rendered(), "an attempt starts again"


def test_without_a_terminal_a_quiet_minute_is_followed_by_how_far_a_stage_is() -> None:
    plan, out, now = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,)), io.StringIO(), EPOCH
    key = plan.trials[0].stages[1]
    progress = Progress(plan, {}, console=Console(file=out, width=200), clock=lambda: now)
    progress.event(started(key, EPOCH))
    for number in range(1, 7):
        now = EPOCH + 25 * number
        progress.point(key, CurvePoint(number, 0.0, now, {"blocks": 30}), ACCURACY)

    assert [line.split("  ")[-1] for line in out.getvalue().splitlines() if "working" in line] == [
        "pruned block 3/30",
        "pruned block 6/30",
    ]


def test_examples_a_second_are_those_of_whole_batches_between_two_points() -> None:
    spec = StageSpec("dense", {"train": {"batch_size": 64, "accumulate": 2}, "parallel": {"processes": 4}})
    first, blocks = CurvePoint(10, 1.0, EPOCH, {}), CurvePoint(20, 1.0, EPOCH + 2, {"blocks": 30})

    assert speed(spec, first, CurvePoint(100, 2.0, EPOCH + 4, {})) == "2,880 examples/s"
    assert speed(spec, first, CurvePoint(11, 2.0, EPOCH + 40, {})) == "3.2 examples/s"
    assert [speed(spec, first, each) for each in (first, blocks, CurvePoint(9, 2.0, EPOCH + 1, {}))] == ["", "", ""]


@pytest.mark.parametrize(("width", "fits"), [(69, True), (68, False), (51, False)])
def test_examples_a_second_are_shown_where_nothing_is_cut_for_them(width: int, fits: bool) -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,))
    dense = plan.trials[0].stages[0]
    console = Console(file=io.StringIO(), width=width)
    progress = Progress(plan, {}, console=console, clock=lambda: EPOCH + 70)
    progress.event(started(dense, EPOCH))
    for step, seconds in ((1, 1), (34, 2)):
        point = CurvePoint(step, step / 100, EPOCH + seconds, {"val/accuracy": 0.912})
        progress.point(dense, point, ACCURACY)
    with console.capture() as capture:
        console.print(progress._render())
    (line,) = (line for line in capture.get().splitlines() if line.startswith("dense, seed 0"))

    batch = plan.stages[dense].training_config["batch_size"]
    assert (f"; {33 * batch:,} examples/s" in line) == fits
    assert "3%, validation accuracy 91.20%" in line
    assert ".." not in line
    assert line.rstrip().endswith("1:10")


@sampled(2)
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (80, 10), (20, 3)])
def test_the_display_of_a_long_sweep_fits_and_says_how_far_each_axis_is(width: int, height: int) -> None:
    plan = make_plan(sparsities=(0.5, 0.75, 0.9), seeds=range(100))
    console = Console(file=io.StringIO(), width=width, height=height)
    now = EPOCH
    progress = Progress(plan, {}, console=console, clock=lambda: now, slots=4)
    records = make_records(plan)
    for trial in plan.trials[:7]:
        for key in trial.stages:
            progress.event(finished(records[key]))
    for key in list(plan.stages)[-30:]:
        progress.event(started(key, EPOCH))
    now += 200_000
    with console.capture() as capture:
        console.print(progress._render())
    lines = capture.get().splitlines()

    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    if width >= 80:
        done = [records[trial.stages[-1]].after["val/accuracy"] for trial in plan.trials[:7]]
        assert f"21/{len(plan.stages)} stages" in lines[0]
        assert any(line.startswith(f"best so far on validation: {max(done):.2%}, random_") for line in lines)
        assert any(f"random_unstructured 7/300 {max(done):.2%}  l1_unstructured 0/300" in line for line in lines)
        assert any(line.startswith("sparsity  0.5 7/200") for line in lines)
        assert lines[-1] == f"and {30 - sum('2 d 07:33' in line for line in lines)} more run"


@pytest.mark.parametrize("variable", ["CI", "TERM"])
def test_where_no_display_can_be_lines_are_plain_and_few(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, {"CI": "true", "TERM": "dumb"}[variable])
    plan = make_plan(seeds=range(15))
    records = make_records(plan)
    events = [event for key in plan.stages for event in (started(key, EPOCH), finished(records[key]))]
    text = shown(plan, [*events, failed(plan.trials[0].stages[1])], terminal=True)

    assert "\x1b[?25l" not in text, "nothing is redrawn"
    assert len(plan.stages) == 135
    assert text.count("  started  ") == 0
    assert text.count("  finished  ") == len(plan.trials) + 15, "the trials, and the dense trainings"
    assert text.count("round 2/2") == len(plan.trials)


def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(make_plan(seeds=(0,)), [], terminal=True)

    assert "\x1b[?25l" in text, "the display itself is no colour"
    assert "\x1b[3" not in text


def test_what_an_interrupt_cut_short_has_not_failed() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,))
    dense, *rounds = plan.stages
    console = Console(file=io.StringIO(), width=160)
    progress = Progress(plan, {dense: make_record(plan, dense)}, console=console, clock=lambda: EPOCH)
    for key in rounds:
        progress.event(StageEvent("killed", key, EPOCH))
    with console.capture() as capture:
        console.print(progress._render())

    assert "1/3 stages" in capture.get()
    assert "trials: 1 to be finished, 0 waiting" in capture.get()


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({"epochs": 4}, "25%"),
        ({"steps": 30, "epochs": None}, "10%"),
        ({"epochs": None}, "step 3"),
        ({"steps": 2}, "100%"),
    ],
)
def test_how_far_a_stage_is_in_its_own_terms(training: dict[str, int | None], told: str) -> None:
    spec = StageSpec("dense", {"train": training})
    assert reached(spec, CurvePoint(3, 1.0, 0.0, {}), ACCURACY) == told
    assert reached(spec, CurvePoint(12, 0.0, 0.0, {"blocks": 30}), ACCURACY) == "pruned block 12/30"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (75, "1:15"), (3700, "1:01:40"), (86399, "23:59:59"), (184_440, "2 d 03:14"), (-3, "0:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_tally_follows_a_trial() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5, 0.9), seeds=(0,), rounds=1)
    dense, half, ninety = plan.stages
    tally = Tally(plan, {})

    def counts() -> tuple[int, ...]:
        return tuple(tally.trials()[state] for state in get_args(TrialState)[:4])

    assert counts() == (2, 0, 0, 0)
    tally.take(started(dense, 0))
    assert counts() == (0, 2, 0, 0)
    tally.take(finished(make_record(plan, dense)))
    assert counts() == (2, 0, 0, 0)
    tally.take(started(half, 0))
    tally.take(finished(make_record(plan, half)))
    assert counts() == (1, 0, 1, 0)
    tally.take(started(ninety, 0))
    tally.take(failed(ninety))
    assert counts() == (0, 0, 1, 1)
    tally.take(StageEvent("retried", ninety, 0, attempt=2))
    tally.take(started(ninety, 0))
    assert counts() == (0, 1, 1, 0)
    tally.take(finished(make_record(plan, ninety)))
    assert counts() == (0, 0, 2, 0)
    assert tally.settled == 3


def test_trials_that_a_search_stops_are_counted_and_its_conclusions_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5, 0.9), seeds=(0,), rounds=1)
    progress = Progress(plan, {})
    look = Look("explore", (), {}, "fine")
    progress.decided(Decision(looks=(look,), run=tuple(plan.stages)[:2]))
    progress.decided(Decision(looks=(look,), stopped={plan.trials[1].name: "no"}, ended=True))
    progress.closing({})
    told = capsys.readouterr().out

    assert told.count("Search: explore: fine.") == 1
    assert "Search ended: 3 of 3 stages need not run." in told
    assert "0 of 2 trials done, 1 stopped by the search" in told


@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["started", "finished", "failed", "killed", "retried"]))))
def test_the_tally_never_loses_a_trial_nor_what_is_durable(steps: list[tuple[int, str]]) -> None:
    plan = make_plan(seeds=(0,))
    records, keys = make_records(plan), list(plan.stages)
    tally = Tally(plan, {})
    durable = set()
    for position, kind in steps:
        key = keys[position]
        event = finished(records[key]) if kind == "finished" else replace(started(key, 0), kind=kind)  # type: ignore[arg-type]
        tally.take(event)
        durable |= {key} if kind == "finished" else set()

        assert tally.records.keys() == durable
        assert durable.isdisjoint(tally.lost | tally.running.keys())
        assert sum(tally.trials().values()) == len(plan.trials)
        assert tally.trials()["done"] == sum(durable.issuperset(trial.stages) for trial in plan.trials)


def simulate(plan: Plan, slots: int, spread: float, seed: int = 0) -> tuple[float, list[tuple[float, float]]]:
    """Simulate `plan` on `slots` slots; return its end and the estimates (time, seconds left)."""
    draw = random.Random(seed)
    took = {
        key: (12.0 if spec.kind == "dense" else 4.0) * draw.uniform(1 - spread, 1 + spread)
        for key, spec in plan.stages.items()
    }
    left, ready, now = TimeLeft(plan, {}), [key for key in plan.stages if not plan.needs(key)], 0.0
    running: list[tuple[float, str]] = []
    estimates: list[tuple[float, float]] = []
    while ready or running:
        while ready and len(running) < slots:
            key = ready.pop(0)
            left.started(key, now)
            heappush(running, (now + took[key], key))
        now, key = heappop(running)
        left.finished(key, now, make_record(plan, key))
        estimates.append((now, left.seconds(now).known))
        ready = [*plan.children.get(key, ()), *ready]
    return now, estimates


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_after_a_third_the_time_to_finish_is_right_within_a_fifth(slots: int, seed: int) -> None:
    plan = make_plan(methods=("random_unstructured",), sparsities=(0.5, 0.75, 0.875, 0.9375, 0.96875), rounds=3)
    end, estimates = simulate(plan, slots, spread=0.2, seed=seed)

    later = [(now, left) for now, left in estimates if end / 3 <= now <= 0.9 * end]
    assert later
    for now, left in later:
        assert abs(now + left - end) <= 0.2 * end


@pytest.mark.parametrize(
    ("left", "text"),
    [(KnownAmount(0.3, 2), ""), (KnownAmount(75.0, 2), ", at least 1:15 left"), (KnownAmount(75.0), ", 1:15 left")],
)
def test_a_time_left_of_which_nothing_is_known_is_not_shown(
    left: KnownAmount, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimeLeft, "seconds", lambda self, now: left)
    progress = Progress(make_plan(), {}, console=Console(file=io.StringIO()))

    assert progress._seen()[0] == text


def test_nothing_is_estimated_before_something_alike_has_finished() -> None:
    plan = make_plan()
    dense, first, *_ = plan.stages
    left = TimeLeft(plan, {})

    assert left.seconds(0.0) == KnownAmount(0.0, len(plan.stages))
    left.started(dense, 0.0)
    assert left.seconds(5.0).known == 0.0
    left.finished(dense, 12.0, make_record(plan, dense))
    assert left.seconds(12.0).unknown == 0, "the pace of its steps tells of the others"
    before = left.seconds(12.0).known
    left.started(first, 12.0)
    assert left.seconds(14.0).known == pytest.approx(before - 2.0)


def test_a_measurement_says_what_it_measured_and_what_ran_beside_it() -> None:
    quiet = {"speedup/1": 1.25, "speedup_low/1": 1.2, "speedup/64": 2.0, "others": 0.1}

    assert measured(quiet, {}) == "1.25× as fast at batch 1, 2.00× as fast at batch 64"
    assert measured(quiet | {"others": 2.0}, {}).endswith("at batch 64, while 2.0 other processes ran")
    assert measured({"speedup/1": 1.25, "token_speedup/1": 1.5}, {}) == "1.25× as fast (1.50× for a token) at batch 1"
    assert measured({"parameters": 7035, "bytes": 28_600}, {}) == "7,035 parameters, 28.6 kB"
    assert measured({"speedup/1": 1.25, "speedup_pytorch/1": 3.5}, {"dense_runtime/1": "openvino 2026.4"}) == (
        "1.25× as fast as dense in openvino 2026.4 (3.50× as in PyTorch) at batch 1"
    )
    runtimes = {"dense_runtime/1": "openvino 2026.4", "int8_runtime/1": "onnxruntime 1.32 int8"}
    assert measured({"speedup/1": 1.25, "speedup_pytorch/1": 3.5, "speedup_int8/1": 2.0}, runtimes) == (
        "1.25× as fast as dense in openvino 2026.4 (3.50× as in PyTorch, 2.00× as in onnxruntime 1.32 int8) at batch 1"
    )


def test_an_estimate_is_made_once_for_stages_that_take_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(methods=("l1_unstructured",), seeds=tuple(range(50)))
    left, asked = TimeLeft(plan, {}), list[str]()
    expect = Pace.expect
    monkeypatch.setattr(Pace, "expect", lambda self, place, spec: asked.append(spec.key) or expect(self, place, spec))

    assert left.seconds(0.0) == KnownAmount(0.0, len(plan.stages))
    assert len(asked) < 5 < len(plan.stages)
