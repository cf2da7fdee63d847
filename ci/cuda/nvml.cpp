// NVML over the devices and processes of the emulated machine: libnvidia-ml.so.1, which is independent of the runtime library.
//
// Follows the NVML API Reference Guide: "Device Structs" and "Device Enums" for the types, "Initialization and Cleanup", "Error
// Reporting", "System Queries", "Device Queries" and "Multi Instance GPU Management" for the functions. The wheels have no nvml.h,
// so the types are declared here. Functions that nobody here calls are missing, as in an old driver.
#include <cuda_runtime_api.h>  // CUDART_VERSION
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "rig.hpp"

namespace {

// ---- types

// What these functions return, with the texts of nvmlErrorString.
#define NVML_RETURN_VALUES(X)                                                                            \
  X(NVML_SUCCESS, 0, "Success")                                                                          \
  X(NVML_ERROR_UNINITIALIZED, 1, "Uninitialized")                                                        \
  X(NVML_ERROR_INVALID_ARGUMENT, 2, "Invalid Argument")                                                  \
  X(NVML_ERROR_NOT_SUPPORTED, 3, "Not Supported")                                                        \
  X(NVML_ERROR_NOT_FOUND, 6, "Not Found")                                                                \
  X(NVML_ERROR_INSUFFICIENT_SIZE, 7, "Insufficient Size")                                                \
  X(NVML_ERROR_DRIVER_NOT_LOADED, 9, "Driver Not Loaded")                                                \
  X(NVML_ERROR_LIBRARY_NOT_FOUND, 12, "NVML Shared Library Not Found")                                   \
  X(NVML_ERROR_GPU_IS_LOST, 15, "GPU is lost")                                                           \
  X(NVML_ERROR_LIB_RM_VERSION_MISMATCH, 18, "RM has detected an NVML/RM version mismatch.")              \
  X(NVML_ERROR_UNKNOWN, 999, "Unknown Error")
#define ENUMERATOR(name, code, text) name = code,
enum nvmlReturn_t : int { NVML_RETURN_VALUES(ENUMERATOR) };
enum nvmlComputeMode_t : int { NVML_COMPUTEMODE_DEFAULT = 0, NVML_COMPUTEMODE_PROHIBITED = 2, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3 };
struct nvmlPciInfo_t {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
};
struct nvmlMemory_t {
  unsigned long long total, free, used;
};
struct nvmlProcessInfo_v1_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
};
struct nvmlProcessInfo_t {  // of version 3
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId, computeInstanceId;
};
constexpr unsigned kNoInstance = 0xFFFFFFFF;
constexpr unsigned kMaxSlices = 7;

// What an nvmlDevice_t points to: a GPU, or a MIG slice of one.
struct Handle {
  int physical;
  bool is_slice;
  std::vector<rig::Device> rows;  // of a GPU in MIG mode: its slices
};
using nvmlDevice_t = const Handle*;

// The GPUs, then the slices.
const std::vector<Handle>& handles() {
  static const std::vector<Handle> all = [] {
    std::vector<Handle> gpus, slices;
    for (const rig::Device& device : rig::machine_devices()) {
      if (gpus.empty() || gpus.back().physical != device.physical) gpus.push_back({device.physical, false, {}});
      gpus.back().rows.push_back(device);
      if (device.slice >= 0) slices.push_back({device.physical, true, {device}});
    }
    gpus.insert(gpus.end(), slices.begin(), slices.end());
    return gpus;
  }();
  return all;
}
bool has_slices(nvmlDevice_t device) { return device->rows[0].slice >= 0; }
const std::string& uuid(nvmlDevice_t device) { return device->is_slice ? device->rows[0].uuid : device->rows[0].parent; }
unsigned gpu_count() {
  unsigned count = 0;
  for (const Handle& handle : handles()) count += !handle.is_slice;
  return count;
}

// ---- what functions begin with

std::atomic<int> s_initialized{0};

// The fault of a function, nvml_NAME: its name without the beginning nvml and without a version.
nvmlReturn_t enter(const char* function) {
  std::string name = std::string(function).substr(strlen("nvml"));
  if (name.size() > 3 && name.compare(name.size() - 3, 2, "_v") == 0) name.resize(name.size() - 3);
  if (rig::fault(("nvml_" + name).c_str())) return NVML_ERROR_UNKNOWN;
  return s_initialized ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

// From the beginning under device_lost=0, else once the runtime has left a file `lost` in the state's folder.
bool is_lost() {
  long after = 0;
  if (!rig::fault("device_lost", &after)) return false;
  return after == 0 || access((rig::state_folder() + "/lost").c_str(), F_OK) == 0;
}

nvmlReturn_t check(nvmlDevice_t device) {
  for (const Handle& handle : handles())
    if (&handle == device) return is_lost() ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
  return NVML_ERROR_INVALID_ARGUMENT;
}

#define RETURN_ERROR(expression) \
  if (nvmlReturn_t error_ = (expression)) return error_
#define NVML_ENTER() RETURN_ERROR(enter(__func__))
#define NVML_ENTER_DEVICE(device) \
  NVML_ENTER();                   \
  RETURN_ERROR(check(device))

nvmlReturn_t put_text(const std::string& text, char* out, unsigned length) {
  if (text.size() + 1 > length) return NVML_ERROR_INSUFFICIENT_SIZE;
  memcpy(out, text.c_str(), text.size() + 1);
  return NVML_SUCCESS;
}

template <typename Matches>
nvmlReturn_t find(nvmlDevice_t* out, nvmlReturn_t otherwise, Matches matches) {
  for (const Handle& handle : handles())
    if (matches(handle)) return *out = &handle, is_lost() ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
  return otherwise;
}

}  // namespace

// ---- Initialization and Cleanup

static nvmlReturn_t initialize() {
  nvmlReturn_t error = enter("nvmlInit");
  if (error == NVML_ERROR_UNKNOWN) return error;
  if (rig::fault("no_nvml")) return NVML_ERROR_LIBRARY_NOT_FOUND;
  if (rig::fault("no_driver")) return NVML_ERROR_DRIVER_NOT_LOADED;
  if (rig::fault("driver_mismatch")) return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
  s_initialized++;
  return NVML_SUCCESS;
}
RIG_EXPORT nvmlReturn_t nvmlInit() { return initialize(); }
RIG_EXPORT nvmlReturn_t nvmlInit_v2() { return initialize(); }
RIG_EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned) { return initialize(); }
RIG_EXPORT nvmlReturn_t nvmlShutdown() {
  NVML_ENTER();
  s_initialized--;
  return NVML_SUCCESS;
}

// ---- Error Reporting

RIG_EXPORT const char* nvmlErrorString(nvmlReturn_t result) {
#define TEXT(name, code, text) \
  if (result == code) return text;
  NVML_RETURN_VALUES(TEXT)
  return "Unknown Error";
}

// ---- System Queries

RIG_EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char* version, unsigned length) {
  NVML_ENTER();
  // Of the first driver series with each CUDA.
  const char* own = CUDART_VERSION >= 13000 ? "580.65.06" : "560.28.03";
  return put_text(rig::fault("old_driver") ? "470.42.01" : own, version, length);
}

RIG_EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  NVML_ENTER();
  return *version = rig::fault("old_driver") ? 11040 : CUDART_VERSION, NVML_SUCCESS;
}

// ---- Device Queries: handles

RIG_EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  NVML_ENTER();
  *count = gpu_count();
  return NVML_SUCCESS;
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  NVML_ENTER();
  return find(device, NVML_ERROR_INVALID_ARGUMENT,
              [&](const Handle& handle) { return !handle.is_slice && handle.physical == (int)index; });
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* text, nvmlDevice_t* device) {
  NVML_ENTER();
  return find(device, NVML_ERROR_NOT_FOUND, [&](const Handle& handle) { return uuid(&handle) == text; });
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* text, nvmlDevice_t* device) {
  NVML_ENTER();
  unsigned domain, bus, slot;
  if (!text || sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) return NVML_ERROR_INVALID_ARGUMENT;
  return find(device, NVML_ERROR_NOT_FOUND, [&](const Handle& handle) {
    return !handle.is_slice && !domain && !slot && handle.rows[0].bus == (int)bus;
  });
}

// ---- Device Queries: one device

RIG_EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* name, unsigned length) {
  NVML_ENTER_DEVICE(device);
  return put_text(device->is_slice ? "Emulated CUDA Device MIG" : "Emulated CUDA Device", name, length);
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* text, unsigned length) {
  NVML_ENTER_DEVICE(device);
  return put_text(uuid(device), text, length);
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* pci) {
  NVML_ENTER_DEVICE(device);
  memset(pci, 0, sizeof *pci);
  pci->bus = device->rows[0].bus;
  snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus);
  snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus);
  return NVML_SUCCESS;
}

RIG_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  NVML_ENTER_DEVICE(device);
  *memory = {};
  rig::with_machine([&](rig::Machine& machine, rig::Process&) {
    for (const rig::Device& row : device->rows) {
      memory->total += row.memory;
      for (const rig::Process& process : machine.processes) memory->used += process.pid ? process.used[row.row] : 0;
    }
  });
  memory->free = memory->total - memory->used;
  return NVML_SUCCESS;
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t* mode) {
  NVML_ENTER_DEVICE(device);
  *mode = rig::fault("exclusive")    ? NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
          : rig::fault("prohibited") ? NVML_COMPUTEMODE_PROHIBITED
                                     : NVML_COMPUTEMODE_DEFAULT;
  return NVML_SUCCESS;
}

// ---- Device Queries: processes

// Those with a context on the device. `count` is the room in `out`, and then how many there are.
template <typename Info>
static nvmlReturn_t list_processes(nvmlDevice_t device, unsigned* count, Info* out, void (*fill)(Info*, nvmlProcessInfo_t)) {
  if (!count || (*count && !out)) return NVML_ERROR_INVALID_ARGUMENT;
  std::vector<nvmlProcessInfo_t> found;
  rig::with_machine([&](rig::Machine& machine, rig::Process&) {
    for (const rig::Process& process : machine.processes)
      for (const rig::Device& row : device->rows) {
        bool is_slice = row.slice >= 0;
        nvmlProcessInfo_t info = {(unsigned)process.pid, process.used[row.row], is_slice ? row.slice + 1u : kNoInstance,
                                  is_slice ? 0 : kNoInstance};
        if (process.pid && process.context[row.row]) found.push_back(info);
      }
  });
  unsigned room = *count;
  *count = (unsigned)found.size();
  if (room < found.size()) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (size_t i = 0; i < found.size(); i++) fill(&out[i], found[i]);
  return NVML_SUCCESS;
}
static void fill(nvmlProcessInfo_t* out, nvmlProcessInfo_t info) { *out = info; }
static void fill_v1(nvmlProcessInfo_v1_t* out, nvmlProcessInfo_t info) { *out = {info.pid, info.usedGpuMemory}; }

RIG_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned* count, nvmlProcessInfo_v1_t* out) {
  NVML_ENTER_DEVICE(device);
  return list_processes(device, count, out, fill_v1);
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned* count, nvmlProcessInfo_t* out) {
  NVML_ENTER_DEVICE(device);
  return list_processes(device, count, out, fill);
}
// ---- Multi Instance GPU Management

RIG_EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned* current, unsigned* pending) {
  NVML_ENTER_DEVICE(device);
  *current = *pending = has_slices(device);
  return NVML_SUCCESS;
}
RIG_EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned* is_slice) {
  NVML_ENTER_DEVICE(device);
  *is_slice = device->is_slice;
  return NVML_SUCCESS;
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned* count) {
  NVML_ENTER_DEVICE(device);
  *count = has_slices(device) ? kMaxSlices : 0;
  return NVML_SUCCESS;
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t* slice) {
  NVML_ENTER_DEVICE(device);
  if (device->is_slice || index >= kMaxSlices) return NVML_ERROR_INVALID_ARGUMENT;
  if (!has_slices(device)) return NVML_ERROR_NOT_SUPPORTED;
  return find(slice, NVML_ERROR_NOT_FOUND, [&](const Handle& handle) {
    return handle.is_slice && handle.physical == device->physical && handle.rows[0].slice == (int)index;
  });
}
RIG_EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t slice, nvmlDevice_t* device) {
  NVML_ENTER_DEVICE(slice);
  if (!slice->is_slice) return NVML_ERROR_INVALID_ARGUMENT;
  return find(device, NVML_ERROR_UNKNOWN,
              [&](const Handle& handle) { return !handle.is_slice && handle.physical == slice->physical; });
}

// ---- what torch's libraries look up, and GPUs without NVLink do not have

#define NOT_SUPPORTED(name)                   \
  RIG_EXPORT nvmlReturn_t name(nvmlDevice_t) { \
    NVML_ENTER();                             \
    return NVML_ERROR_NOT_SUPPORTED;          \
  }
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfoV)
NOT_SUPPORTED(nvmlDeviceGetP2PStatus)
