"""The private names of torch that Unisono uses, and what happens where one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PRIVATE_NAMES: Final = (
    "torch._C._distributed_c10d.Work",
    "torch._C._distributed_c10d.FakeProcessGroup",
    "torch._C._distributed_c10d.FakeProcessGroup.Options",
    "torch._C._distributed_c10d.FakeProcessGroup.Options.error_on_collective",
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal",
    "torch._C._distributed_c10d.ProcessGroup._register_backend",
    "torch._C._distributed_c10d.ProcessGroup._set_default_backend",
    "torch._C._distributed_c10d.ProcessGroup._set_group_name",
    "torch._C._distributed_c10d.ProcessGroup._set_group_desc",
    "torch._C._distributed_c10d.ProcessGroup._get_backend",
    "torch._C._distributed_c10d.ProcessGroup._device_types",
    "torch._C._distributed_c10d.ProcessGroup.BackendType.UNDEFINED",
    # Methods that torch calls on this backend by these names, and older names for code written
    # before 2.13.
    "torch._C._distributed_c10d.ProcessGroup._start_coalescing",
    "torch._C._distributed_c10d.ProcessGroup._end_coalescing",
    "torch._C._distributed_c10d.ProcessGroup._get_backend_name",
    "torch._C._distributed_c10d.ProcessGroup._set_sequence_number_for_group",
    "torch._C._distributed_c10d.ProcessGroup._get_sequence_number_for_group",
    "torch._C._distributed_c10d.ProcessGroup._allgather_base",
    "torch._C._distributed_c10d.ProcessGroup._reduce_scatter_base",
    "torch._C._distributed_c10d.ProcessGroupGloo._set_default_timeout",
    "torch._C._distributed_c10d.Work._source_rank",
    "torch._C._autograd._profiler_enabled",
    "torch.autograd.Variable._execution_engine",
    "torch._C._distributed_c10d._get_comm_profiling_name",
    "torch._C._profiler._RecordFunctionFast",
    "torch.autograd.profiler.profile._parse_kineto_results",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data",
    "torch._C._profiler.gather_traceback",
    "torch._C._profiler.symbolize_tracebacks",
    "torch.distributed.distributed_c10d._cleanup_process_group_global_state",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._register_pg_in_world",
    "torch.distributed.distributed_c10d._update_default_pg",
    "torch.distributed.distributed_c10d._register_process_group",
    "torch.distributed.distributed_c10d._unregister_process_group",
    "torch.distributed.distributed_c10d._world.pg_group_ranks",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.distributed_c10d._world.pg_names",
    "torch.distributed.distributed_c10d._world.pg_to_tag",
    "torch.distributed.distributed_c10d._world.tags_to_pg",
    "torch.distributed.distributed_c10d._world.pg_backend_config",
    "torch.distributed.distributed_c10d.BackendConfig",
    "torch._C._distributed_c10d.ProcessGroupGloo._Options._timeout",
    "torch._C._distributed_c10d.ProcessGroupGloo._Options.group_name",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch.Tensor._is_view",
    "torch.UntypedStorage._cdata",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._version",
    "torch.nn.utils.parametrizations._SpectralNorm",
    "torch.utils._pytree.tree_map_only",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._record_post_forward",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache",
    "torch._C._current_graph_task_id",
    "torch.ops.aten._assert_tensor_metadata",
    "torch._C._storage_Use_Count",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_unflatten",
    # The base of torch's pipeline stages, and the names that `unisono.parallel` overrides or calls.
    "torch.distributed.pipelining.stage._PipelineStageBase",
    "torch.distributed.pipelining.stage._PipelineStageBase._create_grad_recv_info",
    "torch.distributed.pipelining.stage._PipelineStageBase._get_init_p2p_neighbors_ops",
    "torch.distributed.pipelining.stage._PipelineStageBase._prepare_backward_infra",
    "torch.distributed.pipelining.stage._PipelineStageBase._prepare_forward_infra",
)


WHERE_MISSING: Final[Mapping[str, str]] = {
    "torch._C._distributed_c10d.FakeProcessGroup.Options.error_on_collective": "torch 2.9: torch "
    "finds no backend for the CPU",
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal": "torch 2.9: the constructor",
    "torch._C._distributed_c10d._get_comm_profiling_name": "before 2.13: calls have no own names",
    "torch._C._distributed_c10d.ProcessGroup._set_sequence_number_for_group": "2.15: torch does "
    "not call it",
    "torch.distributed.distributed_c10d._cleanup_process_group_global_state": "torch 2.9: "
    "`group_tables.py` removes a group from torch's tables",
    "torch.distributed.distributed_c10d._register_pg_in_world": "before 2.13: "
    "`group_tables.py` adds a group to torch's tables",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "torch 2.9: meshes are not "
    "forgotten, so DTensors of an equal, later mesh may raise that its group was destroyed",
    "torch.autograd.profiler.profile._parse_kineto_results": "the stand-in for Gloo: its spans are "
    "not asynchronous in a profile",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": "the stand-in for Gloo: "
    "nothing asks for these data",
    "torch.distributed.pipelining.stage._PipelineStageBase._get_init_p2p_neighbors_ops": "2.15: "
    "torch does not call it",
}
"""What happens, by private name, on the versions of torch that lack the name. All other names
exist from torch 2.9 on."""
