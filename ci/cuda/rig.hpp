// What the sources of the emulated CUDA libraries share: settings, devices, the state of the machine, work on streams.
//
// Built once for each CUDA release against the headers of its wheels (ci/cuda_setup.py). Settings are environment variables, all
// set by ci/cuda.py; their names are in `Settings of ci/cuda.py` there.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define RIG_EXPORT extern "C" __attribute__((visibility("default")))

namespace rig {

constexpr int kMaxDevices = 16;
constexpr int kMaxProcesses = 512;
// Fresh and freed memory: NaN in every float type, -1 in every signed integer.
constexpr int kPoison = 0xFF;

// ---- settings
// Value of a variable, `fallback` where it is not set.
long number(const char* variable, long fallback);
// Whether CUDA_RIG_FAULT (NAME[=VALUE],...) names this fault; `value` gets its number, 0 without one.
bool fault(const char* name, long* value = nullptr);
// Whether it is as late and as lax as hardware (--like gpu): time slices, shared queues, implicit waits, memory of contexts.
bool like_gpu();
// Folder of this run, for what its processes share.
std::string state_folder();

// ---- devices (devices.cpp)
struct Device {
  int physical;             // index of the GPU in the machine
  int slice;                // index of the MIG slice, -1 for a whole GPU
  unsigned char bytes[16];  // UUID, of a slice its own
  std::string uuid;         // GPU-... or MIG-...
  std::string parent;       // UUID of the GPU
  int bus;                  // PCI bus; the domain and the device are 0
  size_t memory;            // bytes
  int row;                  // of Process::used: one for each GPU or slice of the machine
};
// Every GPU or slice of the machine, in the order of their PCI bus ids.
const std::vector<Device>& machine_devices();
// Those that CUDA_VISIBLE_DEVICES leaves to this process, in its order.
const std::vector<Device>& visible_devices();

// ---- what the processes of the machine share (devices.cpp): a file that all of them map
struct Process {
  pid_t pid;                   // 0: free
  uint64_t started;            // start time by /proc, so that a reused pid is another process
  uint64_t used[kMaxDevices];  // bytes of device memory
  bool context[kMaxDevices];
};
// Whose time slice it is on a device without MPS.
struct Slice {
  std::atomic<pid_t> owner, last;  // 0: nobody's; the owner before
  std::atomic<int64_t> end_us;
};
struct Machine {
  pthread_mutex_t mutex;  // shared between processes, robust
  Process processes[kMaxProcesses];
  Slice slices[kMaxDevices];
};
// Call `body` under the lock, with the rows of processes that are gone cleared; `own` is this process's row.
void with_machine(const std::function<void(Machine& machine, Process& own)>& body);

// ---- work (streams.cpp)
// Block the calling thread until done() holds, without the GIL where it has it: a kernel may need that.
void wait_until(const std::function<bool()>& done);

}  // namespace rig

// ---- for libnccl and the Python kernels; the stream is a cudaStream_t, null for the device's default stream
#pragma GCC visibility push(default)
extern "C" {
// Run work(argument) once, late, in the order of the stream, on the stream's own thread.
void rig_enqueue(void* stream, void (*work)(void*), void* argument);
// As rig_enqueue, late, and counted as one kernel that reads and writes so many bytes.
void rig_launch(void* stream, void (*work)(void*), void* argument);
void rig_count_bytes(uint64_t bytes);
// Fill fresh memory with poison, in the order of the stream.
void rig_poison(void* stream, void* pointer, size_t size);
// Wait for all work on the stream: a wait of the host.
void rig_synchronize(void* stream);
// Where kernels find device or pinned memory: device pointers themselves are not mapped for the host. Ends the process, with a
// line that says why, for a pointer that is neither.
void* rig_address(const void* pointer);
// Kernels that fail end the process: they would on a GPU, and a test must not go on.
[[noreturn]] void rig_abort(const char* why);
}
#pragma GCC visibility pop
