"""What a process, and those that it starts, use of a machine: time, GPUs, energy, bytes from and to servers.

`energy` reads the counters of processors and GPUs, `meter` goes from the begin of some work to its end, and
keeps a `record`.
"""
