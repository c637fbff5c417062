// Dropout whose choice depends on a seed alone.

#include "../error_text.h"

#include <cstdint>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

// Which values of a tensor like `input` stay: false with the probability `share`. Null, with a message, if it fails.
extern "C" at::Tensor *baton_dropout_mask(const at::Tensor *input, double share, uint64_t seed, baton::Message message) {
    at::Tensor *result = nullptr;
    baton::without_exceptions(message, [&] {
        at::NoGradGuard no_gradient;
        // Threads share the generator of the process, so masks are made one at a time.
        static std::mutex turn;
        std::lock_guard<std::mutex> guard(turn);
        auto generator = at::globalContext().defaultGenerator(input->device());
        {
            std::lock_guard<std::mutex> lock(generator.mutex());
            generator.set_current_seed(seed);
        }
        auto mask = at::empty_like(*input, input->options().dtype(at::kBool));
        mask.bernoulli_(1.0 - share, generator);
        result = new at::Tensor(std::move(mask));
    });
    return result;
}
