"""Namespace of the package: names, lazy imports, the table of methods, and the names of `torch.nn.utils.prune`."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn

import pruning

SOURCE = Path(inspect.getfile(pruning))


def names_for_type_checkers() -> set[str]:
    blocks = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    return {
        alias.asname or alias.name
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_all_is_the_namespace() -> None:
    assert list(pruning.__all__) == sorted(set(pruning.__all__))
    assert names_for_type_checkers() == set(pruning.__all__)
    assert set(pruning.__all__) <= set(dir(pruning))
    for name in pruning.__all__:
        assert getattr(pruning, name) is getattr(pruning, name)
    namespace: dict[str, object] = {}
    exec("from pruning import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(pruning.__all__)


def test_every_public_name_of_torch_is_here() -> None:
    theirs = {
        name
        for name, value in vars(torch_prune).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == torch_prune.__name__
    }
    assert len(theirs) >= 17
    assert theirs <= set(pruning.__all__)


def test_unknown_names_raise_as_usual() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'l2_unstructured'"):
        pruning.l2_unstructured  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("pruning.nothing")


LIGHT = """
import sys
def heavy(): return {"torch", "numpy"} & set(sys.modules)
import pruning, pruning.choices.axes, pruning.schedule
assert not heavy(), heavy()
import pruning.masks.mask_files
assert "torch" not in heavy()
"""


def test_no_torch_before_it_is_needed() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, cwd=SOURCE.parent.parent)


@pytest.mark.slow
def test_the_package_imports_torch_and_numpy_only() -> None:
    converting = {"transformers"}  # imported where a network of transformers is there
    allowed = {"pruning", "torch", "numpy", "safetensors", "__future__"} | sys.stdlib_module_names
    for path in {*SOURCE.parent.rglob("*.py")} - {*SOURCE.parent.glob("integrations/*.py")}:  # see test_imports.py
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            more = converting if path.name == "converted_weights.py" else set()
            assert {name.split(".")[0] for name in names} <= allowed | more, path.name


def test_methods_are_the_concrete_classes() -> None:
    assert list(pruning.METHODS) == [
        "identity",
        "random_unstructured",
        "l1_unstructured",
        "random_structured",
        "ln_structured",
        "custom_from_mask",
    ]
    for name, row in pruning.METHODS.items():
        method = row.load()
        assert issubclass(method, pruning.BasePruningMethod)
        assert issubclass(method, getattr(torch_prune, method.__name__))
        assert method.PRUNING_TYPE == getattr(torch_prune, method.__name__).PRUNING_TYPE
        assert callable(getattr(pruning, name))


def test_private_names_that_pytorchs_tests_use() -> None:
    pruning._validate_pruning_amount_init(amount=0.34)
    with pytest.raises(ValueError, match="`amount`"):
        pruning._validate_pruning_amount(amount=20, tensor_size=19)
    assert pruning._compute_nparams_toprune(amount=0.4, tensor_size=17) == 7
    with pytest.raises(ValueError, match="2 dimensions"):
        pruning._validate_structured_pruning(torch.ones(3))
    with pytest.raises(IndexError, match="`dim`"):
        pruning._validate_pruning_dim(torch.ones(3, 2), 2)
    assert pruning._compute_norm(torch.tensor([[3.0, 4.0]]), 2, 0).tolist() == [5.0]
    hook = pruning.L1Unstructured.apply(nn.Linear(2, 2), "weight", 1)
    assert hook._tensor_name == "weight"
