// SPDX-License-Identifier: Apache-2.0
#include "backend/op_table.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "backend/alias.h"
#include "backend/device.h"
#include "backend/shards.h"

namespace mgpu {

namespace {

bool starts_with(const std::string& text, const char* head) { return text.rfind(head, 0) == 0; }

bool is_fused_optimizer(const std::string& name) {
  return starts_with(name, "aten::_fused_adam") || starts_with(name, "aten::_fused_sgd") ||
         starts_with(name, "aten::_fused_adagrad");
}

// Operators that torch itself calls with CPU tensors beside device tensors: indices, and lists that hold step
// counts. Operators of other libraries decide for themselves.
bool may_take_cpu_tensors(const std::string& name) {
  static const std::unordered_set<std::string> index = {"aten::index", "aten::index_put_",
                                                        "aten::_index_put_impl_", "aten::_unsafe_index",
                                                        "aten::_unsafe_index_put"};
  return index.count(name) || starts_with(name, "aten::_fused_") || starts_with(name, "aten::_foreach_") ||
         starts_with(name, "aten::_amp") || !starts_with(name, "aten::");
}

// Along `dim`, these treat each row by itself.
const std::unordered_set<std::string>& row_wise_operators() {
  static const std::unordered_set<std::string> names = {
      "aten::sum",    "aten::mean",    "aten::amax",     "aten::amin",
      "aten::any",    "aten::all",     "aten::prod",     "aten::max",
      "aten::min",    "aten::argmax",  "aten::argmin",   "aten::linalg_vector_norm",
      "aten::var",    "aten::std",     "aten::_softmax", "aten::_log_softmax",
      "aten::cumsum", "aten::cumprod", "aten::logsumexp"};
  return names;
}

// Without `dim`, one value of all elements.
const std::unordered_set<std::string>& full_reductions() {
  static const std::unordered_set<std::string> names = {"aten::sum", "aten::max", "aten::min",
                                                        "aten::any", "aten::all", "aten::prod"};
  return names;
}

// Element by element, though torch does not mark them so.
bool is_fill(const std::string& name) {
  return name == "aten::zero_" || name == "aten::fill_" || name == "aten::masked_fill_";
}

// Operators with a way of their own to be cut.
Cut cut_by_name(const std::string& name, bool in_place) {
  static const std::unordered_map<std::string, Cut> functional = {
      {"aten::index_select", Cut::kRows},    {"aten::take", Cut::kRows},
      {"aten::index", Cut::kIndex},          {"aten::masked_select", Cut::kIndex},
      {"aten::nonzero", Cut::kIndex},        {"aten::embedding_dense_backward", Cut::kScatter},
      {"aten::native_dropout", Cut::kRandom}};
  static const std::unordered_map<std::string, Cut> writing = {{"aten::index_select", Cut::kRows},
                                                               {"aten::take", Cut::kRows},
                                                               {"aten::gather", Cut::kRows},
                                                               {"aten::cat", Cut::kRows},
                                                               {"aten::mm", Cut::kRows},
                                                               {"aten::addmm", Cut::kRows},
                                                               {"aten::bmm", Cut::kRows},
                                                               {"aten::baddbmm", Cut::kRows},
                                                               {"aten::addmv", Cut::kRows},
                                                               {"aten::index", Cut::kIndex},
                                                               {"aten::masked_scatter_", Cut::kIndex},
                                                               {"aten::scatter", Cut::kScatter},
                                                               {"aten::scatter_add", Cut::kScatter},
                                                               {"aten::scatter_reduce", Cut::kScatter},
                                                               {"aten::index_add", Cut::kScatter},
                                                               {"aten::index_copy", Cut::kScatter},
                                                               {"aten::index_reduce", Cut::kScatter},
                                                               {"aten::index_fill_", Cut::kScatter},
                                                               {"aten::_index_put_impl_", Cut::kScatter}};
  const auto& names = in_place ? writing : functional;
  const auto found = names.find(name);
  return found == names.end() ? Cut::kNone : found->second;
}

// Fills with numbers of the generator, element by element.
bool is_random_fill(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::uniform_",     "aten::normal_", "aten::random_",     "aten::bernoulli_",
      "aten::exponential_", "aten::cauchy_", "aten::log_normal_", "aten::geometric_"};
  return names.count(name) > 0;
}

bool is_tensor_list(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
}

// Lists whose results are not of their operands' shape.
bool is_foreach_reduction(const std::string& name) {
  return starts_with(name, "aten::_foreach_norm") || starts_with(name, "aten::_foreach_max") ||
         starts_with(name, "aten::_foreach_powsum");
}

// add.Tensor -> add.out: the overload that takes the same arguments and, last, one output.
std::optional<c10::OperatorHandle> find_out_overload(const c10::OperatorHandle& handle) {
  static const auto* overloads = [] {
    auto* by_name = new std::unordered_multimap<std::string, c10::OperatorName>;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
      by_name->emplace(name.name, name);
    return by_name;
  }();
  const auto& wanted = handle.schema().arguments();
  auto [first, last] = overloads->equal_range(handle.operator_name().name);
  for (auto at = first; at != last; ++at) {
    auto candidate = c10::Dispatcher::singleton().findSchema(at->second);
    if (!candidate) continue;
    const auto& arguments = candidate->schema().arguments();
    if (arguments.size() != wanted.size() + 1) continue;
    const auto* alias = arguments.back().alias_info();
    if (!alias || !alias->isWrite()) continue;
    bool same = true;
    for (size_t i = 0; i < wanted.size() && same; ++i)
      same = *arguments[i].type() == *wanted[i].type() && !arguments[i].alias_info();
    if (same) return candidate;
  }
  return std::nullopt;
}

Cut cut_of(const c10::OperatorHandle& handle, const Operator& entry) {
  const auto& schema = handle.schema();
  if (const Cut cut = cut_by_name(schema.name(), entry.in_place); cut != Cut::kNone) return cut;
  if (is_random_fill(schema.name())) return Cut::kRandom;
  if (handle.hasTag(at::Tag::nondeterministic_seeded)) return Cut::kNone;
  const bool has_lists = std::any_of(schema.arguments().begin(), schema.arguments().end(), is_tensor_list);
  if (has_lists) {
    const std::string& name = schema.name();
    const bool foreach = starts_with(name, "aten::_foreach_") && !is_foreach_reduction(name);
    if ((entry.fused && name.back() == '_') || foreach) return Cut::kForeach;
    return Cut::kNone;
  }
  int64_t inputs = 0;
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    inputs += !entry.writes[i] && schema.arguments()[i].type()->isSubtypeOf(*c10::TensorType::get());
  if (inputs == 1 && entry.dim_argument >= 0 && row_wise_operators().count(schema.name()))
    return Cut::kRowWise;
  if (inputs == 1 && entry.dim_argument < 0 && full_reductions().count(schema.name())) return Cut::kReduceAll;
  const bool one_tensor =
      schema.returns().size() == 1 && schema.returns()[0].type()->isSubtypeOf(*c10::TensorType::get());
  if (one_tensor && !entry.is_view && (handle.hasTag(at::Tag::pointwise) || is_fill(schema.name())))
    return Cut::kPointwise;
  return Cut::kNone;
}

void read_schema(const c10::OperatorHandle& handle, Operator& entry) {
  const auto& schema = handle.schema();
  const auto& arguments = schema.arguments();
  entry.base_name = schema.name();
  entry.name = c10::toString(handle.operator_name());
  entry.handle = new c10::OperatorHandle(handle);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    entry.argument_names.push_back(arguments[i].name());
    entry.writes.push_back(alias && alias->isWrite());
    entry.is_out.push_back(arguments[i].is_out());
    entry.in_place |= entry.writes.back();
    if (arguments[i].name() == "generator") entry.generator_argument = static_cast<int>(i);
    if (arguments[i].name() == "dim") entry.dim_argument = static_cast<int>(i);
    if (arguments[i].name() == "keepdim") entry.keepdim_argument = static_cast<int>(i);
    if (arguments[i].name() == "memory_format") entry.memory_format_argument = static_cast<int>(i);
  }
  for (const auto& result : schema.returns()) {
    int argument = -1;
    const auto* alias = result.alias_info();
    if (alias && alias->isWrite()) {
      for (size_t i = 0; i < arguments.size() && argument < 0; ++i)
        if (entry.writes[i] && *arguments[i].alias_info() == *alias) argument = static_cast<int>(i);
    } else if (alias) {
      entry.is_view = true;
    }
    entry.returned_argument.push_back(argument);
  }
  entry.takes_cpu_tensors = may_take_cpu_tensors(schema.name());
  entry.fused = is_fused_optimizer(schema.name());
  entry.cut = cut_of(handle, entry);
  if (!entry.in_place && entry.cut != Cut::kNone && entry.cut != Cut::kRowWise &&
      entry.cut != Cut::kReduceAll) {
    if (auto found = find_out_overload(handle)) entry.out_overload = new c10::OperatorHandle(*found);
  }
}

std::mutex table_mutex;

std::map<std::string, std::unique_ptr<Operator>>& table() {
  static auto* instance = new std::map<std::string, std::unique_ptr<Operator>>;
  return *instance;
}

}  // namespace

Operator& operator_entry(const c10::OperatorHandle& handle) {
  // Schemas keep their address while registered; the name guards against an operator that came and went.
  thread_local std::unordered_map<const void*, Operator*> known;
  const void* key = &handle.operator_name();
  auto found = known.find(key);
  const c10::OperatorName& name = handle.operator_name();
  if (found != known.end()) {
    const std::string& text = found->second->name;
    const size_t length = name.name.size();
    const bool same = text.compare(0, length, name.name) == 0 &&
                      (name.overload_name.empty()
                           ? text.size() == length
                           : text.size() == length + 1 + name.overload_name.size() &&
                                 text.compare(length + 1, std::string::npos, name.overload_name) == 0);
    if (same) return *found->second;
  }
  auto fresh = std::make_unique<Operator>();
  read_schema(handle, *fresh);
  std::lock_guard<std::mutex> lock(table_mutex);
  std::unique_ptr<Operator>& slot = table()[fresh->name];
  if (!slot) slot = std::move(fresh);
  known[key] = slot.get();
  return *slot;
}

int argument_position(const Operator& entry, const char* name) {
  for (size_t i = 0; i < entry.argument_names.size(); ++i)
    if (entry.argument_names[i] == name) return static_cast<int>(i);
  return -1;
}

Operator& operator_entry(const char* name) {
  std::lock_guard<std::mutex> lock(table_mutex);
  std::unique_ptr<Operator>& slot = table()[name];
  if (!slot) {
    slot = std::make_unique<Operator>();
    slot->name = name;
  }
  return *slot;
}

namespace {

// On another GPU than the lead's: everything that carries the lead's label gets the part's.
void relabel(std::vector<c10::IValue>& stack) {
  for (c10::IValue& value : stack) {
    if (value.isTensor()) {
      value = c10::IValue(for_part(value.toTensor()));
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (at::Tensor& tensor : list) tensor = for_part(tensor);
      value = c10::IValue(c10::List<at::Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorVector();
      for (auto& tensor : list)
        if (tensor) tensor = for_part(*tensor);
      value = c10::IValue(c10::List<std::optional<at::Tensor>>(list));
    } else if (value.isDevice() && value.toDevice() == backing_device()) {
      value = c10::IValue(part_device());
    }
  }
}

}  // namespace

void call_backing(const c10::OperatorHandle& handle, std::vector<c10::IValue>* stack) {
  if (part_gpu >= 0) relabel(*stack);
  // An operator with several out= arguments returns references to them. torch 2.11 drops its arguments from
  // the stack before it copies these, so somebody else has to hold the tensors (2.14 copies first).
  c10::SmallVector<c10::IValue, 8> held;
  const c10::FunctionSchema& schema = handle.schema();
  if (schema.returns().size() > 1 && schema.is_mutable())
    held.assign(stack->end() - static_cast<int64_t>(schema.arguments().size()), stack->end());
  handle.redispatchBoxed(c10::DispatchKeySet(kBackingKey), stack);
}

void count_run(Operator& entry, Run run, bool large) {
  entry.runs[static_cast<int>(run)].fetch_add(1, std::memory_order_relaxed);
  if (large && run != Run::kSharded) entry.large.fetch_add(1, std::memory_order_relaxed);
}

std::vector<OperatorCounts> operator_counts() {
  std::lock_guard<std::mutex> lock(table_mutex);
  std::vector<OperatorCounts> out;
  for (const auto& [name, entry] : table()) {
    OperatorCounts counts{name, entry->runs[0], entry->runs[1], entry->runs[2], entry->large};
    if (counts.sharded + counts.lead + counts.fallback > 0) out.push_back(std::move(counts));
  }
  return out;
}

void reset_operator_counts() {
  std::lock_guard<std::mutex> lock(table_mutex);
  for (const auto& [name, entry] : table()) {
    for (auto& runs : entry->runs) runs = 0;
    entry->large = 0;
  }
}

}  // namespace mgpu
