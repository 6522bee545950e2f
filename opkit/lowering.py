"""The functions and classes with which rules of :meth:`opkit.CustomOp.register_lowering` are written.

A rule takes a :class:`Builder` and the operator's arguments: tensors as :class:`Tensor`, numbers as they are, sizes as
:class:`Index`, dtypes by name ("f32", "bf16"; keys of ``DTYPES``). It returns a tensor for each result.

=======================  ============================================================================================
elements                 ``element(x, shape, dtype)``: of a tensor broadcast to ``shape``, as a :class:`Scalar`, with
                         Python's operators, ``exp``, ``where``, ``cast`` and the others of ``opkit.compiler.lower.scalar``
pointwise results        ``pointwise(b, formula, [x, y])``, or ``b.elementwise(body.expr)``
between steps            ``b.temporary(body.expr, shape)``; ``b.reduce("sum", body, shape, dims, dtype)``, or "max", "prod", ...
views                    ``x.mapped(shape, coordinates)``: its element at coordinates over ``axes(shape)``; ``x.reshaped(shape)``;
                         ``x.expanded(shape)``. No memory is touched.
results                  ``b.result(number)``: dtype, shape and strides from the fake implementation
=======================  ============================================================================================

Arithmetic on narrow floats uses the type ``DTYPES[dtype].compute``, which is "f32" for them.

For arguments that a function or method here has no meaning for, such as an element of a complex tensor, it raises
:class:`NoRule`, and the operator is called.
"""

from opkit.compiler.ir.dtypes import DTYPES as DTYPES
from opkit.compiler.ir.graph import TensorType as TensorType
from opkit.compiler.ir.index import Index as Index
from opkit.compiler.ir.index import index as index
from opkit.compiler.ir.index import product as product
from opkit.compiler.lower.builder import Builder as Builder
from opkit.compiler.lower.builder import element as element
from opkit.compiler.lower.builder import pointwise as pointwise
from opkit.compiler.lower.registry import NoRule as NoRule
from opkit.compiler.lower.scalar import Scalar as Scalar
from opkit.compiler.lower.scalar import absolute as absolute
from opkit.compiler.lower.scalar import cast as cast
from opkit.compiler.lower.scalar import cos as cos
from opkit.compiler.lower.scalar import equal as equal
from opkit.compiler.lower.scalar import erf as erf
from opkit.compiler.lower.scalar import exp as exp
from opkit.compiler.lower.scalar import expm1 as expm1
from opkit.compiler.lower.scalar import floor as floor
from opkit.compiler.lower.scalar import log as log
from opkit.compiler.lower.scalar import log1p as log1p
from opkit.compiler.lower.scalar import maximum as maximum
from opkit.compiler.lower.scalar import minimum as minimum
from opkit.compiler.lower.scalar import number as number
from opkit.compiler.lower.scalar import power as power
from opkit.compiler.lower.scalar import sin as sin
from opkit.compiler.lower.scalar import sqrt as sqrt
from opkit.compiler.lower.scalar import tanh as tanh
from opkit.compiler.lower.scalar import where as where
from opkit.compiler.lower.tensors import Tensor as Tensor
from opkit.compiler.lower.tensors import formal as axes

__all__ = ["axes"]  # the others are exported by their own names
