// SPDX-License-Identifier: Apache-2.0
// bindings_assign.cpp: the pure functions behind tile ownership, and a transport that writes down what it is
// asked for; for tests.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "splat/curve.h"
#include "splat/ranges.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace py = pybind11;

namespace {

using Counts = py::array_t<uint64_t, py::array::c_style | py::array::forcecast>;

// counts [shards, places]: pairs << 32 | shares of records, of runs of `run` tiles, `tiles` in all (-1: whole
// runs). Ends of the ranges in tiles, and their owners.
std::pair<std::vector<int64_t>, std::vector<int>> chosen_ranges(const Counts& counts, int64_t run,
                                                                int64_t tiles) {
  if (counts.ndim() != 2) throw std::invalid_argument("counts must be [shards, places]");
  if (tiles < 0) tiles = counts.shape(1) * run;
  if ((tiles + run - 1) / run != counts.shape(1)) throw std::invalid_argument("tiles do not fit the places");
  const TileRanges ranges = choose_ranges(counts.data(), static_cast<int>(counts.shape(0)), tiles, run);
  return {ranges.end, ranges.owner};
}

// A call as the log has it: what was asked, from, to, bytes.
using Call = std::tuple<std::string, int, int, int64_t>;

struct Log {
  std::mutex mutex;
  std::vector<Call> calls;
  void add(Call call) {
    std::lock_guard<std::mutex> lock(mutex);
    calls.push_back(std::move(call));
  }
};

Log& transport_log() {
  static Log* instance = new Log;
  return *instance;
}

// Does what the local transport does; nothing reaches anything but itself, so that all is shipped.
class RecordingTransport final : public Transport {
 public:
  bool reaches(int from, int to) const override { return from == to; }
  void ship(const char* stage, const std::vector<Shipment>& shipments) override {
    for (const Shipment& one : shipments) transport_log().add({stage, one.from, one.to, one.bytes});
    local_->ship(stage, shipments);
  }
  void gather(uint64_t* table, int64_t words) override {
    transport_log().add({"gather", -1, -1, words * static_cast<int64_t>(sizeof(uint64_t))});
    local_->gather(table, words);
  }

 private:
  std::unique_ptr<Transport> local_ = make_local_transport();
};

}  // namespace

}  // namespace mgpu::splat

namespace mgpu {

MGPU_BINDINGS(assign) {
  using namespace splat;
  m.def(
      "tile_curve", [](int tiles_x, int tiles_y) { return tile_curve(tiles_x, tiles_y)->tile_from_position; },
      pybind11::arg("tiles_x"), pybind11::arg("tiles_y"));
  m.def("choose_ranges", &chosen_ranges, pybind11::arg("counts"), pybind11::arg("run") = 1,
        pybind11::arg("tiles") = -1);
  m.def("tiles_of_run", &tiles_of_run, pybind11::arg("tiles"));
  m.def("match_ranges", &match_ranges, pybind11::arg("kept"), pybind11::arg("shards"));
  m.def("record_transport", [](bool wanted) {
    set_transport(wanted ? std::make_unique<RecordingTransport>() : make_local_transport());
  });
  m.def("transport_log", [] {
    std::lock_guard<std::mutex> lock(transport_log().mutex);
    return std::exchange(transport_log().calls, {});
  });
}

}  // namespace mgpu
