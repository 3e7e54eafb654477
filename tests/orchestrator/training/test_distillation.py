"""Distillation: a stage with a teacher learns the dense network's outputs, and its evaluation ignores the teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load
from small_trials import planned, small, train
from test_training_stages import TRAIN, chain, run
from torch import Tensor, nn

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import NETWORK, TEACHER, Plan, StageSpec
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.store.store import Store
from orchestrator.training import stage_record
from orchestrator.training.preflight.rehearsal import run_preflight
from orchestrator.workloads.tasks.classification import Classification
from orchestrator.workloads.tasks.distilled import Distilled, with_teacher
from orchestrator.workloads.tasks.language_modelling import LanguageModelling
from orchestrator.workloads.tasks.regression import Regression
from orchestrator.workloads.weight_files import plain_state, state_digest
from pruning import MaskSet


def layers(outputs: int, count: int = 2) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, outputs) for _ in range(count)]


def test_the_loss_is_that_of_hinton_et_al() -> None:
    student, teacher = layers(3)
    inputs, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])

    loss = Distilled(Classification(), teacher, weight=0.3, temperature=4.0).loss(student, (inputs, labels))

    own, theirs = student(inputs), teacher(inputs)
    soft = nn.KLDivLoss(reduction="batchmean")((own / 4).log_softmax(1), (theirs / 4).softmax(1))
    assert loss.item() == pytest.approx((0.7 * F.cross_entropy(own, labels) + 0.3 * 16 * soft).item(), rel=1e-6)
    loss.backward()
    assert student.weight.grad is not None
    assert teacher.weight.grad is None


def test_numbers_are_held_to_those_of_the_teacher() -> None:
    student, teacher = layers(1)
    inputs, labels = torch.randn(5, 4), torch.randn(5)

    loss = Distilled(Regression(), teacher, weight=1.0, temperature=4.0).loss(student, (inputs, labels))

    assert loss.item() == pytest.approx((student(inputs) - teacher(inputs)).square().mean().item(), rel=1e-6)


def test_a_token_that_does_not_count_is_not_taught_either() -> None:
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)) for _ in range(2))
    tokens, targets = torch.randint(7, (2, 5)), torch.randint(7, (2, 5))
    task = Distilled(LanguageModelling(), teacher, weight=1.0, temperature=1.0)
    targets[:, 3:] = -100

    padded, cut = (task.loss(student, (tokens[:, :n], targets[:, :n])).item() for n in (5, 3))

    assert padded == pytest.approx(cut, rel=1e-6)


def test_it_is_measured_as_without_a_teacher() -> None:
    student, teacher = layers(3)
    batches: list[tuple[Tensor, Tensor]] = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0]))]
    task = Distilled(Classification(), teacher, weight=0.5, temperature=2.0)

    assert task.measure(student, batches) == Classification().measure(student, batches)
    assert task.metrics == Classification().metrics


def taught(*targets: float, **changes: Any) -> tuple[StageSpec, ...]:
    """Return the stages of a trial whose rounds learn from the dense network."""
    specs = list(chain(*targets))
    for index, spec in enumerate(specs[1:], start=1):
        lesson = {**TRAIN, "teacher": "dense", "teacher_weight": 1.0, "teacher_temperature": 2.0, **changes}
        inputs = {NETWORK: specs[index - 1].key, TEACHER: specs[0].key}
        specs[index] = replace(spec, fields={**spec.fields, "finetune": lesson}, inputs=inputs)
    return tuple(specs)


def test_rounds_learn_from_the_dense_network_in_one_segment_or_many(store: Store, tmp_path: Path) -> None:
    specs = taught(0.5, 0.75)
    together = run(store, specs)
    other = Store(str(tmp_path / "other"))
    apart = [record for index, spec in enumerate(specs) for record in run_alone(other, spec, specs[:index])]
    untaught = run(store, chain(0.5, 0.75))

    assert [record.weights_digest for record in apart] == [record.weights_digest for record in together]
    assert together[0].weights_digest == untaught[0].weights_digest
    assert together[1].weights_digest != untaught[1].weights_digest
    weights = load(store.read(together[2].key, "weights.safetensors"))
    for name, mask in MaskSet.from_bytes(store.read(together[2].key, "masks.npz")).items():
        assert not weights[name][~mask].any()


def run_alone(store: Store, spec: StageSpec, lineage: tuple[StageSpec, ...]) -> list[Any]:
    from orchestrator.execution.segment import run_segment

    return list(run_segment(WorkOrder((spec,), Worker(store), lineage=lineage)))


def test_the_rounds_of_a_trial_with_a_teacher_stay_one_segment() -> None:
    specs = taught(0.5, 0.75, 0.9)
    plan = Plan({spec.key: spec for spec in specs}, ())

    assert list(plan.segments()) == [(specs[0].key,), tuple(spec.key for spec in specs[1:])]
    left = plan.without([specs[0].key])
    assert list(left.segments()) == [tuple(spec.key for spec in specs[1:])]


def test_a_preflight_tries_a_stage_before_its_teacher_is_trained(store: Store) -> None:
    specs = taught(0.5)

    assert list(run_preflight(WorkOrder(specs[1:], Worker(store), lineage=specs[:1])))


class Own:
    """Task of the user's own that only has the members of the Task protocol."""

    metrics = Classification().metrics

    def __init__(self) -> None:
        self.task = Classification()
        self.loss, self.size, self.measure = self.task.loss, self.task.size, self.task.measure


def test_a_task_whose_outputs_are_not_known_has_no_teacher(store: Store) -> None:
    specs = taught(0.5)
    own = {"_target_": f"{__name__}.Own"}
    specs = tuple(replace(spec, fields={**spec.fields, "task": own}) for spec in specs)
    specs = (specs[0], replace(specs[1], inputs={NETWORK: specs[0].key, TEACHER: specs[0].key}))

    with pytest.raises(OrchestratorError, match=r"^`finetune\.teacher` \(=dense\) must be null for `task` \(=Own\)"):
        run(store, specs)


def test_a_language_model_of_transformers_learns_the_teacher_s_distribution_of_each_token() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=11, max_position_embeddings=8, **sizes, tie_word_embeddings=True)
    torch.manual_seed(0)
    student, teacher = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    tokens = torch.randint(11, (3, 6))
    labels = tokens.clone()
    labels[0, 4:] = -100
    task = Distilled(LanguageModelling(), teacher, weight=0.25, temperature=3.0)

    shifted = task.loss(student, {"input_ids": tokens, "labels": labels})
    paired = task.loss(student, (tokens[:, :-1], labels[:, 1:]))

    known = labels[:, 1:] != -100
    mine, theirs = (network(tokens).logits[:, :-1][known] for network in (student, teacher))
    soft = ((theirs / 3).softmax(1) * ((theirs / 3).log_softmax(1) - (mine / 3).log_softmax(1))).sum(1).mean()
    expected = 0.75 * F.cross_entropy(mine, labels[:, 1:][known]) + 0.25 * 9 * soft
    assert shifted.item() == pytest.approx(expected.item(), rel=1e-5)
    assert paired.item() == pytest.approx(expected.item(), rel=1e-5)
    shifted.backward()
    assert all(each.grad is None for each in teacher.parameters())


@pytest.mark.slow
def test_a_tuned_teacher_is_the_network_of_the_control_that_trains_as_long(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    teachers: list[str] = []

    def noted(task: Any, teacher: nn.Module, *settings: float, **named: str) -> Distilled:
        teachers.append(state_digest(plain_state(teacher)))
        return with_teacher(task, teacher, *settings, **named)

    monkeypatch.setattr(stage_record, "with_teacher", noted)
    longer = planned(small("method=longer", "schedule.rounds=2"))
    records = train(longer, store)
    dense, *tuned = longer.trials[0].stages
    plan = planned(small("finetune.teacher=tuned", "schedule.rounds=2"))
    found = records | train(plan.without(records), store)

    assert teachers == [found[key].weights_digest for key in tuned]
    assert set(plan.stages) - set(records) == set(plan.trials[0].stages) - {dense}
    assert all(found[key].sparsity == 0 for key in tuned)
