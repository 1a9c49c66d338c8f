// SPDX-License-Identifier: Apache-2.0
// gate.h: who may start work on the shards. Whoever launches passes the gate; whoever moves pages shuts it,
// and then waits for what is under way.
//
// On several GPUs threads take turns. Which GPUs still have to wait for which is kept for all threads
// together, and a wait is several calls of the driver: a thread that launched between another one's taking
// the note of unfinished work and its calls would wait for nobody. It would also reuse memory that the other
// freed, on a GPU that has not been made to wait for its readers. In turns, whoever begins one has all that
// was launched before it either noted or joined, so memory freed by anybody may be used in it at once.
#pragma once

namespace mgpu {

// While alive, this thread may start work on the shards; nests freely. On one GPU or on the host any number
// of threads at once; on several GPUs one, in the order in which they came. Do not ask for Python's lock
// inside.
class LaunchScope {
 public:
  LaunchScope();
  ~LaunchScope();
  LaunchScope(const LaunchScope&) = delete;
  LaunchScope& operator=(const LaunchScope&) = delete;
};

// While alive, no other thread is inside a LaunchScope; waits for those that are. This thread must not be in
// one. Take it before the pool's lock.
class StillScope {
 public:
  StillScope();
  ~StillScope();
  StillScope(const StillScope&) = delete;
  StillScope& operator=(const StillScope&) = delete;

 private:
  bool shut_;
};

// For a thread that works for another one that is inside a LaunchScope and waits for it: it is inside, too.
class TurnOfAnother {
 public:
  TurnOfAnother();
  ~TurnOfAnother();
  TurnOfAnother(const TurnOfAnother&) = delete;
  TurnOfAnother& operator=(const TurnOfAnother&) = delete;
};

}  // namespace mgpu
