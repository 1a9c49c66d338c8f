// SPDX-License-Identifier: Apache-2.0
// bindings_render.cpp: render and project for ns_mgpu_splat.splats: tensors in, frames and tensors out.
// What goes in is checked in bindings_frame.cpp.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "bindings.h"
#include "memory/transfer.h"
#include "mesh/fork_join.h"
#include "splat/bindings_frame.h"
#include "splat/bindings_links.h"
#include "splat/exchange.h"
#include "splat/pair_counts.h"
#include "splat/pipeline.h"

namespace mgpu::splat {

namespace py = pybind11;
using at::Tensor;

namespace {

using Image =
    std::tuple<Tensor, std::optional<Tensor>, Tensor>;  // rgb [H,W,3], depth [H,W,1], accumulation [H,W,1]

std::pair<std::shared_ptr<Frame>, std::vector<Image>> splat_forward(
    const Tensors& columns, const std::optional<Tensors>& state, const std::shared_ptr<History>& history,
    const std::vector<CameraArguments>& cameras, const Background& background, bool antialiased,
    int sh_degree, bool wanted_depth, const std::optional<std::vector<std::pair<int64_t, int64_t>>>& homes,
    bool wanted_backward, bool wanted_absgrad, const MaybeCells& cells) {
  const Turn turn;
  RenderSettings settings = render_settings(background, antialiased, sh_degree);
  settings.wanted_depth = wanted_depth;
  settings.wanted_backward = wanted_backward;
  settings.wanted_absgrad = wanted_absgrad;
  auto frame = make_frame(columns, state, history, cameras, settings, cells, homes);
  const auto options = columns[0].options().requires_grad(false);
  std::vector<Image> images;
  std::vector<ImagePointers> pointers;
  for (const View& view : frame->views) {
    Tensor rgb = at::empty({view.height, view.width, 3}, options);
    Tensor accumulation = at::empty({view.height, view.width, 1}, options);
    std::optional<Tensor> depth;
    if (wanted_depth) depth = at::empty({view.height, view.width, 1}, options);
    pointers.push_back({floats(rgb, "rgb"), depth ? floats(*depth, "depth") : nullptr,
                        floats(accumulation, "accumulation")});
    images.emplace_back(std::move(rgb), std::move(depth), std::move(accumulation));
  }
  run_forward(*frame, pointers);
  return {std::move(frame), std::move(images)};
}

void splat_backward(Frame& frame, const std::vector<std::array<std::optional<Tensor>, 3>>& grads) {
  const Turn turn;
  TORCH_CHECK_VALUE(grads.size() == frame.views.size(), "expected gradients of ", frame.views.size(),
                    " images, got ", grads.size());
  std::vector<Tensor> kept;
  std::vector<ImageGradPointers> pointers;
  for (size_t v = 0; v < grads.size(); ++v) {
    const int64_t pixels = int64_t{frame.views[v].height} * frame.views[v].width;
    const float* data[3] = {};
    for (int i = 0; i < 3; ++i) {
      if (!grads[v][i]) continue;
      kept.push_back(grads[v][i]->contiguous());
      TORCH_CHECK_VALUE(kept.back().numel() == pixels * (i == 0 ? 3 : 1),
                        "the gradient of an image of camera ", v, " has sizes ", kept.back().sizes());
      data[i] = floats(kept.back(), "the gradient of an image");
    }
    pointers.push_back({data[0], data[1], data[2]});
  }
  run_backward(frame, pointers);
}

// Gradients of the wanted columns (dense) and, if asked, of the viewmats [C, 4, 4] on the CPU.
std::pair<std::vector<std::optional<Tensor>>, std::optional<Tensor>> splat_param_grads(
    const Frame& frame, const std::array<bool, kColumns>& wanted, bool wanted_viewmats) {
  const Turn turn;
  const Tensors& tensors = kept_alive(frame).tensors;
  std::vector<std::optional<Tensor>> grads(kColumns);
  float* data[kColumns] = {};
  for (int i = 0; i < kColumns; ++i) {
    if (!wanted[i]) continue;
    grads[i] = at::zeros(tensors[i].sizes(), tensors[i].options().dtype(at::kFloat).requires_grad(false));
    declare_split(*grads[i], frame.homes, "a gradient");
    data[i] = floats(*grads[i], "a gradient");
  }
  const ColumnGrads columns{data[0], data[1], data[2], data[3], data[4], data[5]};
  const bool any = std::any_of(wanted.begin(), wanted.end(), [](bool w) { return w; });
  const int64_t views = static_cast<int64_t>(frame.views.size());
  std::vector<double> sums(wanted_viewmats ? views * 12 : 0);
  if (any || wanted_viewmats) {
    project_backward(frame, any ? &columns : nullptr, wanted_viewmats ? sums.data() : nullptr);
  }
  std::optional<Tensor> viewmats;
  if (wanted_viewmats) viewmats = viewmat_grads(sums);
  return {grads, viewmats};
}

std::shared_ptr<Frame> splat_project(const Tensors& columns, const std::vector<CameraArguments>& cameras,
                                     bool antialiased, int sh_degree, const MaybeCells& cells) {
  const Turn turn;
  auto frame = make_frame(columns, std::nullopt, nullptr, cameras,
                          render_settings(std::nullopt, antialiased, sh_degree), cells);
  run_project(*frame);
  return frame;
}

// The columns of Records, in their order: width in floats, and where they are in Record and in RecordGrad.
struct RecordColumn {
  int64_t width;
  size_t in_record, in_grad;
};
constexpr RecordColumn kRecordColumns[] = {{2, offsetof(Record, mean2d), offsetof(RecordGrad, mean2d)},
                                           {3, offsetof(Record, conic), offsetof(RecordGrad, conic)},
                                           {1, offsetof(Record, opacity), offsetof(RecordGrad, opacity)},
                                           {3, offsetof(Record, rgb), offsetof(RecordGrad, rgb)},
                                           {1, offsetof(Record, depth), offsetof(RecordGrad, depth)}};

int64_t record_count(const Frame& frame) {
  int64_t count = 0;
  for (const ShardRecords& shard : frame.shards) count += shard.count;
  return count;
}

// row and view [R] int64 on the CPU; means2d [R, 2], conics [R, 3], opacities [R], colors [R, 3], depths [R].
// Shards one after the other, each by (view, row): of one view, ascending by row.
std::vector<Tensor> frame_records(const Frame& frame) {
  const Turn turn;
  const auto options = kept_alive(frame).tensors[0].options().requires_grad(false);
  const int64_t count = record_count(frame);
  Tensor row = at::empty({count}, at::TensorOptions().dtype(at::kLong)), view = at::empty_like(row);
  std::vector<Tensor> out = {row, view};
  for (const RecordColumn& column : kRecordColumns) {
    const auto host = options.device(at::kCPU);
    out.push_back(column.width == 1 ? at::empty({count}, host) : at::empty({count, column.width}, host));
  }
  int64_t first = 0;
  for (const ShardRecords& shard : frame.shards) {
    const auto rows = to_vector(shard.row, shard.count);
    const auto views = to_vector(shard.view, shard.count);
    const auto records = to_vector(shard.record, shard.count);
    for (int64_t i = 0; i < shard.count; ++i) {
      row.mutable_data_ptr<int64_t>()[first + i] = rows[i];
      view.mutable_data_ptr<int64_t>()[first + i] = views[i];
    }
    for (size_t c = 0; c < std::size(kRecordColumns); ++c) {
      const RecordColumn& column = kRecordColumns[c];
      float* to = floats(out[2 + c], "a record column") + first * column.width;
      for (int64_t i = 0; i < shard.count; ++i) {
        const char* from = reinterpret_cast<const char*>(&records[i]) + column.in_record;
        std::memcpy(to + i * column.width, from, column.width * sizeof(float));
      }
    }
    first += shard.count;
  }
  for (size_t c = 2; c < out.size(); ++c) out[c] = out[c].to(options.device());
  return out;
}

// The counterpart: fills ShardRecords.grad from gradients of the columns of frame_records (None: zero).
void splat_records_backward(Frame& frame, const std::vector<std::optional<Tensor>>& grads) {
  const Turn turn;
  TORCH_CHECK_VALUE(grads.size() == std::size(kRecordColumns), "expected 5 gradients, got ", grads.size());
  const int64_t count = record_count(frame);
  int64_t first = 0;
  for (ShardRecords& shard : frame.shards) {
    std::vector<RecordGrad> record_grad(static_cast<size_t>(shard.count));
    for (size_t c = 0; c < grads.size(); ++c) {
      if (!grads[c]) continue;
      const RecordColumn& column = kRecordColumns[c];
      const Tensor grad = grads[c]->to(at::kCPU).contiguous();
      TORCH_CHECK_VALUE(grad.numel() == count * column.width, "gradient ", c, " of the records has sizes ",
                        grad.sizes());
      const float* from = floats(grad, "a gradient of the records") + first * column.width;
      for (int64_t i = 0; i < shard.count; ++i) {
        char* to = reinterpret_cast<char*>(&record_grad[i]) + column.in_grad;
        std::memcpy(to, from + i * column.width, column.width * sizeof(float));
      }
    }
    shard.grad = to_buffer(record_grad, static_cast<int>(&shard - frame.shards.data()));
    first += shard.count;
  }
}

py::dict frame_counts(const Frame& frame) {
  std::vector<int64_t> visible, received, intersections, tiles;
  for (const ShardRecords& shard : frame.shards) visible.push_back(shard.count);
  for (const TileOwner& owner : frame.owners) {
    received.push_back(owner.received());
    intersections.push_back(owner.pairs);
    tiles.push_back(owner.tiles.size());
  }
  py::dict counts;
  counts["visible"] = visible;
  counts["received"] = received;
  counts["intersections"] = intersections;
  counts["tiles"] = tiles;
  counts["exchanged_bytes"] = exchanged_bytes(frame);
  for (const auto& [name, by_shard] : cull_counts(cull_counts_of(frame))) counts[name.c_str()] = by_shard;
  return counts;
}

// For tests of the exact bin stage: of each owner, its tiles (counted row by row over all views) in the order
// of its range, tile_begin and the rows of its lists.
std::vector<std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>> frame_tile_lists(
    const Frame& frame) {
  std::vector<std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>> out;
  for (size_t o = 0; o < frame.owners.size(); ++o) {
    const TileOwner& owner = frame.owners[o];
    std::vector<int64_t> row_of_record, rows;
    for (size_t home = 0; home < frame.parcels.size(); ++home) {
      const auto row = to_vector(frame.shards[home].row, frame.shards[home].count);
      for (const int64_t record : records_of_parcel(frame, home, o)) row_of_record.push_back(row[record]);
    }
    for (const TileEntry& entry : to_vector(owner.entry)) rows.push_back(row_of_record[entry.record]);
    for (const int32_t record : to_vector(owner.entry_record)) rows.push_back(row_of_record[record]);
    std::vector<int64_t> tiles;
    for (int64_t position = owner.tiles.begin; position < owner.tiles.end; ++position) {
      size_t v = frame.views.size() - 1;
      while (frame.views[v].tile_begin > position) --v;
      tiles.push_back(frame.views[v].tile_begin + frame.views[v].tile_at(position));
    }
    out.emplace_back(tiles, to_vector(owner.tile_begin), rows);
  }
  return out;
}

// Gradients at home as one tensor on the CPU, [R, 12] in the order of RecordGrad; for tests and absgrad
// strategies.
Tensor frame_record_grads(const Frame& frame) {
  Tensor out = at::zeros({record_count(frame), 12}, at::TensorOptions().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  for (const ShardRecords& shard : frame.shards) {
    read_back(reinterpret_cast<RecordGrad*>(to), shard.grad.data(), shard.grad.size(), shard.grad.owner());
    to += shard.count * 12;
  }
  return out;
}

// For the test of the locality check: local stages in which each shard reads what is the next shard's: its
// first record, or its first row of means.
float read_neighbour(const Frame& frame, const std::string& what) {
#if MGPU_CUDA
  TORCH_CHECK(false, "locality is checked in the host flavour: set MGPU_DEVICES=cpu:3");
#endif
  const Turn turn;
  std::vector<float> seen(frame.shards.size());
  for_each_shard("read_neighbour", [&](const Shard& shard) {
    const size_t next = (shard.index + 1) % frame.shards.size();
    if (what == "records") {
      if (frame.shards[next].count) seen[shard.index] = frame.shards[next].record[0].depth;
    } else {
      const RowRange rows = frame.homes[next];
      if (!rows.empty()) seen[shard.index] = frame.columns.means[3 * (rows.begin + rows.size() / 2)];
    }
  });
  return seen.front();
}

}  // namespace

}  // namespace mgpu::splat

namespace mgpu {

MGPU_BINDINGS(render) {
  using namespace splat;
  pybind11::class_<Frame, std::shared_ptr<Frame>>(m, "Frame", "What one render leaves for its way back.")
      .def("records", &frame_records)
      .def("record_grads", &frame_record_grads)
      .def("counts", &frame_counts)
      .def("tile_lists", &frame_tile_lists)
      .def(
          "pair_counts",
          [](const Frame& frame) {
            const Turn turn;
            const PairCounts counts = count_pairs(frame);
            return std::make_pair(counts.lit, counts.patches);
          },
          "Pairs of a pixel, and of an 8 x 4 patch, with a record that contributes to it.")
      .def("links", [](const Frame& frame) { return dict_of(frame.links); })
      .def(
          "halo",
          [](const Frame& frame) {
            std::vector<std::tuple<int, int, int, std::array<int, 4>>> out;
            for (const HaloPiece& p : frame.halo)
              out.emplace_back(p.from, p.to, p.view, std::array<int, 4>{p.x0, p.y0, p.x1, p.y1});
            return out;
          },
          "Pixels that crossed for the loss, after train_step on several shards: from, to, view, rectangle.")
      .def("read_neighbour", &read_neighbour, pybind11::arg("what"))
      .def("times", [](const Frame& frame) { return stage_times(frame.times); });
  m.def("splat_forward", &splat_forward, pybind11::arg("columns"), pybind11::arg("state"),
        pybind11::arg("history"), pybind11::arg("cameras"), pybind11::arg("background"),
        pybind11::arg("antialiased"), pybind11::arg("sh_degree"), pybind11::arg("wanted_depth"),
        pybind11::arg("homes") = pybind11::none(), pybind11::arg("wanted_backward") = true,
        pybind11::arg("wanted_absgrad") = false, pybind11::arg("cells") = pybind11::none());
  m.def("splat_backward", &splat_backward, pybind11::arg("frame"), pybind11::arg("grads"));
  m.def("splat_param_grads", &splat_param_grads, pybind11::arg("frame"), pybind11::arg("wanted"),
        pybind11::arg("wanted_viewmats"));
  m.def("splat_project", &splat_project, pybind11::arg("columns"), pybind11::arg("cameras"),
        pybind11::arg("antialiased"), pybind11::arg("sh_degree"), pybind11::arg("cells") = pybind11::none());
  m.def("splat_records_backward", &splat_records_backward, pybind11::arg("frame"), pybind11::arg("grads"));
  m.def(
      "exp_negative",
      [](const at::Tensor& x) {
        at::Tensor out = at::empty_like(x);
        const float* from = floats(x, "x");
        float* to = floats(out, "out");
        for (int64_t i = 0; i < x.numel(); ++i) to[i] = math::exp_negative(from[i]);
        return out;
      },
      "math::exp_negative of each element of a CPU tensor, for its test.");
}

}  // namespace mgpu
