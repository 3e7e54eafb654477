"""Weights from outside are checked before a kernel reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pruning.kernels.sparse_weight import SparseWeight


def row(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"starts": row(0, 2, 1, 3, 4)}, "starts of rows must ascend"),
        ({"starts": row(1, 1, 2, 3, 4)}, "starts of rows must ascend"),
        ({"starts": row(0, 1, 2, 3, 5)}, "starts of rows must ascend"),
        ({"starts": row(0, 2**31 - 1, -(2**31), -1, 4)}, "starts of rows must ascend"),
        ({"starts": row(0, 1, 2, 4)}, "has 4 starts"),
        ({"starts": row(0, 1, 2, 3, 4, dtype=torch.int64)}, "`starts` must be one row of torch.int32"),
        ({"columns": row(0, 1, 2, 6)}, "must lie in a row of 6 entries"),
        ({"columns": row(0, -1, 2, 3)}, "must lie in a row of 6 entries"),
        ({"columns": row(0, 1, 2)}, "4 values"),
        ({"starts": row(0, 2, 2, 3, 4), "columns": row(1, 0, 2, 3)}, "columns of each row must ascend"),
        ({"starts": row(0, 2, 2, 3, 4), "columns": row(1, 1, 2, 3)}, "columns of each row must ascend"),
        ({"values": torch.ones(4, dtype=torch.float64)}, "`values` must be one row of torch.float32"),
        ({"values": torch.ones(2, 2)}, "`values` must be one row of torch.float32"),
        ({"shape": (4,)}, "at least two positive sizes"),
        ({"shape": (4, 0)}, "at least two positive sizes"),
        ({"shape": (4, 2**30)}, "at least two positive sizes"),
    ],
)
def test_positions_that_no_weight_can_have_are_refused(changed: dict[str, Any], said: str) -> None:
    right = SparseWeight((4, 6), row(0, 1, 2, 3, 4), row(0, 1, 2, 3), torch.ones(4))
    right.check()
    with pytest.raises(ValueError, match=said):
        replace(right, **changed).check()
