// What executor.cpp and recompute.cpp share: a graph prepared for libtorch, and the values of one run.
#pragma once

#include "../error_text.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace baton {

using at::Tensor;
using c10::IValue;

// --- The same declarations are in executor.rs -----------------------------------------------------

// Where a result is kept. `element` is its index in a list, or -1.
struct Result {
    uint32_t returned;
    int32_t element;
    uint32_t value;
};

// How a node runs.
struct Run {
    // For operators that draw random numbers.
    uint64_t seed;
    bool has_gradient;
    // Number format of autocast as a c10::ScalarType; -1: no autocast.
    int32_t autocast;
};

// --------------------------------------------------------------------------------------------------

// An argument: a constant, a value, or a list of arguments that contains values.
struct Argument {
    IValue constant;
    std::optional<uint32_t> value;
    std::optional<std::vector<Argument>> items;
};

// An argument that has to be made for each call.
struct Slot {
    size_t position;
    Argument argument;
    c10::TypePtr type;
};

struct GraphNode {
    std::optional<c10::OperatorHandle> op;
    // Arithmetic of sizes, if `op` is absent.
    std::string arithmetic;
    bool is_random = false;
    std::vector<IValue> arguments;
    std::vector<Slot> slots;
    std::vector<Result> results;
    std::vector<uint32_t> last_uses;
};

struct Graph {
    at::Device device;
    std::vector<GraphNode> nodes;
    // Arguments under construction; a list takes the last ones.
    std::vector<Argument> pushed;
    std::vector<std::pair<std::string, Argument>> named;
};

struct Values {
    std::vector<IValue> values;
};

// Runs one node.
void run(const Graph &graph, const GraphNode &node, Values &values, const Run &how);

} // namespace baton
