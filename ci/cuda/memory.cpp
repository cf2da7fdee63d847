// Device and pinned memory. Device memory is a file in memory that is mapped for kernels alone: its own address is reserved and not
// accessible, so that the host's access crashes, as on a GPU. IPC hands the file to another process.
// Follows the CUDA Runtime API, "Memory Management", "Stream Ordered Memory Allocator" and "Interprocess communication", and the
// CUDA Driver API, "Virtual Memory Management".
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>

#include "runtime.hpp"

namespace rig {

constexpr size_t kGranularity = 2 << 20;
static std::mutex s_mutex;
static std::map<uintptr_t, Block> s_blocks;
// Where freed memory was mapped for kernels, begin and end; kept reserved, so that a late access crashes.
static std::map<char*, char*> s_freed;

void poison(void* at, size_t size) { memset(at, kPoison, size); }

static size_t rounded(size_t size) { return (size + kGranularity - 1) / kGranularity * kGranularity; }

static Block* block_of(const void* pointer) {
  auto at = s_blocks.upper_bound((uintptr_t)pointer);
  if (at == s_blocks.begin()) return nullptr;
  Block& block = (--at)->second;
  return (uintptr_t)pointer < block.base + block.size ? &block : nullptr;
}

bool find_block(const void* pointer, Block* found) {
  std::lock_guard<std::mutex> lock(s_mutex);
  Block* block = block_of(pointer);
  if (block && found) *found = *block;
  return block != nullptr;
}

// Says what an access was that the hardware would not have allowed; the default action follows.
static struct sigaction s_previous;
static void explain_fault(int number, siginfo_t* info, void* context) {
  auto* at = (char*)info->si_addr;
  const char* what = nullptr;
  for (auto& [base, block] : s_blocks)
    if (block.type == cudaMemoryTypeDevice && (uintptr_t)at >= base && (uintptr_t)at < base + block.size)
      what = "cuda rig: the host accessed device memory\n";
  for (auto& [begin, end] : s_freed)
    if (at >= begin && at < end) what = "cuda rig: a kernel or copy accessed device memory after its free\n";
  if (what && write(2, what, strlen(what)) < 0) _exit(139);
  sigaction(number, &s_previous, nullptr);
  if (s_previous.sa_flags & SA_SIGINFO && s_previous.sa_sigaction) s_previous.sa_sigaction(number, info, context);
}
static void catch_faults() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = explain_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &s_previous);
  });
}

static void count_bytes(int64_t bytes) {
  uint64_t now = counters.device_bytes += bytes, peak = counters.peak_device_bytes;
  while (now > peak && !counters.peak_device_bytes.compare_exchange_weak(peak, now)) {
  }
}

// Take `size` bytes of the device, which all processes share; false if it has not as much.
static bool take(int device, size_t size) {
  const Device& there = visible_devices()[device];
  bool taken = false;
  with_machine([&](Machine& machine, Process& own) {
    uint64_t used = 0;
    for (Process& process : machine.processes) used += process.pid ? process.used[there.row] : 0;
    if ((taken = used + size <= there.memory)) own.used[there.row] += size;
  });
  if (taken) count_bytes((int64_t)size);
  return taken;
}
static void give_back(int device, size_t size) {
  int row = visible_devices()[device].row;
  with_machine([&](Machine&, Process& own) { own.used[row] -= size; });
  count_bytes(-(int64_t)size);
}

// Reserve an address for the host, and map `fd` for kernels.
static bool map_device(int fd, size_t size, uintptr_t* base, char** mapped) {
  void* reserved = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (reserved == MAP_FAILED || at == MAP_FAILED) return false;
  catch_faults();
  *base = (uintptr_t)reserved;
  *mapped = (char*)at;
  return true;
}
static void unmap_device(const Block& block) {
  munmap((void*)block.base, block.size);
  mmap(block.mapped, block.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  s_freed[block.mapped] = block.mapped + block.size;
}

// Whether this is the allocation that is to fail.
static bool fails_now() {
  static std::atomic<long> s_allocations{0};
  long wanted;
  return fault("out_of_memory", &wanted) && ++s_allocations >= wanted;
}

// What CUDA may do in allocations of pinned memory and at their ends.
static void wait_implicitly() {
  if (like_gpu() && has_context(current_device())) synchronize_device(current_device());
}

cudaError_t allocate(void** pointer, size_t size) {
  *pointer = nullptr;
  int device = current_device();
  if (like_gpu()) keep_apart(device);
  if (cudaError_t error = need_context(device)) return error;
  if (!size) return cudaSuccess;
  size = rounded(size);
  if (fails_now() || !take(device, size)) return cudaErrorMemoryAllocation;
  int fd = memfd_create("cuda-rig-memory", MFD_CLOEXEC);
  Block block = {0, size, nullptr, fd, device, cudaMemoryTypeDevice, false, false, -1, 0, ""};
  if (fd < 0 || ftruncate(fd, (off_t)size) || !map_device(fd, size, &block.base, &block.mapped))
    rig_abort("the machine has no memory or address space for device memory");
  poison(block.mapped, size);
  std::lock_guard<std::mutex> lock(s_mutex);
  s_blocks[block.base] = block;
  *pointer = (void*)block.base;
  return cudaSuccess;
}

// Each process that has the memory of another one mapped holds a lock on its file, which goes with the process.
static short lock_file(int fd, int command, short type) {
  struct flock lock = {};
  lock.l_type = type;
  if (fcntl(fd, command, &lock)) rig_abort("the file behind device memory cannot be locked");
  return lock.l_type;
}

static bool find_own(void* pointer, Block* block) {
  return find_block(pointer, block) && block->base == (uintptr_t)pointer && block->type == cudaMemoryTypeDevice && block->fd >= 0;
}
static cudaError_t release_now(void* pointer) {
  Block block;
  if (!find_own(pointer, &block)) return cudaErrorInvalidValue;
  {
    std::lock_guard<std::mutex> lock(s_mutex);
    Block& there = s_blocks[block.base];
    if (there.exporter >= 0 && --there.opens > 0) return cudaSuccess;
    // "Will result in undefined behavior".
    if (there.exporter < 0 && there.exported && lock_file(there.fd, F_OFD_GETLK, F_WRLCK) != F_UNLCK)
      rig_abort("device memory was freed that another process still has mapped");
    unmap_device(there);
    s_blocks.erase(block.base);
  }
  close(block.fd);
  if (block.exporter >= 0) close(block.exporter);
  else give_back(block.device, block.size);
  return cudaSuccess;
}
cudaError_t release(void* pointer, bool waits) {
  Block block;
  if (!pointer) return cudaSuccess;
  if (!find_own(pointer, &block)) return cudaErrorInvalidValue;
  if (waits || like_gpu()) synchronize_device(block.device);
  return release_now(pointer);
}

// ---- interprocess communication

struct MemoryHandle {
  char kind[8];
  pid_t pid;
  int fd;
  size_t size;
  int row;
};
static_assert(sizeof(MemoryHandle) <= CUDA_IPC_HANDLE_SIZE, "a handle has 64 bytes");

cudaError_t export_block(const void* pointer, void* out) {
  if (fault("no_ipc")) return cudaErrorNotSupported;
  std::lock_guard<std::mutex> lock(s_mutex);
  Block* block = block_of(pointer);
  if (!block || block->type != cudaMemoryTypeDevice || block->fd < 0 || block->exporter >= 0) return cudaErrorInvalidValue;
  block->exported = true;
  MemoryHandle handle = {"memory", getpid(), block->fd, block->size, visible_devices()[block->device].row};
  memset(out, 0, CUDA_IPC_HANDLE_SIZE);
  memcpy(out, &handle, sizeof handle);
  return cudaSuccess;
}

cudaError_t import_block(void** pointer, const void* in) {
  MemoryHandle handle;
  memcpy(&handle, in, sizeof handle);
  if (strcmp(handle.kind, "memory")) return cudaErrorInvalidValue;
  if (fault("no_ipc")) return cudaErrorNotSupported;
  // As from another container, and as in the process that exported it.
  if (fault("no_ipc_import") || handle.pid == getpid()) return cudaErrorDeviceUninitialized;
  int device = current_device();
  if (cudaError_t error = need_context(device)) return error;
  // Of another device, hardware opens it for peers alone, which MIG slices are not.
  if (visible_devices()[device].row != handle.row) return cudaErrorNotSupported;
  std::string key((const char*)in, sizeof handle);
  std::lock_guard<std::mutex> lock(s_mutex);
  for (auto& [base, block] : s_blocks)
    if (block.exporter >= 0 && block.handle == key) return block.opens++, *pointer = (void*)base, cudaSuccess;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC), exporter = (int)syscall(SYS_pidfd_open, handle.pid, 0);
  Block block = {0, handle.size, nullptr, fd, device, cudaMemoryTypeDevice, false, false, exporter, 1, key};
  if (fd < 0 || exporter < 0 || !map_device(fd, handle.size, &block.base, &block.mapped)) {
    if (fd >= 0) close(fd);
    if (exporter >= 0) close(exporter);
    return cudaErrorMapBufferObjectFailed;
  }
  lock_file(fd, F_OFD_SETLK, F_RDLCK);
  s_blocks[block.base] = block;
  *pointer = (void*)block.base;
  return cudaSuccess;
}

static bool has_ended(int pidfd) {
  struct pollfd process = {pidfd, POLLIN, 0};
  return poll(&process, 1, 0) > 0;
}

}  // namespace rig

void* rig_address(const void* pointer) {
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  rig::Block* block = rig::block_of(pointer);
  if (!block) {
    char text[128];
    snprintf(text, sizeof text, "a kernel got %p, which is neither device memory nor pinned, or was freed", pointer);
    rig_abort(text);
  }
  // The documentation does not say what becomes of memory whose owner has died.
  if (block->exporter >= 0 && rig::has_ended(block->exporter)) rig::poison(block->mapped, block->size);
  return block->mapped + ((uintptr_t)pointer - block->base);
}

RIG_EXPORT cudaError_t cudaMalloc(void** pointer, size_t size) {
  RIG_ENTER();
  return rig::failed(rig::allocate(pointer, size));
}
RIG_EXPORT cudaError_t cudaFree(void* pointer) {
  RIG_ENTER();
  return rig::failed(rig::release(pointer, true));
}
// Memory of the pool is there at once, and is freed behind what the stream was given before.
RIG_EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }
RIG_EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  RIG_ENTER();
  rig::put(stream, [=] { rig::release_now(pointer); }, false);
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  RIG_ENTER();
  return *pool = (cudaMemPool_t)&rig::s_blocks, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
RIG_EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  return *(uint64_t*)value = rig::counters.device_bytes, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
RIG_EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

RIG_EXPORT cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  RIG_ENTER();
  RIG_CHECK(rig::need_context(rig::current_device()));
  const rig::Device& device = rig::visible_devices()[rig::current_device()];
  uint64_t used = 0;
  rig::with_machine([&](rig::Machine& machine, rig::Process&) {
    for (rig::Process& process : machine.processes) used += process.pid ? process.used[device.row] : 0;
  });
  *total = device.memory;
  *unused = device.memory - used;
  return cudaSuccess;
}

RIG_EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  RIG_ENTER();
  RIG_CHECK(rig::need_context(rig::current_device()));
  rig::wait_implicitly();
  if (rig::fault("no_pinned_memory")) return rig::failed(cudaErrorMemoryAllocation);
  size = size ? size : 1;
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return rig::failed(cudaErrorMemoryAllocation);
  rig::poison(at, size);
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  rig::s_blocks[(uintptr_t)at] = {(uintptr_t)at, size,  (char*)at, -1, rig::current_device(), cudaMemoryTypeHost,
                                  true,          false, -1,        0,  ""};
  return *pointer = at, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  rig::wait_implicitly();
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  auto at = rig::s_blocks.find((uintptr_t)pointer);
  if (at == rig::s_blocks.end() || !at->second.owns_host) return rig::failed(cudaErrorInvalidValue);
  munmap(pointer, at->second.size);
  rig::s_blocks.erase(at);
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  RIG_ENTER();
  rig::wait_implicitly();
  if (rig::fault("no_pinned_memory")) return rig::failed(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  if (rig::block_of(pointer)) return rig::failed(cudaErrorHostMemoryAlreadyRegistered);
  rig::s_blocks[(uintptr_t)pointer] = {(uintptr_t)pointer, size,  (char*)pointer, -1, rig::current_device(), cudaMemoryTypeHost,
                                       false,              false, -1,             0,  ""};
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  rig::wait_implicitly();
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  return rig::s_blocks.erase((uintptr_t)pointer) ? cudaSuccess : rig::failed(cudaErrorHostMemoryNotRegistered);
}

RIG_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  RIG_ENTER();
  memset(attributes, 0, sizeof *attributes);
  rig::Block block;
  if (!rig::find_block(pointer, &block)) return attributes->type = cudaMemoryTypeUnregistered, attributes->device = -2, cudaSuccess;
  attributes->type = block.type;
  attributes->device = block.device;
  attributes->devicePointer = (void*)pointer;
  attributes->hostPointer = block.type == cudaMemoryTypeHost ? (void*)pointer : nullptr;
  return cudaSuccess;
}

RIG_EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  RIG_ENTER();
  return rig::failed(rig::export_block(pointer, handle));
}
RIG_EXPORT cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned) {
  RIG_ENTER();
  return rig::failed(rig::import_block(pointer, &handle));
}
RIG_EXPORT cudaError_t cudaIpcCloseMemHandle(void* pointer) { return rig::failed(rig::release(pointer, false)); }

// ---- virtual memory management, for torch's expandable segments

namespace rig {
struct Physical {
  int fd, device;
  size_t size;
  int references;
};
struct Mapping {
  size_t size;
  char* mapped;
};
static std::map<uint64_t, Physical> s_physical;
static uint64_t s_next_physical = 1;
// Reserved addresses, and where kernels will find what is mapped there.
static std::map<uintptr_t, Mapping> s_reserved;

static void drop(uint64_t handle) {
  Physical& memory = s_physical[handle];
  if (--memory.references) return;
  close(memory.fd);
  give_back(memory.device, memory.size);
  s_physical.erase(handle);
}
static std::map<uintptr_t, uint64_t> s_mapped;
}  // namespace rig

RIG_EXPORT CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *size = rig::kGranularity, CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  void* base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* mapped = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED || mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  rig::s_reserved[(uintptr_t)base] = {size, (char*)mapped};
  return *pointer = (CUdeviceptr)base, CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t) {
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  auto at = rig::s_reserved.find(pointer);
  if (at == rig::s_reserved.end()) return CUDA_ERROR_INVALID_VALUE;
  munmap((void*)at->first, at->second.size);
  munmap(at->second.mapped, at->second.size);
  rig::s_reserved.erase(at);
  return CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop, unsigned long long) {
  int device = prop->location.id;
  if (cudaError_t error = rig::need_context(device)) return (CUresult)error;
  if (rig::fails_now() || !rig::take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  int fd = memfd_create("cuda-rig-memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size)) rig_abort("the machine has no memory for device memory");
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  *handle = rig::s_next_physical++;
  rig::s_physical[*handle] = {fd, device, size, 1};
  return CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  return rig::drop(handle), CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  auto at = rig::s_reserved.upper_bound(pointer);
  if (at == rig::s_reserved.begin()) return CUDA_ERROR_INVALID_VALUE;
  --at;
  rig::Physical& memory = rig::s_physical[handle];
  char* where = at->second.mapped + (pointer - at->first);
  mmap(where, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.fd, 0);
  rig::poison(where, size);
  memory.references++;
  rig::s_mapped[pointer] = handle;
  rig::s_blocks[pointer] = {pointer, size, where, -1, memory.device, cudaMemoryTypeDevice, false, false, -1, 0, ""};
  return CUDA_SUCCESS;
}
// Does not wait for the device.
RIG_EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  std::lock_guard<std::mutex> lock(rig::s_mutex);
  for (auto at = rig::s_mapped.lower_bound(pointer); at != rig::s_mapped.end() && at->first < pointer + size;) {
    rig::Block& block = rig::s_blocks[at->first];
    mmap(block.mapped, block.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    rig::s_blocks.erase(at->first);
    rig::drop(at->second);
    at = rig::s_mapped.erase(at);
  }
  return CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
