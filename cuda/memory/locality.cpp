// SPDX-License-Identifier: Apache-2.0
#include "memory/locality.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

#include "memory/buffer.h"
#include "memory/page.h"
#include "memory/pool.h"

namespace mgpu {

namespace {

// Chunks of undeclared tensors are cut by bytes, the stages' by rows: the cuts differ by less than one row a
// shard.
constexpr int64_t kSlackBytes = 1024;
constexpr int kWaitSeconds = 20;  // how long a thread outside the stage waits for its end

struct ProtectedRange {
  char* begin;
  char* end;
  int home;
  char what[64];
};

// What the signal handler reads. Written only while no page is protected.
struct Stage {
  std::vector<ProtectedRange> ranges;
  const Shard* shard = nullptr;
  char name[64] = "";
};

std::atomic<bool> checked{false};
std::mutex stage_mutex;  // one local stage at a time
Stage stage;
std::atomic<bool> stage_active{false};
thread_local bool in_stage = false;
thread_local bool stage_thread = false;
struct sigaction previous_action;

void handle_fault(int signal, siginfo_t* info, void* context) {
  const char* address = static_cast<const char*>(info->si_addr);
  for (int waited_ms = 0;; ++waited_ms) {
    const ProtectedRange* hit = nullptr;
    if (stage_active.load())
      for (const ProtectedRange& range : stage.ranges)
        if (address >= range.begin && address < range.end) hit = &range;
    if (!hit && waited_ms > 0) return;  // the stage is over: try again
    if (!hit) break;
    if (in_stage || stage_thread || waited_ms > kWaitSeconds * 1000) {
      char text[512];
      const int length = snprintf(
          text, sizeof text,
          "locality violation: shard %d (%s) touched page %p of %s, home of shard %d, in stage %s. Read "
          "other shards' data in an exchange stage only (mesh/fork_join.h, Access::kExchange).\n",
          stage.shard->index, stage.shard->name.c_str(),
          reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) / kOsPageBytes * kOsPageBytes),
          hit->what, hit->home, stage.name);
      ssize_t ignored =
          write(STDERR_FILENO, text, static_cast<size_t>(std::min<int>(length, sizeof text - 1)));
      (void)ignored;
      _exit(kLocalityExitCode);
    }
    usleep(1000);
  }
  // not ours: hand over to whoever was there before, or die as usual
  if (previous_action.sa_flags & SA_SIGINFO) {
    previous_action.sa_sigaction(signal, info, context);
  } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(signal);
  } else {
    sigaction(SIGSEGV, &previous_action, nullptr);  // the instruction faults again, now for good
  }
}

void install_handler() {
  struct sigaction action{};
  struct sigaction current{};
  sigaction(SIGSEGV, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == &handle_fault) return;
  previous_action = current;
  action.sa_sigaction = &handle_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, nullptr);
}

// Protect the hardware pages of a block that lie wholly inside [begin, end); no other block shares the
// block's last one.
void add_inner(const LiveBlock& block, char* begin, char* end, int home, const char* what) {
  if (end == block.base + block.bytes) end = block.base + round_up(block.bytes, kOsPageBytes);
  const auto first = round_up(reinterpret_cast<int64_t>(begin), kOsPageBytes);
  const auto last = reinterpret_cast<int64_t>(end) / kOsPageBytes * kOsPageBytes;
  if (last <= first) return;
  ProtectedRange range{reinterpret_cast<char*>(first), reinterpret_cast<char*>(last), home, ""};
  snprintf(range.what, sizeof range.what, "%s", what);
  stage.ranges.push_back(range);
}

void add_block(const LiveBlock& block, int shard) {
  const int shards = mesh().size();
  char what[64];
  if (!block.tensor) {
    if (block.owner == kExchange || block.owner == shard) return;
    snprintf(what, sizeof what, "a buffer of %lld bytes", static_cast<long long>(block.bytes));
    add_inner(block, block.base, block.base + block.bytes, block.owner, what);
    return;
  }
  if (block.split) {
    const RowSplit& split = *block.split;
    char* row0 = block.base + split.offset;
    snprintf(what, sizeof what, "%s", split.what.empty() ? "a column" : split.what.c_str());
    for (int other = 0; other < shards; ++other) {
      const RowRange rows = split.row_from_shard[static_cast<size_t>(other)];
      if (other == shard || rows.empty()) continue;
      char* begin = row0 + rows.begin * split.row_bytes;
      char* end = row0 + rows.end * split.row_bytes;
      add_inner(block, begin, end, other, what);
    }
    return;
  }
  if (block.bytes < std::max(shard_threshold(), shards * kOsPageBytes)) return;
  snprintf(what, sizeof what, "a tensor of %lld bytes", static_cast<long long>(block.bytes));
  const RowRange own = equal_chunk(block.bytes, shard, shards);
  const int64_t own_begin = std::max<int64_t>(0, own.begin - kSlackBytes);
  const int64_t own_end = std::min(block.bytes, own.end + kSlackBytes);
  for (int other = 0; other < shards; ++other) {
    if (other == shard) continue;
    RowRange bytes = equal_chunk(block.bytes, other, shards);
    if (other < shard) bytes.end = std::min(bytes.end, own_begin);
    if (other > shard) bytes.begin = std::max(bytes.begin, own_end);
    add_inner(block, block.base + bytes.begin, block.base + bytes.end, other, what);
  }
}

}  // namespace

bool locality_checked() { return checked.load(std::memory_order_relaxed); }
void set_locality_checked(bool value) { checked.store(value); }

void set_row_split(const void* base, int64_t rows, int64_t row_bytes, const RowRange* row_from_shard,
                   const char* what) {
  if (locality_checked() && base != nullptr) store_row_split(base, rows, row_bytes, row_from_shard, what);
}

LocalityScope::LocalityScope(const Shard& shard, const char* stage_name, Access access)
    : active_(locality_checked() && access == Access::kLocal && mesh().size() > 1) {
  if (!active_) return;
  stage_mutex.lock();
  install_handler();
  stage.ranges.clear();
  stage.shard = &shard;
  snprintf(stage.name, sizeof stage.name, "%s", stage_name);
  visit_blocks([&](const LiveBlock& block) { add_block(block, shard.index); });
  in_stage = true;
  stage_active.store(true);
  for (const ProtectedRange& range : stage.ranges)
    mprotect(range.begin, static_cast<size_t>(range.end - range.begin), PROT_NONE);
}

LocalityScope::~LocalityScope() {
  if (!active_) return;
  for (const ProtectedRange& range : stage.ranges)
    mprotect(range.begin, static_cast<size_t>(range.end - range.begin), PROT_READ | PROT_WRITE);
  stage_active.store(false);
  in_stage = false;
  stage_mutex.unlock();
}

void unprotect_block(void* base, int64_t bytes) noexcept {
  if (!stage_active.load()) return;
  mprotect(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(base) / kOsPageBytes * kOsPageBytes),
           static_cast<size_t>(round_up(bytes, kOsPageBytes)), PROT_READ | PROT_WRITE);
}

void mark_stage_thread() { stage_thread = true; }

}  // namespace mgpu
