// SPDX-License-Identifier: Apache-2.0
// op_table.h: what the backend knows about an operator (read once from its schema), and how often it ran
// where.
#pragma once
#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace c10 {
class OperatorHandle;
}

namespace mgpu {

// How an operator's call can be cut over the shards (split_*.cpp).
enum class Cut {
  kNone,       // no sharded kernel: runs on the lead shard (the fallback)
  kPointwise,  // every element by itself: single tensors
  kForeach,    // every element by itself: lists of tensors
  kRowWise,    // every row by itself, as long as `dim` is not the row's
  kReduceAll,  // one value from all elements, partial values first
  kRows,       // rows of the result by themselves: gather, cat, matrix products (split_rows.cpp)
  kIndex,      // advanced indexing and masks (split_index.cpp)
  kScatter,    // rows that an index names are written (split_scatter.cpp)
  kRandom,     // fills with random numbers (split_random.cpp)
};

enum class Run {
  kSharded,   // on every shard
  kLead,      // it has a sharded kernel, but this call ran on the lead shard: too small, or not to be cut
  kFallback,  // it has none: on the lead shard, through the alias
};

struct Operator {
  std::string base_name;  // "aten::add"
  std::string name;       // "aten::add.Tensor"
  std::vector<std::string> argument_names;
  std::vector<bool> writes;            // by argument
  std::vector<bool> is_out;            // by argument: an out=, which is written and not read
  std::vector<int> returned_argument;  // by result: the written argument that it is, or -1
  int generator_argument = -1;
  int memory_format_argument = -1;
  int dim_argument = -1;
  int keepdim_argument = -1;
  bool is_view = false;            // results share memory with an argument and nothing is written
  bool takes_cpu_tensors = false;  // CPU tensors with dimensions may stand beside mgpu ones
  Cut cut = Cut::kNone;
  bool in_place = false;  // writes an argument (in place, or out=)
  bool fused = false;     // an optimizer's step in one kernel
  const c10::OperatorHandle* handle = nullptr;
  const c10::OperatorHandle* out_overload = nullptr;  // of a functional pointwise operator

  std::atomic<int64_t> runs[3] = {0, 0, 0};  // by Run
  std::atomic<int64_t> large = 0;  // runs that were not sharded although an operand reached the threshold
};

// The entry of an operator, made at first use. Never freed.
Operator& operator_entry(const c10::OperatorHandle& handle);
// The entry of an operator that has a kernel of its own (copy.cpp), by name.
Operator& operator_entry(const char* name);

// Position of an argument by its name in the schema; -1 if there is none.
int argument_position(const Operator& entry, const char* name);

// Run the backing device's kernel of an operator on a stack of backing values.
void call_backing(const c10::OperatorHandle& handle, std::vector<c10::IValue>* stack);

void count_run(Operator& entry, Run run, bool large);

struct OperatorCounts {
  std::string name;
  int64_t sharded, lead, fallback, large;
};
std::vector<OperatorCounts> operator_counts();
void reset_operator_counts();

}  // namespace mgpu
