"""Describe an operator for :meth:`opkit.CustomOp.describe`: its schema, its kernels, and where each rule comes from."""

from __future__ import annotations

import dataclasses
from html import escape

from opkit import page
from opkit.op.core import Operator
from opkit.op.rules.transforms import fold_refusal

_METHODS = {
    "fake": "register_fake",
    "backward": "register_autograd",
    "double backward": "register_autograd",
    "forward-mode": "reference=",
    "vmap": "register_vmap",
    "FLOPs": "torch.utils.flop_counter.register_flop_formula",
}


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """One kernel, as it was registered."""

    name: str
    device: str
    dtypes: tuple[str, ...]
    priority: int
    condition: str
    enabled: bool


@dataclasses.dataclass(frozen=True)
class RuleInfo:
    """One rule and its origin: "derived", "given" or "not derivable"."""

    rule: str
    origin: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Description:
    """What :meth:`opkit.CustomOp.describe` returns."""

    name: str
    schema: str
    doc: str
    reference: str
    mutates: tuple[str, ...]
    mutation_origin: str
    kernels: tuple[KernelInfo, ...]
    rules: tuple[RuleInfo, ...]
    tags: tuple[str, ...]
    contract_hash: str

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        kernels = [
            (
                k.name,
                k.device,
                ", ".join(k.dtypes) or "any",
                str(k.priority),
                k.condition or "always",
                "yes" if k.enabled else "no",
            )
            for k in self.kernels
        ]
        mutates = f"writes to {', '.join(self.mutates) or 'nothing'} ({self.mutation_origin})"
        parts = [f"<p><strong>{escape(self.name)}</strong> <code>{escape(self.schema)}</code></p>"]
        parts += [f"<p>{escape(line)}</p>" for line in self.doc.splitlines()[:1]]
        parts.append(f"<p>Reference: {escape(self.reference)}; {escape(mutates)}.</p>")
        if kernels:
            parts.append(page.table(("kernel", "device", "dtypes", "priority", "when", "enabled"), kernels))
        return page.fragment(*parts, page.table(("rule", "origin", ""), map(dataclasses.astuple, self.rules)))


def describe(operator: Operator) -> Description:
    """Describe ``operator`` in its present state; a reference that was never traced is described as such."""
    return Description(
        name=operator.name,
        schema=operator.opname + operator.schema_text,
        doc=(operator.function.__doc__ or "").strip(),
        reference=_reference(operator),
        mutates=operator.mutates,
        mutation_origin=operator.mutation.origin,
        kernels=tuple(_kernels(operator)),
        rules=tuple(_rules(operator)),
        tags=tuple(str(tag).removeprefix("Tag.") for tag in operator.overload.tags),
        contract_hash=operator.contract_hash(),
    )


def _reference(operator: Operator) -> str:
    if operator.declared_opaque and operator.explicit_reference is None:
        return "opaque: declared"
    trace = operator.last_trace()
    if trace is None:
        return "not traced yet"
    return "torch" if trace.opaque is None else f"opaque: {trace.opaque}"


def _kernels(operator: Operator) -> list[KernelInfo]:
    return [
        KernelInfo(
            name=kernel.name,
            device=kernel.device or "any",
            dtypes=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes or ())),
            priority=kernel.priority,
            condition=kernel.condition,
            enabled=kernel.device not in operator.kernels.disabled,
        )
        for kernel in operator.kernels.kernels
    ]


def _rules(operator: Operator) -> list[RuleInfo]:
    rules = operator.registered
    registered = {
        "fake": rules.fake,
        "backward": rules.autograd,
        "double backward": rules.autograd,
        "vmap": rules.vmap,
    }
    opaque = _reference(operator).startswith("opaque")
    infos = [_rule(operator, name, registered.get(name) is not None, opaque) for name in _METHODS]
    policy = f"policy {operator.autocast}" if operator.autocast else "arguments stay as they are, autocast off inside"
    dtypes = ", ".join(f"{device}: {dtype}" for device, dtype in rules.autocast.items())
    return [*infos, RuleInfo("autocast", "given" if dtypes or operator.autocast else "derived", dtypes or policy)]


def _rule(operator: Operator, rule: str, registered: bool, opaque: bool) -> RuleInfo:
    if registered:
        return RuleInfo(rule, "given", f"by {_METHODS[rule]}")
    if rule == "vmap":
        return RuleInfo(rule, "derived", _vmap_detail(operator, opaque))
    if opaque:
        return RuleInfo(rule, "not derivable", f"register it with {_METHODS[rule]}")
    detail = "from the reference"
    if rule == "backward" and operator.derived.unpruned:
        detail += f", run whole in the backward: {operator.derived.unpruned}"
    return RuleInfo(rule, "derived", detail)


def _vmap_detail(operator: Operator, opaque: bool) -> str:
    dims = [0 if p.pattern is not None and p.pattern.leading_batch else None for p in operator.signature.parameters]
    reason = operator.folds.broken or fold_refusal(operator.signature, dims)
    if not reason:
        return "one call over *batch"
    return f"{'a loop over calls' if opaque else 'the reference mapped'} ({reason})"
