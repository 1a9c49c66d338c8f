// SPDX-License-Identifier: Apache-2.0
// check_lanes: the threads of mesh/lanes_cuda.cpp without a GPU (tests/device/test_lanes.py builds and runs
// it, with MGPU_LAUNCH_THREADS=shards). Prints what is wrong; the exit code is the number of such lines.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "mesh/gate.h"
#include "mesh/lanes.h"
#include "mesh/mesh.h"

namespace mgpu {

int shard_gpu(int) { return 0; }  // of launch.h

namespace {

int wrong = 0;

void expect(bool true_now, const char* what, int lanes) {
  if (true_now) return;
  std::printf("%d lanes: %s\n", lanes, what);
  ++wrong;
}

// What the caller's thread has, and what its lanes took over from it.
thread_local int64_t own_context = 0;

void check_rounds(int lanes) {
  constexpr int64_t kRounds = 500;
  std::vector<int64_t> sum(static_cast<size_t>(lanes), 0);
  int64_t others_context = 0;
  for (int64_t round = 0; round < kRounds; ++round) {
    own_context = round;
    std::atomic<int> with_it{0};
    run_lanes([&](int lane) {
      const LaunchScope in_the_callers_turn;
      sum[static_cast<size_t>(lane)] += round;
      with_it += own_context == round;
      if (round % 100 == 0) run_lanes([](int) {});  // by this thread alone
    });
    others_context += with_it != lanes;
  }
  for (const int64_t of_lane : sum)
    expect(of_lane == kRounds * (kRounds - 1) / 2, "a round was left out or done twice", lanes);
  expect(others_context == 0, "a lane did not take over the caller's context", lanes);
}

void check_threads(int lanes) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  run_lanes([&](int) {
    const std::lock_guard<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  expect(threads.size() == static_cast<size_t>(lanes), "not every lane has a thread of its own", lanes);
  expect(threads.count(std::this_thread::get_id()) == 1, "lane 0 is not the caller's thread", lanes);
}

void check_errors(int lanes) {
  for (int first = 0; first < lanes; ++first) {
    std::atomic<int> done{0};
    int caught = -1;
    try {
      run_lanes([&](int lane) {
        ++done;
        if (lane >= first) throw std::runtime_error(std::to_string(lane));
      });
    } catch (const std::runtime_error& error) {
      caught = std::stoi(error.what());
    }
    expect(caught == first, "not the lowest lane's error was thrown", lanes);
    expect(done == lanes || lanes == 1, "an error kept other lanes from their work", lanes);
  }
}

void check_several_callers(int lanes) {
  constexpr int kCallers = 4, kRounds = 100;
  std::atomic<int64_t> total{0};
  std::vector<std::thread> callers;
  for (int k = 0; k < kCallers; ++k) {
    callers.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) run_lanes([&](int) { ++total; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  expect(total == int64_t{kCallers} * kRounds * lanes, "callers took work from each other", lanes);
}

}  // namespace
}  // namespace mgpu

int main() {
  using namespace mgpu;
  set_lane_context({[] { return own_context; }, [](int64_t captured) { own_context = captured; }});
  for (const int lanes : {1, 3, 8, 2, 8}) {
    set_mesh(std::vector<std::string>(static_cast<size_t>(lanes), "cuda:0"));
    expect(lane_count() == lanes, "another number of them was asked for", lanes);
    check_rounds(lanes);
    check_threads(lanes);
    check_errors(lanes);
    check_several_callers(lanes);
  }
  std::printf("%d wrong\n", wrong);
  return wrong;
}
