// SPDX-License-Identifier: Apache-2.0
// bindings_device.cpp: what ns_mgpu_splat.device needs of the backend. The public face is torch.mgpu
// (module.py).
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <thread>

#include "backend/allocator.h"
#include "backend/generator.h"
#include "backend/growth.h"
#include "backend/op_table.h"
#include "bindings.h"
#include "memory/buffer.h"
#include "memory/locality.h"
#include "memory/pool.h"
#include "memory/provider.h"
#include "memory/tally.h"
#include "mesh/fork_join.h"

namespace mgpu {

namespace {

namespace py = pybind11;

// For the test of the locality check: shard 0 writes the last byte of a tensor.
void planted_violation(const at::Tensor& tensor) {
  char* last = static_cast<char*>(tensor.mutable_data_ptr()) + tensor.nbytes() - 1;
  for_each_shard("planted", [&](const Shard& shard) {
    if (shard.index == 0) *static_cast<volatile char*>(last) = 1;
  });
}

// The same for a small buffer of another shard, or of the exchange.
void planted_buffer_violation(int owner) {
  Buffer<char> buffer(100, owner);
  for_each_shard("planted", [&](const Shard& shard) {
    if (shard.index == 0) *static_cast<volatile char*>(buffer.data()) = 1;
  });
}

// A stage that touches nothing for a while.
void idle_stage(int milliseconds) {
  for_each_shard("idle",
                 [&](const Shard&) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
}

// Temporaries as stages take them: `rounds` times one of each size, all alive at once. Seconds of the host.
double time_temporaries(const std::vector<int64_t>& sizes, int64_t rounds, int owner) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t round = 0; round < rounds; ++round) {
    std::vector<Buffer<char>> alive;
    alive.reserve(sizes.size());
    for (const int64_t bytes : sizes) alive.emplace_back(bytes, owner);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

py::dict memory_stats() {
  const MemoryCounts counts = memory_counts();
  py::list shards;
  for (const ShardMemory& shard : counts.shards) {
    py::dict entry;
    entry["allocated"] = shard.allocated;
    entry["reserved"] = shard.reserved;
    entry["peak"] = shard.peak;
    entry["pages"] = shard.pages;
    shards.append(entry);
  }
  py::dict out;
  out["shards"] = shards;
  out["host"] = counts.host;
  return out;
}

py::dict memory_totals() {
  const MemoryCounts counts = memory_counts();
  py::dict out;
  out["allocated"] = counts.allocated;
  out["reserved"] = counts.reserved;
  out["peak"] = counts.peak;
  out["allocations"] = counts.allocations;
  out["live"] = counts.live;
  return out;
}

py::dict op_stats() {
  py::dict out;
  for (const OperatorCounts& counts : operator_counts()) {
    py::dict entry;
    entry["sharded"] = counts.sharded;
    entry["lead"] = counts.lead;
    entry["fallback"] = counts.fallback;
    entry["large"] = counts.large;
    out[py::str(counts.name)] = entry;
  }
  return out;
}

}  // namespace

MGPU_BINDINGS(device) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  m.def("install_allocation_scope", &install_allocation_scope);
  m.def("set_shard_threshold", &set_shard_threshold);
  m.def("shard_threshold", &shard_threshold);
  m.def("set_locality_checked", &set_locality_checked);
  m.def("locality_checked", &locality_checked);
  m.def("mark_stage_threads", [] { set_thread_start_hook(&mark_stage_thread); });
  m.def("in_forked_child", &in_forked_child);
  m.def("planted_violation", &planted_violation, no_gil);
  m.def("planted_buffer_violation", &planted_buffer_violation, no_gil);
  m.def("idle_stage", &idle_stage, no_gil);
  py::class_<Buffer<char>>(m, "Temporary")  // for tests
      .def(py::init<int64_t, int>())
      .def_property_readonly("address",
                             [](Buffer<char>& buffer) { return reinterpret_cast<int64_t>(buffer.data()); });
  m.def("time_temporaries", &time_temporaries, no_gil);
  m.def("set_row_split", [](const at::Tensor& tensor, const std::vector<std::pair<int64_t, int64_t>>& rows,
                            const std::string& what) {
    TORCH_CHECK_VALUE(rows.size() == static_cast<size_t>(mesh().size()),
                      "set_row_split needs one range per shard.");
    std::vector<RowRange> ranges;
    for (const auto& [begin, end] : rows) ranges.push_back({begin, end});
    const int64_t row_bytes = static_cast<int64_t>(tensor.dtype().itemsize()) * tensor.stride(0);
    set_row_split(tensor.const_data_ptr(), tensor.size(0), row_bytes, ranges.data(), what.c_str());
  });

  m.def("memory_stats", &memory_stats);
  m.def("memory_totals", &memory_totals);
  m.def("held_memory", [] {
    const PageProvider::Held held = provider().held();
    return std::make_pair(held.shards, held.host);
  });
  m.def("reset_peak", &reset_peak);
  m.def("empty_cache", &empty_cache, no_gil);
  m.def("op_stats", &op_stats);
  m.def("reset_op_stats", &reset_operator_counts);

  m.def("reserve", [](const std::vector<int64_t>& shape, int64_t capacity_rows, py::object dtype) {
    TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "torch.mgpu.reserve needs a torch.dtype.");
    const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    py::gil_scoped_release release;
    return reserve(shape, capacity_rows, type);
  });
  m.def("grow", &grow, no_gil);
  m.def("shrink", &shrink, no_gil);
  m.def("placement", &placement, no_gil);
  m.def("place", &place, no_gil);
  m.def("pages_moved", &pages_moved);
  m.def("reset_pages_moved", &reset_pages_moved);
  m.def("place_rows", &place_rows, no_gil);
  m.def("row_homes", &row_homes_of, no_gil);
  m.def("to_host", &to_host, no_gil);
  m.def("to_device", &to_device, no_gil);

  m.def("default_generator", [] {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator()));
  });
}

}  // namespace mgpu
