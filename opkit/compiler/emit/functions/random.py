"""Random numbers: Philox-4x32-10, from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3".

A number depends on its seed (the key) and its count (the lower half of the counter) alone, so that loops may draw in any
order and in vectors. An f32 is the upper 24 bits of the first word; an f64 the upper 53 of the first two.
"""

from __future__ import annotations

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
OPK_INLINE unsigned long long opk_philox(unsigned long long seed, unsigned long long count) {{
    unsigned c0 = (unsigned)count, c1 = (unsigned)(count >> 32), c2 = 0, c3 = 0;
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
{_ROUND * 10}    return (unsigned long long)c0 << 32 | c1;
}}
"""

_F32 = """\
OPK_INLINE float opk_random_f32(unsigned long long seed, unsigned long long count) {
    return (float)(int)(opk_philox(seed, count) >> 40) * 0x1p-24f;
}
"""

_F64 = """\
OPK_INLINE double opk_random_f64(unsigned long long seed, unsigned long long count) {
    const unsigned long long bits = opk_philox(seed, count);
    const double high = (double)(int)(bits >> 38), low = (double)(int)(bits >> 11 & 0x7ffffffu);
    return (high * 0x1p+27 + low) * 0x1p-53;
}
"""

TEXT = {"philox": _PHILOX, "random_f32": _F32, "random_f64": _F64}
