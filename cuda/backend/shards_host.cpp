// SPDX-License-Identifier: Apache-2.0
// shards_host.cpp: the shards are threads of the pool; every shard is a part of its own.
#include <dlfcn.h>

#include <exception>
#include <mutex>

#include "backend/alias.h"
#include "backend/shards.h"
#include "mesh/fork_join.h"

namespace mgpu {

namespace {

// torch's own copies of OpenMP and MKL, found in its library: another copy (of the system) would not be
// heard. at::set_num_threads would do for all threads of the process, and takes microseconds.
struct ThreadControls {
  void (*omp_set_num_threads)(int) = nullptr;
  int (*omp_get_max_threads)() = nullptr;
  int (*mkl_set_num_threads_local)(int) = nullptr;

  ThreadControls() {
    void* library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    if (!library) return;
    omp_set_num_threads = reinterpret_cast<void (*)(int)>(dlsym(library, "omp_set_num_threads"));
    omp_get_max_threads = reinterpret_cast<int (*)()>(dlsym(library, "omp_get_max_threads"));
    mkl_set_num_threads_local = reinterpret_cast<int (*)(int)>(dlsym(library, "MKL_Set_Num_Threads_Local"));
  }
};

const ThreadControls& controls() {
  static const ThreadControls* instance = new ThreadControls;
  return *instance;
}

// While alive, kernels that this thread calls run on this thread alone.
class InnerThreadsOff {
 public:
  InnerThreadsOff() {
    if (controls().omp_set_num_threads && controls().omp_get_max_threads) {
      omp_before_ = controls().omp_get_max_threads();
      controls().omp_set_num_threads(1);
    }
    if (controls().mkl_set_num_threads_local) mkl_before_ = controls().mkl_set_num_threads_local(1);
  }
  ~InnerThreadsOff() {
    if (omp_before_ > 0) controls().omp_set_num_threads(omp_before_);
    if (controls().mkl_set_num_threads_local) controls().mkl_set_num_threads_local(mkl_before_);
  }

 private:
  int omp_before_ = 0;
  int mkl_before_ = 0;
};

}  // namespace

int part_count() { return mesh().size(); }
RowRange part_range(int64_t count, int part) { return equal_chunk(count, part, mesh().size()); }
bool one_part_runs_whole() { return false; }
void set_parts_merged(bool /*merged*/) {}

void run_on_parts(const std::function<void(int part)>& work) {
  if (mesh().size() == 1) {
    BelowAutograd below_autograd;
    work(0);
    return;
  }
  std::mutex mutex;
  int failed_shard = mesh().size();
  std::exception_ptr error;
  for_each_shard(
      "aten",
      [&](const Shard& shard) {
        BelowAutograd below_autograd;
        InnerThreadsOff inner_threads_off;
        try {
          work(shard.index);
        } catch (...) {
          std::lock_guard<std::mutex> lock(mutex);
          if (shard.index < failed_shard) {
            failed_shard = shard.index;
            error = std::current_exception();
          }
        }
      },
      Access::kExchange);  // an operand may be broadcast, or a view that starts anywhere
  if (error) std::rethrow_exception(error);
}

}  // namespace mgpu
