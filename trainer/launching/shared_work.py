"""Distributes work over torchrun's processes: each takes the next part from a counter in torchrun's store.

Finished parts are files, so a restarted job only repeats unfinished parts. Outside torchrun, one process does
all parts without PyTorch.
"""

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
_TIMEOUT = datetime.timedelta(days=1)
"""Maximum wait for another process, which may list a large source; losing a process ends the wait."""


class SharedWork:
    """One process's view of the shared work."""

    def __init__(self, rank: int = 0, size: int = 1, store: "Store | None" = None) -> None:
        self.rank, self.size, self._store = rank, size, store

    def take_parts(self, name: str, count: int) -> Iterator[int]:
        """Yield the numbers below `count` of parts that no other process has taken from the named work."""
        if self._store is None:
            yield from range(count)
            return
        while (part := self._store.add(name, 1) - 1) < count:
            yield part

    def run_on_first(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 after a barrier, and return its result in all processes."""
        if self._store is None:
            return function()
        import torch.distributed as dist

        dist.barrier()
        results = [function() if self.rank == 0 else None]
        dist.broadcast_object_list(results)
        return cast(T, results[0])


@contextmanager
def join_shared_work() -> Iterator[SharedWork]:
    """Join torchrun's processes to share their work; no GPU is needed."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SharedWork()
        return
    import torch.distributed as dist

    from trainer.launching.distributed import init_process_group

    store = init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield SharedWork(dist.get_rank(), dist.get_world_size(), dist.PrefixStore("parts", store))
    finally:
        dist.destroy_process_group()  # No barrier: after an error the other processes may be gone.
