"""This module holds the C that kernels call apart from elementary functions; a unit includes what it needs.

It has integer arithmetic, atomic updates, random numbers, streaming stores, and launches of kernels on threads.

Random numbers: Philox-4x32-10, from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3". A number
depends on its seed (the key) and its count alone, so that loops may draw in any order and in vectors. A call of Philox gives four
words. An f64 is the upper 53 bits of the first two that its count gives. An f32 is the upper 24 bits of one word: 64 counts in a
row share sixteen calls, the lanes of a vector, each of which gives every sixteenth number. So a loop along the counts
(:mod:`opkit.compiler.emit.c.strips`) takes a quarter of the calls.

Streaming stores write memory past the caches, by whole lines of 64 bytes, and the rest of a first and a last line as any other
memory. Such stores may become visible after later ones: ``opk_streamed`` orders them before all that follow. Where the compiler
or the processor has none, ``opk_stream`` copies.
"""

from __future__ import annotations

import re
import string

from opkit.compiler.emit.c import functions
from opkit.compiler.emit.c.expressions import C_TYPES, apply
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

LANES = 16

_PHILOX_ROUND = """\
    {
        const unsigned long long p0 = 0xd2511f53ull * c0, p1 = 0xcd9e8d57ull * c2;
        const unsigned h0 = (unsigned)(p1 >> 32) ^ c1 ^ k0, h2 = (unsigned)(p0 >> 32) ^ c3 ^ k1;
        c1 = (unsigned)p1;
        c3 = (unsigned)p0;
        c0 = h0;
        c2 = h2;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
"""

_PHILOX = f"""\
OPK_INLINE void opk_philox(unsigned long long seed, unsigned long long count, unsigned *words, long apart) {{
    unsigned c0 = (unsigned)count, c1 = (unsigned)(count >> 32), c2 = 0, c3 = 0;
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
{_PHILOX_ROUND * 10}    words[0] = c0;
    words[apart] = c1;
    words[2 * apart] = c2;
    words[3 * apart] = c3;
}}
"""

_RANDOM_F32 = f"""\
OPK_INLINE float opk_random_f32(unsigned long long seed, unsigned long long count) {{
    unsigned words[4];
    opk_philox(seed, count / {4 * LANES} * {LANES} + count % {LANES}, words, 1);
    return (float)(int)(words[count / {LANES} % 4] >> 8) * 0x1p-24f;
}}
"""

_RANDOM_F64 = """\
OPK_INLINE double opk_random_f64(unsigned long long seed, unsigned long long count) {
    unsigned words[4];
    opk_philox(seed, count, words, 1);
    const double high = (double)(int)(words[0] >> 6), low = (double)(int)((words[0] & 0x3fu) << 21 | words[1] >> 11);
    return (high * 0x1p+27 + low) * 0x1p-53;
}
"""

_RANDOM_ROW = f"""\
static __attribute__((noinline)) void opk_random_row(
    unsigned long long seed, unsigned long long count, long length, float *out) {{
    for (long done = 0; done < length;) {{
        const unsigned long long at = count + (unsigned long long)done, first = at % {4 * LANES};
        const long most = {4 * LANES} - (long)first, these = length - done < most ? length - done : most;
        unsigned words[{4 * LANES}] __attribute__((aligned(64)));
        _Pragma("omp simd")
        for (int lane = 0; lane < {LANES}; ++lane)
            opk_philox(seed, at / {4 * LANES} * {LANES} + (unsigned)lane, words + lane, {LANES});
        for (long k = 0; k < these; ++k) out[done + k] = (float)(int)(words[(long)first + k] >> 8) * 0x1p-24f;
        done += these;
    }}
}}
"""


_PART = """\
#if defined(__AVX512F__)
#define OPK_PART 64
#define OPK_MOVE __builtin_ia32_movntps512
#elif defined(__AVX__)
#define OPK_PART 32
#define OPK_MOVE __builtin_ia32_movntps256
#elif defined(__SSE__)
#define OPK_PART 16
#define OPK_MOVE __builtin_ia32_movntps
#elif defined(__clang__)
#define OPK_PART 16
#endif
#if defined(OPK_PART)
typedef float stream_part __attribute__((vector_size(OPK_PART), may_alias));
typedef float stream_anywhere __attribute__((vector_size(OPK_PART), aligned(1), may_alias));
#endif
#if defined(__clang__)
#define OPK_STREAM(to, from) __builtin_nontemporal_store(*(const stream_anywhere *)(from), (stream_part *)(to))
#elif defined(OPK_PART)
#define OPK_STREAM(to, from) OPK_MOVE((float *)(to), *(const stream_anywhere *)(from))
#endif
"""

_STREAM = (
    _PART
    + """\
static __attribute__((noinline)) void opk_stream(void *to, const void *from, long bytes) {
    long done = -(long)to & 63;
    done = done < bytes ? done : bytes;
    __builtin_memcpy(to, from, (unsigned long)done);
#if defined(OPK_STREAM)
    for (; done + 64 <= bytes; done += 64)
        for (long part = 0; part < 64; part += OPK_PART)
            OPK_STREAM((char *)to + done + part, (const char *)from + done + part);
#endif
    __builtin_memcpy((char *)to + done, (const char *)from + done, (unsigned long)(bytes - done));
}
"""
)

_STREAMED = """\
OPK_INLINE void opk_streamed(void) {
#if defined(__SSE__)
    __builtin_ia32_sfence();
#elif defined(__aarch64__)
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
"""

_TEXT = {
    "philox": _PHILOX,
    "random_f32": _RANDOM_F32,
    "random_f64": _RANDOM_F64,
    "random_row": _RANDOM_ROW,
    "stream": _STREAM,
    "streamed": _STREAMED,
}

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
    if name in _TEXT:
        return _TEXT[name]
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
