// An emulated libnccl.so.2: communicators, versions, refusals, faults; data moves in nccl_collectives.cpp. By NCCL's public header
// and user guide: "Creating a Communicator", "Fault Tolerance", "Communicator Creation and Management Functions".
//
// CUDA_RIG_NCCL=2.28.9 is the version that it says it is, with the rule of that version for ranks on one device.
// CUDA_RIG_FAULT, with N counted from 1 in each communicator:
//   nccl_init_hang      init does not end until it is aborted
//   nccl_refuse=R       rank R alone fails in init with a system error; the others wait for it
//   nccl_oom=R          as that, out of device memory
//   nccl_duplicate      all ranks of a host are on one device, whatever CUDA says
//   nccl_hang=N         the N-th collective of rank 0 never completes
//   nccl_abort_hang     ncclCommAbort frees nothing and does not return
//   nccl_late_error=N   the N-th collective never completes, and ncclCommGetAsyncError says why
// A process that dies is not noticed by the others: they wait until they abort, NCCL's worst case.
#include <cuda.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <thread>

#include "nccl_comm.hpp"

namespace rig {

// ---- the last error: one for the process, as the user guide says of ncclGetLastError
static std::mutex s_error_mutex;
static char s_last_error[1024];

ncclResult_t nccl_failed(ncclResult_t result, const char* format, ...) {
  std::lock_guard<std::mutex> lock(s_error_mutex);
  va_list values;
  va_start(values, format);
  vsnprintf(s_last_error, sizeof s_last_error, format, values);
  va_end(values);
  return result;
}

// ---- meetings: how many ranks have left, the ranks, a mailbox for each pair of them; pages that nobody writes take no space
Meeting::Meeting(const std::string& name, int ranks) : path_(state_folder() + "/" + name), ranks_(ranks) {
  size_ = (1 + ranks) * sizeof(Rank) + ranks * ranks * sizeof(Mailbox);
  int fd = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, size_)) rig_abort(("cannot make " + path_).c_str());
  base_ = (char*)mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (base_ == MAP_FAILED) rig_abort(("cannot map " + path_).c_str());
}

Meeting::~Meeting() { munmap(base_, size_); }
Rank& Meeting::rank(int rank) const { return ((Rank*)base_)[1 + rank]; }
Mailbox& Meeting::mailbox(int from, int to) const { return ((Mailbox*)&rank(ranks_))[from * ranks_ + to]; }

void Meeting::ring(int rank) {
  std::atomic<uint32_t>& bell = this->rank(rank).bell;
  bell++;
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Meeting::enter(int rank, Stage stage) {
  this->rank(rank).stage = stage;
  for (int peer = 0; peer < ranks_; peer++) ring(peer);
}

bool Meeting::wait(int rank, const Condition& stopped, const Condition& done) {
  std::atomic<uint32_t>& bell = this->rank(rank).bell;
  for (;;) {
    uint32_t heard = bell;
    if (stopped()) return false;
    if (done()) return true;
    timespec limit = {0, 100000000};  // stopped() may change without the bell
    syscall(SYS_futex, &bell, FUTEX_WAIT, heard, &limit, nullptr, 0);
  }
}

bool Meeting::wait_for_all(int rank, const Condition& stopped, Stage stage) {
  return wait(rank, stopped, [&] {
    for (int peer = 0; peer < ranks_; peer++)
      if (this->rank(peer).stage < stage) return false;
    return true;
  });
}

void Meeting::leave() {
  if (++*(std::atomic<int>*)base_ == ranks_) unlink(path_.c_str());
}

// ---- versions, and ranks on one device
static int version() {
  const char* text = getenv("CUDA_RIG_NCCL");
  int major = 2, minor = 30, patch = 7;
  if (text) sscanf(text, "%d.%d.%d", &major, &minor, &patch);
  return NCCL_VERSION(major, minor, patch);
}

static uint64_t host_hash() {
  std::string text;
  if (const char* id = getenv("NCCL_HOSTID")) {
    text = id;
  } else {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    std::ifstream boot("/proc/sys/kernel/random/boot_id");
    std::getline(boot, text);
    text += name;
  }
  return std::hash<std::string>()(text);
}

static void describe(Rank& own, int device) {
  own.host = host_hash();
  cuDeviceGetUuid_v2((CUuuid*)own.uuid, device);
  char bus[32] = "";
  cudaDeviceGetPCIBusId(bus, sizeof bus, device);
  std::string digits;
  for (char c : std::string(bus))
    if (c != ':' && c != '.') digits += c;
  own.bus = strtoll(digits.c_str(), nullptr, 16);  // 0000:1b:00.0 is 1b000
}

// What NCCL of this version says of ranks on one device; ray_fracbackend/decide/nccl.py has where that is from. Up to 2.29 a rank
// looks for others on its own device, from 2.30 on at all pairs.
static ncclResult_t check_devices(const ncclComm& comm, const Meeting& meeting) {
  const bool is_new = version() >= NCCL_VERSION(2, 30, 0), by_uuid = version() >= NCCL_VERSION(2, 30, 7);
  const bool all_one = fault("nccl_duplicate");
  bool same_gpu = false, same_device = false;
  for (int a = 0; a < comm.ranks; a++) {
    for (int b = 0; b < comm.ranks; b++) {
      const Rank &one = meeting.rank(a), &other = meeting.rank(b);
      if (a == b || one.host != other.host) continue;
      const bool same_bus = all_one || one.bus == other.bus;
      if (!is_new && same_bus && a == comm.rank)
        return nccl_failed(ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %lx", a, b,
                           one.bus);
      same_gpu |= same_bus;
      same_device |= by_uuid && !all_one ? !memcmp(one.uuid, other.uuid, sizeof one.uuid) : same_bus;
    }
  }
  if (is_new && same_device && number("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 1)
    return nccl_failed(ncclInvalidUsage, "%s. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.",
                       by_uuid ? "Multiple Ranks are using the same GPU/Partition"
                               : "Multiple ranks detected using the same GPU on this node");
  if (is_new && same_gpu && number("NCCL_NVLS_ENABLE", 2) == 1)
    return nccl_failed(ncclInvalidUsage,
                       "NCCL_NVLS_ENABLE has been set to \"1\" and communicator has multiple ranks using the same NVML device. "
                       "This is not compatible with NCCL_NVLS_ENABLE=1.");
  return ncclSuccess;
}

// ---- init
static bool is_at_fault(const char* name, int rank) {
  long faulty;
  return fault(name, &faulty) && faulty == rank;
}

// Meet the other ranks of a communicator whose name and ranks are known.
static ncclResult_t join(ncclComm& comm, const Meeting::Condition& stopped) {
  const int rank = comm.rank;
  if (is_at_fault("nccl_refuse", rank)) return nccl_failed(ncclSystemError, "Call to socket failed (fault nccl_refuse)");
  if (is_at_fault("nccl_oom", rank)) return nccl_failed(ncclUnhandledCudaError, "Cuda failure 2 'out of memory'");
  auto aborted = [] { return nccl_failed(ncclInternalError, "the communicator was aborted in its init"); };
  auto meeting = std::make_shared<Meeting>(comm.name, comm.ranks);
  std::unique_lock<std::mutex> lock(comm.mutex);
  comm.meeting = meeting;
  lock.unlock();
  if (fault("nccl_init_hang") && !meeting->wait(rank, stopped, [] { return false; })) return aborted();
  describe(meeting->rank(rank), comm.device);
  meeting->enter(rank, kHere);
  if (!meeting->wait_for_all(rank, stopped, kHere)) return aborted();
  ncclResult_t result = check_devices(comm, *meeting);
  meeting->enter(rank, result == ncclSuccess ? kAccepts : kRefuses);
  if (result != ncclSuccess) return result;
  // A rank that has nothing against it loses the others in the middle of its init.
  if (!meeting->wait_for_all(rank, stopped, kAccepts)) return aborted();
  for (int peer = 0; peer < comm.ranks; peer++)
    if (meeting->rank(peer).stage == kRefuses)
      return nccl_failed(ncclRemoteError, "socketProgress: Connection closed by remote peer (rank %d)", peer);
  return ncclSuccess;
}

// At once, or in a thread of its own for a communicator with blocking=0 ("Fault Tolerance").
static ncclResult_t start(ncclComm* comm, const std::function<ncclResult_t()>& body) {
  comm->state = ncclInProgress;
  if (comm->blocking) return comm->state = body();
  std::thread([=] { comm->state = body(); }).detach();
  return ncclInProgress;
}

static void leave(ncclComm* comm) {
  std::unique_lock<std::mutex> lock(comm->mutex);
  auto meeting = std::move(comm->meeting);
  lock.unlock();
  if (!meeting) return;
  meeting->ring(comm->rank);
  meeting->leave();
}

static ncclComm* new_comm(const ncclConfig_t* config, bool blocking, int device) {
  auto* comm = new ncclComm;
  comm->blocking = config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking : blocking;
  comm->device = device;
  return comm;
}

// The handle is there before init ends, so that another thread can abort it.
static ncclResult_t start_init(ncclComm_t* out, ncclComm* comm, const std::function<ncclResult_t()>& body) {
  *out = comm;
  ncclResult_t result = start(comm, body);
  if (result == ncclSuccess || result == ncclInProgress) return result;
  leave(comm);
  *out = nullptr;
  return result;
}

static ncclResult_t init(ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config) {
  if (!out || ranks < 1 || rank < 0 || rank >= ranks) return nccl_failed(ncclInvalidArgument, "rank %d of %d", rank, ranks);
  int device;
  if (cudaError_t error = cudaGetDevice(&device))
    return nccl_failed(ncclUnhandledCudaError, "Cuda failure %d '%s'", int(error), cudaGetErrorString(error));
  ncclComm* comm = new_comm(config, true, device);
  comm->name = id.internal;
  comm->ranks = ranks;
  comm->rank = rank;
  return start_init(out, comm, [=] { return join(*comm, [=] { return comm->aborted.load(); }); });
}

// All ranks of the parent tell their color in a meeting of its own; those of one color, by key, are the new communicator.
static ncclResult_t split(ncclComm* parent, std::shared_ptr<Meeting> meeting, ncclComm* comm, const std::string& name) {
  auto stopped = [=] { return comm->aborted || parent->aborted; };
  if (!meeting->wait_for_all(parent->rank, stopped, kHere)) return nccl_failed(ncclInternalError, "the split was aborted");
  const int color = meeting->rank(parent->rank).color;
  std::vector<std::pair<int, int>> members;
  for (int peer = 0; peer < parent->ranks; peer++)
    if (meeting->rank(peer).color == color) members.push_back({meeting->rank(peer).key, peer});
  meeting->leave();
  std::sort(members.begin(), members.end());
  comm->ranks = (int)members.size();
  while (members[comm->rank].second != parent->rank) comm->rank++;
  comm->name = name + "c" + std::to_string(color);
  return join(*comm, stopped);
}

// Wait for all operations that were started.
static ncclResult_t flush(ncclComm* comm) {
  std::unique_lock<std::mutex> lock(comm->mutex);
  auto meeting = comm->meeting;
  lock.unlock();
  if (meeting) meeting->wait(comm->rank, [=] { return comm->aborted.load(); }, [=] { return comm->done == comm->issued; });
  return ncclSuccess;
}

}  // namespace rig

using namespace rig;
using Result = ncclResult_t;

// ---- the library
RIG_EXPORT Result ncclGetVersion(int* number) {
  *number = version();
  return ncclSuccess;
}

RIG_EXPORT const char* ncclGetErrorString(Result code) {
  switch (code) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

RIG_EXPORT const char* ncclGetLastError(ncclComm_t) { return s_last_error; }

// ---- communicators
RIG_EXPORT Result ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  *id = {};
  snprintf(id->internal, sizeof id->internal, "nccl-%d-%08x%08x", getpid(), random(), random());
  return ncclSuccess;
}

RIG_EXPORT Result ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return init(comm, ranks, id, rank, config);
}

RIG_EXPORT Result ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return init(comm, ranks, id, rank, nullptr);
}

// More than one id makes a real init faster; here the first one names the file.
RIG_EXPORT Result ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return init(comm, ranks, ids[0], rank, config);
}

RIG_EXPORT Result ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  std::string name = parent->name + "s" + std::to_string(parent->splits++);
  auto meeting = std::make_shared<Meeting>(name, parent->ranks);
  meeting->rank(parent->rank).color = color;
  meeting->rank(parent->rank).key = key;
  meeting->enter(parent->rank, kHere);
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) {
    meeting->leave();
    return ncclSuccess;
  }
  ncclComm* comm = new_comm(config, parent->blocking, parent->device);
  return start_init(out, comm, [=] { return split(parent, meeting, comm, name); });
}

RIG_EXPORT Result ncclCommFinalize(ncclComm_t comm) {
  if (!comm) return nccl_failed(ncclInvalidArgument, "ncclCommFinalize: no communicator");
  return start(comm, [=] { return flush(comm); });
}

// No handle is no error for these two: torch aborts a communicator again whose collective has timed out.
RIG_EXPORT Result ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  flush(comm);
  // "An intra-node collective call, which all ranks on the same node should call to avoid a hang": so it hangs where one does not.
  if (auto meeting = comm->meeting) {
    meeting->enter(comm->rank, kDestroys);
    meeting->wait_for_all(comm->rank, [&] { return comm->aborted.load(); }, kDestroys);
  }
  leave(comm);
  return ncclSuccess;
}

RIG_EXPORT Result ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  while (fault("nccl_abort_hang")) usleep(100000);
  comm->aborted = true;
  leave(comm);
  return ncclSuccess;
}

// Registered memory only makes a real NCCL faster. torch 2.15 registers its segments by itself.
RIG_EXPORT Result ncclCommRegister(ncclComm_t comm, void* buffer, size_t, void** handle) {
  if (!comm || !buffer) return nccl_failed(ncclInvalidArgument, "ncclCommRegister: no communicator or no buffer");
  *handle = buffer;
  return ncclSuccess;
}

RIG_EXPORT Result ncclCommDeregister(ncclComm_t comm, void*) { return comm ? ncclSuccess : ncclInvalidArgument; }

#define ANSWERS(name, type, value)                      \
  RIG_EXPORT Result name(ncclComm_t comm, type* out) {  \
    if (!comm) return ncclInvalidArgument;              \
    *out = value;                                       \
    return ncclSuccess;                                 \
  }
ANSWERS(ncclCommGetAsyncError, Result, comm->state)
ANSWERS(ncclCommCount, int, comm->ranks)
ANSWERS(ncclCommCuDevice, int, comm->device)
ANSWERS(ncclCommUserRank, int, comm->rank)
