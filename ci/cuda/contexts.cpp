// Devices as a process sees them, and their primary contexts.
// Follows the CUDA Runtime API, "Device Management", and the CUDA Driver API, "Primary Context Management".
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "runtime.hpp"

namespace rig {

static thread_local int t_device = 0;
static std::atomic<bool> s_contexts[kMaxDevices];
// What a context takes of the device: with kernels some hundred MB, and by default none.
static size_t context_bytes() { return like_gpu() ? 300 << 20 : 0; }

int current_device() { return t_device; }
void set_current_device(int device) { t_device = device; }
bool has_context(int device) { return s_contexts[device]; }

cudaError_t need_context(int device) {
  if (cudaError_t error = state()) return error;
  if (s_contexts[device]) return cudaSuccess;
  int row = visible_devices()[device].row;
  cudaError_t error = cudaSuccess;
  with_machine([&](Machine& machine, Process& own) {
    long others = 0, limit = 0;
    size_t used = 0;
    for (Process& process : machine.processes) {
      others += process.pid && process.pid != own.pid && process.context[row];
      used += process.used[row];
    }
    if (fault("prohibited") || (fault("exclusive") && others)) error = cudaErrorDevicesUnavailable;
    else if (fault("mps_clients", &limit) && others >= limit) error = cudaErrorMpsMaxClientsReached;
    else if (used + std::max<size_t>(context_bytes(), 1 << 20) > visible_devices()[device].memory) error = cudaErrorMemoryAllocation;
    else if (!own.context[row]) own.context[row] = true, own.used[row] += context_bytes();
  });
  if (!error && !s_contexts[device].exchange(true)) counters.contexts++;
  return error;
}

}  // namespace rig

using rig::visible_devices;

static cudaError_t check_index(int device) {
  RIG_ENTER();
  return device < 0 || device >= (int)visible_devices().size() ? rig::failed(cudaErrorInvalidDevice) : cudaSuccess;
}

RIG_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  RIG_ENTER();
  *count = (int)visible_devices().size();
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaGetDevice(int* device) {
  RIG_ENTER();
  *device = rig::current_device();
  return cudaSuccess;
}
// Since CUDA 12 this makes the context.
RIG_EXPORT cudaError_t cudaSetDevice(int device) {
  RIG_CHECK(check_index(device));
  rig::set_current_device(device);
  return rig::failed(rig::need_context(device));
}
RIG_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  // By the description of cudaDriverGetVersion: 0 where there is no driver.
  *version = rig::fault("no_driver") ? 0 : rig::fault("old_driver") ? 11040 : CUDART_VERSION;
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

static cudaError_t properties(cudaDeviceProp* p, int index) {
  RIG_CHECK(check_index(index));
  const rig::Device& device = visible_devices()[index];
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Emulated CUDA Device%s", device.slice >= 0 ? " MIG" : "");
  // Of a slice, the properties have the UUID of the GPU: cuDeviceGetUuid_v2 alone is documented to have the slice's.
  const rig::Device* whole = &device;
  unsigned char bytes[16];
  memcpy(bytes, whole->bytes, 16);
  if (device.slice >= 0) bytes[0] = (unsigned char)(0xa0 + 16 * device.physical);
  memcpy(p->uuid.bytes, bytes, 16);
  p->totalGlobalMem = device.memory;
  p->pciBusID = device.bus;
  p->major = 9;
  p->multiProcessorCount = 8;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlockOptin = 232448;
  p->asyncEngineCount = 2;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = p->memoryPoolsSupported = 1;
  p->ipcEventSupported = 1;
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) { return properties(p, device); }
RIG_EXPORT cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* p, int device) { return properties(p, device); }

RIG_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  RIG_CHECK(properties(&p, device));
  switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    case cudaDevAttrComputeMode: *value = rig::fault("exclusive") ? 3 : rig::fault("prohibited") ? 2 : 0; break;
    case cudaDevAttrIpcEventSupport: *value = p.ipcEventSupported; break;
    case (cudaDeviceAttr)CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: *value = !rig::fault("no_stream_words"); break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  RIG_CHECK(check_index(device));
  snprintf(text, size, "0000:%02x:00.0", visible_devices()[device].bus);
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  RIG_ENTER();
  return *least = 0, *greatest = -5, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  RIG_CHECK(check_index(device));
  RIG_CHECK(check_index(peer));
  return *can = device != peer, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
RIG_EXPORT cudaError_t cudaDeviceSynchronize() {
  RIG_ENTER();
  rig::synchronize_device(rig::current_device());
  return rig::failed(rig::state());
}
