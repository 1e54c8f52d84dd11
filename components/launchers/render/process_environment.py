"""The environment of a job's processes: the network profile as NCCL's and gloo's variables, and memory.

Source of the names: NCCL's user guide, "Environment Variables"; torch.distributed for gloo's;
PyTorch's "CUDA semantics", "Memory management", for the allocator's.
"""

from components.launchers.spec import JobSpec

ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""PyTorch's settings of a GPU's memory."""
ALLOCATORS = frozenset((ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"))
"""That variable and the older name of it, which wins."""
EXPANDABLE = "expandable_segments:True"
"""Expandable segments: batches of several sizes else fragment the memory."""


def variables(job: JobSpec) -> dict[str, str]:
    """Return the variables of every process: the profile's, the allocator's, and over them the job's own."""
    network = job.network
    values: dict[str, str] = {ALLOCATOR: _allocator(job), "NCCL_DEBUG": network.debug}
    values |= {"NCCL_SOCKET_IFNAME": network.interface, "GLOO_SOCKET_IFNAME": network.interface}
    if network.profile == "tcp":
        values["NCCL_IB_DISABLE"] = "1"
        values["NCCL_SOCKET_NTHREADS"] = str(network.socket_threads or "")
        values["NCCL_NSOCKS_PERTHREAD"] = str(network.sockets_per_thread or "")
    if network.profile == "rdma":
        values["NCCL_IB_DISABLE"] = "0"
        values["NCCL_IB_HCA"] = network.hca
        values["NCCL_IB_GID_INDEX"] = str(network.gid_index) if network.gid_index >= 0 else ""
    return {name: value for name, value in values.items() if value} | dict(job.env)


def _allocator(job: JobSpec) -> str:
    named = {*job.env, *(item.name for item in job.secret_env)}
    nvidia = job.gpus > 0 and job.gpu_resource.startswith("nvidia.com/")
    return EXPANDABLE if nvidia and not named & ALLOCATORS else ""
