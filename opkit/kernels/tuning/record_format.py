"""Represent tuning results as dataclasses and JSON, check the files that hold them, and put shapes into buckets.

A file holds ``{"format": 1, "records": [...]}``. A record is of one kernel of one operator, and has an entry for each
device and bucket of shapes: the fastest configuration, the time that each one took, and the kernel and Triton that were timed.
Calls in one bucket share a tuning result.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opkit.kernels.tuning.configs import key_of, label_of

FORMAT = 1
_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class Identity:
    """A kernel that is tuned: ``hash`` changes with everything that may change how fast its configurations are."""

    operator: str
    kernel: str
    hash: str

    def __str__(self) -> str:
        return f"{self.operator} (kernel {self.kernel})"


@dataclasses.dataclass(frozen=True)
class Tried:
    """One configuration, in JSON form: the median milliseconds that it took, or why it was skipped."""

    config: Mapping[str, Any]
    ms: float | None
    skipped: str = ""

    @property
    def key(self) -> str:
        """As :attr:`opkit.kernels.tuning.configs.Config.key`."""
        return key_of(self.config)

    @property
    def label(self) -> str:
        """As :attr:`opkit.kernels.tuning.configs.Config.label`."""
        return label_of(self.config)

    def to_json(self) -> dict[str, Any]:
        """Return it as a file holds it."""
        outcome = {"skipped": self.skipped} if self.ms is None else {"ms": self.ms}
        return {"config": self.config, **outcome}


@dataclasses.dataclass(frozen=True)
class TuningEntry:
    """The measurements for one bucket on one kind of device.

    Attributes:
        device: its name, such as "NVIDIA H200".
        bucket: see :func:`opkit.kernels.tuning.record_format.bucket_of`.
        hash: that of the kernel.
        triton: the major and minor version, such as "3.6".
        date: in UTC, such as "2026-01-31T12:00:00+00:00".
        tried: each configuration, the fastest first and the skipped ones last.
    """

    device: str
    bucket: str
    hash: str
    triton: str
    date: str
    tried: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        """The fastest."""
        return self.tried[0]

    @property
    def when(self) -> datetime.datetime:
        """The date."""
        return datetime.datetime.fromisoformat(self.date)

    def to_json(self) -> dict[str, Any]:
        """Return it as a file holds it."""
        fields = {name: getattr(self, name) for name in _ENTRY_TEXTS}
        return {**fields, "config": self.best.config, "tried": [each.to_json() for each in self.tried]}


@dataclasses.dataclass(frozen=True)
class Record:
    """The entries of one kernel of one operator."""

    operator: str
    kernel: str
    entries: tuple[TuningEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as a file holds it."""
        return {
            "operator": self.operator,
            "kernel": self.kernel,
            "entries": [entry.to_json() for entry in self.entries],
        }


_ENTRY_TEXTS = ("device", "bucket", "hash", "triton", "date")


def by_speed(tried: Iterable[Tried]) -> tuple[Tried, ...]:
    """Return the fastest first, the skipped ones last."""
    return tuple(sorted(tried, key=lambda each: math.inf if each.ms is None else each.ms))


def merged(old: TuningEntry, new: TuningEntry) -> TuningEntry:
    """Merge two entries of one device and bucket: the newer, with the configurations that only the older one tried."""
    newer, older = (new, old) if new.when >= old.when else (old, new)
    if (newer.hash, newer.triton) != (older.hash, older.triton):
        return newer
    known = {each.key for each in newer.tried}
    return dataclasses.replace(
        newer, tried=by_speed([*newer.tried, *(each for each in older.tried if each.key not in known)])
    )


def merge(records: Iterable[Record]) -> list[Record]:
    """Return one record for each kernel, one entry for each of its devices and buckets; see :func:`merged`."""
    found: dict[tuple[str, str], dict[tuple[str, str], TuningEntry]] = {}
    for record in records:
        entries = found.setdefault((record.operator, record.kernel), {})
        for entry in record.entries:
            key = entry.device, entry.bucket
            entries[key] = merged(entries[key], entry) if key in entries else entry
    return [
        Record(operator, kernel, tuple(entries[key] for key in sorted(entries)))
        for (operator, kernel), entries in sorted(found.items())
    ]


def render(records: Iterable[Record]) -> str:
    """Return the text of a file that holds ``records``."""
    return json.dumps({"format": FORMAT, "records": [record.to_json() for record in records]}, indent=1) + "\n"


# ---- reading ---------------------------------------------------------------------------------------------------------


def parse(content: bytes) -> list[Record]:
    """Return the records of a file.

    Raises:
        ValueError: it is not such a file; the message says what is wrong, and where in it.

    >>> parse(b'{"format": 2}')
    Traceback (most recent call last):
    ValueError: format is 2, and this opkit reads 1
    """
    try:
        whole = json.loads(content)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it cannot be read as JSON: {error or type(error).__name__}") from None
    found = _object(whole, "the file", {"format": int})["format"]
    if found != FORMAT:
        raise ValueError(f"format is {found}, and this opkit reads {FORMAT}")
    records = _object(whole, "the file", {"records": list})["records"]
    return merge(_record(each, f"records[{number}]") for number, each in enumerate(records))


def _record(value: Any, where: str) -> Record:
    fields = _object(value, where, {"operator": str, "kernel": str, "entries": list})
    namespace, _, name = fields["operator"].partition("::")
    if not namespace or not name:
        raise ValueError(f"{where}.operator is {_short(fields['operator'])}, expected a name such as 'demo::rms_norm'")
    entries = [_entry(each, f"{where}.entries[{number}]") for number, each in enumerate(fields["entries"])]
    return Record(fields["operator"], fields["kernel"], tuple(entries))


def _entry(value: Any, where: str) -> TuningEntry:
    fields = _object(value, where, {**dict.fromkeys(_ENTRY_TEXTS, str), "config": dict, "tried": list})
    _check_date(fields["date"], f"{where}.date")
    config = _config(fields["config"], f"{where}.config")
    tried = by_speed(_tried(each, f"{where}.tried[{number}]") for number, each in enumerate(fields["tried"]))
    if len({each.key for each in tried}) < len(tried):
        raise ValueError(f"{where}.tried has a configuration twice")
    measured = {each.key: each.ms for each in tried if each.ms is not None}
    if measured.get(key_of(config)) != min(measured.values(), default=math.inf):
        raise ValueError(f"{where}.config ({label_of(config)}) is not the fastest of those that were tried")
    return TuningEntry(**{name: fields[name] for name in _ENTRY_TEXTS}, tried=tried)


def _tried(value: Any, where: str) -> Tried:
    config = _config(_object(value, where, {"config": dict})["config"], f"{where}.config")
    if "skipped" in value:
        return Tried(config, None, _object(value, where, {"skipped": str})["skipped"])
    ms = _object(value, where, {"ms": (int, float)})["ms"]
    if not 0 <= ms < math.inf:
        raise ValueError(f"{where}.ms is {ms}, expected a time in milliseconds")
    return Tried(config, float(ms))


def _config(value: Any, where: str) -> Mapping[str, Any]:
    config = _object(value, where, {"constexprs": dict, "options": dict})
    for part in ("constexprs", "options"):
        for name, each in config[part].items():
            if isinstance(each, dict) and not isinstance(each.get("object"), str):
                raise ValueError(f"{where}.{part}.{name} is {_short(each)}, expected a value or the name of an object")
    return {"constexprs": config["constexprs"], "options": config["options"]}


def _check_date(text: str, where: str) -> None:
    try:
        known = datetime.datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{where} is {_short(text)}, expected a date such as '2026-01-31T12:00:00+00:00'")


def _object(value: Any, where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``value``; raise unless it is an object with these fields, of these types."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_short(value)}, expected an object")
    for name, kinds in fields.items():
        if name not in value:
            raise ValueError(f"{where} has no {name!r}")
        if not isinstance(value[name], kinds) or isinstance(value[name], bool):
            expected = _NAMES[kinds if isinstance(kinds, type) else float]
            raise ValueError(f"{where}.{name} is {_short(value[name])}, expected {expected}")
    return value


_NAMES = {str: "a string", int: "a whole number", float: "a number", list: "a list", dict: "an object"}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def now() -> str:
    """Return the date of an entry that is made now."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def fastest(entry: TuningEntry, keys: Sequence[str]) -> Tried | str:
    """Return the fastest of the configurations with these keys; or the reason why the entry does not determine it."""
    tried = {each.key: each for each in entry.tried}
    unknown = [key for key in keys if key not in tried]
    if unknown:
        return f"{label_of(json.loads(unknown[0]))} was not tried when it was made"
    measured = [tried[key] for key in keys if tried[key].ms is not None]
    return by_speed(measured)[0] if measured else "all that the kernel may use was skipped when it was made"


# ---- buckets ---------------------------------------------------------------------------------------------------------


_EXACT = 16
OTHER_DTYPES = 1000.0  #: a :func:`distance` that is further away than any sizes are


def bucket_of(sizes: Mapping[str, int], dtypes: Sequence[str]) -> str:
    """Return the bucket of a call: its dtypes, and its sizes rounded up to powers of two.

    Sizes up to 16 are not rounded: these are counts of heads, experts or channels, where one more or less can make
    another configuration the fastest, and there are few of them.

    Args:
        sizes: the named sizes of the call, or whatever decides how much there is to do.
        dtypes: the element types of its tensors, in order.

    >>> bucket_of({"d": 1000, "batch": 4096, "heads": 12}, ["bf16", "fp32"])
    'bf16 fp32 | batch=4096 d=1024 heads=12'
    """
    return f"{' '.join(dtypes)} | {' '.join(f'{name}={_rounded(sizes[name])}' for name in sorted(sizes))}"


def _rounded(size: int) -> int:
    return size if size <= _EXACT else 1 << (size - 1).bit_length()


def distance(bucket: str, other: str) -> float:
    """Return the distance between two buckets: by how many doublings their sizes differ; infinite where these do not compare.

    >>> distance("bf16 | d=1024", "bf16 | d=4096"), distance("bf16 | d=1024", "bf16 | m=1")
    (2.0, inf)
    """
    (dtypes, sizes), (others, other_sizes) = _dtypes_and_sizes(bucket), _dtypes_and_sizes(other)
    if sizes.keys() != other_sizes.keys():
        return math.inf
    doublings = sum(abs(math.log2(max(1, sizes[name]) / max(1, other_sizes[name]))) for name in sizes)
    return doublings + (0.0 if dtypes == others else OTHER_DTYPES)


def _dtypes_and_sizes(bucket: str) -> tuple[str, dict[str, int]]:
    dtypes, _, sizes = bucket.partition(" | ")
    pairs = (item.partition("=") for item in sizes.split())
    return dtypes, {name: int(size) for name, _, size in pairs if size.isdecimal()}
