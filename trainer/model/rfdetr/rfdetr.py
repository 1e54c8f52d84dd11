"""RF-DETR: transformers' network with groups of queries.

In training, queries are selected, attended and matched separately in each group (Group DETR); all groups
share the decoder's weights. This module selects the queries of all groups at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RfDetrForObjectDetection

from trainer.config.schema import TrainConfig
from trainer.model.architecture import ParameterGroups
from trainer.model.detr.criterion import Criterion, Outputs, ia_bce_loss
from trainer.model.detr.denoising import DenoisingQueries
from trainer.model.detr.detector import Detr
from trainer.model.detr.modules import INITIAL_LOGIT, initialize_layers, to_python_ints
from trainer.model.detr.tensor_names import RenameRules, TensorRules
from trainer.model.rfdetr.options import RFDetrOptions
from trainer.model.weights import class_output_indices, select_outputs

_WEIGHTS = {"ia_bce": 1.0, "bbox": 5.0, "giou": 2.0}
_COMPONENT_DECAY = 0.7
"""Relative learning rate of the decoder; the vision transformer's is multiplied by its square."""
_NO_DECAY = ("gamma", "embeddings", "bias", "norm")
"""Parts of the names of the vision transformer's weights without weight decay."""
_GROUP: RenameRules = (
    (r"^transformer\.", ""),
    (r"^refpoint_embed\.", "reference_point_embed."),
    (r"^decoder\.norm\.", "decoder.layernorm."),
    (r"\.norm1\.", ".self_attn_layer_norm."),
    (r"\.norm2\.", ".cross_attn_layer_norm."),
    (r"\.norm3\.", ".layer_norm."),
    (r"(?<!\.mlp)\.(?:linear|fc)([12])\.", r".mlp.fc\1."),
    (r"\.out_proj\.", ".o_proj."),
)
"""Rules for the decoder's tensors. Source: `state_dict` of the networks in rfdetr/models of
github.com/roboflow/rf-detr (35ac6ab)."""
_DINO: RenameRules = (
    (r"^0\.encoder\.(encoder\.)?", "backbone."),
    (r"^0\.projector\.", "projector."),
    (r"\.attention\.attention\.(q|k|v)(?:uery|ey|alue)\.", r".attention.\1_proj."),
    (r"\.attention\.output\.(dense\.)?", ".attention.o_proj."),
    (r"\.m\.(\d+)\.", r".bottlenecks.\1."),
    (r"\.cv(\d)\.", r".conv\1."),
    (r"^(projector\..*)\.bn\.", r"\1.norm."),
    (r"^projector\.stages\.0\.0\.", "projector.projector_layer."),
    (r"^projector\.stages\.0\.1\.", "projector.layer_norm."),
)
"""Rules for the backbone's tensors, from the same source."""
_TENSOR_RULES = TensorRules("model.backbone.", _DINO, _GROUP, outer_heads=("class_embed.", "bbox_embed."))


class RFDetr(Detr):
    """RF-DETR."""

    config: RFDetrOptions
    upstream = RfDetrForObjectDetection
    label = "RF-DETR"
    normalizes_pixels = True
    class_head_prefixes = ("class_embed.", "model.enc_out_class_embed.")
    tensor_rules = _TENSOR_RULES

    def build_network(self, whole: Any) -> None:
        self.model, self.class_embed, self.bbox_embed = whole.model, whole.class_embed, whole.bbox_embed
        # No output depends on this parameter, but DDP would wait for its gradient.
        token = getattr(self.model.backbone.backbone.embeddings, "mask_token", None)
        if token is not None:
            token.requires_grad_(False)
        _initialize_weights(self)

    def make_criterion(self) -> Criterion:
        return Criterion(groups=self.config.groups, weights=_WEIGHTS, classification=ia_bce_loss)

    def outputs(self, pixels: Tensor, noise: DenoisingQueries | None) -> Outputs:
        """Return the decoder's outputs for normalized images [B, 3, S, S]; in training, of all groups."""
        del noise  # This detector has no denoising queries.
        model, groups = self.model, self.config.groups if self.training else 1
        level = model.backbone.projector(self.backbone_levels(pixels))
        memory = level.flatten(2).transpose(1, 2)
        shapes = [(level.shape[-2], level.shape[-1])]
        anchors, valid = self._anchors(shapes, memory)
        anchors = anchors.sigmoid()
        count = min(self.config.queries, memory.shape[1])

        # [B, G, N, channels] for all locations, then for those that become queries.
        encoded = _apply_by_group(memory * valid, model.enc_output[:groups])
        norms = model.enc_output_norm[:groups]
        encoded = F.layer_norm(encoded, encoded.shape[-1:], eps=norms[0].eps)
        scale, shift = (torch.stack([getattr(norm, part) for norm in norms]) for part in ("weight", "bias"))
        encoded = encoded * scale[:, None] + shift[:, None]
        heads = model.enc_out_class_embed[:groups]
        scores = _apply_by_group(encoded, heads).amax(-1)
        scores = scores.masked_fill(valid.transpose(1, 2) == 0, -torch.inf)
        location = scores.topk(count, dim=-1).indices[..., None]
        content = encoded.gather(2, location.expand(-1, -1, -1, encoded.shape[-1]))
        first = anchors[:, None].expand(*location.shape[:2], -1, -1).gather(2, location.expand(-1, -1, -1, 4))
        logits = _apply_by_group(content, heads)
        moves = content
        for layer in range(3):
            moves = _apply_by_group(moves, [head.layers[layer] for head in model.enc_out_bbox_embed[:groups]])
            moves = F.relu(moves) if layer < 2 else moves
        boxes = _move_boxes(first, moves)

        learned = [
            table.weight.unflatten(0, (-1, self.config.queries))[:groups, :count].flatten(0, 1)
            for table in (model.reference_point_embed, model.query_feat)
        ]
        references = _move_boxes(boxes.detach().flatten(1, 2), learned[0][None])
        decoded = model.decoder(
            inputs_embeds=learned[1].expand(memory.shape[0], -1, -1),
            reference_points=references,
            spatial_shapes=to_python_ints(shapes),
            spatial_shapes_list=shapes,
            level_start_index=None,
            valid_ratios=memory.new_ones(memory.shape[0], len(shapes), 2),
            encoder_hidden_states=memory,
        ).intermediate_hidden_states

        def split_groups(values: Tensor) -> Tensor:
            """Arrange [L, B, G * Q, n] as [B, L * G, Q, n]."""
            split: Tensor = values.unflatten(2, (groups, count))
            return split.transpose(0, 1).flatten(1, 2)

        return Outputs(
            logits=split_groups(self.class_embed(decoded)),
            boxes=split_groups(_move_boxes(references, self.bbox_embed(decoded))),
            corners=None,
            references=None,
            encoder_logits=logits,
            encoder_boxes=boxes,
        )

    def _levels(self, pixels: Tensor) -> list[Tensor]:
        return list(self.model.backbone.backbone(pixels).feature_maps)

    def parameter_groups(self, config: TrainConfig) -> ParameterGroups:
        """Return groups for each block of the vision transformer, for the decoder, and for the rest.

        Source: rfdetr/util/get_param_dicts.py and rfdetr/models/backbone/backbone.py of
        github.com/roboflow/rf-detr (35ac6ab).
        """
        # The authors count one layer more than there are blocks: `out_feature_indexes[-1] + 1`.
        layers = self.library_config.backbone_config.num_hidden_layers + 1
        made: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            scale, decays = 1.0, True
            if name.startswith("model.backbone.backbone."):
                inner = name.removeprefix("model.backbone.backbone.")
                number = 0 if inner.startswith("embeddings.") else layers + 1
                number = int(inner.split(".")[2]) + 1 if inner.startswith("encoder.layer.") else number
                scale = self.config.backbone_lr * _COMPONENT_DECAY**2
                scale *= self.config.layer_decay ** (layers + 1 - number)
                decays = not any(part in inner for part in _NO_DECAY)
            elif name.startswith("model.decoder."):
                scale = _COMPONENT_DECAY
            if parameter.requires_grad:
                made.setdefault((scale, decays), []).append(parameter)
        return [
            {"params": parameters, "lr_scale": scale} | ({} if decays else {"weight_decay": 0.0})
            for (scale, decays), parameters in made.items()
        ]

    def load_upstream(self, state: dict[str, Tensor], source: str) -> str:
        """Load a detector from the hub or its authors, without COCO's unused outputs."""
        total = len(state.get("class_embed.bias", ()))
        kept = class_output_indices(total, self.num_classes)
        fitting = {
            name: select_outputs(value, kept, total) if kept and "class_embed." in name else value
            for name, value in state.items()
        }
        return super().load_upstream(fitting, source)


def _apply_by_group(values: Tensor, layers: Sequence[Any] | nn.ModuleList) -> Tensor:
    """Apply each group's linear layer: [B, N, n] or [B, G, N, n] -> [B, G, N, m]."""
    weight, bias = (torch.stack([getattr(layer, part) for layer in layers]) for part in ("weight", "bias"))
    values = values[:, None] if values.ndim == 3 else values
    product = values @ weight.transpose(1, 2)
    return product + bias[:, None].to(product.dtype)


def _move_boxes(boxes: Tensor, moves: Tensor) -> Tensor:
    """Move boxes [..., 4], given by center and size, by offsets relative to their size."""
    center = moves[..., :2] * boxes[..., 2:] + boxes[..., :2]
    return torch.cat([center, moves[..., 2:].exp() * boxes[..., 2:]], dim=-1)


@torch.no_grad()
def _initialize_weights(detector: RFDetr) -> None:
    """Initialize projector, decoder and heads as the authors do, in place.

    Source: `Transformer._reset_parameters` and `LWDETR.__init__` in rfdetr/models of
    github.com/roboflow/rf-detr (35ac6ab), with PyTorch's defaults for the rest.
    """
    backbone, model = detector.model.backbone.backbone, detector.model
    excluded = set(backbone.modules())
    modules = {name: module for name, module in detector.named_modules() if module not in excluded}
    initialize_layers(modules, r"model\.(decoder|enc_output)\..*")
    nn.init.zeros_(model.reference_point_embed.weight)
    nn.init.constant_(detector.class_embed.bias, INITIAL_LOGIT)
    for values in detector.bbox_embed.layers[-1].parameters():
        nn.init.zeros_(values)
    for head in model.enc_out_class_embed:
        head.load_state_dict(detector.class_embed.state_dict())
    for head in model.enc_out_bbox_embed:
        head.load_state_dict(detector.bbox_embed.state_dict())
