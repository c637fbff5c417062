// libtorch's profiler: the operations of this thread and of its backward passes, and the work of GPUs.

#include <cstdint>
#include <set>

#include <torch/csrc/autograd/profiler_kineto.h>

#include "error_text.h"

namespace {

using torch::autograd::profiler::disableProfiler;
using torch::autograd::profiler::enableProfiler;
using torch::autograd::profiler::prepareProfiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

// What took place; profiler.rs has the same declaration.
struct Operation {
    const char *name;
    std::uint64_t start_unix_nanos;
    std::uint64_t nanos;
    // -1 for an operation of a thread.
    std::int32_t device;
    // Number of the thread, or of the stream.
    std::uint64_t place;
};

} // namespace

// Begins to record. Must be ended by `baton_profiler_stop` in the same thread.
extern "C" bool baton_profiler_start(bool has_gpu, baton::Message message) {
    return baton::without_exceptions(message, [&] {
        std::set<ActivityType> activities{ActivityType::CPU};
        if (has_gpu) {
            activities.insert(ActivityType::CUDA);
        }
        const ProfilerConfig config(ProfilerState::KINETO);
        prepareProfiler(config, activities);
        enableProfiler(config, activities);
    });
}

// Ends the recording, and calls `add` with `context` for each operation.
extern "C" bool baton_profiler_stop(void *context, void (*add)(void *, const Operation *), baton::Message message) {
    return baton::without_exceptions(message, [&] {
        const auto result = disableProfiler();
        for (const auto &event : result->events()) {
            const auto name = event.name();
            const bool is_gpu = event.deviceType() == c10::DeviceType::CUDA;
            const Operation operation{name.c_str(), event.startNs(), event.durationNs(),
                                      is_gpu ? event.deviceIndex() : -1,
                                      static_cast<std::uint64_t>(event.deviceResourceId())};
            add(context, &operation);
        }
    });
}
