"""``opkit.custom_op``: make an operator from one function."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch

from opkit import compat
from opkit.errors import DefinitionError, KeywordTensorError
from opkit.op import registry
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch.selection import KernelTable, RegisteredKernel
from opkit.op.native import function as _native  # noqa: F401  # pyright: ignore[reportUnusedImport] - registers its kind
from opkit.op.operator import CustomOp, Devices
from opkit.op.rules.transforms import check_policy
from opkit.op.schema import schema_string
from opkit.op.schema import signature as signatures
from opkit.op.schema.signature import Signature
from opkit.op.trace import mutation
from opkit.op.trace.mutation import Inference
from opkit.op.triton import function as _triton  # noqa: F401  # pyright: ignore[reportUnusedImport] - registers its kind

P = ParamSpec("P")
R = TypeVar("R")
Tags = torch.Tag | Sequence[torch.Tag] | None
_SCHEMA_KINDS = {"Tensor": "tensor", "int": "int", "float": "float", "bool": "bool", "str": "str"}


@overload
def custom_op(
    name: str,
    fn: None = None,
    /,
    *,
    mutates_args: str | Iterable[str] | None = None,
    device_types: Devices = None,
    schema: str | None = None,
    tags: Tags = None,
    opaque: bool = False,
    reference: Callable[..., Any] | None = None,
    inline: bool | None = None,
    autocast: str | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]]: ...


@overload
def custom_op(
    name: str,
    fn: Callable[P, R],
    /,
    *,
    mutates_args: str | Iterable[str] | None = None,
    device_types: Devices = None,
    schema: str | None = None,
    tags: Tags = None,
    opaque: bool = False,
    reference: Callable[..., Any] | None = None,
    inline: bool | None = None,
    autocast: str | None = None,
) -> CustomOp[P, R]: ...


def custom_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str] | None = None,
    device_types: Devices = None,
    schema: str | None = None,
    tags: Tags = None,
    opaque: bool = False,
    reference: Callable[..., Any] | None = None,
    inline: bool | None = None,
    autocast: str | None = None,
) -> Any:
    """Make a PyTorch operator from a function; usable as a decorator.

    A function that stays in torch is the operator's reference: the fake implementation, backward, double backward,
    forward-mode, vmap and FLOP formula are derived from it, and compilers see through the operator on devices for which
    no kernel is registered. A function that leaves torch (numpy, a C call, branches on values) is opaque, as under
    ``torch.library.custom_op``: its rules are registered by hand, or derived from ``reference``.

    Args:
        name: "namespace::name"; use the library's name as the namespace.
        fn: the function. Its annotations give the schema; jaxtyping's (``Float[Tensor, "*batch d"]``) are checked too. Besides
            torch.library's types a parameter may be a dataclass, ``NamedTuple``, enumeration, ``Literal``, dictionary or tuple of
            what a schema holds, ``int | float``, a complex number, a layout, a memory format or a generator.
        mutates_args: the arguments written to, or "unknown" for all. Left out, they are inferred.
        device_types: the device types that ``fn`` serves; all of them by default.
        schema: a schema to use in place of the annotations, such as "(Tensor x, float y) -> Tensor".
        tags: ``torch.Tag`` values for the operator.
        opaque: never look into ``fn``.
        reference: a torch function that computes the same as an opaque ``fn``.
        inline: True: compilers always see the reference; False: never; None: where there is no kernel for the device.
        autocast: the autocast policy, "low", "full", "promote" or None; see ``docs/derived.md``.

    Raises:
        DefinitionError: the name, an annotation or an option is at fault; nothing is registered then.
        NameClashError: another module or library holds the name.
        MutationUnknownError: ``mutates_args`` was left out and could not be inferred.
        UnsupportedTorchError: the installed torch is older than opkit runs on.

    >>> import opkit, torch
    >>> @opkit.custom_op("doc::scaled_sin", mutates_args=())
    ... def scaled_sin(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    ...     return x.sin() * scale
    >>> scaled_sin(torch.zeros(2))
    tensor([0., 0.])
    """

    def define(function: Callable[..., Any]) -> CustomOp[Any, Any]:
        function = function if schema is None else _as_function(function)
        draft = _Draft(
            name, function, mutates_args, device_types, schema, _normalized(tags), opaque, reference, inline, autocast
        )
        op: CustomOp[Any, Any] = CustomOp(draft.operator())
        registry.install(op, function.__module__, stacklevel=3 if fn is None else 4)
        return op

    compat.warn_if_untested(torch.__version__)
    schema_string.split_name(name)
    check_policy(name, autocast)
    return define if fn is None else define(fn)


def _as_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` as a Python function; with ``schema=`` any callable may be defined as an operator."""
    if isinstance(fn, types.FunctionType) or not callable(fn):
        return fn

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    call.__doc__, call.__module__ = fn.__doc__, getattr(fn, "__module__", None) or call.__module__
    call.__name__ = call.__qualname__ = getattr(fn, "__name__", type(fn).__name__)
    return call


def _normalized(tags: Tags) -> tuple[torch.Tag, ...]:
    listed = () if tags is None else (tags,) if isinstance(tags, torch.Tag) else tuple(tags)
    for tag in listed:
        if not isinstance(tag, torch.Tag):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DefinitionError(f"tags= takes torch.Tag values, got {tag!r}")
    return tuple(dict.fromkeys(listed))


@dataclasses.dataclass
class _Draft:
    """The arguments of ``custom_op``; :meth:`operator` makes every check that can fail, before anything is registered."""

    name: str
    function: Callable[..., Any]
    mutates_args: str | Iterable[str] | None
    device_types: Devices
    schema: str | None
    tags: tuple[torch.Tag, ...]
    opaque: bool
    reference: Callable[..., Any] | None
    inline: bool | None
    autocast: str | None

    def operator(self) -> Operator:
        self._check_options()
        _, opname = schema_string.split_name(self.name)
        signature = signatures.read(self.function, self.name)
        self._check_parameters(signature)
        declared = (
            self.mutates_args
            if self.mutates_args is None or isinstance(self.mutates_args, str)
            else tuple(self.mutates_args)
        )
        inference = self._mutation(signature, declared)
        mutates = declared if isinstance(declared, str) else inference.mutates
        text = self.schema or schema_string.infer(signature, mutates, self.tags)
        parsed = self._parsed(opname, text)
        if self.schema is not None:
            signature = _from_schema(signature, parsed)
            if declared is not None:
                schema_string.check_manual(text, set(inference.mutates), declared, parsed.arguments)
        tags = self._tags(inference, parsed)
        operator = Operator(
            name=self.name,
            signature=signature,
            schema_text=text,
            function=self.function,
            explicit_reference=self.reference,
            declared_opaque=self.opaque or self.reference is not None,
            inline=self.inline,
            autocast=self.autocast,
            mutation=inference,
            tags=tags,
            device_types=self._devices(parsed),
            kernels=KernelTable(self.name, [p.name for p in signature.parameters]),
        )
        if self.reference is not None:  # the function is a kernel then, in front of its reference
            for device in operator.device_types or (None,):
                name = operator.kernels.free_name(getattr(self.function, "__name__", ""), device)
                operator.kernels.add(RegisteredKernel(name, device, operator.body))
        return operator

    def _check_options(self) -> None:
        if self.inline not in (None, True, False):
            raise DefinitionError(f"{self.name}: inline={self.inline!r} must be True, False or None")
        if self.reference is not None and not callable(self.reference):
            raise DefinitionError(f"{self.name}: reference= must be a function, got {self.reference!r}")
        for value in self.mutates_args if isinstance(self.mutates_args, (list, tuple, set)) else ():
            if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DefinitionError(f"{self.name}: mutates_args holds argument names, got {value!r}")

    def _check_parameters(self, signature: Signature) -> None:
        if self.reference is None:
            return
        own = list(signature.python.parameters)
        theirs = list(inspect.signature(self.reference).parameters)
        if own != theirs:
            raise DefinitionError(
                f"{self.name}: the reference takes ({', '.join(theirs)}), but the operator takes ({', '.join(own)}). They "
                "must have the same parameters."
            )

    def _mutation(self, signature: Signature, declared: str | tuple[str, ...] | None) -> Inference:
        if declared is None and self.schema is not None:
            parsed = self._parsed("op", self.schema)
            writes = [a.name for a in parsed.arguments if a.alias_info is not None and a.alias_info.is_write]
            return Inference(tuple(writes), "the schema")
        if declared is None:
            body = self.reference or self.function
            return mutation.infer(self.name, body, signature, self.opaque and self.reference is None)
        if declared == "unknown":
            tensors = [p.name for p in signature.parameters if p.kind in ("tensor", "tensors")]
            return Inference(tuple(tensors), "unknown: every tensor")
        return Inference(() if isinstance(declared, str) else declared, "declared")

    def _parsed(self, opname: str, text: str) -> Any:
        try:
            parsed = private.parse_schema(opname + text)
        except RuntimeError as error:
            raise DefinitionError(f"{self.name}: the schema {text!r} cannot be read: {error}") from error
        is_out = getattr(torch.Tag, "out", None) in self.tags
        if private.library_utils.has_kwarg_only_tensors(parsed) and not is_out:
            raise KeywordTensorError(
                f"{self.name}: custom_op with kwarg-only Tensor args. Please make your tensors not kwarg-only. Got: {text}"
            )
        return parsed

    def _tags(self, inference: Inference, parsed: Any) -> tuple[torch.Tag, ...]:
        seeded = torch.Tag.nondeterministic_seeded
        random = inference.random or mutation.names_random(self.reference or self.function)
        random |= any("Generator" in str(argument.type) for argument in parsed.arguments)
        return (*self.tags, seeded) if random and seeded not in self.tags else self.tags

    def _devices(self, parsed: Any) -> tuple[str, ...] | None:
        if self.device_types is None:
            return None
        devices = (self.device_types,) if isinstance(self.device_types, str) else tuple(self.device_types)
        for device in devices:
            try:
                private.dispatch_key_of(device)
            except (RuntimeError, TypeError) as error:
                raise DefinitionError(
                    f"{self.name}: {device!r} is not a device type of torch's. Examples: cpu, cuda."
                ) from error
        schema_string.device_argument(parsed, devices)
        return devices


def _from_schema(signature: Signature, parsed: Any) -> Signature:
    """Return the signature with its parameters' kinds read from a hand-written schema, for functions without annotations."""
    kinds = {
        a.name: (_SCHEMA_KINDS.get(str(a.type).removeprefix("Optional[").removesuffix("]"), "other"), a)
        for a in parsed.arguments
    }
    parameters = tuple(_by_hand(p, kinds) for p in signature.parameters)
    return dataclasses.replace(signature, parameters=parameters)


def _by_hand(parameter: signatures.OperatorParameter, kinds: dict[str, Any]) -> signatures.OperatorParameter:
    """Return a parameter as a hand-written schema has it; its codec applies only if the schema has the codec's arguments."""
    if parameter.codec is not None and all(name in kinds for name in signatures.field_names(parameter)):
        return parameter
    kind, argument = kinds.get(parameter.name, (parameter.kind, None))
    optional = parameter.optional if argument is None else str(argument.type).startswith("Optional")
    schema_argument = signatures.SchemaArgument(parameter.name, "" if argument is None else str(argument.type))
    return dataclasses.replace(parameter, kind=kind, optional=optional, codec=None, arguments=(schema_argument,))
