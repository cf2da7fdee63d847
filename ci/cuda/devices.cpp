// The machine: settings, its GPUs and MIG slices, what CUDA_VISIBLE_DEVICES leaves of them, and the state that processes share.
// Follows the CUDA C++ Programming Guide, "CUDA Environment Variables", and the MIG User Guide, "CUDA Device Enumeration".
#include "rig.hpp"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>

namespace rig {

long number(const char* variable, long fallback) {
  const char* text = getenv(variable);
  return text && *text ? strtol(text, nullptr, 10) : fallback;
}

bool fault(const char* name, long* value) {
  const char* text = getenv("CUDA_RIG_FAULT");
  for (std::string rest = text ? text : ""; !rest.empty();) {
    size_t comma = rest.find(',');
    std::string item = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    size_t equals = item.find('=');
    if (item.substr(0, equals) != name) continue;
    if (value) *value = equals == std::string::npos ? 0 : strtol(item.c_str() + equals + 1, nullptr, 10);
    return true;
  }
  return false;
}

bool like_gpu() {
  static const char* like = getenv("CUDA_RIG_LIKE");
  return like && !strcmp(like, "gpu");
}

std::string state_folder() {
  const char* folder = getenv("CUDA_RIG_STATE");
  if (!folder) rig_abort("CUDA_RIG_STATE is not set: start the command with ci/cuda.py");
  return folder;
}

static std::string uuid_text(const char* prefix, const unsigned char* b) {
  char text[64];
  int at = snprintf(text, sizeof text, "%s-", prefix);
  for (int i = 0; i < 16; i++) {
    const char* dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
    at += snprintf(text + at, sizeof text - at, "%s%02x", dash, b[i]);
  }
  return text;
}

const std::vector<Device>& machine_devices() {
  static const std::vector<Device> all = [] {
    std::vector<Device> found;
    long gpus = number("CUDA_RIG_DEVICES", 1), slices = number("CUDA_RIG_MIG", 0);
    if (fault("no_device")) gpus = 0;
    for (int gpu = 0; gpu < gpus; gpu++) {
      Device whole = {gpu, -1, {}, "", "", 0x1b + gpu, size_t(number("CUDA_RIG_MEMORY_MIB", 8192)) << 20, 0};
      for (int i = 0; i < 16; i++) whole.bytes[i] = (unsigned char)(0xa0 + 16 * gpu + i);
      whole.uuid = whole.parent = uuid_text("GPU", whole.bytes);
      for (int slice = slices ? 0 : -1; slice < slices; slice++) {
        Device device = whole;
        device.slice = slice;
        if (slices) {
          device.memory = whole.memory / slices;
          device.bytes[0] = (unsigned char)(0x10 + slice);
          device.uuid = uuid_text("MIG", device.bytes);
        }
        device.row = (int)found.size();
        if (device.row < kMaxDevices) found.push_back(device);
      }
    }
    return found;
  }();
  return all;
}

// The device that an entry of CUDA_VISIBLE_DEVICES names: an index of a GPU (with MIG: its first slice), or the beginning of a UUID.
static const Device* named(const std::string& entry) {
  char* end;
  long index = strtol(entry.c_str(), &end, 10);
  bool is_index = !entry.empty() && !*end;
  const Device* found = nullptr;
  for (const Device& device : machine_devices()) {
    if (!(is_index ? device.physical == index && device.slice <= 0 : device.uuid.rfind(entry, 0) == 0)) continue;
    if (found) return nullptr;  // the beginning of several UUIDs
    found = &device;
  }
  return found;
}

const std::vector<Device>& visible_devices() {
  static const std::vector<Device> visible = [] {
    std::vector<Device> found;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
      found = machine_devices();
    } else {
      // Entries behind the first one that names nothing do not count.
      for (std::string rest = text; !rest.empty();) {
        size_t comma = rest.find(',');
        std::string entry = rest.substr(0, comma);
        entry.erase(0, entry.find_first_not_of(' '));
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        const Device* device = entry.empty() ? nullptr : named(entry);
        if (!device) break;
        for (const Device& other : found)
          if (other.row == device->row) return std::vector<Device>();  // a device that is named twice: none is visible
        found.push_back(*device);
      }
    }
    // A process sees one MIG slice at most.
    if (!found.empty() && found[0].slice >= 0) found.resize(1);
    return found;
  }();
  return visible;
}

// ---- state of the machine

// Start time of a process in clock ticks; 0 for one that is gone or a zombie, whose memory the driver has freed.
static uint64_t start_time(pid_t pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t size = read(fd, text, sizeof text - 1);
  close(fd);
  if (size <= 0) return 0;
  text[size] = 0;
  const char* at = strrchr(text, ')');  // the name before it may have spaces
  if (!at || at[2] == 'Z' || at[2] == 'X') return 0;
  for (int field = 2; field < 22 && at; field++) at = strchr(at + 1, ' ');
  return at ? strtoull(at, nullptr, 10) : 0;
}

static Machine* open_machine() {
  std::string path = state_folder() + "/machine";
  int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) rig_abort(("cannot open " + path).c_str());
  flock(fd, LOCK_EX);
  bool is_new = lseek(fd, 0, SEEK_END) == 0;
  if (is_new && ftruncate(fd, sizeof(Machine))) rig_abort(("no space for " + path).c_str());
  void* at = mmap(nullptr, sizeof(Machine), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) rig_abort(("cannot map " + path).c_str());
  auto* machine = (Machine*)at;
  if (is_new) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&machine->mutex, &kind);
  }
  flock(fd, LOCK_UN);
  close(fd);
  return machine;
}

void with_machine(const std::function<void(Machine&, Process&)>& body) {
  static Machine* machine = open_machine();
  if (pthread_mutex_lock(&machine->mutex) == EOWNERDEAD) pthread_mutex_consistent(&machine->mutex);
  Process *own = nullptr, *unused = nullptr;
  for (Process& row : machine->processes) {
    if (row.pid == getpid()) own = &row;
    else if (row.pid && start_time(row.pid) != row.started) memset(&row, 0, sizeof row);
    if (!row.pid && !unused) unused = &row;
  }
  if (!own) {
    if (!unused) rig_abort("more processes on the GPUs than the emulated runtime has rows for");
    own = unused;
    own->started = start_time(getpid());
    own->pid = getpid();
  }
  body(*machine, *own);
  pthread_mutex_unlock(&machine->mutex);
}

}  // namespace rig

void rig_abort(const char* why) {
  fprintf(stderr, "cuda rig, process %d: %s\n", getpid(), why);
  fflush(stderr);
  abort();
}
