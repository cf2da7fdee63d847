"""DDP with RPC from the installed torch, run like its own test_tensorpipe_agent.py. Not collected by name."""

from torch.testing._internal.distributed.ddp_under_dist_autograd_test import DdpComparisonTest, DdpUnderDistAutogradTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import generate_tests

_SUITES = [DdpUnderDistAutogradTest, DdpComparisonTest]
globals().update(generate_tests("", TensorPipeRpcAgentTestFixture, _SUITES, __name__))
# They are only mixed into the tests above.
del TensorPipeRpcAgentTestFixture
