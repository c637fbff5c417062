// The kernels of this folder for a CPU: slow, but the same source, so that code for GPUs can be tested without one. The
// threads of a block are coroutines that switch at barriers.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ucontext.h>

namespace {

struct Three {
    unsigned x, y, z;
};

thread_local Three threadIdx, blockIdx, blockDim, gridDim;

// --- Definitions that a kernel file needs ---------------------------------------------------------

#define __device__
// Blocks of one launch run one after the other.
#define __shared__ static thread_local
#define KERNEL(name, Arguments) KNOWN_KERNEL(name, Arguments, false)
#define KERNEL_WITH_BARRIERS(name, Arguments) KNOWN_KERNEL(name, Arguments, true)
#define KNOWN_KERNEL(name, Arguments, has_barriers)                                                    \
    void name(const Arguments &n);                                                                     \
    void run_##name(const void *arguments) { name(*static_cast<const Arguments *>(arguments)); }       \
    const bool name##_is_known = know(#name, {run_##name, has_barriers});                              \
    void name(const Arguments &n)

void __syncthreads();

struct Kernel {
    void (*run)(const void *);
    bool has_barriers;
};

std::map<std::string, Kernel> &kernels() {
    static std::map<std::string, Kernel> known;
    return known;
}

bool know(const char *name, Kernel kernel) { return kernels().emplace(name, kernel).second; }

unsigned bits_of_float(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of_bits(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float multiply_add(float a, float b, float c) { return a * b + c; }

float float_of_half(unsigned short bits) {
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;
    float size;
    if (exponent == 31) {
        size = fraction ? NAN : INFINITY;
    } else if (exponent == 0) {
        size = std::ldexp(float(fraction), -24);
    } else {
        size = std::ldexp(float(fraction + 1024), exponent - 25);
    }
    return bits >> 15 ? -size : size;
}

// Rounds to nearest, ties to even, as the CPU does by default.
unsigned short half_of_float(float value) {
    const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (value != value) return 0x7fff;
    // Half a step above the largest value.
    if (size >= 65520.0f) return sign | 0x7c00;
    // Subnormal values have steps of equal size: 2^-24.
    if (size < 0x1p-14f) return sign | (unsigned short)std::nearbyint(std::ldexp(size, 24));
    int exponent;
    const float fraction = std::frexp(size, &exponent);
    // 1024 to 2048; 2048 carries into the exponent, as intended.
    const int steps = int(std::nearbyint(std::ldexp(fraction, 11)));
    return sign | (unsigned short)(((exponent + 13) << 10) + steps);
}

#include "numbers.cuh"

#include "batch_norm.h"

#include "batch_norm.cu"

#include "sgd.cu"

// --- Running a kernel -----------------------------------------------------------------------------

const size_t STACK_BYTES = 64 << 10;

struct Thread {
    ucontext_t context = {};
    std::unique_ptr<char[]> stack;
    bool done = false;
};

// The block that this host thread is running.
struct Block {
    std::vector<std::unique_ptr<Thread>> threads;
    ucontext_t scheduler;
    // Null while a kernel without barriers runs.
    Thread *current = nullptr;
    Kernel kernel = {};
    const void *arguments = nullptr;
};

thread_local Block block;

void yield() { swapcontext(&block.current->context, &block.scheduler); }

void __syncthreads() {
    // A kernel that was declared without barriers.
    if (!block.current) std::abort();
    yield();
}

// Main loop of a coroutine: runs one kernel after the other.
void run_coroutine() {
    for (;;) {
        block.kernel.run(block.arguments);
        block.current->done = true;
        yield();
    }
}

void resume(Thread &thread) {
    block.current = &thread;
    swapcontext(&block.scheduler, &thread.context);
    block.current = nullptr;
}

void make_threads(size_t count) {
    while (block.threads.size() < count) {
        std::unique_ptr<Thread> thread(new Thread());
        thread->stack.reset(new char[STACK_BYTES]);
        getcontext(&thread->context);
        thread->context.uc_stack.ss_sp = thread->stack.get();
        thread->context.uc_stack.ss_size = STACK_BYTES;
        thread->context.uc_link = nullptr;
        makecontext(&thread->context, run_coroutine, 0);
        block.threads.push_back(std::move(thread));
    }
}

// 0, 1, … in the order that `seed` determines; 0 keeps them in order. Generator of Numerical Recipes.
std::vector<unsigned> in_some_order(unsigned count, uint64_t seed) {
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; i++) order[i] = i;
    for (unsigned i = count; seed && i > 1; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[i - 1], order[(seed >> 33) % i]);
    }
    return order;
}

void set_thread_index(unsigned number) {
    const unsigned row = number / blockDim.x;
    threadIdx = {number % blockDim.x, row % blockDim.y, row / blockDim.y};
}

// Runs a block; returns whether all threads reached the same barriers.
bool run_block(const std::vector<unsigned> &order) {
    if (!block.kernel.has_barriers) {
        for (unsigned number : order) {
            set_thread_index(number);
            block.kernel.run(block.arguments);
        }
        return true;
    }
    for (unsigned number : order) block.threads[number]->done = false;
    for (size_t done = 0; done == 0;) {
        for (unsigned number : order) {
            set_thread_index(number);
            resume(*block.threads[number]);
            done += block.threads[number]->done;
        }
        if (done != 0 && done != order.size()) return false;
    }
    return true;
}

} // namespace

// Runs a kernel for a grid of blocks; `sizes` are grid x, y, z and block x, y, z. The order of blocks and threads
// depends on the seed. Returns 0: done; 1: the kernel does not exist; 2: not all threads of a block reached the same
// barriers, and the rest of their work was not done.
extern "C" int baton_run_kernel(const char *name, const unsigned *sizes, uint64_t seed,
                                const void *arguments) {
    const auto found = kernels().find(name);
    if (found == kernels().end()) return 1;
    gridDim = {sizes[0], sizes[1], sizes[2]};
    blockDim = {sizes[3], sizes[4], sizes[5]};
    const std::vector<unsigned> order = in_some_order(blockDim.x * blockDim.y * blockDim.z, seed);
    if (found->second.has_barriers) make_threads(order.size());
    block.kernel = found->second;
    block.arguments = arguments;
    for (unsigned number : in_some_order(gridDim.x * gridDim.y * gridDim.z, seed)) {
        const unsigned row = number / gridDim.x;
        blockIdx = {number % gridDim.x, row % gridDim.y, row / gridDim.y};
        if (!run_block(order)) {
            // Its coroutines are still inside the kernel.
            block.threads.clear();
            return 2;
        }
    }
    return 0;
}
