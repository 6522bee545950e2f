"""The private names of torch that this room uses."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["UNKNOWN_SIZES", "FakeTensorMode", "decomposition_table", "make_fx", "promoted_dtype"]

UNKNOWN_SIZES = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake tensor raises where a size or a number depends on data."""


def promoted_dtype(operands: Sequence[Any]) -> torch.dtype:
    """Return the dtype to which torch promotes tensors and numbers."""
    return elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
