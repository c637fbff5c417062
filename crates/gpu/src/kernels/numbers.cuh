// Number formats, without CUDA's headers, which a training machine does not have. All arithmetic is f32; these types
// only define how a value is stored.
//
// Included before every kernel file, on a GPU (compiled by NVRTC) and on the host (host.cpp).

struct F32 {
    float value;
};

// The upper half of an f32.
struct Bf16 {
    unsigned short bits;
};

// IEEE 754 binary16.
struct F16 {
    unsigned short bits;
};

__device__ inline float read(F32 stored) { return stored.value; }
__device__ inline float read(Bf16 stored) { return float_of_bits((unsigned)stored.bits << 16); }
__device__ inline float read(F16 stored) { return float_of_half(stored.bits); }

__device__ inline void write(F32 &stored, float value) { stored.value = value; }

// Rounds to nearest, ties to even; NaN becomes libtorch's NaN.
__device__ inline void write(Bf16 &stored, float value) {
    const unsigned bits = bits_of_float(value);
    const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    stored.bits = value != value ? 0x7fc0 : (unsigned short)(rounded >> 16);
}

__device__ inline void write(F16 &stored, float value) { stored.bits = half_of_float(value); }

// Neighbouring values that are read and written at once.
template <class T, int N> struct alignas(sizeof(T) * N) Pack {
    T values[N];
};

// Number of values of `T` in 16 bytes, the most that a thread moves at once.
template <class T> struct Most {
    static const int values = 16 / sizeof(T);
};
