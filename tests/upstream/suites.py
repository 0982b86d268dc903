"""Which of PyTorch's suites run on telegrad, and which of their tests have another outcome there, and why."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

_PACKAGE = "torch.testing._internal.distributed."

# suite -> the module of torch's wheel that it is in
SUITES = {
    "DistAutogradTest": "rpc.dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": "rpc.dist_autograd_test",
    "DistOptimizerTest": "rpc.dist_optimizer_test",
    "RpcTest": "rpc.rpc_test",
    "TensorPipeAgentRpcTest": "rpc.rpc_test",
    "RemoteModuleTest": "nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": "nn.api.remote_module_test",
    "ParameterServerTest": "rpc.examples.parameter_server_test",
    "ReinforcementLearningRpcTest": "rpc.examples.reinforcement_learning_rpc_test",
    "DdpUnderDistAutogradTest": "ddp_under_dist_autograd_test",
    "DdpComparisonTest": "ddp_under_dist_autograd_test",
}

# The same, of those whose tests need CUDA devices.
CUDA_SUITES = {
    "TensorPipeAgentCudaRpcTest": "rpc.rpc_test",
    "CudaDistAutogradTest": "rpc.dist_autograd_test",
    "CudaRemoteModuleTest": "nn.api.remote_module_test",
}


def names_in(suite: str) -> list[str]:
    """The names of a suite's tests."""
    return sorted(_tests_in(suite))


def devices_for(suite: str) -> dict[str, int]:
    """How many CUDA devices a suite's tests need, by their names."""
    found = dict.fromkeys(names_in(suite), 0)
    for name, test in _tests_in(suite).items():
        for decorator in test.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "skip_if_lt_x_gpu":
                found[name] = ast.literal_eval(decorator.args[0])
    return found


def _tests_in(suite: str) -> dict[str, ast.FunctionDef]:
    """A suite's module is read and not imported, since that takes long."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    module = _PACKAGE + {**SUITES, **CUDA_SUITES}[suite]
    path = Path(torch.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}

    def tests(of: str) -> dict[str, ast.FunctionDef]:
        found = {}
        for base in reversed(classes[of].bases):
            if isinstance(base, ast.Name) and base.id in classes:
                found |= tests(base.id)
        own = [node for node in classes[of].body if isinstance(node, ast.FunctionDef)]
        return found | {node.name: node for node in own if node.name.startswith("test")}

    return tests(suite)


_SCRIPTED_MODULE = "makes a RemoteModule for TorchScript, whose forward() is an RPC from inside of TorchScript"
_IDS = "asserts the numbers that torch gives its first RRefs; telegrad's ids start elsewhere"
_ASKS_TYPE = (
    "asserts that a method call on an RRef first asks the owner for the value's type, and fails or waits there; "
    "telegrad makes one call, which fails on the owner and says so where its result is used"
)

# test -> why it has another outcome here
DIFFERENT = {
    "DistAutogradTest.test_backward_unused_send_function": "waits for torch's hang when a sent tensor was not used; "
    "telegrad's pass ends",
    "DistAutogradTest.test_nested_context": "wants a context in a context to be refused; telegrad's nest",
    "DistAutogradTest.test_trainer_ps_torchscript_functions": "hands an RRef to a scripted function; TorchScript "
    "knows only torch's own RRefs",
    "RpcTest.test_local_value_not_on_owner": _IDS,
    "RpcTest.test_rref_str": _IDS,
    "RpcTest.test_non_cont_tensors": "wants a view with gaps to arrive with the gaps; telegrad sends what the view "
    "shows, packed",
    "RpcTest.test_py_raise_in_user_func": "wants the callee to print what a function raised; telegrad raises it at "
    "the caller, with the callee's traceback, and prints nothing",
    "RpcTest.test_rref_proxy_non_exist": _ASKS_TYPE,
    "TensorPipeAgentRpcTest.test_rref_proxy_timeout": _ASKS_TYPE,
    "RpcTest.test_rref_type_blocking": "looks for a function of torch's implementation in a profile",
    "RpcTest.test_rref_type_non_blocking": "looks for a function of torch's implementation in a profile",
    "RpcTest.test_shutdown_errors": "wants shutdown() to fail when other workers fail in theirs; telegrad's does not "
    "wait for workers that have left",
    "RpcTest.test_user_rref_backward": "wants backward() of an RRef without a context to be refused away from the "
    "owner; telegrad runs it on the owner",
    "RpcTest.test_wait_all_exit_early_script_function": "wants what a scripted function raised as a RuntimeError; it "
    "arrives as what it was, a torch.jit.Error",
    "TensorPipeAgentRpcTest.test_op_with_invalid_args": "asserts the text of TorchScript's operator lookup; the "
    "operator is called as in Python, and raises Python's TypeError",
    "RemoteModuleTest.test_forward_async": _SCRIPTED_MODULE,
    "RemoteModuleTest.test_forward_async_script": _SCRIPTED_MODULE,
    "RemoteModuleTest.test_forward_sync": _SCRIPTED_MODULE,
    "RemoteModuleTest.test_forward_sync_script": _SCRIPTED_MODULE,
    "RemoteModuleTest.test_remote_module_py_pickle_not_supported_script": _SCRIPTED_MODULE,
    "ThreeWorkersRemoteModuleTest.test_send_remote_module_over_the_wire_script_not_supported": _SCRIPTED_MODULE,
    "RemoteModuleTest.test_unsupported_methods": "wants methods of a module to be refused that telegrad's "
    "RemoteModule has",
    "ThreeWorkersRemoteModuleTest.test_send_remote_module_over_the_wire": "asserts the list of private attributes "
    "that travel with a RemoteModule",
}

CUDA_DIFFERENT = {
    "CudaRemoteModuleTest.test_input_moved_to_cuda_device_script": _SCRIPTED_MODULE,
}

# These wait for something that does not come here, until they are ended.
HANG = {"DistAutogradTest.test_trainer_ps_torchscript_functions"}

# torch deadlocks in these now and then, with its own RPC too: a DistributedDataParallel dies and joins the threads of
# its process group while it holds the GIL, for which such a thread waits. They get another try.
TORCH_DEADLOCKS = {f"DdpComparisonTest.{name}" for name in names_in("DdpComparisonTest")}
