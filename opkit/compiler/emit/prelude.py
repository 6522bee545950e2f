"""This module holds the C that kernels call: small functions, of which a unit includes those it needs, and thread launches."""

from __future__ import annotations

import re
import string

from opkit.compiler.emit import functions
from opkit.compiler.emit.expressions import apply
from opkit.compiler.emit.types import C_TYPES
from opkit.compiler.ir.dtypes import DTYPES, is_float

_HEAD = "static inline __attribute__((always_inline)) "

# By name; $T is the type, $S opkit's name of it, $U the unsigned type of its size.
_WHOLE = {
    "div": "$T opk_div_$S($T a, $T b) { return b == 0 ? 0 : $NEGATED ($T)(a / (b == 0 ? 1 : b)); }",
    "floordiv": "$T opk_floordiv_$S($T a, $T b) { const $T q = opk_div_$S(a, b), r = ($T)(a - q * b); "
    "return b != 0 && r != 0 && (r < 0) != (b < 0) ? ($T)(q - 1) : q; }",
    "fmod": "$T opk_fmod_$S($T a, $T b) { return b == 0 ? 0 : $NOTHING ($T)(a % (b == 0 ? 1 : b)); }",
    "rem": "$T opk_rem_$S($T a, $T b) { const $T r = opk_fmod_$S(a, b); "
    "return r != 0 && (r < 0) != (b < 0) ? ($T)(r + b) : r; }",
    "abs": "$T opk_abs_$S($T a) { return a < 0 ? ($T)-a : a; }",
    "min": "$T opk_min_$S($T a, $T b) { return a < b ? a : b; }",
    "max": "$T opk_max_$S($T a, $T b) { return a > b ? a : b; }",
    "pow": "$T opk_pow_$S($T a, $T b) { if (b < 0) return a == 1 ? 1 : a == ($T)-1 ? ((b & 1) ? ($T)-1 : 1) : 0; "
    "$T p = 1; while (b) { if (b & 1) p = ($T)(p * a); a = ($T)(a * a); b >>= 1; } return p; }",
    "shl": "$T opk_shl_$S($T a, $T b) { return b < 0 || b >= $BITS ? 0 : ($T)(($U)a << b); }",
    "shr": "$T opk_shr_$S($T a, $T b) { return b < 0 || b >= $BITS ? (a < 0 ? ($T)-1 : 0) : ($T)(a >> b); }",
}
_REAL = {
    "min": "$T opk_min_$S($T a, $T b) { return (a < b) | (a != a) ? a : b; }",
    "max": "$T opk_max_$S($T a, $T b) { return (a > b) | (a != a) ? a : b; }",
    "rem": "$T opk_rem_$S($T a, $T b) { const $T r = __builtin_fmod$F(a, b); "
    "return (r != 0) & ((r < 0) != (b < 0)) ? r + b : r; }",
    "whole": "uint64_t opk_whole_$S($T a) { return a >= ($T)0x1p63 ? "
    "(uint64_t)(int64_t)(a - ($T)0x1p63) ^ 0x8000000000000000UL : (uint64_t)(int64_t)a; }",
}
_BITS = "$T opk_bits_${R}_$S($V a) { $T b; __builtin_memcpy(&b, &a, sizeof b); return b; }"
_ATOMIC = (
    "void opk_atomic_${OP}_$S($T *p, $T v) { $U old = __atomic_load_n(($U *)p, __ATOMIC_RELAXED), new; $T a, b; do { "
    "__builtin_memcpy(&a, &old, sizeof a); b = $NEXT; __builtin_memcpy(&new, &b, sizeof b); } while (!__atomic_compare_"
    "exchange_n(($U *)p, &old, new, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); }"
)

RUNTIME = """
struct opkit_runtime {
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
  int (*thread)(void);
  int64_t threads;
  int64_t error[3];
  void *const *functions;
};
union opkit_value {
  const void *p;
  int64_t i;
  double f;
};
struct opkit_call {
  void (*range)(const struct opkit_call *, int64_t, int64_t);
  void *const *buffers;
  const int64_t *sizes;
  struct opkit_runtime *runtime;
  int64_t count, grain;
};
struct opkit_batch {
  const struct opkit_call *calls;
  int64_t length, threads, parts, next;
  double work;
  const struct opkit_runtime *runtime;
  uint8_t *done;
};
static double opkit_work(const struct opkit_call *call) {
  return call->count > 0 ? (double)call->count / (double)call->grain : 0;
}
static int64_t opkit_after(const struct opkit_call *call, double work) {
  const double at = work * (double)call->grain;
  return at <= 0 ? 0 : at < (double)call->count ? (int64_t)at : call->count;
}
static void opkit_part(const struct opkit_batch *batch, int64_t part) {
  double first = batch->work * (double)part / (double)batch->parts;
  double last = batch->work * (double)(part + 1) / (double)batch->parts;
  if (part + 1 == batch->parts) last = __builtin_inf();
  for (int64_t i = 0; i < batch->length; ++i) {
    const struct opkit_call *call = batch->calls + i;
    const int64_t begin = opkit_after(call, first), end = opkit_after(call, last);
    if (begin < end) call->range(call, begin, end);
    first -= opkit_work(call);
    last -= opkit_work(call);
  }
}
static void opkit_take(struct opkit_batch *batch) {
  for (int64_t part; (part = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED)) < batch->parts;)
    opkit_part(batch, part);
}
static void opkit_thread(void *data) {
  struct opkit_batch *batch = data;
  if (!batch->done) {
    opkit_take(batch);
    return;
  }
  const int64_t part = batch->runtime->thread();
  if (part >= batch->parts) return;
  opkit_part(batch, part);
  batch->done[part] = 1;
}
static void opkit_in_parallel(struct opkit_batch *batch) {
  batch->runtime->parallel(opkit_thread, batch, (unsigned)batch->threads, 0);
  if (!batch->done) opkit_take(batch);
  else
    for (int64_t part = 0; part < batch->parts; ++part)
      if (!batch->done[part]) opkit_part(batch, part);
}
static __attribute__((noinline)) void opkit_launch(
    const struct opkit_call *calls, int64_t length, const struct opkit_runtime *runtime) {
  struct opkit_batch batch = {calls, length, runtime->threads, 0, 0, 0, runtime, 0};
  for (int64_t i = 0; i < length; ++i) batch.work += opkit_work(calls + i);
  if (batch.work < (double)batch.threads) batch.threads = (int64_t)batch.work;
  if (batch.threads > 256) batch.threads = 256;
  if (batch.threads >= 2 && runtime->parallel && runtime->thread) {
    uint8_t done[256] = {0};
    batch.done = length == 1 ? done : 0;
    batch.parts = length == 1 ? batch.threads : 4 * batch.threads;
    opkit_in_parallel(&batch);
    return;
  }
  for (int64_t i = 0; i < length; ++i)
    if (calls[i].count > 0) calls[i].range(calls + i, 0, calls[i].count);
}
static __attribute__((cold, noinline)) void opkit_fail(struct opkit_runtime *r, int64_t code, int64_t a, int64_t b) {
  int64_t none = 0;
  if (__atomic_compare_exchange_n(&r->error[0], &none, code, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    r->error[1] = a;
    r->error[2] = b;
  }
}
extern void *malloc(unsigned long);
extern void free(void *);
"""


def text(code: str) -> str:
    """Return the definitions of all that ``code`` calls."""
    own: dict[str, str] = {}
    others: dict[str, None] = {}
    _collect(code, own, others)
    return "\n".join([functions.text(list(others)), *own.values()])


def _collect(code: str, own: dict[str, str], others: dict[str, None]) -> None:
    for name in dict.fromkeys(re.findall(r"\bopk_(\w+)", code)):
        if name in own or name in others:
            continue
        definition = _definition(name)
        if definition is None:
            others[name] = None
        else:
            own[name] = ""  # it names itself
            _collect(definition, own, others)
            del own[name]
            own[name] = definition


def _definition(name: str) -> str | None:
    stem, _, dtype = name.rpartition("_")
    if dtype not in DTYPES:
        return None
    if stem.startswith("bits_"):
        return _HEAD + _filled(_BITS, dtype, R=stem[5:], V=C_TYPES[stem[5:]])
    if stem.startswith("atomic_"):
        return _HEAD + _filled(_ATOMIC, dtype, OP=stem[7:], NEXT=apply(stem[7:], dtype, ["a", "v"], dtype))
    template = (_REAL if is_float(dtype) else _WHOLE).get(stem)
    return None if template is None else _HEAD + _filled(template, dtype)


def _filled(template: str, dtype: str, **more: str) -> str:
    row = DTYPES[dtype]
    words = {
        "T": C_TYPES[dtype],
        "S": dtype,
        "U": f"uint{8 * row.bytes}_t",
        "F": "" if dtype == "f64" else "f",
        "BITS": str(8 * row.bytes),
        "NEGATED": f"b == ({C_TYPES[dtype]})-1 ? ({C_TYPES[dtype]})-a :" if row.signed else "",
        "NOTHING": f"b == ({C_TYPES[dtype]})-1 ? 0 :" if row.signed else "",
        **more,
    }
    return string.Template(template).substitute(words)
