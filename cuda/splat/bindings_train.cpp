// SPDX-License-Identifier: Apache-2.0
// bindings_train.cpp: what training needs, for Python: loss, optimizer step, flush, densification.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "memory/locality.h"
#include "mesh/mesh.h"
#include "splat/frame.h"
#include "splat/history.h"
#include "splat/loss.h"
#include "splat/relocate.h"
#include "splat/step.h"

namespace py = pybind11;

namespace mgpu::splat {

namespace {

constexpr std::array<const char*, kColumns> kColumnNames = {"means",     "quats", "scales",
                                                            "opacities", "sh0",   "shN"};

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << " " << tensor.sizes() << " on " << tensor.device();
  return text.str();
}

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

// Float data of a column or moment: `name` is for messages.
float* column_data(const at::Tensor& tensor, const std::string& name, int64_t rows, int64_t row_floats) {
  require(tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.dim() >= 1 &&
              tensor.size(0) == rows && tensor.numel() == rows * row_floats,
          name + " is " + shape_of(tensor) + ", expected contiguous float32 with " + std::to_string(rows) +
              " rows (as means) of " + std::to_string(row_floats) + " values.");
  return tensor.data_ptr<float>();
}

std::array<int64_t, kColumns> row_floats_of(const std::vector<at::Tensor>& columns) {
  require(columns.size() == kColumns, "The table has " + std::to_string(columns.size()) +
                                          " columns, expected 6: means, quats, scales, opacities, sh0, shN.");
  require(columns[0].dim() == 2 && columns[5].dim() == 3,
          "means must be [N, 3] and shN [N, K, 3]; they are " + shape_of(columns[0]) + " and " +
              shape_of(columns[5]) + ".");
  const int64_t rest = columns[5].size(1);
  require(rest == 0 || rest == 3 || rest == 8 || rest == 15,
          "shN has " + std::to_string(rest) + " coefficients; degrees 0 to 3 have 0, 3, 8 or 15.");
  return {3, 4, 3, 1, 3, 3 * rest};
}

std::vector<RowRange> homes_of(int64_t rows) {
  std::vector<RowRange> homes;
  for (int shard = 0; shard < mesh().size(); ++shard)
    homes.push_back(equal_chunk(rows, shard, mesh().size()));
  return homes;
}

SplatColumns columns_of(const std::vector<at::Tensor>& tensors) {
  const auto floats = row_floats_of(tensors);
  const int64_t rows = tensors[0].size(0);
  std::array<float*, kColumns> data;
  const auto homes = homes_of(rows);
  for (size_t i = 0; i < kColumns; ++i) {
    data[i] = column_data(tensors[i], kColumnNames[i], rows, floats[i]);
    set_row_split(data[i], rows, floats[i] * static_cast<int64_t>(sizeof(float)), homes.data(),
                  kColumnNames[i]);
  }
  return {data[0], data[1], data[2], data[3], data[4], data[5], rows, static_cast<int>(floats[5] / 3)};
}

// State: exp_avg of the six columns, exp_avg_sq of the six columns, last_step.
AdamState state_of(const std::vector<at::Tensor>& state, const std::vector<at::Tensor>& columns) {
  const auto floats = row_floats_of(columns);
  const int64_t rows = columns[0].size(0);
  require(state.size() == 2 * kColumns + 1,
          "The optimizer state has " + std::to_string(state.size()) +
              " tensors, expected 13: exp_avg and exp_avg_sq of 6 columns, last_step.");
  const auto homes = homes_of(rows);
  AdamState out{};
  for (size_t i = 0; i < kColumns; ++i) {
    const std::string name = kColumnNames[i];
    out.exp_avg[i] = column_data(state[i], "exp_avg of " + name, rows, floats[i]);
    out.exp_avg_sq[i] = column_data(state[kColumns + i], "exp_avg_sq of " + name, rows, floats[i]);
    const int64_t row_bytes = floats[i] * static_cast<int64_t>(sizeof(float));
    set_row_split(out.exp_avg[i], rows, row_bytes, homes.data(), "exp_avg");
    set_row_split(out.exp_avg_sq[i], rows, row_bytes, homes.data(), "exp_avg_sq");
  }
  const at::Tensor& last = state[2 * kColumns];
  require(last.scalar_type() == at::kInt && last.is_contiguous() && last.dim() == 1 && last.size(0) == rows,
          "last_step is " + shape_of(last) + ", expected int32 [" + std::to_string(rows) + "].");
  out.last_step = last.data_ptr<int32_t>();
  set_row_split(out.last_step, rows, sizeof(int32_t), homes.data(), "last_step");
  return out;
}

at::Tensor tensor_of(const std::vector<int64_t>& rows) {
  at::Tensor out = at::empty({static_cast<int64_t>(rows.size())}, at::TensorOptions().dtype(at::kLong));
  std::copy(rows.begin(), rows.end(), out.data_ptr<int64_t>());
  return out;
}

std::vector<int64_t> rows_of(const at::Tensor& rows, const char* name) {
  require(
      rows.device().is_cpu() && rows.scalar_type() == at::kLong && rows.dim() == 1 && rows.is_contiguous(),
      std::string(name) + " is " + shape_of(rows) + ", expected int64 [K] on cpu.");
  const int64_t* data = rows.data_ptr<int64_t>();
  return {data, data + rows.size(0)};
}

py::tuple l1_ssim_tensors(const at::Tensor& rgb, const at::Tensor& target, double ssim_weight,
                          const std::optional<at::Tensor>& mask, bool wants_gradient) {
  require(rgb.scalar_type() == at::kFloat && rgb.dim() == 3 && rgb.size(2) == 3 && rgb.is_contiguous(),
          "rgb is " + shape_of(rgb) + ", expected contiguous float32 [H, W, 3].");
  const bool bytes = target.scalar_type() == at::kByte;
  require((bytes || target.scalar_type() == at::kFloat) && target.sizes() == rgb.sizes() &&
              target.is_contiguous() && target.device() == rgb.device(),
          "target is " + shape_of(target) + ", expected contiguous uint8 or float32 like rgb, which is " +
              shape_of(rgb) + ".");
  LossImages images;
  images.height = rgb.size(0);
  images.width = rgb.size(1);
  images.rgb = rgb.data_ptr<float>();
  if (bytes)
    images.target_bytes = target.data_ptr<uint8_t>();
  else
    images.target = target.data_ptr<float>();
  if (mask) {
    require((mask->scalar_type() == at::kBool || mask->scalar_type() == at::kByte) && mask->dim() == 2 &&
                mask->size(0) == images.height && mask->size(1) == images.width && mask->is_contiguous() &&
                mask->device() == rgb.device(),
            "mask is " + shape_of(*mask) + ", expected contiguous bool [H, W] like rgb, which is " +
                shape_of(rgb) + ".");
    images.mask = static_cast<const uint8_t*>(mask->data_ptr());
  }
  at::Tensor gradient = wants_gradient ? at::empty_like(rgb) : at::Tensor();
  const at::Tensor value = at::empty({3}, rgb.options().requires_grad(false));  // loss, L1, SSIM
  {
    py::gil_scoped_release release;
    l1_ssim_into(images, static_cast<float>(ssim_weight),
                 wants_gradient ? gradient.data_ptr<float>() : nullptr, value.data_ptr<float>());
  }
  return py::make_tuple(value.select(0, 0), wants_gradient ? py::cast(gradient) : py::none(),
                        value.select(0, 1), value.select(0, 2));
}

std::array<double, kColumns> rates_of(const std::vector<double>& lrs) {
  require(lrs.size() == kColumns, "step needs 6 learning rates, got " + std::to_string(lrs.size()) + ".");
  std::array<double, kColumns> out;
  std::copy(lrs.begin(), lrs.end(), out.begin());
  return out;
}

}  // namespace

MGPU_BINDINGS(train) {
  py::class_<History, std::shared_ptr<History>>(m, "AdamHistory")
      .def(py::init<int64_t, double, double, double, uint64_t>(), py::arg("steps"), py::arg("beta1"),
           py::arg("beta2"), py::arg("eps"), py::arg("seed"))
      .def_property_readonly("now", &History::now)
      .def_property_readonly("base", &History::base)
      .def_property_readonly_static("max_steps", [](const py::object&) { return History::kMaxSteps; })
      .def("clear", &History::clear);

  m.def("l1_ssim", &l1_ssim_tensors, py::arg("rgb"), py::arg("target"), py::arg("ssim_weight"),
        py::arg("mask"), py::arg("wants_gradient"));

  m.def(
      "splat_step",
      [](const std::vector<std::shared_ptr<Frame>>& frames, const std::vector<at::Tensor>& columns,
         const std::vector<at::Tensor>& state, History& history, const std::vector<double>& lrs,
         double noise_scale, double opacity_reg, double scale_reg, bool wanted_means) {
        const SplatColumns table = columns_of(columns);
        const AdamState moments = state_of(state, columns);
        std::vector<const Frame*> pointers;
        for (const auto& frame : frames) pointers.push_back(frame.get());
        StepSettings settings;
        settings.lrs = rates_of(lrs);
        settings.noise_scale = noise_scale;
        settings.opacity_reg = opacity_reg;
        settings.scale_reg = scale_reg;
        settings.wanted_means = wanted_means;
        StepReport report;
        {
          py::gil_scoped_release release;
          report = step(pointers, table, moments, history, settings);
          history.push(settings.lrs, noise_scale);
        }
        py::dict out;
        out["rows_seen"] = report.rows_seen;
        out["mean_opacity"] = report.mean_opacity;
        out["mean_scale"] = report.mean_scale;
        return out;
      },
      py::arg("frames"), py::arg("columns"), py::arg("state"), py::arg("history"), py::arg("lrs"),
      py::arg("noise_scale"), py::arg("opacity_reg"), py::arg("scale_reg"), py::arg("wanted_means") = true);

  // Bring all rows up to date and forget the steps held.
  m.def("splat_flush",
        [](const std::vector<at::Tensor>& columns, const std::vector<at::Tensor>& state, History& history) {
          const SplatColumns table = columns_of(columns);
          const AdamState moments = state_of(state, columns);
          py::gil_scoped_release release;
          flush(table, moments, history);
          history.clear();
        });

  m.def("dead_rows", [](const std::vector<at::Tensor>& columns, double min_opacity) {
    const SplatColumns table = columns_of(columns);
    std::vector<int64_t> rows;
    {
      py::gil_scoped_release release;
      rows = dead_rows(table, static_cast<float>(min_opacity));
    }
    return tensor_of(rows);
  });

  m.def("sample_rows", [](const std::vector<at::Tensor>& columns, double min_opacity, int64_t count,
                          uint64_t seed, int64_t step) {
    const SplatColumns table = columns_of(columns);
    std::vector<int64_t> rows;
    {
      py::gil_scoped_release release;
      rows = sample_rows(table, static_cast<float>(min_opacity), count, seed, step);
    }
    return tensor_of(rows);
  });

  m.def("relocate", [](const std::vector<at::Tensor>& columns,
                       const std::optional<std::vector<at::Tensor>>& state, const at::Tensor& source,
                       const at::Tensor& destination, double min_opacity, int64_t now) {
    const SplatColumns table = columns_of(columns);
    const AdamState moments = state ? state_of(*state, columns) : AdamState{};
    const std::vector<int64_t> from = rows_of(source, "source"), to = rows_of(destination, "destination");
    py::gil_scoped_release release;
    relocate(table, state ? &moments : nullptr, from, to, static_cast<float>(min_opacity), now);
  });

  m.def("reset_rows", [](const std::vector<at::Tensor>& columns, const std::vector<at::Tensor>& state,
                         const at::Tensor& rows, int64_t now) {
    const SplatColumns table = columns_of(columns);
    const AdamState moments = state_of(state, columns);
    const std::vector<int64_t> list = rows_of(rows, "rows");
    py::gil_scoped_release release;
    reset_rows(table, moments, list, now);
  });
}

}  // namespace mgpu::splat
