"""Hostile files of stages with matching digests: every reader refuses them in a sentence."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damaged_files import HUGE, OPERATORS, TENSORS, archive
from factories import sweep_info
from safetensors.numpy import save
from sampling import sampled
from small_trials import composed, planned, train

import orchestrator
from orchestrator.commands.export_command import main as export
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import MASKS, STATE, STATE_VALUES, WEIGHTS
from orchestrator.core.plain_data import digest
from orchestrator.core.redact import HIDDEN
from orchestrator.core.specs import Plan
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store import saved_sweep
from orchestrator.store.backends import seal, unseal
from orchestrator.store.finished_stages import MOST_HEADER, tensors_in
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store
from orchestrator.training.loop.training_loop import Cancelled
from pruning.masks import mask_files as mask_files

TRIAL = (
    *("model=mlp", "model.hidden=[6]", "method=ln_structured", "schedule=one_shot", "schedule.sparsity=0.5"),
    *("train.epochs=1", "finetune.epochs=1", "restart=rewind", "restart.step=3", "deploy=shrink"),
)
MANY = int(os.environ.get("HOSTILE_FILES", "2000"))
GROWTH = 300e6
"""Bytes by which this process may grow; a mask of 3e9 entries needs ten times as many."""
DAMAGES = [
    (name, operator) for name in (WEIGHTS, MASKS, STATE, STATE_VALUES) for operator in OPERATORS[Path(name).suffix]
]


def test_a_header_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    with path.open("wb") as file:
        file.write((MOST_HEADER + 1).to_bytes(8, "little"))
        file.truncate(MOST_HEADER + 100)  # a sparse file

    with pytest.raises(ValueError, match=rf"its header has {MOST_HEADER + 1} bytes, more than {MOST_HEADER}"):
        tensors_in(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store with the stages of a trial that rewinds to a step of its dense training and is deployed."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    store, plan = Store(str(folder)), planned(composed(*TRIAL))
    train(Plan({key: spec for key, spec in plan.stages.items() if spec.kind != "measure"}, plan.trials), store)
    store.save_sweep("mine", manifest(sweep_info("mine"), plan))
    return folder


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Store:
    shutil.copytree(whole, tmp_path / "store")
    return Store(str(tmp_path / "store"))


def of_kind(store: Store, *kinds: str) -> list[str]:
    return [key for key, spec in saved_sweep.plan_of(store, "mine").stages.items() if spec.kind in kinds]


def put(store: Store, key: str, name: str, content: bytes, agrees: bool = False) -> None:
    """Replace a file of a stage and the digest in its record; the record may also get the shapes of the masks."""
    folder = Path(store.uri, "stages", key)
    (folder / name).write_bytes(content)
    sealed = unseal((folder / "record.json").read_bytes())
    sealed["record"]["files"][name] = {"sha256": digest(content), "bytes": len(content)}
    if agrees:
        tensors = json.loads(mask_files.read_npz(content)(mask_files.HEADER).tobytes())["tensors"]
        sizes = {tensor: math.prod(said["shape"]) for tensor, said in tensors.items()}
        sealed["record"] |= {"tensor_sizes": sizes, "tensor_sparsity": dict.fromkeys(sizes, 0.5)}
        sealed["record"]["parameters"] = sum(sizes.values())
    (folder / "record.json").write_bytes(seal(sealed))


def run(store: Store, key: str, *gone: str) -> None:
    """Run one stage after removing others."""
    plan = saved_sweep.plan_of(store, "mine")
    for each in gone:
        shutil.rmtree(Path(store.uri, "stages", each))
    order = WorkOrder((plan.stages[key],), Worker(Store(store.uri)), lineage=plan.lineage(key))
    assert [record.key for record in run_segment(order)] == [key]


def exported(store: Store) -> None:
    if export(["--store", store.uri, "--to", "safetensors", "--output", f"{store.uri}/../exported"]):
        raise OrchestratorError("as it was said")


def read(store: Store) -> None:
    trial = orchestrator.open(store.uri).sweep("mine").trials[0]
    for call in (trial.masks, trial.weights, trial.model, lambda: trial.model(0)):
        call()


def pruned(store: Store) -> None:
    (key,) = of_kind(store, "round")
    run(store, key, key, *of_kind(store, "deploy"))


def deployed(store: Store) -> None:
    *_, key = of_kind(store, "deploy")
    run(store, key, *of_kind(store, "deploy"))


READERS: Mapping[str, Callable[[Store], None]] = {
    "export": exported,
    "Python": read,
    "a round": pruned,
    "a deployment": deployed,
}


@pytest.fixture
def bounded() -> Iterator[None]:
    """Limit the memory of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < GROWTH


def hold(store: Store, reader: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence that a reader refuses with; "" if it does not need the file or repeats the stage."""
    said = ""
    try:
        READERS[reader](store)
    except OrchestratorError as error:
        said = str(error)
    told = said + "".join(capsys.readouterr())
    assert "Traceback" not in told
    return told


@sampled(16)
@pytest.mark.parametrize(
    ("name", "operator", "reader"),
    [(*damage, sorted(READERS)[number % len(READERS)]) for number, damage in enumerate(DAMAGES)],
)
def test_a_reader_refuses_or_repeats(
    store: Store, name: str, operator: str, reader: str, bounded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    of = "start" if name in (STATE, STATE_VALUES) else "round"
    for key in of_kind(store, of):
        content = Path(store.uri, "stages", key, name).read_bytes()
        put(store, key, name, OPERATORS[Path(name).suffix][operator](content, random.Random(7)))

    hold(store, "a round" if of == "start" else reader, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [MANY // 20, pytest.param(MANY, marks=pytest.mark.many)])
def test_every_reader_refuses_or_repeats_whatever_is_drawn(
    whole: Path, tmp_path: Path, count: int, bounded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check random damage. Valid values in an optimizer's state may still fail its first step, and so the trial."""
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + count):
        draw, store = random.Random(seed), Store(str(tmp_path / "store"))
        shutil.copytree(whole, store.uri)
        key = draw.choice(of_kind(store, "start", "dense", "round"))
        name = draw.choice(sorted(store.finished([key])[key].files))
        operators = OPERATORS[Path(name).suffix]
        chosen = draw.choice(sorted(operators.keys() - {"odd"} if name == STATE_VALUES else operators))
        content = Path(store.uri, "stages", key, name).read_bytes()
        put(store, key, name, operators[chosen](content, draw))
        try:
            hold(store, draw.choice(sorted(READERS)), capsys)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        shutil.rmtree(tmp_path / "store")
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)


@pytest.mark.parametrize("agrees", [False, True], ids=["the record says less", "the record agrees"])
@pytest.mark.parametrize("reader", ["export", "Python", "a deployment"])
def test_no_memory_is_taken_for_a_mask_that_says_it_is_huge(
    store: Store, reader: str, agrees: bool, bounded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (key,) = of_kind(store, "round")
    ones = bytes([1, 1, 0, 3, 0])  # lists no rare entries, so it stands for any number of ones
    tensors = {"fc1.weight": {"shape": [HUGE], "crc": zlib.crc32(ones)}}
    header = {"format": mask_files.FORMAT, "version": mask_files.VERSION, "digest": "", "tensors": tensors}
    put(store, key, MASKS, archive({"fc1.weight": ones}, header), agrees)

    said = hold(store, reader, capsys)

    assert said if agrees or reader != "a deployment" else not said, "the round is repeated"


def test_weights_of_another_network_are_refused_and_left_where_they_are(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (key,) = of_kind(store, "round")
    put(store, key, WEIGHTS, save({"fc1.weight": np.zeros((6, 300), np.float32)}))

    for reader in READERS:
        if reader != "a round":
            said = hold(store, reader, capsys)
            assert f"{WEIGHTS} of stage {key[:12]} does not fit what its plan builds: `fc1.weight` is [6, 300]" in said
            assert "install the packages that made the store, or train again with another `" in said
    assert store.backend.names("quarantine") == []


def test_what_no_tensors_can_be_read_of_is_set_aside_and_repeated(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (key,) = of_kind(store, "round")
    digest_before = store.finished([key])[key].weights_digest
    put(store, key, WEIGHTS, b"no tensors")

    said = hold(store, "Python", capsys)
    assert f"stage {key}: {WEIGHTS} is damaged: no tensors can be read" in said
    assert "The next run sets it aside and repeats it" in said
    assert hold(store, "a deployment", capsys) == ""
    assert len(store.backend.names("quarantine")) == 1
    assert store.finished([key])[key].weights_digest == digest_before


@sampled(3)
@pytest.mark.parametrize("operator", sorted(TENSORS.keys() - {"reshaped"}))
def test_a_checkpoint_that_cannot_be_is_set_aside(store: Store, operator: str) -> None:
    plan, (key,) = saved_sweep.plan_of(store, "mine"), of_kind(store, "round")
    spec, whole = plan.stages[key], store.finished([key])[key]
    for each in (key, *of_kind(store, "deploy")):
        shutil.rmtree(Path(store.uri, "stages", each))
    batches = iter(range(9))
    spec = replace(spec, location={spec.training: {"checkpoint_minutes": 9}})
    order = WorkOrder((spec,), Worker(store, grace=math.inf), lineage=plan.lineage(key))
    with pytest.raises(Cancelled):
        list(run_segment(order.done_by(cancelled=lambda: next(batches, None) is None)))
    pointer = unseal(store.backend.read(f"checkpoints/{key}/checkpoint.json"))
    path = Path(store.uri, "checkpoints", key, pointer["file"])
    content = TENSORS[operator](path.read_bytes(), random.Random(7))
    path.write_bytes(content)
    pointer["info"] = {"sha256": digest(content), "bytes": len(content)}
    store.backend.write(f"checkpoints/{key}/checkpoint.json", seal(pointer))

    (record,) = run_segment(order)

    assert any("its checkpoint was set aside" in warning for warning in record.warnings)
    assert record.result() == whole.result()


def test_no_memory_is_taken_for_a_network_larger_than_its_weights(
    store: Store, bounded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    data = store.load_sweep("mine")
    for model in data["plan"]["parts"]["model"]:
        model["hidden"] = [20_000, 20_000]
    for training in data["plan"]["parts"]["train"]:  # with a hidden secret, no key can be compared with its fields
        training["optimizer"]["secret"] = HIDDEN
    store.save_sweep("mine", data)

    for reader in ("export", "Python"):
        assert "`model` of the saved sweep has 401,520,010 entries, and its weights have" in hold(store, reader, capsys)
