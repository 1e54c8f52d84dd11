"""Multi-scale deformable attention (Zhu et al. 2021, arXiv:2010.04159) as weighted sums of rows, for CPUs.

torch's grid_sample reads the channels of a place one by one. Here the features of a place are a row of a
table, and a query is a sum of such rows: the forward pass takes a quarter of the time, both passes a half.
"""

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.d_fine.modeling_d_fine import multi_scale_deformable_attention_v2

warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


def sampled(
    value: Tensor, shapes: Any, locations: Tensor, attention: Tensor,
    points: list[int], method: str = "default",
) -> Tensor:  # fmt: skip
    """What queries read from all levels, [B, Q, H * D]; has the arguments of transformers' function.

    Levels of `shapes`, pairs of height and width, lie behind each other in `value` [B, N, H, D]. Each of H
    heads reads at `locations` [B, Q, H, P, 2], x and y in 0..1 and zeros outside, weighted by `attention`
    [B, Q, H, P]; `points` of the P are on each level. All but training on a CPU is left to transformers.
    """
    trained = value.requires_grad and not torch.compiler.is_compiling()
    usable = value.device.type == "cpu" and torch.backends.mkl.is_available() and method == "default"
    if not (trained and usable):
        return multi_scale_deformable_attention_v2(value, shapes, locations, attention, points, method)
    exact = torch.promote_types(value.dtype, torch.float32)
    size, start = _levels(tuple(shapes), tuple(points), exact)
    return _Sampled.apply(value.to(exact), locations.to(exact), attention.to(exact), size, start)


@functools.cache
def _levels(
    shapes: tuple[tuple[int, int], ...], points: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Width and height of the level of each point [2, P], and where it starts [P]."""
    each = [level for level, count in enumerate(points) for _ in range(count)]
    starts = [sum(height * width for height, width in shapes[:level]) for level in each]
    sizes = [[shapes[level][side] for level in each] for side in (1, 0)]
    return torch.tensor(sizes, dtype=dtype), torch.tensor(starts, dtype=torch.int32)


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, locations: Tensor, attention: Tensor, size: Tensor, start: Tensor
    ) -> Tensor:
        batch, rows, heads, _ = value.shape
        place = (locations * size.T).sub_(0.5).transpose(-1, -2)  # [B, Q, H, 2, P], x and y
        low = place.floor()
        part = place - low
        # Of the two columns and the two rows around each place: [B, Q, H, 2, 2, P].
        both = torch.stack([low, low + 1], dim=-2)
        inside = (both >= 0) & (both < size[:, None])
        share = torch.stack([1 - part, part], dim=-2) * inside
        index = (both * inside).int()
        first = torch.arange(batch)[:, None, None] * (rows * heads) + torch.arange(heads)[:, None]
        row = (
            index[..., 1, :, :] * (size[0] * heads).int() + (start * heads + first[..., None]).int()[:, None]
        )
        index = (row[..., None, :] + index[..., 0, None, :, :] * heads).flatten(3).flatten(0, 2)
        weights = _corners(share, attention)
        table = value.reshape(-1, value.shape[-1])
        ctx.save_for_backward(table, index, share, inside, attention, size)
        ctx.shape = value.shape
        return F.embedding_bag(index, table, mode="sum", per_sample_weights=weights).view(
            *locations.shape[:2], -1
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        table, index, share, inside, attention, size = ctx.saved_tensors
        (count, each), rows = index.shape, len(table)
        gradient = gradient.reshape(count, -1)
        weights = _corners(share, attention).flatten()
        # Products of the gradient with the rows that were read.
        ends = torch.arange(0, index.numel() + 1, each, dtype=index.dtype)
        read = torch.sparse_csr_tensor(
            ends, index.flatten(), weights, (count, rows), check_invariants=False
        )  # fmt: skip
        slope = torch.sparse.sampled_addmm(read, gradient, table.T, beta=0.0).values()
        slope = slope.view(*attention.shape[:3], 2, 2, -1)
        # The same sum the other way: for each row of the table what read it.
        order = index.flatten().argsort(stable=True)
        ends = torch.bincount(index.flatten(), minlength=rows).cumsum(0)
        of_table = F.embedding_bag(
            order // each, gradient, F.pad(ends[:-1], (1, 0)), mode="sum",
            per_sample_weights=weights.index_select(0, order),
        )  # fmt: skip
        sign = inside * torch.tensor([-1, 1])[:, None]
        columns = (slope * share[..., 1, :, None, :]).sum(-3)
        lines = (slope * share[..., 0, None, :, :]).sum(-2)
        moved = torch.stack([columns * sign[..., 0, :, :], lines * sign[..., 1, :, :]], dim=-3).sum(-2)
        of_locations = (moved * (attention[..., None, :] * size)).transpose(-1, -2)
        of_attention = (columns * share[..., 0, :, :]).sum(-2)
        return of_table.view(ctx.shape), of_locations, of_attention, None, None


def _corners(share: Tensor, attention: Tensor) -> Tensor:
    """Weights [B * Q * H, 4 * P] of the four places around each point."""
    rows = share[..., 1, :, :] * attention[..., None, :]
    return (rows[..., None, :] * share[..., 0, None, :, :]).flatten(3).flatten(0, 2)
