"""Triton kernels compiled ahead of time, for ``opkit build``: each example, config and architecture."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from opkit.errors import OpkitError, PackageError
from opkit.kernels.progress import Progress
from opkit.kernels.triton import compiling, forms, records, targets
from opkit.kernels.triton.shipping import TritonBinary
from opkit.op.triton.examples import calls_of, configs_of, request_of
from opkit.op.triton.function import TritonFunction

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""What kernels are built for that do not say it themselves, unless something else is asked for."""


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

    function: TritonFunction
    label: str
    group: tuple[str, ...]
    request: compiling.Request
    relaxed: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Items with the same key have the same binary."""
        return self.function.operator.name, self.function.__name__, compiling.identity(self.request)


def build(functions: Sequence[TritonFunction], architectures: Sequence[str], jobs: int | None) -> Built:
    """Compile kernels for their examples, or for calls made up from annotations where they have none.

    Args:
        functions: the kernels.
        architectures: by default those that a kernel names, or ``ARCHITECTURES``.
        jobs: how many compilers run at once; by default one for each core.

    Raises:
        ArgumentError: there is no such architecture.
        PackageError: a kernel cannot be compiled for any config of an example.
    """
    chosen = tuple(dict.fromkeys(map(targets.canonical, architectures)))
    notes: list[str] = []
    items = [item for function in functions for item in _listed(function, chosen, notes)]
    unique = {item.key: item for item in items}
    results = dict(zip(unique, _all([item.request for item in unique.values()], jobs), strict=True))
    done = [(item, results[item.key]) for item in items]
    _check([(item, result) for item, result in done if not item.relaxed])
    notes += [f"{item.label}: {_first_line(result)}" for item, result in done if isinstance(result, OpkitError)]
    made = {item.key: _entry(item, result) for item, result in done if isinstance(result, compiling.Binary)}
    return Built(tuple(made.values()), tuple(dict.fromkeys(notes)))


# ---- what is to be compiled ------------------------------------------------------------------------------------------


def _listed(function: TritonFunction, chosen: Sequence[str], notes: list[str]) -> list[_Item]:
    try:
        return list(_items(function, chosen, notes))
    except OpkitError as error:
        raise PackageError(
            f"Nothing was written, as no example of {_name(function)} could be made. Give calls in its examples=, or mend "
            f"them.\n\n{error}"
        ) from error


def _name(function: TritonFunction) -> str:
    return f"{function.operator.name}[{function.__name__}]"


def _items(function: TritonFunction, chosen: Sequence[str], notes: list[str]) -> Iterator[_Item]:
    bound, operator, name = function.bound, function.operator, _name(function)
    wanted = _architectures(function, chosen)
    if not wanted:
        notes.append(f"{name}: it is for {', '.join(bound.kernel.targets)} alone")
    for call in calls_of(operator, bound.kernel.examples) if wanted else ():
        for config in configs_of(operator, bound, call):
            for target in wanted:
                request = request_of(operator, bound, call, config, target)
                label = f"{name}, {call}{'' if config is None else f', {config.label}'}, {target}"
                group = name, str(call) if bound.kernel.examples else "", target if chosen else ""
                yield _Item(function, label, group, request)
                for relaxed in forms.relaxed(request):
                    yield _Item(function, f"{label}, for more sizes and addresses", group, relaxed, relaxed=True)


def _architectures(function: TritonFunction, chosen: Sequence[str]) -> list[str]:
    own = list(map(targets.canonical, function.bound.kernel.targets))
    return [each for each in chosen or own or ARCHITECTURES if each in (own or chosen or ARCHITECTURES)]


# ---- compiling -------------------------------------------------------------------------------------------------------


def _all(requests: Sequence[compiling.Request], jobs: int | None) -> list[compiling.Binary | OpkitError]:
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


def _attempt(request: compiling.Request) -> compiling.Binary | OpkitError:
    try:
        return compiling.build(request)
    except OpkitError as error:
        return error


# ---- what came of it -------------------------------------------------------------------------------------------------


def _check(done: Sequence[tuple[_Item, compiling.Binary | OpkitError]]) -> None:
    """Refuse the build if nothing of a group could be compiled."""
    made = {item.group for item, result in done if not isinstance(result, OpkitError)}
    first: dict[tuple[str, ...], str] = {}
    for item, result in done:
        if isinstance(result, OpkitError) and item.group not in made:
            first.setdefault(item.group, f"{item.label}: {result}")
    if first:
        messages = "\n\n".join(first.values())
        raise PackageError(f"Nothing was written, as a Triton kernel cannot be compiled.\n\n{messages}")


def _first_line(error: OpkitError) -> str:
    return str(error).splitlines()[0]


def _entry(item: _Item, built: compiling.Binary) -> tuple[TritonBinary, bytes]:
    function = item.function
    entry = TritonBinary(
        function.operator.name,
        function.__name__,
        records.triton_version(),
        forms.form_of(item.request),
        built.to_json(),
    )
    return entry, built.image
