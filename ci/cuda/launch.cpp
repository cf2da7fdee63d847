// Kernels of the libraries themselves: they are registered, and none can run. torch's operators have kernels in Python instead.
// Follows the CUDA Runtime API, "Execution Control"; the functions with two underscores are what nvcc's generated code calls.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>

#include "runtime.hpp"

static std::mutex s_mutex;
static std::map<const void*, std::string> s_kernels;

RIG_EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[2];
  return handle;
}
RIG_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
RIG_EXPORT void __cudaUnregisterFatBinary(void**) {}
RIG_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
RIG_EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> lock(s_mutex);
  s_kernels[host] = name;
}
RIG_EXPORT char __cudaInitModule(void**) { return 1; }

static thread_local struct {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
} t_configuration;
RIG_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  return t_configuration = {grid, block, shared_bytes, stream}, 0;
}
RIG_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = t_configuration.grid;
  *block = t_configuration.block;
  *shared_bytes = t_configuration.shared_bytes;
  return *(void**)stream = t_configuration.stream, cudaSuccess;
}

static cudaError_t no_kernel(const void* function) {
  std::lock_guard<std::mutex> lock(s_mutex);
  auto at = s_kernels.find(function);
  fprintf(stderr, "cuda rig: there is no kernel %s\n", at == s_kernels.end() ? "of this function" : at->second.c_str());
  return rig::failed(cudaErrorNoKernelImageForDevice);
}
#if CUDART_VERSION >= 13000
RIG_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = (cudaKernel_t)function, cudaSuccess;
}
RIG_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return no_kernel((const void*)kernel);
}
#endif
RIG_EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return no_kernel(function);
}
RIG_EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { return no_kernel(function); }
RIG_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  return attributes->binaryVersion = attributes->ptxVersion = 90, cudaSuccess;
}
RIG_EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
