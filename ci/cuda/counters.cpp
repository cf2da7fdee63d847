// Counts of what a process asked its devices for. They do not depend on the machine.
#include "runtime.hpp"

namespace rig {
Counters counters;
}

// Copy the counters, in the order of `Counters`, to `out`, which has room for `count` of them; returns how many there are.
RIG_EXPORT int rig_counters(uint64_t* out, int count) {
  auto* all = (std::atomic<uint64_t>*)&rig::counters;
  int there = int(sizeof(rig::Counters) / sizeof *all);
  for (int i = 0; i < count && i < there; i++) out[i] = all[i].load();
  return there;
}

void rig_count_bytes(uint64_t bytes) { rig::counters.kernel_bytes += bytes; }
