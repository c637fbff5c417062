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

extern "C" bool baton_is_deterministic() {
    const auto &context = at::globalContext();
    return context.deterministicCuDNN() && !context.userEnabledFlashSDP() && !context.userEnabledMemEfficientSDP() &&
           !context.userEnabledCuDNNSDP();
}
