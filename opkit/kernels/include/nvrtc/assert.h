// For NVRTC, which has no headers; the GPU's driver has __assert_fail.
extern "C" __device__ void __assert_fail(const char* condition, const char* file, unsigned line, const char* function);
#undef assert
#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
#define assert(condition) ((condition) ? (void)0 : __assert_fail(#condition, __FILE__, __LINE__, __func__))
#endif
