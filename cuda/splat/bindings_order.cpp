// SPDX-License-Identifier: Apache-2.0
// bindings_order.cpp: how well rows are in order, and the curves' codes, for Python.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings.h"
#include "math/hilbert.h"
#include "mesh/fork_join.h"
#include "splat/bindings_columns.h"
#include "splat/row_measure.h"

namespace py = pybind11;

namespace mgpu::splat {

namespace {

constexpr int64_t kCellsPerPiece = 4096;

// Of the code of each cell, by the host. cells: int64 [N, 3] on cpu, in 0 to 2^21 - 1.
template <typename Code>
at::Tensor codes_of(const at::Tensor& cells, const Code& code) {
  TORCH_CHECK_VALUE(cells.device().is_cpu() && cells.scalar_type() == at::kLong && cells.dim() == 2 &&
                        cells.size(1) == 3 && cells.is_contiguous(),
                    "cells is ", shape_of(cells), ", expected contiguous int64 [N, 3] on cpu.");
  const int64_t* from = cells.data_ptr<int64_t>();
  for (int64_t i = 0; i < cells.numel(); ++i) {
    TORCH_CHECK_VALUE(from[i] >= 0 && from[i] < int64_t{1} << math::kCurveBits, "cells has ", from[i],
                      " in row ", i / 3, ", expected 0 to 2^21 - 1.");
  }
  at::Tensor out = at::empty({cells.size(0)}, at::TensorOptions().dtype(at::kLong));
  int64_t* to = out.data_ptr<int64_t>();
  parallel_for(cells.size(0), kCellsPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t cell[3] = {static_cast<uint32_t>(from[3 * i]), static_cast<uint32_t>(from[3 * i + 1]),
                                static_cast<uint32_t>(from[3 * i + 2])};
      to[i] = static_cast<int64_t>(code(cell));
    }
  });
  return out;
}

at::Tensor cells_of(const at::Tensor& codes) {
  TORCH_CHECK_VALUE(codes.device().is_cpu() && codes.scalar_type() == at::kLong && codes.dim() == 1 &&
                        codes.is_contiguous(),
                    "codes is ", shape_of(codes), ", expected contiguous int64 [N] on cpu.");
  at::Tensor out = at::empty({codes.size(0), 3}, at::TensorOptions().dtype(at::kLong));
  const int64_t* from = codes.data_ptr<int64_t>();
  int64_t* to = out.data_ptr<int64_t>();
  for (int64_t i = 0; i < codes.size(0); ++i) {
    uint32_t cell[3];
    math::hilbert_cell(static_cast<uint64_t>(from[i]), cell);
    for (int axis = 0; axis < 3; ++axis) to[3 * i + axis] = cell[axis];
  }
  return out;
}

py::dict measure(const at::Tensor& means, int64_t first_run) {
  TORCH_CHECK_VALUE(means.dim() == 2 && means.size(1) == 3 && means.device().is_privateuseone(), "means is ",
                    shape_of(means), ", expected float32 [N, 3] on mgpu.");
  TORCH_CHECK_VALUE(first_run >= 1 && first_run <= kRunRows, "first_run is ", first_run,
                    " rows, expected 1 to ", kRunRows, ".");
  SplatColumns columns{};
  columns.means = floats(means, "means");
  columns.num_rows = means.size(0);
  RowMeasure found{};
  {
    const Turn turn;
    found = measure_rows(columns, {first_run});
  }
  const auto counts = [](const int64_t (&list)[kLevels]) {
    return std::vector<int64_t>(std::begin(list), std::end(list));
  };
  py::dict out;
  out["low"] = std::vector<double>(std::begin(found.cube.low), std::end(found.cube.low));
  out["side"] = found.cube.side;
  out["finite_rows"] = found.finite_rows;
  out["runs"] = found.runs;
  out["run_cells"] = found.run_cells;
  out["changes"] = counts(found.changes);
  out["descents"] = counts(found.descents);
  return out;
}

}  // namespace

MGPU_BINDINGS(order) {
  m.def("measure_rows", &measure, py::arg("means"), py::arg("first_run") = kRunRows);
  m.def(
      "hilbert_codes", [](const at::Tensor& cells) { return codes_of(cells, math::hilbert_code); },
      py::arg("cells"));
  m.def(
      "morton_codes", [](const at::Tensor& cells) { return codes_of(cells, math::morton_code); },
      py::arg("cells"));
  m.def("hilbert_cells", &cells_of, py::arg("codes"));
}

}  // namespace mgpu::splat
