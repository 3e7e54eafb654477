"""Published methods in conf/method: equal to the engine's table, and overridden by typed settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from composition import composed
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from sampling import sampled

from orchestrator.__main__ import CONF
from orchestrator.config import hydra_options
from orchestrator.config.config_groups import schema_of
from orchestrator.config.schema import Config
from orchestrator.core.plain_data import read_as
from orchestrator.core.specs import Job
from orchestrator.planning.plan import ConfigError, make_plan
from orchestrator.trial.names import called as called_in_reports
from orchestrator.trial.rules import choices_of_trial
from pruning import PUBLISHED, Choices
from pruning.choices.axes import Dynamics, Score, Unit
from pruning.scores import SCORES

METHODS = {path.stem for path in (Path(str(CONF)) / "method").glob("*.yaml")} - {"longer"}


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        make_plan([Job(overrides, composed(*overrides))])
    return str(error.value)


def chosen(config: Mapping[str, Any]) -> Choices:
    """Return the choices of a configuration without default options of the score and the dynamics."""
    found = choices_of_trial(read_as(Config, {**config, "method": {}}))
    return replace(found, score=Score(found.score.kind), dynamics=Dynamics(found.dynamics.kind))


@sampled(4)
@pytest.mark.parametrize(
    ("unit", "read"),
    [("entry", set()), ("group", {"budget", "round_to"}), ("layer", {"budget", "round_to"})]
    + [(unit, {"budget", "round_to", "uniform"}) for unit in ("heads", "mlp")]
    + [("layer_and_mlp", {"budget", "round_to", "uniform", "by_layers"}), ("sizes", {"budget", "layers", "residual"})]
    + [("block", set()), ("block_16x4", {"outputs"})],
)
def test_a_stage_has_only_the_keys_that_its_unit_reads(unit: str, read: set[str]) -> None:
    more = ["scope.budget=parameters"] * (unit in ("layer_and_mlp", "sizes"))
    more += ["unit.layers=2", "schedule=sizes"] * (unit == "sizes")
    plan = make_plan([Job((), composed(f"unit={unit}", *more))])

    found = [{**spec.fields["unit"], **spec.fields["scope"]} for spec in plan.stages.values() if "scope" in spec.fields]
    assert found
    known = {"budget", "round_to", "uniform", "by_layers", "outputs", "layers", "residual"}
    assert all(known & set(keys) == read for keys in found)


def test_equal_widths_are_for_heads_and_hidden_units() -> None:
    assert composed("unit=mlp", "scope.uniform=true")["scope"]["uniform"]
    assert "`scope.uniform` (=True) is for unit.kind 'heads' or 'mlp' or 'expert' or 'layer_and_mlp', and" in refused(
        "unit=group", "scope.uniform=true"
    )


def test_every_published_method_is_a_word() -> None:
    assert set(PUBLISHED) == METHODS


UNLIKE = {"alps_n_m", "identity", "iterative_snip", "ln_structured", "lottery_ticket", "lr_rewinding", "obs"}
"""Methods whose files differ from each other by more than names and numbers."""


@sampled(quick=lambda name: name in UNLIKE)
@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_word_means_what_the_engine_s_table_says(name: str) -> None:
    method = PUBLISHED[name]
    published, config = method.choices, composed(f"method={name}")
    unit = Unit() if published.select else published.unit  # a class has its own `dim`
    repair = replace(published.repair, options={"damping": None} if published.repair.kind == "obs" else {})
    expected = replace(published, unit=unit, repair=repair, select=None, arguments={})

    assert chosen(config) == expected
    assert config["schedule"]["at"] == method.at
    assert config["restart"]["weights"] == ("step" if method.restart == "rewind" else "keep")
    assert config["restart"]["rates"] == (0 if method.restart == "lr_rewind" else None)
    assert config["method"]["name"] in (None, name)
    assert published.select == (config["method"]["kind"] or None)
    assert {key: config["method"][key] for key in published.arguments} == published.arguments
    make_plan([Job((), config)])


@pytest.mark.parametrize(
    ("typed", "where", "value"),
    [
        ("scope=layer", ("scope", "kind"), "layer"),
        ("score=magnitude", ("score", "kind"), "magnitude"),
        ("schedule=geometric", ("schedule", "at"), "trained"),
        ("scope.kind=layer", ("scope", "kind"), "layer"),
    ],
)
def test_a_group_that_is_typed_wins_over_the_method(typed: str, where: tuple[str, str], value: str) -> None:
    for overrides in (("method=snip", typed), (typed, "method=snip")):
        assert composed(*overrides)[where[0]][where[1]] == value


def test_a_score_alone_ranks_instead_of_magnitudes() -> None:
    plan = make_plan([Job((), composed("score=lamp", "scope=global"))])
    last = list(plan.stages.values())[-1]

    assert (last.fields["score"]["kind"], last.fields["scope"]["kind"]) == ("lamp", "global")
    assert plan.trials[0].config["method"]["name"] == "lamp"


@sampled(5)
@pytest.mark.parametrize(
    ("typed", "called"),
    [
        (("method=magnitude",), "magnitude"),
        (("method=magnitude", "score=gradient", "score.examples=8"), "gradient"),
        (("method=random", "score=magnitude"), "magnitude"),
        (("method=snip",), "snip"),
        (("method=snip", "score=magnitude"), "snip, score=magnitude"),
        (("method=lottery_ticket", "score=random"), "lottery_ticket, score=random"),
        (("method=shortgpt", "score=random"), "shortgpt, score=random"),
        (("method=magnitude", "method.name=mine", "score=random"), "mine"),
        (("method=random", "score=magnitude", "score.kind=null", "score._target_=a.own"), "own"),
        (("scope=layer",), None),
        (("score=magnitude", "scope=row"), "magnitude, scope=row"),
        (("scope=erk", "unit=block"), "magnitude, unit=block, allocation=erk"),
    ],
)
def test_a_method_of_another_score_goes_by_it(typed: Sequence[str], called: str) -> None:
    config = composed("schedule.sparsity=0.5", *typed)

    config["score"]["name"] = config["score"]["kind"]
    assert called_in_reports(config) == called


@pytest.mark.parametrize("name", ["magnitude", "snip", "lottery_ticket", "random"])
def test_a_published_method_beside_a_target_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "their_class.py").write_text("class Largest: ...\n")

    said = refused(f"method={name}", "method._target_=their_class.Largest").splitlines()[1:]

    assert said == [
        f"  `method` (={name}) and `method._target_` (=their_class.Largest) are both given; leave out method={name}, "
        "or pass another `method.name`."
    ]


def test_batch_norm_is_in_the_mode_of_the_network() -> None:
    for at, mode in (("start", "train"), ("trained", "eval")):
        plan = make_plan([Job((), composed("method=snip", f"schedule.at={at}"))])

        assert list(plan.stages.values())[-1].fields["score"]["batch_norm"] == mode


def test_given_densities_are_reached_round_by_round() -> None:
    densities = "+scope.densities={hidden.*: 0.25, classifier.*: 1.0}"
    plan = make_plan([Job((), composed("scope=given", densities, "schedule.sparsity=null", "schedule.rounds=2"))])
    rounds = [spec.fields for spec in plan.stages.values() if spec.kind == "round"]

    assert [each["target"] for each in rounds] == [None, None]
    assert [each["scope"]["densities"]["hidden.*"] for each in rounds] == [0.5, 0.25]
    assert [each["scope"]["densities"]["classifier.*"] for each in rounds] == [1.0, 1.0]


@sampled(6)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("+method.scope=global",), "`method.scope` (=global) is a group; pass scope=global."),
        (
            ("method=random_unstructured", "score=snip"),
            "`score` (=snip) is for ranking by a score, but `method` (=random",
        ),
        (("method=ln_structured", "scope=global"), "prunes whole channels of one tensor; pass scope=layer"),
        (("method=ln_structured", "scope=row"), "takes only layer or global"),
        (("method=random_unstructured", "repair=obs"), "`repair` (=obs) is for ranking by a score"),
        (("method=n_m", "schedule.sparsity=0.9"), "`schedule.sparsity` (=0.9) over `schedule.rounds` (=1) must be 0.5"),
        (("method=n_m", "schedule=geometric"), "must be 0.5 in one round: scope=window keeps 2 of each 4"),
        (
            ("method=n_m", "scope.n=0"),
            "`scope.n` (=0) must be an int of at least 1.",
        ),
        (("scope=window", "unit=channel"), "ranks single entries along the input dimension, not units of kind"),
        (("scope=erk", "scope.kind=global"), "sets what each tensor keeps, which `scope.kind` (='global') decides"),
        (("scope=erk", "scope.power=1e20"), "`scope.power` (=1e+20) must lie in [-30, 30]"),
        (("scope.min_kept=-1",), "`scope.min_kept` (=-1) must be an int of at least 0"),
        (("scope=given",), "must give each tensor a density with `scope.allocation` given"),
        (
            ("scope.budget=macz",),
            "`scope.budget` (='macz') must be one of channels, parameters, active_parameters, macs, bytes",
        ),
        (("scope=given", "+scope.densities={a: 0.5}"), "`schedule.sparsity` (=0.9) must be null with scope.allocation"),
        (("score=snip", "score.examples=null"), "`score.examples` (=null) must be given, or `score.per_class`"),
        (("score=snip", "score.per_class=3"), "`score.examples` (=128) and `score.per_class` (=3) are both given"),
        (("score=snip", "+score.temperature=1"), "`score.temperature` (=1) is not an argument of snip"),
        (("score.kind=fischer",), "`score.kind` (=fischer) must be one of magnitude, random"),
        (("method=lamp", "schedule=amount"), "`schedule.amount` (=0.2) is for a class such as method=l1_unstructured"),
        (
            ("score=lamp", "schedule=amount"),
            "but `score` (=lamp) ranks to a sparsity; pass schedule.sparsity",
        ),
        (("unit.kind=filter",), "`unit.kind` (='filter') must be one of entry, block, channel"),
    ],
)
def test_what_cannot_be_together_is_refused_with_the_reason(overrides: tuple[str, ...], said: str) -> None:
    assert said in refused(*overrides)


@pytest.mark.parametrize("kind", SCORES)
def test_every_score_is_an_option_with_the_defaults_of_its_row(kind: str) -> None:
    hydra_options.register()
    row, config = SCORES[kind], OmegaConf.to_container(ConfigStore.instance().load(f"score/{kind}.yaml").node)

    assert isinstance(config, dict)
    assert config == vars(schema_of("score", kind)())
    assert config["kind"] == kind
    assert {name: config[name] for name in row.in_sweeps} == row.in_sweeps
    assert {option.name for option in row.options} <= set(config)
    assert (config["examples"] or config["per_class"] or 0) > 0 if row.reads_data else True


ALLOCATED = """
densities:
  0.5: {hidden.*: 0.25, classifier.*: 1.0}
  "0.75": {hidden.*: 0.125, classifier.*: 0.5}
"""


def test_densities_come_from_a_file_whose_content_is_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text(ALLOCATED)
    Path("two.json").write_text('{"densities": {"0.5": {"hidden.*": 0.25, "classifier.*": 1}}}')

    def planned(*overrides: str) -> Any:
        return make_plan([Job((), composed("schedule=one_shot", *overrides))])

    plan = planned("scope=given", "scope.densities_file=one.yaml", "schedule.sparsity=0.5")
    pruned = plan.stages[plan.trials[0].stages[-1]].fields

    assert pruned["target"] == 0.5
    assert pruned["scope"]["densities"] == {"hidden.*": 0.25, "classifier.*": 1.0}
    assert "densities_file" not in pruned["scope"]
    same = planned("scope=given", "scope.densities_file=two.json", "schedule.sparsity=0.5")
    other = planned("scope=given", "scope.densities_file=one.yaml", "schedule.sparsity=0.75")
    assert same.trials[0].stages == plan.trials[0].stages
    assert other.trials[0].stages != plan.trials[0].stages


@pytest.mark.parametrize(
    ("content", "overrides", "said"),
    [
        (None, (), "`scope.densities_file` (=a.yaml) cannot be read: No such file"),
        ("densities: [", (), "cannot be read"),
        ("{}", (), "must have the key `densities`"),
        ("densities: {0.5: {a: 2}}", (), "has the density of a at sparsity 0.5 2, which must be a number in [0, 1]"),
        ("densities: {half: {a: 1}}", (), "has the sparsity 'half', which must be a number in [0, 1]"),
        ("densities: {0.5: 1}", (), "must name tensors at sparsity 0.5"),
        (ALLOCATED, ("schedule.sparsity=0.9",), "has no densities for `schedule.sparsity` (=0.9), only for 0.5, 0.75"),
        (ALLOCATED, ("schedule.sparsity=null",), "has densities for values of `schedule.sparsity` (=None)"),
        (ALLOCATED, ("scope=erk",), "goes with scope=given, without `scope.densities`"),
        (ALLOCATED, ("+scope.densities={a: 1}",), "goes with scope=given, without `scope.densities`"),
    ],
)
def test_a_file_without_usable_densities_is_refused(
    content: str | None, overrides: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("a.yaml").write_text(content)

    assert said in refused("scope=given", "schedule.sparsity=0.5", "scope.densities_file=a.yaml", *overrides)
