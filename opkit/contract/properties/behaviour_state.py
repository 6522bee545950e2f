"""The group ``behaviour``: calls and the state of the process: settings, random generators, the environment."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import sys
import warnings
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch

from opkit.contract.calls.cases import Case
from opkit.contract.compare.calls import beyond_rounding, difference, ever_random, is_random, observe, seed_torch
from opkit.contract.compare.outcome import CallOutcome
from opkit.contract.prop import NotApplicable, Remark, Violation
from opkit.contract.properties.behaviour import behaviour_property
from opkit.contract.subject import CallRefused, Subject

_SMALLEST_NORMAL = sys.float_info.min
_DRAW = "Draw from torch's own generator: torch.rand, Tensor.bernoulli_, or a seed from torch.randint."
_SEEDS = (1, 2, 3, 4, 5)
_ODD_SEED = 0x5EED0DD


@dataclasses.dataclass(frozen=True)
class StateItem:
    """One piece of global state.

    Attributes:
        name: its name in messages.
        get: reads it, in a form that can be compared.
        put: restores it.
        settles: whether the very first call may change it, as an import does.
        shown: whether messages contain its values.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    settles: bool = False
    shown: bool = True


def _flushes() -> bool:
    return _SMALLEST_NORMAL * 0.25 == 0.0


def _rounding() -> tuple[bool, bool]:
    """Return whether 1 + tiny and -1 - tiny are rounded away from 1 and -1: neither, in the usual mode."""
    tiny = _SMALLEST_NORMAL
    return 1.0 + tiny > 1.0, -1.0 - tiny < -1.0


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _autocast() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def _put_autocast(value: tuple[bool, torch.dtype, bool]) -> None:
    torch.set_autocast_enabled("cpu", value[0])
    torch.set_autocast_dtype("cpu", value[1])
    torch.set_autocast_cache_enabled(value[2])


def _numpy() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global one is what is watched
    return (name, np.asarray(keys).tobytes(), *rest)


def _put_numpy(value: tuple[Any, ...]) -> None:
    name, keys, *rest = value
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def _put_environment(value: dict[str, str]) -> None:
    for name in [name for name in os.environ if name not in value]:
        del os.environ[name]
    os.environ.update(value)


def _put_filters(value: list[Any]) -> None:
    warnings.filters[:] = value  # type: ignore[index]


def _generator() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _backends() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.backends.mkldnn.enabled


def _put_backends(value: tuple[Any, ...]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = value[:3]


STATE = (
    StateItem("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    StateItem("the default device", torch.get_default_device, lambda _: torch.set_default_device(None)),
    StateItem("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    StateItem("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    StateItem("the number of threads", torch.get_num_threads, torch.set_num_threads),
    StateItem("deterministic mode", _deterministic, lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1])),
    StateItem("the matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    StateItem("autocast", _autocast, _put_autocast),
    StateItem("torch.backends", _backends, _put_backends),
    StateItem("flushing of denormals to zero", _flushes, torch.set_flush_denormal),
    StateItem("the rounding mode", _rounding, lambda _: None),
    StateItem("Python's random generator", random.getstate, random.setstate, shown=False),
    StateItem("numpy's global random generator", _numpy, _put_numpy, shown=False),
    StateItem("numpy's handling of errors", np.geterr, lambda v: np.seterr(**v)),
    StateItem("the working directory", os.getcwd, os.chdir),
    StateItem("the garbage collector", gc.isenabled, lambda v: gc.enable() if v else gc.disable()),
    StateItem("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    StateItem("the environment", lambda: dict(os.environ), _put_environment, settles=True, shown=False),
    StateItem("the warnings filters", lambda: list(warnings.filters), _put_filters, settles=True, shown=False),
)
"""The state that a call must not change."""

_TORCH_SEED = StateItem("the seed of torch's generator", torch.initial_seed, torch.manual_seed)


@contextlib.contextmanager
def _watched(items: tuple[StateItem, ...]) -> Generator[None]:
    """Raise Violation for what changes in this context, after restoring everything."""
    before = [item.get() for item in items]
    try:
        yield
    finally:
        after = [item.get() for item in items]
        changed = [each for each in zip(items, before, after, strict=True) if each[1] != each[2]]
        for item, old, _ in changed:
            item.put(old)
    if changed:
        item, old, new = changed[0]
        shown = f" from {old!r} to {new!r}" if item.shown else ""
        raise Violation(
            f"the call changes {item.name}{shown}, for the whole process. Do not change it, or restore it before returning."
        )


def _leaves_state(subject: Subject, case: Case) -> None:
    """Check that a call changes no global state.

    Raises:
        Violation: it changes something that other code depends on.
    """
    call = case.make(subject.device)
    _move_generators(subject)
    with _watched((*(item for item in STATE if not item.settles), _TORCH_SEED)):
        state = _generator()
        subject.call(call)
        drew = _generator() != state
    if drew and not ever_random(subject) and not is_random(subject, case):
        raise Violation(
            "the call advances torch's random generator, and its results do not depend on it: draw only what is used."
        )
    with _watched(tuple(item for item in STATE if item.settles)):
        subject.call(case.make(subject.device))


def _move_generators(subject: Subject) -> None:
    """Advance Python's and numpy's generators, which Hypothesis seeds with 0 as an operator may, and give torch's an odd seed."""
    random.random()
    np.random.rand()  # noqa: NPY002
    seed_torch(subject, _ODD_SEED)


@contextlib.contextmanager
def preserved() -> Generator[None]:
    """Restore the global state afterwards."""
    before = [item.get() for item in STATE]
    try:
        yield
    finally:
        for item, old in zip(STATE, before, strict=True):
            if item.get() != old:
                item.put(old)


@contextlib.contextmanager
def _changed(name: str, change: Callable[[Any], Any]) -> Generator[None]:
    """Change an item of the state; ``change`` returns the new value for the old one."""
    item = next(each for each in STATE if each.name == name)
    old = item.get()
    item.put(change(old))
    try:
        yield
    finally:
        item.put(old)


_FLOAT64 = "the default dtype float64"
_SETTINGS: tuple[tuple[str, Callable[[], Any]], ...] = (
    (_FLOAT64, lambda: _changed("the default dtype", lambda _: torch.float64)),
    ("torch.no_grad()", torch.no_grad),
    ("torch.inference_mode()", torch.inference_mode),
    ("deterministic mode", lambda: _changed("deterministic mode", lambda _: (True, True))),
    ("denormals flushed to zero", lambda: _changed("flushing of denormals to zero", lambda old: not old)),
    ("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)),
)
_MAY_REFUSE = ("deterministic mode", "torch.inference_mode()")


def _ignores_state(subject: Subject, case: Case) -> None:
    """Check that results are the same under any of torch's settings.

    Raises:
        Violation: a setting changes them by more than rounding.
        Remark: they follow the default device.
    """
    expected = observe(subject, case).detached()
    for name, setting in _SETTINGS:
        if name != _FLOAT64 or case.dtype is not None:  # without floating arguments, results may have the default dtype
            _under(subject, case, expected, name, setting)
    if subject.device == "cpu":
        _on_default_device(subject, case, expected)


def _under(subject: Subject, case: Case, expected: CallOutcome, name: str, setting: Callable[[], Any]) -> None:
    call = case.make(subject.device)
    try:
        with warnings.catch_warnings(), setting():
            warnings.simplefilter("ignore")
            ours = observe(subject, call).detached()
    except CallRefused as refusal:
        if name in _MAY_REFUSE:
            return
        raise Violation(f"under {name} the call raises {refusal}; otherwise it does not.") from refusal
    if found := beyond_rounding(subject, case, ours, expected):
        raise Violation(
            f"under {name} {found}; results must not depend on torch's settings. {_ADVICE.get(name, '')}".rstrip()
        )


_ADVICE = {
    _FLOAT64: "Give every tensor that is created inside a dtype: torch.zeros(n, dtype=x.dtype).",
    "deterministic mode": "In this mode torch.empty is filled with NaN: perhaps memory is read before it is written.",
}


def _on_default_device(subject: Subject, case: Case, expected: CallOutcome) -> None:
    """Remark where the call depends on the default device; a kernel for the CPU may, so this is no failure."""
    call = case.make(subject.device)
    try:
        with torch.device("meta"):
            ours = subject.call(call)
    except CallRefused:
        raise Remark("it creates tensors on the default device: if the arguments are on another, it raises") from None
    if any(a.device != b.device for a, b in zip(ours.tensors(), expected.tensors(), strict=False)):
        raise Remark("its results are on the default device, which need not be the arguments'")


# ---- random numbers ------------------------------------------------------------------------------------------------------


def _random(subject: Subject, case: Case) -> None:
    """Check that random results come from torch's generator, and advance it.

    Raises:
        Violation: they do not.
        NotApplicable: there are none.
    """
    if not ever_random(subject):
        raise NotApplicable("its results do not depend on torch's random numbers")
    if not is_random(subject, case):
        return
    first = observe(subject, case, seed=0).detached()
    again = observe(subject, case, seed=0)
    if found := difference(again, first):
        raise Violation(f"torch.manual_seed(0) before each of two calls does not make them equal: {found}. {_DRAW}")
    if not any(difference(observe(subject, case, seed=seed), first) for seed in _SEEDS):
        return  # too few elements to tell
    seed_torch(subject, 0)
    following = subject.call(case.make(subject.device)).detached()
    if not any(difference(subject.call(case.make(subject.device)), following) for _ in _SEEDS):
        raise Violation(
            f"calls one after another return the same random numbers: they do not advance the generator. {_DRAW}"
        )


PROPERTIES = (
    behaviour_property(
        "behaviour.global_state",
        rule="A call leaves torch's settings, random generators, the environment and the floating-point mode as they were.",
        defect="torch.set_num_threads, set_default_dtype or manual_seed inside; numpy's generator; a mode that is never left",
        check=_leaves_state,
        cost=0.0005,
    ),
    behaviour_property(
        "behaviour.random",
        rule="Random results are torch.manual_seed's to the bit, and differ for other seeds and from call to call.",
        defect="a fixed seed, a generator of its own, a generator that is read and not advanced",
        check=_random,
        share=0.4,
    ),
    behaviour_property(
        "behaviour.settings",
        rule="Results do not depend on the default dtype, the grad mode, deterministic mode or how denormals are treated.",
        defect="torch.zeros(n) without a dtype; a branch on torch.is_grad_enabled()",
        check=_ignores_state,
    ),
)
