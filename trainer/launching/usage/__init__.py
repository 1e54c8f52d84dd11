"""What a process and its children use: time, GPUs, and bytes from and to servers.

`meter` measures some work from start to end and keeps a `record`.
"""
