// Calls ATen operators by name through libtorch's dispatcher, with autograd and autocast. Rust (executor.rs) describes the
// calls once; constant arguments are converted and operators are looked up then.

#include "executor.h"

#include <cmath>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>

namespace baton {
namespace {

c10::TypePtr without_optional(const c10::TypePtr &type) {
    auto optional = type->cast<c10::OptionalType>();
    return optional ? optional->getElementType() : type;
}

template <typename T, typename Read> IValue typed_list(const std::vector<IValue> &items, Read read) {
    c10::List<T> list;
    list.reserve(items.size());
    for (const auto &item : items) list.push_back(read(item));
    return list;
}

double number(const IValue &value) {
    return value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
}

// A list of the type that the operator's schema wants.
IValue list_of(const std::vector<IValue> &items, const c10::TypePtr &element) {
    switch (element->kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
        return typed_list<int64_t>(items, [](const IValue &item) { return item.toInt(); });
    case c10::TypeKind::FloatType: return typed_list<double>(items, number);
    case c10::TypeKind::BoolType:
        return typed_list<bool>(items, [](const IValue &item) { return item.toBool(); });
    case c10::TypeKind::TensorType:
        return typed_list<Tensor>(items, [](const IValue &item) { return item.toTensor(); });
    case c10::TypeKind::NumberType:
        return typed_list<at::Scalar>(items, [](const IValue &item) { return item.toScalar(); });
    case c10::TypeKind::OptionalType:
        return typed_list<std::optional<Tensor>>(
            items, [](const IValue &item) { return item.toOptional<Tensor>(); });
    default: TORCH_CHECK(false, "a list of ", element->str(), " is not supported"); return {};
    }
}

IValue converted(const IValue &value, const c10::TypePtr &type) {
    if (value.isInt() && type->kind() == c10::TypeKind::FloatType) return number(value);
    // As Python does for `x * 0.5`: a tensor that does not take part in the choice of the result's type.
    if (value.isScalar() && type->kind() == c10::TypeKind::TensorType) {
        return at::native::wrapped_scalar_tensor(value.toScalar());
    }
    return value;
}

IValue made(const Argument &argument, const c10::TypePtr &type, const std::vector<IValue> &values) {
    if (argument.value) return converted(values.at(*argument.value), type);
    if (!argument.items) return converted(argument.constant, type);
    auto list = type->cast<c10::ListType>();
    TORCH_CHECK(list, "is a list, not ", type->str());
    std::vector<IValue> items;
    items.reserve(argument.items->size());
    for (const auto &item : *argument.items) {
        items.push_back(made(item, without_optional(list->getElementType()), values));
    }
    return list_of(items, list->getElementType());
}

bool has_values(const Argument &argument) {
    if (argument.value) return true;
    if (!argument.items) return false;
    for (const auto &item : *argument.items) {
        if (has_values(item)) return true;
    }
    return false;
}

// Fills in the arguments of an operator.
void bind(GraphNode &node, std::vector<std::pair<std::string, Argument>> named) {
    const auto &schema = node.op->schema();
    const auto &arguments = schema.arguments();
    std::vector<bool> is_given(arguments.size());
    node.arguments.resize(arguments.size());
    for (size_t i = 0; i < named.size(); ++i) {
        auto &[name, argument] = named[i];
        auto index = schema.argumentIndexWithName(name);
        auto position = static_cast<size_t>(index.value_or(static_cast<int>(i)));
        TORCH_CHECK(position < arguments.size() && !is_given[position], "has an argument too many: ", name);
        is_given[position] = true;
        auto type = without_optional(arguments[position].real_type());
        // One number for all axes.
        if (auto list = type->cast<c10::ListType>(); list && !argument.items && !argument.value &&
                                                     !argument.constant.isNone() && arguments[position].N()) {
            argument.items = std::vector<Argument>(*arguments[position].N(), argument);
        }
        if (has_values(argument)) {
            node.slots.push_back({position, std::move(argument), type});
        } else {
            node.arguments[position] = made(argument, type, {});
        }
    }
    for (size_t position = 0; position < arguments.size(); ++position) {
        if (is_given[position]) continue;
        const auto &absent = arguments[position].default_value();
        TORCH_CHECK(absent, "lacks the argument ", arguments[position].name());
        node.arguments[position] = *absent;
    }
}

// Operators that draw random numbers: PyTorch tags them, but for recurrent layers.
bool draws(const c10::OperatorHandle &op) {
    const auto &name = op.schema().name();
    if (op.hasTag(at::Tag::nondeterministic_seeded)) return true;
    return name == "aten::lstm" || name == "aten::gru" || name == "aten::rnn_tanh" || name == "aten::rnn_relu";
}

int64_t floor_division(int64_t a, int64_t b) {
    TORCH_CHECK(b != 0, "division of a size by zero");
    int64_t quotient = a / b;
    return (a % b != 0 && (a < 0) != (b < 0)) ? quotient - 1 : quotient;
}

// Python's arithmetic, on whole numbers where both are.
IValue arithmetic(const std::string &name, const std::vector<IValue> &arguments) {
    TORCH_CHECK(!arguments.empty(), name, " has no argument");
    const auto &first = arguments.front();
    if (name == "neg") return first.isInt() ? IValue(-first.toInt()) : IValue(-number(first));
    if (name == "pos") return first;
    TORCH_CHECK(arguments.size() == 2, name, " takes two numbers");
    auto compute = [&](auto a, auto b) -> IValue {
        if (name == "add") return a + b;
        if (name == "sub") return a - b;
        if (name == "mul") return a * b;
        if (name == "eq") return a == b;
        if (name == "ne") return a != b;
        if (name == "lt") return a < b;
        if (name == "le") return a <= b;
        if (name == "gt") return a > b;
        if (name == "ge") return a >= b;
        if (name == "sym_max") return a < b ? b : a;
        if (name == "sym_min") return b < a ? b : a;
        TORCH_CHECK(false, name, " of sizes is not supported");
    };
    const auto &second = arguments.back();
    if (first.isInt() && second.isInt()) {
        int64_t a = first.toInt(), b = second.toInt();
        if (name == "floordiv") return floor_division(a, b);
        if (name == "mod") return a - floor_division(a, b) * b;
        if (name == "pow" && b >= 0) {
            int64_t power = 1;
            for (int64_t i = 0; i < b; ++i) power *= a;
            return power;
        }
        if (name == "truediv") return static_cast<double>(a) / static_cast<double>(b);
        return compute(a, b);
    }
    double a = number(first), b = number(second);
    if (name == "truediv") return a / b;
    if (name == "floordiv") return std::floor(a / b);
    if (name == "pow") return std::pow(a, b);
    return compute(a, b);
}

// Autocast for one call.
struct Autocast {
    at::DeviceType device;
    bool was_enabled;
    at::ScalarType before;

    Autocast(at::DeviceType device, int32_t format)
        : device(device), was_enabled(at::autocast::is_autocast_enabled(device)),
          before(at::autocast::get_autocast_dtype(device)) {
        at::autocast::set_autocast_enabled(device, format >= 0);
        if (format >= 0) at::autocast::set_autocast_dtype(device, static_cast<at::ScalarType>(format));
    }
    ~Autocast() {
        at::autocast::set_autocast_enabled(device, was_enabled);
        at::autocast::set_autocast_dtype(device, before);
    }
};

void call(const GraphNode &node, at::Device device, uint64_t seed, std::vector<IValue> &stack) {
    if (!node.is_random) return node.op->callBoxed(&stack);
    // All such operators use the generator of the process, so they run one at a time.
    static std::mutex turn;
    std::lock_guard<std::mutex> guard(turn);
    auto generator = at::globalContext().defaultGenerator(device);
    {
        std::lock_guard<std::mutex> lock(generator.mutex());
        generator.set_current_seed(seed);
    }
    node.op->callBoxed(&stack);
}

} // namespace

void run(const Graph &graph, const GraphNode &node, Values &values, const Run &how) {
    at::AutoGradMode gradient(how.has_gradient);
    Autocast autocast(graph.device.type(), how.autocast);
    std::vector<IValue> stack = node.arguments;
    for (const auto &slot : node.slots) stack[slot.position] = made(slot.argument, slot.type, values.values);
    if (node.op) {
        call(node, graph.device, how.seed, stack);
    } else {
        stack = {arithmetic(node.arithmetic, stack)};
    }
    for (const auto &result : node.results) {
        auto &returned = stack.at(result.returned);
        auto &value = values.values.at(result.value);
        value = result.element < 0 ? returned : returned.toListRef().at(static_cast<size_t>(result.element));
    }
    for (auto value : node.last_uses) values.values.at(value) = IValue();
}

} // namespace baton

using namespace baton;

extern "C" {

Graph *baton_graph_new(bool is_gpu, int32_t ordinal) {
    auto device = is_gpu ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(ordinal)) : at::Device(at::kCPU);
    return new Graph{device, {}, {}, {}};
}

void baton_graph_free(Graph *graph) { delete graph; }

void baton_graph_push_value(Graph *graph, uint32_t value) { graph->pushed.push_back({{}, value, {}}); }
void baton_graph_push_none(Graph *graph) { graph->pushed.push_back({}); }
void baton_graph_push_int(Graph *graph, int64_t value) { graph->pushed.push_back({value, {}, {}}); }
void baton_graph_push_float(Graph *graph, double value) { graph->pushed.push_back({value, {}, {}}); }
void baton_graph_push_bool(Graph *graph, bool value) { graph->pushed.push_back({value, {}, {}}); }
void baton_graph_push_device(Graph *graph) { graph->pushed.push_back({graph->device, {}, {}}); }
void baton_graph_push_text(Graph *graph, const char *text, size_t len) {
    graph->pushed.push_back({std::string(text, len), {}, {}});
}

// The last `len` arguments become one.
void baton_graph_push_list(Graph *graph, size_t len) {
    auto first = graph->pushed.end() - static_cast<std::ptrdiff_t>(len);
    std::vector<Argument> items(first, graph->pushed.end());
    graph->pushed.erase(first, graph->pushed.end());
    graph->pushed.push_back({{}, {}, std::move(items)});
}

// The last argument is given to the next node under this name, which may be empty.
void baton_graph_name(Graph *graph, const char *name) {
    graph->named.emplace_back(name, std::move(graph->pushed.back()));
    graph->pushed.pop_back();
}

// Adds a call of an operator with the named arguments. An operator without a namespace is arithmetic of sizes.
bool baton_graph_add(Graph *graph, const char *name, const char *overload, const Result *results, size_t results_len,
                     const uint32_t *last_uses, size_t last_uses_len, Message message) {
    auto named = std::move(graph->named);
    graph->named.clear();
    return without_exceptions(message, [&] {
        GraphNode node;
        node.results.assign(results, results + results_len);
        node.last_uses.assign(last_uses, last_uses + last_uses_len);
        if (std::strstr(name, "::")) {
            auto op = c10::Dispatcher::singleton().findSchema({name, overload});
            TORCH_CHECK(op, "libtorch has no such operator");
            node.op = *op;
            node.is_random = draws(*op);
            bind(node, std::move(named));
            for (const auto &result : node.results) {
                TORCH_CHECK(result.returned < op->schema().returns().size(), "returns fewer results");
            }
        } else {
            node.arithmetic = name;
            node.arguments.resize(named.size());
            for (size_t i = 0; i < named.size(); ++i) {
                node.slots.push_back({i, std::move(named[i].second), c10::AnyType::get()});
            }
        }
        graph->nodes.push_back(std::move(node));
    });
}

Values *baton_values_new(size_t len) { return new Values{std::vector<IValue>(len)}; }

void baton_values_free(Values *values) {
    delete values;
    // Weights that autocast has cast.
    at::autocast::clear_cache();
}

void baton_values_set(Values *values, uint32_t index, const Tensor *tensor) { values->values.at(index) = *tensor; }

// A new reference to the tensor at this index, which the caller owns; null if there is none. Two outputs may be one value.
Tensor *baton_values_get(const Values *values, uint32_t index) {
    const auto &value = values->values.at(index);
    return value.isTensor() ? new Tensor(value.toTensor()) : nullptr;
}

bool baton_graph_run(const Graph *graph, size_t node, Values *values, Run how, Message message) {
    return without_exceptions(message, [&] { run(*graph, graph->nodes.at(node), *values, how); });
}

// Counts the changes of a tensor and its views.
uint32_t baton_tensor_version(const Tensor *tensor) {
    return tensor->unsafeGetTensorImpl()->version_counter().current_version();
}
}
