// Errors: names and texts of the real runtime, the state that a process is in, faults on demand.
// Follows the CUDA Runtime API, "Error Handling" and the description of cudaError.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rig_error_table.hpp"  // made by ci/cuda_setup.py: the answers of the real libcudart
#include "runtime.hpp"

namespace rig {

static thread_local cudaError_t t_last = cudaSuccess;
static std::atomic<int> s_lost{0};
static std::atomic<bool> s_used{false}, s_forked{false};

// Errors that cudaGetDeviceCount has and every call after it.
static cudaError_t start_error() {
  static const cudaError_t error = [] {
    if (fault("no_driver") || fault("old_driver")) return cudaErrorInsufficientDriver;
    if (fault("not_initialized")) return cudaErrorSystemNotReady;
    if (fault("driver_mismatch")) return cudaErrorSystemDriverMismatch;
    if (fault("no_forward_compatibility")) return cudaErrorCompatNotSupportedOnDevice;
    return visible_devices().empty() ? cudaErrorNoDevice : cudaSuccess;
  }();
  return error;
}

cudaError_t state() {
  if (s_forked) return cudaErrorInitializationError;
  if (!s_used.exchange(true)) pthread_atfork(nullptr, nullptr, [] { s_forked = true; });
  if (int lost = s_lost) return (cudaError_t)lost;
  return start_error();
}

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) t_last = error;
  return error;
}

void lose(cudaError_t error) {
  s_lost = error;
  // For NVML, which every process may ask.
  if (FILE* mark = fopen((state_folder() + "/lost").c_str(), "w")) fclose(mark);
}
bool is_lost() { return s_lost != 0; }

static const ErrorText& text_of(int code) {
  static const ErrorText unknown = {0, "cudaErrorUnrecognized", "unrecognized error code"};
  for (const ErrorText& entry : kErrorTexts)
    if (entry.code == code) return entry;
  return unknown;
}

}  // namespace rig

RIG_EXPORT cudaError_t cudaGetLastError() {
  cudaError_t last = rig::t_last;
  // An error of a lost device stays.
  rig::t_last = cudaSuccess;
  return rig::is_lost() ? rig::state() : last;
}
RIG_EXPORT cudaError_t cudaPeekAtLastError() { return rig::is_lost() ? rig::state() : rig::t_last; }
RIG_EXPORT const char* cudaGetErrorName(cudaError_t error) { return rig::text_of(error).name; }
RIG_EXPORT const char* cudaGetErrorString(cudaError_t error) { return rig::text_of(error).text; }

// The driver's errors have the same numbers; their names are other ones.
RIG_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<std::string>> names(1024);
  if (error < 0 || error >= 1024) return *name = nullptr, CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(mutex);
  auto& known = names[error];
  if (!known) {
    std::string text = rig::text_of(error).name;
    if (error == 0) text = "CUDA_SUCCESS";
    else if (error == 2) text = "CUDA_ERROR_OUT_OF_MEMORY";
    else {
      // cudaErrorInvalidValue: CUDA_ERROR_INVALID_VALUE
      std::string upper = "CUDA_ERROR";
      for (const char* at = text.c_str() + strlen("cudaError"); *at; at++) {
        if (*at >= 'A' && *at <= 'Z') upper += '_';
        upper += (char)toupper(*at);
      }
      text = upper;
    }
    known = std::make_unique<std::string>(text);
  }
  return *name = known->c_str(), CUDA_SUCCESS;
}
RIG_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return *text = rig::text_of(error).text, CUDA_SUCCESS;
}
