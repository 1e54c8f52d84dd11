"""How batches get to a GPU: beside its computation, and whole."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.data import batch as batches
from trainer.data.batch import Batch


class Queued(TorchDispatchMode):
    """Notes what is queued on which stream of a GPU that is not there."""

    def __init__(self):
        super().__init__()
        self.found, self.present = [], "computing"

    def stream(self, name, number):
        queued = self

        class Pretended(torch.Stream):
            def wait_stream(self, other):
                queued.found.append((name, "waits for", other.name))

        stream = Pretended(stream_id=number, device_index=0, device_type=1)
        stream.name = name
        return stream

    @contextlib.contextmanager
    def on(self, stream):
        self.present = stream.name
        yield
        self.present = "computing"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.record_stream.default:
            self.found.append(("computing" if args[1].stream_id == 1 else "copying", "keeps", id(args[0])))
            return None
        result = func(*args, **(kwargs or {}))
        self.found.append((self.present, str(func), id(result)))
        return result


@pytest.mark.parametrize("color", [None, torch.zeros(2, 3, 4)])
def test_a_batch_is_copied_beside_the_computation_which_waits_for_it(monkeypatch, color):
    """All parts by the copying stream; the computing one waits, and their memory is kept for it."""
    queued = Queued()
    computing, copying = queued.stream("computing", 1), queued.stream("copying", 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", queued.on)
    monkeypatch.setattr(batches, "_copy_stream", lambda device: copying)
    pixels = torch.zeros(2, 8, 8, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    batch = Batch(pixels, torch.zeros(2, 1, 4), torch.zeros(2, 1).long(), color, [1, 2], [1.0, 1.0], [1, 1])
    with FakeTensorMode(allow_non_fake_inputs=True), queued:
        copied = batch.to(torch.device("cuda", 0))
    parts = [part for part in copied[:4] if part is not None]
    assert all(part.device.type == "cuda" for part in parts) and copied[4:] == batch[4:]
    assert copied.images.is_contiguous(memory_format=torch.channels_last)
    copies = [("copying", "aten._to_copy.default", id(part)) for part in parts]
    assert [each for each in queued.found if each[1].startswith("aten")] == copies
    assert {("computing", "keeps", id(part)) for part in parts} < set(queued.found)
    assert queued.found[-1] == ("computing", "waits for", "copying")


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
