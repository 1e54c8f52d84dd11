"""The base class of all DETRs, which combines transformers' networks with the authors' losses.

It selects the queries, adds denoising queries and decodes the detections.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as library_logging

from trainer.base.temporary_folders import temporary_folder
from trainer.config.schema import TrainConfig
from trainer.data.batch import PADDING
from trainer.model.architecture import (
    MEAN,
    RAW_OUTPUTS,
    STD,
    Architecture,
    Detections,
    Graph,
    ParameterGroups,
    UpstreamWeights,
    apply_color,
)
from trainer.model.batchnorm_folding import TRANSFORMERS_PAIRS, cast_weights_together, fold
from trainer.model.boxes import to_center, to_corners
from trainer.model.detr.criterion import Criterion, Outputs, Targets, at_least_fp32
from trainer.model.detr.denoising import DenoisingQueries, make_denoising_queries
from trainer.model.detr.modules import (
    ExportableMaxPool,
    find_autocast_layers,
    replace_modules,
    to_python_ints,
)
from trainer.model.detr.options import DetrOptions
from trainer.model.detr.tensor_names import TensorRules, rename_tensors
from trainer.model.fused_functions import compile_for_steps
from trainer.model.global_batch import BatchContext
from trainer.model.weights import load_tensors

# The library's messages and progress bars duplicate ours.
library_logging.set_verbosity_error()
library_logging.disable_progress_bar()

_LABEL_NOISE, _BOX_NOISE = 0.5, 1.0
"""Noise of denoising queries; see `make_denoising_queries`."""
_ROW_MULTIPLE = 16  # the number of target rows in training is a multiple of this
_FINEST_ANCHOR_SIDE = 0.05
"""Side of initial boxes on the finest level, relative to the image; it doubles with each level."""
_MARGIN = 0.01  # locations whose initial box is closer to a border than this do not become queries


class Detr(Architecture):
    """A detector that predicts a set of boxes with a network of transformers."""

    config: Any  # DetrOptions of the architecture
    model: Any  # transformers' network without its outer class
    needs_batch_context = True
    upstream: ClassVar[type[PreTrainedModel]]  # transformers' class of the whole detector
    label: ClassVar[str]  # human-readable name, without the size
    tensor_rules: TensorRules  # rules to rename the authors' tensors to those of this network
    reorders_corners: ClassVar[bool] = False  # `unfold` of `make_denoising_queries`
    checking_layers: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Classes of layers that check for non-finite values; see `train`."""
    normalizes_pixels: bool = False
    """Whether pixels are normalized with ImageNet's mean and standard deviation."""
    pixel_mean: Tensor
    pixel_deviation: Tensor
    class_head_prefixes: ClassVar[tuple[str, ...]] = (
        "model.enc_score_head.",
        "model.decoder.class_embed.",
        "model.denoising_class_embed.",
    )
    """Prefixes of the tensors that depend on the classes."""

    def __init__(self, config: DetrOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        library: Any = self.upstream
        self.library_config = library.config_class(**config.arguments(), num_labels=num_classes)
        self.denoising = getattr(config, "denoising", 0)
        self.build_network(library(self.library_config))
        if self.normalizes_pixels:
            self.register_buffer("pixel_mean", torch.tensor(MEAN).view(3, 1, 1), persistent=False)
            self.register_buffer("pixel_deviation", torch.tensor(STD).view(3, 1, 1), persistent=False)
        # Also on CPUs, where BatchNorm of torch 2.15 computes a wrong gradient for a single image that is not
        # in NHWC order if a transposition follows.
        self.model.to(memory_format=torch.channels_last)
        self._criterion = self.make_criterion()
        self.loss_names = self._criterion.loss_names
        self._compiled: Callable[[Tensor], list[Tensor]] | None = None
        self._cast_layers = find_autocast_layers(self.model)
        self._anchors_of: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def build_network(self, whole: Any) -> None:
        """Set `model` to the network in the library's detector `whole`, and initialize its weights."""

    @property
    def backbone(self) -> Any:
        """The module whose weights may come from a classifier."""
        return self.model.backbone

    @abstractmethod
    def make_criterion(self) -> Criterion:
        """Return the losses that `forward` computes."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules."""
        super().train(mode)
        # In training mode these layers check for non-finite values, which makes the CPU wait; the training
        # step checks for them as well. Nothing else depends on the mode, because the layers have no dropout.
        for module in self.model.modules():
            if isinstance(module, self.checking_layers):
                module.eval()
        return self

    def forward(
        self,
        images: Tensor,
        boxes: Tensor,
        labels: Tensor,
        color: Tensor | None = None,
        context: BatchContext | None = None,
    ) -> dict[str, Tensor]:
        """Return the losses of a batch, summed over all sets of predictions; see `Architecture.forward`."""
        assert context is not None
        outputs, targets, noise = self._predict_for_targets(images, boxes, labels, color, context)
        with torch.autocast(images.device.type, enabled=False):
            losses = self._criterion(outputs, targets, noise, context)
        # Convert to means over these images, which the step weights by their share of the global batch.
        return {name: losses[name].sum() * context.image_count / len(images) for name in self.loss_names}

    def match_targets(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None, context: BatchContext
    ) -> tuple[Any, Tensor]:
        """Return a function that returns the batch's matches, and the number of pairs that train boxes."""
        outputs, targets, _ = self._predict_for_targets(images, boxes, labels, color, context)
        with torch.autocast(images.device.type, enabled=False):
            wait_for_matches = self._criterion.start_matching(outputs, targets, context.counts)
        return wait_for_matches, outputs.logits.new_full((), wait_for_matches().pairs)

    def _predict_for_targets(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None, context: BatchContext
    ) -> tuple[Outputs, Targets, DenoisingQueries | None]:
        """Return the outputs for a batch in at least fp32, its targets and its denoising queries."""
        pixels = self.normalize(images, color)
        centered = to_center((boxes / images.shape[-1]).to(pixels.dtype))
        # Pad to a small number of shapes, and to the same shape in all processes.
        extra = -(-max(1, context.max_targets) // _ROW_MULTIPLE) * _ROW_MULTIPLE - labels.shape[1]
        centered, labels = F.pad(centered, (0, 0, 0, extra)), F.pad(labels, (0, extra), value=PADDING)
        noise = None
        if self.denoising:
            noise = make_denoising_queries(
                centered,
                labels,
                context.keys,
                self.num_classes,
                context.max_targets,
                queries=self.denoising,
                label_noise=_LABEL_NOISE,
                box_noise=_BOX_NOISE,
                unfold=self.reorders_corners,
            )
        with cast_weights_together(self._cast_layers, images.device):
            outputs = self.outputs(pixels, noise)
        return outputs.to_full_precision(), Targets(centered, labels), noise

    @torch.no_grad()
    def predict(self, images: Tensor) -> Detections:
        return select_detections(*self.final_outputs(images), images.shape[-1], self.config)

    def final_outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, Q, C] and boxes [B, Q, 4] of the last layer, in at least fp32."""
        outputs = self.outputs(self.normalize(images), None)
        return at_least_fp32(outputs.logits[:, -1]), at_least_fp32(outputs.boxes[:, -1])

    def normalize(self, images: Tensor, color: Tensor | None = None) -> Tensor:
        """Convert uint8 images to network input, in the precision of the weights and in NHWC order."""
        weight = next(self.backbone.parameters())
        values = images.to(torch.promote_types(weight.dtype, torch.float32)) / 255
        values = apply_color(values, color, 1)
        if self.normalizes_pixels:
            values = (values - self.pixel_mean) / self.pixel_deviation
        return values.contiguous(memory_format=torch.channels_last)

    def features(self, pixels: Tensor) -> list[Tensor]:
        """Return the encoder's levels [B, C, h, w] for images [B, 3, S, S] in 0..1."""
        pairs = zip(self.model.encoder_input_proj, self.backbone_levels(pixels), strict=True)
        levels = [project(level) for project, level in pairs]
        encoded = self.model.encoder(inputs_embeds=levels).last_hidden_state
        return [project(level) for project, level in zip(self.model.decoder_input_proj, encoded, strict=True)]

    def outputs(self, pixels: Tensor, noise: DenoisingQueries | None) -> Outputs:
        """Return the decoder's outputs for images [B, 3, S, S] in 0..1."""
        levels = self.features(pixels)
        memory = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], dim=1)
        shapes = [(level.shape[-2], level.shape[-1]) for level in levels]
        anchors, valid = self._anchors(shapes, memory)
        masked = valid * memory
        # Locations that do not become queries receive no gradient.
        scores = self.model.enc_score_head(self.model.enc_output(masked)).amax(dim=-1)
        location = scores.topk(min(self.config.queries, scores.shape[1]), dim=1).indices[:, :, None]
        content = self.model.enc_output(masked.gather(1, location.expand(-1, -1, masked.shape[-1])))
        logits = self.model.enc_score_head(content)
        # Boxes as logits [B, Q, 4].
        first = self.model.enc_bbox_head(content) + F.embedding(location[:, :, 0], anchors[0])
        references, content, mask = first.detach(), content.detach(), None
        if noise:
            content = torch.cat(
                [self.model.denoising_class_embed(noise.labels).to(content.dtype), content], 1
            )
            references = torch.cat([noise.references.to(references.dtype), references], dim=1)
            mask = noise.attention_mask(first.shape[1])
        decoded = self.model.decoder(
            inputs_embeds=content,
            encoder_hidden_states=memory,
            encoder_attention_mask=mask,
            reference_points=references,
            spatial_shapes=to_python_ints(shapes),
            spatial_shapes_list=shapes,
            level_start_index=None,
        )
        return Outputs(
            logits=decoded.intermediate_logits,
            boxes=self.connect_box_gradients(decoded.intermediate_reference_points),
            corners=getattr(decoded, "intermediate_predicted_corners", None),
            references=getattr(decoded, "initial_reference_points", None),
            encoder_logits=logits[:, None],
            encoder_boxes=first.sigmoid()[:, None],
        )

    def connect_box_gradients(self, boxes: Tensor) -> Tensor:
        """Adjust the gradients of the decoder's boxes [B, S, Q, 4] to those of the authors' code."""
        return boxes

    def _anchors(self, shapes: list[tuple[int, int]], memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return initial boxes as logits [1, N, 4], in at least fp32, and valid locations [1, N, 1]."""
        exact = torch.promote_types(memory.dtype, torch.float32)
        key = (*shapes, memory.device, exact, memory.dtype)
        if key not in self._anchors_of:
            with torch.inference_mode(False):
                parts = []
                for level, (height, width) in enumerate(shapes):
                    rows = (torch.arange(height, dtype=exact, device=memory.device) + 0.5) / height
                    columns = (torch.arange(width, dtype=exact, device=memory.device) + 0.5) / width
                    centers = torch.cartesian_prod(rows, columns).flip(1)
                    sides = torch.full_like(centers, _FINEST_ANCHOR_SIDE * 2**level)
                    parts.append(torch.cat([centers, sides], dim=1))
                boxes = torch.cat(parts)
                valid = ((boxes > _MARGIN) & (boxes < 1 - _MARGIN)).all(dim=-1, keepdim=True)
                logits = torch.where(valid, torch.log(boxes / (1 - boxes)), torch.finfo(exact).max)
                self._anchors_of[key] = logits[None], valid[None].to(memory.dtype)
        return self._anchors_of[key]

    def backbone_levels(self, pixels: Tensor) -> list[Tensor]:
        """Return the backbone's levels, from compiled code in training."""
        # `match_targets` is called too rarely to be worth compiling.
        compiled = self._compiled if self.training and torch.is_grad_enabled() else None
        return (compiled or self._levels)(pixels)

    def _levels(self, pixels: Tensor) -> list[Tensor]:
        return list(self.model.backbone.model(pixels).feature_maps)

    def compile_network(self, mode: str) -> bool:
        """Compile only the backbone: encoder and decoder depend on values and on the batch's targets."""
        self._compiled = compile_for_steps(self._levels, mode)
        # Compiled code casts the backbone's weights itself.
        self._cast_layers = find_autocast_layers(self.model, without=self.backbone)
        return True

    def parameter_groups(self, config: TrainConfig) -> ParameterGroups:
        """Return a group for the backbone, with its learning rate, and one for the rest."""
        backbone = [value for value in self.backbone.parameters() if value.requires_grad]
        slow = {id(value) for value in backbone}
        rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in slow]
        return [{"params": rest}, {"params": backbone, "lr_scale": self.config.backbone_lr}]

    def deployment_graph(self, image_size: int) -> Graph:
        return DetrGraph(self, image_size)

    def raw_graph(self, image_size: int) -> Graph:
        return RawDetrGraph(self, image_size)

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load a detector or backbone in the format of the hub or its authors, in place; see `Architecture`.

        Heads for other classes are skipped; all other tensors must fit.
        """
        body = next(f"{name}." for name, part in self.named_modules() if part is self.backbone)
        named = rename_tensors(state, self.tensor_rules)
        return load_tensors(self, named, source, self.class_head_prefixes, body=body, refuse_unknown=True)

    def upstream_weights(self, class_names: Sequence[str]) -> UpstreamWeights:
        """Return weights and configuration as transformers' `save_pretrained` writes them."""
        whole = self.upstream(self.library_config)
        whole.load_state_dict(self.state_dict(), strict=False)  # `whole` has second copies of the heads
        whole.config.id2label = dict(enumerate(class_names))
        whole.config.label2id = {name: label for label, name in enumerate(class_names)}
        with temporary_folder() as temporary:
            whole.save_pretrained(temporary)
            state = safetensors.torch.load_file(temporary / "model.safetensors")
            files = {"config.json": (temporary / "config.json").read_bytes()}
        return UpstreamWeights(state, len(class_names), files)

    def fold_batchnorm(self) -> Self:
        fold(self.model, TRANSFORMERS_PAIRS)
        replace_modules(
            self.model, nn.MaxPool2d, lambda pool: ExportableMaxPool() if pool.stride == 1 else pool
        )
        return self

    @property
    def title(self) -> str:
        width = f", {self.config.width:g} times as wide" if self.config.width != 1 else ""
        return f"{self.label} {self.config.size}{width}"


class DetrGraph(Graph):
    """Returns the detections of `predict` for uint8 [B, 3, S, S]."""

    def __init__(self, detector: Detr, image_size: int) -> None:
        super().__init__()
        self.detector, self.image_size = detector.eval(), image_size
        with torch.no_grad():
            blank = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8)
            # This also builds the constants for this size, which exporters cannot trace.
            self.rows = detector.predict(blank).scores.shape[1]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        outputs = self.detector.final_outputs(images)
        return tuple(select_detections(*outputs, self.image_size, self.detector.config))


class RawDetrGraph(DetrGraph):
    """Returns boxes [B, Q, 4] in pixels and scores [B, Q, C] of all queries for uint8 [B, 3, S, S]."""

    output_names = RAW_OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits, boxes = self.detector.final_outputs(images)
        return to_corners(boxes).clamp(0, 1) * self.image_size, logits.sigmoid()


def select_detections(logits: Tensor, boxes: Tensor, image_size: int, config: DetrOptions) -> Detections:
    """Return the best pairs of query and class from logits [B, Q, C] and boxes [B, Q, 4]."""
    classes = logits.shape[-1]
    flat = logits.flatten(1)
    best, pair = flat.topk(min(config.detections_per_image, flat.shape[1]), dim=1)
    scores = best.sigmoid()
    query = torch.div(pair, classes, rounding_mode="floor")
    corners = to_corners(boxes).clamp(0, 1) * image_size
    real = scores > config.score_threshold
    return Detections(
        boxes=corners.gather(1, query[:, :, None].expand(-1, -1, 4)) * real[:, :, None],
        scores=scores * real,
        labels=torch.where(real, pair % classes, PADDING),
        num=real.sum(dim=1),
    )
