"""D-FINE and RT-DETRv2: transformers' networks, and names of weights, with the losses of their authors.

This module selects the queries, adds denoising queries and decodes the detections.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import DFineForObjectDetection, PreTrainedModel, RTDetrV2ForObjectDetection
from transformers.models.d_fine import modeling_d_fine as d_fine
from transformers.models.hgnet_v2.modeling_hgnet_v2 import HGNetV2LearnableAffineBlock
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as rt_detr
from transformers.utils import logging as library_logging

from trainer.base.temporary_folders import temporary_folder
from trainer.config.schema import TrainConfig
from trainer.data.batch import PADDING
from trainer.model.architecture import (
    MEAN,
    STD,
    Architecture,
    ParameterGroups,
    UpstreamWeights,
    recolored,
)
from trainer.model.architectures.detr.denoising import Denoising, denoising
from trainer.model.architectures.detr.detr_criterion import (
    Criterion,
    Outputs,
    Targets,
    at_least_fp32,
    bin_values,
)
from trainer.model.architectures.detr.detr_options import DFineOptions, RTDetrOptions, SetOptions
from trainer.model.architectures.detr.layouts import library_names
from trainer.model.architectures.detr.sampling import sampled
from trainer.model.batchnorm_folding import (
    TRANSFORMERS,
    NormedConv2d,
    apply_in_convolutions,
    cast_together,
    fold,
)
from trainer.model.boxes import to_center, to_corners
from trainer.model.deployment import RAW_OUTPUTS, Detections, Graph
from trainer.model.fused_functions import compiled_for_steps
from trainer.model.global_batch import Part
from trainer.model.upstream_fitting import load

# Its reports and progress bars repeat our messages.
library_logging.set_verbosity_error()
library_logging.disable_progress_bar()

_LABEL_NOISE, _BOX_NOISE = 0.5, 1.0
"""Noise of denoising queries; see `denoising`."""
_ROWS = 16  # rows of targets in training are a multiple of it
_ANCHOR = 0.05
"""Side of a query's first box on the finest level, relative to the image; twice that on the next."""
_MARGIN = 0.01  # places whose first box is nearer to a border than this become no query
FIRST_LOGIT = -math.log(1 / 0.01 - 1)
"""Of every class: a score of 0.01 (Lin et al. 2017), for any number of classes."""
_AS_TRANSFORMERS = ("sampling_offsets", "attention_weights", "gate", "value_proj", "output_proj")
"""Layers that transformers draws like the authors."""
_BOXES = re.compile(r"enc_bbox_head|decoder\.(pre_bbox_head|bbox_embed\.\d+|lqe_layers\.\d+\.reg_conf)")
"""Heads whose last layer starts at zero, so that boxes and scores do not change at first."""
_CLASSES = re.compile(r"enc_score_head|decoder\.class_embed\.\d+")
_XAVIER = r"decoder\.(layers\.\d+\.mlp\..*|query_pos_head\.layers\.\d+)|enc_output\.0"
"""Layers that are drawn as in Glorot and Bengio 2010."""
_XAVIER_OF_RTDETR = _XAVIER + r"|decoder_input_proj\.\d+\.0"  # D-FINE's authors leave these to PyTorch


class Detr(Architecture):
    """D-FINE or RT-DETRv2."""

    config: Any  # DetrOptions, or others of `SetOptions`
    needs_part = True
    upstream: Any  # transformers' class of the whole detector
    label: ClassVar[str]  # name for people, without the size
    unfolds_boxes: ClassVar[bool] = False  # see `denoising`
    _cast: list[nn.Module] | None = None  # layers whose weights autocast would cast, see `cast_together`
    checking: ClassVar[tuple[type[nn.Module], ...]] = (d_fine.DFineEncoderLayer, rt_detr.RTDetrV2EncoderLayer)
    """Layers that check for values that are not finite, see `train`."""
    pixel_scale: bool = False
    """Whether pixels are relative to ImageNet's mean and deviation."""
    pixel_mean: Tensor
    pixel_deviation: Tensor
    heads: ClassVar[tuple[str, ...]] = (
        "model.enc_score_head.",
        "model.decoder.class_embed.",
        "model.denoising_class_embed.",
    )
    """Prefixes of the tensors that depend on the classes."""

    def __init__(self, config: SetOptions, num_classes: int) -> None:
        super().__init__(config, num_classes)
        self.library_config = self.upstream.config_class(**config.arguments(), num_labels=num_classes)
        self.denoising = getattr(config, "denoising", 0)
        self.take(self.upstream(self.library_config))
        if self.pixel_scale:
            self.register_buffer("pixel_mean", torch.tensor(MEAN).view(3, 1, 1), persistent=False)
            self.register_buffer("pixel_deviation", torch.tensor(STD).view(3, 1, 1), persistent=False)
        # Always: on a CPU the BatchNorm of torch 2.15 gives a batch of one that is not in NHWC order a wrong
        # gradient if the next operation is a transposition.
        self.model.to(memory_format=torch.channels_last)
        self._criterion = self.make_criterion()
        self.loss_names = self._criterion.names
        self._compiled: Callable[[Tensor], list[Tensor]] | None = None
        self._anchors_of: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    @property
    def backbone(self) -> Any:
        """The part whose weights may come from a classifier."""
        return self.model.backbone

    @property
    def layout(self) -> str:
        """The names of the authors' tensors, see `layouts`."""
        return str(self.config.architecture)

    def take(self, whole: Any) -> None:
        """Take the parts of the library's detector, and initialize its weights."""
        # Without the outer model, which has the heads a second time under other names.
        self.model = whole.model
        _draw_first_weights(self.model, self.backbone)
        # Autocast computes some layers in 32 bits although 16 suffice, or the reverse. Parameters and buffers
        # keep their names; without autocast results change by rounding only.
        frozen = (d_fine.DFineFrozenBatchNorm2d, rt_detr.RTDetrV2FrozenBatchNorm2d)
        apply_in_convolutions(self.backbone, frozen, TRANSFORMERS)
        for parent in list(self.model.modules()):
            for name, part in list(parent.named_children()):
                if isinstance(part, HGNetV2LearnableAffineBlock):
                    setattr(parent, name, _Affine(part))
                elif isinstance(part, d_fine.DFineMultiscaleDeformableAttention):
                    part.ms_deformable_attn_core = sampled  # type: ignore[assignment]
                elif isinstance(part, nn.Conv2d) and part.groups > 1 and max(part.stride) > 1:
                    part.__class__ = _StridedNormed if isinstance(part, NormedConv2d) else _Strided
        if getattr(self.config, "frozen_stem", False):
            self.model.backbone.model.embedder.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules."""
        super().train(mode)
        # In training these layers check for values that are not finite, which makes the host wait; the step
        # checks as well. Nothing else depends on their mode: they have no dropout.
        for module in self.model.modules():
            if isinstance(module, self.checking):
                module.training = False
        return self

    def make_criterion(self) -> Criterion:
        """The losses that `forward` computes, and their names."""
        return Criterion()

    def forward(
        self,
        images: Tensor,
        boxes: Tensor,
        labels: Tensor,
        color: Tensor | None = None,
        verified: Tensor | None = None,
        part: Part | None = None,
    ) -> dict[str, Tensor]:
        """Losses of a batch, each the sum over all sets of predictions; see `Architecture.forward`."""
        assert part is not None
        outputs, targets, noise = self._with_targets(images, boxes, labels, color, part)
        with torch.autocast(images.device.type, enabled=False):
            losses = self._criterion(outputs, targets._replace(verified=verified), noise, part)
        # As means over these images, which the step weights by their share of the global batch.
        return {name: losses[name].sum() * part.images / len(images) for name in self.loss_names}

    def survey(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None, part: Part
    ) -> tuple[Any, Tensor]:
        """The matches of a batch, and the number of pairs that train its boxes."""
        outputs, targets, _ = self._with_targets(images, boxes, labels, color, part)
        with torch.autocast(images.device.type, enabled=False):
            matched = self._criterion.match(outputs, targets, part.counts)
        return matched, outputs.logits.new_full((), matched().joined)

    def _with_targets(
        self, images: Tensor, boxes: Tensor, labels: Tensor, color: Tensor | None, part: Part
    ) -> tuple[Outputs, Targets, Denoising | None]:
        """Outputs for a batch in fp32 or more, its targets and its denoising queries."""
        pixels = self.normalize(images, color)
        centered = to_center((boxes / images.shape[-1]).to(pixels.dtype))
        # Few shapes, and the same in all processes.
        extra = -(-max(1, part.most) // _ROWS) * _ROWS - labels.shape[1]
        centered, labels = F.pad(centered, (0, 0, 0, extra)), F.pad(labels, (0, extra), value=PADDING)
        noise = None
        if self.denoising:
            noise = denoising(
                centered,
                labels,
                part.keys,
                self.num_classes,
                part.most,
                queries=self.denoising,
                label_noise=_LABEL_NOISE,
                box_noise=_BOX_NOISE,
                unfold=self.unfolds_boxes,
            )
        self._cast = _matrices(self.model) if self._cast is None else self._cast
        with cast_together(self._cast, images.device):
            outputs = self.outputs(pixels, noise)
        return outputs.exact(), Targets(centered, labels), noise

    @torch.no_grad()
    def predict(self, images: Tensor) -> Detections:
        return best_pairs(*self.last(images), images.shape[-1], self.config)

    def last(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, Q, C] and boxes [B, Q, 4] of the last layer, in fp32 or more."""
        outputs = self.outputs(self.normalize(images), None)
        return at_least_fp32(outputs.logits[:, -1]), at_least_fp32(outputs.boxes[:, -1])

    def normalize(self, images: Tensor, color: Tensor | None = None) -> Tensor:
        """Network input from uint8 images, in the precision of the weights and in NHWC order."""
        weight = next(self.backbone.parameters())
        values = images.to(torch.promote_types(weight.dtype, torch.float32)) / 255
        values = recolored(values, color, 1)
        if self.pixel_scale:
            values = (values - self.pixel_mean) / self.pixel_deviation
        return values.contiguous(memory_format=torch.channels_last)

    def features(self, pixels: Tensor) -> list[Tensor]:
        """Levels of the encoder for images [B, 3, S, S] in 0..1, each [B, C, h, w]."""
        found = self.backbone_levels(pixels)
        levels = [project(level) for project, level in zip(self.model.encoder_input_proj, found, strict=True)]
        encoded = self.model.encoder(inputs_embeds=levels).last_hidden_state
        return [project(level) for project, level in zip(self.model.decoder_input_proj, encoded, strict=True)]

    def outputs(self, pixels: Tensor, noise: Denoising | None) -> Outputs:
        """The decoder's outputs for images [B, 3, S, S] in 0..1."""
        levels = self.features(pixels)
        memory = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], dim=1)
        shapes = [(level.shape[-2], level.shape[-1]) for level in levels]
        anchors, valid = self._anchors(shapes, memory)
        masked = valid * memory
        # No gradient reaches the places that become no query: theirs are not computed.
        scores = self.model.enc_score_head(self.model.enc_output(masked)).amax(dim=-1)
        place = scores.topk(min(self.config.queries, scores.shape[1]), dim=1).indices[:, :, None]
        content = self.model.enc_output(masked.gather(1, place.expand(-1, -1, masked.shape[-1])))
        logits = self.model.enc_score_head(content)
        # Boxes as logits [B, Q, 4].
        first = self.model.enc_bbox_head(content) + F.embedding(place[:, :, 0], anchors[0])
        references, content, mask = first.detach(), content.detach(), None
        if noise:
            content = torch.cat(
                [self.model.denoising_class_embed(noise.labels).to(content.dtype), content], 1
            )
            references = torch.cat([noise.references.to(references.dtype), references], dim=1)
            mask = noise.visible(first.shape[1])
        decoded = self.decode(content, references, memory, mask, shapes)
        return Outputs(
            logits=decoded.intermediate_logits,
            boxes=self.refined(decoded.intermediate_reference_points),
            corners=getattr(decoded, "intermediate_predicted_corners", None),
            references=getattr(decoded, "initial_reference_points", None),
            encoder_logits=logits[:, None],
            encoder_boxes=first.sigmoid()[:, None],
        )

    def decode(
        self,
        content: Tensor,
        references: Tensor,
        memory: Tensor,
        mask: Tensor | None,
        shapes: list[tuple[int, int]],
    ) -> Any:
        """What transformers' decoder returns for queries [B, Q, C] and their first boxes, as logits."""
        return self.model.decoder(
            inputs_embeds=content,
            encoder_hidden_states=memory,
            encoder_attention_mask=mask,
            reference_points=references,
            spatial_shapes=integers(shapes),
            spatial_shapes_list=shapes,
            level_start_index=None,
        )

    def refined(self, boxes: Tensor) -> Tensor:
        """The decoder's boxes [B, S, Q, 4], with the gradients that the authors' have."""
        return boxes

    def _anchors(self, shapes: list[tuple[int, int]], memory: Tensor) -> tuple[Tensor, Tensor]:
        """First boxes as logits [1, N, 4], in fp32 or more, and which places are valid [1, N, 1]."""
        exact = torch.promote_types(memory.dtype, torch.float32)
        key = (*shapes, memory.device, exact, memory.dtype)
        if key not in self._anchors_of:
            with torch.inference_mode(False):
                parts = []
                for level, (height, width) in enumerate(shapes):
                    rows = (torch.arange(height, dtype=exact, device=memory.device) + 0.5) / height
                    columns = (torch.arange(width, dtype=exact, device=memory.device) + 0.5) / width
                    centers = torch.cartesian_prod(rows, columns).flip(1)
                    sides = torch.full_like(centers, _ANCHOR * 2**level)
                    parts.append(torch.cat([centers, sides], dim=1))
                boxes = torch.cat(parts)
                valid = ((boxes > _MARGIN) & (boxes < 1 - _MARGIN)).all(dim=-1, keepdim=True)
                logits = torch.where(valid, torch.log(boxes / (1 - boxes)), torch.finfo(exact).max)
                self._anchors_of[key] = logits[None], valid[None].to(memory.dtype)
        return self._anchors_of[key]

    def backbone_levels(self, pixels: Tensor) -> list[Tensor]:
        """Levels of the backbone, compiled in training."""
        # A survey is rare: not worth another graph.
        compiled = self._compiled if self.training and torch.is_grad_enabled() else None
        return (compiled or self._levels)(pixels)

    def _levels(self, pixels: Tensor) -> list[Tensor]:
        return list(self.model.backbone.model(pixels).feature_maps)

    def compile_network(self, mode: str) -> bool:
        """Compile the backbone: the encoder reads values, and the number of queries depends on the batch."""
        self._compiled = compiled_for_steps(self._levels, mode)
        self._cast = _matrices(self.model, leave=self.backbone)  # the compiler casts its weights
        return True

    def parameter_groups(self, config: TrainConfig) -> ParameterGroups:
        """The backbone's, with their learning rate, and the rest."""
        backbone = [value for value in self.backbone.parameters() if value.requires_grad]
        slow = {id(value) for value in backbone}
        rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in slow]
        return [{"params": rest}, {"params": backbone, "lr_scale": self.config.backbone_lr}]

    def deployment_graph(self, image_size: int) -> Graph:
        return DetrGraph(self, image_size)

    def raw_graph(self, image_size: int) -> Graph:
        return RawDetrGraph(self, image_size)

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load a detector or a backbone as the hub or its authors store it, in place; see `Architecture`.

        Heads of other classes are skipped; any other tensor must fit.
        """
        prefix = next(f"{name}." for name, part in self.named_modules() if part is self.backbone)
        named = library_names(state, self.layout)
        return load(self, named, source, self.heads, prefix, refuse_unknown=True)

    def upstream_weights(self, names: Sequence[str]) -> UpstreamWeights:
        """Weights and configuration as transformers' `save_pretrained` writes them."""
        whole = self.upstream(self.library_config)
        whole.load_state_dict(self.state_dict(), strict=False)  # without its second copies of heads
        whole.config.id2label = dict(enumerate(names))
        whole.config.label2id = {name: label for label, name in enumerate(names)}
        with temporary_folder() as temporary:
            whole.save_pretrained(temporary)
            state = safetensors.torch.load_file(temporary / "model.safetensors")
            files = {"config.json": (temporary / "config.json").read_bytes()}
        return UpstreamWeights(state, len(names), files)

    def folded(self) -> Self:
        fold(self.model, TRANSFORMERS)
        return self

    @property
    def title(self) -> str:
        width = f", {self.config.width:g} times as wide" if self.config.width != 1 else ""
        return f"{self.label} {self.config.size}{width}"


class DFine(Detr):
    """D-FINE (Peng et al. 2024)."""

    config: DFineOptions
    needs_survey = True
    upstream = DFineForObjectDetection
    label = "D-FINE"
    unfolds_boxes = True
    moves_positions: ClassVar[bool] = True
    """Whether the embedding of a query's place follows its box from layer to layer."""

    def make_criterion(self) -> Criterion:
        return Criterion(self.library_config.max_num_bins, self.library_config.reg_scale)

    def decode(
        self,
        content: Tensor,
        references: Tensor,
        memory: Tensor,
        mask: Tensor | None,
        shapes: list[tuple[int, int]],
    ) -> Any:
        """The same as transformers' decoder, which computes boxes and qualities layer by layer."""
        decoder, config = self.model.decoder, self.library_config
        reference = references.sigmoid()
        before: Any = 0.0
        sides: Any = 0.0
        corners, states = [], []
        exact = torch.promote_types(references.dtype, torch.float32)
        values = bin_values(config.max_num_bins, config.reg_scale, exact, references.device)

        def moved(chances: Tensor, first: Tensor) -> Tensor:
            """Boxes from distributions [..., 4, bins] of the sides' distances to the first ones [..., 4]."""
            low, high = (chances @ values).split(2, dim=-1)
            unit = first[..., 2:] / config.reg_scale
            center = first[..., :2] + (high - low) * (unit / 2)
            return torch.cat([center, (low + high + config.reg_scale) * unit], dim=-1)

        def chances(part: Tensor) -> Tensor:
            return F.softmax(part.to(exact).unflatten(-1, (4, -1)), dim=-1)

        for number, layer in enumerate(decoder.layers):
            if number == 0 or self.moves_positions:
                position = decoder.query_pos_head(reference).clamp(min=-10, max=10)
            content = layer(
                content,
                position_embeddings=position,
                reference_points=reference[:, :, None],
                spatial_shapes=integers(shapes),
                spatial_shapes_list=shapes,
                encoder_hidden_states=memory,
                encoder_attention_mask=mask,
            )
            if number == 0:
                first = (decoder.pre_bbox_head(content) + d_fine.inverse_sigmoid(reference)).sigmoid()
            sides = decoder.bbox_embed[number](content + before) + sides
            before = content.detach()
            with torch.autocast(content.device.type, enabled=False):
                reference = moved(chances(sides.detach()), first.detach())
            corners.append(sides)
            states.append(content)
        kept = range(len(states))[None if self.training else -1 :]
        distributions = torch.stack([corners[number] for number in kept], dim=1)
        scores = [decoder.class_embed[number](states[number]) for number in kept]
        with torch.autocast(content.device.type, enabled=False):
            every = chances(distributions)
            boxes = moved(every, first.detach()[:, None])
        best = every.topk(decoder.lqe_layers[0].top_prob_values, dim=-1).values
        best = torch.cat([best, best.mean(dim=-1, keepdim=True)], dim=-1).flatten(-2)
        quality = [decoder.lqe_layers[number].reg_conf(best[:, place]) for place, number in enumerate(kept)]
        logits = torch.stack(scores, dim=1) + torch.stack(quality, dim=1)
        if self.training:
            logits = torch.cat([scores[0][:, None], logits], dim=1)
            boxes = torch.cat([first[:, None], boxes], dim=1)
        return d_fine.DFineDecoderOutput(
            intermediate_logits=logits,
            intermediate_reference_points=boxes,
            intermediate_predicted_corners=distributions,
            initial_reference_points=first.detach()[:, None],
        )


class RTDetr(Detr):
    """RT-DETRv2 (Lv et al. 2024)."""

    config: RTDetrOptions
    upstream = RTDetrV2ForObjectDetection
    label = "RT-DETRv2"

    def refined(self, boxes: Tensor) -> Tensor:
        """Let each layer's box also train the box of the layer before, which transformers detaches.

        Only gradients change. Source: `TransformerDecoder` in
        rtdetrv2_pytorch/src/zoo/rtdetr/rtdetrv2_decoder.py of github.com/lyuwenyu/RT-DETR (068dfde).
        """
        if not torch.is_grad_enabled():
            return boxes
        later, before = boxes[:, 1:], d_fine.inverse_sigmoid(boxes[:, :-1])
        slope = (later * (1 - later)).detach()
        return torch.cat([boxes[:, :1], later + slope * (before - before.detach())], dim=1)


class DetrGraph(Graph):
    """uint8 [B, 3, S, S] in, the detections of `predict` out."""

    def __init__(self, detector: Detr, image_size: int) -> None:
        super().__init__()
        self.detector, self.image_size = detector.eval(), image_size
        with torch.no_grad():
            blank = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8)
            # This also builds the constants of this size, which no exporter can trace.
            self.rows = detector.predict(blank).scores.shape[1]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(best_pairs(*self.detector.last(images), self.image_size, self.detector.config))


class RawDetrGraph(DetrGraph):
    """uint8 [B, 3, S, S] in; boxes [B, Q, 4] in pixels and scores [B, Q, C] of all queries out."""

    names = RAW_OUTPUTS

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits, boxes = self.detector.last(images)
        return to_corners(boxes).clamp(0, 1) * self.image_size, logits.sigmoid()


def best_pairs(logits: Tensor, boxes: Tensor, image_size: int, config: SetOptions) -> Detections:
    """The best pairs of query and class, of logits [B, Q, C] and boxes [B, Q, 4]."""
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


def integers(shapes: Sequence[tuple[int, int]]) -> Any:
    """Return Python integers, so that the layers' comparisons neither wait for the device nor are
    exported.
    """
    return np.array(shapes, dtype=object)


def _matrices(model: nn.Module, leave: nn.Module | None = None) -> list[nn.Module]:
    """Layers whose weights autocast would cast, without those in `leave`."""
    left = set(leave.modules()) if leave else set()
    return [
        part
        for part in model.modules()
        if isinstance(part, (nn.Linear, nn.Conv2d)) and not isinstance(part, _Strided) and part not in left
    ]


@torch.no_grad()
def _draw_first_weights(model: PreTrainedModel, backbone: nn.Module) -> None:
    """Draw the weights of encoder and decoder as the authors of D-FINE and RT-DETR do, in place.

    transformers draws nearly all with a deviation of 0.01, which passes on a ten-thousandth of a gradient
    through three layers. Source: `_reset_parameters` in src/zoo/dfine/dfine_decoder.py of
    github.com/Peterande/D-FINE (0eb0cfe) and in rtdetrv2_pytorch/src/zoo/rtdetr/rtdetrv2_decoder.py of
    github.com/lyuwenyu/RT-DETR (366ce51), with PyTorch's defaults for the rest.
    """
    is_rtdetr = model.config.model_type.startswith("rt_detr")
    kept = set(backbone.modules())
    modules = {name: module for name, module in model.named_modules() if module not in kept}
    draw(modules, _XAVIER_OF_RTDETR if is_rtdetr else _XAVIER)
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and _CLASSES.fullmatch(name):
            nn.init.constant_(module.bias, FIRST_LOGIT)
        layers = getattr(module, "layers", None)
        if _BOXES.fullmatch(name) and isinstance(layers, nn.ModuleList):
            for values in layers[-1].parameters():
                nn.init.zeros_(values)


def draw(modules: Mapping[str, nn.Module], xavier: str) -> None:
    """Initialize layers with PyTorch's defaults, and those whose names match `xavier` as in Glorot and Bengio
    2010.
    """
    for name, module in modules.items():
        if name.endswith(_AS_TRANSFORMERS):
            continue
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding, _BatchNorm)):
            module.reset_parameters()
        attention = name.endswith(("q_proj", "k_proj", "v_proj"))
        if attention or (isinstance(module, (nn.Linear, nn.Conv2d)) and re.fullmatch(xavier, name)):
            # The three of an attention are one matrix in PyTorch's.
            nn.init.xavier_uniform_(module.get_parameter("weight"), gain=1 / math.sqrt(2) if attention else 1)
        if attention or name.endswith("o_proj"):
            nn.init.zeros_(module.get_parameter("bias"))


class _Affine(HGNetV2LearnableAffineBlock):
    """A scale and a shift for all channels, in the type of the input.

    The fp32 parameters would turn 16 bits into 32, which the next convolution casts back.
    """

    def __init__(self, part: HGNetV2LearnableAffineBlock) -> None:
        super().__init__()
        self.scale, self.bias = part.scale, part.bias

    def forward(self, hidden_state: Tensor) -> Tensor:
        scale, shift = self.scale.to(hidden_state.dtype), self.bias.to(hidden_state.dtype)
        # One operation, which rounds once.
        return torch.addcmul(shift, hidden_state, scale)


class _Strided(nn.Conv2d):
    """A depthwise convolution, on a CPU in fp32: in bf16 oneDNN takes 20 times as long for its gradient."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.device.type != "cpu":
            return super()._conv_forward(input, weight, bias)
        with torch.autocast("cpu", enabled=False):
            shift = None if bias is None else at_least_fp32(bias)
            exact = super()._conv_forward(at_least_fp32(input), at_least_fp32(weight), shift)
            return exact.to(input.dtype)


class _StridedNormed(_Strided, NormedConv2d):
    """The same with fixed statistics."""
