// SPDX-License-Identifier: Apache-2.0
// bindings_train.cpp: what training needs, for Python: loss, optimizer step and flush.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "splat/bindings_columns.h"
#include "splat/frame.h"
#include "splat/history.h"
#include "splat/loss.h"
#include "splat/step.h"

namespace py = pybind11;

namespace mgpu::splat {

namespace {

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
}

}  // namespace mgpu::splat
