// What the two sources of the emulated NCCL share: communicators, and the file in which the ranks of one meet.
#pragma once

#include <nccl.h>

#include <map>
#include <memory>
#include <mutex>

#include "rig.hpp"

namespace rig {

// How far a rank is with its init.
enum Stage : uint32_t { kAbsent, kHere, kAccepts, kRefuses, kDestroys };

// What a rank tells the others of its communicator.
struct Rank {
  std::atomic<uint32_t> bell;  // futex: rung at whatever this rank may wait for
  std::atomic<uint32_t> stage;
  uint64_t host;           // hash of NCCL_HOSTID, else of host name and boot id
  int64_t bus;             // PCI bus id as a number, of a MIG slice that of its GPU
  unsigned char uuid[16];  // of a MIG slice its own
  int color, key;          // of a split
};

// A chunk on its way from one rank to another; there is one where `written` is ahead of `read`.
struct Mailbox {
  std::atomic<uint64_t> written, read;
  uint64_t tag;  // of the operation: nobody takes a chunk of another one, so calls that do not match hang
  size_t size;
  char data[128 << 10];
};

// The file in the folder of the run that all ranks of a communicator map. The last one that leaves removes it.
class Meeting {
 public:
  using Condition = std::function<bool()>;
  Meeting(const std::string& name, int ranks);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Rank& rank(int rank) const;
  Mailbox& mailbox(int from, int to) const;
  void ring(int rank);
  // Enter a stage and tell everybody.
  void enter(int rank, Stage stage);
  // Wait, as this rank, until done() holds; false where stopped() holds first.
  bool wait(int rank, const Condition& stopped, const Condition& done);
  bool wait_for_all(int rank, const Condition& stopped, Stage stage);
  void leave();

 private:
  std::string path_;
  int ranks_;
  size_t size_;
  char* base_;
};

// The factor of ncclRedOpCreatePreMulSum: its bytes, or where on the device they are when the operation runs.
struct Factor {
  const void* device;
  char bytes[8];
};

// Remember the text for ncclGetLastError; returns `result`.
ncclResult_t nccl_failed(ncclResult_t result, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace rig

// Never freed: the watchdog or late work may still ask a communicator that is gone.
struct ncclComm {
  std::string name;
  int ranks = 0, rank = 0, device = 0;
  bool blocking = true;
  std::atomic<ncclResult_t> state{ncclInProgress};  // what ncclCommGetAsyncError says
  std::atomic<bool> aborted{false};
  std::atomic<uint64_t> issued{0}, done{0};  // groups of operations, which run in the order of their calls

  std::mutex mutex;  // for what follows
  std::shared_ptr<rig::Meeting> meeting;  // null before init and after abort or destroy
  long collectives = 0;
  int splits = 0, factors_made = 0;
  std::map<int, rig::Factor> factors;  // by ncclRedOp_t
};
