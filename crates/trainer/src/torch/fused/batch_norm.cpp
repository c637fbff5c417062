// BatchNorm with the operations after it as one operation with a gradient for autograd. tch cannot define custom
// operations. It allocates and keeps what the gradient needs; it calls back
// into Rust for the arithmetic (mod.rs). It links libtorch_cpu and libc10 for every device.

#include "../error_text.h"

#include <cstdint>
#include <optional>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

namespace {

using at::Tensor;
using baton::Message;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace kernel {
#include "batch_norm.h"
}

// --- The same declarations are in mod.rs ----------------------------------------------------------

// Callbacks into Rust; never freed.
struct Kernels {
    // First argument of the callbacks.
    const void *address;
    // Size of the workspace in f32 values.
    int64_t (*workspace)(const kernel::Shape *);
    // Return false if they failed.
    bool (*forward)(const void *address, const kernel::BatchNorm *, Message);
    bool (*backward)(const void *address, const kernel::BatchNorm *, Message);
};

// Arguments other than tensors.
struct Options {
    const Kernels *kernels;
    float epsilon;
    bool relu;
};

// --------------------------------------------------------------------------------------------------

kernel::Shape shape_of(const Tensor &x) {
    TORCH_CHECK(x.dim() == 4, "fused BatchNorm takes images, not ", x.dim(), " dimensions");
    int32_t element = 0;
    switch (x.scalar_type()) {
    case at::kFloat: element = 0; break;
    case at::kBFloat16: element = 1; break;
    case at::kHalf: element = 2; break;
    default: TORCH_CHECK(false, "fused BatchNorm does not take ", x.scalar_type());
    }
    return {x.size(0) * x.size(2) * x.size(3), x.size(1), element};
}

// Copies only if the memory format is different.
Tensor channels_last(const Tensor &x) { return x.contiguous(at::MemoryFormat::ChannelsLast); }

Tensor floats(int64_t len, const Tensor &like) {
    return at::empty({len}, like.options().dtype(at::kFloat).requires_grad(false));
}

// Calls back into Rust. A failure becomes an exception with the message, which autograd passes to its caller.
void call(bool (*run)(const void *, const kernel::BatchNorm *, Message), const Kernels &kernels,
          const kernel::BatchNorm &arguments) {
    char text[512] = "";
    TORCH_CHECK(run(kernels.address, &arguments, {text, sizeof text}), text);
}

struct BatchNorm : torch::autograd::Function<BatchNorm> {
    static Tensor forward(AutogradContext *context, const Tensor &x_any_format,
                          const std::optional<Tensor> &residual_any_format, const Tensor &scale,
                          const Tensor &shift, void *batch_mean, void *batch_variance,
                          const Options &options) {
        const kernel::Shape shape = shape_of(x_any_format);
        const Tensor x = channels_last(x_any_format);
        const bool has_residual = residual_any_format.has_value();
        const Tensor residual = has_residual ? channels_last(*residual_any_format) : Tensor();
        TORCH_CHECK(!has_residual || (residual.sizes() == x.sizes() && residual.dtype() == x.dtype()),
                    "fused BatchNorm can add only a tensor of its input's shape and type");
        TORCH_CHECK(scale.numel() == shape.channels && scale.scalar_type() == at::kFloat &&
                        shift.numel() == shape.channels && shift.scalar_type() == at::kFloat,
                    "fused BatchNorm needs one f32 of each parameter for each channel");
        const Tensor y = at::empty_like(x);
        const Tensor mean = floats(shape.channels, x), inverse = floats(shape.channels, x);
        const Tensor workspace = floats(options.kernels->workspace(&shape), x);
        kernel::BatchNorm arguments = {};
        arguments.shape = shape;
        arguments.x = x.const_data_ptr();
        arguments.residual = has_residual ? residual.const_data_ptr() : nullptr;
        arguments.y = y.data_ptr();
        arguments.scale = scale.const_data_ptr<float>();
        arguments.shift = shift.const_data_ptr<float>();
        arguments.mean = mean.data_ptr<float>();
        arguments.inverse_deviation = inverse.data_ptr<float>();
        arguments.batch_mean = static_cast<float *>(batch_mean);
        arguments.batch_variance = static_cast<float *>(batch_variance);
        arguments.workspace = workspace.data_ptr<float>();
        arguments.epsilon = options.epsilon;
        arguments.relu = options.relu;
        call(options.kernels->forward, *options.kernels, arguments);
        // Without a residual, x alone determines where the ReLU passed values; with one, y is needed.
        const bool needs_y = options.relu && has_residual;
        context->save_for_backward({x, scale, shift, mean, inverse, needs_y ? y : Tensor()});
        context->saved_data["kernels"] = reinterpret_cast<int64_t>(options.kernels);
        context->saved_data["relu"] = options.relu;
        context->saved_data["residual"] = has_residual;
        return y;
    }

    static variable_list backward(AutogradContext *context, variable_list gradients) {
        const variable_list saved = context->get_saved_variables();
        const Tensor &x = saved[0], &y = saved[5];
        const Kernels &kernels =
            *reinterpret_cast<const Kernels *>(context->saved_data["kernels"].toInt());
        const bool has_residual = context->saved_data["residual"].toBool();
        const Tensor y_gradient = channels_last(gradients[0]);
        const kernel::Shape shape = shape_of(x);
        const Tensor x_gradient = at::empty_like(x);
        const Tensor residual_gradient = has_residual ? at::empty_like(x) : Tensor();
        const Tensor scale_gradient = floats(shape.channels, x);
        const Tensor shift_gradient = floats(shape.channels, x);
        const Tensor workspace = floats(kernels.workspace(&shape), x);
        kernel::BatchNorm arguments = {};
        arguments.shape = shape;
        arguments.x = x.const_data_ptr();
        arguments.y = y.defined() ? y.data_ptr() : nullptr;
        arguments.scale = saved[1].const_data_ptr<float>();
        arguments.shift = saved[2].const_data_ptr<float>();
        arguments.mean = saved[3].data_ptr<float>();
        arguments.inverse_deviation = saved[4].data_ptr<float>();
        arguments.y_gradient = y_gradient.const_data_ptr();
        arguments.x_gradient = x_gradient.data_ptr();
        arguments.residual_gradient = has_residual ? residual_gradient.data_ptr() : nullptr;
        arguments.scale_gradient = scale_gradient.data_ptr<float>();
        arguments.shift_gradient = shift_gradient.data_ptr<float>();
        arguments.workspace = workspace.data_ptr<float>();
        arguments.relu = context->saved_data["relu"].toBool();
        call(kernels.backward, kernels, arguments);
        // One gradient for each argument of `forward`.
        return {x_gradient, residual_gradient, scale_gradient, shift_gradient,
                Tensor(),   Tensor(),          Tensor()};
    }
};

} // namespace

// Returns y, which the caller owns, or null with the error in `message`. `residual` may be null. The statistics are
// written to the tensors' memory without autograd's knowledge; it tracks changes of the buffer that they are views of.
extern "C" Tensor *baton_batch_norm(const Kernels *kernels, const Tensor *x, const Tensor *residual,
                                    const Tensor *scale, const Tensor *shift,
                                    const Tensor *batch_mean, const Tensor *batch_variance,
                                    float epsilon, bool relu, Message message) {
    Tensor *y = nullptr;
    baton::without_exceptions(message, [&] {
        std::optional<Tensor> added;
        if (residual) added = *residual;
        y = new Tensor(BatchNorm::apply(*x, added, *scale, *shift, batch_mean->data_ptr(),
                                        batch_variance->data_ptr(),
                                        Options{kernels, epsilon, relu}));
    });
    return y;
}
