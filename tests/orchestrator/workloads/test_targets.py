"""Targets that cannot be created: errors name the key, the cause and the remedy."""

from __future__ import annotations

import pytest

from orchestrator.workloads.targets import TargetError, create


def raised(where: str, **node: object) -> str:
    with pytest.raises(TargetError) as error:
        create(where, node, [])
    return str(error.value)


def test_an_argument_that_a_default_brings_is_told_with_its_removal() -> None:
    optimizer = raised("train.optimizer", _target_="torch.optim.Adam", lr=0.1, momentum=0.9)
    scheduler = raised("finetune.scheduler", _target_="torch.optim.lr_scheduler.OneCycleLR", T_max=None)
    other = raised("train.loss", _target_="torch.nn.MSELoss", weight=1.0)

    assert "unexpected keyword argument 'momentum'; `train.optimizer.momentum` may come from a default: " in optimizer
    assert optimizer.endswith(
        "add ~train.optimizer.momentum, or choose optimizer@train.optimizer=adam or a file of your own."
    )
    assert scheduler.endswith("default: choose scheduler@finetune.scheduler=step or a file of your own.")
    assert other.endswith("`train.loss.weight` may come from a default: add ~train.loss.weight.")


def test_a_misspelt_or_missing_argument_is_answered_by_its_name() -> None:
    misspelt = raised("train.optimizer", _target_="torch.optim.Adam", lr=0.1, weight_dcay=0.9)
    missing = raised("train.loss", _target_="torch.nn.Bilinear", in2_features=3)
    filled = raised("model", _target_="orchestrator.workloads.networks.classifiers.mlp")

    assert "; did you mean `train.optimizer.weight_decay`? `train.optimizer.weight_dcay` may come from a" in misspelt
    assert missing.endswith("; add +train.loss.out_features=VALUE.")
    assert filled.endswith("; add +model.classes=null; the data fill in what is null.")
    several = raised("train.loss", _target_="torch.nn.Bilinear")
    assert several.endswith("; add +train.loss.in2_features=VALUE +train.loss.out_features=VALUE.")


def test_another_failure_points_to_the_arguments() -> None:
    assert raised("train.loss", _target_="torch.nn.MSELoss", reduction={"_target_": "math.sqrt"}).endswith(
        "check the target and its arguments under `train.loss`."
    )
