/* Element types that C and C++ lack, and what C takes from headers that an author need not include. Follows opkit.h.
 *
 * opk_bf16 and opk_half hold 16 bits and compute in float: they convert to float by themselves, and from it rounding to
 * the nearest, ties to even. One trap: in `a ? x : 0` neither type converts before the other; write `a ? x : (T)0`. */
#ifndef OPKIT_TYPES_H
#define OPKIT_TYPES_H

typedef __SIZE_TYPE__ size_t;

#ifdef __cplusplus

#ifndef __CUDACC__

/* condition ? yes : no, without the branch that keeps a loop from being vectorised */
static inline constexpr uint32_t opk_either(bool condition, uint32_t yes, uint32_t no) {
    return (yes & (0u - static_cast<uint32_t>(condition))) | (no & (static_cast<uint32_t>(condition) - 1u));
}

struct alignas(2) opk_bf16 {
    uint16_t bits;
    opk_bf16() = default;
    opk_bf16(float value) : bits(from(value)) {}
    operator float() const {
        uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        __builtin_memcpy(&value, &wide, 4);
        return value;
    }
    static uint16_t from(float value) {
        uint32_t wide;
        __builtin_memcpy(&wide, &value, 4);
        uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
        uint32_t quiet = (wide >> 16) | 0x40u;
        return static_cast<uint16_t>(opk_either(static_cast<int32_t>(wide & 0x7fffffffu) > 0x7f800000, quiet, rounded));
    }
    opk_bf16 operator-() const {
        opk_bf16 negative = *this;
        negative.bits = static_cast<uint16_t>(bits ^ 0x8000u);
        return negative;
    }
    opk_bf16& operator+=(float other) { return *this = opk_bf16(float(*this) + other); }
    opk_bf16& operator-=(float other) { return *this = opk_bf16(float(*this) - other); }
    opk_bf16& operator*=(float other) { return *this = opk_bf16(float(*this) * other); }
    opk_bf16& operator/=(float other) { return *this = opk_bf16(float(*this) / other); }
    opk_bf16& operator++() { return *this += 1.0f; }
    opk_bf16& operator--() { return *this -= 1.0f; }
    opk_bf16 operator++(int) {
        const opk_bf16 old = *this;
        *this += 1.0f;
        return old;
    }
    opk_bf16 operator--(int) {
        const opk_bf16 old = *this;
        *this -= 1.0f;
        return old;
    }
};

struct alignas(2) opk_half {
    uint16_t bits;
    opk_half() = default;
    opk_half(float value) : bits(from(value)) {}
    operator float() const {
        const uint32_t moved = (bits & 0x7fffu) << 13, exponent = moved & (0x1fu << 23);
        uint32_t wide = moved + (112u << 23), small = moved + (113u << 23);
        wide += opk_either(exponent == (0x1fu << 23), 112u << 23, 0u); /* infinities and NaNs */
        float tiny;
        __builtin_memcpy(&tiny, &small, 4);
        tiny -= 6.103515625e-05f; /* subnormals: the leading 1 that they lack */
        __builtin_memcpy(&small, &tiny, 4);
        wide = opk_either(exponent == 0u, small, wide) | ((bits & 0x8000u) << 16);
        float value;
        __builtin_memcpy(&value, &wide, 4);
        return value;
    }
    static uint16_t from(float value) {
        uint32_t wide;
        __builtin_memcpy(&wide, &value, 4);
        const uint32_t sign = (wide >> 16) & 0x8000u;
        wide &= 0x7fffffffu;
        float shifted;
        __builtin_memcpy(&shifted, &wide, 4);
        shifted += 0.5f; /* 0.5 has the precision of a half's subnormals: the addition rounds to it */
        uint32_t tiny;
        __builtin_memcpy(&tiny, &shifted, 4);
        const int32_t size = static_cast<int32_t>(wide);
        const uint32_t normal = (wide + 0xfffu + ((wide >> 13) & 1u) - (112u << 23)) >> 13;
        uint32_t result = opk_either(size < (113 << 23), tiny - 0x3f000000u, normal);
        result = opk_either(size >= 0x47800000, 0x7c00u, result);
        result = opk_either(size > 0x7f800000, 0x7e00u | ((wide >> 13) & 0x3ffu), result);
        return static_cast<uint16_t>(result | sign);
    }
    opk_half operator-() const {
        opk_half negative = *this;
        negative.bits = static_cast<uint16_t>(bits ^ 0x8000u);
        return negative;
    }
    opk_half& operator+=(float other) { return *this = opk_half(float(*this) + other); }
    opk_half& operator-=(float other) { return *this = opk_half(float(*this) - other); }
    opk_half& operator*=(float other) { return *this = opk_half(float(*this) * other); }
    opk_half& operator/=(float other) { return *this = opk_half(float(*this) / other); }
    opk_half& operator++() { return *this += 1.0f; }
    opk_half& operator--() { return *this -= 1.0f; }
    opk_half operator++(int) {
        const opk_half old = *this;
        *this += 1.0f;
        return old;
    }
    opk_half operator--(int) {
        const opk_half old = *this;
        *this -= 1.0f;
        return old;
    }
};

#endif /* !__CUDACC__ */

#else /* C */

typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef __UINTPTR_TYPE__ uintptr_t;
#if __STDC_VERSION__ <= 201710L
#define bool _Bool
#define true 1
#define false 0
#endif

#endif /* C */

#ifdef OPK_C_SOURCE /* C, or C that is compiled as C++ */

#ifdef __cplusplus
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef __UINTPTR_TYPE__ uintptr_t;
#define NULL __null
#define _Bool bool
#define _Alignas alignas
#define _Alignof alignof
#define _Static_assert static_assert
#define _Thread_local thread_local
#define _Noreturn __attribute__((noreturn))
#else
#define NULL ((void*)0)
#endif

#define INFINITY (__builtin_inff ())
#define NAN (__builtin_nanf (""))
#define HUGE_VAL (__builtin_huge_val ())
#define HUGE_VALF (__builtin_huge_valf ())
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define DBL_MAX __DBL_MAX__
#define DBL_MIN __DBL_MIN__
#define DBL_EPSILON __DBL_EPSILON__
#define INT8_MAX (127)
#define INT8_MIN (-128)
#define INT16_MAX (32767)
#define INT16_MIN (-32767-1)
#define INT32_MAX (2147483647)
#define INT32_MIN (-2147483647-1)
#define INT64_MAX __INT64_MAX__
#define INT64_MIN (-__INT64_MAX__-1)
#define UINT8_MAX (255)
#define UINT16_MAX (65535)
#define UINT32_MAX (4294967295U)
#define UINT64_MAX __UINT64_MAX__
#define SIZE_MAX __SIZE_MAX__
#define INT_MAX __INT_MAX__
#define INT_MIN (-INT_MAX - 1)
#define M_PI 3.14159265358979323846
#define M_E 2.7182818284590452354
#define M_LN2 0.69314718055994530942
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#define M_2_SQRTPI 1.12837916709551257390

#endif /* OPK_C_SOURCE */

#endif
