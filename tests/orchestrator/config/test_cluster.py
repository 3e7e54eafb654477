"""Rules of the config group `cluster`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from orchestrator.config.cluster import Cluster, to_bytes
from orchestrator.config.key_rules import violations


def validate(**changes: Any) -> list[str]:
    return [*violations("cluster", Cluster, asdict(Cluster()) | changes)]


CONF = Path(__file__).parents[3] / "conf" / "cluster"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(7, 7), ("7", 7), ("2GB", 2 * 10**9), ("2 GiB", 2**31), ("512MiB", 2**29), ("1.5K", 1500), ("3t", 3 * 10**12)],
)
def test_memory_is_bytes_or_text(text: int | str, expected: int) -> None:
    assert to_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "2 gigs", "1e9", "inf", "2GBB"])
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of bytes"):
        to_bytes(text)


@pytest.mark.parametrize("address", [None, "auto", "local", "head.example:6379", "10.0.0.1:6379", "[::1]:6379"])
def test_good_values_pass(address: str | None) -> None:
    assert validate(address=address, gpus_per_trial=0.25, memory_per_trial="1GB") == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kind", "slurm", "must be one of ray, inline"),
        ("placement", "random", "must be one of spread, pack"),
        ("on_error", "raise", "must be one of continue, stop"),
        ("cpus_per_trial", 0.0, "must be finite and at least 0.0001"),
        ("cpus_per_trial", float("inf"), "must be finite and at least 0.0001"),
        ("gpus_per_trial", 1.5, "or a whole number of GPUs; pass 1, or 0 to train on CPUs"),
        ("gpus_per_trial", -1.0, "must be 0, a share in [0.0001, 1], or a whole number"),
        ("memory_per_trial", "2 gigs", "pass 2GB or 512MiB"),
        ("memory_per_trial", 0, "must be at least 1MB"),
        ("memory_per_trial", 2, "must be at least 1MB, in bytes or as text with a unit; pass 2GB"),
        ("resources", {"GPU": 1.0}, "pass cluster.gpus_per_trial=1"),
        ("resources", {"disk": 0.0}, "`cluster.resources.disk` (=0) must be finite and at least 0.0001"),
        ("accelerator_type", "A100", "pass cluster.gpus_per_trial=1"),
        ("max_concurrent", 0, "must be at least 1"),
        ("threads", 0, "must be at least 1"),
        ("num_cpus", 0, "must be at least 1"),
        ("retries", -1, "must be at least 0"),
        ("backoff", -1.0, "at least 0"),
        ("address", "ray://head:10001", "must not be a Ray Client address"),
        ("address", "head", "must be auto, local or host:port"),
        ("address", "http://head:8265", "must be auto, local or host:port"),
    ],
)
def test_a_wrong_value_is_quoted_with_rule_and_remedy(name: str, value: Any, said: str) -> None:
    (sentence,) = validate(**{name: value})
    assert sentence.startswith(f"`cluster.{name}")
    assert said in sentence


def test_every_wrong_value_is_named_at_once() -> None:
    wrong = {"kind": "slurm", "cpus_per_trial": 0.0, "retries": -1, "address": "ray://head:10001"}
    assert len(validate(**wrong)) == len(wrong)


def test_threads_follow_the_cpus() -> None:
    assert [Cluster(cpus_per_trial=cpus).thread_count for cpus in (0.5, 1, 3.5)] == [1, 1, 3]
    assert Cluster(cpus_per_trial=4, threads=2).thread_count == 2


def test_the_schema_is_omegaconf_s() -> None:
    config = OmegaConf.structured(Cluster)
    config.memory_per_trial = "2GB"
    assert OmegaConf.to_object(config) == Cluster(memory_per_trial="2GB")


@pytest.mark.parametrize(
    ("name", "expected"), [("local", ("ray", None)), ("auto", ("ray", "auto")), ("inline", ("inline", None))]
)
def test_the_group_s_options_fit_the_schema(name: str, expected: tuple[str, str | None]) -> None:
    option = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(option, dict)
    option.pop("defaults")
    merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Cluster), option))
    assert isinstance(merged, Cluster)
    assert (merged.kind, merged.address) == expected
