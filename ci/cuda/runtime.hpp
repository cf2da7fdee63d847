// What the sources of the emulated runtime share beside rig.hpp: errors, counters, contexts, memory blocks, streams.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>

#include "rig.hpp"
// The header's macros of other names would rename what is defined here.
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo
#undef cudaGetDriverEntryPoint
// CUDA 12 declares it by its newer name alone.
RIG_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);

namespace rig {

// ---- errors (errors.cpp)
// What a call begins with: the error that the process is in (no driver, forked, device lost, ...), else cudaSuccess.
cudaError_t state();
// Remember the error for cudaGetLastError; returns it.
cudaError_t failed(cudaError_t error);
// The device is lost: from now on every call of this process fails with `error`, and no work runs.
void lose(cudaError_t error);
bool is_lost();

// ---- counters (counters.cpp)
struct Counters {
  std::atomic<uint64_t> kernels, kernel_bytes, device_copy_bytes, to_device_bytes, to_host_bytes, event_records, event_waits,
      peer_event_waits, word_writes, word_waits,
      slice_waits, host_waits, host_polls, contexts, device_bytes, peak_device_bytes;
};
extern Counters counters;

// ---- contexts (contexts.cpp)
// The calling thread's device, an index of visible_devices().
int current_device();
void set_current_device(int device);
// Make the primary context of a device if it is not there.
cudaError_t need_context(int device);
bool has_context(int device);

// ---- memory (memory.cpp)
struct Block {
  uintptr_t base;        // address in this process: of device memory, not accessible
  size_t size;           // bytes
  char* mapped;          // where kernels find it
  int fd;                // device memory: the file behind it
  int device;            // index of visible_devices()
  cudaMemoryType type;   // device or (pinned) host
  bool owns_host;        // pinned by cudaHostAlloc, not registered
  bool exported;         // another process may have it mapped
  int exporter;          // imported: pidfd of the process that it belongs to, else -1
  int opens;             // imported: how often
  std::string handle;    // imported: by what
};
// The block that a pointer is in, copied; false where it is none.
bool find_block(const void* pointer, Block* found = nullptr);
cudaError_t allocate(void** pointer, size_t size);
// Whether it "may perform implicit synchronization" is not said; torch's allocator counts on that of cudaFree.
cudaError_t release(void* pointer, bool waits);
cudaError_t export_block(const void* pointer, void* handle);
cudaError_t import_block(void** pointer, const void* handle);
void poison(void* at, size_t size);

// ---- streams (streams.cpp)
// Put work on a stream; `late` work is held up by a random time.
void put(void* stream, std::function<void()> work, bool late);
void synchronize_stream(void* stream);
// Write a word in the order of the stream, or have the stream wait for one; device or pinned memory.
void write_word(void* stream, uintptr_t at, uint64_t value);
void wait_for_word(void* stream, uintptr_t at, uint64_t value, unsigned condition);
void synchronize_device(int device);
void keep_apart(int device);
bool stream_is_idle(void* stream);

}  // namespace rig

#define RIG_CHECK(expression) \
  if (cudaError_t error_ = (expression)) return rig::failed(error_)
// What every call of the runtime that needs a device begins with.
#define RIG_ENTER() RIG_CHECK(rig::state())
