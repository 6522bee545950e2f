"""Compile a Triton function with 64-bit indexing: program ids, and what is computed from them, are int64.

Triton's ``tl.program_id`` is an int32, so ``pid * BLOCK`` overflows for tensors of 2**31 elements and more. Here the
function runs through a code generator of its own: a subclass of Triton's, with a subclass of its semantics. Nothing of
Triton's is changed: the two functions of its that construct code generators run with other globals instead.

Random numbers stay the same: Triton's Philox takes an offset's two halves apart. What is computed from ``tl.arange``,
constants and loops between constants alone stays int32, and overflows as it does in Triton where it leaves one tile.
"""

from __future__ import annotations

import ast
import functools
import types
from typing import Any, cast

from opkit.errors import KernelError


def make_ir(source: Any, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any) -> Any:
    """Return the IR of a source of Triton's, with program ids of 64 bits.

    Variables that start as a literal, such as ``offset = 0``, stay int32 where they can; the second attempt makes them
    int64. Triton refuses a variable of two types, so some functions compile in one of the two ways alone.
    """
    compiled = functools.partial(_generate, source, target, options, codegen_fns, module_map, context)
    try:
        return compiled(literals=False)
    except Exception as error:
        from triton.compiler.errors import CompilationError

        if not isinstance(error, CompilationError):
            raise
        try:
            return compiled(literals=True)
        except Exception:
            raise error from error.__cause__  # it describes the code as it is written


def _generate(
    source: Any, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any, *, literals: bool
) -> Any:
    kind: type = type("WideGenerator", (_Literals if literals else _Widening, _triton("CodeGenerator")), {})
    convert = _with_globals(_triton("ast_to_ttir"), CodeGenerator=kind)
    kind.call_JitFunction = _with_globals(kind.call_JitFunction, CodeGenerator=kind)
    module = _gluon_module(target, options, context) if source.fn.is_gluon() else None
    return convert(
        source.fn,
        source,
        context=context,
        options=options,
        codegen_fns=codegen_fns,
        module_map=module_map,
        module=module,
    )


def _triton(name: str) -> Any:
    from triton.compiler import code_generator

    found = getattr(code_generator, name, None)
    if found is None or not hasattr(code_generator.CodeGenerator, "call_JitFunction"):
        raise KernelError(f"64-bit indexing does not work with this release of Triton, whose compiler has no {name}.")
    return found


def _with_globals(function: Any, **changed: Any) -> Any:
    """Return the same function, for which some of its module's names stand for something else."""
    names = {**function.__globals__, **changed}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _gluon_module(target: Any, options: Any, context: Any) -> Any:
    """Return an empty module with what Gluon's layouts are verified against."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    builder, backend = ir.builder(context), cast("Any", make_backend(target))
    module = builder.create_module()
    module.set_attr("ttg.target", builder.get_string_attr(backend.get_target_name(options)))
    numbers = {
        "ttg.num-warps": options.num_warps,
        "ttg.num-ctas": options.num_ctas,
        "ttg.threads-per-warp": options.warp_size,
        "ttg.maxnreg": getattr(options, "maxnreg", None),
    }
    for name, number in numbers.items():
        if number is not None:
            module.set_attr(name, builder.get_int32_attr(number))
    return module


# ---- the code generator ----------------------------------------------------------------------------------------------


class _GrownError(Exception):
    """A variable that is int32 before a loop is int64 after its body."""


class _Widening:
    """What differs from Triton's ``CodeGenerator``: its semantics, and variables that become int64 in a loop."""

    semantic: Any
    builder: Any
    lscope: dict[str, Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        parent: Any = super()
        parent.__init__(*args, **options)
        kind: Any = type("WideSemantic", (_Semantic, type(self.semantic)), {})
        self.semantic = kind(self.builder)

    def set_value(self, name: str, value: Any) -> None:
        """Assign a value; a variable that is int64 stays so when an int32 is assigned to it."""
        old = self.lscope.get(name)
        parent: Any = super()
        parent.set_value(name, self._cast(value) if _grew(value, old) else value)

    def _verify_loop_carried_variable(self, name: str, loop_val: Any, live_val: Any) -> None:
        if _grew(live_val, loop_val):
            raise _GrownError(name)
        parent: Any = super()
        parent._verify_loop_carried_variable(name, loop_val, live_val)

    def _find_carries(self, node: Any, liveins: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Find the variables that a loop carries; one that grows in the loop's body is made int64, and the visit restarts."""
        parent: Any = super()
        place = parent._get_insertion_point_and_loc()
        while True:
            try:
                return parent._find_carries(node, liveins, *args, **options)
            except _GrownError as grown:
                parent._set_insertion_point_and_loc(*place)
                name = str(grown)
                self.lscope = liveins
                liveins[name] = self._cast(liveins[name])
                self.lscope, self.local_defs = liveins.copy(), {}

    def _cast(self, value: Any) -> Any:
        from triton.language import core

        return self.semantic.cast(value, core.int64)


class _Literals(_Widening):
    """And variables that start as a literal are int64."""

    def visit_Assign(self, node: Any) -> None:
        parent: Any = super()
        parent.visit_Assign(node)
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name) and _literal(node.value):
            parent.set_value(target.id, self._cast(self.lscope[target.id]))


def _literal(node: Any) -> bool:
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and type(inner.value) is int


def _grew(narrow: Any, wide: Any) -> bool:
    """Return whether one value is an int32 and the other an int64 of the same shape."""
    from triton.language import core

    if not all(isinstance(value, core.tensor) for value in (narrow, wide)):
        return False
    types = narrow.type.scalar == core.int32 and wide.type.scalar == core.int64
    return bool(types and narrow.type.is_block() == wide.type.is_block() and narrow.shape == wide.shape)


class _Semantic:
    """What differs from Triton's ``TritonSemantic``, or Gluon's."""

    builder: Any

    def program_id(self, axis: int) -> Any:
        parent: Any = super()
        return self._to(parent.program_id(axis), "int64")

    def num_programs(self, axis: int) -> Any:
        parent: Any = super()
        return self._to(parent.num_programs(axis), "int64")

    def _convert_elem_to_ir_value(self, elem: Any, require_i64: bool) -> Any:
        """Convert an offset into a block pointer or descriptor, which are int32, each along one dimension."""
        from triton.language import core

        parent: Any = super()
        if not require_i64 and isinstance(elem, core.tensor) and elem.dtype == core.int64:
            elem = self._to(elem, "int32")
        return parent._convert_elem_to_ir_value(elem, require_i64)

    def _to(self, value: Any, dtype: str) -> Any:
        from triton.language import core

        parent: Any = self
        return parent.cast(value, getattr(core, dtype))
