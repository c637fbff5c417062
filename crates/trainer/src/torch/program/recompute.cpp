// Runs consecutive nodes without keeping their activations, which the backward pass computes again (Chen et al. 2016).
// To autograd such a span is one operator.

#include "executor.h"

#include <memory>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace baton {

// --- The same declaration is in executor.rs -------------------------------------------------------

// Consecutive nodes, and the values that go into and come out of them.
struct Span {
    size_t first, end;
    const uint32_t *inputs;
    size_t inputs_len;
    const uint32_t *outputs;
    size_t outputs_len;
    // Inputs that BatchNorm writes to.
    const uint32_t *statistics;
    size_t statistics_len;
};

// --------------------------------------------------------------------------------------------------

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

void run_span(const Graph &graph, size_t first, const std::vector<Run> &how, Values &values) {
    // Autocast keeps casts of weights; those of a pass without gradient have no history.
    at::autocast::clear_cache();
    for (size_t i = 0; i < how.size(); ++i) run(graph, graph.nodes.at(first + i), values, how[i]);
    at::autocast::clear_cache();
}

// The gradient of a span.
struct SpanBackward : torch::autograd::Node {
    const Graph *graph = nullptr;
    size_t first = 0;
    std::vector<Run> how;
    // Values that are no tensors, such as sizes.
    std::vector<std::pair<uint32_t, IValue>> constants;
    // What BatchNorm writes to, or reads if it is frozen. It has no gradient.
    std::vector<std::pair<uint32_t, Tensor>> statistics;
    std::vector<std::pair<uint32_t, SavedVariable>> tensors;
    std::vector<uint32_t> outputs;

    variable_list apply(variable_list &&gradients) override {
        at::AutoGradMode gradient(true);
        Values values{std::vector<IValue>(total)};
        for (const auto &[value, constant] : constants) values.values.at(value) = constant;
        // The first pass has stored the batch's statistics already.
        for (const auto &[value, tensor] : statistics) values.values.at(value) = tensor.clone();
        variable_list leaves;
        for (auto &[value, saved] : tensors) {
            auto given = saved.unpack();
            auto leaf = given.detach();
            leaf.set_requires_grad(given.requires_grad());
            values.values.at(value) = leaf;
            leaves.push_back(leaf);
        }
        run_span(*graph, first, how, values);

        variable_list ends, upstream, wanted;
        for (size_t i = 0; i < outputs.size(); ++i) {
            const auto &end = values.values.at(outputs[i]).toTensor();
            if (!gradients[i].defined() || !end.requires_grad()) continue;
            ends.push_back(end);
            upstream.push_back(gradients[i]);
        }
        for (const auto &leaf : leaves) {
            if (leaf.requires_grad()) wanted.push_back(leaf);
        }
        variable_list result(leaves.size());
        if (ends.empty() || wanted.empty()) return result;
        auto computed = torch::autograd::grad(ends, wanted, upstream, false, false, true);
        for (size_t i = 0, next = 0; i < leaves.size(); ++i) {
            if (leaves[i].requires_grad()) result[i] = computed[next++];
        }
        return result;
    }

    void release_variables() override {
        for (auto &[value, saved] : tensors) saved.reset_data();
    }

    // Number of the graph's values.
    size_t total = 0;
};

bool contains(const uint32_t *all, size_t len, uint32_t value) {
    for (size_t i = 0; i < len; ++i) {
        if (all[i] == value) return true;
    }
    return false;
}

void run_recomputed(const Graph &graph, const Span &span, Values &values, const std::vector<Run> &how) {
    auto node = std::shared_ptr<SpanBackward>(new SpanBackward(), torch::autograd::deleteNode);
    node->graph = &graph;
    node->first = span.first;
    node->how = how;
    node->total = values.values.size();
    Values inner{std::vector<IValue>(values.values.size())};
    variable_list given;
    for (size_t i = 0; i < span.inputs_len; ++i) {
        auto index = span.inputs[i];
        const auto &value = values.values.at(index);
        inner.values.at(index) = value;
        if (!value.isTensor()) {
            node->constants.emplace_back(index, value);
        } else if (contains(span.statistics, span.statistics_len, index)) {
            node->statistics.emplace_back(index, value.toTensor());
        } else {
            node->tensors.emplace_back(index, SavedVariable(value.toTensor(), false));
            given.push_back(value.toTensor());
        }
    }
    std::vector<uint32_t> versions;
    for (const auto &tensor : given) versions.push_back(static_cast<uint32_t>(tensor._version()));
    {
        at::AutoGradMode gradient(false);
        std::vector<Run> without(how);
        for (auto &each : without) each.has_gradient = false;
        run_span(graph, span.first, without, inner);
    }
    // The two errors below begin with the key of the recipe, by which program/mod.rs knows them.
    for (size_t i = 0; i < given.size(); ++i) {
        TORCH_CHECK(given[i]._version() == versions[i],
                    "train.recompute: this part changes its own input, and cannot be computed again: name a larger module");
    }

    node->set_next_edges(torch::autograd::collect_next_edges(given));
    std::vector<Tensor> others(given);
    for (const auto &[value, tensor] : node->statistics) others.push_back(tensor);
    for (size_t i = 0; i < span.outputs_len; ++i) {
        const auto &output = inner.values.at(span.outputs[i]);
        if (!output.isTensor()) {
            // A size, which has no gradient.
            values.values.at(span.outputs[i]) = output;
            continue;
        }
        auto tensor = output.toTensor().variable_data();
        // Autograd could not see that a later operator changes both, and a copy would not be changed with it.
        for (const auto &other : others) {
            TORCH_CHECK(!tensor.is_alias_of(other),
                        "train.recompute: this part returns a view of its input or two views: name a larger module");
        }
        others.push_back(tensor);
        if (torch::autograd::isDifferentiableType(tensor.scalar_type())) {
            torch::autograd::set_history(tensor, node);
        } else {
            node->add_input_metadata(torch::autograd::Node::undefined_input());
        }
        node->outputs.push_back(span.outputs[i]);
        values.values.at(span.outputs[i]) = tensor;
    }
    for (size_t i = span.first; i < span.end; ++i) {
        for (auto value : graph.nodes.at(i).last_uses) values.values.at(value) = IValue();
    }
}

} // namespace
} // namespace baton

using namespace baton;

extern "C" bool baton_graph_run_recomputed(const Graph *graph, Span span, Values *values, const Run *how,
                                           Message message) {
    return without_exceptions(message, [&] {
        run_recomputed(*graph, span, *values, std::vector<Run>(how, how + (span.end - span.first)));
    });
}
