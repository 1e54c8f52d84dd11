"""The losses of D-FINE and RT-DETRv2 against figures that their authors' code computed.

For the tensors that `inputs` makes, authors.json holds what `DFINECriterion` (github.com/Peterande/D-FINE,
4a1f73a) and `RTDETRCriterionv2` (github.com/lyuwenyu/RT-DETR, 068dfde) computed in fp64 with the weights of
their configurations: costs, matches, losses and gradients; and the layout of their denoising queries. There,
`Tensor.float` was `Tensor.double`, and the `argsort` of the union was stable. In the same way:
`SetCriterion` (github.com/roboflow/rf-detr, 35ac6ab, and Atten4Vis/LW-DETR, d5e6e6c; losses are sums over the
groups) and `DEIMCriterion` (github.com/Intellindust-AI-Lab/DEIMv2, 0fff8d4).
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from trainer.model.detr.criterion import (
    Criterion,
    Outputs,
    Targets,
    _normal_query_sets,
    ia_bce_loss,
    mal_loss,
    matching_costs,
    varifocal_loss,
)
from trainer.model.detr.denoising import make_denoising_queries
from trainer.model.global_batch import BatchContext, draw_uniform

AUTHORS = json.loads(Path(__file__).with_name("authors.json").read_text())
QUERIES, NOISE = 12, 6
CLASSES = {"vfl": varifocal_loss, "ia_bce": ia_bce_loss, "mal": mal_loss}


class Case(NamedTuple):
    """Recipe of inputs: a network's number of layers, and images."""

    counts: list[int]
    """Targets of each image."""
    layers: int
    scale: float = 4.0
    """Of D-FINE's distributions; 0 for RT-DETRv2."""
    noisy: bool = True
    classes: int = 3
    groups: int = 1
    """Groups of queries, which are further sets of each layer and of the encoder."""
    loss: str = "vfl"
    """Loss of the classes."""
    local: bool = True
    """Whether D-FINE's losses of distributions and its union of matches are used."""


MANY, BETWEEN, NONE = [5, 0, 3, 1], [1, 14], [0, 0]
CASES = {
    "n": Case(MANY, 3),
    "n without noise": Case(MANY, 3, noisy=False),
    "n, more targets than queries": Case(BETWEEN, 3),
    "n without targets": Case(NONE, 3),
    "s": Case([2, 4, 9], 3, classes=5),
    "l": Case(MANY, 6, classes=8),
    "l without noise": Case([7, 6], 6, noisy=False),
    "x": Case([4, 1, 0], 6, scale=8.0),
    "r18": Case(MANY, 3, scale=0.0),
    "r18 without targets": Case(NONE, 3, scale=0.0),
    "r50": Case([2, 4, 9], 6, scale=0.0, classes=5),
    "r50 without noise": Case(BETWEEN, 6, scale=0.0, noisy=False),
    "rfdetr": Case(MANY, 2, scale=0.0, noisy=False, groups=3, loss="ia_bce"),
    "rfdetr without targets": Case(NONE, 2, scale=0.0, noisy=False, groups=3, loss="ia_bce"),
    "rfdetr of two groups": Case(BETWEEN, 3, scale=0.0, noisy=False, classes=5, groups=2, loss="ia_bce"),
    "deimv2 s": Case([2, 4, 9], 4, classes=5, loss="mal"),
    "deimv2 s without targets": Case(NONE, 4, loss="mal"),
    "deimv2 atto": Case(MANY, 3, loss="mal", local=False),
}


class Draw:
    """Numbers in 0..1 in fp64, the same for ever."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, *shape):
        self.seed += 1000
        return draw_uniform(torch.tensor([self.seed]), int(np.prod(shape))).double().view(shape)

    def boxes(self, *shape, smallest=0.05):
        """Center and size."""
        return torch.cat([0.1 + 0.8 * self(*shape, 2), smallest + 0.4 * self(*shape, 2)], dim=-1)


def inputs(name):
    """Outputs of a network, targets, and denoising queries or None."""
    case = CASES[name]
    draw, rows, count = Draw(list(CASES).index(name)), max(1, *case.counts), len(case.counts)
    boxes, labels = draw.boxes(count, rows), (draw(count, rows) * case.classes).long()
    for row, end in enumerate(case.counts):
        boxes[row, end:], labels[row, end:] = 0, -1
    targets = Targets(boxes, labels)
    noise = denoising_queries(case, targets, case.counts) if case.noisy else None
    known = of_the_authors(case, noise)
    queries = QUERIES + known
    sets = case.layers * case.groups + (case.scale > 0)
    # D-FINE's boxes may have a negative size.
    first = draw.boxes(count, 1, queries, smallest=-0.05 if case.scale else 0.1)

    def padded(values):
        """With further queries, where our denoising queries have padding."""
        extra = noise.labels.shape[1] - known if noise else 0
        return torch.cat(
            [values[:, :, :known], values[:, :, :1].expand(-1, -1, extra, -1), values[:, :, known:]], dim=2
        )

    outputs = Outputs(
        logits=padded(4 * draw(count, sets, queries, case.classes) - 3),
        boxes=padded(first + 0.1 * draw(count, sets, queries, 4) - 0.05),
        corners=padded(6 * draw(count, case.layers, queries, 4 * 33) - 3) if case.scale else None,
        references=padded(draw.boxes(count, 1, queries)).expand(-1, case.layers, -1, -1)
        if case.scale
        else None,
        encoder_logits=4 * draw(count, case.groups, QUERIES, case.classes) - 3,
        encoder_boxes=draw.boxes(count, case.groups, QUERIES),
    )
    return outputs, targets, noise


def of_the_authors(case, noise):
    """Denoising queries that the authors have; ours are followed by padding."""
    if not noise or (case.scale and not any(case.counts)):
        return 0  # D-FINE's authors have none without targets.
    return 2 * noise.groups * max(1, *case.counts)


def denoising_queries(case, targets, counts):
    """Of some images of a case, without noise."""
    return make_denoising_queries(
        *targets[:2],
        torch.arange(len(counts)),
        case.classes,
        max(case.counts),
        queries=NOISE,
        label_noise=0.0,
        box_noise=0.0,
        unfold=case.scale > 0,
    )


def whole_part(case):
    """What all images of a case are of the global batch."""
    return BatchContext(torch.zeros(0), case.counts, sum(case.counts), max(case.counts), len(case.counts))


def figures(values):
    """A norm and two projections, which tell a tensor from another."""
    draw = Draw(77)
    flat = values.flatten().double()
    return [flat.norm().item(), *(((draw(len(flat)) - 0.5) @ flat).item() for _ in range(2))]


def same(ours, theirs):
    """Whether figures agree to 1e-6 of the norm, which comes first."""
    assert ours == pytest.approx(theirs, rel=0, abs=1e-6 * max(theirs[0], 1e-3))


def criterion(case):
    weights = {case.loss: 1.0, "bbox": 5.0, "giou": 2.0, "fgl": 0.15, "ddf": 1.5}
    options = {"weights": weights, "classification": CLASSES[case.loss], "groups": case.groups}
    return Criterion(32, case.scale, **options) if case.scale and case.local else Criterion(**options)


def authors_names(name, case, noisy):
    """Their names of our losses, in the order of each vector."""
    layers, before = range(case.layers), ["pre"] if case.scale else []
    ranges = {"fgl": layers, "ddf": layers[:-1]}
    if name in ranges:
        sets, last = [f"aux_{number}" for number in ranges[name]], []
    else:
        sets, last = [*before, *(f"aux_{number}" for number in layers)], ["enc_0"]
    noise = [word.replace("aux", "dn").replace("pre", "dn_pre") for word in sets] if noisy else []
    words = [*noise, *sets, *last]
    return [f"loss_{name}_{word}".removesuffix(f"_aux_{case.layers - 1}") for word in words]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_authors(name):
    case, theirs, (outputs, targets, noise) = CASES[name], AUTHORS[name], inputs(name)
    for values in outputs:
        if values is not None:
            values.requires_grad_()
    losses = criterion(case)(outputs, targets, noise, whole_part(case))
    losses = {kind: values.unflatten(0, (-1, case.groups)).sum(1) for kind, values in losses.items()}
    noisy = len(losses[case.loss]) > case.layers + 2
    named = {
        one: value
        for kind, values in losses.items()
        for one, value in zip(authors_names(kind, case, noisy), values.tolist(), strict=True)
    }
    if noisy and not any("_dn_" in one for one in theirs["losses"]):
        named = {one: value for one, value in named.items() if "_dn_" not in one or value}
    # Theirs has a term for the last layer, which is its own teacher.
    expected = dict(theirs["losses"])
    assert expected.pop(f"loss_ddf_dn_{case.layers - 1}", 0) == 0
    assert named == pytest.approx(expected, rel=1e-6, abs=1e-9)
    torch.cat(list(losses.values())).sum().backward()
    known, padding = of_the_authors(case, noise), noise.labels.shape[1] if noise else 0
    for field, sets in theirs["gradients"].items():
        gradient = getattr(outputs, field).grad
        if field in ("logits", "boxes", "corners"):
            assert not gradient[:, :, known:padding].any()
            gradient = torch.cat([gradient[:, :, :known], gradient[:, :, padding:]], dim=2)
        if gradient is None:  # authors compute them only for these losses
            assert not case.local
            continue
        each = gradient.unbind(1)
        for ours, figure in zip(each, sets, strict=True):
            same(figures(ours), figure)
    if case.scale:
        assert outputs.references.grad is None


@pytest.mark.parametrize("name", CASES)
def test_matches_are_the_authors(name):
    case, theirs, (outputs, targets, _) = CASES[name], AUTHORS[name], inputs(name)
    all_costs = matching_costs(*_normal_query_sets(outputs), targets.boxes, targets.labels)
    matches = criterion(case).start_matching(outputs, targets, case.counts)()
    for number, images in enumerate(theirs["matches"]):
        real = [
            image[number, :, :count].flatten() for image, count in zip(all_costs, case.counts, strict=True)
        ]
        same(figures(torch.cat(real)), theirs["costs"][number])
        for own, pairs in zip(matches.own[:, number], images, strict=True):
            (query,) = np.nonzero(own >= 0)
            assert [query.tolist(), own[query].tolist()] == pairs
    assert (matches.union is None) == (case.scale == 0 or not case.local)
    for row, pairs in enumerate(theirs.get("union", [])):
        assert [[query, target] for query, target in enumerate(matches.union[row, 0]) if target >= 0] == pairs


def test_what_is_not_finite_is_matched_last():
    outputs, targets, _ = inputs("n")
    outputs.logits[0, 0, :-6] = torch.nan
    matches = Criterion(32, 4.0).start_matching(outputs, targets, MANY)()
    assert (matches.own[0, 0, :-6] < 0).all()


@pytest.mark.parametrize("name", [name for name in CASES if "noise" in AUTHORS[name]])
def test_denoising_queries_are_laid_out_as_the_authors_are(name):
    theirs, (_, _, noise) = AUTHORS[name]["noise"], inputs(name)
    if not theirs["queries"]:
        return  # D-FINE's authors have none without targets.
    known, total = theirs["queries"], noise.labels.shape[1]
    assert noise.groups == theirs["groups"] and noise.labels[:, :known].tolist() == theirs["labels"]
    assert (noise.labels[:, known:] == CASES[name].classes).all() and (noise.targets[..., known:] < 0).all()
    for row, queries in enumerate(theirs["positive"]):
        assert (noise.targets[row, 0] >= 0).nonzero()[:, 0].tolist() == queries
    hidden = [[value == "1" for value in row] for row in theirs["hidden"]]
    visible, own = noise.attention_mask(QUERIES), [*range(known), *range(total, total + QUERIES)]
    assert torch.equal(~visible[own][:, own], torch.tensor(hidden))
    assert not visible[own, known:total].any() and visible.any(dim=1).all()
    if any(CASES[name].counts):
        same(figures(noise.references[:, :known]), theirs["references"])


@pytest.mark.parametrize("name", CASES)
def test_slices_add_up_to_the_whole(name):
    case, (outputs, targets, noise) = CASES[name], inputs(name)
    images, computes = len(case.counts), criterion(case)

    def results(slices):
        values = Outputs(*(part if part is None else part.detach().requires_grad_() for part in outputs))
        pieces = []
        for rows in slices:
            one = Outputs(*(part if part is None else part[rows] for part in values))
            pieces.append((one, Targets(targets.boxes[rows], targets.labels[rows]), rows))
        matched = [computes.start_matching(one, aim, case.counts[rows]) for one, aim, rows in pieces]
        count = torch.tensor(sum(found().pairs for found in matched))
        total = 0
        for (one, aim, rows), found in zip(pieces, matched, strict=True):
            part = whole_part(case)._replace(counts=case.counts[rows], matches=found, pair_count=count)
            hidden = noise and denoising_queries(case, aim, part.counts)
            total = total + torch.cat(list(computes(one, aim, hidden, part).values()))
        total.sum().backward()
        return [total, *(part.grad for part in values if part is not None and part.grad is not None)]

    whole = results([slice(0, images)])
    for slices in ([slice(row, row + 1) for row in range(images)], [slice(0, 1), slice(1, images)]):
        for one, expected in zip(results(slices), whole, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)
