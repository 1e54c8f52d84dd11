"""The environment variables of a training process: network and memory allocator.

Sources: NCCL's user guide; PyTorch, "CUDA semantics".
"""

from components.launchers.spec import JobSpec

ALLOCATOR = "PYTORCH_ALLOC_CONF"
ALLOCATORS = frozenset((ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"))  # The older name takes precedence.
EXPANDABLE = "expandable_segments:True"  # Prevents fragmentation of GPU memory by batches of several sizes.


def process_variables(job: JobSpec) -> dict[str, str]:
    """Return the variables for network and allocator of every process; the job's variables override them."""
    network = job.network
    named = {*job.env, *(item.name for item in job.secret_env)}
    nvidia = job.gpus > 0 and job.gpu_resource.startswith("nvidia.com/")
    allocator = EXPANDABLE if nvidia and not named & ALLOCATORS else ""
    values: dict[str, str] = {ALLOCATOR: allocator, "NCCL_DEBUG": network.debug}
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
