"""What we rely on in transformers, whose minor version is pinned: other versions may change it."""

import inspect
import tomllib
from pathlib import Path

import pytest

from trainer.config import architectures

ROOT = Path(__file__).parents[4]
PARTS = {
    "dfine": ("backbone.model", "encoder_input_proj", "encoder", "decoder_input_proj", "enc_output",
              "enc_score_head", "enc_bbox_head", "denoising_class_embed", "decoder.layers.0.encoder_attn",
              "decoder.integral"),
    "rtdetr": ("backbone.model.embedder", "encoder_input_proj", "encoder", "decoder_input_proj", "enc_output",
               "enc_score_head", "enc_bbox_head", "denoising_class_embed", "decoder.bbox_embed"),
    "rfdetr": ("backbone.backbone.embeddings", "backbone.projector", "enc_output", "enc_output_norm",
               "enc_out_class_embed", "enc_out_bbox_embed", "reference_point_embed", "query_feat", "decoder"),
    "deimv2": ("conv_encoder.model", "encoder", "decoder_input_proj", "enc_score_head", "enc_bbox_head",
               "denoising_class_embed", "decoder.query_pos_head", "decoder.layers.0.self_attn"),
}  # fmt: skip
"""Modules of the networks that detectors call or replace, by architecture."""
DECODER_INPUTS = {
    "inputs_embeds", "encoder_hidden_states", "encoder_attention_mask", "reference_points", "spatial_shapes",
    "spatial_shapes_list", "level_start_index",
}  # fmt: skip


def test_the_minor_version_is_pinned_to_that_of_the_constraints():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["detr"]
    (pinned,) = (
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if "transformers==" in line
    )
    major, minor, *_ = pinned.partition("==")[2].split(".")
    assert f"transformers>={major}.{minor},<{major}.{int(minor) + 1}" in extra


@pytest.mark.parametrize("name", PARTS)
def test_networks_have_the_modules_and_the_decoders_the_inputs_that_we_use(name, network):
    detector = network(name)
    for module in PARTS[name]:
        detector.model.get_submodule(module)
    # The decoder of transformers: DEIMv2's is a subclass of it.
    decoder = type(detector.upstream(detector.library_config).model.decoder)
    inputs = set(inspect.signature(inspect.unwrap(decoder.forward)).parameters)
    assert inputs >= DECODER_INPUTS - ({"encoder_attention_mask"} if name == "rfdetr" else set())


@pytest.mark.parametrize("name", ["dfine", "deimv2"])
def test_the_attention_of_a_layer_has_a_function_that_can_be_replaced(name, network):
    layer = network(name).model.decoder.layers[0]
    assert callable(layer.encoder_attn.ms_deformable_attn_core)


def test_every_architecture_of_the_extra_is_covered():
    assert set(PARTS) == {
        name for name, entry in architectures.ARCHITECTURES.items() if entry.extra == "detr"
    }
