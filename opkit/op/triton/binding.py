"""Match the parameters of a Triton function by name to an operator's arguments, outputs and sizes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from opkit.errors import DeclarationError, KernelError
from opkit.kernels.facts import Facts
from opkit.kernels.triton.named import Element, Named
from opkit.kernels.triton.parsing import HeaderParameter
from opkit.op.triton.evaluation import EVERYTHING, Formula, KernelNames, Source, formula, measured, ordered
from opkit.op.triton.kernel import Descriptor, TritonKernel

_LISTS = dict.fromkeys(("ints", "floats", "bools"), "ints")
_ROLES = {"int": "int", "float": "float", "bool": "bool", "dtype": "exact", "str": "text", **_LISTS}
_READ_ROLES = {"tensor": "info", "int": "exact", "float": "float_exact", "bool": "exact"}
_GRID = "grid"


@dataclasses.dataclass(frozen=True)
class BoundKernel:
    """A Triton function whose every parameter is accounted for.

    Attributes:
        kernel: what the author declared.
        facts: the operator that it serves.
        name: the kernel's name among those of its operator.
        sources: the values of a call that matter.
        roles: what of each of them decides which compiled kernel runs; as ``opkit._core.Launcher`` has them.
        runtime: the source of each parameter that the call decides at run time.
        constants: parameters and options whose values never change.
        formulas: the other ones, in the order of their evaluation, the grid among them.
        descriptors: the parameters that are tensor descriptors.
        zeroed: the parameters whose tensors are set to zero before a launch.
    """

    kernel: TritonKernel
    facts: Facts
    name: str
    sources: tuple[Source, ...]
    roles: tuple[str, ...]
    runtime: Mapping[str, int]
    constants: Mapping[str, Any]
    formulas: tuple[Formula, ...]
    descriptors: Mapping[str, Descriptor]
    zeroed: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The operator and the kernel, with which errors begin."""
        return f"{self.facts.operator}, kernel {self.name!r}"

    @functools.cached_property
    def options(self) -> frozenset[str]:
        """The options of the compiler that the author, or a config, sets."""
        names = {name for config in self.kernel.configs for name in config.values}
        return frozenset({*self.kernel.options, *names} - {parameter.name for parameter in self.kernel.parameters})

    @functools.cached_property
    def strided(self) -> dict[int, tuple[int, ...]]:
        """The tensors whose strides the kernel takes, and for which dimensions."""
        dims: dict[int, tuple[int, ...]] = {}
        for source in self.sources:
            if source.origin == "STRIDE":
                dims[source.argument] = (*dims.get(source.argument, ()), source.detail)
        return dims

    @property
    def varying(self) -> frozenset[str]:
        """The names whose values the choice of a config may change: parameters, options, and functions of them."""
        names = {name for config in self.kernel.configs for name in config.values}
        for each in self.formulas if names else ():
            if names & {*each.inputs} or {*EVERYTHING} & {*each.inputs}:
                names.add(each.name)
        return frozenset(names)

    @property
    def written(self) -> tuple[int, ...]:
        """The sources that are arguments which the operator writes to."""
        arguments = self.facts.arguments
        return tuple(
            i for i, s in enumerate(self.sources)
            if s.kind == "tensor" and s.argument < len(arguments) and arguments[s.argument].written
        )  # fmt: skip


class _Binder:
    def __init__(self, kernel: TritonKernel, facts: Facts, name: str, absent: Mapping[str, Any]) -> None:
        self.kernel, self.facts, self.name, self.absent = kernel, facts, name, absent
        if len(kernel.outputs) > len(facts.outputs):
            raise self.error(
                f"outputs= has {len(kernel.outputs)} names, and the operator has {len(facts.outputs)} outputs."
            )
        self.names = KernelNames(facts, kernel.outputs)
        self.parameters = kernel.parameters
        self.config_names = {name for config in kernel.configs for name in config.values}
        self.sources: dict[Source, None] = {}
        self.read: set[Source] = set()  # by formulas, so that their exact values count

    def error(self, message: str) -> DeclarationError:
        return DeclarationError(f"{self.facts.operator}, kernel {self.name!r}: {message}")

    def bind(self) -> BoundKernel:
        runtime: dict[str, Source] = {}
        constants: dict[str, Any] = {}
        formulas: list[Formula] = []
        descriptors: dict[str, Descriptor] = {}
        for name, value in {
            **self.absent,
            **self.kernel.options,
            **self.kernel.values,
            _GRID: self.kernel.grid,
        }.items():
            self._settle(name, value, constants, formulas, descriptors)
        for parameter in self.parameters:
            if parameter.name in self.config_names:
                self._check_configs(parameter, constants, [f.name for f in formulas])
            if not {parameter.name} & ({*constants, *descriptors, *self.config_names} | {f.name for f in formulas}):
                self._take(parameter, runtime, constants, formulas)
        for f in formulas:
            self._read_inputs(f, formulas, constants, runtime)
        self._read_prune(runtime)
        self._check_outputs([*runtime.values(), *self.read])
        return self._bound(runtime, constants, formulas, descriptors)

    def _settle(
        self,
        name: str,
        value: Any,
        constants: dict[str, Any],
        formulas: list[Formula],
        descriptors: dict[str, Descriptor],
    ) -> None:
        """Add a value that the author set: a constant, a function, or a descriptor of a tensor."""
        if isinstance(value, Descriptor):
            descriptors[name] = value
            self.read.add(self._tensor(name, value.tensor))
            for part in ("block", "shape"):
                if callable(chosen := getattr(value, part)):
                    formulas.append(formula(f"{name}.{part}", chosen, self._means))
        elif callable(value) and not type(value).__module__.startswith(
            "triton"
        ):  # a function or type that the kernel uses
            formulas.append(formula(name, value, self._means))
        else:
            constants[name] = self._constant(value)

    def _constant(self, value: Any) -> Any:
        """Return a constant; of a dtype Triton's element type, or its name for a kernel that is named itself."""
        if not isinstance(value, torch.dtype):
            return value
        return Element(triton_name(str(value))) if isinstance(self.kernel.function, Named) else triton_type(str(value))

    def _means(self, name: str) -> bool:
        """Return whether ``name``, a parameter of a function, has a value."""
        wanted = self.kernel.bind.get(name, name)
        known = {*self.kernel.values, *self.kernel.options, *self.config_names, *self.absent, *EVERYTHING}
        return name in known or self.names.find(wanted) is not None or any(p.name == name for p in self.parameters)

    def _check_configs(self, parameter: HeaderParameter, constants: dict[str, Any], computed: Sequence[str]) -> None:
        """Check that all configs set a parameter, or that it has another value."""
        name = parameter.name
        if name in computed:
            raise self.error(f"{name} has a value in configs= and a function. Take it out of one of them.")
        lacking = [config.label for config in self.kernel.configs if name not in config.constexprs]
        if lacking and parameter.default is not inspect.Parameter.empty:
            constants.setdefault(name, parameter.default)
        if lacking and name not in constants:
            raise self.error(f"the config {lacking[0]} has no value for {name}, as others do. Add it.")

    def _tensor(self, parameter: str, name: str) -> Source:
        source = self.names.find(name)
        if source is None or source.kind != "tensor":
            raise self.error(
                f"{parameter}=tensor_descriptor({name!r}): the tensors are {', '.join(self.names.tensors())}."
            )
        return source

    def _take(
        self, parameter: HeaderParameter, runtime: dict[str, Source], constants: dict[str, Any], formulas: list[Formula]
    ) -> None:
        """Bind a parameter by its name."""
        name = self.kernel.bind.get(parameter.name, parameter.name)
        source = self.names.find(name)
        if source is None and parameter.default is not inspect.Parameter.empty:
            constants[parameter.name] = parameter.default
        elif source is None and measured(name) in self.absent:
            constants[parameter.name] = 0
        elif source is None:
            raise self._unknown(parameter, name)
        elif parameter.constexpr and source.kind == "tensor":
            raise self.error(f"the parameter {parameter.name} is a constexpr, and {name} is a tensor.")
        elif parameter.constexpr or source.kind in ("str", "ints", "floats", "bools", "dtype"):
            formulas.append(Formula(parameter.name, triton_type if source.kind == "dtype" else _itself, (name,)))
        else:
            runtime[parameter.name] = source

    def _unknown(self, parameter: HeaderParameter, name: str) -> DeclarationError:
        known = self.names.known()
        tensors = ", ".join(self.names.tensors())
        derived = [
            f"{t}_{what}" for t in self.names.tensors() for what in ("numel", "rank", "size_0", "stride_0", "ptr")
        ]
        near = difflib.get_close_matches(name, [*known, *derived], 3)
        hint = f" Nearest: {', '.join(near)}." if near else ""
        return self.error(
            f"{name!r} stands for nothing that the operator has. It could be {', '.join(known)}, or _numel, _rank, _size_<k> "
            f"and _stride_<k> of {tensors}.{hint} Rename the parameter, give it a value ({parameter.name}=...), or say what it "
            f"stands for: bind={{{parameter.name!r}: ...}}."
        )

    def _read_inputs(
        self, f: Formula, formulas: Iterable[Formula], constants: Mapping[str, Any], runtime: Mapping[str, Source]
    ) -> None:
        computed = {other.name for other in formulas} | {*constants} | self.config_names
        for name in f.inputs:
            if name in EVERYTHING:
                self.read.update([*self._everything(), *_by_parameter(runtime)])
            elif name not in computed or name == f.name:
                source = self.names.find(self.kernel.bind.get(name, name))
                if source is None:
                    raise self.error(
                        f"the function for {f.name} takes {name!r}, which stands for nothing. It could be "
                        f"{', '.join([*self.names.known(), *sorted(computed - {f.name, _GRID})])}."
                    )
                self.read.add(dataclasses.replace(source, name=name))

    def _read_prune(self, runtime: Mapping[str, Source]) -> None:
        """Record what ``prune`` reads: its parameters, or everything for a function of Triton's with ``**kwargs``."""
        if self.kernel.prune is None or not self.kernel.configs:
            return
        wanted = list(inspect.signature(self.kernel.prune).parameters.values())[1:]
        if any(p.kind is p.VAR_KEYWORD for p in wanted):
            self.read.update(_by_parameter(runtime))
        for name in (p.name for p in wanted):
            source = self.names.find(self.kernel.bind.get(name, name))
            if source is not None:
                self.read.add(dataclasses.replace(source, name=name))

    def _everything(self) -> list[Source]:
        found = (self.names.find(name) for name in self.names.known())
        return [source for source in found if source is not None]

    def _check_outputs(self, sources: Iterable[Source]) -> None:
        reached = {source.argument for source in sources if source.kind == "tensor"}
        for number, output in enumerate(self.facts.outputs):
            if output.alias is None and len(self.facts.arguments) + number not in reached:
                name = self.kernel.outputs[number] if number < len(self.kernel.outputs) else output.name
                raise self.error(f"no parameter receives the output {name}, which would be left unwritten. Add {name}.")

    def _bound(
        self, runtime: Mapping[str, Source], constants: dict[str, Any], formulas: list[Formula],
        descriptors: Mapping[str, Descriptor],
    ) -> BoundKernel:  # fmt: skip
        if self.kernel.configs:  # the choice is by shapes, so these count
            self.read.update(source for source in self._everything() if source.origin in ("TENSOR", "NAMED_SIZE"))
        sources = tuple(dict.fromkeys([*runtime.values(), *sorted(self.read, key=lambda s: s.name)]))
        by_name = {p.name: p for p in self.parameters}
        users = {source: by_name[name] for name, source in runtime.items()}
        roles = tuple(_role(source, source in self.read, users.get(source)) for source in sources)
        numbers = {source: i for i, source in enumerate(sources)}
        return BoundKernel(
            self.kernel, self.facts, self.name, sources, roles, {name: numbers[s] for name, s in runtime.items()}, constants,
            ordered(formulas), descriptors, tuple(self._zeroed(name, runtime, constants) for name in self.kernel.reset_to_zero),
        )  # fmt: skip

    def _zeroed(self, name: str, runtime: Mapping[str, Source], constants: Mapping[str, Any]) -> str:
        """Return the parameter that ``reset_to_zero`` means: by its own name, or by that of its tensor."""
        meant = self.names.find(name)
        found = [p for p, source in runtime.items() if source.kind == "tensor" and (p == name or source == meant)]
        if not found and name not in constants:
            raise self.error(f"reset_to_zero names {name!r}; the tensors are {', '.join(self.names.tensors())}.")
        return found[0] if found else name


def _role(source: Source, read: bool, user: HeaderParameter | None) -> str:
    if read:
        return _READ_ROLES.get(source.kind, _ROLES.get(source.kind, "exact"))
    if source.kind == "tensor":
        return "tensor" if user is None or (user.specialised and user.aligned) else "tensor_any"
    if source.kind == "int" and user is not None and not user.specialised:
        return "int_width"
    if source.kind == "int" and user is not None and not user.aligned:
        return "int_noalign"
    return _ROLES[source.kind]


def _by_parameter(runtime: Mapping[str, Source]) -> list[Source]:
    """Return the sources of parameters under the parameters' names."""
    return [dataclasses.replace(source, name=name) for name, source in runtime.items()]


def _itself(value: Any) -> Any:
    return value


_TRITON_TYPES = {
    "bool": "int1",
    "float8_e4m3fn": "float8e4nv",
    "float8_e4m3fnuz": "float8e4b8",
    "float8_e5m2": "float8e5",
    "float8_e5m2fnuz": "float8e5b16",
}  # fmt: skip


def triton_type(name: str | None) -> Any:
    """Return Triton's element type for a dtype's name in torch, for a kernel that converts to it; None for None.

    Raises:
        KernelError: Triton has none.
    """
    import triton.language as tl  # pyright: ignore[reportMissingTypeStubs]

    found = None if name is None else getattr(tl, triton_name(name), None)
    if found is None and name is not None:
        raise KernelError(f"Triton has no element type for torch.{name.removeprefix('torch.')}.")
    return found


def triton_name(name: str) -> str:
    """Return what ``triton.language`` calls a dtype, by its name in torch.

    >>> triton_name("torch.bfloat16"), triton_name("bool")
    ('bfloat16', 'int1')
    """
    bare = name.removeprefix("torch.")
    return _TRITON_TYPES.get(bare, bare)


def bind(kernel: TritonKernel, facts: Facts, name: str = "", absent: Mapping[str, Any] | None = None) -> BoundKernel:
    """Return a kernel bound to the operator of ``facts``.

    ``absent`` has values for parameters that have no other.

    Raises:
        DeclarationError: a parameter of the kernel, or of a function that computes a value, matches nothing.
    """
    return _Binder(kernel, facts, name or kernel.name, absent or {}).bind()
