"""The private names of torch that telegrad stands on, one line for each.

No other file outside of compat/ says `torch._x`. tests/test_torch_facts.py has a test for each line, so that a new
torch that changes one of them shows there first.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Any, cast

import torch
from torch._C._autograd import DeviceType as DeviceType
from torch._C._dynamo import eval_frame as eval_frame
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

_C = cast(Any, torch._C)

# futures
BaseFuture = torch._C.Future

# the engine and its nodes
Variable = cast(Any, torch.autograd.Variable)
ImperativeEngine = _C._ImperativeEngine
run_backward = Variable._execution_engine.run_backward
current_graph_task_id = _C._current_graph_task_id
will_engine_execute = _C._will_engine_execute_node
COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"  # the module's name: it is not imported for us
set_grad_enabled = _C._set_grad_enabled  # the class of that name is Python code
stash_in_tls = _C._stash_obj_in_tls
is_in_tls = _C._is_key_in_tls
push_saved_tensors_hooks = _C._autograd._push_saved_tensors_default_hooks  # the class for it is Python code
pop_saved_tensors_hooks = _C._autograd._pop_saved_tensors_default_hooks
are_saved_tensors_hooks_enabled = _C._autograd._saved_tensors_hooks_is_enabled
bind_apply = _C._FunctionBase.__dict__["apply"].__get__
is_batched = _C._functorch.is_batchedtensor
is_batched_by_autograd = _C._functorch.is_legacy_batchedtensor
is_wrapped_by_transform = _C._functorch.is_functorch_wrapped_tensor
is_functional = cast(Any, torch)._is_functional_tensor
transform_level = _C._functorch.maybe_get_level
transforms = _C._functorch.get_interpreter_stack
dual_level = partial(getattr, torch.autograd.forward_ad, "_current_level")
is_any_autocast_enabled = _C._is_any_autocast_enabled
len_torch_function_stack = _C._len_torch_function_stack
len_torch_dispatch_stack = _C._len_torch_dispatch_stack

# tensors
DisableTorchFunctionSubclass = _C.DisableTorchFunctionSubclass
disabled_torch_dispatch = _C._disabled_torch_dispatch_impl
WeakTensorRef = _C._WeakTensorRef
get_object_state = cast(Any, torch)._utils._get_obj_state
set_object_state = cast(Any, torch)._utils._set_obj_state
neg_view = torch._neg_view
group_by_kind = _C._group_tensors_by_device_and_dtype
unscale_together = torch._amp_foreach_non_finite_check_and_unscale_
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_clamp_max_ = torch._foreach_clamp_max_
set_neg = _C._set_neg
set_conj = _C._set_conj
make_per_tensor_quantized = torch._make_per_tensor_quantized_tensor
make_per_channel_quantized = torch._make_per_channel_quantized_tensor


# modules, operators, TorchScript
parse_to = _C._nn._parse_to
DistributedDataParallel = cast(Any, torch.nn.parallel.DistributedDataParallel)
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
ConcreteModuleType = _C.ConcreteModuleType
wrap_cpp_module = cast(Any, torch.jit)._recursive.wrap_cpp_module
find_builtin = cast(Any, torch.jit)._builtins._find_builtin
qualified_name = cast(Any, torch)._jit_internal._qualified_name
extract_tensors = cast(Any, torch)._jit_internal._extract_tensors  # by which futures with devices find tensors

# profilers
ExperimentalConfig = _C._profiler._ExperimentalConfig
profiler_enabled = _C._autograd._profiler_enabled
enable_legacy_profiler = _C._autograd._enable_profiler_legacy
disable_legacy_profiler = _C._autograd._disable_profiler_legacy
prepare_newer_profile = torch.autograd.profiler.profile._prepare_trace
start_newer_profile = torch.autograd.profiler.profile._start_trace
is_newer_profiler_on = partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")
parse_legacy_records = cast(Any, torch.autograd.profiler_legacy)._parse_legacy_records

# stores: their least severity of messages on stderr that is shown (0 info, 1 warnings, 2 errors), of the whole process
try:
    c10 = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    cpp_log_level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
except (OSError, ValueError):  # a torch whose libraries lie elsewhere, or that has logs of another kind
    c10 = cpp_log_level = None  # type: ignore[assignment]

# devices; a torch without CUDA has not got them
cuda_device: Any = getattr(_C, "_cuda_getDevice", None)
cuda_raw_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)
