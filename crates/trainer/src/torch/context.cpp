// Settings of the process that tch does not have.

#include <ATen/Context.h>

// Whether operations on a GPU may only use algorithms that give the same bits each time.
extern "C" void baton_set_deterministic(bool deterministic) {
    auto &context = at::globalContext();
    context.setDeterministicCuDNN(deterministic);
    // The gradients of these add in any order. Attention by matrix products and a softmax remains.
    context.setSDPUseFlash(!deterministic);
    context.setSDPUseMemEfficient(!deterministic);
    context.setSDPUseCuDNN(!deterministic);
}

// Whether operations on a CPU add in one order. With several threads, the gradient of an indexed table is otherwise summed by
// atomic additions.
extern "C" void baton_set_deterministic_cpu(bool deterministic) {
    auto &context = at::globalContext();
    context.setDeterministicAlgorithms(deterministic, /*warn_only=*/true);
    // That would clear all new memory.
    context.setDeterministicFillUninitializedMemory(false);
}

extern "C" bool baton_is_deterministic() {
    const auto &context = at::globalContext();
    return context.deterministicCuDNN() && !context.userEnabledFlashSDP() && !context.userEnabledMemEfficientSDP() &&
           !context.userEnabledCuDNNSDP();
}
