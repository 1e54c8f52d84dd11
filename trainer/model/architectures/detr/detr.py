"""D-FINE and RT-DETRv2: transformers' networks in our loop.

The weights are named as in transformers, whose modules compute everything up to the decoder's outputs. Ours
are what is between them, which there depends on the batch or on random numbers: denoising queries,
matching, what the losses are divided by; and the detections.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import DFineConfig, DFineForObjectDetection, RTDetrV2Config, RTDetrV2ForObjectDetection

from trainer.config import TrainConfig
from trainer.data.batch import PADDING
from trainer.model.architecture import Architecture, UpstreamWeights, split_by_decay
from trainer.model.architectures.detr import detr_precision, detr_sizes, detr_weights
from trainer.model.architectures.detr.denoising import Denoising, denoising
from trainer.model.architectures.detr.detr_criterion import Criterion, Outputs, Targets
from trainer.model.architectures.detr.detr_initial import draw_first_weights
from trainer.model.architectures.detr.detr_options import DetrOptions, DFineOptions, RTDetrOptions
from trainer.model.batchnorm_folding import TRANSFORMERS, fold
from trainer.model.deployment import Graph
from trainer.model.global_batch import Part
from trainer.model.postprocess import Detections

_ANCHOR = 0.05
"""Side of a query's first box on the finest level, relative to the image; twice that on the next."""
_MARGIN = 0.01
"""Places whose first box is nearer to a border than this become no query."""


class Detr(Architecture):
    """What both have in common."""

    config: DetrOptions
    needs_part = True
    upstream: Any
    """transformers' class of the whole detector."""

    def __init__(self, config: DetrOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.library_config = self.make_library_config()
        # Without the outer model, which has the heads a second time under other names.
        self.model = self.upstream(self.library_config).model
        draw_first_weights(self.model)
        detr_precision.mend(self.model, self.library_config)
        # Always: on a CPU the BatchNorm of torch 2.15 gives a batch of one that is not in NHWC order a wrong
        # gradient where the next operation is a transposition.
        self.model.to(memory_format=torch.channels_last)
        if config.frozen_stem:
            self.model.backbone.model.embedder.requires_grad_(False)
        self._criterion = Criterion(self.library_config)
        self._compiled: Callable[[Tensor], list[Tensor]] | None = None
        self._places: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def make_library_config(self) -> Any:
        """The library's configuration of this network."""

    def forward(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None = None,
        verified: Tensor | None = None, part: Part | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Losses of a batch, each the sum over the decoder's layers.

        Args:
            images: uint8 [B, 3, S, S].
            boxes: fp32 [B, M, 4], targets before padding.
            labels: int64 [B, M].
            color: fp32 [B, 3, 4] or None.
            verified: bool [B, C] or None, the classes of each image that queries learn to be absent.
            part: what the batch is of the step's global batch.
        """
        assert part is not None
        pixels = self.normalize(images, color)
        relative = (boxes / images.shape[-1]).to(pixels.dtype)
        centred = torch.cat(
            [(relative[..., :2] + relative[..., 2:]) / 2, relative[..., 2:] - relative[..., :2]], dim=-1
        )
        noise = None
        if self.config.denoising:
            noise = denoising(
                centred, labels, part.counts, part.keys, self.num_classes, max(1, part.most),
                queries=self.config.denoising, label_noise=self.library_config.label_noise_ratio,
                box_noise=self.library_config.box_noise_scale,
            )  # fmt: skip
        outputs = self.outputs(pixels, noise)
        with torch.autocast(images.device.type, enabled=False):
            exact = outputs.exact()
            mean = part.mean.to(images.device, exact.logits.dtype)
            targets = Targets(centred, labels, part.counts, mean, part.images, verified)
            losses = self._criterion(exact, targets, noise)
        return {name: losses[name] for name in self.loss_names}

    @torch.no_grad()
    def predict(self, images: Tensor) -> Detections:
        """Detections in uint8 images [B, 3, S, S]."""
        outputs = self.outputs(self.normalize(images), None)
        return best_pairs(
            outputs.logits[:, -1].float(), outputs.boxes[:, -1].float(), images.shape[-1], self.config
        )

    def normalize(self, images: Tensor, color: Tensor | None = None) -> Tensor:
        """Network input 0..1 from uint8 images, in the precision of the weights and in NHWC order."""
        weight = next(self.model.backbone.parameters())
        values = images.to(torch.promote_types(weight.dtype, torch.float32)) / 255
        if color is not None:
            with torch.autocast(images.device.type, enabled=False):
                mapped = color[:, :, :3].to(values.dtype) @ values.flatten(2) + color[:, :, 3:]
            values = mapped.clamp_(0, 1).view_as(values)
        return values.contiguous(memory_format=torch.channels_last)

    def features(self, pixels: Tensor) -> list[Tensor]:
        """Levels of the encoder for images [B, 3, S, S] in 0..1, each [B, C, h, w]."""
        levels = [
            project(level)
            for project, level in zip(self.model.encoder_input_proj, self._backbone(pixels), strict=True)
        ]
        encoded = self.model.encoder(inputs_embeds=levels).last_hidden_state
        return [project(level) for project, level in zip(self.model.decoder_input_proj, encoded, strict=True)]

    def outputs(self, pixels: Tensor, noise: Denoising | None) -> Outputs:
        """What the decoder says of images [B, 3, S, S] in 0..1, in evaluation the last layer alone."""
        levels = self.features(pixels)
        memory = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], dim=1)
        shapes = [(level.shape[-2], level.shape[-1]) for level in levels]
        logits, first, content = self._queries(memory, shapes)
        references, mask = first.detach(), None
        if noise:
            content = torch.cat(
                [self.model.denoising_class_embed(noise.labels).to(content.dtype), content], 1
            )
            references = torch.cat([noise.references.to(references.dtype), references], dim=1)
            mask = noise.visible(first.shape[1])
        decoded = self.model.decoder(
            inputs_embeds=content,
            encoder_hidden_states=memory,
            encoder_attention_mask=mask,
            reference_points=references,
            # Python's integers: what the layers compare must neither wait for the device nor be exported.
            spatial_shapes=np.array(shapes, dtype=object),
            spatial_shapes_list=shapes,
            level_start_index=None,
        )
        return Outputs(
            logits=decoded.intermediate_logits,
            boxes=decoded.intermediate_reference_points,
            corners=getattr(decoded, "intermediate_predicted_corners", None),
            references=getattr(decoded, "initial_reference_points", None),
            encoder_logits=logits,
            encoder_boxes=first.sigmoid(),
        )

    def _queries(self, memory: Tensor, shapes: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """The places that become queries: logits [B, Q, C], boxes as logits [B, Q, 4], content [B, Q, D]."""
        anchors, valid = self._anchors(shapes, memory)
        encoded = self.model.enc_output(valid * memory)
        logits = self.model.enc_score_head(encoded)
        boxes = self.model.enc_bbox_head(encoded) + anchors
        count = min(self.config.queries, memory.shape[1])
        place = logits.amax(dim=-1).topk(count, dim=1).indices[:, :, None]
        chosen = [part.gather(1, place.expand(-1, -1, part.shape[-1])) for part in (logits, boxes, encoded)]
        return chosen[0], chosen[1], chosen[2].detach()

    def _anchors(self, shapes: list[tuple[int, int]], memory: Tensor) -> tuple[Tensor, Tensor]:
        """First boxes as logits [1, N, 4], in fp32 or more, and which places are valid [1, N, 1]."""
        exact = torch.promote_types(memory.dtype, torch.float32)
        key = (*shapes, memory.device, exact, memory.dtype)
        if key not in self._places:
            with torch.inference_mode(False):
                boxes = torch.cat(
                    [_first_boxes(*shape, level, exact, memory.device) for level, shape in enumerate(shapes)]
                )
                valid = ((boxes > _MARGIN) & (boxes < 1 - _MARGIN)).all(dim=-1, keepdim=True)
                logits = torch.where(valid, torch.log(boxes / (1 - boxes)), torch.finfo(exact).max)
                self._places[key] = logits[None], valid[None].to(memory.dtype)
        return self._places[key]

    def _backbone(self, pixels: Tensor) -> list[Tensor]:
        if self._compiled and self.training:
            return self._compiled(pixels)
        return list(self.model.backbone.model(pixels).feature_maps)

    def compile_network(self, mode: str) -> bool:
        """Compile the backbone: the encoder asks for values, the number of queries changes with a batch."""

        def backbone(pixels: Tensor) -> list[Tensor]:
            return list(self.model.backbone.model(pixels).feature_maps)

        compiled = torch.compile(backbone, mode=mode, dynamic=False)

        def run(pixels: Tensor) -> list[Tensor]:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(pixels)

        self._compiled = run
        return True

    def parameter_groups(self, config: TrainConfig) -> list[dict[str, Any]]:
        """The backbone's, with a learning rate of their own, and the rest."""
        backbone = dict(self.model.backbone.named_parameters(prefix="backbone"))
        rest = [value for name, value in self.model.named_parameters() if name not in backbone]
        return [
            *split_by_decay(rest, config.weight_decay),
            *split_by_decay(backbone.values(), config.weight_decay, lr_scale=self.config.backbone_lr),
        ]

    def deployment_graph(self, image_size: int) -> Graph:
        """The graph without suppression: there is none."""
        return DetrGraph(self, image_size)

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load a detector or a backbone as transformers writes it; see `Architecture`."""
        return detr_weights.load(self.model, self.upstream, self.library_config, state, source, self.title)

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights and configuration as transformers' `save_pretrained` writes them."""
        return detr_weights.folder(self.model, self.upstream, self.library_config, names)

    def folded(self) -> Self:
        """Its batch normalisation is in the convolutions; see `batchnorm_folding.fold`."""
        fold(self.model, TRANSFORMERS)
        return self

    @property
    def thresholds(self) -> dict[str, float]:
        """What decides on detections."""
        config = self.config
        return {"score": config.score_threshold, "detections_per_image": config.detections_per_image}


class DFine(Detr):
    """D-FINE (Peng et al. 2024)."""

    config: DFineOptions
    loss_names = ("vfl", "bbox", "giou", "fgl", "ddf")
    upstream = DFineForObjectDetection

    def make_library_config(self) -> DFineConfig:
        """The library's configuration of this size."""
        sizes = detr_sizes.dfine(self.config.size, self.config.width)
        return DFineConfig(**sizes, **_common(self.config, self.num_classes))

    @property
    def title(self) -> str:
        """D-FINE and its size."""
        return f"D-FINE-{self.config.size.upper()}{_narrow(self.config)}"


class RTDetr(Detr):
    """RT-DETRv2 (Lv et al. 2024)."""

    config: RTDetrOptions
    loss_names = ("vfl", "bbox", "giou")
    upstream = RTDetrV2ForObjectDetection

    def make_library_config(self) -> RTDetrV2Config:
        """The library's configuration of this size."""
        sizes = detr_sizes.rtdetr(self.config.size, self.config.width)
        return RTDetrV2Config(**sizes, **_common(self.config, self.num_classes))

    @property
    def title(self) -> str:
        """RT-DETRv2 and its backbone."""
        return f"RT-DETRv2 on ResNet{self.config.size[1:]}-vd{_narrow(self.config)}"


class DetrGraph(Graph):
    """uint8 [B, 3, S, S] in, the best pairs of query and class out, as `predict` gives them."""

    def __init__(self, detector: Detr, image_size: int) -> None:
        super().__init__()
        self.detector, self.image_size = detector.eval(), image_size
        with torch.no_grad():
            blank = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8)
            # It also builds the constants of this size, which no exporter can trace.
            self.rows = detector.predict(blank).scores.shape[1]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Detections of a batch of uint8 squares; see `Served`."""
        outputs = self.detector.outputs(self.detector.normalize(images), None)
        best = best_pairs(outputs.logits[:, -1], outputs.boxes[:, -1], self.image_size, self.detector.config)
        return best.boxes, best.scores, best.labels, best.num


def best_pairs(logits: Tensor, boxes: Tensor, image_size: int, config: DetrOptions) -> Detections:
    """The best pairs of query and class.

    Args:
        logits: [B, Q, C].
        boxes: [B, Q, 4] centre and size, relative to the image.
        image_size: side of the square, pixels.
        config: threshold and number of detections.
    """
    classes = logits.shape[-1]
    flat = logits.flatten(1)
    best, pair = flat.topk(min(config.detections_per_image, flat.shape[1]), dim=1)
    scores = best.sigmoid()
    query = torch.div(pair, classes, rounding_mode="floor")
    half = boxes[..., 2:] / 2
    corners = torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], dim=-1).clamp(0, 1) * image_size
    real = scores > config.score_threshold
    return Detections(
        boxes=corners.gather(1, query[:, :, None].expand(-1, -1, 4)) * real[:, :, None],
        scores=scores * real,
        labels=torch.where(real, pair % classes, PADDING),
        num=real.sum(dim=1),
    )


def _common(config: DetrOptions, num_classes: int) -> dict[str, Any]:
    return {
        "num_labels": num_classes,
        "num_queries": config.queries,
        "num_denoising": config.denoising,
        "freeze_backbone_batch_norms": config.frozen_norm,
    }


def _narrow(config: DetrOptions) -> str:
    return f", {config.width:g} times as wide" if config.width != 1 else ""


def _first_boxes(height: int, width: int, level: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Centre and size of the first box at each place of a level, [h * w, 4]."""
    rows = (torch.arange(height, dtype=dtype, device=device) + 0.5) / height
    columns = (torch.arange(width, dtype=dtype, device=device) + 0.5) / width
    centres = torch.cartesian_prod(rows, columns).flip(1)
    return torch.cat([centres, torch.full_like(centres, _ANCHOR * 2**level)], dim=1)
