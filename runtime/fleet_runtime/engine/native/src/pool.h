// The compute threads of one engine. A step is one parallel region; inside it threads meet at barriers and take work from shared counters.
//
// Who computes what never changes a result, so work is handed out as threads come: one that the kernel has put aside holds up one piece,
// not half of the phase. A thread spins shortly at a barrier, then sleeps in the kernel, which leaves its core to whoever it waits for.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace rf {

// A number that threads wait on.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void reset() { value_.store(0, std::memory_order_relaxed); }  // while nobody waits

  // Adds, and wakes who sleeps here when the sum is `wanted`.
  void add(uint32_t n, uint32_t wanted) {
    if (value_.fetch_add(n, std::memory_order_seq_cst) + n != wanted) return;
    if (sleepers_.load(std::memory_order_seq_cst) > 0) syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void wait(uint32_t wanted) {
    for (int i = 0; i < kSpins; i++) {
      if (value() == wanted) return;
      _mm_pause();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    for (uint32_t seen; (seen = value_.load(std::memory_order_seq_cst)) != wanted;) syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  static constexpr int kSpins = 2000;  // tens of microseconds
  std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
};

// What a phase of a step does; for profiles.
enum Kind { kEmbed, kInput, kQkv, kWriteKv, kAttention, kOut, kGateUp, kDown, kNorm, kHead, kSample, kOther, kKinds };

class Pool {
 public:
  // Cycles of all threads by kind: at work, and waiting for others. Counted only while `timed` is set.
  struct Times {
    alignas(64) uint64_t work[kKinds] = {}, wait[kKinds] = {};
  };

  // Throws std::system_error where the system gives no more threads.
  explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads), times_(static_cast<size_t>(threads_)) {
    workers_.reserve(static_cast<size_t>(threads_));
    try {
      for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Pool() { end(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  bool timed = false;
  std::vector<Times>& times() { return times_; }

  // Runs task(thread) on all threads, the caller being thread 0; returns when all have left it. `phases`: calls of Turn::share in it, at most.
  void run(size_t phases, const std::function<void(int)>& task) {
    if (phases_ < phases) {
      phase_ = std::make_unique<Phase[]>(phases * 2);
      phases_ = phases * 2;
    }
    for (size_t i = 0; i < phases; i++) {
      phase_[i].next.store(0, std::memory_order_relaxed);
      phase_[i].done.reset();
    }
    task_ = &task;
    left_.reset();
    if (threads_ > 1) start_.add(1, ++runs_);
    call(0);
    left_.wait(static_cast<uint32_t>(threads_ - 1));
  }

 private:
  friend class Turn;
  struct Phase {
    alignas(64) std::atomic<int64_t> next{0};
    Gate done;
  };

  void end() {
    ending_ = true;
    start_.add(1, ++runs_);
    for (auto& w : workers_) w.join();
  }

  // Denormals are flushed on every thread alike, and the caller's mode is put back.
  void call(int thread) {
    unsigned mode = _mm_getcsr();
    _mm_setcsr((mode | 0x8040u) & ~0x6000u);
    (*task_)(thread);
    _mm_setcsr(mode);
  }

  void work(int thread) {
    for (uint32_t run = 1;; run++) {
      start_.wait(run);
      if (ending_) return;
      call(thread);
      left_.add(1, static_cast<uint32_t>(threads_ - 1));
    }
  }

  const int threads_;
  std::vector<Times> times_;
  std::vector<std::thread> workers_;
  std::unique_ptr<Phase[]> phase_;
  size_t phases_ = 0;
  const std::function<void(int)>* task_ = nullptr;
  std::atomic<bool> ending_{false};
  uint32_t runs_ = 0;
  alignas(64) Gate start_;
  alignas(64) Gate left_;
};

// One thread's way through a region: it passes the same phases in the same order as all others.
class Turn {
 public:
  Turn(Pool& pool, int thread) : pool_(pool), thread_(thread) {}
  int thread() const { return thread_; }

  // Calls work(begin, end) for pieces of [0, count) of at most `piece`, as other threads do, and returns when all of [0, count) is done. A thread
  // that comes late passes by: nobody waits for a thread, only for pieces that were taken.
  template <class Work>
  void share(Kind kind, int64_t count, int64_t piece, const Work& work) {
    Pool::Phase& phase = pool_.phase_[phase_++];
    const uint32_t wanted = static_cast<uint32_t>(count);
    const uint64_t started = pool_.timed ? __rdtsc() : 0;
    while (true) {
      int64_t begin = phase.next.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= count) break;
      int64_t end = begin + piece < count ? begin + piece : count;
      work(begin, end);
      phase.done.add(static_cast<uint32_t>(end - begin), wanted);
    }
    const uint64_t waited = pool_.timed ? __rdtsc() : 0;
    phase.done.wait(wanted);
    if (!pool_.timed) return;
    Pool::Times& times = pool_.times_[static_cast<size_t>(thread_)];
    times.work[kind] += waited - started;
    times.wait[kind] += __rdtsc() - waited;
  }

 private:
  Pool& pool_;
  const int thread_;
  size_t phase_ = 0;
};

}  // namespace rf
