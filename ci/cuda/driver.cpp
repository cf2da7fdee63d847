// Calls of the CUDA driver that torch, the ipc backend and libnccl make. libcuda.so.1 is an empty library that needs this one.
// Follows the CUDA Driver API, "Device Management", "Primary Context Management", "Context Management", "Memory Management" and
// "Interprocess communication" and "Stream Memory Operations". The results have the numbers of the runtime's errors.
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "runtime.hpp"
#undef cuDeviceGetUuid
#undef cuDevicePrimaryCtxRelease
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuMemAlloc
#undef cuMemFree
#undef cuIpcOpenMemHandle
#undef cuMemGetAddressRange
#undef cuMemHostRegister
#undef cuMemHostGetDevicePointer
#undef cuStreamBatchMemOp

using rig::visible_devices;

#define RIG_DRIVER(expression) \
  if (cudaError_t error_ = (expression)) return (CUresult)error_

static CUresult check(CUdevice device) {
  RIG_DRIVER(rig::state());
  return device < 0 || device >= (int)visible_devices().size() ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
#define RIG_DEVICE(device) \
  if (CUresult error_ = check(device)) return error_

static CUcontext context_of(int device) { return (CUcontext)(intptr_t)(device + 1); }
static int device_of(CUcontext context) { return (int)(intptr_t)context - 1; }
// Contexts that cuCtxPushCurrent put aside; -1 for none.
static thread_local std::vector<int> t_below;

RIG_EXPORT CUresult cuInit(unsigned) {
  RIG_DRIVER(rig::state());
  return CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuDeviceGetCount(int* count) { return (CUresult)cudaGetDeviceCount(count); }
RIG_EXPORT CUresult cuDeviceGet(CUdevice* device, int index) {
  RIG_DEVICE(index);
  return *device = index, CUDA_SUCCESS;
}
// The UUID of the slice for a MIG device; the first version of the call has that of the GPU.
RIG_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  RIG_DEVICE(device);
  return memcpy(uuid->bytes, visible_devices()[device].bytes, 16), CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  RIG_DEVICE(device);
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  return memcpy(uuid->bytes, properties.uuid.bytes, 16), CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
  return (CUresult)cudaDeviceGetPCIBusId(text, size, device);
}
RIG_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}

RIG_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  RIG_DEVICE(device);
  *flags = 0;
  return *active = rig::has_context(device), CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  RIG_DEVICE(device);
  RIG_DRIVER(rig::need_context(device));
  return *context = context_of(device), CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
RIG_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  RIG_DRIVER(rig::state());
  int device = rig::current_device();
  return *context = rig::has_context(device) ? context_of(device) : nullptr, CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  RIG_DRIVER(rig::state());
  if (context) rig::set_current_device(device_of(context));
  return CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

RIG_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  RIG_DRIVER(rig::state());
  t_below.push_back(rig::current_device());
  return rig::set_current_device(device_of(context)), CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (t_below.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = context_of(rig::current_device());
  rig::set_current_device(t_below.back());
  return t_below.pop_back(), CUDA_SUCCESS;
}

RIG_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t size) { return (CUresult)cudaMalloc((void**)pointer, size); }
RIG_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) { return (CUresult)rig::release((void*)pointer, false); }
RIG_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  RIG_DRIVER(rig::state());
  return (CUresult)rig::export_block((void*)pointer, handle);
}
RIG_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned) {
  RIG_DRIVER(rig::state());
  return (CUresult)rig::import_block((void**)pointer, &handle);
}
RIG_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) { return cuMemFree_v2(pointer); }
RIG_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
  rig::Block block;
  if (!rig::find_block((void*)pointer, &block)) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = block.base;
  if (size) *size = block.size;
  return CUDA_SUCCESS;
}

RIG_EXPORT CUresult cuMemHostRegister_v2(void* pointer, size_t size, unsigned flags) {
  return (CUresult)cudaHostRegister(pointer, size, flags);
}
RIG_EXPORT CUresult cuMemHostUnregister(void* pointer) { return (CUresult)cudaHostUnregister(pointer); }
RIG_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* pointer, unsigned) {
  rig::Block block;
  if (!rig::find_block(pointer, &block) || block.type != cudaMemoryTypeHost) return CUDA_ERROR_INVALID_VALUE;
  return *device = (CUdeviceptr)pointer, CUDA_SUCCESS;
}

// Checked as a whole before anything is issued.
RIG_EXPORT CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned flags) {
  RIG_DRIVER(rig::state());
  if (rig::fault("no_stream_words")) return CUDA_ERROR_NOT_SUPPORTED;
  if (!count || count >= 256 || flags) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; i++) {
    auto& word = operations[i].waitValue;  // writeValue has the same members
    bool waits = word.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
    if (!waits && word.operation != CU_STREAM_MEM_OP_WRITE_VALUE_64) return CUDA_ERROR_NOT_SUPPORTED;
    if (word.flags > (waits ? CU_STREAM_WAIT_VALUE_NOR : 0)) return CUDA_ERROR_NOT_SUPPORTED;
    if (word.address % 8 || !rig::find_block((void*)word.address)) return CUDA_ERROR_INVALID_VALUE;
  }
  for (unsigned i = 0; i < count; i++) {
    auto& word = operations[i].waitValue;
    if (word.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) rig::write_word(stream, word.address, word.value64);
    else rig::wait_for_word(stream, word.address, word.value64, word.flags);
  }
  return CUDA_SUCCESS;
}

// The entry points of the driver by name; the newest version of a call has a suffix.
static cudaError_t entry_point(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*function) *function = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
RIG_EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                               cudaDriverEntryPointQueryResult* result) {
  return entry_point(name, function, result);
}
RIG_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
  return entry_point(name, function, result);
}

// What torch looks up and does not call here: it takes the driver for one that lacks them otherwise.
#define RIG_UNSUPPORTED(name) \
  RIG_EXPORT CUresult rig_no_##name() { return CUDA_ERROR_NOT_SUPPORTED; } \
  __asm__(".globl " #name "\n.set " #name ", rig_no_" #name)
RIG_UNSUPPORTED(cuMemExportToShareableHandle);
RIG_UNSUPPORTED(cuMemImportFromShareableHandle);
RIG_UNSUPPORTED(cuMemRetainAllocationHandle);
RIG_UNSUPPORTED(cuMemGetAllocationPropertiesFromHandle);
RIG_UNSUPPORTED(cuMemsetD32Async);
RIG_UNSUPPORTED(cuMulticastAddDevice);
RIG_UNSUPPORTED(cuMulticastBindMem);
RIG_UNSUPPORTED(cuMulticastCreate);
RIG_UNSUPPORTED(cuMulticastUnbind);
RIG_UNSUPPORTED(cuStreamWriteValue32);
