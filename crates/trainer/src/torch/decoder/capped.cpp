// Attention with capped scores (Gemma 2), which libtorch's attention cannot compute.

#include "../error_text.h"

#include <limits>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/softmax.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace baton {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What each query takes of each value.
at::Tensor shares(const at::Tensor &queries, const at::Tensor &keys, const at::Tensor &hidden, double scale,
                  double cap) {
    auto scores = queries.matmul(keys.transpose(1, 2)).mul(scale);
    scores = scores.div(cap).tanh().mul(cap);
    scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
    return at::softmax(scores, -1, at::kFloat).to(queries.scalar_type());
}

// Keeps its inputs only.
struct CappedAttention : torch::autograd::Function<CappedAttention> {
    static at::Tensor forward(AutogradContext *context, const at::Tensor &queries, const at::Tensor &keys,
                              const at::Tensor &values, const at::Tensor &hidden, double scale, double cap) {
        context->save_for_backward({queries, keys, values, hidden});
        context->saved_data["scale"] = scale;
        context->saved_data["cap"] = cap;
        return shares(queries, keys, hidden, scale, cap).matmul(values);
    }

    static variable_list backward(AutogradContext *context, variable_list gradients) {
        const auto saved = context->get_saved_variables();
        const auto &values = saved[2], &output_gradient = gradients[0];
        const double scale = context->saved_data["scale"].toDouble(), cap = context->saved_data["cap"].toDouble();
        variable_list leaves, wanted;
        for (size_t i = 0; i < 2; ++i) {
            leaves.push_back(saved[i].detach().requires_grad_(saved[i].requires_grad()));
            if (leaves[i].requires_grad()) wanted.push_back(leaves[i]);
        }
        at::Tensor weights;
        {
            at::AutoGradMode gradient(true);
            weights = shares(leaves[0], leaves[1], saved[3], scale, cap);
        }
        // One gradient for each argument of `forward`.
        variable_list result(6);
        if (values.requires_grad()) result[2] = weights.detach().transpose(1, 2).matmul(output_gradient);
        if (wanted.empty()) return result;
        const auto computed =
            torch::autograd::grad({weights}, wanted, {output_gradient.matmul(values.transpose(1, 2))});
        for (size_t i = 0, next = 0; i < leaves.size(); ++i) {
            if (leaves[i].requires_grad()) result[i] = computed[next++];
        }
        return result;
    }
};

} // namespace
} // namespace baton

// Null, with a message, if it fails. `inputs` are queries, keys, values, and which scores are hidden.
extern "C" at::Tensor *baton_capped_attention(const at::Tensor *const *inputs, double scale, double cap,
                                              baton::Message message) {
    at::Tensor *result = nullptr;
    baton::without_exceptions(message, [&] {
        result = new at::Tensor(
            baton::CappedAttention::apply(*inputs[0], *inputs[1], *inputs[2], *inputs[3], scale, cap));
    });
    return result;
}
