from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from factories import EPOCH, config, make_plan, make_records, plan_of

from orchestrator.compare.audit.checklist import audit
from orchestrator.compare.audit.rule import Finding
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import digest
from orchestrator.core.records import CurvePoint, StageRecord
from orchestrator.core.specs import NETWORK, REWIND, Plan, StageSpec
from orchestrator.views.report.tables import notes, warning_notes
from pruning.catalogue.scores import SCORES

FIVE = (0.5, 0.75, 0.875, 0.9375, 0.96875)


def findings(plan: Plan, records: Mapping[str, StageRecord]) -> dict[str, Finding]:
    return {finding.rule: finding for finding in audit(plan, records, compare_trials(plan, records))}


def one(plan: Plan, records: Mapping[str, StageRecord], word: str) -> Finding:
    (found,) = [finding for rule, finding in findings(plan, records).items() if word in rule]
    return found


def test_a_sound_sweep_passes_all_but_the_number_of_networks() -> None:
    plan = make_plan(sparsities=FIVE)
    found = findings(plan, make_records(plan))

    assert {rule: each.verdict for rule, each in found.items() if each.verdict != "pass"} == {
        "3 or more pairs of data set and network": "fail",
        "the dense network has learned its task": "n/a",
        "a control of masks that are found before training, or trained from an earlier step": "n/a",
        "the initialisation that was scored is the one that is trained": "n/a",
        "scores read no test data": "n/a",
        "test examples are no training or validation examples": "n/a",
        "calibration of language models apart from the texts they are tested on": "n/a",
        "3 or more draws of the calibration of language models": "n/a",
        "calibrated language models beside pruned smallest weights at each sparsity": "n/a",
        "gains over dense are gains over dense trained as long": "n/a",
        "methods prune when their papers do": "n/a",
    }
    assert all(each.reason for each in found.values())


@pytest.mark.parametrize(
    ("control", "verdict"),
    [({}, "fail"), ({"control": "shuffle"}, "pass"), ({"weights": "reinit"}, "pass"), ({"control": "invert"}, "pass")],
)
def test_masks_that_are_trained_from_a_step_need_a_control(control: Mapping[str, str], verdict: str) -> None:
    plan = make_plan()
    rewound = {
        key: replace(spec, fields={**spec.fields, "restart": {"weights": "step", **control}}) if spec.round else spec
        for key, spec in plan.stages.items()
    }

    assert one(Plan(rewound, plan.trials), {}, "control of masks").verdict == verdict


RESTARTED = {"weights": "keep", "rates": 0, "optimizer": "restored"}


def sparse(*lines: tuple[str, str, str], **changes: Mapping[str, str]) -> Plan:
    """Return a plan whose trials train from a step; a line is a model, a dynamics and a score."""
    plan = plan_of([config(f"{k}_{s}", 0.5, 0, 1, model={"name": m}) for m, k, s in lines])
    chosen = {trial.stages[-1]: line for trial, line in zip(plan.trials, lines, strict=True)}
    stages = {
        key: replace(
            spec,
            fields={
                **spec.fields,
                "dynamics": {"_target_" if "." in chosen[key][1] else "kind": chosen[key][1]},
                "score": {"kind": chosen[key][2]},
                "restart": RESTARTED,
                **changes,
            },
        )
        if key in chosen
        else spec
        for key, spec in plan.stages.items()
    }
    return Plan(stages, plan.trials)


RIGL, STATIC, SNIP = ("cnn", "rigl", "random"), ("cnn", "static", "random"), ("cnn", "nested", "snip")


@pytest.mark.parametrize(
    ("plan", "verdict", "reason"),
    [
        (sparse(RIGL, STATIC), "pass", "dynamics=static"),
        (sparse(RIGL), "fail", "cnn on digits has no line with dynamics=static, the control of dynamics=rigl"),
        (
            sparse(RIGL, ("cnn", "set", "random"), ("mlp", "static", "random")),
            "fail",
            "cnn on digits has no line with dynamics=static, the control of dynamics=rigl, set",
        ),
        (
            sparse(("cnn", "mine.Rotating", "random")),
            "fail",
            "cnn on digits has no line with dynamics=static, the control of dynamics=mine.Rotating",
        ),
        (sparse(RIGL, STATIC, SNIP), "fail", "none of restart.control=shuffle, reinit, invert, small"),
        (sparse(("cnn", "static", "snip")), "fail", "none of restart.control=shuffle, reinit, invert, small"),
        (sparse(STATIC), "n/a", "masks are drawn at random and stay"),
        (sparse(RIGL, restart={}), "n/a", "every network is trained, pruned and fine-tuned"),
        (sparse(SNIP, restart={**RESTARTED, "control": "shuffle"}), "pass", "shuffle"),
    ],
)
def test_masks_that_change_within_a_training_are_controlled_by_static_ones(
    plan: Plan, verdict: str, reason: str
) -> None:
    found = one(plan, {}, "control of masks")

    assert (found.verdict, found.reason) == (verdict, reason)


def test_static_masks_that_are_fine_tuned_are_no_control_of_a_training_from_a_step() -> None:
    plan = sparse(RIGL, STATIC)
    key = plan.trials[1].stages[-1]
    fields = {name: value for name, value in plan.stages[key].fields.items() if name != "restart"}
    tuned = Plan({**plan.stages, key: replace(plan.stages[key], fields=fields)}, plan.trials)

    assert one(tuned, {}, "control of masks").verdict == "fail"


def pruned_at_start(restart: Mapping[str, str], rewind: bool, lr: float) -> tuple[Plan, dict[str, StageRecord]]:
    """Return a sweep that prunes at initialisation, optionally with another network to rewind to or compare with."""
    plan = make_plan(("snip",), (0.5,), (0,), rounds=1)
    (trial,) = plan.trials
    dense = plan.stages[trial.dense]
    start, other = (StageSpec("start", {**dense.fields, "until": until}) for until in (0, 100))
    inputs = {NETWORK: start.key, REWIND: other.key} if rewind else {NETWORK: start.key}
    fields = {**plan.stages[trial.stages[1]].fields, "restart": {"weights": "keep", **restart}}
    pruned = StageSpec("round", fields, inputs)
    beside = replace(dense, fields={**dense.fields, "train": {"lr": lr}} if lr else dense.fields)
    chain = Plan({spec.key: spec for spec in (beside, pruned)}, (replace(trial, stages=(start.key, pruned.key)),))
    records = make_records(chain)
    drawn = replace(records[beside.key], key=start.key, kind="start", weights_digest=digest(f"weights {start.key}"))
    trials = (replace(chain.trials[0], dense=beside.key),)
    return Plan({start.key: start, other.key: other, **chain.stages}, trials), {start.key: drawn, **records}


@pytest.mark.parametrize(
    ("restart", "rewind", "lr", "verdict", "reason"),
    [
        ({}, False, 0, "pass", "1 rounds scored and trained the weights of their start"),
        ({}, True, 0, "fail", "did not train the weights that it scored"),
        ({}, False, 0.5, "fail", "differs from its dense network in seed or settings"),
        ({"weights": "reinit"}, False, 0, "n/a", "nothing was pruned before training"),
    ],
)
def test_the_initialisation_that_was_scored_is_trained(
    restart: Mapping[str, str], rewind: bool, lr: float, verdict: str, reason: str
) -> None:
    found = one(*pruned_at_start(restart, rewind, lr), "initialisation")

    assert found.verdict == verdict
    assert reason in found.reason


def test_a_round_that_scored_other_weights_than_its_start_s_is_named() -> None:
    plan, records = pruned_at_start({}, False, 0)
    key = plan.trials[0].stages[1]
    other = {**records, key: replace(records[key], started_from=digest("another initialisation"))}
    lost = {each: record for each, record in records.items() if record.kind != "start"}

    for known in (other, lost):
        found = one(plan, known, "initialisation")
        assert found.verdict == "fail"
        assert f"{plan.trials[0].name}, round 1 did not score the weights" in found.reason


def unequal(steps: int) -> tuple[Plan, dict[str, StageRecord]]:
    """Return random and l1 at two sparsities; l1's last rounds train `steps` steps longer."""
    plan = make_plan(rounds=1)
    records = make_records(plan)
    longer = {trial.stages[-1] for trial in plan.trials if trial.name.startswith("l1")}
    return plan, {
        key: replace(record, steps=record.steps + steps) if key in longer else record for key, record in records.items()
    }


def test_lines_that_trained_longer_are_named_with_how_many_times() -> None:
    found = one(*unequal(200), "equal training")  # 300 + 100 + 200 against 300 + 100

    assert found.verdict == "fail"
    assert found.reason == "l1_unstructured at 50.00% cost 1.50× as much as random_unstructured"


def test_what_a_score_reads_makes_no_unequal_training() -> None:
    assert one(*unequal(20), "equal training").verdict == "pass"  # 5% of 400
    assert one(*unequal(21), "equal training").verdict == "fail"
    assert one(*unequal(0), "equal training").verdict == "pass"


def gaining(gains: tuple[float, ...], methods: tuple[str, ...], restart: Mapping[str, object] | None = None) -> Finding:
    """Return the finding on gains for l1, which is better than dense by `gains` (one a seed), with other methods."""
    plan = make_plan(("l1_unstructured", *methods), (0.5,), tuple(range(len(gains))), rounds=1)
    records = make_records(plan)
    for trial in plan.trials:
        key, dense = trial.stages[-1], records[trial.dense]
        if trial.name.startswith("l1"):
            better = dense.figure("test") + gains[int(trial.config["seed"])]
            records[key] = replace(records[key], after={**records[key].after, "test/accuracy": better})
        elif trial.name.startswith("identity"):
            records[key] = replace(records[key], sparsity=0.0)
    stages = {
        key: replace(spec, fields={**spec.fields, "restart": restart or {}}) if spec.round else spec
        for key, spec in plan.stages.items()
    }
    return one(Plan(stages, plan.trials), records, "gains over")


def test_a_gain_over_dense_is_held_against_dense_that_was_trained_as_long() -> None:
    alone = gaining((0.01, 0.02, 0.03), ())  # 300 + 100 steps against 300; 0.02 +- 4.303 * 0.01 / sqrt(3)
    surely = gaining((0.019, 0.02, 0.021), ())

    assert alone.verdict == "n/a"
    assert (surely.verdict, surely.reason) == (
        "fail",
        "l1_unstructured at 50.00% trained 1.33× as long as dense; add +control=longer",
    )
    assert gaining((0.019, 0.02, 0.021), ("identity",)).verdict == "pass"
    assert gaining((-0.019, -0.02, -0.021), ()).verdict == "n/a"
    assert gaining((0.019, 0.02, 0.021), (), {"weights": "step", "rates": 0, "step": 0}).verdict == "n/a"
    assert gaining((0.019, 0.02, 0.021), (), {"weights": "keep", "rates": 0}).verdict == "fail"


@pytest.mark.parametrize(("at", "verdict"), [("start", "pass"), ("trained", "fail")])
def test_scores_of_networks_before_training_are_held_to_that(at: str, verdict: str) -> None:
    plan = make_plan(("snip", "l1_unstructured"), (0.5,), (0,))
    trials = [replace(t, config={**t.config, "schedule": {**t.config["schedule"], "at": at}}) for t in plan.trials]
    found = one(Plan(plan.stages, tuple(trials)), {}, "papers")

    assert found.verdict == verdict
    assert found.reason.startswith("snip ")
    assert f"schedule.at={at}" in found.reason


def test_one_line_alone_is_compared_with_none() -> None:
    plan = make_plan(methods=("l1_unstructured",), rounds=1)

    assert one(plan, make_records(plan), "equal training").verdict == "n/a"


def test_three_networks_pass() -> None:
    models = [{"name": name} for name in ("cnn", "mlp", "lenet5")]
    plan = plan_of([config("l1_unstructured", 0.5, 0, model=model) for model in models])

    assert one(plan, make_records(plan), "pairs").verdict == "pass"


@pytest.mark.parametrize(
    ("word", "plan", "reason"),
    [
        ("operating points", make_plan(sparsities=FIVE[:4]), "has 4"),
        ("seeds at every", make_plan(sparsities=FIVE, seeds=(0, 1)), "has 2"),
        ("random control", make_plan(methods=("l1_unstructured",)), "none among l1_unstructured"),
        ("magnitude", make_plan(methods=("random_unstructured",)), "none among random_unstructured"),
    ],
)
def test_what_a_sweep_lacks_fails_with_its_reason(word: str, plan: Plan, reason: str) -> None:
    found = one(plan, make_records(plan), word)

    assert found.verdict == "fail"
    assert reason in found.reason


def scored(*scores: Mapping[str, str], **changes: object) -> Plan:
    """Return a plan whose trials rank by a score, by default magnitude."""
    given = {"method": {"name": "own"}, **changes}
    plan = plan_of([{**config("own", 0.5, 0), **given, "score": score} for score in scores])
    return Plan(plan.stages, tuple(replace(trial, name=f"trial {n}") for n, trial in enumerate(plan.trials)))


@pytest.mark.parametrize(
    ("word", "score"),
    [
        ("random control", "random"),
        ("magnitude baseline", "magnitude"),
        ("magnitude baseline", "expert_magnitude"),
    ],
)
def test_a_control_is_what_its_score_does(word: str, score: str) -> None:
    control, own = {"kind": score, "name": "plain"}, {"_target_": "mine.mix", "name": f"{score}_l1"}
    plan, without = scored(control, own), scored(own, {**own, "name": f"l1_{score}"})
    inverted = scored(control, restart={"control": "invert"})

    assert one(plan, make_records(plan), word).reason == "own, score=plain"
    assert one(without, make_records(without), word).verdict == "fail"
    assert one(inverted, make_records(inverted), word).verdict == "fail"


def broken(**changes: object) -> tuple[Plan, dict[str, StageRecord]]:
    plan = make_plan()
    records = make_records(plan)
    key = plan.trials[0].stages[1]
    records[key] = replace(records[key], **changes)  # type: ignore[arg-type]
    return plan, records


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("achieved", {"sparsity": 0.2}),
        ("dead", {"tensor_sparsity": {"fc1.weight": 1.0}}),
        ("test read once", {"curve": (CurvePoint(1, 0.1, EPOCH, {"test/accuracy": 0.9}),)}),
        ("test read once", {"before": {"test/accuracy": 0.9}}),
        ("test read once", {"after": {"test/accuracy": 0.9}}),
        ("no test data", {"details": {"scoring": {"score": "snip", "examples": 20, "split": "test"}}}),
        ("no test data", {"details": {"scoring": {"score": "snip", "examples": 20}}}),
    ],
)
def test_a_broken_law_fails_and_names_the_round(word: str, changes: dict[str, object]) -> None:
    plan, records = broken(**changes)
    found = one(plan, records, word)

    assert found.verdict == "fail"
    assert f"{plan.trials[0].name}, round 1" in found.reason


@pytest.mark.parametrize(
    ("scoring", "verdict", "reason"),
    [
        ({"score": "snip", "examples": 20, "split": "train"}, "pass", "1 rounds scored examples of the train split"),
        ({"score": "a.b", "examples": 20, "split": "train"}, "pass", "; other data that a.b reads is not recorded"),
        ({"score": "magnitude", "examples": 0}, "n/a", "no score read examples"),
    ],
)
def test_scores_read_what_is_no_test(scoring: dict[str, object], verdict: str, reason: str) -> None:
    found = one(*broken(details={"scoring": scoring}), "no test data")

    assert found.verdict == verdict
    assert found.reason.endswith(reason)


@pytest.mark.parametrize(
    ("shared", "verdict", "reason"), [(0, "pass", "no test example"), (3, "fail", "round 0 shares 3 examples")]
)
def test_examples_of_the_test_split_that_networks_learn_from_are_named(shared: int, verdict: str, reason: str) -> None:
    plan = make_plan(rounds=1)
    own = {trial.dense: {"shared_examples": shared} for trial in plan.trials}
    records = {key: replace(each, details=own.get(key, each.details)) for key, each in make_records(plan).items()}
    found = one(plan, records, "no training or validation")

    assert found.verdict == verdict
    assert reason in found.reason


def test_what_rounding_to_whole_channels_costs_is_no_fault() -> None:
    plan, records = broken(sparsity=0.1875, requested_sparsity=0.2063, details={"rounding": 1 / 32})
    found = one(plan, records, "achieved")

    assert (found.verdict, found.reason) == (
        "pass",
        "largest difference in points: 1.88 of the weights, where whole units allow 3.12",
    )
    assert (
        one(*broken(sparsity=0.1, requested_sparsity=0.2063, details={"rounding": 1 / 32}), "achieved").verdict
        == "fail"
    )


def test_dense_is_named_without_a_sparsity_and_labels_with_commas_stand_apart() -> None:
    plan = plan_of([config("l1", 0.5, seed, rounds) for seed in (0, 1) for rounds in (1, 2)])
    found = findings(plan, make_records(plan))

    assert found["3 or more seeds at every point"].reason.startswith("dense has 2; l1, rounds=1 at 50.00% has 2; ")
    assert found["a random control"].reason == "none among l1, rounds=1; l1, rounds=2"


def cut(
    removed: float | None, unit: str = "group", budget: str = "channels", rounding: float = 0.04
) -> tuple[Plan, dict[str, StageRecord]]:
    """Return a sweep with half of a budget requested and `removed` of it removed; 71% of weights are always pruned."""
    plan = make_plan(("l1_unstructured",), (0.5,), (0,), rounds=1)
    key = plan.trials[0].stages[-1]
    fields = {**plan.stages[key].fields, "unit": {"kind": unit}, "scope": {"kind": "layer", "budget": budget}}
    scoring = {"score": "magnitude", **({} if removed is None else {"removed": removed})}
    record = make_records(plan)[key]
    record = replace(record, sparsity=0.71, details={"rounding": rounding, "scoring": scoring})
    return Plan({**plan.stages, key: replace(plan.stages[key], fields=fields)}, plan.trials), {
        **make_records(plan),
        key: record,
    }


@pytest.mark.parametrize(
    ("sweep", "verdict", "reason"),
    [
        (cut(0.53), "pass", "largest difference in points: 3.00 of the channels, where whole units allow 4.00"),
        (cut(0.71), "fail", "round 1: 50.00% of channels requested, 71.00% achieved"),
        (cut(0.71, "heads"), "fail", "round 1: 50.00% of heads requested, 71.00% achieved"),
        (cut(0.54, "mlp", rounding=0.06), "pass", "points: 4.00 of the hidden units, where whole units allow 6.00"),
        (cut(0.54, "heads", "macs", 0.06), "pass", "points: 4.00 of the MACs, where whole units allow 6.00"),
        (cut(0.71, "entry"), "fail", "round 1: 50.00% of weights requested, 71.00% achieved"),
        (cut(0.54, budget="macs", rounding=0.06), "pass", "4.00 of the MACs, where whole units allow 6.00"),
        (cut(0.45, "channel", rounding=0.0), "fail", "50.00% of channels requested, 45.00% achieved"),
        (cut(0.503, "channel", rounding=0.0), "pass", "largest difference in points: 0.30 of the channels"),
        (cut(None, budget="bytes"), "n/a", "the removed fraction of the bytes is not recorded"),
    ],
)
def test_what_was_asked_for_is_held_in_what_it_is_a_fraction_of(
    sweep: tuple[Plan, dict[str, StageRecord]], verdict: str, reason: str
) -> None:
    found = one(*sweep, "achieved")

    assert (found.verdict, found.reason[-len(reason) :]) == (verdict, reason)


def test_a_missing_trial_unpairs_the_seeds() -> None:
    plan = make_plan()
    records = make_records(plan)
    del records[plan.trials[0].stages[-1]]
    found = findings(plan, records)

    assert found["every trial finished"].verdict == "fail"
    assert plan.trials[0].name in found["every trial finished"].reason
    assert one(plan, records, "same seeds").verdict == "fail"
    assert one(plan, records, "seeds at every").verdict == "fail"


def test_without_pruning_most_rules_do_not_apply() -> None:
    plan = make_plan()
    records = {key: record for key, record in make_records(plan).items() if record.kind == "dense"}
    verdicts = {finding.verdict for finding in audit(plan, records, compare_trials(plan, records))}

    assert "n/a" in verdicts
    assert one(plan, {}, "pairs").reason == "nothing has finished"
    assert all(finding.reason for finding in audit(plan, {}, compare_trials(plan, {})))


def test_matching_is_audited_with_its_margin() -> None:
    plan, few = make_plan(sparsities=FIVE), make_plan(seeds=(0,))
    records = make_records(plan)
    (found,) = [f for f in audit(plan, records, compare_trials(plan, records, margin=0.02)) if "margin" in f.rule]

    assert (found.verdict, found.reason[:26]) == ("pass", "a loss of 2.00 points of a")
    assert one(few, make_records(few), "margin").verdict == "fail"


@pytest.mark.parametrize("part", ["processor", "torch"])
def test_a_sweep_that_mixes_processors_or_releases_says_so(part: str) -> None:
    plan = make_plan()
    records = {
        key: replace(record, environment={"processor": "Pen, AVX2", "torch": "2.0"})
        for key, record in make_records(plan).items()
    }
    assert one(plan, records, "one kind of processor").verdict == "pass"
    key = next(iter(records))
    records[key] = replace(records[key], environment={**records[key].environment, part: "another"})
    found = one(plan, records, "one kind of processor")

    assert found.verdict == "fail"
    assert f"{part}: " in found.reason
    assert "another" in found.reason


PERPLEXITY = Metric("perplexity", "", "lower", margin=0.1, format=".3f")


def calibrated(
    methods: Sequence[str], seeds: Sequence[int] = (0, 1, 2), split: str = "train", **data: object
) -> tuple[Plan, dict[str, StageRecord]]:
    """Return a plan and records of a language model that each method prunes; wanda reads calibration data."""
    text = {"name": "text", "kind": "text", "root": "a" * 64, **data}
    scores = {"magnitude": "magnitude", "wanda": "wanda"}
    plan = plan_of(
        [
            config(name, 0.5, seed, 1, data=text, method={"name": name}, score={"kind": scores[name]})
            for name in methods
            for seed in seeds
        ]
    )
    found = make_records(plan)
    for key, record in found.items():
        figures = {**record.after, "test/perplexity": 5.0, "val/perplexity": 5.0}
        reads = plan.stages[key].fields.get("method", {}).get("name") == "wanda"
        scoring = {"scoring": {"score": "wanda", "examples": 8, "split": split}} if reads else {}
        found[key] = replace(record, metrics=(PERPLEXITY,), after=figures, details=scoring)
    return plan, found


@pytest.mark.parametrize(
    ("made", "word", "verdict", "reason"),
    [
        (
            calibrated(["magnitude", "wanda"]),
            "tested on",
            "pass",
            "rounds that read the train split: 3; tested on test",
        ),
        (calibrated(["magnitude"]), "tested on", "n/a", "no language model was pruned with calibration data"),
        (
            calibrated(["wanda"], (0,), tests={"same": "a" * 64, "other": "b" * 64}),
            "tested on",
            "fail",
            "wanda sparsity=0.5 seed=0, round 1 is tested on same, the text of its calibration",
        ),
        (
            calibrated(["wanda"], (0,), split="val"),
            "tested on",
            "fail",
            "wanda sparsity=0.5 seed=0, round 1 is calibrated with the val split",
        ),
        (calibrated(["magnitude", "wanda"]), "draws of", "pass", "every point has 3 or more"),
        (calibrated(["wanda"], (0, 1)), "draws of", "fail", "wanda at 50.00% has 2"),
        (calibrated(["magnitude", "wanda"]), "at each sparsity", "pass", "beside all 1 points"),
        (calibrated(["wanda"]), "at each sparsity", "fail", "none beside wanda at 50.00%"),
    ],
)
def test_language_models_that_are_pruned_with_calibration_data_need_more(
    made: tuple[Plan, dict[str, StageRecord]], word: str, verdict: str, reason: str
) -> None:
    found = one(*made, word)

    assert (found.verdict, found.reason) == (verdict, reason)


@pytest.mark.parametrize("score", [name for name, row in SCORES.items() if row.calibrated])
def test_every_score_of_the_inputs_of_layers_is_calibrated(score: str) -> None:
    plan, records = calibrated(["wanda"], (0, 1))
    for key, record in records.items():
        if record.details:
            records[key] = replace(record, details={"scoring": {**record.details["scoring"], "score": score}})

    assert {"wanda", "activation", "block_influence", "minitron", "left_out"} <= {
        n for n in SCORES if SCORES[n].calibrated
    }
    assert [one(plan, records, word).verdict for word in ("tested on", "draws of", "at each sparsity")] == [
        *("pass", "fail", "fail"),
    ]


def test_layers_removed_on_purpose_are_not_dead_and_are_counted() -> None:
    plan, records = broken(tensor_sparsity={"conv1.weight": 1.0, "fc.weight": 0.5})
    removed = {
        key: replace(spec, fields={**spec.fields, "unit": {"kind": "layer"}}) if spec.round else spec
        for key, spec in plan.stages.items()
    }

    found = one(Plan(removed, plan.trials), records, "dead layer")

    assert found.verdict == "n/a"
    assert "removed units of a transformer on purpose, 1 tensor whole" in found.reason


def test_warnings_of_records_fail_a_rule_and_stand_below_the_table() -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), (0, 1))
    records, said = make_records(plan), "masks changed in 2 of 240 steps: too few for rigl"
    assert one(plan, records, "warning").verdict == "pass"
    assert one(plan, {}, "warning").verdict == "n/a"
    assert not [*warning_notes(compare_trials(plan, records))]

    for trial in plan.trials:
        records[trial.stages[-1]] = replace(records[trial.stages[-1]], warnings=(said,))
    found, compared = one(plan, records, "warning"), compare_trials(plan, records)
    first = f"{plan.trials[0].name}, round {len(plan.trials[0].stages) - 1}"
    assert (found.verdict, found.reason) == ("fail", f"{first}: {said}")
    assert [*notes(compared)][-1] == f"Warning of {first} and 1 more: {said}."
    assert [*compared.to_json()["warnings"]] == [said]


@pytest.mark.parametrize(
    ("metric", "value", "constant", "verdict"),
    [
        ("accuracy", 0.229, 0.2, "fail"),
        ("accuracy", 0.3, 0.2, "pass"),
        ("accuracy", 0.3, None, "n/a"),
        ("accuracy", 1.0, 1.0, "n/a"),
        ("rmse", 2.0, 2.0, "fail"),
        ("rmse", 1.0, 2.0, "pass"),
    ],
)
def test_a_dense_network_that_has_learned_nothing_is_named(
    metric: str, value: float, constant: float | None, verdict: str
) -> None:
    plan = make_plan()
    metrics = {"accuracy": Metric("accuracy", "%", "higher", 0.01, ".2%"), "rmse": Metric("rmse", "", "lower", 0.0)}
    counted = {} if constant is None else {"measured": {"test": {"constant": constant}}}
    records = {
        key: replace(
            record,
            metrics=(metrics[metric],),
            after={**record.after, f"test/{metric}": value, f"val/{metric}": value},
            details={**record.details, **counted},
        )
        for key, record in make_records(plan).items()
    }

    found, said = one(plan, records, "has learned"), [*notes(compare_trials(plan, records))]

    assert found.verdict == verdict
    if (metric, verdict) == ("accuracy", "fail"):
        assert found.reason == "cnn on digits: accuracy 22.90%, a constant answer 20.00%"
    assert any("hardly learned" in line for line in said) == (verdict == "fail")
