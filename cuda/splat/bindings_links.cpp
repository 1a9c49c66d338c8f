// SPDX-License-Identifier: Apache-2.0
#include "splat/bindings_links.h"

#include <pybind11/stl.h>

#include <vector>

#include "bindings.h"
#include "splat/culled.h"

namespace mgpu::splat {

namespace py = pybind11;

namespace {

std::vector<std::vector<int64_t>> matrix_of(const LinkBytes& bytes) {
  std::vector<std::vector<int64_t>> rows(static_cast<size_t>(bytes.shards()));
  for (int from = 0; from < bytes.shards(); ++from) {
    for (int to = 0; to < bytes.shards(); ++to) rows[static_cast<size_t>(from)].push_back(bytes.at(from, to));
  }
  return rows;
}

}  // namespace

py::dict dict_of(const FrameLinks& links) {
  py::dict out;
  out["records"] = matrix_of(links.records);
  out["gradients"] = matrix_of(links.gradients);
  out["pixels"] = matrix_of(links.pixels);
  out["records_sent"] = links.records_sent;
  out["remote_rows"] = links.remote_rows;
  out["visible_rows"] = links.visible_rows;
  out["load"] = links.load;
  out["imbalance"] = links.imbalance();
  return out;
}

}  // namespace mgpu::splat

namespace mgpu {

MGPU_BINDINGS(links) {
  using namespace splat;
  m.def("link_stats", [] {
    const LinkTotals totals = link_totals();
    pybind11::dict out = dict_of(totals.sum);
    out["frames"] = totals.frames;
    out["imbalance"] = totals.frames > 0 ? totals.imbalance_sum / static_cast<double>(totals.frames) : 1.0;
    out["imbalance_max"] = totals.frames > 0 ? totals.imbalance_max : 1.0;
    const CullCounts culled = cull_totals();
    out["cells"] = culled.cells;
    out["cells_kept"] = culled.cells_kept;
    out["candidates"] = culled.candidates;
    return out;
  });
  m.def("reset_link_stats", &reset_link_totals);
}

}  // namespace mgpu
