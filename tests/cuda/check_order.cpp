// SPDX-License-Identifier: Apache-2.0
// check_order.cpp: who waits for whom (mesh/fork_join_cuda.cpp, gate.cpp, lanes_cuda.cpp), without a GPU. The
// runtime is played: a stream is a count of what it was given, and a clock that says how much of every stream
// comes before what it is given next; events carry clocks. Threads run operators of random stages on three
// GPUs, and on one that counts as three (mesh.h). Before an exchange, and at the beginning of an operator,
// each stream must be behind all that any was given before.
//
//     check_order [SEED [ROUNDS]]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mesh/launch.h"

namespace {

constexpr int kStreams = 64;
using Clock = std::array<int64_t, kStreams>;

struct Stream {
  int number, device;
};
struct Event {
  int device;
  Clock clock{};
};

std::mutex mutex;
std::vector<Stream*> streams;
std::array<Clock, kStreams> behind{};  // by stream: how much of every stream comes before what it gets next
Clock given{}, done{};                 // by stream: what it was given; what the host has waited for
int devices = 1;
thread_local int current = 0;
std::atomic<int64_t> wrong{0}, unordered{0}, checked{0};

void fail(const std::string& what) {
  if (wrong++ < 10) std::printf("FAIL %s\n", what.c_str());
}
Stream& of(cudaStream_t stream) { return *reinterpret_cast<Stream*>(stream); }
Event& of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }
void merge(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}
void check_device(int device, const char* what) {
  if (device != current) fail(std::string(what) + " while another device is current");
}

}  // namespace

extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices) {
    fail("there is no device " + std::to_string(device));
    return cudaErrorInvalidDevice;
  }
  current = device;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const std::lock_guard<std::mutex> lock(mutex);
  streams.push_back(new Stream{static_cast<int>(streams.size()), current});
  *stream = reinterpret_cast<cudaStream_t>(streams.back());
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{current});
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  check_device(of(stream).device, "an event is recorded");
  if (of(event).device != of(stream).device) fail("an event of another device is recorded");
  const std::lock_guard<std::mutex> lock(mutex);
  of(event).clock = behind[static_cast<size_t>(of(stream).number)];
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard<std::mutex> lock(mutex);
  merge(behind[static_cast<size_t>(of(stream).number)], of(event).clock);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  merge(done, behind[static_cast<size_t>(of(stream).number)]);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t, void*) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
}

namespace {

using namespace mgpu;

// A kernel: what the stream gets from now on is behind it.
void launch(cudaStream_t stream) {
  check_device(of(stream).device, "a kernel is launched");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto number = static_cast<size_t>(of(stream).number);
  behind[number][number] = ++given[number];
}

Clock given_so_far() {
  const std::lock_guard<std::mutex> lock(mutex);
  return given;
}

// Whether what a stream gets next is behind all of that.
bool is_behind(cudaStream_t stream, const Clock& all) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Clock& mine = behind[static_cast<size_t>(of(stream).number)];
  for (size_t i = 0; i < all.size(); ++i)
    if (std::max(mine[i], done[i]) < all[i]) return false;
  return true;
}

// One thread's operators. All threads take turns, so what was given before one's turn stays as it was.
void operators(unsigned seed, int rounds) {
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    JoinedOperator joined;
    Clock before = given_so_far();
    for (const Shard& shard : mesh().shards())
      if (!is_behind(quiet_stream(shard.index), before)) fail("an operator begins before what others gave");
    for (unsigned stage = random() % 5; stage-- > 0;) {
      const auto access = random() % 2 ? Access::kExchange : Access::kLocal;
      const auto how = random() % 2 ? Launch::kSideBySide : Launch::kInTurn;
      const unsigned who = random() % 8;  // shards that have work
      before = given_so_far();
      const auto work = [&](const Shard& shard) {
        if (!(who >> shard.index & 1u)) return;
        const cudaStream_t stream = shard_stream(shard.index);
        const bool ordered = is_behind(stream, before);
        if (access == Access::kExchange && !ordered) fail("an exchange begins before what others gave");
        checked += access == Access::kExchange;
        unordered += access == Access::kLocal && !ordered;
        launch(stream);
      };
      for_each_shard("stage", work, access, how);
      if (random() % 8 == 0) synchronise_shard(static_cast<int>(random() % 3));
      if (random() % 8 == 0) join_shards();
    }
  }
}

void check(bool apart, unsigned seed, int rounds) {
  devices = apart ? 1 : 3;
  if (apart)
    set_mesh({"cuda:0", "cuda:0", "cuda:0"}, true);
  else
    set_mesh({"cuda:0", "cuda:1", "cuda:2"});
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 3; ++i) threads.emplace_back(operators, seed + i, rounds);
  for (std::thread& thread : threads) thread.join();
  done = given;  // streams of this mesh are no concern of the next one's
  std::printf("%s: %lld exchanges in order, %lld local stages beside what others gave\n",
              apart ? "apart" : "three GPUs", static_cast<long long>(checked.exchange(0)),
              static_cast<long long>(unordered));
  if (unordered.exchange(0) == 0) fail("nothing was ever out of order, so this checks nothing");
}

}  // namespace

int main(int count, char** arguments) {
  const unsigned seed = count > 1 ? static_cast<unsigned>(std::atoi(arguments[1])) : 1u;
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 500;
  check(true, seed, rounds);  // first: a lane keeps the device that was its first one's
  check(false, seed, rounds);
  std::printf("%lld wrong\n", static_cast<long long>(wrong));
  return wrong ? 1 : 0;
}
