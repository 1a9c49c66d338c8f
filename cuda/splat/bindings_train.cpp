// SPDX-License-Identifier: Apache-2.0
// bindings_train.cpp: what training needs, for Python: loss, whole steps, optimizer step, flush.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "math/exposure.h"
#include "memory/transfer.h"
#include "splat/bindings_exposure.h"
#include "splat/bindings_frame.h"
#include "splat/bindings_links.h"
#include "splat/history.h"
#include "splat/loss.h"
#include "splat/step.h"
#include "splat/train_step.h"

namespace py = pybind11;

namespace mgpu::splat {

namespace {

// A photograph and its mask, as the loss takes them; `which` is for messages.
TrainTarget target_of(const at::Tensor& target, const std::optional<at::Tensor>& mask, int64_t height,
                      int64_t width, c10::Device device, int64_t which = -1) {
  const auto name = [&](const char* what) {
    return which < 0 ? std::string(what) : what + ("s[" + std::to_string(which) + "]");
  };
  const bool bytes = target.scalar_type() == at::kByte;
  TORCH_CHECK_VALUE((bytes || target.scalar_type() == at::kFloat) && target.dim() == 3 &&
                        target.size(0) == height && target.size(1) == width && target.size(2) == 3 &&
                        target.is_contiguous() && target.device() == device,
                    name("target"), " is ", shape_of(target), ", expected contiguous uint8 or float32 [",
                    height, ", ", width, ", 3] on ", device, ", as its image.");
  TrainTarget out;
  if (bytes)
    out.bytes = target.const_data_ptr<uint8_t>();
  else
    out.values = target.const_data_ptr<float>();
  if (!mask) return out;
  TORCH_CHECK_VALUE((mask->scalar_type() == at::kBool || mask->scalar_type() == at::kByte) &&
                        mask->dim() == 2 && mask->size(0) == height && mask->size(1) == width &&
                        mask->is_contiguous() && mask->device() == device,
                    name("mask"), " is ", shape_of(*mask), ", expected contiguous bool [", height, ", ",
                    width, "] on ", device, ", as its image.");
  out.mask = static_cast<const uint8_t*>(mask->const_data_ptr());
  return out;
}

py::tuple l1_ssim_tensors(const at::Tensor& rgb, const at::Tensor& target, double ssim_weight,
                          const std::optional<at::Tensor>& mask, bool wants_gradient) {
  TORCH_CHECK_VALUE(
      rgb.scalar_type() == at::kFloat && rgb.dim() == 3 && rgb.size(2) == 3 && rgb.is_contiguous(), "rgb is ",
      shape_of(rgb), ", expected contiguous float32 [H, W, 3].");
  const TrainTarget photograph = target_of(target, mask, rgb.size(0), rgb.size(1), rgb.device());
  LossImages images;
  images.height = rgb.size(0);
  images.width = rgb.size(1);
  images.rgb = rgb.const_data_ptr<float>();
  images.target = photograph.values;
  images.target_bytes = photograph.bytes;
  images.mask = photograph.mask;
  at::Tensor gradient = wants_gradient ? at::empty_like(rgb) : at::Tensor();
  const at::Tensor value = at::empty({3}, rgb.options().requires_grad(false));  // loss, L1, SSIM
  {
    const Turn turn;
    l1_ssim_into(images, static_cast<float>(ssim_weight),
                 wants_gradient ? gradient.mutable_data_ptr<float>() : nullptr,
                 value.mutable_data_ptr<float>());
  }
  return py::make_tuple(value.select(0, 0), wants_gradient ? py::cast(gradient) : py::none(),
                        value.select(0, 1), value.select(0, 2));
}

StepSettings step_settings(const std::array<double, kColumns>& lrs, double noise_scale, double opacity_reg,
                           double scale_reg, bool wanted_means, const RowStatistics& statistics) {
  StepSettings settings;
  settings.lrs = lrs;
  settings.noise_scale = noise_scale;
  settings.opacity_reg = opacity_reg;
  settings.scale_reg = scale_reg;
  settings.wanted_means = wanted_means;
  settings.statistics = statistics;
  return settings;
}

void bump_versions(const Tensors& columns) {
  for (const at::Tensor& column : columns)
    if (!column.is_inference()) column.unsafeGetTensorImpl()->bump_version();
}

// Without cells nobody knows of the step but autograd's count: it is told, so that a table whose cells stayed
// aside measures them anew.
const Cells* cells_for_step(const MaybeCells& cells, const Tensors& columns, const Tensors& state,
                            const std::vector<RowRange>& homes) {
  if (cells) return cells->for_step(columns, state, homes);
  bump_versions(columns);
  return nullptr;
}

py::dict report_of(const StepReport& report) {
  py::dict out;
  out["rows_seen"] = report.rows_seen;
  out["mean_opacity"] = report.mean_opacity;
  out["mean_scale"] = report.mean_scale;
  return out;
}

// What a training step leaves for Python.
struct TrainResult {
  std::shared_ptr<Frame> frame;  // only if its gradients wait for a later step
  TrainOutcome outcome;
  Tensors images;                           // if wanted
  std::optional<at::Tensor> dL_dexposures;  // [C, 3, 4], if there are exposures; zero where a view has none
};

std::unique_ptr<TrainResult> train_step_tensors(
    const Tensors& columns, const Tensors& state, const std::shared_ptr<History>& history,
    const std::vector<CameraArguments>& cameras, const Tensors& targets,
    const std::vector<std::optional<at::Tensor>>& masks, const std::vector<std::shared_ptr<Frame>>& pending,
    double ssim_weight, const Background& background, bool antialiased, int sh_degree, bool wanted_viewmats,
    bool wanted_step, bool wanted_images, const std::array<double, kColumns>& lrs, double noise_scale,
    double opacity_reg, double scale_reg, bool wanted_means, const Tensors& statistics, bool absgrad,
    const MaybeCells& cells, const std::vector<std::optional<at::Tensor>>& exposures) {
  const Turn turn;
  TORCH_CHECK_VALUE(targets.size() == cameras.size() && (masks.empty() || masks.size() == cameras.size()),
                    "there are ", cameras.size(), " cameras, ", targets.size(), " targets and ", masks.size(),
                    " masks; expected one of each.");
  TORCH_CHECK_VALUE(exposures.empty() || exposures.size() == cameras.size(), "there are ", cameras.size(),
                    " cameras and ", exposures.size(), " exposures; expected one of each.");
  RenderSettings render = render_settings(background, antialiased, sh_degree);
  render.wanted_depth = false;
  render.wanted_absgrad = absgrad;
  auto out = std::make_unique<TrainResult>();
  auto frame = make_frame(columns, state, history, cameras, render, cells);
  std::vector<TrainTarget> photographs;
  const auto views = static_cast<int64_t>(targets.size());
  if (!exposures.empty()) {
    const bool all = std::all_of(exposures.begin(), exposures.end(), [](const auto& map) { return !!map; });
    const at::TensorOptions options = columns[0].options().requires_grad(false);
    out->dL_dexposures = all ? at::empty({views, 3, 4}, options) : at::zeros({views, 3, 4}, options);
  }
  for (size_t v = 0; v < targets.size(); ++v) {
    const View& view = frame->views[v];
    photographs.push_back(target_of(targets[v], masks.empty() ? std::nullopt : masks[v], view.height,
                                    view.width, columns[0].device(), static_cast<int64_t>(v)));
    if (!exposures.empty() && exposures[v]) {
      const std::string name = "exposures[" + std::to_string(v) + "]";
      photographs.back().exposure = map_of(*exposures[v], name.c_str());
      photographs.back().dL_dexposure =
          out->dL_dexposures->mutable_data_ptr<float>() + math::kExposureFloats * v;
    }
    if (!wanted_images) continue;
    out->images.push_back(at::empty({view.height, view.width, 3}, columns[0].options().requires_grad(false)));
    photographs.back().image = floats(out->images.back(), "image");
  }
  TrainSettings settings;
  settings.ssim_weight = static_cast<float>(ssim_weight);
  settings.wanted_viewmats = wanted_viewmats;
  settings.wanted_step = wanted_step;
  settings.step = step_settings(lrs, noise_scale, opacity_reg, scale_reg, wanted_means,
                                statistics_of(statistics, absgrad, frame->homes));
  if (wanted_step) settings.step.cells = cells_for_step(cells, columns, state, frame->homes);
  std::vector<const Frame*> waiting;
  for (const auto& earlier : pending) waiting.push_back(earlier.get());
  out->outcome = train_step(*frame, std::move(waiting), photographs, settings, *history);
  if (!wanted_step) out->frame = std::move(frame);
  return out;
}

// [views][3]: loss, L1, SSIM; waits for the device.
std::vector<std::array<float, TrainOutcome::kLossFloats>> losses_of(const TrainResult& result) {
  constexpr size_t kFloats = TrainOutcome::kLossFloats;
  const Turn turn;
  const std::vector<float> all = to_vector(result.outcome.losses);
  std::vector<std::array<float, kFloats>> out(all.size() / kFloats);
  for (size_t i = 0; i < all.size(); ++i) out[i / kFloats][i % kFloats] = all[i];
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
      [](const std::vector<std::shared_ptr<Frame>>& frames, const Tensors& columns, const Tensors& state,
         History& history, const std::array<double, kColumns>& lrs, double noise_scale, double opacity_reg,
         double scale_reg, bool wanted_means, const Tensors& statistics, bool absgrad,
         const MaybeCells& cells) {
        StepReport report;
        {
          const Turn turn;
          const SplatColumns table = columns_of(columns);
          const AdamState moments = state_of(state, columns);
          std::vector<const Frame*> pointers;
          for (const auto& frame : frames) pointers.push_back(frame.get());
          StepSettings settings = step_settings(lrs, noise_scale, opacity_reg, scale_reg, wanted_means,
                                                statistics_of(statistics, absgrad, homes_of(table)));
          settings.cells =
              cells_for_step(cells, columns, state, frames.empty() ? homes_of(table) : frames[0]->homes);
          report = step(pointers, table, moments, history, settings);
          history.push(lrs, noise_scale);
        }
        return report_of(report);
      },
      py::arg("frames"), py::arg("columns"), py::arg("state"), py::arg("history"), py::arg("lrs"),
      py::arg("noise_scale"), py::arg("opacity_reg"), py::arg("scale_reg"), py::arg("wanted_means") = true,
      py::arg("statistics") = Tensors(), py::arg("absgrad") = false, py::arg("cells") = py::none());

  py::class_<TrainResult>(m, "TrainResult", "What one train_step leaves; losses stay on the device.")
      .def("losses", &losses_of)
      .def_property_readonly("frame", [](const TrainResult& result) { return result.frame; })
      .def_property_readonly("report",
                             [](const TrainResult& result) { return report_of(result.outcome.step); })
      .def_property_readonly("culled",
                             [](const TrainResult& result) { return cull_counts(result.outcome.culled); })
      .def("take_images", [](TrainResult& result) { return std::exchange(result.images, {}); })
      .def_property_readonly("dL_dexposures", [](const TrainResult& result) { return result.dL_dexposures; })
      .def_property_readonly("times",
                             [](const TrainResult& result) { return stage_times(result.outcome.times); })
      .def_property_readonly("links", [](const TrainResult& result) { return dict_of(result.outcome.links); })
      .def_property_readonly("dL_dviewmats", [](const TrainResult& result) {
        return viewmat_grads(result.outcome.dL_dviewmats);
      });
  m.def("train_step", &train_step_tensors, py::arg("columns"), py::arg("state"), py::arg("history"),
        py::arg("cameras"), py::arg("targets"), py::arg("masks"), py::arg("pending"), py::arg("ssim_weight"),
        py::arg("background"), py::arg("antialiased"), py::arg("sh_degree"), py::arg("wanted_viewmats"),
        py::arg("wanted_step"), py::arg("wanted_images"), py::arg("lrs"), py::arg("noise_scale"),
        py::arg("opacity_reg"), py::arg("scale_reg"), py::arg("wanted_means"), py::arg("statistics"),
        py::arg("absgrad"), py::arg("cells") = py::none(),
        py::arg("exposures") = std::vector<std::optional<at::Tensor>>());
  // Bring all rows up to date and forget the steps held.
  m.def(
      "splat_flush",
      [](const Tensors& columns, const Tensors& state, History& history, const MaybeCells& cells) {
        const SplatColumns table = columns_of(columns);
        const AdamState moments = state_of(state, columns);
        const Turn turn;
        if (cells && history.length() > 0) cells->forget();
        if (!cells) bump_versions(columns);
        flush(table, moments, history);
        history.clear();
      },
      py::arg("columns"), py::arg("state"), py::arg("history"), py::arg("cells") = py::none());
}

}  // namespace mgpu::splat
