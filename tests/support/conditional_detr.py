"""Conditional DETR by transformers, added through the protocol of docs/detectors.md alone."""

from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from transformers import ConditionalDetrConfig, ConditionalDetrForObjectDetection

from trainer.config.schema import ModelConfig
from trainer.config.types import STRICT, Positive
from trainer.data.batch import PADDING
from trainer.model.architecture import (
    RAW_OUTPUTS,
    Architecture,
    Detections,
    Graph,
    UpstreamWeights,
    apply_color,
)
from trainer.model.boxes import to_center, to_corners
from trainer.model.weights import load_tensors

_WEIGHTS = {"loss_ce": 2.0, "loss_bbox": 5.0, "loss_giou": 2.0}
_HEADS = ("whole.class_labels_classifier.",)


@dataclass(config=STRICT, frozen=True)
class ConditionalOptions(ModelConfig):
    stride: ClassVar[int] = 32
    library: ClassVar[str] = "transformers"

    architecture: Literal["conditional"] = "conditional"
    queries: Positive = 300
    """Queries of an image."""
    width: Positive = 256
    """Channels of the transformer."""
    layers: Positive = 6
    """Layers of encoder and decoder; each of the decoder's has its own losses."""

    def options_from_weights(self, described, shapes):
        found = shapes.get("model.query_position_embeddings.weight", ())
        sizes = dict(zip(("queries", "width"), found, strict=False))
        return sizes | ({"layers": described["decoder_layers"]} if "decoder_layers" in described else {})

    def arguments(self):
        backbone = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32],
                    "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage4"]}  # fmt: skip
        return {
            "backbone_config": backbone,
            "num_queries": self.queries,
            "d_model": self.width,
            "dropout": 0.0,
            "encoder_layers": self.layers,
            "decoder_layers": self.layers,
            "encoder_ffn_dim": 2 * self.width,
            "decoder_ffn_dim": 2 * self.width,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "auxiliary_loss": True,
        }


class Conditional(Architecture):
    """Conditional DETR (Meng et al. 2021)."""

    title = "Conditional DETR"

    def __init__(self, config, num_classes):
        super().__init__(config, num_classes)
        self.whole = ConditionalDetrForObjectDetection(
            ConditionalDetrConfig(**config.arguments(), num_labels=num_classes)
        )
        torch.nn.init.constant_(self.whole.class_labels_classifier.bias, -4.6)
        of_layers = (f"{name}_{layer}" for layer in range(config.layers - 1) for name in _WEIGHTS)
        self.loss_names = (*_WEIGHTS, *of_layers)

    def outputs(self, images, color=None, labels=None):
        pixels = apply_color(images.float() / 255, color, 1) * 4 - 2
        return self.whole(pixels, labels=labels)

    def forward(self, images, boxes, labels, color=None):
        targets = [
            {"class_labels": label[label != PADDING], "boxes": to_center(box[label != PADDING])}
            for label, box in zip(labels, boxes / images.shape[-1], strict=True)
        ]
        found = self.outputs(images, color, targets).loss_dict
        return {name: found[name] * _WEIGHTS["_".join(name.split("_")[:2])] for name in self.loss_names}

    @torch.no_grad()
    def predict(self, images):
        return Detections(*ConditionalGraph(self, images.shape[-1])(images))

    def deployment_graph(self, image_size):
        return ConditionalGraph(self, image_size)

    def raw_graph(self, image_size):
        return RawConditionalGraph(self, image_size)

    def load_upstream(self, state, source):
        named = {f"whole.{name}": value for name, value in state.items()}
        return load_tensors(self, named, source, _HEADS, body="whole.model.backbone.")

    def upstream_weights(self, names):
        files = {"config.json": self.whole.config.to_json_string().encode()}
        return UpstreamWeights(self.whole.state_dict(), self.num_classes, files)


class ConditionalGraph(Graph):
    def __init__(self, detector, image_size):
        super().__init__()
        self.detector, self.image_size = detector, image_size
        self.rows = min(detector.config.detections_per_image, detector.config.queries)

    def forward(self, images):
        boxes, scores = RawConditionalGraph.forward(self, images)
        scores, labels = scores.max(dim=2)
        scores, best = scores.topk(self.rows, dim=1)
        real = scores > self.detector.config.score_threshold
        boxes = boxes.gather(1, best[:, :, None].expand(-1, -1, 4)) * real[:, :, None]
        return boxes, scores * real, torch.where(real, labels.gather(1, best), PADDING), real.sum(dim=1)


class RawConditionalGraph(ConditionalGraph):
    names = RAW_OUTPUTS

    def forward(self, images):
        found = self.detector.outputs(images)
        return to_corners(found.pred_boxes).clamp(0, 1) * self.image_size, found.logits.sigmoid()
