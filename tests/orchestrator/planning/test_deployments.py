"""Stages that deploy and measure last networks: shared if equal, and in no other stage's key."""

from __future__ import annotations

from typing import Any

import pytest
from small_trials import composed

from orchestrator.config import schema
from orchestrator.core.specs import DENSE, NETWORK, Job, Plan
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning import preflight_combinations
from orchestrator.planning.plan import make_plan
from pruning.catalogue import rows


def planned(*trials: tuple[str, ...]) -> Plan:
    return make_plan([Job(each, composed("schedule.sparsity=0.9", *each)) for each in trials])


def test_a_trial_s_own_stages_have_the_same_keys_whatever_is_deployed() -> None:
    without, deployed = planned(("seed=1",)), planned(("seed=1", "deploy=shrink"))

    assert without.trials[0].measured == ()
    assert deployed.trials[0].stages == without.trials[0].stages
    assert set(without.stages) < set(deployed.stages)
    assert deployed.trials[0].identity == without.trials[0].identity


def test_the_last_round_and_the_dense_network_are_deployed_and_measured_side_by_side() -> None:
    plan = planned(("deploy=shrink", "deploy.batch_sizes=[1, 8]"))
    (trial,) = plan.trials
    (latency,) = (plan.stages[key] for key in trial.measured)
    pruned, dense = plan.stages[latency.inputs[NETWORK]], plan.stages[latency.inputs[DENSE]]

    assert (pruned.kind, pruned.parent, pruned.fields["format"]) == ("deploy", trial.stages[-1], "shrink")
    assert (dense.kind, dense.parent) == ("deploy", trial.dense)
    assert latency.fields["measure"] == {"batch_sizes": [1, 8], "seconds": 1.5, "blocks": 16, "threads": 1}
    assert plan.work[0][-3:] == (pruned.key, dense.key, latency.key)
    assert KINDS["measure"].alone
    assert all(len(run) == 1 for run in plan.segments() if KINDS[plan.stages[run[0]].kind].own_task)


def test_the_dense_network_is_deployed_once_for_all_trials_of_its_seed() -> None:
    plan = planned(*((f"schedule.sparsity={s}", f"seed={n}", "deploy=shrink") for s in (0.5, 0.9) for n in (0, 1)))
    kinds = [spec.kind for spec in plan.stages.values()]

    assert (kinds.count("deploy"), kinds.count("measure")) == (2 + 4, 4)


def test_a_detector_s_sweep_is_deployed_in_two_runtimes_or_not_at_all() -> None:
    assert composed("+sweep=detector")["deploy"]["formats"] == ["onnx", "openvino"]
    assert composed("+sweep=detector", "deploy=none")["deploy"]["formats"] == []


def test_a_saved_plan_keeps_what_measures_a_trial() -> None:
    plan = planned(("deploy=shrink",))

    assert Plan.from_json(plan.to_json()) == plan
    older: dict[str, Any] = plan.to_json()
    del older["trials"][0]["measured"]
    assert Plan.from_json(older).trials[0].measured == ()


def test_nothing_of_a_deployment_is_tried_before_the_sweep() -> None:
    found = preflight_combinations.combinations(planned(("deploy=shrink",)), (), {})

    assert found == preflight_combinations.combinations(planned(("deploy=none",)), (), {})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "deploy.formats=[tflite]",
            "`deploy.formats` (=['tflite']) must hold formats among shrink, torch, onnx, onnx_int8, openvino",
        ),
        ("deploy.formats=[shrink, shrink]", "must name each format once"),
        ("deploy.batch_sizes=[0]", "`deploy.batch_sizes` (=[0]) must hold numbers of examples from 1 to"),
        ("deploy.blocks=1", "`deploy.blocks` (=1) must be an integer of at least 2"),
        ("deploy.threads=0", "`deploy.threads` (=0) must be an integer of at least 1"),
        ("deploy.seconds=0", "`deploy.seconds` (=0.0) must be at least 0.01"),
        ("objective=deploy/bytes", "`objective` (=deploy/bytes) needs a deployed network; pass deploy=shrink"),
    ],
)
def test_what_cannot_be_deployed_is_refused(override: str, message: str) -> None:
    with pytest.raises(schema.ConfigError) as refused:
        planned((override,))
    assert message in str(refused.value)


def test_a_format_whose_packages_are_missing_is_refused_before_anything_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_spec", lambda name: None if name == "onnxscript" else name)

    def refused(*overrides: str) -> str:
        with pytest.raises(schema.ConfigError) as error:
            planned(overrides)
        return str(error.value)

    lacks = "needs packages that are not installed: onnx lacks onnxscript; run pip install"
    assert f"`deploy` (=onnx) {lacks} " in refused("deploy=onnx")
    assert f"`deploy.formats` (=['shrink', 'onnx']) {lacks} " in refused("deploy.formats=[shrink, onnx]")
    assert f"`deploy.formats` (=['onnx']) {lacks} " in refused("deploy=onnx", "deploy.formats=[onnx]")
    assert planned(("deploy.formats=[shrink, torch]",)).stages


def test_sparse_is_refused_without_a_compiler_before_anything_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-compiler")
    with pytest.raises(schema.ConfigError) as refused:
        planned(("deploy=sparse",))
    assert "`deploy` (=sparse) needs a C compiler: the C compiler of the environment variable CC (='no-c" in str(
        refused.value
    )


def test_an_objective_must_be_measured() -> None:
    assert planned(("deploy=shrink", "objective=deploy/shrink/64/latency_ms")).trials
    with pytest.raises(
        schema.ConfigError, match=r"must name a format and batch size of `deploy`: shrink/1, shrink/64\."
    ):
        planned(("deploy=shrink", "objective=[val/loss,deploy/shrink/2/latency_ms]"))


def test_a_format_of_transformers_is_refused_for_other_networks() -> None:
    with pytest.raises(schema.ConfigError) as refused:
        planned(("model=mlp", "deploy=huggingface"))
    assert (
        "`deploy` (=huggingface) holds huggingface, which is for networks that transformers builds, as "
        "model=huggingface, and `model.kind` is mlp; pass deploy=shrink, or another format."
    ) in str(refused.value)
