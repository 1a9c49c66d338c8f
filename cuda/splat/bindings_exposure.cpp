// SPDX-License-Identifier: Apache-2.0
// bindings_exposure.cpp: exposures of photographs for Python: the map, its way back, and the step of the
// maps.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <utility>

#include "bindings.h"
#include "math/exposure.h"
#include "splat/bindings_columns.h"
#include "splat/bindings_exposure.h"
#include "splat/exposure.h"

namespace py = pybind11;

namespace mgpu::splat {

float* map_of(const at::Tensor& map, const char* name) {
  TORCH_CHECK_VALUE(map.dim() == 2 && map.size(0) == 3 && map.size(1) == 4 && map.device().is_privateuseone(),
                    name, " is ", shape_of(map), ", expected contiguous float32 [3, 4] on mgpu.");
  return floats(map, name);
}

namespace {

LossImages image_of(const at::Tensor& rgb) {
  TORCH_CHECK_VALUE(rgb.dim() == 3 && rgb.size(2) == 3 && rgb.device().is_privateuseone(), "rgb is ",
                    shape_of(rgb), ", expected contiguous float32 [H, W, 3] on mgpu.");
  LossImages images;
  images.rgb = floats(rgb, "rgb");
  images.height = rgb.size(0);
  images.width = rgb.size(1);
  return images;
}

at::Tensor expose_tensor(const at::Tensor& rgb, const at::Tensor& map) {
  const LossImages images = image_of(rgb);
  const float* values = map_of(map, "exposure");
  at::Tensor out = at::empty_like(rgb).requires_grad_(false);
  const Turn turn;
  expose(images, values, out.mutable_data_ptr<float>());
  return out;
}

// dL_drgb and dL_dmap.
std::pair<at::Tensor, at::Tensor> expose_backward_tensors(const at::Tensor& rgb, const at::Tensor& map,
                                                          const at::Tensor& dL_dexposed) {
  const LossImages images = image_of(rgb);
  const float* values = map_of(map, "exposure");
  TORCH_CHECK_VALUE(dL_dexposed.sizes() == rgb.sizes() && dL_dexposed.device() == rgb.device() &&
                        dL_dexposed.scalar_type() == at::kFloat,
                    "the gradient is ", shape_of(dL_dexposed), ", expected that of rgb, ", shape_of(rgb),
                    ".");
  at::Tensor gradient = dL_dexposed.clone(at::MemoryFormat::Contiguous);
  at::Tensor dL_dmap = at::empty({3, 4}, rgb.options().requires_grad(false));
  const Turn turn;
  expose_backward(images, values, gradient.mutable_data_ptr<float>(), dL_dmap.mutable_data_ptr<float>());
  return {gradient, dL_dmap};
}

// `steps`: how many the row has had with this one.
void exposure_step_tensors(const at::Tensor& maps, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                           int64_t row, const at::Tensor& gradient, double lr, double beta1, double beta2,
                           double eps, int64_t steps) {
  ExposureTable table;
  table.count = maps.dim() == 3 ? maps.size(0) : 0;
  const auto rows_of = [&](const at::Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(tensor.dim() == 3 && tensor.size(0) == table.count && tensor.size(1) == 3 &&
                          tensor.size(2) == 4 && tensor.device().is_privateuseone(),
                      name, " is ", shape_of(tensor), ", expected contiguous float32 [", table.count,
                      ", 3, 4] on mgpu.");
    return floats(tensor, name);
  };
  table.map = rows_of(maps, "exposures");
  table.exp_avg = rows_of(exp_avg, "exp_avg");
  table.exp_avg_sq = rows_of(exp_avg_sq, "exp_avg_sq");
  TORCH_CHECK_VALUE(row >= 0 && row < table.count, "there is no exposure ", row, " among ", table.count, ".");
  TORCH_CHECK_VALUE(steps >= 1, "steps is ", steps, ", expected 1 or more.");
  const float* slope = map_of(gradient, "the gradient of an exposure");
  const double count = static_cast<double>(steps);
  const double step_size = lr / (1.0 - std::pow(beta1, count));
  const double inv_sqrt_bc2 = 1.0 / std::sqrt(1.0 - std::pow(beta2, count));
  const Turn turn;
  exposure_step(table, row, slope, math::adam_constants(beta1, beta2, static_cast<float>(eps)),
                static_cast<float>(step_size), static_cast<float>(inv_sqrt_bc2));
}

}  // namespace

MGPU_BINDINGS(exposure) {
  m.def("expose", &expose_tensor, py::arg("rgb"), py::arg("exposure"));
  m.def("expose_backward", &expose_backward_tensors, py::arg("rgb"), py::arg("exposure"),
        py::arg("dL_dexposed"));
  m.def("exposure_step", &exposure_step_tensors, py::arg("exposures"), py::arg("exp_avg"),
        py::arg("exp_avg_sq"), py::arg("row"), py::arg("gradient"), py::arg("lr"), py::arg("beta1"),
        py::arg("beta2"), py::arg("eps"), py::arg("steps"));
}

}  // namespace mgpu::splat
