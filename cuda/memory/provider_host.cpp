// SPDX-License-Identifier: Apache-2.0
// provider_host.cpp: pages of ordinary memory. Which shard a page lies on is only written down (arena.h),
// because the shards of the host flavour share one memory; the locality check (locality.h) holds them to it.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "memory/locality.h"
#include "memory/page.h"
#include "memory/provider.h"

namespace mgpu {

namespace {

[[noreturn]] void fail(const char* what, int64_t pages) {
  throw OutOfMemory("mgpu could not " + std::string(what) + " " + std::to_string(pages * 2) +
                    " MiB of host memory (" + std::strerror(errno) +
                    "). Free tensors, or lower the number of Gaussians or the image size.");
}

class HostProvider final : public PageProvider {
 public:
  void* reserve(int64_t pages) override {
    // one page more, so that the range can start at a multiple of the page size (huge pages need that)
    const int64_t bytes = (pages + 1) * kPageBytes;
    void* raw = mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) fail("reserve", pages);
    char* begin = static_cast<char*>(raw);
    char* base = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(begin), kPageBytes));
    if (base > begin) munmap(begin, static_cast<size_t>(base - begin));
    char* end = base + pages * kPageBytes;
    if (begin + bytes > end) munmap(end, static_cast<size_t>(begin + bytes - end));
    return base;
  }

  void release(void* base, int64_t pages) noexcept override {
    const size_t bytes = static_cast<size_t>(pages * kPageBytes);
    if (locality_checked()) {
      // keep the addresses: a stage may still hold them in its list of protected ranges
      mmap(base, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    } else {
      munmap(base, bytes);
    }
  }

  void map(void* at, int64_t pages, int /*place*/) override {
    const size_t bytes = static_cast<size_t>(pages * kPageBytes);
    if (mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0) fail("map", pages);
    madvise(at, bytes, MADV_HUGEPAGE);  // a wish; without huge pages everything works, a little slower
  }

  void unmap(void* at, int64_t pages) override {
    // fresh memory, should the pages ever be mapped again
    mmap(at, static_cast<size_t>(pages * kPageBytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
         0);
  }

  void zero(void* /*at*/, int64_t /*pages*/) override {}  // fresh memory is zero
  void move(void* /*at*/, std::vector<int16_t>& places, const std::vector<int16_t>& to) override {
    places = to;
  }
  bool same(int /*a*/, int /*b*/) const override { return true; }
  int64_t cache_bytes() const override { return int64_t{1} << 30; }
};

}  // namespace

std::string free_memory_table() { return ""; }

PageProvider& provider() {
  static HostProvider* instance = new HostProvider;
  return *instance;
}

}  // namespace mgpu
