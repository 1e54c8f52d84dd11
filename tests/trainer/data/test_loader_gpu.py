"""How batches get to a GPU: beside its computation, and whole."""

import pytest
import torch

from trainer.data import batch as batches
from trainer.data.batch import Batch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_whole_on_a_gpu_that_is_busy():
    """They come while it computes, and their memory is not used again before it has read them."""
    device = torch.device("cuda", 0)

    def send(number):
        parts = torch.empty(4, 3, 512, 512, dtype=torch.uint8), torch.empty(4, 9, 4), torch.empty(4, 9).long()
        pinned = [part.fill_(number).pin_memory() for part in parts]
        torch.cuda._sleep(50_000_000)
        copied = Batch(*pinned, None, [], [], []).to(device)
        return [(part == number).all() for part in copied[:3]]

    right = [each for number in range(30) for each in send(number)]
    assert torch.stack(right).all()
    # From here on all memory is at hand; to get some could wait for the GPU.
    send(0)
    batches._copy_stream(device).synchronize()
    assert not torch.cuda.current_stream(device).query(), "the copy waited for the computation"
