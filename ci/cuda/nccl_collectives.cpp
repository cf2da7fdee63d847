// Operations of the emulated NCCL: groups, data movement, reductions. By NCCL's user guide ("Collective Operations",
// "Group Calls", "Point-to-point communication", "In-place Operations").
//
// An operation is work on its stream. It copies through the mailboxes of its communicator, one chunk at a time, and ends when all
// that it sends was taken: sends that cross without a group hang, which the guide allows and a real NCCL does for large ones.
#include <string.h>

#include <algorithm>
#include <deque>

#include "nccl_comm.hpp"

namespace rig {

enum Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kAlltoAll, kGather, kSend, kRecv };

struct Operation {
  Kind kind;
  const void* send;
  void* recv;
  size_t count;  // elements as the call counts them
  ncclDataType_t type;
  ncclRedOp_t op;
  int peer;       // or the root
  Factor factor;  // where op is of ncclRedOpCreatePreMulSum
};

// ---- types
template <class Body>
static auto with_type(ncclDataType_t type, Body body) {
  switch (type) {
    case ncclInt8: return body(int8_t());
    case ncclUint8: return body(uint8_t());
    case ncclInt32: return body(int32_t());
    case ncclUint32: return body(uint32_t());
    case ncclInt64: return body(int64_t());
    case ncclUint64: return body(uint64_t());
    case ncclFloat16: return body(__half());
    case ncclFloat32: return body(float());
    case ncclFloat64: return body(double());
    case ncclBfloat16: return body(__nv_bfloat16());
    case ncclFloat8e4m3: return body(__nv_fp8_e4m3());
    case ncclFloat8e5m2: return body(__nv_fp8_e5m2());
    default: rig_abort("a data type that NCCL does not have");
  }
}

static size_t size_of(ncclDataType_t type) {
  return with_type(type, [](auto value) { return sizeof value; });
}

// Small floats are reduced in float32 and rounded once.
template <class T>
using Wide = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

// `inputs` holds `ranks` arrays of `count` elements, one behind the other; they are reduced in rank order.
template <class T>
static void combine(const T* inputs, int ranks, size_t count, ncclRedOp_t op, T* out) {
  for (size_t i = 0; i < count; i++) {
    auto total = Wide<T>(inputs[i]);
    for (int rank = 1; rank < ranks; rank++) {
      auto value = Wide<T>(inputs[rank * count + i]);
      if (op == ncclProd) total *= value;
      else if (op == ncclMax) total = std::max(total, value);
      else if (op == ncclMin) total = std::min(total, value);
      else total += value;
    }
    out[i] = T(op == ncclAvg ? Wide<T>(total / Wide<T>(ranks)) : total);
  }
}

// ---- data movement
struct Transfer {
  char* at;
  size_t left;  // bytes
  uint64_t tag;
};

// Transfers with all peers that make progress at the same time, in order for each peer and direction.
class Exchange {
 public:
  Exchange(ncclComm* comm, Meeting& meeting) : comm_(comm), meeting_(meeting), out_(comm->ranks), in_(comm->ranks) {}

  void send(int peer, const char* from, size_t size, uint64_t tag) {
    if (size) out_[peer].push_back({(char*)from, size, tag});
  }
  void receive(int peer, char* to, size_t size, uint64_t tag) {
    if (size) in_[peer].push_back({to, size, tag});
  }
  // False where the communicator was aborted.
  bool run() {
    return meeting_.wait(comm_->rank, [this] { return comm_->aborted.load(); }, [this] {
      bool is_done = true;
      for (int peer = 0; peer < comm_->ranks; peer++) {
        while (!out_[peer].empty() && put(peer, out_[peer].front())) out_[peer].pop_front();
        while (!in_[peer].empty() && take(peer, in_[peer].front())) in_[peer].pop_front();
        is_done = is_done && out_[peer].empty() && in_[peer].empty();
      }
      return is_done;
    });
  }

 private:
  // Go on with a transfer; true once it is complete.
  bool put(int peer, Transfer& transfer) {
    Mailbox& box = meeting_.mailbox(comm_->rank, peer);
    if (box.written != box.read) return false;
    if (!transfer.left) return true;
    box.size = std::min(transfer.left, sizeof box.data);
    box.tag = transfer.tag;
    memcpy(box.data, transfer.at, box.size);
    transfer.at += box.size;
    transfer.left -= box.size;
    box.written++;
    meeting_.ring(peer);
    return false;
  }
  bool take(int peer, Transfer& transfer) {
    Mailbox& box = meeting_.mailbox(peer, comm_->rank);
    if (box.written == box.read || box.tag != transfer.tag) return false;
    memcpy(transfer.at, box.data, box.size);
    transfer.at += box.size;
    transfer.left -= box.size;
    box.read++;
    meeting_.ring(peer);
    return !transfer.left;
  }

  ncclComm* comm_;
  Meeting& meeting_;
  std::vector<std::deque<Transfer>> out_, in_;
};

// ---- collectives: reduce and spread make most of them
struct Block {
  size_t offset, count;  // elements
};

class Collective {
 public:
  Collective(ncclComm* comm, Meeting& meeting, const Operation& call)
      : comm_(comm), meeting_(meeting), call_(call), ranks_(comm->ranks), rank_(comm->rank), size_(size_of(call.type)) {
    // What all ranks have to agree on.
    for (size_t part : {call.count, size_t(call.kind), size_t(call.type), size_t(std::min(call.op, ncclNumOps)), size_t(call.peer)})
      tag_ = (tag_ ^ part) * 0x100000001b3;
  }

  bool run() {
    const int root = call_.peer;
    const size_t count = call_.count, bytes = count * size_;
    const auto* send = (const char*)rig_address(call_.send);
    const bool receives = rank_ == root || (call_.kind != kReduce && call_.kind != kGather);
    char* recv = receives ? (char*)rig_address(call_.recv) : nullptr;
    std::vector<Block> blocks(ranks_);
    for (size_t i = 0, n = ranks_; i < n; i++) {
      if (call_.kind == kAllReduce) blocks[i] = {count * i / n, count * (i + 1) / n - count * i / n};
      else if (call_.kind == kReduceScatter || call_.kind == kAllGather) blocks[i] = {i * count, count};
      else blocks[i] = {0, int(i) == root ? count : 0};
    }
    switch (call_.kind) {
      case kAllReduce: return reduce(send, blocks, recv + blocks[rank_].offset * size_) && spread(blocks, recv);
      case kReduceScatter: case kReduce: return reduce(send, blocks, recv);
      case kAllGather: case kBroadcast:
        if (blocks[rank_].count) memmove(recv + blocks[rank_].offset * size_, send, bytes);
        return spread(blocks, recv);
      default: break;
    }
    Exchange exchange(comm_, meeting_);
    for (int i = 0; i < ranks_; i++) {
      if (call_.kind == kAlltoAll) exchange.send(i, send + i * bytes, bytes, tag_);
      else if (i == root) exchange.send(i, send, bytes, tag_);
      if (receives) exchange.receive(i, recv + i * bytes, bytes, tag_);
    }
    return exchange.run();
  }

 private:
  // Every rank gets its block of all inputs, reduced once: all ranks that see a result see the same bits.
  bool reduce(const char* input, const std::vector<Block>& blocks, char* out) {
    std::vector<char> scaled;
    if (call_.op >= ncclNumOps) {
      size_t count = 0;
      for (const Block& block : blocks) count = std::max(count, block.offset + block.count);
      scaled.assign(input, input + count * size_);
      scale(scaled);
      input = scaled.data();
    }
    const size_t own = blocks[rank_].count * size_;
    std::vector<char> inputs(ranks_ * own);
    if (own) memcpy(inputs.data() + rank_ * own, input + blocks[rank_].offset * size_, own);
    Exchange exchange(comm_, meeting_);
    for (int peer = 0; peer < ranks_; peer++) {
      if (peer == rank_) continue;
      exchange.send(peer, input + blocks[peer].offset * size_, blocks[peer].count * size_, tag_);
      exchange.receive(peer, inputs.data() + peer * own, own, tag_);
    }
    if (!exchange.run()) return false;
    with_type(call_.type, [&](auto value) {
      using T = decltype(value);
      combine((const T*)inputs.data(), ranks_, blocks[rank_].count, call_.op, (T*)out);
    });
    return true;
  }

  void scale(std::vector<char>& data) {
    const void* factor = call_.factor.device ? rig_address(call_.factor.device) : call_.factor.bytes;
    with_type(call_.type, [&](auto value) {
      using T = decltype(value);
      auto by = Wide<T>(*(const T*)factor);
      for (auto* at = (T*)data.data(); at < (T*)(data.data() + data.size()); at++) *at = T(Wide<T>(*at) * by);
    });
  }

  // Every rank sends its block to all others.
  bool spread(const std::vector<Block>& blocks, char* data) {
    Exchange exchange(comm_, meeting_);
    for (int peer = 0; peer < ranks_; peer++) {
      if (peer == rank_) continue;
      exchange.send(peer, data + blocks[rank_].offset * size_, blocks[rank_].count * size_, tag_);
      exchange.receive(peer, data + blocks[peer].offset * size_, blocks[peer].count * size_, tag_);
    }
    return exchange.run();
  }

  ncclComm* comm_;
  Meeting& meeting_;
  const Operation& call_;
  int ranks_, rank_;
  size_t size_;
  uint64_t tag_ = 0xcbf29ce484222325;
};

// ---- groups
// What a group has for one communicator and stream: sends and receives all at once, then the collectives in order.
struct Work {
  ncclComm* comm;
  void* stream;
  std::vector<Operation> calls;
  std::shared_ptr<Meeting> meeting;
  uint64_t number = 0;
  bool hangs = false, fails = false;

  void run() {
    auto aborted = [this] { return comm->aborted.load(); };
    // Operations of one communicator do not overlap, whatever their streams are.
    if (!meeting->wait(comm->rank, aborted, [this] { return comm->done == number; })) return;
    if (fails)
      comm->state = comm->rank == 0 ? nccl_failed(ncclSystemError, "Call to recv failed (fault nccl_late_error)")
                                    : nccl_failed(ncclRemoteError, "Connection closed by remote peer (fault nccl_late_error)");
    if ((hangs || fails) && !meeting->wait(comm->rank, aborted, [] { return false; })) return;
    Exchange exchange(comm, *meeting);
    for (const Operation& call : calls) {
      const size_t size = call.count * size_of(call.type);
      if (call.kind == kSend) exchange.send(call.peer, (const char*)rig_address(call.send), size, size);
      if (call.kind == kRecv) exchange.receive(call.peer, (char*)rig_address(call.recv), size, size);
    }
    bool goes_on = exchange.run();
    for (const Operation& call : calls)
      if (call.kind != kSend && call.kind != kRecv) goes_on = goes_on && Collective(comm, *meeting, call).run();
  }
};

static void run_work(void* argument) {
  std::unique_ptr<Work> work((Work*)argument);
  work->run();
  work->comm->done++;
  work->meeting->ring(work->comm->rank);
}

static void launch(Work* work) {
  ncclComm* comm = work->comm;
  std::lock_guard<std::mutex> lock(comm->mutex);  // numbered in the order in which the streams get it
  if (!(work->meeting = comm->meeting)) return;   // aborted just now
  long hang = 0, fail = 0;
  const bool may_hang = fault("nccl_hang", &hang) && comm->rank == 0, may_fail = fault("nccl_late_error", &fail);
  for (const Operation& call : work->calls) {
    if (call.kind == kSend || call.kind == kRecv) continue;
    comm->collectives++;
    work->hangs |= may_hang && comm->collectives == hang;
    work->fails |= may_fail && comm->collectives == fail;
  }
  work->number = comm->issued++;
  rig_launch(work->stream, run_work, work);
}

static thread_local int t_depth = 0;
static thread_local std::vector<Work*> t_group;

static ncclResult_t add(ncclComm* comm, void* stream, Operation call) {
  if (!comm) return nccl_failed(ncclInvalidArgument, "no communicator");
  if (comm->state == ncclInProgress) return nccl_failed(ncclInvalidUsage, "the communicator's last call is not complete");
  if (comm->state != ncclSuccess) return comm->state;
  if (call.peer < 0 || call.peer >= comm->ranks) return nccl_failed(ncclInvalidArgument, "rank %d of %d", call.peer, comm->ranks);
  if (!call.count) return ncclSuccess;
  if (call.op >= ncclNumOps) {
    std::lock_guard<std::mutex> lock(comm->mutex);
    call.factor = comm->factors.at(call.op);
  }
  Work* work = nullptr;
  for (Work* each : t_group)
    if (each->comm == comm && each->stream == stream) work = each;
  if (!work) t_group.push_back(work = new Work{comm, stream, {}, nullptr});
  work->calls.push_back(call);
  return t_depth ? ncclSuccess : ncclGroupEnd();
}

}  // namespace rig

using namespace rig;
using Result = ncclResult_t;

RIG_EXPORT Result ncclGroupStart() {
  t_depth++;
  return ncclSuccess;
}

RIG_EXPORT Result ncclGroupEnd() {
  if (t_depth && --t_depth) return ncclSuccess;
  for (Work* work : t_group) launch(work);
  t_group.clear();
  return ncclSuccess;
}

// ---- operations
using Type = ncclDataType_t;

RIG_EXPORT Result ncclAllReduce(const void* send, void* recv, size_t count, Type type, ncclRedOp_t op, ncclComm_t comm,
                                cudaStream_t stream) {
  return add(comm, stream, {kAllReduce, send, recv, count, type, op, 0, {}});
}

RIG_EXPORT Result ncclReduce(const void* send, void* recv, size_t count, Type type, ncclRedOp_t op, int root, ncclComm_t comm,
                             cudaStream_t stream) {
  return add(comm, stream, {kReduce, send, recv, count, type, op, root, {}});
}

RIG_EXPORT Result ncclReduceScatter(const void* send, void* recv, size_t count, Type type, ncclRedOp_t op, ncclComm_t comm,
                                    cudaStream_t stream) {
  return add(comm, stream, {kReduceScatter, send, recv, count, type, op, 0, {}});
}

RIG_EXPORT Result ncclBroadcast(const void* send, void* recv, size_t count, Type type, int root, ncclComm_t comm,
                                cudaStream_t stream) {
  return add(comm, stream, {kBroadcast, send, recv, count, type, ncclSum, root, {}});
}

RIG_EXPORT Result ncclBcast(void* buffer, size_t count, Type type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

RIG_EXPORT Result ncclAllGather(const void* send, void* recv, size_t count, Type type, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {kAllGather, send, recv, count, type, ncclSum, 0, {}});
}

RIG_EXPORT Result ncclAlltoAll(const void* send, void* recv, size_t count, Type type, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {kAlltoAll, send, recv, count, type, ncclSum, 0, {}});
}

RIG_EXPORT Result ncclGather(const void* send, void* recv, size_t count, Type type, int root, ncclComm_t comm,
                             cudaStream_t stream) {
  return add(comm, stream, {kGather, send, recv, count, type, ncclSum, root, {}});
}

RIG_EXPORT Result ncclSend(const void* send, size_t count, Type type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {kSend, send, nullptr, count, type, ncclSum, peer, {}});
}

RIG_EXPORT Result ncclRecv(void* recv, size_t count, Type type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {kRecv, nullptr, recv, count, type, ncclSum, peer, {}});
}

// ---- reductions with a factor
RIG_EXPORT Result ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, Type type, ncclScalarResidence_t where, ncclComm_t comm) {
  Factor factor = {};
  if (where == ncclScalarDevice) factor.device = scalar;
  else memcpy(factor.bytes, scalar, size_of(type));
  std::lock_guard<std::mutex> lock(comm->mutex);
  *op = ncclRedOp_t(ncclNumOps + comm->factors_made++);
  comm->factors[*op] = factor;
  return ncclSuccess;
}

RIG_EXPORT Result ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  std::lock_guard<std::mutex> lock(comm->mutex);
  comm->factors.erase(op);
  return ncclSuccess;
}
