// SPDX-License-Identifier: Apache-2.0
// fork_join.cpp: the pool of host threads behind parallel_for, in both flavours.
#include "mesh/fork_join.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace mgpu {

namespace {

std::atomic<void (*)()> thread_start_hook{nullptr};

// One fork: pieces are handed out by an atomic counter, so whoever is free takes the next; the caller takes
// part, so a fork inside a fork always makes progress, and so does a fork in a forked child that has no pool
// threads.
struct Job {
  std::function<void(int64_t)> run;
  int64_t pieces = 0;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;

  void help() {
    for (int64_t piece = next.fetch_add(1); piece < pieces; piece = next.fetch_add(1)) {
      run(piece);
      if (done.fetch_add(1) + 1 == pieces) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [&] { return done.load() == pieces; });
  }
};

class Pool {
 public:
  Pool();
  void resize(int threads) {
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_ = std::max(1, threads);
    while (started_ < wanted_ - 1) {
      std::thread(&Pool::work, this, started_++).detach();
    }
  }
  int threads() {
    std::lock_guard<std::mutex> lock(mutex_);
    return wanted_;
  }
  void run(int64_t pieces, const std::function<void(int64_t)>& work) {
    auto job = std::make_shared<Job>();
    job->run = work;
    job->pieces = pieces;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (wanted_ > 1) jobs_.push_back(job);
    }
    if (pieces > 2)
      wake_->notify_all();
    else
      wake_->notify_one();
    job->help();
    job->wait();
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = std::find(jobs_.begin(), jobs_.end(), job);
    if (found != jobs_.end()) jobs_.erase(found);
  }

 private:
  // A forked child has none of its parent's threads: forget them and what they were doing. What they waited
  // on stays as it is: whoever takes it down would wait for them.
  void start_anew() {
    started_ = 0;
    wanted_ = 1;
    jobs_.clear();
    wake_ = new std::condition_variable;
  }
  void work(int number) {
    if (auto hook = thread_start_hook.load()) hook();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      std::shared_ptr<Job> job;
      if (number < wanted_ - 1) {
        while (!jobs_.empty() && jobs_.front()->next.load() >= jobs_.front()->pieces) jobs_.pop_front();
        for (auto& candidate : jobs_) {
          if (candidate->next.load() < candidate->pieces) {
            job = candidate;
            break;
          }
        }
      }
      if (!job) {
        wake_->wait(lock);
        continue;
      }
      lock.unlock();
      job->help();
      job.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable* wake_ = new std::condition_variable;  // as long as the process
  std::deque<std::shared_ptr<Job>> jobs_;
  int wanted_ = 1;
  int started_ = 0;
};

Pool& pool() {
  static Pool* instance = new Pool;  // its threads run until the process ends
  return *instance;
}

// Nobody forks while another thread has the lock, which would never be given back in the child.
Pool::Pool() {
  pthread_atfork([] { pool().mutex_.lock(); }, [] { pool().mutex_.unlock(); },
                 [] {
                   pool().start_anew();
                   pool().mutex_.unlock();
                 });
}

// Keeps the exception of the lowest piece, so that the same error is reported on every run.
struct FirstError {
  std::mutex mutex;
  int64_t piece = -1;
  std::exception_ptr error;
  void record(int64_t at) {
    std::lock_guard<std::mutex> lock(mutex);
    if (error && piece <= at) return;
    piece = at;
    error = std::current_exception();
  }
  void rethrow() const {
    if (error) std::rethrow_exception(error);
  }
};

}  // namespace

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
  if (count <= 0) return;
  grain = std::max<int64_t>(1, grain);
  const int64_t pieces = (count + grain - 1) / grain;
  if (pieces == 1) {
    work(0, count);
    return;
  }
  FirstError first;
  pool().run(pieces, [&](int64_t piece) {
    try {
      work(piece * grain, std::min(count, (piece + 1) * grain));
    } catch (...) {
      first.record(piece);
    }
  });
  first.rethrow();
}

void set_num_threads(int threads) { pool().resize(threads); }
int num_threads() { return pool().threads(); }
void set_thread_start_hook(void (*hook)()) { thread_start_hook.store(hook); }

}  // namespace mgpu
