// SPDX-License-Identifier: Apache-2.0
// bindings_densify.cpp: densification for Python. Lists of rows stay where the shards are: Python holds a
// RowList, of which it knows the length.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "splat/bindings_columns.h"
#include "splat/densify.h"
#include "splat/gather.h"
#include "splat/relocate.h"
#include "splat/reorder.h"
#include "splat/rows.h"

namespace py = pybind11;

namespace mgpu::splat {

namespace {

at::Tensor tensor_of(const RowList& list) {
  std::vector<int64_t> rows;
  {
    const Turn turn;
    rows = to_vector(list);
  }
  at::Tensor out = at::empty({list.count}, at::TensorOptions().dtype(at::kLong));
  std::copy(rows.begin(), rows.end(), out.data_ptr<int64_t>());
  return out;
}

std::shared_ptr<RowList> list_from(const at::Tensor& rows, int64_t num_rows, const char* name) {
  TORCH_CHECK_VALUE(
      rows.device().is_cpu() && rows.scalar_type() == at::kLong && rows.dim() == 1 && rows.is_contiguous(),
      name, " is ", shape_of(rows), ", expected int64 [K] on cpu.");
  const int64_t* data = rows.data_ptr<int64_t>();
  return std::make_shared<RowList>(row_list({data, data + rows.size(0)}, num_rows, name));
}

// What an operator changes in place; autograd then knows that a graph made before is stale.
struct Table {
  Table(const Tensors& tensors, const std::optional<Tensors>& state_tensors) : columns(columns_of(tensors)) {
    if (state_tensors) state = state_of(*state_tensors, tensors);
    for (const at::Tensor& column : tensors)
      if (!column.is_inference()) column.unsafeGetTensorImpl()->bump_version();
  }
  const AdamState* state_or_null() const { return state ? &*state : nullptr; }
  SplatColumns columns;
  std::optional<AdamState> state;
};

// All that has a value a row: columns, state, and what else moves with the rows.
std::vector<RowBytes> everything(const Table& table, const Tensors& others) {
  std::vector<RowBytes> out = all_columns(table.columns, table.state_or_null());
  const int64_t rows = table.columns.num_rows;
  for (const at::Tensor& tensor : others) {
    TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.dim() >= 1 && tensor.size(0) == rows &&
                          (rows == 0 || tensor.nbytes() / rows % 2 == 0),
                      "a tensor that moves with the rows is ", shape_of(tensor), ", expected contiguous [",
                      rows, ", ...].");
    if (rows > 0) out.push_back({tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()) / rows});
  }
  return out;
}

// Returns the rows that are left; the table is to be shrunk to them.
int64_t compact(const Tensors& columns, const std::optional<Tensors>& state, const Tensors& others,
                const at::Tensor& keep) {
  const Table table(columns, state);
  const int64_t rows = table.columns.num_rows;
  TORCH_CHECK_VALUE(keep.scalar_type() == at::kBool && keep.is_contiguous() && keep.dim() == 1 &&
                        keep.size(0) == rows && keep.device() == columns[0].device(),
                    "keep is ", shape_of(keep), ", expected contiguous bool [", rows, "] on ",
                    columns[0].device(), ".");
  const std::vector<RowBytes> all = everything(table, others);
  const Turn turn;
  const Fates fates = fates_from_mask(static_cast<const uint8_t*>(keep.data_ptr()), homes_of(table.columns));
  const int64_t rows_after = count_rows_after(fates);
  if (rows_after < rows) gather_rows(all, map_rows(fates, row_homes(table.columns.means, rows_after)));
  return rows_after;
}

}  // namespace

MGPU_BINDINGS(densify) {
  py::class_<RowList, std::shared_ptr<RowList>>(m, "RowList")
      .def(py::init(
               [](const at::Tensor& rows, int64_t num_rows) { return list_from(rows, num_rows, "rows"); }),
           py::arg("rows"), py::arg("num_rows"))
      .def_static(
          "consecutive",
          [](int64_t begin, int64_t end) { return std::make_shared<RowList>(consecutive_rows(begin, end)); },
          py::arg("begin"), py::arg("end"))
      .def("__len__", [](const RowList& list) { return list.count; })
      .def("tensor", &tensor_of);

  m.def(
      "dead_rows",
      [](const Tensors& columns, double min_opacity) {
        const SplatColumns table = columns_of(columns);
        const Turn turn;
        return std::make_shared<RowList>(dead_rows(table, static_cast<float>(min_opacity)));
      },
      py::arg("columns"), py::arg("min_opacity"));

  m.def(
      "sample_rows",
      [](const Tensors& columns, double min_opacity, int64_t count, uint64_t seed, int64_t step) {
        const SplatColumns table = columns_of(columns);
        const Turn turn;
        return std::make_shared<RowList>(
            sample_rows(table, static_cast<float>(min_opacity), count, seed, step));
      },
      py::arg("columns"), py::arg("min_opacity"), py::arg("count"), py::arg("seed"), py::arg("step"));

  m.def(
      "relocate",
      [](const Tensors& columns, const std::optional<Tensors>& state, const RowList& source,
         const RowList& destination, double min_opacity, int64_t now) {
        const Table table(columns, state);
        const Turn turn;
        relocate(table.columns, table.state_or_null(), source, destination, static_cast<float>(min_opacity),
                 now);
      },
      py::arg("columns"), py::arg("state"), py::arg("source"), py::arg("destination"), py::arg("min_opacity"),
      py::arg("now"));

  m.def(
      "reset_rows",
      [](const Tensors& columns, const Tensors& state, const RowList& rows, int64_t now) {
        const SplatColumns table = columns_of(columns);
        const AdamState moments = state_of(state, columns);
        const Turn turn;
        reset_rows(table, moments, rows, now);
      },
      py::arg("columns"), py::arg("state"), py::arg("rows"), py::arg("now"));

  m.def("compact", &compact, py::arg("columns"), py::arg("state"), py::arg("others"), py::arg("keep"));

  m.def(
      "reorder",
      [](const Tensors& columns, const std::optional<Tensors>& state, const Tensors& others,
         int64_t scratch_bytes, const std::vector<std::pair<int64_t, int64_t>>& deal_to, int64_t stripe) {
        std::vector<RowRange> ranges;
        for (const auto& [begin, end] : deal_to) ranges.push_back({begin, end});
        std::optional<RowDeal> deal;
        if (!ranges.empty()) deal = row_deal(ranges, stripe, columns_of(columns).num_rows);
        const Table table(columns, state);
        const std::vector<RowBytes> all = everything(table, others);
        const Turn turn;
        gather_rows(all, hilbert_order(table.columns, deal ? &*deal : nullptr), scratch_bytes);
      },
      py::arg("columns"), py::arg("state"), py::arg("others"), py::arg("scratch_bytes") = kGatherScratch,
      py::arg("deal") = std::vector<std::pair<int64_t, int64_t>>{}, py::arg("stripe") = 0);

  py::class_<DensifyPlan>(m, "DensifyPlan", "What default densification decided; fates stay on the shards.")
      .def_readonly("rows_before", &DensifyPlan::rows_before)
      .def_readonly("rows_after", &DensifyPlan::rows_after)
      .def_readonly("pruned", &DensifyPlan::pruned)
      .def_readonly("doubled", &DensifyPlan::doubled);

  m.def(
      "plan_densification",
      [](const Tensors& columns, const Tensors& statistics, double grow_gradient, double split_scale,
         double split_radius, double prune_opacity, double prune_scale, double prune_radius,
         int64_t max_rows) {
        const SplatColumns table = columns_of(columns);
        TORCH_CHECK_VALUE(statistics.size() >= 2, "statistics has ", statistics.size(),
                          " tensors, expected gradient, views and perhaps radius.");
        const RowStatistics gathered = statistics_of(statistics, false, homes_of(table));
        const DensifyRules rules{static_cast<float>(grow_gradient),
                                 static_cast<float>(split_scale),
                                 static_cast<float>(split_radius),
                                 static_cast<float>(prune_opacity),
                                 static_cast<float>(prune_scale),
                                 static_cast<float>(prune_radius),
                                 max_rows};
        const Turn turn;
        return std::make_unique<DensifyPlan>(plan_densification(table, gathered, rules));
      },
      py::arg("columns"), py::arg("statistics"), py::kw_only(), py::arg("grow_gradient"),
      py::arg("split_scale"), py::arg("split_radius"), py::arg("prune_opacity"), py::arg("prune_scale"),
      py::arg("prune_radius"), py::arg("max_rows"));

  m.def(
      "densify",
      [](const Tensors& columns, const std::optional<Tensors>& state, const DensifyPlan& plan, uint64_t seed,
         int64_t step, int64_t now) {
        const Table table(columns, state);
        const int64_t wanted = std::max(plan.rows_before, plan.rows_after);
        TORCH_CHECK_VALUE(table.columns.num_rows == wanted, "the table has ", table.columns.num_rows,
                          " rows, and the plan for ", plan.rows_before, " rows needs ", wanted, ".");
        const Turn turn;
        densify(table.columns, table.state_or_null(), plan, seed, step, now);
      },
      py::arg("columns"), py::arg("state"), py::arg("plan"), py::arg("seed"), py::arg("step"),
      py::arg("now"));

  m.def(
      "reset_opacities",
      [](const Tensors& columns, const std::optional<Tensors>& state, double most) {
        const Table table(columns, state);
        const Turn turn;
        reset_opacities(table.columns, table.state_or_null(), static_cast<float>(most));
      },
      py::arg("columns"), py::arg("state"), py::arg("most"));
}

}  // namespace mgpu::splat
