"""Choose the configuration that a kernel runs with: the fastest by the record, or by timing each now.

Of several processes or threads that need the same result, one measures and the others wait and read it. Nothing is timed
while a CUDA graph is captured, or with ``OPKIT_TUNE=off``: then the record of the most similar shapes decides, or else
the first configuration is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from opkit import config
from opkit.errors import DeclarationError, KernelError, TuningWarning
from opkit.kernels.tuning import records
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.observation import Choice, Steps, clear_launchers, observer
from opkit.kernels.tuning.record_format import Identity, Tried, by_speed
from opkit.kernels.tuning.records import Lookup

Measure = Callable[[Config], float]


class Unfit(Exception):
    """A measurement raises it for a configuration that is not to be used, of which nobody promised that it can be."""


_NO_MEMORY = "out of memory"
_SKIPPED = {
    "OutOfResources": "out of resources",
    "ResourceError": "out of resources",
    "OutOfMemoryError": _NO_MEMORY,
    "MemoryError": _NO_MEMORY,
    "PTXASError": "ptxas refused it",
    "Unfit": "unfit",
    "CompileTimeAssertionFailure": "a static_assert of the kernel failed",
}
"""Exceptions that speak against one configuration alone, by the names of their classes, as neither torch nor Triton is
imported here."""

_SKIPPED_TEXTS = {
    "OUT_OF_MEMORY": _NO_MEMORY,
    "hipErrorOutOfMemory": _NO_MEMORY,
    "LAUNCH_OUT_OF_RESOURCES": "out of resources",
    "hipErrorLaunchOutOfResources": "out of resources",
}
"""The same of a driver's errors, by their names."""

_LONGEST_REASON = 300


@dataclasses.dataclass(frozen=True)
class _Question:
    """Which of some configurations is fastest for a bucket on a device."""

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
        """What one process at a time may measure."""
        identity = self.identity
        return "\0".join((identity.operator, identity.kernel, identity.hash, self.device, self.bucket))

    @property
    def key(self) -> tuple[str, ...]:
        """What the answer depends on."""
        return (self.topic, *(each.key for each in self.configs))

    def lookup(self) -> Lookup:
        return records.lookup(self.identity, self.configs, self.device, self.bucket, self.folders)

    def answer(self, found: Config, source: str, tried: Sequence[Tried] = ()) -> Choice:
        return Choice(*self.subject, found, source, tuple(tried), self.configs)


def forget() -> None:
    """Forget what this process chose, as a new process would."""
    _memory.clear()
    _said.clear()
    clear_launchers()


_memory: dict[tuple[str, ...], Choice] = {}
_said: set[str] = set()
_turns: dict[str, threading.RLock] = {}


def choose(
    identity: Identity,
    configs: Sequence[Config],
    device: str,
    bucket: str,
    measure: Measure,
    capturing: bool,
    folders: Sequence[Path] = (),
) -> Config:
    """Return the configuration to run with; as :func:`decide`, which says too where it comes from."""
    return decide(identity, configs, device, bucket, measure, capturing, folders).config


def decide(
    identity: Identity,
    configs: Sequence[Config],
    device: str,
    bucket: str,
    measure: Measure,
    capturing: bool,
    folders: Sequence[Path] = (),
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

    Raises:
        KernelError: every configuration was skipped, or one failed for another reason than too few resources.
        DeclarationError: there are no configurations.

    >>> one = Config({"BLOCK": 64})
    >>> decide(Identity("demo::f", "f", "0"), [one], "NVIDIA H200", "bf16 | d=64", lambda config: 0.0, False).source
    'only'
    """
    question = _Question(identity, tuple(dict.fromkeys(configs)), device, bucket, tuple(folders))
    if not question.configs:
        raise DeclarationError(f"{identity}: it has no configuration to run with.")
    choice = _decided(question, measure, capturing)
    observing = observer()
    if observing is not None:
        observing.choices.append(choice)
    return choice


def known(
    identity: Identity, configs: Sequence[Config], device: str, bucket: str, folders: Sequence[Path] = ()
) -> Choice:
    """Return what :func:`decide` would answer where nothing may be timed; it warns of nothing and stores nothing.

    >>> both = [Config({"BLOCK": 64}), Config({"BLOCK": 128})]
    >>> known(Identity("demo::f", "f", "0"), both, "a GPU that there is not", "bf16 | d=64").source
    'first'
    """
    question = _Question(identity, tuple(dict.fromkeys(configs)), device, bucket, tuple(folders))
    if len(question.configs) == 1:
        return question.answer(question.configs[0], "only")
    if question.key in _memory:
        return _memory[question.key]
    found = question.lookup()
    if found.config is None or found.entry is None:
        return _similar(question)
    return question.answer(found.config, "record", found.entry.tried)


def _decided(question: _Question, measure: Measure, capturing: bool) -> Choice:
    if len(question.configs) == 1:
        return question.answer(question.configs[0], "only")
    may_time = config.get().tune and not capturing
    observing = observer()
    again = may_time and observing is not None and observing.measures_again(*question.subject)
    if not again and question.key in _memory:
        return _memory[question.key]
    found = Lookup() if again else question.lookup()
    if found.config is None and not may_time:
        return _makeshift(question, capturing)
    if found.config is None:
        _complain(question, found)
    return _recorded(question, found) or _measured(question, measure, again)


def _recorded(question: _Question, found: Lookup) -> Choice | None:
    if found.config is None or found.entry is None:
        return None
    return _noted(question, question.answer(found.config, "record", found.entry.tried))


def _noted(question: _Question, choice: Choice) -> Choice:
    if choice.settled:
        _memory[question.key] = choice
    return choice


def _complain(question: _Question, found: Lookup) -> None:
    """Warn which files are damaged and which results of packages are not used; a kernel that changed is no news."""
    own = records.file_of(question.identity.operator, question.identity.kernel)
    for refusal in found.refusals:
        if refusal.damaged or refusal.file != own:
            _warn(f"A tuning result of {question.identity} is not used, and it is measured again: {refusal}.")


def _similar(question: _Question) -> Choice:
    """Return what was found for the most similar bucket, or else the first configuration."""
    found = records.nearest(question.identity, question.configs, question.device, question.bucket, question.folders)
    if found.config is None or found.entry is None:
        return question.answer(question.configs[0], "first")
    return dataclasses.replace(question.answer(found.config, "nearest", found.entry.tried), bucket=found.entry.bucket)


def _makeshift(question: _Question, capturing: bool) -> Choice:
    """Return what to run with where nothing may be timed."""
    found = _similar(question)
    choice = dataclasses.replace(found, bucket=question.bucket)
    what = f"the configuration for {found.bucket}" if found.source == "nearest" else "its first configuration"
    if capturing:
        _warn(
            f"{question.identity} was not tuned for {question.bucket} on {question.device}, and cannot be while a CUDA "
            f"graph is captured: it runs with {what} ({choice.config.label}). Call it once before the capture, or run "
            "`opkit tune` in advance."
        )
    return choice


def _warn(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, TuningWarning, stacklevel=2)


# ---- measuring -------------------------------------------------------------------------------------------------------


def _measured(question: _Question, measure: Measure, again: bool) -> Choice:
    """Measure, or take what another thread or process measured while it was waited for."""
    steps = Steps(question.identity, question.bucket, len(question.configs))
    with _turns.setdefault(question.topic, threading.RLock()), _locked(question, steps):
        known = None if again else _memory.get(question.key) or _recorded(question, question.lookup())
        try:
            return known or _noted(question, _best_of(question, by_speed(_tried(question, measure, steps))))
        finally:
            steps.finish()


@contextlib.contextmanager
def _locked(question: _Question, steps: Steps) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(records.lock(question.topic, steps.wait))
        except OSError as error:
            _unwritable(error)
        yield


def _unwritable(error: OSError) -> None:
    _warn(
        f"The tuning results in {records.root()} cannot be written to ({error.strerror or error}): what this process "
        "measures is lost when it ends. Repair the folder, or set OPKIT_CACHE_DIR."
    )


def _best_of(question: _Question, tried: Sequence[Tried]) -> Choice:
    best = tried[0]
    if best.ms is None:
        return _none_ran(question, tried)
    try:
        records.remember(question.identity, question.device, question.bucket, tried)
    except OSError as error:
        _unwritable(error)
    chosen = next(each for each in question.configs if each.key == best.key)
    return question.answer(chosen, "tuned", tried)


def _none_ran(question: _Question, tried: Sequence[Tried]) -> Choice:
    reasons = "\n".join(f"  {each.label}: {each.skipped}" for each in tried)
    if all(each.skipped.startswith(_NO_MEMORY) for each in tried):  # which to measure takes more than to run once
        choice = _makeshift(question, capturing=False)
        _warn(
            f"{question.identity} could not be tuned for {question.bucket} on {question.device}, as there is too little "
            f"free memory: it runs with {choice.config.label}. Run `opkit tune` while nothing else does.\n{reasons}"
        )
        return choice
    raise KernelError(
        f"{question.identity}: none of its {len(tried)} configurations can run for {question.bucket} on "
        f"{question.device}. Add a smaller one to configs=.\n{reasons}"
    )


def _tried(question: _Question, measure: Measure, steps: Steps) -> Iterator[Tried]:
    for number, each in enumerate(question.configs):
        steps.step(number)
        yield _attempt(question, each, measure)


def _attempt(question: _Question, each: Config, measure: Measure) -> Tried:
    try:
        ms = float(measure(each))
    except Exception as error:
        reason = skip_reason(error)
        if not reason:
            raise KernelError(
                f"{question.identity}: the configuration {each.label} failed while it was timed for {question.bucket}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return Tried(each.to_json(), None, reason)
    if not 0 <= ms < math.inf:
        return Tried(each.to_json(), None, f"its time was measured as {ms} ms")
    return Tried(each.to_json(), ms)


def skip_reason(error: BaseException) -> str:
    """Return why a configuration that failed so is passed over; empty where the failure speaks against more than it.

    >>> skip_reason(MemoryError("64 GiB")), skip_reason(ValueError("no"))
    ('out of memory: 64 GiB', '')
    """
    seen: BaseException | None = error
    while seen is not None:
        names = [_SKIPPED[kind.__name__] for kind in type(seen).__mro__ if kind.__name__ in _SKIPPED]
        texts = [what for text, what in _SKIPPED_TEXTS.items() if isinstance(seen, RuntimeError) and text in str(seen)]
        for what in (*names, *texts):
            return f"{what}: {' '.join(str(seen).split())[:_LONGEST_REASON]}"
        seen = seen.__cause__
    return ""
