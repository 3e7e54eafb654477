"""Stages that evaluate networks on tasks of lm-evaluation-harness: one for each task, in no other stage's key."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from small_harness_tasks import write_tasks
from small_trials import composed

from orchestrator.config import sources
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import NETWORK, Job, Plan
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning import harness_tasks, preflight_combinations
from orchestrator.planning.plan import make_plan

TRIAL = (
    "model=huggingface",
    "model.path=net",
    "data=text",
    "data.root=book.txt",
    "data.block=16",
    "data.tokenizer=model",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with the files that a plan reads."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "net" / "tokenizer.json").write_text("{}")
    (tmp_path / "book.txt").write_text("word " * 400)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def known(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let every task exist, whether the library is installed or not."""
    releases = harness_tasks.release_of
    monkeypatch.setattr(harness_tasks, "release_of", lambda name: "1" if name == "lm_eval" else releases(name))
    monkeypatch.setattr(harness_tasks, "content", lambda *_: "")
    return place


def planned(*trials: tuple[str, ...]) -> Plan:
    common = (*TRIAL, "task=language_modelling", "schedule.rounds=2")
    return make_plan([Job(each, composed(*common, *each)) for each in trials])


def tasks(plan: Plan) -> list[tuple[str, int]]:
    """Return the task and the round of the network of each evaluation."""
    found = [spec for spec in plan.stages.values() if KINDS[spec.kind].answers]
    return sorted((spec.typed.harness.task, plan.stages[spec.inputs[NETWORK]].round) for spec in found)


def test_each_task_of_the_last_and_the_dense_network_is_a_stage_and_no_other_key_moves(known: Path) -> None:
    without, evaluated = planned(()), planned(("harness.tasks=[a,b]",))

    assert set(without.stages) < set(evaluated.stages)
    assert evaluated.trials[0].stages == without.trials[0].stages
    assert tasks(evaluated) == [("a", 0), ("a", 2), ("b", 0), ("b", 2)]
    assert set(evaluated.trials[0].measured) == set(evaluated.stages) - set(without.stages)
    assert Plan.from_json(evaluated.to_json()) == evaluated
    assert preflight_combinations.combinations(evaluated, (), {}) == preflight_combinations.combinations(
        without, (), {}
    )
    assert [evaluated.stages[key].title for key in evaluated.trials[0].measured[:1]] == ["lm_eval a"]


def test_every_round_is_evaluated_on_request_and_dense_networks_are_shared(known: Path) -> None:
    plan = planned(("harness.tasks=[a]", "harness.each=all"), ("harness.tasks=[a]", "schedule.sparsity=0.3"))

    assert tasks(plan) == [("a", 0), ("a", 1), ("a", 2), ("a", 2)]


@pytest.mark.parametrize("changed", ["harness.shots=5", "harness.limit=10", "harness.batch_size=1"])
def test_the_key_of_an_evaluation_has_its_settings(known: Path, changed: str) -> None:
    one, other = planned(("harness.tasks=[a]",)), planned(("harness.tasks=[a]", changed))

    assert not set(one.trials[0].measured) & set(other.trials[0].measured)


def test_the_key_has_the_settings_of_the_tokenizer_and_of_generation(known: Path) -> None:
    keys = {planned(("harness.tasks=[a]",)).trials[0].measured}
    for name in ("tokenizer_config.json", "generation_config.json"):
        (known / "net" / name).write_text("{}")
        keys.add(planned(("harness.tasks=[a]",)).trials[0].measured)

    assert len(keys) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model=gpt",), r"needs a language model of transformers; pass model=huggingface or model=smollm2"),
        (("data.tokenizer=bytes",), r"needs the tokenizer of the network; pass data=text data.tokenizer=model"),
        (("harness.include_path=nowhere",), r"`harness.include_path` \(=nowhere\) must be a directory of task"),
        (("harness.tasks=[a,a]",), r"`harness.tasks` \(=\['a', 'a'\]\) must name each task once"),
        (("harness.each=last",), r"`harness.each` \(=last\) must be one of final, all"),
        (("harness.limit=0",), r"`harness.limit` \(=0\) must be an integer of at least 1, or null"),
    ],
)
def test_what_the_harness_cannot_evaluate_is_refused(known: Path, overrides: tuple[str, ...], message: str) -> None:
    given = [each for each in TRIAL if "model=gpt" not in overrides or not each.startswith("model")]
    with pytest.raises(OrchestratorError, match=message):
        make_plan([Job((), composed(*given, "task=language_modelling", "harness.tasks=[a]", *overrides))])


def test_a_missing_library_is_refused_with_what_to_type(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_tasks, "release_of", lambda _: None)
    with pytest.raises(OrchestratorError, match=r"needs the package lm-eval, .* 'pruning-orchestrator\[harness\]'"):
        planned(("harness.tasks=[a]",))


def test_the_content_of_a_task_is_its_definition_its_code_and_its_data(place: Path) -> None:
    pytest.importorskip("lm_eval.tasks", reason="the extra `harness` is not installed")
    folder = write_tasks(place / "tasks")

    def contents() -> dict[str, str]:
        sources.look_again()
        return {name: harness_tasks.content(name, "tasks") for name in ("choose", "write")}

    first = contents()
    assert first["choose"] != first["write"]
    with (folder / "write.yaml").open("a") as file:
        file.write("num_fewshot: 0\n")
    second = contents()
    assert (second["choose"] == first["choose"], second["write"] == first["write"]) == (True, False)
    with (folder / "documents.jsonl").open("a") as file:
        file.write('{"question": "a", "choices": ["b", "c", "d"], "gold": 0, "last": "e"}\n')
    assert not set(contents().values()) & set(second.values())
    os.rename(folder / "documents.jsonl", folder / "others.jsonl")
    with pytest.raises(
        OrchestratorError, match=r"\(=choose\) names the data file tasks/documents.jsonl, which does not"
    ):
        planned(("harness.tasks=[choose]", "harness.include_path=tasks"))


@pytest.mark.slow
def test_a_task_that_does_not_exist_is_refused_with_similar_names(place: Path) -> None:
    pytest.importorskip("lm_eval.tasks", reason="the extra `harness` is not installed")
    write_tasks(place / "tasks")
    with pytest.raises(OrchestratorError, match=r"\(=arc_esy\) is not a task of lm_eval [\d.]+; pass arc_easy or "):
        planned(("harness.tasks=[choose,arc_esy]", "harness.include_path=tasks"))
