// SPDX-License-Identifier: Apache-2.0
// check_order.cpp: who waits for whom (mesh/fork_join_cuda.cpp, gate.cpp, lanes_cuda.cpp), without a GPU. The
// runtime is played: a stream is a count of what it was given, and a clock that says how much of every stream
// comes before what it is given next; events carry clocks. Threads run operators of random stages on three
// GPUs, and on one that counts as three (mesh.h). Before an exchange, and at the beginning of an operator,
// each stream must be behind all that any was given before. Then, one by one: two sets of streams that share
// one, a user's own stream, a lane that waits for a GPU of another one's, a driver that refuses an event, an
// exchange that fails.
//
//     check_order [SEED [ROUNDS]]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "mesh/lanes.h"
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
std::atomic<int> records_until_refusal{-1};  // -1: none is refused

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
  if (records_until_refusal >= 0 && records_until_refusal-- == 0) return cudaErrorMemoryAllocation;
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

// ---- sets of streams: what backend/streams_cuda.cpp provides

cudaStream_t stream_of[2][3];  // by set and GPU
thread_local int set_here = 0;
thread_local cudaStream_t users_own = nullptr;  // torch's current stream of the lead's GPU for a while

cudaStream_t new_stream(int gpu) {
  const DeviceGuard guard(gpu);
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

void provide_streams() {
  for (auto& set : stream_of)
    for (int gpu = 0; gpu < 3; ++gpu) set[gpu] = new_stream(gpu);
  stream_of[1][0] = stream_of[0][0];
  set_stream_provider({[](int gpu) { return gpu == 0 && users_own ? users_own : stream_of[set_here][gpu]; },
                       [] { return set_here; }});
  set_lane_context({[] { return int64_t{set_here}; }, [](int64_t set) { set_here = static_cast<int>(set); }});
}

// Work outside of an operator, as an upload is: nobody waits for it yet.
Clock give(int shard) {
  const LaunchScope turn;
  const DeviceGuard guard(shard_gpu(shard));
  launch(shard_stream(shard));
  return given_so_far();
}

void expect_all_behind(const Clock& before, const char* what) {
  for (const Shard& shard : mesh().shards())
    if (!is_behind(quiet_stream(shard.index), before)) fail(what);
}

void check_sets_that_share_a_stream() {
  const Clock before = give(1);
  set_here = 1;
  {
    const JoinedOperator of_the_other_set;
  }
  set_here = 0;
  const JoinedOperator joined;
  expect_all_behind(before, "a set's join took the note of another set's work");
}

void check_users_own_stream() {
  const Clock before = give(0);
  users_own = new_stream(0);
  cudaEvent_t event = nullptr;  // the user's stream waits for the former one, as it has to
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  cudaEventRecord(event, stream_of[0][0]);
  cudaStreamWaitEvent(users_own, event, 0);
  {
    const JoinedOperator joined;
    expect_all_behind(before, "an operator on a user's stream begins before what its set was given");
  }
  users_own = nullptr;
}

// Shards 0 and 1 lie on one GPU. The lane of one asks for the stream, the other one's waits for it, and then
// the first launches.
void check_wait_of_another_lane() {
  set_mesh({"cuda:0", "cuda:0", "cuda:1"});
  std::atomic<int> at{0};
  const bool side_by_side = lane_of_shard(0) != lane_of_shard(1);
  const auto reach = [&](int moment) {
    while (side_by_side && at < moment) std::this_thread::yield();
  };
  JoinedOperator joined;
  for_each_shard(
      "stage",
      [&](const Shard& shard) {
        if (shard.index == 0) {
          const cudaStream_t stream = shard_stream(0);
          at = 1;
          reach(2);
          launch(stream);
        } else if (shard.index == 1) {
          reach(1);
          synchronise_shard(1);
          at = 2;
        }
      },
      Access::kLocal, Launch::kSideBySide);
  const Clock before = given_so_far();
  join_shards();
  expect_all_behind(before, "a lane's wait took the note of another lane's work");
  set_mesh({"cuda:0", "cuda:1", "cuda:2"});
}

void check_refused_event() {
  for (int after = 0; after < 3; ++after) {
    give(0);
    give(1);
    const Clock before = give(2);
    records_until_refusal = after;
    bool refused = false;
    try {
      const JoinedOperator joined;
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    records_until_refusal = -1;
    const JoinedOperator joined;
    expect_all_behind(before, "a join that failed took the note of what was given");
    if (!refused && after < 2) fail("no event was refused, so this checks nothing");
  }
}

void check_exception() {
  for (const Launch how : {Launch::kInTurn, Launch::kSideBySide}) {
    try {
      for_each_shard(
          "stage",
          [](const Shard& shard) {
            launch(shard_stream(shard.index));
            if (shard.index == 2) throw std::runtime_error("no room");
          },
          Access::kExchange, how);
      fail("an exception was lost");
    } catch (const std::runtime_error&) {
    }
    expect_all_behind(given_so_far(), "an exchange that failed left GPUs unjoined");
  }
}

void check_sets() {
  provide_streams();
  check_sets_that_share_a_stream();
  check_users_own_stream();
  check_wait_of_another_lane();
  check_refused_event();
  check_exception();
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
  check_sets();
  std::printf("%lld wrong\n", static_cast<long long>(wrong));
  return wrong ? 1 : 0;
}
