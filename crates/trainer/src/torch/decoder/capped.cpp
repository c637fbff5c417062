// Attention with capped scores (Gemma 2), which libtorch's attention cannot compute.

#include "../error_text.h"

#include <limits>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/softmax.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor attend(const Tensor &queries, const Tensor &keys, const Tensor &values, const Tensor &hidden, double scale,
              double cap) {
    auto scores = queries.matmul(keys.transpose(2, 3)).mul(scale);
    scores = scores.div(cap).tanh().mul(cap);
    scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
    return at::softmax(scores, -1, at::kFloat).to(values.scalar_type()).matmul(values);
}

// Keeps queries, keys and values only.
struct CappedAttention : torch::autograd::Function<CappedAttention> {
    static Tensor forward(AutogradContext *context, const Tensor &queries, const Tensor &keys, const Tensor &values,
                          const Tensor &hidden, double scale, double cap) {
        context->save_for_backward({queries, keys, values, hidden});
        context->saved_data["scale"] = scale;
        context->saved_data["cap"] = cap;
        return attend(queries, keys, values, hidden, scale, cap);
    }

    static variable_list backward(AutogradContext *context, variable_list gradients) {
        const auto saved = context->get_saved_variables();
        variable_list leaves, wanted;
        for (size_t i = 0; i < 3; ++i) {
            leaves.push_back(saved[i].detach().requires_grad_(saved[i].requires_grad()));
            if (leaves[i].requires_grad()) wanted.push_back(leaves[i]);
        }
        at::AutoGradMode gradient(true);
        const double scale = context->saved_data["scale"].toDouble(), cap = context->saved_data["cap"].toDouble();
        const auto output = attend(leaves[0], leaves[1], leaves[2], saved[3], scale, cap);
        const auto computed = torch::autograd::grad({output}, wanted, {gradients[0]});
        // One gradient for each argument of `forward`.
        variable_list result(6);
        for (size_t i = 0, next = 0; i < leaves.size(); ++i) {
            if (leaves[i].requires_grad()) result[i] = computed[next++];
        }
        return result;
    }
};

} // namespace

// Null, with a message, if it fails. `inputs` are queries, keys, values, and which scores are hidden.
extern "C" at::Tensor *baton_capped_attention(const at::Tensor *const *inputs, double scale, double cap,
                                              baton::Message message) {
    at::Tensor *result = nullptr;
    baton::without_exceptions(message, [&] {
        result = new at::Tensor(CappedAttention::apply(*inputs[0], *inputs[1], *inputs[2], *inputs[3], scale, cap));
    });
    return result;
}
