// Settings of the process that tch does not have.

#include <ATen/Context.h>

// Whether cuDNN may only use algorithms that give the same bits each time.
extern "C" void baton_set_cudnn_deterministic(bool deterministic) {
    at::globalContext().setDeterministicCuDNN(deterministic);
}

extern "C" bool baton_cudnn_is_deterministic() { return at::globalContext().deterministicCuDNN(); }
