// SPDX-License-Identifier: Apache-2.0
#include "splat/bindings_cells.h"

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "bindings.h"

namespace py = pybind11;

namespace mgpu::splat {

TableCells::TableCells() : least_rows(least_rows_for_cells()) {}

std::optional<TableCells::Stamps> TableCells::stamps_of(const Tensors& tensors,
                                                        const std::optional<Tensors>& state) {
  constexpr size_t kOpacities = 3;
  std::array<const at::Tensor*, kColumnStamps + 2> watched = {&tensors[0], &tensors[2], &tensors[kOpacities],
                                                              nullptr, nullptr};
  if (state) {
    watched[kColumnStamps] = &(*state)[kOpacities];
    watched[kColumnStamps + 1] = &(*state)[kColumns + kOpacities];
  }
  Stamps out;
  for (size_t i = 0; i < watched.size(); ++i) {
    if (!watched[i]) continue;
    if (watched[i]->is_inference()) return std::nullopt;  // nobody counts what is written to it
    out[i] = {watched[i]->const_data_ptr(), watched[i]->size(0),
              static_cast<int64_t>(watched[i]->_version())};
  }
  return out;
}

bool TableCells::same_columns(const Stamps& a, const Stamps& b) {
  return std::equal(a.begin(), a.begin() + kColumnStamps, b.begin());
}

void TableCells::forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  cells_.forget();
}

const Cells* TableCells::for_frame(const Tensors& tensors, const SplatColumns& columns,
                                   const std::optional<Tensors>& state_tensors, const AdamState* state,
                                   const AdamHistory* history, const std::vector<RowRange>& homes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto shards = static_cast<int64_t>(homes.size());
  if (!enabled || columns.num_rows < least_rows * shards || columns.num_rows == 0) return nullptr;
  const std::optional<Stamps> now = stamps_of(tensors, state_tensors);
  if (!now) return nullptr;
  std::optional<DriftBounds> bounds;
  if (history) bounds = drift_bounds(*history, !state->exp_avg[0].is_float32());
  const DriftBounds* const wanted = bounds ? &*bounds : nullptr;
  const bool written = !cells_.any() || !(state_tensors ? *now == measured_ : same_columns(*now, measured_));
  if (!written && cells_.hold(homes, wanted)) {
    pays_ = true;
    return &cells_;
  }
  // Others wrote the rows: perhaps they do so before each frame, and then measuring is wasted.
  if (written && !pays_ && !(met_ && same_columns(*met_, *now))) {
    cells_.forget();
    met_ = now;
    return nullptr;
  }
  cells_.build(columns, state, wanted, homes);
  measured_ = *now;
  met_.reset();
  if (written) pays_ = false;
  ++built;
  return &cells_;
}

const Cells* TableCells::for_step(const Tensors& tensors, const Tensors& state_tensors,
                                  const std::vector<RowRange>& homes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!cells_.any()) return nullptr;
  const std::optional<Stamps> now = stamps_of(tensors, state_tensors);
  if (now && *now == measured_ && cells_.hold(homes, nullptr)) return &cells_;
  cells_.forget();
  return nullptr;
}

namespace {

// [cells, 8] float32 on the CPU: low, log scale, high, log reach; shard by shard.
at::Tensor boxes_of(TableCells& table) {
  const std::vector<math::Cell> cells = table.cells().to_host();
  at::Tensor out = at::empty({static_cast<int64_t>(cells.size()), 8}, at::TensorOptions().dtype(at::kFloat));
  std::memcpy(out.mutable_data_ptr<float>(), cells.data(), cells.size() * sizeof(math::Cell));
  return out;
}

void plant_boxes(TableCells& table, const at::Tensor& boxes) {
  TORCH_CHECK_VALUE(boxes.device().is_cpu() && boxes.scalar_type() == at::kFloat && boxes.is_contiguous() &&
                        boxes.dim() == 2 && boxes.size(1) == 8,
                    "boxes is ", shape_of(boxes), ", expected contiguous float32 [cells, 8] on cpu.");
  std::vector<math::Cell> cells(static_cast<size_t>(boxes.size(0)));
  std::memcpy(cells.data(), boxes.const_data_ptr<float>(), cells.size() * sizeof(math::Cell));
  table.cells().from_host(cells);
}

}  // namespace

MGPU_BINDINGS(cells) {
  py::class_<TableCells, std::shared_ptr<TableCells>>(
      m, "TableCells", "Boxes of runs of a table's rows (cuda/splat/cells.h), and whether they still hold.")
      .def(py::init<>())
      .def_readwrite("enabled", &TableCells::enabled, "Whether renders may use cells.")
      .def_readwrite("least_rows", &TableCells::least_rows,
                     "Rows of a shard, on average, from which cells pay.")
      .def_readonly("built", &TableCells::built, "How often all rows were measured.")
      .def_property_readonly_static("rows_per_cell", [](const py::object&) { return kCellRows; })
      .def("forget", &TableCells::forget,
           "Have all rows measured anew: for whoever writes columns behind autograd's back (`.data`).")
      .def("boxes", &boxes_of, "[cells, 8] on the CPU: low corner, log scale, high corner, log reach.")
      .def("plant_boxes", &plant_boxes, "For tests: what boxes() returns, changed.");
}

}  // namespace mgpu::splat
