"""The network profile of a job, as NCCL's and gloo's environment variables.

Source of the names: NCCL's user guide, "Environment Variables"; torch.distributed for gloo's.
"""

from components.launchers.spec import JobSpec


def environment(job: JobSpec) -> dict[str, str]:
    """Return the variables of every process: the profile's, and over them the job's own."""
    network = job.network
    found: dict[str, str] = {"NCCL_DEBUG": network.debug}
    found |= {"NCCL_SOCKET_IFNAME": network.interface, "GLOO_SOCKET_IFNAME": network.interface}
    if network.profile == "tcp":
        found["NCCL_IB_DISABLE"] = "1"
        found["NCCL_SOCKET_NTHREADS"] = str(network.socket_threads or "")
        found["NCCL_NSOCKS_PERTHREAD"] = str(network.sockets_per_thread or "")
    if network.profile == "rdma":
        found["NCCL_IB_DISABLE"] = "0"
        found["NCCL_IB_HCA"] = network.hca
        found["NCCL_IB_GID_INDEX"] = str(network.gid_index) if network.gid_index >= 0 else ""
    return {name: value for name, value in found.items() if value} | dict(job.env)
