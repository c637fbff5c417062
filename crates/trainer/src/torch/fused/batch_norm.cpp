// BatchNorm with what follows it as one operation that autograd knows. tch has no operations of one's own,
// hence the only C++ of this crate. It allocates and keeps what the gradient needs; the arithmetic is
// Rust's, which is called back (mod.rs). It links libtorch_cpu and libc10, whatever the device.

#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- Declared alike in mod.rs ---------------------------------------------------------------------

struct Shape {
    int64_t rows;
    int64_t channels;
    // Bytes and kind of a value: 0 f32, 1 bf16, 2 f16.
    int32_t element;
};

struct Forward {
    Shape shape;
    const void *x;
    const void *residual;
    void *y;
    const void *scale;
    const void *shift;
    void *mean;
    void *inverse_deviation;
    void *batch_mean;
    void *batch_variance;
    void *workspace;
    float epsilon;
    int32_t relu;
};

struct Backward {
    Shape shape;
    const void *x;
    const void *y;
    const void *scale;
    const void *shift;
    const void *mean;
    const void *inverse_deviation;
    const void *y_gradient;
    void *x_gradient;
    void *residual_gradient;
    void *scale_gradient;
    void *shift_gradient;
    void *workspace;
    int32_t relu;
};

// Where a message goes that says what failed.
struct Message {
    char *text;
    size_t len;
};

// Lives as long as the process.
struct Kernels {
    const void *place;
    // f32 values.
    int64_t (*workspace)(const Shape *);
    // False: failed.
    bool (*forward)(const void *place, const Forward *, Message);
    bool (*backward)(const void *place, const Backward *, Message);
};

// What is not a tensor.
struct Options {
    const Kernels *kernels;
    float epsilon;
    bool relu;
};

// --------------------------------------------------------------------------------------------------

Shape shape_of(const Tensor &x) {
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

// Nothing is copied if it lies so already.
Tensor channels_last(const Tensor &x) { return x.contiguous(at::MemoryFormat::ChannelsLast); }

Tensor floats(int64_t len, const Tensor &beside) {
    return at::empty({len}, beside.options().dtype(at::kFloat).requires_grad(false));
}

// `text` of the one who is called back becomes an exception, which autograd carries to where it began.
template <class Call>
void call(bool (*run)(const void *, const Call *, Message), const Kernels &kernels, const Call &call) {
    char text[512] = "";
    TORCH_CHECK(run(kernels.place, &call, {text, sizeof text}), text);
}

struct BatchNorm : torch::autograd::Function<BatchNorm> {
    static Tensor forward(AutogradContext *context, const Tensor &x_somehow,
                          const std::optional<Tensor> &residual_somehow, const Tensor &scale,
                          const Tensor &shift, void *batch_mean, void *batch_variance,
                          const Options &options) {
        const Shape shape = shape_of(x_somehow);
        const Tensor x = channels_last(x_somehow);
        const bool has_residual = residual_somehow.has_value();
        const Tensor residual = has_residual ? channels_last(*residual_somehow) : Tensor();
        TORCH_CHECK(!has_residual || (residual.sizes() == x.sizes() && residual.dtype() == x.dtype()),
                    "fused BatchNorm adds only what has its input's shape and type");
        TORCH_CHECK(scale.numel() == shape.channels && scale.scalar_type() == at::kFloat &&
                        shift.numel() == shape.channels && shift.scalar_type() == at::kFloat,
                    "fused BatchNorm has one f32 of each parameter for each channel");
        const Tensor y = at::empty_like(x);
        const Tensor mean = floats(shape.channels, x), inverse = floats(shape.channels, x);
        const Tensor workspace = floats(options.kernels->workspace(&shape), x);
        const Forward told = {
            shape,
            x.const_data_ptr(),
            has_residual ? residual.const_data_ptr() : nullptr,
            y.data_ptr(),
            scale.const_data_ptr(),
            shift.const_data_ptr(),
            mean.data_ptr(),
            inverse.data_ptr(),
            batch_mean,
            batch_variance,
            workspace.data_ptr(),
            options.epsilon,
            options.relu,
        };
        call(options.kernels->forward, *options.kernels, told);
        // What the ReLU let pass shows in x alone, unless something was added to it.
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
        const Shape shape = shape_of(x);
        const Tensor x_gradient = at::empty_like(x);
        const Tensor residual_gradient = has_residual ? at::empty_like(x) : Tensor();
        const Tensor scale_gradient = floats(shape.channels, x);
        const Tensor shift_gradient = floats(shape.channels, x);
        const Tensor workspace = floats(kernels.workspace(&shape), x);
        const Backward told = {
            shape,
            x.const_data_ptr(),
            y.defined() ? y.const_data_ptr() : nullptr,
            saved[1].const_data_ptr(),
            saved[2].const_data_ptr(),
            saved[3].const_data_ptr(),
            saved[4].const_data_ptr(),
            y_gradient.const_data_ptr(),
            x_gradient.data_ptr(),
            has_residual ? residual_gradient.data_ptr() : nullptr,
            scale_gradient.data_ptr(),
            shift_gradient.data_ptr(),
            workspace.data_ptr(),
            context->saved_data["relu"].toBool(),
        };
        call(kernels.backward, kernels, told);
        // One for each argument of `forward`.
        return {x_gradient, residual_gradient, scale_gradient, shift_gradient,
                Tensor(),   Tensor(),          Tensor()};
    }
};

} // namespace

// y, which the caller owns; null, and what failed in `message`. `residual` may be null. Statistics are
// written to the tensors' memory unseen by autograd, which watches the buffer that they are views of.
extern "C" Tensor *baton_batch_norm(const Kernels *kernels, const Tensor *x, const Tensor *residual,
                                    const Tensor *scale, const Tensor *shift,
                                    const Tensor *batch_mean, const Tensor *batch_variance,
                                    float epsilon, bool relu, Message message) {
    try {
        std::optional<Tensor> added;
        if (residual) added = *residual;
        return new Tensor(BatchNorm::apply(*x, added, *scale, *shift, batch_mean->data_ptr(),
                                           batch_variance->data_ptr(),
                                           Options{kernels, epsilon, relu}));
    } catch (const std::exception &error) {
        std::strncpy(message.text, error.what(), message.len - 1);
    } catch (...) {
        std::strncpy(message.text, "unknown exception", message.len - 1);
    }
    return nullptr;
}
