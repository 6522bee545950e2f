"""Memory written past the caches, by whole lines of 64 bytes; the rest of a first and a last line as any other memory.

Such stores may be seen after later ones: ``opk_streamed`` puts them before all that follow. A compiler or processor that
has none copies.
"""

from __future__ import annotations

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
typedef float opk_part __attribute__((vector_size(OPK_PART), may_alias));
typedef float opk_anywhere __attribute__((vector_size(OPK_PART), aligned(1), may_alias));
#endif
#if defined(__clang__)
#define OPK_STREAM(to, from) __builtin_nontemporal_store(*(const opk_anywhere *)(from), (opk_part *)(to))
#elif defined(OPK_PART)
#define OPK_STREAM(to, from) OPK_MOVE((float *)(to), *(const opk_anywhere *)(from))
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

TEXT = {"stream": _STREAM, "streamed": _STREAMED}
