from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from factories import config

from orchestrator.compare.panels import SettingsOfEach, as_typed, varying


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = SettingsOfEach([config])
    return found


def test_leaves_get_dotted_names() -> None:
    assert settings_of({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None, "empty": {}}) == {
        "a.b": 1,
        "a.c.d": [1, 2],
        "e": None,
    }


def test_settings_leave_out_where_a_trial_runs_and_what_becomes_of_it() -> None:
    settings = settings_of(config("l1_unstructured", 0.9, 3, deploy={"formats": ["onnx"]}))

    assert settings["method.name"] == "l1_unstructured"
    assert settings["schedule.sparsity"] == 0.9
    assert settings["seed"] == 3
    assert not {name.split(".")[0] for name in settings} & {"tracking", "store", "cluster", "deploy", "name"}


def test_settings_hold_no_secrets() -> None:
    data = {"token": "abc", "tokens": ["abc"], "password": {"of": "abc"}, "root": "https://me:abc@host/x"}
    settings = settings_of({"data": data, "model": {"api": {"key": "abc"}, "urls": ["https://me:abc@host/x"]}})

    assert "abc" not in repr(settings)


def test_settings_tell_numbers_of_one_value_apart() -> None:
    assert [as_typed(settings_of({"a": value})["a"]) for value in (1, True, 1.0)] == ["1", "true", "1.0"]


def test_values_read_as_one_would_type_them() -> None:
    assert [as_typed(value) for value in (None, True, 0.9, 3, "x", [1, "a"])] == [
        "null",
        "true",
        "0.9",
        "3",
        "x",
        '[1,"a"]',
    ]


def test_axes_are_what_differs_or_is_missing_somewhere() -> None:
    assert varying([{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 1, "d": 0}, {"a": 1, "b": 1, "d": 0}]) == (
        "b",
        "c",
        "d",
    )
    assert varying([]) == ()
    assert varying([{"a": 1}]) == ()


def test_a_part_that_trials_share_is_flattened_once() -> None:
    data, formed = {"kind": "digits"}, list[dict[str, Any]]()

    def form(part: dict[str, Any]) -> dict[str, Any]:
        formed.append(part)
        return {name: f"<{value}>" for name, value in part.items()}

    settings = SettingsOfEach(({"data": data, "seed": seed} for seed in range(3)), form)

    assert formed == [{"data.kind": "digits"}, {"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert [*settings] == [{"data.kind": "<digits>", "seed": f"<{seed}>"} for seed in range(3)]
    assert settings[2] == {"data.kind": "<digits>", "seed": "<2>"}
