"""Choose the configuration that a kernel runs with: the fastest by the record, or by timing each now.

Of several processes or threads that need the same result, one measures and the others wait for it; the processes of one job of
torch.distributed all run with what the first of them chose. An operator whose package has results is not timed for other shapes:
the package's result for the most similar ones decides. Nothing is timed while a CUDA graph is captured, or with
``OPKIT_TUNE=off``: then the record of the most similar shapes decides, or else the first configuration is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from opkit import config
from opkit.errors import DeclarationError, KernelError, TuningWarning
from opkit.kernels.tuning import ranks, records
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.observation import Choice, Steps, clear_launchers, observer
from opkit.kernels.tuning.record_format import Identity, Tried, by_speed
from opkit.kernels.tuning.records import Lookup
from opkit.kernels.tuning.skipping import NO_MEMORY, skip_reason

Measure = Callable[[Config], float]
_FOR_OTHERS = ("package", "rank")  # sources of choices that `opkit tune` makes anew

_log = logging.getLogger("opkit.tuning")


@dataclasses.dataclass(frozen=True)
class _Query:
    """The query which of some configurations is fastest for a bucket on a device."""

    identity: Identity
    configs: tuple[Config, ...]
    device: str
    bucket: str
    folders: tuple[Path, ...]

    @property
    def subject(self) -> tuple[Identity, str, str]:
        return self.identity, self.device, self.bucket

    @property
    def topic(self) -> str:
        """A name of what only one process at a time measures."""
        identity = self.identity
        return "\0".join((identity.operator, identity.kernel, identity.hash, self.device, self.bucket))

    @property
    def key(self) -> tuple[str, ...]:
        """Everything that the choice depends on."""
        return (self.topic, *(each.key for each in self.configs))

    @property
    def agreement(self) -> str:
        """A name of the choice that all processes of a job share."""
        return "\0".join(self.key)

    def lookup(self) -> Lookup:
        return records.lookup(self.identity, self.configs, self.device, self.bucket, self.folders)

    def answer(self, found: Config, source: str, tried: Sequence[Tried] = ()) -> Choice:
        return Choice(*self.subject, found, source, tuple(tried), self.configs)


def forget() -> None:
    """Forget the choices of this process."""
    _memory.clear()
    _warned.clear()
    clear_launchers()


_memory: dict[tuple[str, ...], Choice] = {}
_warned: set[str] = set()
_locks: dict[str, threading.RLock] = {}


def choose(
    identity: Identity,
    configs: Sequence[Config],
    device: str,
    bucket: str,
    measure: Measure,
    capturing: bool,
    folders: Sequence[Path] = (),
) -> Config:
    """Return the configuration to run with; see :func:`decide`, which also returns its origin."""
    return decide(identity, configs, device, bucket, measure, capturing, folders).config


def decide(
    identity: Identity,
    configs: Sequence[Config],
    device: str,
    bucket: str,
    measure: Measure,
    capturing: bool,
    folders: Sequence[Path] = (),
    load: Callable[[Config], object] | None = None,
) -> Choice:
    """Return the fastest of ``configs``, from this process's memory, from the record, or by timing each now.

    Args:
        identity: the kernel.
        configs: what it may run with, in its author's order.
        device: the GPU's name, such as "NVIDIA H200".
        bucket: see :func:`opkit.kernels.tuning.record_format.bucket_of`.
        measure: the milliseconds that a configuration takes for this call.
        capturing: whether a CUDA graph is being captured, when nothing may be timed.
        folders: where packages may have results: :func:`opkit.kernels.tuning.records.packaged`.
        load: raises what ``measure`` would for a configuration that cannot run. Without it, packages' results hold for their
            own buckets alone.

    Raises:
        KernelError: every configuration was skipped, or one failed for another reason than too few resources.
        DeclarationError: there are no configurations.

    >>> one = Config({"BLOCK": 64})
    >>> decide(Identity("demo::f", "f", "0"), [one], "NVIDIA H200", "bf16 | d=64", lambda config: 0.0, False).source
    'only'
    """
    query = _Query(identity, tuple(dict.fromkeys(configs)), device, bucket, tuple(folders))
    if not query.configs:
        raise DeclarationError(f"{identity}: it has no configuration to run with.")
    choice = _decided(query, measure, capturing, load)
    observing = observer()
    if observing is not None:
        observing.choices.append(choice)
    return choice


def known(
    identity: Identity, configs: Sequence[Config], device: str, bucket: str, folders: Sequence[Path] = ()
) -> Choice:
    """Return the choice of :func:`decide` where nothing may be timed, without warnings and without storing it.

    >>> both = [Config({"BLOCK": 64}), Config({"BLOCK": 128})]
    >>> known(Identity("demo::f", "f", "0"), both, "a GPU that there is not", "bf16 | d=64").source
    'first'
    """
    query = _Query(identity, tuple(dict.fromkeys(configs)), device, bucket, tuple(folders))
    if len(query.configs) == 1:
        return query.answer(query.configs[0], "only")
    if query.key in _memory:
        return _memory[query.key]
    found = query.lookup()
    if found.config is None or found.entry is None:
        return _similar(query)
    return query.answer(found.config, "record", found.entry.tried)


def _decided(query: _Query, measure: Measure, capturing: bool, load: Callable[[Config], object] | None) -> Choice:
    if len(query.configs) == 1:
        return query.answer(query.configs[0], "only")
    may_time = config.get().tune and not capturing
    observing = observer()
    again = may_time and observing is not None and observing.measures_again(*query.subject)
    if observing is not None and query.key in _memory and _memory[query.key].source in _FOR_OTHERS:
        del _memory[query.key]
    if not again and query.key in _memory:
        return _memory[query.key]
    if observing is not None:
        return _of_this_process(query, measure, capturing, again, None)
    if capturing and (published := _of_another(query, ranks.published(query.agreement))) is not None:
        return published
    if capturing:
        return _of_this_process(query, measure, capturing, again, load)
    return _of_the_job(query, lambda: _of_this_process(query, measure, capturing, again, load))


def _of_the_job(query: _Query, decide: Callable[[], Choice]) -> Choice:
    """Return the choice of the first process of this job that needs one, which may be this one."""
    own: list[Choice] = []
    steps = Steps(query.identity, query.bucket, len(query.configs))

    def decided() -> str:
        own.append(decide())
        return own[0].config.key

    try:
        key = ranks.share(query.agreement, decided, steps.wait)
    finally:
        steps.finish()
    return own[0] if own else _of_another(query, key) or decide()


def _of_another(query: _Query, key: str) -> Choice | None:
    found = next((each for each in query.configs if each.key == key), None)
    return None if found is None else _remember(query, query.answer(found, "rank"))


def _of_this_process(
    query: _Query, measure: Measure, capturing: bool, again: bool, load: Callable[[Config], object] | None
) -> Choice:
    """Return the recorded choice, or else the package's for similar shapes if ``load`` can check it, or measure."""
    found = Lookup() if again else query.lookup()
    if (recorded := _recorded(query, found)) is not None:
        return recorded
    if capturing or not config.get().tune:
        return _without_timing(query, capturing)
    if load is not None and not config.get().tune_all and (packaged := _packaged(query, load)) is not None:
        return packaged
    _warn_of_rejected(query, found)
    return _measured(query, measure, again)


def _packaged(query: _Query, load: Callable[[Config], object]) -> Choice | None:
    """Return the result that the operator's package has for the most similar shapes of the same dtypes, of those that run."""
    for found in records.packaged_for_similar(*query.subject, query.configs, query.folders):
        assert found.config is not None
        assert found.entry is not None
        try:
            load(found.config)
        except Exception as error:
            if not skip_reason(error):
                raise
            continue
        _log.info(
            "%s has no result for %s on %s: it runs with that of its package for %s (%s). OPKIT_TUNE=all measures.",
            query.identity, query.bucket, query.device, found.entry.bucket, found.config.label,
        )  # fmt: skip
        return _remember(query, query.answer(found.config, "package", found.entry.tried))
    return None


def _recorded(query: _Query, found: Lookup) -> Choice | None:
    if found.config is None or found.entry is None:
        return None
    return _remember(query, query.answer(found.config, "record", found.entry.tried))


def _remember(query: _Query, choice: Choice) -> Choice:
    if choice.settled:
        _memory[query.key] = choice
    return choice


def _warn_of_rejected(query: _Query, found: Lookup) -> None:
    """Warn which files are damaged and which results of packages are not used; a kernel that was edited needs no warning."""
    own = records.file_of(query.identity.operator, query.identity.kernel)
    for refusal in found.refusals:
        if refusal.damaged or refusal.file != own:
            _warn(f"A tuning result of {query.identity} is not used, and it is measured again: {refusal}.")


def _similar(query: _Query) -> Choice:
    """Return the recorded choice for the most similar bucket, or else the first configuration."""
    found = records.nearest(query.identity, query.configs, query.device, query.bucket, query.folders)
    if found.config is None or found.entry is None:
        return query.answer(query.configs[0], "first")
    return dataclasses.replace(query.answer(found.config, "nearest", found.entry.tried), bucket=found.entry.bucket)


def _without_timing(query: _Query, capturing: bool) -> Choice:
    """Return the choice where nothing may be timed."""
    found = _similar(query)
    choice = dataclasses.replace(found, bucket=query.bucket)
    what = f"the configuration for {found.bucket}" if found.source == "nearest" else "its first configuration"
    if capturing:
        _warn(
            f"{query.identity} was not tuned for {query.bucket} on {query.device}, and cannot be while a CUDA "
            f"graph is captured: it runs with {what} ({choice.config.label}). Call it once before the capture, or run "
            "`opkit tune` in advance."
        )
    return choice


def _warn(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, TuningWarning, stacklevel=2)


# ---- measuring -------------------------------------------------------------------------------------------------------


def _measured(query: _Query, measure: Measure, again: bool) -> Choice:
    """Measure, or use what another thread or process measured meanwhile."""
    steps = Steps(query.identity, query.bucket, len(query.configs))
    with _locks.setdefault(query.topic, threading.RLock()), _locked(query, steps):
        known = None if again else _memory.get(query.key) or _recorded(query, query.lookup())
        try:
            return known or _remember(query, _best_of(query, by_speed(_tried(query, measure, steps))))
        finally:
            steps.finish()


@contextlib.contextmanager
def _locked(query: _Query, steps: Steps) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(records.lock(query.topic, steps.wait))
        except OSError as error:
            _warn_unwritable(error)
        yield


def _warn_unwritable(error: OSError) -> None:
    _warn(
        f"The tuning results in {records.root()} cannot be written to ({error.strerror or error}): what this process "
        "measures is lost when it ends. Repair the folder, or set OPKIT_CACHE_DIR."
    )


def _best_of(query: _Query, tried: Sequence[Tried]) -> Choice:
    best = tried[0]
    if best.ms is None:
        return _none_ran(query, tried)
    try:
        records.remember(query.identity, query.device, query.bucket, tried)
    except OSError as error:
        _warn_unwritable(error)
    chosen = next(each for each in query.configs if each.key == best.key)
    return query.answer(chosen, "tuned", tried)


def _none_ran(query: _Query, tried: Sequence[Tried]) -> Choice:
    reasons = "\n".join(f"  {each.label}: {each.skipped}" for each in tried)
    if all(each.skipped.startswith(NO_MEMORY) for each in tried):  # timing takes more memory than one run
        choice = _without_timing(query, capturing=False)
        _warn(
            f"{query.identity} could not be tuned for {query.bucket} on {query.device}, as there is too little "
            f"free memory: it runs with {choice.config.label}. Run `opkit tune` while nothing else does.\n{reasons}"
        )
        return choice
    raise KernelError(
        f"{query.identity}: none of its {len(tried)} configurations can run for {query.bucket} on "
        f"{query.device}. Add a smaller one to configs=.\n{reasons}"
    )


def _tried(query: _Query, measure: Measure, steps: Steps) -> Iterator[Tried]:
    for number, each in enumerate(query.configs):
        steps.step(number)
        yield _attempt(query, each, measure)


def _attempt(query: _Query, each: Config, measure: Measure) -> Tried:
    try:
        ms = float(measure(each))
    except Exception as error:
        reason = skip_reason(error)
        if not reason:
            raise KernelError(
                f"{query.identity}: the configuration {each.label} failed while it was timed for {query.bucket}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return Tried(each.to_json(), None, reason)
    if not 0 <= ms < math.inf:
        return Tried(each.to_json(), None, f"its time was measured as {ms} ms")
    return Tried(each.to_json(), ms)
