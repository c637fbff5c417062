// Dropout whose choice depends on a seed alone.

#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>

namespace {

// Buffer for an error message; error_text.rs has the same declaration.
struct Message {
    char *text;
    size_t len;
};

} // namespace

// A new tensor like `input`: 0 with the probability `share`, else 1 / (1 - share). Null, with a message, if it fails.
extern "C" at::Tensor *baton_dropout_mask(const at::Tensor *input, double share, uint64_t seed, Message message) {
    try {
        at::NoGradGuard no_gradient;
        // Threads share the generator of the process, so masks are made one at a time.
        static std::mutex turn;
        std::lock_guard<std::mutex> guard(turn);
        auto generator = at::globalContext().defaultGenerator(input->device());
        {
            std::lock_guard<std::mutex> lock(generator.mutex());
            generator.set_current_seed(seed);
        }
        auto mask = at::empty_like(*input);
        mask.bernoulli_(1.0 - share, generator).div_(1.0 - share);
        return new at::Tensor(std::move(mask));
    } catch (const std::exception &error) {
        std::strncpy(message.text, error.what(), message.len - 1);
        return nullptr;
    }
}
