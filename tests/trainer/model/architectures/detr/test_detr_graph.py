"""The deployment graph of D-FINE and RT-DETRv2: the network's detections. Its files: test_detr_life.py."""

import pytest
import torch

from trainer.export.formats import ExportedProgram


@pytest.fixture
def graph(network):
    """The graph of a narrow network, which detects something everywhere."""
    return lambda architecture: network(architecture, score_threshold=0.0).deployment_graph(128)


def assert_same(runtime, graph, images):
    for batch in (images[:1], images):
        served = [torch.from_numpy(part) for part in runtime.run(batch.numpy())]
        for ours, theirs in zip(graph.detector.predict(batch), served, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_it_is_the_network_as_a_program(graph, batch, tmp_path):
    made, images = graph("dfine"), batch([1, 1, 1]).images
    example = (torch.zeros(2, 3, 128, 128, dtype=torch.uint8),)
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    torch.export.save(torch.export.export(made, example, dynamic_shapes=shapes), tmp_path / "model.pt2")
    assert_same(ExportedProgram(tmp_path / "model.pt2"), made, images)


@pytest.mark.parametrize("architecture", ["dfine", "rtdetr"])
def test_the_graph_gives_what_the_network_predicts(architecture, graph, batch):
    made, images = graph(architecture), batch([1, 1]).images
    assert made.rows == 90 and made.image_size == 128
    with torch.no_grad():
        outputs = made(images)
    for ours, theirs in zip(made.detector.predict(images), outputs, strict=True):
        assert torch.equal(ours, theirs)
