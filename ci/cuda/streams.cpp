// Streams, events, copies and graph capture. A stream is a queue with a thread that works late: what does not wait reads old data.
// Follows the CUDA Runtime API, "Stream Management", "Event Management", "Memory Management" and "API synchronization behavior".
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <set>
#include <thread>

#include "runtime.hpp"

namespace rig {

static double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// ---- waits of the host

static std::mutex s_progress_mutex;
static std::condition_variable s_progress;

void wait_until(const std::function<bool()>& done) {
  counters.host_waits++;
  if (done()) return;
  // Kernels of torch are Python here: a thread that waits with the GIL would wait for itself.
  static auto has_gil = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
  static auto give_gil = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  static auto take_gil = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  static auto has_python = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  void* thread = has_python && has_python() && has_gil() ? give_gil() : nullptr;
  {
    std::unique_lock<std::mutex> lock(s_progress_mutex);
    while (!done() && !is_lost()) s_progress.wait_for(lock, std::chrono::milliseconds(1));
  }
  if (thread) take_gil(thread);
}

// ---- streams

constexpr int kDelayUs = 100;

// A hardware queue: what it was given runs in the order of issue.
struct Queue {
  int number = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<std::function<void()>, bool>> work;
  bool closed = false, has_thread = false;

  // Mostly short, some none, a few long: what does not wait meets each case.
  static void hold_up(std::minstd_rand& random) {
    std::uniform_real_distribution<double> uniform(0, 1);
    double kind = uniform(random), us = kind < 0.1 ? 0 : kind < 0.99 ? 2 * kDelayUs * uniform(random) : 20 * kDelayUs;
    if (us >= 1) usleep((useconds_t)us);
  }
  static void run(std::shared_ptr<Queue> self) {
    // The ranks of a job have other delays than each other.
    long row = 0;
    with_machine([&](Machine& machine, Process& own) { row = &own - machine.processes; });
    std::seed_seq seeds{(long)rig::number("CUDA_RIG_SEED", 0), row, (long)self->number};
    std::minstd_rand random(seeds);
    std::unique_lock<std::mutex> lock(self->mutex);
    for (;;) {
      self->changed.wait(lock, [&] { return self->closed || !self->work.empty(); });
      if (self->work.empty()) return;
      auto [work, late] = std::move(self->work.front());
      self->work.pop_front();
      lock.unlock();
      if (late) hold_up(random);
      work();
      work = nullptr;
      {
        std::lock_guard<std::mutex> progress(s_progress_mutex);
        s_progress.notify_all();
      }
      lock.lock();
    }
  }
};
struct Stream {
  int device = 0, priority = 0;
  bool shares = false;
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
  std::atomic<long> pending{0};
  std::vector<std::function<void()>>* captured = nullptr;

  bool idle() { return !pending; }
};

static std::mutex s_streams_mutex;
static std::map<void*, std::shared_ptr<Stream>> s_streams;
static std::shared_ptr<Stream> s_default[kMaxDevices];
static int s_num_streams = 0;

static std::shared_ptr<Stream> new_stream(int device, int priority) {
  // CUDA maps more streams to the same queues.
  static const int s_limit = (int)number("CUDA_DEVICE_MAX_CONNECTIONS", like_gpu() ? 8 : 0);
  static std::map<std::pair<int, int>, std::shared_ptr<Queue>> s_queues;
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->priority = priority;
  stream->queue->number = s_num_streams++;
  if (s_limit) {
    stream->shares = true;
    stream->queue = s_queues.insert({{device, stream->queue->number % s_limit}, stream->queue}).first->second;
  }
  s_streams[stream.get()] = stream;
  return stream;
}
// The stream of a handle: null, cudaStreamLegacy and cudaStreamPerThread are the device's default stream.
static std::shared_ptr<Stream> stream_of(void* handle) {
  std::lock_guard<std::mutex> lock(s_streams_mutex);
  if (handle && handle != (void*)1 && handle != (void*)2) {
    auto at = s_streams.find(handle);
    if (at == s_streams.end()) rig_abort("a stream was used that does not exist, or not any more");
    return at->second;
  }
  auto& stream = s_default[current_device()];
  if (!stream) stream = new_stream(current_device(), 0);
  return stream;
}

// ---- time slices: without MPS, kernels and copies of processes take turns on a device

constexpr int64_t kSliceUs = 2000, kSwitchUs = 300;
// Kernels and copies of this process that a device still has to run.
static std::atomic<long> s_runnable[kMaxDevices];

static Slice& slice_of(int device) {
  static Slice* s_slices = nullptr;
  static std::once_flag s_once;
  std::call_once(s_once, [] { with_machine([](Machine& machine, Process&) { s_slices = machine.slices; }); });
  return s_slices[visible_devices()[device].row];
}
// Wait for this process's slice. A kernel that is longer than its slice runs on beside the next process.
static void take_slice(int device) {
  Slice& slice = slice_of(device);
  pid_t own = getpid();
  for (bool has_waited = false;; has_waited = true) {
    auto now_us = (int64_t)(now_s() * 1e6);
    pid_t owner = slice.owner;
    if (owner == own && now_us < slice.end_us) return;
    // An owner whose slice is over leaves it for a moment, for a process that waits.
    if (owner == own) slice.owner.compare_exchange_strong(owner, 0);
    else if ((!owner || now_us >= slice.end_us) && slice.owner.compare_exchange_strong(owner, own)) {
      bool switches = slice.last.exchange(own) != own;
      slice.end_us = now_us + kSliceUs + (switches ? kSwitchUs : 0);
      if (switches) usleep(kSwitchUs);
      counters.slice_waits += has_waited || switches;
      return;
    }
    usleep(50);
  }
}
static void leave_slice(int device) {
  pid_t own = getpid();
  if (!--s_runnable[device]) slice_of(device).owner.compare_exchange_strong(own, 0);
}

void put(void* handle, std::function<void()> work, bool late) {
  auto stream = stream_of(handle);
  static const bool s_has_slices = like_gpu() && !fault("mps_clients");
  bool in_slice = late && s_has_slices;
  auto& queue = stream->queue;
  std::lock_guard<std::mutex> lock(queue->mutex);
  if (stream->captured) return stream->captured->push_back(std::move(work));
  if (!queue->has_thread) {
    queue->has_thread = true;
    std::thread(Queue::run, queue).detach();
  }
  stream->pending++;
  if (in_slice) s_runnable[stream->device]++;
  auto run = [work = std::move(work), stream, in_slice]() mutable {
    if (in_slice) take_slice(stream->device);
    if (!is_lost()) work();
    work = nullptr;
    if (in_slice) leave_slice(stream->device);
    stream->pending--;
  };
  queue->work.emplace_back(std::move(run), late);
  queue->changed.notify_all();
}
bool stream_is_idle(void* handle) { return stream_of(handle)->idle(); }
void synchronize_stream(void* handle) {
  auto stream = stream_of(handle);
  wait_until([&] { return stream->idle(); });
}
void synchronize_device(int device) {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard<std::mutex> lock(s_streams_mutex);
    for (auto& [handle, stream] : s_streams)
      if (stream->device == device) all.push_back(stream);
  }
  wait_until([&] {
    for (auto& stream : all)
      if (!stream->idle()) return false;
    return true;
  });
}

// "Two commands from different streams cannot run concurrently if" an allocation "is issued in between". The host does not wait: torch
// allocates with the lock of its allocator, and the kernels of this rig need Python's.
void keep_apart(int device) {
  static std::mutex s_order;  // two of them come in the same order to all queues
  std::lock_guard<std::mutex> order(s_order);
  std::set<std::shared_ptr<Queue>> queues;
  {
    std::lock_guard<std::mutex> lock(s_streams_mutex);
    for (auto& [handle, stream] : s_streams)
      if (stream->device == device && !stream->idle()) queues.insert(stream->queue);
  }
  auto left = std::make_shared<std::atomic<size_t>>(queues.size());
  for (auto& queue : queues) {
    std::lock_guard<std::mutex> lock(queue->mutex);
    queue->work.emplace_back([left] { for (--*left; *left && !is_lost();) usleep(20); }, false);
    queue->changed.notify_all();
  }
}

// ---- events: the state of one that is shared is in a page that other processes map

// Records of one event on several streams are complete in any order, and a wait is for one of them.
struct EventState {
  static constexpr uint32_t kSlots = 512;  // more records of one event are not on the way at a time
  std::atomic<uint32_t> recorded, bell;
  std::atomic<uint32_t> done[kSlots];  // number of the last record that is complete, of those that share the slot
  double at_s;

  bool is_done(uint32_t number) const { return (int32_t)(done[number % kSlots] - number) >= 0; }
};
static_assert(sizeof(EventState) <= 4096);
struct Event {
  std::shared_ptr<EventState> state;
  unsigned flags;
  int fd = -1;
  std::shared_ptr<int> exporter;  // imported: pidfd of the process that it belongs to
};

static bool has_ended(const std::shared_ptr<int>& pidfd) {
  if (!pidfd) return false;
  struct pollfd process = {*pidfd, POLLIN, 0};
  return poll(&process, 1, 0) > 0;
}
static void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}
static void record(EventState& state, uint32_t number) {
  state.at_s = now_s();
  state.done[number % EventState::kSlots] = number;
  state.bell++;
  futex(&state.bell, FUTEX_WAKE, INT32_MAX, nullptr);
}
static void wait_for(EventState& state, uint32_t number, const std::shared_ptr<int>& exporter) {
  for (;;) {
    uint32_t bell = state.bell;
    // What becomes of a wait for an event of a process that has died is not documented: here it never ends.
    bool ended = has_ended(exporter);
    if (is_lost() || (!ended && state.is_done(number))) return;
    timespec limit = {0, 20'000'000};
    if (ended) usleep(20'000);
    else futex(&state.bell, FUTEX_WAIT, bell, &limit);
  }
}

static std::shared_ptr<EventState> map_page(int fd) {
  void* page = mmap(nullptr, sizeof(EventState), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return nullptr;
  return std::shared_ptr<EventState>((EventState*)page, [](EventState* state) { munmap(state, sizeof *state); });
}

// ---- words: follows the CUDA Driver API, "Stream Memory Operations"

using Word = std::atomic<uint64_t>;

static bool holds(const Word& word, uint64_t value, unsigned condition) {
  uint64_t now = word;
  switch (condition) {
    case CU_STREAM_WAIT_VALUE_GEQ: return (int64_t)(now - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return now == value;
    case CU_STREAM_WAIT_VALUE_AND: return now & value;
    default: return ~(now | value);
  }
}
void write_word(void* stream, uintptr_t at, uint64_t value) {
  counters.word_writes++;
  put(stream, [=] { *(Word*)rig_address((void*)at) = value; }, false);
}
void wait_for_word(void* stream, uintptr_t at, uint64_t value, unsigned condition) {
  counters.word_waits++;
  auto work = [=] {
    // The memory may belong to another process, which does not say that it has written.
    auto& word = *(Word*)rig_address((void*)at);
    for (int us = 1; !holds(word, value, condition) && !is_lost(); us = us < 64 ? 2 * us : 64) usleep(us);
  };
  put(stream, work, false);
}

// ---- copies

enum class Side { device, pinned, pageable };
static Side side_of(const void* pointer) {
  Block block;
  if (!find_block(pointer, &block)) return Side::pageable;
  return block.type == cudaMemoryTypeDevice ? Side::device : Side::pinned;
}
static char* host_or_mapped(const void* pointer, Side side) {
  return side == Side::pageable ? (char*)pointer : (char*)rig_address(pointer);
}

// A copy of `rows` rows. By "API synchronization behavior": what comes from pageable memory has been read when the call returns, and
// a copy to pageable memory is over then; all others are late.
static cudaError_t copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows, void* stream,
                        bool blocks) {
  if (cudaError_t error = need_context(current_device())) return error;
  if (!width || !rows) return cudaSuccess;
  Side target = side_of(to), source = side_of(from);
  if (target == Side::device && source == Side::device) counters.device_copy_bytes += width * rows;
  else if (target == Side::device) counters.to_device_bytes += width * rows;
  else if (source == Side::device) counters.to_host_bytes += width * rows;
  auto run = [=](const char* data) {
    char* at = host_or_mapped(to, target);
    for (size_t row = 0; row < rows; row++) memmove(at + row * to_pitch, data + row * from_pitch, width);
  };
  if (source == Side::pageable && target != Side::pageable) {
    auto* begin = (const char*)from;
    auto kept = std::make_shared<std::vector<char>>(begin, begin + (rows - 1) * from_pitch + width);
    put(stream, [=] { run(kept->data()); }, true);
  } else {
    put(stream, [=] { run(host_or_mapped(from, source)); }, true);
  }
  if (blocks || target == Side::pageable) synchronize_stream(stream);
  return state();
}
static cudaError_t fill(void* at, int value, size_t size, void* stream) {
  if (cudaError_t error = need_context(current_device())) return error;
  put(stream, [=] { memset(rig_address(at), value, size); }, true);
  return state();
}

}  // namespace rig

// ---- what libnccl and the kernels of torch use

void rig_enqueue(void* stream, void (*work)(void*), void* argument) {
  rig::put(stream, [=] { work(argument); }, false);
}
void rig_launch(void* stream, void (*work)(void*), void* argument) {
  static std::atomic<long> s_launches{0};
  long limit;
  long number = ++s_launches;
  if (rig::fault("device_lost", &limit) && number >= limit) rig::lose(cudaErrorLaunchFailure);
  // As CUDA may for a kernel that it has not loaded yet, or if its buffers are full.
  static const long s_every = rig::number("CUDA_RIG_BLOCKING_LAUNCHES", rig::like_gpu() ? 16 : 0);
  if (s_every && number % s_every == 0) rig::synchronize_device(rig::current_device());
  rig::counters.kernels++;
  rig::put(stream, [=] { work(argument); }, true);
}
void rig_poison(void* stream, void* pointer, size_t size) {
  rig::put(stream, [=] { rig::poison(rig_address(pointer), size); }, false);
}
void rig_synchronize(void* stream) { rig::synchronize_stream(stream); }

using rig::Event;
using rig::EventState;

RIG_EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  RIG_ENTER();
  // From device to device the host does not wait.
  bool blocks = !(rig::side_of(to) == rig::Side::device && rig::side_of(from) == rig::Side::device);
  return rig::failed(rig::copy(to, size, from, size, size, 1, nullptr, blocks));
}
RIG_EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  RIG_ENTER();
  return rig::failed(rig::copy(to, size, from, size, size, 1, stream, false));
}
RIG_EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
RIG_EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                                         cudaMemcpyKind, cudaStream_t stream) {
  RIG_ENTER();
  return rig::failed(rig::copy(to, to_pitch, from, from_pitch, width, height, stream, false));
}
RIG_EXPORT cudaError_t cudaMemset(void* at, int value, size_t size) {
  RIG_ENTER();
  return rig::failed(rig::fill(at, value, size, nullptr));
}
RIG_EXPORT cudaError_t cudaMemsetAsync(void* at, int value, size_t size, cudaStream_t stream) {
  RIG_ENTER();
  return rig::failed(rig::fill(at, value, size, stream));
}

RIG_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  RIG_ENTER();
  RIG_CHECK(rig::need_context(rig::current_device()));
  std::lock_guard<std::mutex> lock(rig::s_streams_mutex);
  return *stream = (cudaStream_t)rig::new_stream(rig::current_device(), priority).get(), cudaSuccess;
}
RIG_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
RIG_EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
// Returns at once; what the stream was given still runs.
RIG_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  RIG_ENTER();
  auto stream = rig::stream_of(handle);
  std::lock_guard<std::mutex> lock(stream->queue->mutex);
  stream->queue->closed = !stream->shares;
  stream->queue->changed.notify_all();
  std::lock_guard<std::mutex> all(rig::s_streams_mutex);
  rig::s_streams.erase(handle);
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  RIG_ENTER();
  return *priority = rig::stream_of(stream)->priority, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  RIG_ENTER();
  rig::synchronize_stream(stream);
  return rig::failed(rig::state());
}
RIG_EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  RIG_ENTER();
  if (rig::stream_is_idle(stream)) return cudaSuccess;
  return rig::counters.host_polls++, cudaErrorNotReady;
}
RIG_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  RIG_ENTER();
  rig::put(stream, [=] { function(argument); }, true);
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
  RIG_ENTER();
  rig::put(stream, [=] { function(stream, cudaSuccess, argument); }, true);
  return cudaSuccess;
}

RIG_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  RIG_ENTER();
  RIG_CHECK(rig::need_context(rig::current_device()));
  auto* event = new Event{nullptr, flags, -1, nullptr};
  if (flags & cudaEventInterprocess) {
    // By its description only together with cudaEventDisableTiming.
    if (!(flags & cudaEventDisableTiming)) return delete event, rig::failed(cudaErrorInvalidValue);
    event->fd = memfd_create("cuda-rig-event", MFD_CLOEXEC);
    if (event->fd < 0 || ftruncate(event->fd, 4096)) rig_abort("the machine has no memory for an event");
    event->state = rig::map_page(event->fd);
  } else {
    event->state = std::make_shared<EventState>();
  }
  return *handle = (cudaEvent_t)event, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
RIG_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  auto* event = (Event*)handle;
  if (event->fd >= 0) close(event->fd);
  return delete event, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  RIG_ENTER();
  auto state = ((Event*)handle)->state;
  uint32_t number = ++state->recorded;
  rig::counters.event_records++;
  rig::put(stream, [=] { rig::record(*state, number); }, false);
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
static bool is_done(const Event& event) { return event.state->is_done(event.state->recorded); }
RIG_EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  RIG_ENTER();
  if (is_done(*(Event*)event)) return cudaSuccess;
  return rig::counters.host_polls++, cudaErrorNotReady;
}
RIG_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  RIG_ENTER();
  Event event = *(Event*)handle;
  rig::wait_until([&] { return is_done(event) && !rig::has_ended(event.exporter); });
  return rig::failed(rig::state());
}
RIG_EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  RIG_ENTER();
  auto &from = *(Event*)begin, &to = *(Event*)end;
  if ((from.flags | to.flags) & cudaEventDisableTiming || !from.state->recorded || !to.state->recorded)
    return rig::failed(cudaErrorInvalidResourceHandle);
  if (!is_done(from) || !is_done(to)) return cudaErrorNotReady;
  return *ms = (float)(1000 * (to.state->at_s - from.state->at_s)), cudaSuccess;
}
// Waits for the latest record at the time of the call; of an event that was never recorded, for nothing.
RIG_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  RIG_ENTER();
  Event event = *(Event*)handle;
  uint32_t number = event.state->recorded;
  (event.exporter ? rig::counters.peer_event_waits : rig::counters.event_waits)++;
  rig::put(stream, [=] { rig::wait_for(*event.state, number, event.exporter); }, false);
  return cudaSuccess;
}

struct EventHandle {
  char kind[8];
  pid_t pid;
  int fd;
};
RIG_EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* out, cudaEvent_t handle) {
  RIG_ENTER();
  auto& event = *(Event*)handle;
  if (rig::fault("no_ipc")) return rig::failed(cudaErrorNotSupported);
  if (event.fd < 0) return rig::failed(cudaErrorInvalidResourceHandle);
  EventHandle value = {"event", getpid(), event.fd};
  memset(out, 0, sizeof *out);
  memcpy(out, &value, sizeof value);
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* handle, cudaIpcEventHandle_t in) {
  RIG_ENTER();
  EventHandle value;
  memcpy(&value, &in, sizeof value);
  if (strcmp(value.kind, "event")) return rig::failed(cudaErrorInvalidResourceHandle);
  if (rig::fault("no_ipc_import") || value.pid == getpid()) return rig::failed(cudaErrorDeviceUninitialized);
  RIG_CHECK(rig::need_context(rig::current_device()));
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", value.pid, value.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC), exporter = (int)syscall(SYS_pidfd_open, value.pid, 0);
  auto state = fd < 0 ? nullptr : rig::map_page(fd);
  if (fd >= 0) close(fd);
  if (!state || exporter < 0) return rig::failed(cudaErrorMapBufferObjectFailed);
  auto owner = std::shared_ptr<int>(new int(exporter), [](int* pidfd) { close(*pidfd), delete pidfd; });
  *handle = (cudaEvent_t) new Event{state, cudaEventInterprocess | cudaEventDisableTiming, -1, owner};
  return cudaSuccess;
}

// ---- graphs: work can be captured, and run once or not at all

struct Graph {
  std::vector<std::function<void()>> work;
};
RIG_EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  RIG_ENTER();
  auto stream = rig::stream_of(handle);
  std::lock_guard<std::mutex> lock(stream->queue->mutex);
  if (stream->captured) return rig::failed(cudaErrorIllegalState);
  return stream->captured = &(new Graph)->work, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  RIG_ENTER();
  auto stream = rig::stream_of(handle);
  std::lock_guard<std::mutex> lock(stream->queue->mutex);
  *graph = (cudaGraph_t)stream->captured;
  stream->captured = nullptr;
  return *graph ? cudaSuccess : rig::failed(cudaErrorIllegalState);
}
static cudaError_t capture_status(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  RIG_ENTER();
  auto stream = rig::stream_of(handle);
  *status = stream->captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return capture_status(stream, status);
}
// The parameters behind these differ between CUDA 12 and 13; torch asks for status and id alone.
RIG_EXPORT cudaError_t rig_capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
  if (id) *id = 1;
  return capture_status(stream, status);
}
__asm__(".globl cudaStreamGetCaptureInfo\n.set cudaStreamGetCaptureInfo, rig_capture_info");
__asm__(".globl cudaStreamGetCaptureInfo_v2\n.set cudaStreamGetCaptureInfo_v2, rig_capture_info");
RIG_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
RIG_EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete (Graph*)graph, cudaSuccess; }
RIG_EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return *count = ((Graph*)graph)->work.size(), cudaSuccess;
}
RIG_EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* run, cudaGraph_t graph, unsigned long long) {
  return *run = (cudaGraphExec_t) new Graph(*(Graph*)graph), cudaSuccess;
}
RIG_EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t run) { return delete (Graph*)run, cudaSuccess; }
