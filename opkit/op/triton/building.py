"""Compile Triton kernels ahead of time, for ``opkit build``: each example, config and architecture."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from opkit.errors import OpkitError, PackageError
from opkit.kernels.aot_package import TritonBinary
from opkit.kernels.cc.progress import Progress
from opkit.kernels.triton import compiling, specialisation, targets
from opkit.kernels.tuning import records
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.example_launches import ExampleLaunch, OfOperator, launches, unmade
from opkit.op.triton.examples import configs_for, request_for

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""The architectures for kernels without ``targets=``, where the caller names none."""


@dataclasses.dataclass(frozen=True)
class Built:
    """What became of the Triton kernels of a package.

    Attributes:
        binaries: each with its image.
        left_out: what could not be compiled and why, one line each.
    """

    binaries: tuple[tuple[TritonBinary, bytes], ...] = ()
    left_out: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Item:
    """One binary to compile. Of the items of one ``group`` some must succeed; ``relaxed`` ones need not."""

    bound: BoundKernel
    label: str
    group: tuple[str, ...]
    request: compiling.CompileRequest
    relaxed: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Items with the same key have the same binary."""
        return self.bound.facts.operator, self.bound.name, compiling.identity(self.request)


def build(kernels: Sequence[OfOperator], architectures: Sequence[str], jobs: int | None) -> Built:
    """Compile the Triton kernels among those of operators, and those that Python functions among them launch.

    They are compiled for their examples, or for calls made up from annotations where they have none.

    Args:
        kernels: the operators, each with one of its kernels.
        architectures: by default those that a kernel names, or ``ARCHITECTURES``.
        jobs: how many compilers run at once; by default one for each core.

    Raises:
        ArgumentError: there is no such architecture.
        PackageError: a kernel cannot be compiled for any config of an example.
    """
    chosen = tuple(dict.fromkeys(map(targets.canonical, architectures)))
    notes: list[str] = []
    items = [item for launch in launches(kernels, notes) for item in _listed(launch, chosen, notes)]
    unique = {item.key: item for item in items}
    results = dict(zip(unique, _all([item.request for item in unique.values()], jobs), strict=True))
    done = [(item, results[item.key]) for item in items]
    _check([(item, result) for item, result in done if not item.relaxed])
    notes += [f"{item.label}: {_first_line(result)}" for item, result in done if isinstance(result, OpkitError)]
    succeeded = {item.key: _entry(item, result) for item, result in done if isinstance(result, compiling.Binary)}
    return Built(tuple(succeeded.values()), tuple(dict.fromkeys(notes)))


# ---- what is to be compiled ------------------------------------------------------------------------------------------


def _listed(launch: ExampleLaunch, chosen: Sequence[str], notes: list[str]) -> list[_Item]:
    own = list(map(targets.canonical, launch.values.bound.kernel.targets))
    wanted = [each for each in chosen or own or ARCHITECTURES if each in (own or chosen or ARCHITECTURES)]
    if not wanted:
        notes.append(f"{launch.label}: it is for {', '.join(own)} alone")
    try:
        return [item for target in wanted for item in _items(launch, target, bool(chosen))]
    except OpkitError as error:
        raise unmade(launch.label, error) from error


def _items(launch: ExampleLaunch, target: str, chosen_by_user: bool) -> Iterator[_Item]:
    values, group = launch.values, (launch.label, launch.example, target if chosen_by_user else "")
    for config in configs_for(values):
        request = request_for(values, config, target)
        label = f"{launch.label}, {launch.call}{'' if config is None else f', {config.label}'}, {target}"
        yield _Item(values.bound, label, group, request)
        for relaxed in specialisation.relaxed(request):
            yield _Item(values.bound, f"{label}, for more sizes and addresses", group, relaxed, relaxed=True)


# ---- compiling -------------------------------------------------------------------------------------------------------


def _all(requests: Sequence[compiling.CompileRequest], jobs: int | None) -> list[compiling.Binary | OpkitError]:
    """Compile several at once; each result, or what went wrong, in order."""
    done = 0
    progress = Progress(lambda: f"compiled {done} of {len(requests)} binaries of Triton kernels")
    pool = ThreadPoolExecutor(jobs or _cores(), thread_name_prefix="opkit-build")
    try:
        futures = [pool.submit(_attempt, request) for request in requests]
        for done, _ in enumerate(as_completed(futures), 1):  # noqa: B007 - the line of progress reads it
            progress.tick()
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
        progress.finish()


def _cores() -> int:
    counted: Callable[[int], Iterable[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(list(counted(0))) if counted is not None else os.cpu_count() or 1


def _attempt(request: compiling.CompileRequest) -> compiling.Binary | OpkitError:
    try:
        return compiling.build(request)
    except OpkitError as error:
        return error


# ---- what came of it -------------------------------------------------------------------------------------------------


def _check(done: Sequence[tuple[_Item, compiling.Binary | OpkitError]]) -> None:
    """Refuse the build if nothing of a group could be compiled."""
    succeeded = {item.group for item, result in done if not isinstance(result, OpkitError)}
    first: dict[tuple[str, ...], str] = {}
    for item, result in done:
        if isinstance(result, OpkitError) and item.group not in succeeded:
            first.setdefault(item.group, f"{item.label}: {result}")
    if first:
        messages = "\n\n".join(first.values())
        raise PackageError(f"Nothing was written, as a Triton kernel cannot be compiled.\n\n{messages}")


def _first_line(error: OpkitError) -> str:
    return str(error).splitlines()[0]


def _entry(item: _Item, built: compiling.Binary) -> tuple[TritonBinary, bytes]:
    form, bound = specialisation.form_of(item.request), item.bound
    return TritonBinary(bound.facts.operator, bound.name, records.triton_version(), form, built.to_json()), built.image
