"""Register operators with DTensor once torch.distributed.tensor is imported, by whomever, and never import it before.

The first operator that is defined before that import puts a finder into ``sys.meta_path``, which takes itself out again.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from opkit.op import registry
from opkit.op.core import Operator
from opkit.op.operator import CustomOp

_NAME = "torch.distributed.tensor"


def observe(op: CustomOp[Any, Any]) -> None:
    """Register an operator that was defined with DTensor, now or when that is imported."""
    if _NAME in sys.modules:
        _register(op)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(op: CustomOp[Any, Any]) -> None:
    from opkit.sharding import torch_private

    operator = op._operator  # pyright: ignore[reportPrivateUsage]
    torch_private.register(operator.overload, functools.partial(_strategies, operator))
    operator.sharding_renewed = torch_private.clear_cache
    operator.pieces_of = functools.partial(_pieces_of, operator)


def _strategies(operator: Operator, schema: Any) -> Any:
    from opkit.sharding import dtensor

    return dtensor.strategies(operator, schema)


def _pieces_of(operator: Operator, leaves: Sequence[Any], *others: Any) -> Any:
    from opkit.sharding import backward, torch_private

    is_sharded = any(isinstance(leaf, torch_private.DTensor) for leaf in leaves)
    return backward.pieces_of(operator, leaves, *others) if is_sharded else None


class _Finder(importlib.abc.MetaPathFinder):
    """It finds torch.distributed.tensor as Python would, and registers the operators after it ran."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of torch.distributed.tensor, once; None for other modules."""
        if fullname != _NAME or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                for op in registry.operators():
                    _register(op)

            loader.exec_module = exec_module
        return spec
