// SPDX-License-Identifier: Apache-2.0
// check_fork: a process that forks while its pool of threads is busy (mesh/fork_join.cpp). The child, and a
// child of its own, use the pool as well, with threads that they start anew. tests/device/test_threads.py
// builds and runs it. Prints how many children hung, and how many were wrong.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <thread>

#include "mesh/fork_join.h"

namespace {

// 0: what the pool did in the child was right.
int in_child(int generations) {
  alarm(10);  // one that hangs ends by a signal
  for (const int threads : {1, 3}) {
    if (threads > 1) mgpu::set_num_threads(threads);
    std::atomic<int64_t> sum{0};
    mgpu::parallel_for(100, 1, [&](int64_t begin, int64_t) { sum += begin; });
    if (sum != 4950) return 1;
  }
  if (generations == 1) return 0;
  const pid_t child = fork();
  if (child == 0) _exit(in_child(generations - 1));
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}

}  // namespace

int main() {
  constexpr int kForks = 200;
  mgpu::set_num_threads(4);
  std::atomic<bool> done{false};
  std::thread busy([&] {
    while (!done) mgpu::parallel_for(8, 1, [](int64_t, int64_t) {});
  });
  int hung = 0, wrong = 0;
  for (int i = 0; i < kForks && hung == 0; ++i) {
    const pid_t child = fork();
    if (child == 0) _exit(in_child(2));
    int status = 0;
    waitpid(child, &status, 0);
    hung += WIFSIGNALED(status);
    wrong += WIFEXITED(status) && WEXITSTATUS(status) != 0;
  }
  done = true;
  busy.join();
  std::printf("%d hung, %d wrong\n", hung, wrong);
}
