"""Frontiers by rungs: what is dominated or breaks a constraint stops, and the answer is a set with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from searched_plans import grid, in_parts, noisy, records_of, run_search, titles

from orchestrator.core.events import Decision
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import DENSE, NETWORK, Plan, StageSpec
from orchestrator.sweep.search.candidates import SearchSpace
from orchestrator.sweep.search.frontier import Frontier

METHODS = ("method_0", "method_1", "method_2")
PLAN = grid(METHODS, (0.5, 0.7, 0.9), seeds=9)


def by_index(method: str, sparsity: float, seed: int) -> float:
    """Lose a point for each index and more at larger sparsities, with a little noise."""
    return int(method[-1]) / 100 + 0.05 * (sparsity - 0.5) + noisy((method, sparsity, seed))


def ended(policy: Frontier, plan: Plan = PLAN, loss=by_index, failed=()) -> Decision:  # type: ignore[no-untyped-def]
    decisions, _ = run_search(policy, plan, records_of(plan, loss), failed=failed)
    return decisions[-1]


def test_what_another_network_dominates_stops() -> None:
    last = ended(Frontier())

    assert titles(last) == [
        "rung 1 of 3: 9 candidates, 1 seed",
        "rung 2 of 3: 3 candidates, 3 seeds",
        "rung 3 of 3: 3 candidates, 9 seeds",
    ]
    assert last.looks[0].concluded.startswith("3 of 9 candidates go on; hypervolume 0.")
    assert last.stopped["method_1 sparsity=0.5 seed=8"] == "dominated after 1 seed"
    assert len(last.networks) == 3 * 9


def test_the_answer_is_a_set_with_intervals_the_smallest_first() -> None:
    head, *each = ended(Frontier()).answers

    assert head.startswith("frontier of accuracy on validation against parameters: 3 of 9 candidates, hypervolume 0.")
    assert [text.partition(":")[0] for text in each] == [
        "method_0 at 90.00%",
        "method_0 at 70.00%",
        "method_0 at 50.00%",
    ]
    assert "1,103 parameters; accuracy 87.95% [87.92, 87.98], -2.05 [-2.08, -2.02] points" in each[0]
    assert each[0].endswith("points against dense")


def test_networks_outside_of_the_constraints_stop() -> None:
    within = ended(Frontier(within=0.012))
    limited = ended(Frontier(limits={"parameters": 4000.0}))

    assert [text.partition(":")[0] for text in within.answers[1:]] == ["method_0 at 70.00%", "method_0 at 50.00%"]
    assert within.stopped["method_0 sparsity=0.9 seed=8"] == "outside of the constraints after 1 seed"
    assert [text.partition(":")[0] for text in limited.answers[1:]] == ["method_0 at 90.00%", "method_0 at 70.00%"]


def test_a_frontier_without_networks_says_which_came_closest() -> None:
    (told,) = ended(Frontier(within=0.001, limits={"parameters": 2000.0})).answers

    assert told.startswith("no network is within 0.10 points of dense with at most 2,000 parameters; the closest to ")
    assert "method_0 at 50.00%: 5,126 parameters; accuracy 89.91%" in told
    assert "the smallest: method_0 at 90.00%: " in told


def test_an_interval_rules_out_only_what_is_shown_to_be_worse() -> None:
    def close(method: str, sparsity: float, seed: int) -> float:
        return 0.05 * (method == "method_2") + 0.05 * sparsity + noisy((method, seed))

    by_means = ended(Frontier(first=3), loss=close)
    certain = ended(Frontier(first=3, confidence=0.95), loss=close)

    assert by_means.looks[0].concluded.startswith("3 of 9")
    assert certain.looks[0].concluded.startswith("6 of 9")
    assert certain.answers[0].partition("candidates")[0].endswith(": 3 of 9 ")


def test_more_than_one_quantity() -> None:
    last = ended(Frontier(against=["macs", "training_macs", "parameters"]))

    assert last.answers == ("no network has finished with all its figures",), "no training cost is recorded"
    assert last.stopped["method_0 sparsity=0.5 seed=8"] == "failed or not measured after 1 seed"
    assert (
        "12,000 multiply-accumulates, 1,103 parameters;" in ended(Frontier(against=["macs", "parameters"])).answers[1]
    )


def test_a_network_that_fails_is_not_on_the_frontier() -> None:
    failing = [trial.stages[1] for trial in PLAN.trials if trial.name.startswith("method_0")]
    last = ended(Frontier(), failed=failing)

    assert all(text.startswith("method_1") for text in last.answers[1:])
    assert last.stopped["method_0 sparsity=0.5 seed=1"] == "failed or not measured after 1 seed"


def test_rungs_of_rounds_meet_the_constraints_at_the_end() -> None:
    plan = grid(METHODS, (0.7, 0.9), seeds=2, rounds=9)
    last = ended(Frontier(rungs="rounds", limits={"parameters": 2000.0}), plan)

    assert [title.rpartition(", ")[2] for title in titles(last)] == ["1 round", "3 rounds", "9 rounds"]
    assert [text.partition(":")[0] for text in last.answers[1:]] == ["method_0 at 90.00%"]


def test_networks_after_each_round_are_candidates_of_lines_with_one_sparsity() -> None:
    plan = grid(METHODS, (0.9,), seeds=3, rounds=3)
    last = ended(Frontier(), plan)

    assert titles(last)[0] == "rung 1 of 2: 9 candidates, 1 seed"
    assert [text.partition(" at")[0] for text in last.answers[1:]] == ["method_0"] * 3
    assert last.stopped.keys() == {f"method_{i} sparsity=0.9 seed={seed}" for i in (1, 2) for seed in (1, 2)}


def deployed(places: Callable[[Mapping[str, Any]], tuple[str, int]] = lambda _: ("onnx", 8)) -> Plan:
    """Return the plan with a measurement for each trial, in the format and at the batch size of `places`."""
    stages, trials = dict(PLAN.stages), []
    for trial in PLAN.trials:
        name, size = places(trial.config)
        pair = [StageSpec("deploy", {"format": name}, {NETWORK: key}) for key in (trial.stages[-1], trial.dense)]
        inputs = {NETWORK: pair[0].key, DENSE: pair[1].key}
        latency = StageSpec("measure", {"format": name, "measure": {"batch_sizes": [size]}}, inputs)
        stages |= {spec.key: spec for spec in (*pair, latency)}
        config = {**trial.config, "deploy": {"formats": [name], "batch_sizes": [size], "threads": None}}
        trials.append(replace(trial, config=config, measured=(latency.key,)))
    return Plan(stages, tuple(trials))


def measured(plan: Plan, after: Callable[[str], dict[str, float]] = lambda _: {}) -> dict[str, StageRecord]:
    """Return records whose method_2 runs in 1 ms, the others in 4 and 5 ms; `after`: figures in the format."""
    plain = replace(plan, stages=PLAN.stages)
    records = records_of(plain, by_index)
    for trial in plan.trials:
        method, last = trial.config["method"]["name"], records[trial.stages[-1]]
        times = {"latency_ms/8": 1.0 if method == "method_2" else 4.0 + int(method[-1]), "speedup/8": 1.0}
        for key in (*plan.stages[trial.measured[0]].inputs.values(), *trial.measured):
            spec = plan.stages[key]
            figures = {"seconds": 1.0, "bytes": 100.0, **times}
            changed = after(method) if spec.kind == "measure" else {}
            records[key] = replace(
                last, key=key, kind=spec.kind, spec=spec.to_json(), after=changed, measurements=figures
            )
    return records


def test_latencies_are_measured_before_a_rung_is_judged() -> None:
    plan = deployed()
    decisions, ran = run_search(Frontier(["latency"], limits={"latency": 4.5}), plan, measured(plan))
    last = decisions[-1]

    assert [text.partition(";")[0] for text in last.answers[1:]] == [
        "method_2 at 50.00%: 1.00 ms",
        "method_0 at 50.00%: 4.00 ms",
    ]
    assert last.stopped["method_1 sparsity=0.5 seed=8"] == "outside of the constraints after 1 seed"
    assert sum(record.kind == "measure" for record in ran.values()) == 9 + 2 * 8


def test_a_format_that_changes_outputs_is_judged_by_its_own_figures() -> None:
    plan = deployed()
    changed = measured(plan, lambda method: {"val/accuracy": 0.7 if method == "method_0" else 0.8})
    decisions, _ = run_search(Frontier(["latency"]), plan, changed)

    assert {text.partition(" ")[0] for text in decisions[-1].answers[1:]} == {"method_2"}
    assert "accuracy 80.00%, -10.00 points against dense" in decisions[-1].answers[1]


def test_several_kinds_of_machines_are_named() -> None:
    plan, here = deployed(), {"processor": "Pen", "threads": "1", "runtime": "onnxruntime 1"}
    records = {
        key: replace(each, environment=here) if each.spec["fields"].get("seed") or index % 2 else each
        for index, (key, each) in enumerate(measured(plan).items())
    }
    decisions, _ = run_search(Frontier(["latency"]), plan, records)

    assert "measured on several kinds of machines (processor " in decisions[-1].answers[0]


def test_deployments_that_differ_are_refused() -> None:
    plan = deployed(lambda config: ("onnx", 1 if config["seed"] else 8))
    (told,) = Frontier(["latency"]).refusals(SearchSpace(plan))
    early = [*Frontier(["bytes"], rungs="rounds").refusals(SearchSpace(deployed()))][-1]

    assert "`deploy` differs between trials; pass one first value of deploy.formats" in told
    assert early == "`search.against` names bytes, which is measured at the ends of trials; pass search.rungs=seeds."


def test_a_limit_of_what_is_measured_at_the_ends_rules_out_nothing_before() -> None:
    """Deployed networks exist only at the ends of trials, so a limit of their bytes is missing before."""
    plan = in_parts(PLAN, factor=2)
    trials = tuple(
        replace(each, measured=old.measured) for each, old in zip(plan.trials, deployed().trials, strict=True)
    )
    records = records_of(plan, by_index) | measured(deployed())
    policy = Frontier(["parameters"], limits={"latency": 4.5}, rungs="training", factor=2)
    plan = replace(plan, stages={**plan.stages, **deployed().stages, **plan.stages}, trials=trials)
    last = run_search(policy, plan, records)[0][-1]

    assert len(titles(last)) > 1
    assert "failed or not measured" not in " ".join(last.stopped.values())
    assert last.networks


@pytest.mark.parametrize(
    "policy", [Frontier(), Frontier(rungs="rounds", factor=2), Frontier(first=2, confidence=0.9, within=0.02)]
)
def test_the_bounds_hold(policy: Frontier) -> None:
    plan = grid(METHODS, (0.5, 0.9), seeds=4, rounds=4)
    space = SearchSpace(plan)
    least, most = ({key for cell in cells for key in space.stages(cell)} for cells in policy.bounds(space))
    for loss in (by_index, lambda *_: 0.0, lambda *place: noisy(place), lambda *_: 0.5):
        _, ran = run_search(policy, plan, records_of(plan, loss))
        assert len(least) <= len(ran) <= len(most)


@pytest.mark.parametrize(
    ("policy", "plan", "text"),
    [
        (
            Frontier(),
            grid(("l1_unstructured",), (0.5,)),
            "no data set has two candidates; add an axis, as in schedule.",
        ),
        (
            Frontier(["latency"]),
            PLAN,
            "`search.against` names latency, which is measured on deployed networks, and meth",
        ),
        (Frontier(limits={"bytes": 9.0}), PLAN, "`search.limits` names bytes, which is measured on deployed networks"),
        (Frontier(first=10), PLAN, "search.first (=10) is beyond the 9 seeds of method_0"),
        (Frontier(confidence=0.9), PLAN, "search.confidence (=0.9) needs 2 or more seeds at the first"),
    ],
)
def test_what_has_no_frontier_is_refused(policy: Frontier, plan: Plan, text: str) -> None:
    told = [*policy.refusals(SearchSpace(plan))]

    assert told
    assert text in told[0]


def test_the_latency_of_a_token_is_measured_on_networks_that_generate() -> None:
    (said,) = Frontier(limits={"token_latency": 5.0}).refusals(SearchSpace(PLAN))

    assert said.startswith("`search.limits` names token_latency, which is measured on deployed networks")
    assert said.endswith("pass deploy=huggingface.")


def test_without_a_mixture_a_token_uses_all_parameters() -> None:
    limited = ended(Frontier(against=["active_parameters"], limits={"active_parameters": 4000.0}))

    assert [text.partition(":")[0] for text in limited.answers[1:]] == ["method_0 at 90.00%", "method_0 at 70.00%"]
    assert "1,103 parameters of a token; accuracy" in limited.answers[1]
