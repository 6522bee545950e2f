"""Random numbers: Philox-4x32-10, from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3".

A number depends on its seed (the key) and its count alone, so that loops may draw in any order and in vectors. A call of
Philox gives four words. An f64 is the upper 53 bits of the first two that its count gives. An f32 is the upper 24 bits of
one word: 64 counts in a row share sixteen calls, the lanes of a vector, each of which gives every sixteenth number. So a
loop along the counts (:mod:`opkit.compiler.emit.strips`) takes a quarter of the calls.
"""

from __future__ import annotations

LANES = 16

_ROUND = """\
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
{_ROUND * 10}    words[0] = c0;
    words[apart] = c1;
    words[2 * apart] = c2;
    words[3 * apart] = c3;
}}
"""

_F32 = f"""\
OPK_INLINE float opk_random_f32(unsigned long long seed, unsigned long long count) {{
    unsigned words[4];
    opk_philox(seed, count / {4 * LANES} * {LANES} + count % {LANES}, words, 1);
    return (float)(int)(words[count / {LANES} % 4] >> 8) * 0x1p-24f;
}}
"""

_F64 = """\
OPK_INLINE double opk_random_f64(unsigned long long seed, unsigned long long count) {
    unsigned words[4];
    opk_philox(seed, count, words, 1);
    const double high = (double)(int)(words[0] >> 6), low = (double)(int)((words[0] & 0x3fu) << 21 | words[1] >> 11);
    return (high * 0x1p+27 + low) * 0x1p-53;
}
"""

_ROW = f"""\
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

TEXT = {"philox": _PHILOX, "random_f32": _F32, "random_f64": _F64, "random_row": _ROW}
