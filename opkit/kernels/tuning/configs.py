"""Represent and prune the configurations of a kernel: values of its constexprs together with compile options."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from opkit.errors import DeclarationError, KernelError

_HOOK = "pre_hook"
_TRITON_FIELDS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "ir_override")
_OPTION_CLASSES = {"nvidia": "CUDAOptions", "amd": "HIPOptions"}


@dataclasses.dataclass(frozen=True, eq=False)
class Config:
    """One way to compile a kernel: values of its constexprs, and compile options such as ``num_warps``.

    ``pre_hook`` is called before each launch, as Triton's is; it is no part of what identifies the configuration.

    >>> Config({"BLOCK": 128}, {"num_warps": 4}).label
    'BLOCK=128, num_warps=4'
    """

    constexprs: Mapping[str, Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    pre_hook: Callable[..., Any] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @classmethod
    def parse(cls, written: Any, parameter_names: Collection[str]) -> Config:
        """Return the configuration that an author wrote as a dictionary, or as a ``triton.Config``.

        What is named like a parameter of the kernel is a constexpr, the rest are compile options.

        Raises:
            DeclarationError: it is neither, a name means nothing, or a value cannot be distinguished from others in a record.

        >>> Config.parse({"BLOCK": 128, "num_warps": 4}, ["x", "out", "BLOCK"])
        Config(constexprs={'BLOCK': 128}, options={'num_warps': 4}, pre_hook=None)
        """
        values, hook = _values_and_hook(written)
        constexprs = {name: value for name, value in values.items() if name in parameter_names}
        options = {name: value for name, value in values.items() if name not in parameter_names}
        for name in options:
            _check_option(name, written, parameter_names)
        config = cls(constexprs, options, hook)
        config.to_json()  # raises now rather than at the first launch
        return config

    @property
    def values(self) -> dict[str, Any]:
        """Constexprs and options in one dictionary."""
        return {**self.constexprs, **self.options}

    @property
    def label(self) -> str:
        """The configuration as a person writes it."""
        return label_of(self.to_json())

    @functools.cached_property
    def key(self) -> str:
        """A text that is the same for equal configurations alone, in any process."""
        return key_of(self.to_json())

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return what a record holds of it: values that JSON lacks stand there by their names.

        Raises:
            DeclarationError: a value's text holds its address, so that no other process would know it.
        """
        return {
            "constexprs": {name: _plain(name, value) for name, value in self.constexprs.items()},
            "options": {name: _plain(name, value) for name, value in self.options.items()},
        }


def key_of(config: Mapping[str, Any]) -> str:
    """Return the :attr:`Config.key` of a configuration in JSON form."""
    return json.dumps(config, sort_keys=True)


def label_of(config: Mapping[str, Any]) -> str:
    """Return the :attr:`Config.label` of a configuration in JSON form.

    >>> label_of({"constexprs": {"BLOCK": 64, "TYPE": {"object": "triton.language.bfloat16"}}, "options": {}})
    'BLOCK=64, TYPE=bfloat16'
    """
    values = {**config["constexprs"], **config["options"]}
    return ", ".join(f"{name}={_shown(value)}" for name, value in values.items()) or "no values"


def _shown(value: Any) -> str:
    return str(value["object"]).rpartition(".")[2] if isinstance(value, dict) else str(value)


# ---- authors' configurations ----------------------------------------------------------------------------------------------


def _values_and_hook(written: Any) -> tuple[dict[str, Any], Any]:
    if isinstance(written, Mapping):
        values = dict(written)
        hook = values.pop(_HOOK, None)
    elif isinstance(getattr(written, "kwargs", None), Mapping) and hasattr(written, "num_warps"):
        fields = {name: getattr(written, name, None) for name in _TRITON_FIELDS}
        values = {**written.kwargs, **{name: value for name, value in fields.items() if value is not None}}
        hook = getattr(written, _HOOK, None)
    else:
        raise DeclarationError(
            f"configs: {written!r} is no configuration. Write a dictionary such as "
            '{"BLOCK": 128, "num_warps": 4}, or a triton.Config.'
        )
    if wrong := [name for name in values if not isinstance(name, str)]:
        raise DeclarationError(f"configs: {wrong[0]!r} in {written!r} is no name of a parameter or an option.")
    if hook is not None and not callable(hook):
        raise DeclarationError(f"configs: pre_hook of {written!r} cannot be called.")
    return values, hook


def _check_option(name: str, written: Any, parameter_names: Collection[str]) -> None:
    known = option_names()
    if not known or name in known:
        return
    near = difflib.get_close_matches(name, [*parameter_names, *known], n=2, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise DeclarationError(
        f"configs: {name!r} in {written!r} is neither a parameter of the kernel nor a compile option of Triton's.{hint}"
    )


@functools.cache
def option_names() -> frozenset[str]:
    """Return the compile options of the installed Triton, on any kind of GPU; none where there is no Triton."""
    found = {"debug", "arch"}
    try:
        for backend, name in _OPTION_CLASSES.items():
            options: Any = getattr(importlib.import_module(f"triton.backends.{backend}.compiler"), name)
            found.update(field.name for field in dataclasses.fields(options))
    except (ImportError, AttributeError):  # no Triton, or one that has its options elsewhere: it checks them itself
        return frozenset()
    return frozenset(found)


def _plain(name: str, value: Any) -> Any:
    """Return a value as JSON has it; an object by its name."""
    if type(value).__name__ == "constexpr":
        value = value.value
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(name, item) for item in value]
    return {"object": _named(name, value)}


def _named(name: str, value: Any) -> str:
    qualified = getattr(value, "__qualname__", None)
    text = f"{value.__module__}.{qualified}" if isinstance(qualified, str) else repr(value)
    if " at 0x" in text or "<lambda>" in text:
        raise DeclarationError(
            f"configs: the value {value!r} of {name} has no name by which a record of timings could know it. Use a "
            "number, a string, a function with a name, or an object whose repr() says what it is."
        )
    return text


# ---- pruning ----------------------------------------------------------------------------------------------------


def prune(
    configs: Sequence[Config], function: Callable[..., Any] | None, named_values: Mapping[str, Any]
) -> list[Config]:
    """Return the configurations that an author's function leaves of ``configs``.

    The function gets a list of dictionaries and, by parameter name, whatever else it takes:
    ``prune=lambda configs, d: [c for c in configs if c["BLOCK"] <= d]``. One with ``**kwargs`` is called as Triton's
    ``early_config_prune`` is: with ``triton.Config`` objects, a dictionary of the values, and the values by name.

    Args:
        configs: all of them.
        function: the author's; None leaves all.
        named_values: the values that the function may take.

    Raises:
        DeclarationError: it takes a name without a value.
        KernelError: it returns something else than some of what it got, or nothing.

    >>> both = [Config({"BLOCK": 64}), Config({"BLOCK": 256})]
    >>> [config.label for config in prune(both, lambda configs, d: [c for c in configs if c["BLOCK"] <= d], {"d": 100})]
    ['BLOCK=64']
    """
    if function is None:
        return list(configs)
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        offered = [_for_triton(config) for config in configs]
        second = [parameter.name for parameter in parameters][1:2]
        others = {name: value for name, value in named_values.items() if name not in ("configs", *second)}
        returned = function(offered, dict(named_values), **others)
    else:
        offered = [config.values for config in configs]
        returned = function(offered, **_arguments(function, list(parameters)[1:], named_values))
    return _selected(function, configs, offered, returned, named_values)


def _for_triton(config: Config) -> Any:
    """Return a ``triton.Config``; what it has no field for is among its ``kwargs``, where Triton looks for options too."""
    import triton  # imported here: only functions written for Triton's own autotuner need it

    fields = {name: value for name, value in config.options.items() if name in _TRITON_FIELDS}
    kwargs = {name: value for name, value in config.values.items() if name not in fields}
    return triton.Config(kwargs, **fields, pre_hook=config.pre_hook)


def _arguments(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter], named_values: Mapping[str, Any]
) -> dict[str, Any]:
    missing = [p.name for p in parameters if p.name not in named_values and p.default is p.empty]
    if missing:
        raise DeclarationError(
            f"prune: {_name(function)} takes {', '.join(missing)}, which this kernel has no value for. It may take "
            f"{', '.join(sorted(named_values)) or 'nothing'}."
        )
    return {p.name: named_values[p.name] for p in parameters if p.name in named_values}


def _selected(
    function: Callable[..., Any],
    configs: Sequence[Config],
    offered: Sequence[Any],
    returned: Any,
    named_values: Mapping[str, Any],
) -> list[Config]:
    if not isinstance(returned, (list, tuple)) or not returned:
        values = ", ".join(f"{name}={value}" for name, value in named_values.items() if isinstance(value, (int, float)))
        what = "left none of the configs" if returned in ([], ()) else f"returned {returned!r}, which is no list"
        raise KernelError(f"prune: {_name(function)} {what} (for {values}). It must leave one at least.")
    by_identity = {id(each): config for each, config in zip(offered, configs, strict=True)}
    parameters = {name for config in configs for name in config.constexprs}
    by_key = {config.key: config for config in configs}
    selected: list[Config] = []
    for each in returned:
        config = by_identity.get(id(each)) or by_key.get(Config.parse(each, parameters).key)
        if config is None:
            raise KernelError(f"prune: {_name(function)} returned {each!r}, which is none of the configs passed to it.")
        selected.append(config)
    return selected


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
