// SPDX-License-Identifier: Apache-2.0
// check_exchange: the CUDA flavour's stages between shards (assign.cu, exchange.cu, bin.cu), played on the
// host (cuda_on_host.h): what owners receive, their lists and what comes home, against plain loops over
// tiles. Prints a line a case; the exit code is 1 if anything is wrong. tests/splats/test_exchange_played.py
// builds and runs it.
#undef _FORTIFY_SOURCE  // whose longjmp knows no other stacks
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "mesh/fork_join.h"
#include "splat/assign.cu"
#include "splat/bin.cu"
#include "splat/exchange.cu"

// ---- fibers

namespace played {

namespace {

struct Fiber {
  ucontext_t begin;
  jmp_buf at;  // swapcontext would ask the kernel each time
  std::vector<char> stack;
  bool started, done;
};
struct Barrier {
  unsigned arrived = 0, round = 0;
};

std::vector<Fiber> fibers;
jmp_buf scheduler;
unsigned running, threads_of_block;
Barrier of_block;
std::vector<Barrier> of_warps;
std::vector<std::array<uint64_t, 32>> words;
const std::function<void()>* body_of_thread;

void thread_main() {
  (*body_of_thread)();
  fibers[running].done = true;
  _longjmp(scheduler, 1);
}

// Until the fiber waits, or is done.
[[gnu::noinline]] void go_on(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.begin);
}

[[gnu::noinline]] void wait_once(Fiber& fiber) {
  if (!_setjmp(fiber.at)) _longjmp(scheduler, 1);
}

void wait_at(Barrier& barrier, unsigned wanted) {
  const unsigned round = barrier.round;
  if (++barrier.arrived == wanted) {
    barrier.arrived = 0;
    ++barrier.round;
    return;
  }
  const unsigned self = running;
  while (barrier.round == round) wait_once(fibers[self]);
}

}  // namespace

void wait_for_block() { wait_at(of_block, threads_of_block); }
void wait_for_warp() { wait_at(of_warps[threadIdx.x / 32], 32); }
uint64_t* lanes() { return words[threadIdx.x / 32].data(); }

void run(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  constexpr size_t kStack = size_t{1} << 16;
  body_of_thread = &body;
  threads_of_block = threads;
  gridDim = {blocks, 1, 1};
  if (fibers.size() < threads) fibers.resize(threads);
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx = {block, 0, 0};
    of_block = {};
    of_warps.assign(threads / 32, {});
    words.resize(threads / 32);
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = fibers[t];
      fiber.stack.resize(kStack);
      fiber.started = fiber.done = false;
      getcontext(&fiber.begin);
      fiber.begin.uc_stack.ss_sp = fiber.stack.data();
      fiber.begin.uc_stack.ss_size = kStack;
      fiber.begin.uc_link = nullptr;
      makecontext(&fiber.begin, thread_main, 0);
    }
    for (unsigned left = threads; left > 0;) {
      for (unsigned t = 0; t < threads; ++t) {
        if (fibers[t].done) continue;
        running = t;
        threadIdx = {t, 0, 0};
        go_on(fibers[t]);
        left -= fibers[t].done;
      }
    }
  }
}

}  // namespace played

// ---- the runtime

extern "C" {
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 3;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
}

namespace mgpu {

namespace {
int shards_here = 1;
}

constexpr int kFresh = 0xA5, kGuard = 64;
int overruns = 0;

void* allocate_temporary(int64_t bytes, int) {
  if (bytes <= 0) return nullptr;
  const auto size = static_cast<size_t>((bytes + kGuard + 63) / 64 * 64);
  void* const data = std::aligned_alloc(64, size);
  std::memset(data, kFresh, size);  // nobody may count on zeros, nor write behind the end
  return data;
}
void free_temporary(void* data, int64_t bytes, int) noexcept {
  for (int k = 0; data && k < kGuard; ++k) overruns += static_cast<unsigned char*>(data)[bytes + k] != kFresh;
  std::free(data);
}
void read_back_bytes(void* host, const void* device, int64_t bytes, int) {
  if (bytes > 0) std::memcpy(host, device, static_cast<size_t>(bytes));
}
void upload_bytes(void* device, const void* host, int64_t bytes, int) {
  if (bytes > 0) std::memcpy(device, host, static_cast<size_t>(bytes));
}
void zero_bytes(void* device, int64_t bytes, int) {
  if (bytes > 0) std::memset(device, 0, static_cast<size_t>(bytes));
}
void copy_between(void* to, int, const void* from, int, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}
void ReadBack::add_bytes(void* host, const void* device, int64_t bytes, int) {
  pieces_.push_back({host, 0, bytes});
  sources_.push_back(device);
}
void ReadBack::wait() {
  for (size_t i = 0; i < pieces_.size(); ++i)
    std::memcpy(pieces_[i].host, sources_[i], static_cast<size_t>(pieces_[i].bytes));
}
int shard_device(int) { return 0; }
cudaStream_t shard_stream(int) { return nullptr; }
void for_each_shard(const char*, const std::function<void(const Shard&)>& work, Access, Launch) {
  for (int shard = 0; shard < shards_here; ++shard) work(Shard{shard, "played", 0});
}
void check_cuda(cudaError_t, const char*) {}
void check_kernel(const char*, int, int64_t) {}
DeviceGuard::DeviceGuard(int) {}
DeviceGuard::~DeviceGuard() {}

namespace splat {

namespace {

// Who reaches whose memory.
enum class Reach { kAll, kNobody, kSome };
Reach reach = Reach::kAll;

}  // namespace

bool shards_reach(int from, int to) {
  return from == to || reach == Reach::kAll || (reach == Reach::kSome && (from + to) % 3 == 0);
}

namespace {

int wrong = 0;

void expect(bool true_now, const char* what) {
  if (true_now) return;
  if (++wrong <= 20) std::printf("  wrong: %s\n", what);
}

struct Case {
  int shards, views, width, height, rows;  // rows of a home
  double size;                             // of a Gaussian, pixels
  bool scattered;                          // over the image; else a home has a band of it
  Reach reach;
  bool counted = false;  // home h has rows + h records a view, and every seventh meets no tile
  bool deterministic = false, large_ascend = false;  // how large ones are listed: else from the last one on
};

bool is_small(const Record& record) {
  return (record.tile_rect[2] - record.tile_rect[0]) * (record.tile_rect[3] - record.tile_rect[1]) <=
         kSmallTiles;
}

// Calls visit(x, y, bit in the record's mask) for the tiles that it meets.
template <typename Visit>
void for_tiles(const View& view, const Record& record, const Visit& visit) {
  math::TileEllipse ellipse;
  if (!math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) return;
  const int columns = record.tile_rect[2] - record.tile_rect[0];
  for (int y = record.tile_rect[1]; y < record.tile_rect[3]; ++y) {
    const math::TileSpan span = math::tile_span_of(ellipse, view, record.tile_rect, y);
    for (int x = span.begin; x < span.end; ++x)
      visit(x, y, (y - record.tile_rect[1]) * columns + x - record.tile_rect[0]);
  }
}

bool owns(const TileOwner& owner, const View& view, int x, int y) {
  const int64_t position = view.position_of(int64_t{y} * view.tiles_x + x);
  return position >= owner.tiles.begin && position < owner.tiles.end;
}

// Patches of the tiles that the record meets and, if there is one, the owner has: tile by tile.
int32_t cover_patches(const View& view, const Record& record, const TileOwner* owner) {
  math::TileEllipse ellipse;
  math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse);
  const PatchBox box = patch_box(record.mean2d, half_extent_of(ellipse));
  int32_t patches = 0;
  for_tiles(view, record, [&](int x, int y, int) {
    if (!owner || owns(*owner, view, x, y)) patches += box.in_span(y, x, x + 1);
  });
  return patches;
}

class Play {
 public:
  Play(const Case& of, unsigned seed) : of_(of), random_(seed) {
    shards_here = of.shards;
    reach = of.reach;
    frame_.settings.deterministic = of.deterministic;
    const float identity[16] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
    int64_t tiles = 0;
    for (int v = 0; v < of.views; ++v) {  // each is a little wider than the last
      frame_.views.push_back(
          make_view(identity, 100, 100, of.width / 2., of.height / 2., of.width + 16 * v, of.height, tiles));
      tiles += frame_.views.back().tile_count();
    }
    const auto shards = static_cast<size_t>(of.shards);
    for (int shard = 0; shard < of.shards; ++shard)
      frame_.homes.push_back({int64_t{shard} * of.rows, int64_t{shard + 1} * of.rows});
    order_tiles(frame_);
    frame_.shards.resize(shards);
    frame_.parcels.resize(shards);
    for (auto& parcels : frame_.parcels) parcels.resize(shards);
    frame_.constants.resize(shards);
    frame_.run_table.assign(shards * static_cast<size_t>(run_table_words(frame_)), 0);
    for (int shard = 0; shard < of.shards; ++shard) fill_home(shard);
  }

  void run() {
    assign_tiles(frame_);
    exchange_records(frame_);
    check_received();
    bin_records(frame_);
    check_lists();
    check_way_back();
    std::printf("%d shards, %d views of %dx%d, %lld records, %lld received: %d wrong\n", of_.shards,
                of_.views, of_.width, of_.height, static_cast<long long>(records_),
                static_cast<long long>(received_), wrong);
  }
  std::vector<int64_t> ends_of_ranges() {
    assign_tiles(frame_);
    return frame_.ranges.end;
  }

 private:
  double draw() { return std::uniform_real_distribution<double>(0, 1)(random_); }

  // What stage "project" leaves of a home; the second of many homes is empty.
  void fill_home(int shard) {
    ShardRecords& home = frame_.shards[static_cast<size_t>(shard)];
    const int rows = of_.counted ? of_.rows + shard : shard == 1 && of_.shards > 3 ? 0 : of_.rows;
    std::vector<Record> records;
    std::vector<int32_t> views;
    std::vector<int64_t> numbers;
    std::vector<TileCover> covers;
    std::vector<int32_t> patches;
    home.view_begin = {0};
    for (int v = 0; v < of_.views; ++v) {
      const View& view = frame_.views[static_cast<size_t>(v)];
      for (int row = 0; row < rows; ++row) {
        Record record{};
        math::TileEllipse ellipse;
        bool meets = make_record(view, shard, (row + 0.5) / rows, record, ellipse);
        while (of_.counted && !meets) meets = make_record(view, shard, draw(), record, ellipse);
        if (!meets) continue;
        if (of_.counted && row % 7 == 3) record.opacity = 0;
        TileCover cover{};
        std::copy(record.tile_rect, record.tile_rect + 4, cover.tile_rect);
        for_tiles(view, record, [&](int, int, int bit) {
          ++cover.count;
          if (is_small(record)) cover.mask |= 1u << bit;
        });
        patches.push_back(cover_patches(view, record, nullptr));
        records.push_back(record);
        views.push_back(v);
        numbers.push_back(int64_t{shard} * of_.rows + row);
        covers.push_back(cover);
        for (TileOwner& owner : frame_.owners)
          owner.largest_depth_key = std::max(owner.largest_depth_key, depth_key_of(record.depth));
      }
      home.view_begin.push_back(static_cast<int64_t>(records.size()));
    }
    std::vector<uint32_t> large;  // in any order
    for (size_t i = records.size(); i-- > 0;)
      if (!is_small(records[i])) large.push_back(static_cast<uint32_t>(i));
    if (of_.large_ascend) std::reverse(large.begin(), large.end());
    home.large = to_buffer(large, shard);
    home.large_count = static_cast<int64_t>(large.size());
    home.count = static_cast<int64_t>(records.size());
    records_ += home.count;
    home.record = to_buffer(records, shard);
    home.view = to_buffer(views, shard);
    home.row = to_buffer(numbers, shard);
    home.cover = to_buffer(covers, shard);
    home.patches = to_buffer(patches, shard);
    ShardConstants& constants = frame_.constants[static_cast<size_t>(shard)];
    constants.views = frame_.views.data();
    for (size_t v = 0; v < frame_.views.size(); ++v)
      constants.curves.push_back(device_curve(frame_.views[v], *frame_.curves[v], shard));
    std::vector<SumState> counts;
    for (size_t v = 0; v < frame_.views.size(); ++v)
      counts.push_back(static_cast<SumState>(home.view_begin[v + 1] - home.view_begin[v]));
    if (home.count == 0) return;
    SumState* const table = reinterpret_cast<SumState*>(frame_.run_table.data());
    const SumState large_count = large.size();
    count_tiles(frame_, shard, counts.data(), &large_count, home.count,
                table + shard * run_table_words(frame_));
  }

  // A Gaussian somewhere, of a size between a quarter and four times the case's; false if it meets no tile.
  bool make_record(const View& view, int shard, double along, Record& record, math::TileEllipse& ellipse) {
    record.mean2d[0] = static_cast<float>((of_.scattered ? draw() : along) * view.width);
    const double down = of_.scattered ? draw() : (shard + draw()) / of_.shards;
    record.mean2d[1] = static_cast<float>(down * view.height);
    const double angle = 6.28 * draw(), longer = of_.size * std::exp(3 * draw() - 1.5);
    const double shorter = std::max(0.6, longer * std::exp(-2 * draw()));
    const double c = std::cos(angle), s = std::sin(angle);
    const double p = 1 / (longer * longer), q = 1 / (shorter * shorter);
    record.conic[0] = static_cast<float>(c * c * p + s * s * q);
    record.conic[1] = static_cast<float>(c * s * (p - q));
    record.conic[2] = static_cast<float>(s * s * p + c * c * q);
    record.opacity = static_cast<float>(0.01 + 0.98 * draw());
    record.depth = static_cast<float>(0.5 + 10 * draw());
    return math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse) &&
           math::tile_rect_of(ellipse, view, record.tile_rect);
  }

  const View& view_of(const ShardRecords& home, int64_t record) const {
    return frame_.views[static_cast<size_t>(home.view[record])];
  }

  // Owners have the records that meet their tiles, home by home in order, and small ones' own tiles.
  void check_received() {
    for (int self = 0; self < of_.shards; ++self) {
      const TileOwner& owner = frame_.owners[static_cast<size_t>(self)];
      expect(owner.view.size() == (of_.views > 1 ? owner.received() : 0), "views of several views alone");
      int64_t at = 0, patches = 0;
      for (int shard = 0; shard < of_.shards; ++shard) {
        const ShardRecords& home = frame_.shards[static_cast<size_t>(shard)];
        expect(owner.peer_begin[static_cast<size_t>(shard)] == at, "where a home's records begin");
        std::vector<int64_t> sent;
        for (int64_t i = 0; i < home.count; ++i) {
          uint32_t mask = 0;
          bool meets = false;
          for_tiles(view_of(home, i), home.record[i], [&](int x, int y, int bit) {
            if (!owns(owner, view_of(home, i), x, y)) return;
            meets = true;
            if (is_small(home.record[i])) mask |= 1u << bit;
          });
          if (!meets) continue;
          patches += cover_patches(view_of(home, i), home.record[i], &owner);
          sent.push_back(i);
          if (at >= owner.received()) {
            expect(false, "a record did not come");
            continue;
          }
          expect(std::memcmp(&owner.record[at], &home.record[i], sizeof(Record)) == 0, "a record");
          if (of_.views > 1) expect(owner.view[at] == home.view[i], "a record's view");
          expect(owner.tile_mask[at] == (shards_reach(shard, self) ? mask : 0u), "a record's own tiles");
          ++at;
        }
        expect(sent == records_of_parcel(frame_, shard, self), "which records a parcel has");
      }
      expect(at == owner.received(), "how many records came");
      expect(patches == owner.patch_pairs, "how many patches they have");
      received_ += at;
    }
  }

  // Of each tile the records that meet it, front to back, in order where depths are equal.
  void check_lists() {
    for (const TileOwner& owner : frame_.owners) {
      std::vector<std::vector<std::pair<float, int32_t>>> lists(static_cast<size_t>(owner.tiles.size()));
      for (int32_t i = 0; i < owner.received(); ++i) {
        const Record& record = owner.record[i];
        const View& view = frame_.views[static_cast<size_t>(of_.views > 1 ? owner.view[i] : 0)];
        math::TileEllipse ellipse;
        math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse);
        const float2 half = half_extent_of(ellipse);
        expect(owner.half_extent[2 * i] == half.x && owner.half_extent[2 * i + 1] == half.y, "half extents");
        for_tiles(view, record, [&](int x, int y, int) {
          if (!owns(owner, view, x, y)) return;
          const int64_t position = view.position_of(int64_t{y} * view.tiles_x + x);
          lists[static_cast<size_t>(position - owner.tiles.begin)].push_back({record.depth, i});
        });
      }
      int64_t at = 0;
      for (size_t tile = 0; tile < lists.size(); ++tile) {
        std::stable_sort(lists[tile].begin(), lists[tile].end(),
                         [](const auto& a, const auto& b) { return a.first < b.first; });
        expect(owner.tile_begin[static_cast<int64_t>(tile)] == at, "where a list begins");
        for (const auto& [depth, record] : lists[tile]) {
          expect(at < owner.entry_record.size() && owner.entry_record[at] == record, "an entry of a list");
          ++at;
        }
      }
      expect(at == owner.pairs && owner.tile_begin[owner.tiles.size()] == at, "how many pairs there are");
    }
  }

  // A record's gradient is the sum of its owners', in their order, to the bit.
  void check_way_back() {
    std::vector<std::vector<RecordGrad>> sums;
    for (const ShardRecords& home : frame_.shards) sums.emplace_back(static_cast<size_t>(home.count));
    for (int self = 0; self < of_.shards; ++self) {
      TileOwner& owner = frame_.owners[static_cast<size_t>(self)];
      std::vector<float> numbers;
      for (int64_t k = 0; k < 12 * owner.received(); ++k) numbers.push_back(static_cast<float>(draw() - 0.5));
      owner.record_grad = Buffer<RecordGrad>(owner.received(), self);
      if (!numbers.empty()) std::memcpy(owner.record_grad.data(), numbers.data(), 4 * numbers.size());
      for (int shard = 0; shard < of_.shards; ++shard) {
        const std::vector<int64_t> of_home = records_of_parcel(frame_, shard, self);
        for (size_t i = 0; i < of_home.size(); ++i) {
          add_to(sums[static_cast<size_t>(shard)][static_cast<size_t>(of_home[i])],
                 owner.record_grad[owner.peer_begin[static_cast<size_t>(shard)] + static_cast<int64_t>(i)]);
        }
      }
    }
    return_gradients(frame_);
    for (size_t shard = 0; shard < sums.size(); ++shard) {
      const Buffer<RecordGrad>& grad = frame_.shards[shard].grad;
      expect(grad.size() == static_cast<int64_t>(sums[shard].size()), "how many gradients came home");
      if (sums[shard].empty()) continue;
      expect(std::memcmp(grad.data(), sums[shard].data(), sizeof(RecordGrad) * sums[shard].size()) == 0,
             "a gradient");
    }
  }

  Case of_;
  std::mt19937 random_;
  Frame frame_;
  int64_t records_ = 0, received_ = 0, pairs_ = 0;
};

}  // namespace
}  // namespace splat
}  // namespace mgpu

int main() {
  using namespace mgpu::splat;
  const Case cases[] = {
      {3, 2, 200, 130, 200, 12, true, Reach::kAll},  {3, 2, 200, 130, 200, 12, true, Reach::kNobody},
      {8, 1, 320, 200, 60, 10, false, Reach::kAll},  {8, 1, 320, 200, 60, 10, false, Reach::kSome},
      {5, 2, 40, 30, 1, 3, true, Reach::kAll},  // hardly any record
      {8, 2, 300, 200, 100, 25, true, Reach::kSome}, {32, 1, 300, 200, 3, 30, true, Reach::kAll},
      {4, 1, 2000, 1700, 60, 20, true, Reach::kAll},  // rectangles of hundreds of tiles
      {2, 1, 320, 200, 3000, 2, true, Reach::kAll},   // so many that a sample of them is counted (512 here)
  };
  unsigned seed = 0;
  for (const Case& of : cases) Play(of, ++seed).run();
  // homes around the edges of a warp, of a block, and of what a block sums up
  for (int rows : {0, 31, 255, 1000, 8191})
    Play({3, rows > 1000 ? 1 : 2, 300, 200, rows, 5, true, Reach::kSome, true}, ++seed).run();
  // more parts than a block brings in at a time
  for (int shards : {2, 7, 32}) Play({shards, 1, 320, 200, 40, 60, true, Reach::kAll, true}, ++seed).run();
  // more large ones than are all counted, listed in whichever order, as atomics have it: the same ranges
  std::vector<int64_t> ends[2];
  for (bool ascend : {false, true}) {
    Case of{4, 1, 700, 500, 200, 60, true, Reach::kAll};
    of.deterministic = true;
    of.large_ascend = ascend;
    ends[ascend] = Play(of, 100).ends_of_ranges();
  }
  expect(ends[0] == ends[1], "the ranges of a frame that is to repeat to the bit");
  if (mgpu::overruns > 0) std::printf("%d bytes behind the end of an array were written\n", mgpu::overruns);
  return wrong + mgpu::overruns != 0;
}
