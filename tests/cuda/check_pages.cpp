// SPDX-License-Identifier: Apache-2.0
// check_pages.cpp: the page provider of the CUDA flavour without a GPU. The driver is played by files in
// memory that are mapped, as handles are, whole and at fixed addresses; it says no now and then. Pages move
// at random; after every step each page must have its contents, lie where the arena says, and no byte may be
// lost.
//
//     check_pages [SEED [STEPS]]
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "memory/arena.h"
#include "memory/buffer.h"
#include "memory/provider_cuda.h"
#include "memory/tally.h"
#include "memory/temporaries.h"
#include "memory/vmm_cuda.h"
#include "mesh/launch.h"

namespace {

using mgpu::kPageBytes;

std::mutex mutex;
std::map<char*, std::pair<int64_t, int>> mapped;  // bytes and GPU, by address
std::map<mgpu::vmm::Handle, int> gpu_of_handle;
std::atomic<int64_t> held[mgpu::kMaxGpus + 1];  // by GPU; the last is the host
std::atomic<int> calls_until_refusal{-1};       // -1: none is refused
std::atomic<bool> all_after{false};             // are refused too
cudaStream_t current_stream = nullptr;
thread_local int current_device = 0;
std::array<std::atomic<bool>, mgpu::kMaxGpus> works{};  // by device: it may be reading anybody's memory

int index_of(int gpu) { return gpu < 0 ? mgpu::kMaxGpus : gpu; }

[[noreturn]] void fail(const std::string& what) {
  std::printf("FAIL %s\n", what.c_str());
  std::exit(1);
}

char* fixed(void* at, int64_t bytes, int protection, int flags, int file) {
  return static_cast<char*>(mmap(at, static_cast<size_t>(bytes), protection, flags, file, 0));
}

}  // namespace

// ---- the driver

namespace mgpu::vmm {

bool supported(std::string*) { return true; }
std::vector<int> reachable_from(int) { return mesh().gpus(); }
int64_t held_bytes(int gpu) { return held[index_of(gpu)]; }

char* reserve(int64_t bytes) {
  char* raw = fixed(nullptr, bytes + kPageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  return reinterpret_cast<char*>((reinterpret_cast<int64_t>(raw) + kPageBytes - 1) / kPageBytes * kPageBytes);
}
void unreserve(void* base, int64_t bytes) noexcept { munmap(base, static_cast<size_t>(bytes)); }

Physical::Physical(int64_t bytes, int gpu) : gpu_(gpu) {
  if (calls_until_refusal >= 0 && calls_until_refusal-- == 0) {
    if (all_after) calls_until_refusal = 0;
    throw OutOfMemory("refused");
  }
  const int file = memfd_create("page", 0);
  if (file < 0 || ftruncate(file, bytes) != 0) fail("memfd");
  handle_ = static_cast<Handle>(file);
  bytes_ = bytes;
  held[index_of(gpu)] += bytes;
  std::lock_guard<std::mutex> lock(mutex);
  gpu_of_handle[handle_] = gpu;
}
Physical::~Physical() {
  if (bytes_ == 0) return;
  close(static_cast<int>(handle_));
  held[index_of(gpu_)] -= bytes_;
}

void map(void* at, const Physical& memory) {
  std::lock_guard<std::mutex> lock(mutex);
  char* const begin = static_cast<char*>(at);
  for (const auto& [other, what] : mapped)
    if (other < begin + memory.bytes() && begin < other + what.first) fail("mapped over a mapping");
  mapped[begin] = {memory.bytes(), gpu_of_handle.at(memory.handle())};
  fixed(at, memory.bytes(), PROT_NONE, MAP_SHARED | MAP_FIXED, static_cast<int>(memory.handle()));
}
void open(void* at, int64_t bytes, const std::vector<int>&) {
  if (mprotect(at, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) != 0) fail("open");
}
void unmap(void* at, int64_t bytes) noexcept {
  for (const auto& device : works)
    if (device) fail("memory is taken away while a GPU may be reading it");
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = mapped.find(static_cast<char*>(at));
  if (found == mapped.end() || found->second.first != bytes) fail("unmapped a part of a mapping");
  mapped.erase(found);
  fixed(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1);
}

}  // namespace mgpu::vmm

// ---- the runtime

namespace mgpu {
DeviceGuard::DeviceGuard(int gpu) : former_(std::exchange(current_device, physical_gpu(gpu))) {}
DeviceGuard::~DeviceGuard() { current_device = former_; }
void check_cuda(cudaError_t code, const char* what) {
  if (code != cudaSuccess) fail(what);
}
int shard_gpu(int shard) { return mesh()[shard].gpu; }
cudaStream_t shard_stream(int) { return current_stream; }
cudaStream_t quiet_stream(int) { return current_stream; }
PageProvider& provider() {
  static PageProvider* instance = make_vmm_provider();
  return *instance;
}
}  // namespace mgpu

extern "C" {
cudaError_t cudaDeviceSynchronize() {
  works[static_cast<size_t>(current_device)] = false;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(1);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(1);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaMallocAsync(void**, size_t, cudaStream_t) { return cudaErrorMemoryAllocation; }
cudaError_t cudaFreeAsync(void*, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{1} << 40;
  return cudaSuccess;
}
// What a page is known by is at both of its ends.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  for (size_t page = 0; page < bytes; page += kPageBytes)
    for (const size_t at : {page, page + kPageBytes - 64})
      std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, 64);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  for (size_t page = 0; page < bytes; page += kPageBytes)
    for (const size_t end : {page, page + kPageBytes - 64})
      std::memset(static_cast<char*>(at) + end, value, 64);
  return cudaSuccess;
}
}

// ---- the check

namespace {

struct Marked {
  explicit Marked(int64_t pages) : arena(pages) {}
  mgpu::Arena arena;
  std::vector<int64_t> mark;  // by page

  int64_t* end(int64_t page, bool last) {
    return reinterpret_cast<int64_t*>(arena.base() + (page + last) * kPageBytes - (last ? 8 : 0));
  }
  void grow(int64_t pages, std::mt19937& random) {
    const int64_t before = arena.mapped_pages();
    arena.grow_to(pages, [&](int64_t) { return static_cast<int16_t>(random() % mgpu::mesh().size()); });
    arena.zero(before, pages - before);
    for (int64_t page = before; page < pages; ++page) {
      if (*end(page, false) != 0 || *end(page, true) != 0) fail("a fresh page is not zero");
      mark.push_back(1 + static_cast<int64_t>(random()));
      *end(page, false) = *end(page, true) = mark.back();
    }
  }
  void check() {
    for (int64_t page = 0; page < arena.mapped_pages(); ++page) {
      if (*end(page, false) != mark[static_cast<size_t>(page)] ||
          *end(page, true) != mark[static_cast<size_t>(page)])
        fail("page " + std::to_string(page) + " has lost its contents");
      std::lock_guard<std::mutex> lock(mutex);
      const auto found = std::prev(mapped.upper_bound(arena.base() + page * kPageBytes));
      if (found->second.second != mgpu::gpu_of_place(arena.place(page)))
        fail("page " + std::to_string(page) + " does not lie where the arena says");
    }
  }
};

int64_t held_on_gpus() {
  int64_t bytes = 0;
  for (const int gpu : mgpu::mesh().gpus()) bytes += held[gpu];
  return bytes;
}

// Nothing is held on GPUs beyond what is mapped; on the host, spare handles are.
void check_held() {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t bytes[mgpu::kMaxGpus + 1] = {};
  for (const auto& [at, what] : mapped) bytes[index_of(what.second)] += what.first;
  for (const int gpu : mgpu::mesh().gpus())
    if (held[gpu] != bytes[gpu]) fail("memory of a GPU is held and not mapped");
  const int64_t on_host = held[index_of(-1)], mapped_there = bytes[index_of(-1)];
  if (on_host < mapped_there || on_host > mapped_there + (int64_t{1} << 30) + (int64_t{128} << 20))
    fail("more is kept on the host than its bound");
}

int64_t pick(std::mt19937& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low));
}

void check_pages(std::mt19937& random, int steps) {
  const auto place = [&] { return static_cast<int16_t>(pick(random, -1, mgpu::mesh().size())); };
  int64_t refused = 0, moved = 0;
  std::vector<std::unique_ptr<Marked>> all;
  for (int step = 0; step < steps; ++step) {
    if (all.empty() || (all.size() < 3 && pick(random, 0, 8) == 0)) {
      all.push_back(std::make_unique<Marked>(pick(random, 1, 700)));
      all.back()->grow(pick(random, 0, all.back()->arena.reserved_pages() + 1), random);
    }
    Marked& one = *all[static_cast<size_t>(pick(random, 0, static_cast<int64_t>(all.size())))];
    const int64_t pages = one.arena.mapped_pages();
    all_after = pick(random, 0, 2) == 0;
    calls_until_refusal = pick(random, 0, 3) == 0 ? static_cast<int>(pick(random, 0, 12)) : -1;
    try {
      const int64_t what = pick(random, 0, 10);
      if (what == 0) {
        one.grow(pick(random, pages, one.arena.reserved_pages() + 1), random);
      } else if (what == 1 && all.size() > 1) {
        std::swap(all.back(), all[static_cast<size_t>(pick(random, 0, static_cast<int64_t>(all.size())))]);
        all.pop_back();
      } else if (what == 2) {
        mgpu::provider().trim();
      } else if (pages > 0) {
        const int64_t first = pick(random, 0, pages), last = pick(random, first, pages) + 1;
        std::vector<int16_t> to;
        const int16_t all_to = place();
        const int64_t run = pick(random, 1, 40);
        int16_t now = place();
        for (int64_t page = first; page < last; ++page) {
          if ((page - first) % run == 0) now = place();
          to.push_back(what < 5 ? all_to : what < 7 ? place() : now);
        }
        one.arena.move(first, to);
        for (int64_t page = first; page < last; ++page)
          if (one.arena.place(page) != to[static_cast<size_t>(page - first)]) fail("a page did not go there");
        ++moved;
      }
    } catch (const mgpu::OutOfMemory&) {
      ++refused;
    }
    calls_until_refusal = -1;
    for (const auto& marked : all) marked->check();
    check_held();
  }
  all.clear();
  mgpu::provider().trim();
  if (!mapped.empty()) fail("something is still mapped");
  if (held_on_gpus() != 0 || held[index_of(-1)] != 0) fail("something is still held");
  std::printf("pages: %lld moves, %lld of all steps were refused memory\n", static_cast<long long>(moved),
              static_cast<long long>(refused));
}

void check_temporaries(std::mt19937& random, int steps) {
  struct Block {
    char* at;
    int64_t bytes;
    int owner;
    char mark;
  };
  std::vector<Block> alive;
  int64_t in_use[3] = {0, 0, 0}, refused = 0, most = 0, reserved = 0;
  const auto put_back = [&](size_t index) {
    const Block block = alive[index];
    for (const int64_t at : {int64_t{0}, block.bytes / 2, block.bytes - 1})
      if (block.at[at] != block.mark) fail("two temporaries meet");
    in_use[std::max(block.owner, 0)] -= (block.bytes + 511) / 512 * 512;
    alive.erase(alive.begin() + static_cast<int64_t>(index));
    mgpu::free_temporary(block.at, block.bytes, block.owner);
  };
  for (int step = 0; step < steps; ++step) {
    current_stream = reinterpret_cast<cudaStream_t>(pick(random, 1, 3));
    all_after = pick(random, 0, 2) == 0;
    calls_until_refusal = pick(random, 0, 10) == 0 ? static_cast<int>(pick(random, 0, 4)) : -1;
    try {
      if (!alive.empty() && pick(random, 0, 20) < 9) {
        put_back(static_cast<size_t>(pick(random, 0, static_cast<int64_t>(alive.size()))));
      } else if (pick(random, 0, 60) == 0) {
        mgpu::trim_temporaries();
      } else {
        const int64_t bytes = pick(random, 1, int64_t{1} << pick(random, 4, 29));
        const int owner = static_cast<int>(pick(random, mgpu::kExchange, mgpu::mesh().size()));
        Block block{static_cast<char*>(mgpu::allocate_temporary(bytes, owner)), bytes, owner,
                    static_cast<char>(random())};
        if (reinterpret_cast<int64_t>(block.at) % 512 != 0) fail("a temporary is not aligned");
        for (const int64_t at : {int64_t{0}, bytes / 2, bytes - 1}) block.at[at] = block.mark;
        alive.push_back(block);
        in_use[std::max(owner, 0)] += (bytes + 511) / 512 * 512;
      }
    } catch (const std::bad_alloc&) {
      ++refused;
    }
    calls_until_refusal = -1;
    for (int shard = 0; shard < 3; ++shard)
      if (mgpu::tally_of(shard).allocated != in_use[shard]) fail("a shard's bytes are not counted right");
    check_held();
    most = std::max(most, in_use[0] + in_use[1] + in_use[2]);
    reserved = std::max(reserved, held_on_gpus());
  }
  while (!alive.empty()) put_back(alive.size() - 1);
  mgpu::trim_temporaries();
  if (held_on_gpus() != 0) fail("temporaries are still held");
  std::printf("temporaries: %lld refused, %.2f GB in use at most, %.2f GB held\n",
              static_cast<long long>(refused), static_cast<double>(most) / 1e9,
              static_cast<double>(reserved) / 1e9);
}

// After an exception inside an exchange GPUs have not been joined: one may still be reading what another
// one's buffers, freed by then, lay in.
void check_trim_waits_for_readers() {
  constexpr int64_t kBytes = int64_t{40} << 20;
  const auto free_under_readers = [&] {
    mgpu::free_temporary(mgpu::allocate_temporary(kBytes, 0), kBytes, 0);
    for (const int gpu : mgpu::mesh().gpus()) works[static_cast<size_t>(mgpu::physical_gpu(gpu))] = true;
  };
  free_under_readers();
  mgpu::trim_temporaries();
  if (held_on_gpus() != 0) fail("temporaries are still held");
  free_under_readers();  // and where memory is short
  calls_until_refusal = 0;
  all_after = false;
  mgpu::free_temporary(mgpu::allocate_temporary(kBytes, 1), kBytes, 1);
  mgpu::trim_temporaries();
  for (auto& device : works) device = false;
}

}  // namespace

int main(int count, char** arguments) {
  std::mt19937 random(count > 1 ? static_cast<unsigned>(std::atoi(arguments[1])) : 1u);
  const int steps = count > 2 ? std::atoi(arguments[2]) : 300;
  rlimit files{};  // a handle is one
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  for (const bool apart : {false, true}) {  // GPUs 0, 1, 0, and 0, 1, 8
    mgpu::set_mesh({"cuda:0", "cuda:1", "cuda:0"}, apart);
    if (mgpu::mesh().gpus().size() != (apart ? 3 : 2)) fail("GPUs are not counted right");
    check_pages(random, steps);
    check_temporaries(random, 10 * steps);
    check_trim_waits_for_readers();
  }
  std::printf("ok\n");
}
