"""fake: what compilers are told of results, sizes, strides and dtypes without elements, against what the kernel gives."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.calls.fills import ORDINARY
from opkit.contract.calls.layouts import LAYOUTS
from opkit.contract.calls.specs import Drawing
from opkit.contract.observed.outcome import CallOutcome, described
from opkit.contract.prop import CallRefused, NotApplicable, Property, Remark, Violation, drawn, swept
from opkit.contract.subject import Subject
from opkit.contract.traced import fakes, symbols

_ANYWHERE = "CompositeExplicitAutograd"  # a kernel that says it runs on every device
Difference = Callable[[str, Any, Any], str]
_REPAIR = "The fake implementation must give what the kernel gives"
_MOST_SUBSETS = 8
_SIZES = (2, 3, 65, 1, 0, 17, 4, 33, 8, 129, 7)
_FILLS = (*ORDINARY, "ones", "zeros")  # what is in a tensor may decide how large a result is


_DRAWN = Drawing(layouts=tuple(LAYOUTS), fills=_FILLS)


def _compares(difference: Difference) -> Callable[[Subject, Case], None]:
    """A check that compares each tensor, and each other result, by ``difference``."""

    def check(subject: Subject, case: Case) -> None:
        real, fake = fakes.both(subject, case)
        for name, ours, told in _paired(real, fake):
            found = difference(name, ours, told)
            if found:
                raise Violation(f"{found}. {_REPAIR}.")

    return check


def _paired(real: CallOutcome, fake: CallOutcome) -> Iterator[tuple[str, Any, Any]]:
    named = zip(fakes.named_tensors(real), fakes.named_tensors(fake), strict=False)
    return ((name, ours, told) for (name, ours), (_, told) in named)


def _tensors(ours: Any, told: Any) -> bool:
    return isinstance(ours, torch.Tensor) and isinstance(told, torch.Tensor)


def _accepts(subject: Subject, case: Case) -> None:
    try:
        fake, refused = fakes.run_fake(subject, case), None
    except CallRefused as refusal:
        fake, refused = None, refusal
    try:
        subject.run(case)
    except CallRefused as refusal:
        if fake is not None:
            raise Remark(_kernel_alone(refusal)) from refusal
        raise
    if refused is not None and fakes.has_own_fake(subject):
        raise Violation(
            f"the kernel accepts this, and the fake implementation raises {fakes.shortened(refused.error)}. It sees "
            "sizes, strides and dtypes, no elements, and must accept whatever the kernel accepts."
        )
    if refused is not None:
        raise NotApplicable(f"what it calls does not run on fake tensors: {fakes.shortened(refused.error)}")


def _kernel_alone(refusal: CallRefused) -> str:
    return (
        f"the kernel refuses arguments with {type(refusal.error).__name__} that the fake implementation accepts: a program "
        "compiles and fails when it runs. That is right where values decide; where sizes or dtypes do, check them in both."
    )


def _shapes(subject: Subject, case: Case) -> None:
    real, fake = fakes.both(subject, case)
    if len(real.results) != len(fake.results):
        raise Violation(f"the kernel gives {len(real.results)} results, the fake {len(fake.results)}. {_REPAIR}.")
    for name, ours, told in _paired(real, fake):
        found = _shape(name, ours, told)
        if found:
            raise Violation(f"{found}. {_REPAIR}.")


def _shape(name: str, ours: Any, told: Any) -> str:
    if not _tensors(ours, told):
        return _value(name, ours, told)
    if not symbols.is_fake(told):
        return f"{name}: the fake implementation gave a real tensor, {described(told)}"
    same = ours.dim() == told.dim() and all(
        symbols.unknown(b) or a == int(b) for a, b in zip(ours.shape, told.shape, strict=True)
    )
    return "" if same else f"{name} has shape {_list(ours.shape)}, and {_list(told.shape)} by the fake implementation"


def _value(name: str, ours: Any, told: Any) -> str:
    """What differs in results of which one at least is no tensor: None, a number, a string."""
    if isinstance(told, (torch.SymInt, torch.SymFloat, torch.SymBool)) and isinstance(ours, (int, float, bool)):
        return ""
    same = type(ours) is type(told) and (ours == told or ours != ours)
    return "" if same else f"{name} is {described(ours)}, and {described(told)} by the fake implementation"


def _known_shape(ours: torch.Tensor, told: torch.Tensor) -> bool:
    return not any(map(symbols.unknown, (*told.shape, *told.stride()))) and ours.shape == told.shape


def _list(numbers: Any) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _strides(subject: Subject, case: Case) -> None:
    real, fake = fakes.both(subject, case)
    remarks: list[str] = []
    for name, ours, told in _paired(real, fake):
        if not _tensors(ours, told) or ours.layout != torch.strided or not _known_shape(ours, told):
            continue
        differ = [dim for dim in range(ours.dim()) if ours.stride(dim) != told.stride(dim)]
        message = f"{name} {described(ours)} has strides {_list(ours.stride())}, and {_list(told.stride())} by the fake"
        if ours.numel() and any(ours.shape[dim] > 1 for dim in differ):
            raise Violation(f"{message} implementation. {_REPAIR}: compilers compute addresses from these strides.")
        remarks += [f"{name} has another stride by the fake implementation, in a dimension of size 1"] if differ else []
    if remarks:
        raise Remark(remarks[0])


def _dtype(name: str, ours: Any, told: Any) -> str:
    if not _tensors(ours, told) or (ours.dtype == told.dtype and ours.layout == told.layout):
        return ""
    return f"{name} is {ours.dtype} ({ours.layout}), and {told.dtype} ({told.layout}) by the fake implementation"


def _offset(name: str, ours: Any, told: Any) -> str:
    if not _tensors(ours, told) or ours.layout != torch.strided or not ours.numel():
        return ""
    one, other = ours.storage_offset(), told.storage_offset()
    if symbols.unknown(other) or one == other:
        return ""
    return f"{name} begins at element {one} of its memory, and at {other} by the fake implementation"


def _device(subject: Subject, case: Case) -> None:
    real, fake = fakes.both(subject, case)
    for name, ours, told in _paired(real, fake):
        if _tensors(ours, told) and ours.device != told.device:
            raise Violation(f"{name} is on {ours.device}, and on {told.device} by the fake implementation. {_REPAIR}.")
    if fakes.has_kernel(subject, "CUDA") or fakes.has_kernel(subject, _ANYWHERE):
        _elsewhere(subject, case)


def _elsewhere(subject: Subject, case: Case) -> None:
    """The same on fakes of another device's tensors, which need no such device."""
    other = torch.device("cuda:0" if subject.device == "cpu" else "cpu")
    mode = fakes.static_mode()
    with mode:
        call = fakes.fake_call(mode, case.make(subject.device)).map(lambda each: torch.empty_like(each, device=other))
    if not call.tensors():
        return
    try:
        fake = fakes.call_fake(subject, call, mode)
        real = fakes.call_kernel(subject, call, mode, _ANYWHERE) if fakes.has_kernel(subject, _ANYWHERE) else None
    except CallRefused:
        return  # a kernel in C or NumPy says nothing of other devices; some argument may have to stay where it is
    for name, told in fakes.named_tensors(fake):
        if isinstance(told, torch.Tensor) and told.device not in _devices(name, other, real):
            raise Violation(
                f"with every argument on {other}, {name} is on {told.device} by the fake implementation, and the operator "
                f"has a kernel for every device. Make results with x.new_empty(...) or device=x.device."
            )


def _devices(name: str, usual: torch.device, real: CallOutcome | None) -> tuple[torch.device, ...]:
    """Where a result may be: where the kernel puts it, if that is known, or where the arguments are."""
    known = {} if real is None else dict(fakes.named_tensors(real))
    found = known.get(name)
    return (found.device, usual) if isinstance(found, torch.Tensor) else (usual,)


def _requires_grad(subject: Subject, case: Case) -> None:
    refused: CallRefused | None = None
    answered = 0
    for subset in _subsets(case):
        asked = case.map(lambda number, each, on=subset: dataclasses.replace(each, requires_grad=number in on))
        try:
            real, fake = fakes.both(subject, asked)
        except CallRefused as refusal:
            refused = refusal
            continue
        answered += 1
        _same_need(subset, real, fake)
    if refused is not None and not answered:
        raise refused


def _same_need(subset: tuple[int, ...], real: CallOutcome, fake: CallOutcome) -> None:
    for name, ours, told in _paired(real, fake):
        if _tensors(ours, told) and ours.requires_grad != told.requires_grad:
            needs = " and ".join(f"tensor {number}" for number in subset) or "no tensor"
            raise Violation(
                f"where {needs} requires gradients, {name} has requires_grad={ours.requires_grad}, and "
                f"{told.requires_grad} by the fake implementation: a compiled program loses gradients, or computes "
                f"needless ones. {_REPAIR}."
            )


def _subsets(case: Case) -> list[tuple[int, ...]]:
    """Which tensors require gradients: each subset, or, where these are many, none, each alone, and all."""
    able = [number for number, tensor in enumerate(case.tensors()) if tensor.differentiable]
    every = [each for size in range(len(able) + 1) for each in itertools.combinations(able, size)]
    return every if len(every) <= _MOST_SUBSETS else [(), *((number,) for number in able), tuple(able)]


def _no_rule(subject: Subject) -> str:
    return "" if fakes.registers_autograd(subject) else "no autograd rule is registered"


def _aliasing(subject: Subject, case: Case) -> None:
    real, fake = fakes.both(subject, case)
    if len(real.results) != len(fake.results):
        return
    ours, told = (fakes.shared_memory(fakes.named_tensors(each)) for each in (real, fake))
    for pairs, which, other in (
        (ours - told, "the kernel's", "the fake's"),
        (told - ours, "the fake's", "the kernel's"),
    ):
        if pairs:
            first, second = min(pairs)
            raise Violation(f"{first} and {second} share memory in {which} results, and not in {other}. {_REPAIR}.")


def _effects(subject: Subject, case: Case) -> None:
    state = _state()
    fake = fakes.run_fake(subject, case)
    if not all(a == b for a, b in zip(state, _state(), strict=True)):
        raise Violation(
            "the fake implementation changes global state (torch's random numbers, default dtype or grad mode): it "
            "runs while programs are compiled, any number of times. Compute sizes, and nothing else."
        )
    again = fakes.run_fake(subject, case)
    if [described(each) for each in again.results] != [described(each) for each in fake.results]:
        raise Violation("a second call of the fake implementation with the same arguments gives other results")


def _state() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), torch.get_default_dtype(), torch.is_grad_enabled()


def _own(subject: Subject) -> str:
    return "" if fakes.has_own_fake(subject) else "it is no operator of its own: what runs on fake tensors is torch's"


_property = functools.partial(Property, cases=drawn(_DRAWN), first=swept(_DRAWN, sizes=_SIZES), share=0.3, cost=0.001)

PROPERTIES = (
    _property(
        "fake.accepts",
        rule="The fake implementation accepts what the kernel accepts.",
        defect="a fake that reads elements, calls .item() or the kernel, or checks more than the kernel does",
        check=_accepts,
        cost=0.002,
    ),
    _property(
        "fake.shapes",
        rule="The fake implementation gives as many results as the kernel, of the same kinds and sizes.",
        defect="a fake that forgets keepdim, rounds another way, has a size of its own, or leaves out an optional result",
        check=_shapes,
        cost=0.002,
    ),
    _property(
        "fake.dtype",
        rule="Results of the fake implementation have the dtypes of the kernel's.",
        defect="a fake that takes the dtype of its first argument where the kernel promotes, or torch's default dtype",
        check=_compares(_dtype),
    ),
    _property(
        "fake.strides",
        rule="Results of the fake implementation have the strides of the kernel's, in dimensions larger than 1.",
        defect="empty_like keeps a transposed layout where the kernel returns a contiguous result: compiled code then reads "
        "the wrong elements",
        check=_strides,
    ),
    _property(
        "fake.offset",
        rule="Results of the fake implementation begin where the kernel's do within their memory.",
        defect="a kernel that returns part of a larger buffer, of which the fake knows nothing",
        check=_compares(_offset),
    ),
    _property(
        "fake.device",
        rule="Results of the fake implementation are on the kernel's devices, wherever the arguments are.",
        defect="a fake that makes results on the CPU, or on the meta device",
        check=_device,
        share=0.1,
        cost=0.003,
    ),
    _property(
        "fake.requires_grad",
        rule="Results require gradients on fake tensors where they do on real ones, whichever arguments require them.",
        defect="a fake that detaches, or a kernel that gives integers or constants where its fake gives a float result",
        check=_requires_grad,
        share=0.1,
        cost=0.008,
        skip=_no_rule,
    ),
    _property(
        "fake.aliasing",
        rule="Results share memory with arguments and with one another on fake tensors where they do on real ones.",
        defect="a fake that returns its argument, where the kernel returns a new tensor",
        check=_aliasing,
    ),
    _property(
        "fake.effects",
        rule="The fake implementation changes no state, and gives the same when it is called again.",
        defect="a fake that seeds torch's generator, counts its calls, or switches gradients off",
        check=_effects,
        share=0.1,
        cost=0.003,
        skip=_own,
    ),
    _property(
        "fake.symbolic",
        rule="Traced once with symbolic sizes, the fake implementation gives the kernel's sizes and strides at others too.",
        defect="a size that is burned in as a number, int() of a size, a wrong branch on a size, a fake that remembers",
        check=symbols.check_symbolic,
        cases=symbols.cases,
        share=0.12,
        cost=0.02,
        first=None,
    ),
    _property(
        "fake.unbacked",
        rule="Sizes that depend on data are within the bounds, and have the relations, that the fake implementation states.",
        defect="new_dynamic_size(min=1) where nothing may be found; one symbol for two sizes that differ",
        check=symbols.check_unbacked,
        share=0.4,
        cost=0.002,
        first=None,
    ),
)
