// SPDX-License-Identifier: Apache-2.0
// bindings_densify.cpp: densification for Python. Lists of rows stay where the shards are: Python holds a
// RowList, of which it knows the length.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "bindings.h"
#include "splat/bindings_columns.h"
#include "splat/relocate.h"
#include "splat/rows.h"

namespace py = pybind11;

namespace mgpu::splat {

namespace {

at::Tensor tensor_of(const RowList& list) {
  std::vector<int64_t> rows;
  {
    py::gil_scoped_release release;
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
        py::gil_scoped_release release;
        return std::make_shared<RowList>(dead_rows(table, static_cast<float>(min_opacity)));
      },
      py::arg("columns"), py::arg("min_opacity"));

  m.def(
      "sample_rows",
      [](const Tensors& columns, double min_opacity, int64_t count, uint64_t seed, int64_t step) {
        const SplatColumns table = columns_of(columns);
        py::gil_scoped_release release;
        return std::make_shared<RowList>(
            sample_rows(table, static_cast<float>(min_opacity), count, seed, step));
      },
      py::arg("columns"), py::arg("min_opacity"), py::arg("count"), py::arg("seed"), py::arg("step"));

  m.def(
      "relocate",
      [](const Tensors& columns, const std::optional<Tensors>& state, const RowList& source,
         const RowList& destination, double min_opacity, int64_t now) {
        const SplatColumns table = columns_of(columns);
        const AdamState moments = state ? state_of(*state, columns) : AdamState{};
        py::gil_scoped_release release;
        relocate(table, state ? &moments : nullptr, source, destination, static_cast<float>(min_opacity),
                 now);
      },
      py::arg("columns"), py::arg("state"), py::arg("source"), py::arg("destination"), py::arg("min_opacity"),
      py::arg("now"));

  m.def(
      "reset_rows",
      [](const Tensors& columns, const Tensors& state, const RowList& rows, int64_t now) {
        const SplatColumns table = columns_of(columns);
        const AdamState moments = state_of(state, columns);
        py::gil_scoped_release release;
        reset_rows(table, moments, rows, now);
      },
      py::arg("columns"), py::arg("state"), py::arg("rows"), py::arg("now"));
}

}  // namespace mgpu::splat
