// Definitions that a kernel file needs, for NVRTC.

// A kernel has one argument, a structure; Rust declares the same one.
#define KERNEL(name, Arguments) extern "C" __global__ void name(const Arguments n)
// A kernel whose threads wait for each other; the host must know this.
#define KERNEL_WITH_BARRIERS(name, Arguments) KERNEL(name, Arguments)

__device__ inline unsigned bits_of_float(float value) { return __float_as_uint(value); }
__device__ inline float float_of_bits(unsigned bits) { return __uint_as_float(bits); }

__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

__device__ inline float float_of_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline unsigned short half_of_float(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
