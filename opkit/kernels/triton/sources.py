"""Make sources for ``triton.compile``: Triton's own, with two variants, and with the line at which compiling failed.

One variant is for grids larger than the hardware's, which are launched in pieces. Six int32 parameters are added at the end: the
piece's start along x, y and z, which is added to each program id, and the whole grid's sizes, which take the place of
``tl.num_programs``. Regular expressions rewrite the text of Triton's IR, after the functions that the kernel calls have been
inlined into it: Triton's Python bindings for changing IR are undocumented, while its parser verifies the changed text.

The other variant has 64-bit indexing: program ids, and what is computed from them, are int64. Triton's ``tl.program_id`` is an
int32, so ``pid * BLOCK`` overflows for tensors of 2**31 elements and more. The function runs through a subclass of Triton's code
generator, with a subclass of its semantics. Triton itself is not changed: the two of its functions that construct code generators
run with other globals instead. Random numbers stay the same: Triton's Philox takes an offset's two halves apart. Results of
``tl.arange``, constants and loops between constants alone stay int32, and overflow as in Triton where they leave one tile.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from opkit.errors import KernelError
from opkit.kernels.triton import parsing

_VERSION = 1  # of what the variants are: part of the key in Triton's cache


class SourceLine(NamedTuple):
    """A line of an author's."""

    file: str
    line: int


class SourceVariant:
    """A mixin for Triton's ``ASTSource``, which precedes it among the bases."""

    wide = False
    offsets = False
    place: SourceLine | None = None
    fn: Any
    name: str
    constants: dict[tuple[int, ...], Any]

    def hash(self) -> str:
        parent: Any = super()
        with parsing.ALONE:
            plain = parent.hash()
        texts = any(isinstance(value, str) for value in self.constants.values())  # Triton writes 1 and "1" alike
        if not (self.wide or self.offsets or texts):
            return plain
        constants = [(at, v if isinstance(v, str) else type(v).__name__) for at, v in sorted(self.constants.items())]
        return hashlib.sha256(
            f"{plain} {self.wide} {self.offsets} {texts and constants} {_VERSION}".encode()
        ).hexdigest()

    def make_ir(self, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any) -> Any:
        parent: Any = super()
        make = functools.partial(make_wide_ir, self) if self.wide else parent.make_ir
        try:
            with parsing.ALONE:
                module = make(target, options, codegen_fns, module_map, context)
        except Exception as error:
            self.place = place_of(error)
            raise
        return shifted(module, context, self.name, self.fn.is_gluon()) if self.offsets else module


def source(function: Any, signature: Any, constexprs: Any, attributes: Any) -> Any:
    """Return a source of the function's kind: Triton's or Gluon's."""
    return _class(function.is_gluon())(function, signature, constexprs, attributes)


@functools.cache
def _class(gluon: bool) -> Any:
    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as base
    else:
        from triton.compiler.compiler import ASTSource as base
    return type("Source", (SourceVariant, base), {})


def place_of(error: BaseException) -> SourceLine | None:
    """Return the innermost line of the author's that Triton's code generator was at; None if it was at none."""
    import triton

    own = str(Path(triton.__file__).parent)
    found = [place for place in _places(error) if not place.file.startswith(own)]
    return found[-1] if found else None


def _places(error: BaseException) -> Iterator[SourceLine]:
    """Yield every line that a code generator was at, outermost first: each caller's generator runs its callee's."""
    trace = error.__traceback__
    while trace is not None:
        generator: Any = trace.tb_frame.f_locals.get("self")
        node = _node(generator)
        if hasattr(node, "lineno"):
            yield SourceLine(str(generator.file_name), generator.begin_line + node.lineno)
        trace = trace.tb_next
    if error.__cause__ is not None:
        yield from _places(error.__cause__)


def _node(generator: Any) -> Any:
    """Return the node that a code generator visits; None for other objects. Tuples of Triton 3.6 raise for unknown names."""
    return getattr(generator, "cur_node", None) if isinstance(generator, ast.NodeVisitor) else None


# ---- grids in pieces -------------------------------------------------------------------------------------------------


AXES = "xyz"
_ENTRY = re.compile(r"^  tt\.func public @(?:[^\n]*)$", re.MULTILINE)
_LISTED = re.compile(r"\)(?= attributes \{| \{)")
_START = re.compile(r"^( *)(%[\w$.-]+) = tt\.get_program_id ([xyz]) : i32(.*)$", re.MULTILINE)
_TOTAL = re.compile(r"^( *)(%[\w$.-]+) = tt\.get_num_programs ([xyz]) : i32(.*)$", re.MULTILINE)
_CANNOT = "its grid is larger than the hardware's, and cannot be launched in pieces"
_APART = "it takes its program id in a part that runs in warps of its own. Take it in the kernel, and pass it on."
_LEFT = re.compile(r"tt\.(?:get_program_id|get_num_programs)")


def shifted(module: Any, context: Any, kernel: str, gluon: bool = False) -> Any:
    """Return the module of a kernel, with the six parameters, as ``Param`` calls them: "offset" and "total", axes 0 to 2.

    Raises:
        KernelError: a program id is taken where the kernel's parameters cannot be seen.
    """
    _inline(module, context, gluon)
    text = rewritten(str(module), kernel)
    return _parsed(text, context, kernel)


def rewritten(text: str, kernel: str) -> str:
    """Return the IR as text, changed.

    Raises:
        KernelError: a program id is taken where the kernel's parameters cannot be seen.
    """
    entry = _ENTRY.search(text)
    if entry is None:
        raise KernelError(f"{kernel}: {_CANNOT}: there is no function in its IR.")
    end = text.index("\n  }", entry.end())  # the brace that stands below the function's ``tt.func``
    if _LEFT.search(text[: entry.start()]) or _LEFT.search(text[end:]):
        raise KernelError(
            f"{kernel}: {_CANNOT}: a function that is not inlined takes its program id. "
            "Pass the id to it as an argument, or leave noinline=True out."
        )
    body = _START.sub(_shift, _TOTAL.sub(_whole, text[entry.end() : end]))
    return text[: entry.start()] + _head(entry[0]) + body + text[end:]


def _head(line: str) -> str:
    added = [f"%opk_offset_{axis}: i32" for axis in AXES] + [f"%opk_total_{axis}: i32" for axis in AXES]
    end = list(_LISTED.finditer(line))[-1].start()  # of its parameters
    separator = "" if line[:end].endswith("(") else ", "
    return line[:end] + separator + ", ".join(added) + line[end:]


def _shift(match: re.Match[str]) -> str:
    indent, name, axis, location = match.groups()
    inner = f"%opk_id{name[1:]}"
    return (
        f"{indent}{inner} = tt.get_program_id {axis} : i32{location}\n"
        f"{indent}{name} = arith.addi {inner}, %opk_offset_{axis} : i32{location}"
    )


def _whole(match: re.Match[str]) -> str:
    indent, name, axis, location = match.groups()
    total = f"%opk_total_{axis}"
    return f"{indent}{name} = arith.ori {total}, {total} : i32{location}"  # the same; folded away


def _inline(module: Any, context: Any, gluon: bool) -> None:
    from triton._C.libtriton import ir, passes

    manager = ir.pass_manager(context)
    (passes.gluon if gluon else passes.common).add_inliner(manager)
    passes.common.add_symbol_dce(manager)  # the functions that were inlined
    manager.run(module, "inline")


def _parsed(text: str, context: Any, kernel: str) -> Any:
    from triton._C.libtriton import ir

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(text)
        try:
            module = ir.parse_mlir_module(str(path), context)
        except RuntimeError as error:
            reason = _APART if "warp_specialize" in text else "this release of Triton does not read the changed IR."
            raise KernelError(f"{kernel}: {_CANNOT}: {reason}") from error
    module.context = context
    return module


# ---- 64-bit indexing -------------------------------------------------------------------------------------------------


def make_wide_ir(source: Any, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any) -> Any:
    """Return the IR of a source of Triton's, with program ids of 64 bits.

    Variables that start as a literal, such as ``offset = 0``, stay int32 where they can; the second attempt makes them
    int64. Triton refuses a variable of two types, so some functions compile in one of the two ways alone.
    """
    compiled = functools.partial(_generate_wide, source, target, options, codegen_fns, module_map, context)
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


def _generate_wide(
    source: Any, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any, *, literals: bool
) -> Any:
    kind: type = type("WideGenerator", (_Literals if literals else _Widening, _code_generator("CodeGenerator")), {})
    convert = _with_globals(_code_generator("ast_to_ttir"), CodeGenerator=kind)
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


def _code_generator(name: str) -> Any:
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
