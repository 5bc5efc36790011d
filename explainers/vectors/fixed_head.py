"""Fixed heads: one projection computes logits from an image's embedding, and attributions from its patch embeddings.

A self-explaining model is trained with a fixed head, so that the backbone holds everything that is learned, and
arithmetic on the backbone's weights can transfer it (Yoshikawa et al., 2025).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import InputError, checks_choices
from explainers.masking import PatchGrid, map_shape
from explainers.models import TargetModel
from explainers.models.heads import ProjectedHead
from explainers.saved.identity import Identity
from explainers.saved.weights import quote
from explainers.transformer.blocks import find_blocks
from explainers.transformer.direct_paths import direct_paths
from explainers.transformer.path_flow import FlowRecord, count_patches, record_flow, sum_paths

Reading = Literal["patch", "difference", "blank_patch"]

READING = {"reading": "|".join(get_args(Reading)), "blocks": "list"}
"""What the header of a file says of a head that reads patches."""


class FixedHead(ProjectedHead):
    """A head whose projection also attributes the logits to patches.

    >>> head = FixedHead(torch.eye(2), scale=10.0)
    >>> head(torch.tensor([[0.0, 4.0]])).tolist()  # the logits of one image
    [[0.0, 10.0]]
    >>> head.attributions(torch.tensor([[[0.0, 4.0]]]), torch.tensor([[1.0, 0.0]])).tolist()  # of one patch
    [[[0.0, 1.0]]]

    With `blocks`, a patch is also read from untrained paths to the embedding: c_z = s a_0 (token − blank) + a_1 f_z
    + Σ_l a_l r_lz, for the factor s, the direct path r_lz of block l, the flow f_z of all paths, see `path_flow`, and
    weights a, which are learned with the backbone. The paths are constants, so that they cost no backward pass.

    Args:
        weight: W, (K, D'); this and the next four: see `ProjectedHead`.
        reading: how a patch becomes attributions. `patch`: its embedding is treated as the embedding of an image.
            `difference`: the embedding of a blank image is subtracted first, and the length of the image's embedding
            replaces the patch's own, so that a patch without a contribution has attributions of 0. `blank_patch`: the
            same with the embeddings of the patches of a blank image, so that a blank image has attributions of 0.
        patch_scale: s, factor of the attributions.
        blocks: indices of the blocks whose paths are read too, the last ones in ascending order.
        read_out: the weights a, of the token, of the flow and of each block's direct path; `None` for what fits the
            embeddings of masked images best on ViT-Tiny before training, and little of the token.
    """

    patch_scale: Tensor
    read_out: nn.Parameter | None

    @checks_choices
    def __init__(
        self,
        weight: Tensor,
        projection: Tensor | None = None,
        normalise: bool = True,
        scale: float = 1.0,
        bias: Tensor | None = None,
        reading: Reading = "patch",
        patch_scale: float = 1.0,
        blocks: Sequence[int] = (),
        read_out: Tensor | Sequence[float] | None = None,
    ) -> None:
        super().__init__(weight, projection, normalise, scale, bias)
        self.register_buffer("patch_scale", torch.tensor(patch_scale, dtype=torch.float32, device=weight.device))
        if blocks and reading == "patch":
            raise InputError("path_blocks needs reading=difference or blank_patch, got reading=patch", "reading")
        self.reading: Reading = reading
        self.blocks = tuple(blocks)
        weights = [0.1, 0.4, *[0.5] * len(blocks)] if read_out is None else read_out
        weights = torch.as_tensor(weights, dtype=torch.float32, device=weight.device)
        self.read_out = nn.Parameter(weights.detach().clone()) if blocks else None

    @torch.no_grad()
    def scale_attributions(self, factor: float) -> None:
        """Multiply all attributions by a factor."""
        (self.patch_scale if self.read_out is None else self.read_out).mul_(factor)

    def describe_reading(self) -> Identity:
        """How patches are read: the arguments of `read_as`, as JSON values."""
        weights = None if self.read_out is None else self.read_out.tolist()
        own = {"reading": self.reading, "patch_scale": self.patch_scale.item()}
        return own | {"blocks": list(self.blocks), "read_out": weights}

    def read_as(
        self,
        reading: Reading,
        patch_scale: float,
        blocks: Sequence[int] = (),
        read_out: Sequence[float] | None = None,
    ) -> "FixedHead":
        """Build the head of the same logits that reads patches otherwise; for the arguments, see the class."""
        own = self.weight, self.projection, self.normalise, self.scale.item(), self.bias
        return FixedHead(*own, reading, patch_scale, blocks, read_out)

    def extra_repr(self) -> str:
        """The options that the state dict does not hold."""
        return f"{super().extra_repr()}, reading={self.reading}"

    def attributions(self, patches: Tensor, embeddings: Tensor, paths: Tensor | None = None) -> Tensor:
        """Compute the attributions of every patch to every class, (B, N, K).

        Args:
            patches: patch embeddings, (B, N, D); unless the reading is `patch`, minus those of a blank image.
            embeddings: embeddings of the images, (B, D). Attributions of differences are parts of the logits, and so
                they have the factor of the logits and are divided by the length of the image's embedding.
            paths: the weighted sum of the paths of every patch, (B, N, D), of a head that reads them.
        """
        vectors = self.vectors(patches, paths)
        if self.reading != "patch":
            vectors = self.scale * vectors
            if self.normalise:
                vectors = vectors / self.project(embeddings, False).norm(dim=-1)[:, None, None]
        return F.linear(vectors, self.weight)

    def vectors(self, patches: Tensor, paths: Tensor | None = None) -> Tensor:
        """Compute the vectors c_z of patches, (B, N, D'); their products with the rows of W are attributions."""
        vectors = self.patch_scale * self.project(patches, self.normalise and self.reading == "patch")
        if paths is None or self.read_out is None:
            return vectors
        return self.read_out[0] * vectors + self.project(paths, False)


def check_reading(reading: Identity, target: TargetModel, path: str | Path) -> None:
    """Raise an InputError unless the `blocks` and the `read_out` in the header of a file fit a target."""
    blocks, weights = reading["blocks"], reading["read_out"]
    known = [*range(len(find_blocks(target)))] if blocks and reading["reading"] != "patch" else []
    if blocks != known[len(known) - len(blocks) :] or blocks and (not weights or len(weights) != len(blocks) + 2):
        raise InputError(
            f"{path}: expected the last of {len(known)} blocks for head.blocks, and a weight for each and two more for"
            f" head.read_out, got {quote(blocks)} and {quote(weights)}: give another file"
        )


def fix_own_head(target: TargetModel) -> FixedHead:
    """Fix a model's own head. The rows of a linear one are centred before a softmax, whose probabilities this keeps."""
    head = target.head
    if isinstance(head, ProjectedHead):
        return FixedHead(head.weight, head.projection, head.normalise, head.scale.item(), head.bias)
    if not isinstance(head, nn.Linear):
        raise InputError(
            f"expected a linear head to keep, got {type(head).__name__} of {target.name}: fit one with"
            " `python train.py experiment=linear_head`; a training also takes projection=",
            "projection",
        )
    weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
    if target.score == "softmax":
        weight, bias = weight - weight.mean(0), None if bias is None else bias - bias.mean()
    return FixedHead(weight, normalise=False, bias=bias)


def fix_projected_head(target: TargetModel, weight: Tensor, scale: float = 1.0) -> FixedHead:
    """Fix a head that multiplies a model's embeddings, divided by their lengths, by W, (K, D').

    If D' is not D, the width of the embeddings, the model's own head projects them to D' first, as CLIP's does.

    Raises:
        InputError: if neither the model's embeddings nor the outputs of its own head have the width of W.
    """
    if weight.shape[1] == target.embed_dim:
        return FixedHead(weight, scale=scale)
    projection = getattr(target.head, "weight", torch.empty(0)).detach()
    if projection.shape[:1] != weight.shape[1:]:
        raise InputError(
            f"expected W for embeddings of width {target.embed_dim}, or a model that projects them to"
            f" {weight.shape[1]}, got a head of {list(projection.shape)}: take CLIP's own image tower"
        )
    return FixedHead(weight, projection, scale=scale)


def embed_as_read(target: TargetModel, grid: PatchGrid, images: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Embed uint8 images (B, C, H, W) and their patches, for a model with a `FixedHead`.

    Returns:
        The embeddings of the images, (B, D), and what the head reads of the patches, float32: their embeddings minus
        the embedding or the patches of a blank image, and of a head with paths a_1 f_z + Σ_l a_l r_lz, (B, N, D) each.
    """
    grid.check(images)
    head, normalised = target.head, target.normalise(images)
    if head.reading == "patch":
        embeddings, patches = target.embed_with_patches(normalised)
        return embeddings, patch_means(patches.float(), grid.shape), None
    with_blank = torch.cat([normalised, torch.zeros_like(normalised[:1])])  # 0 is the mean colour
    with record_flow(target, head.blocks) if head.blocks else nullcontext() as record:
        embeddings, patches = target.embed_with_patches(with_blank)
    means = patch_means(patches.float(), grid.shape)
    blank = means[-1:] if head.reading == "blank_patch" else embeddings[-1:, None].float()
    paths = None
    if record is not None:
        paths = patch_means(weigh_paths(target, record, head.read_out[1:])[:-1], grid.shape)
    return embeddings[:-1], means[:-1] - blank, paths


def weigh_paths(target: TargetModel, record: FlowRecord, weights: Tensor) -> Tensor:
    """Compute a_1 f_z + Σ_l a_l r_lz of all patches z, (B, N', D), for weights a (1 + L,) of L recorded blocks.

    f_z = rel_l of the first recorded block l, which what passes through all later ones has reached, see `path_flow`.
    """
    count = len(record.blocks)
    first = torch.eye(count)[0].to(record.final.device).expand(len(record.final), count_patches(target, record), -1)
    flow = sum_paths(target, record, weights=first)
    paths = torch.cat([flow[:, None], direct_paths(target, record)], 1)
    return torch.einsum("l,blnd->bnd", weights.float(), paths.float())


def patch_means(patches: Tensor, shape: tuple[int, int]) -> Tensor:
    """Average the patch embeddings (B, N', D) of a fine grid over the patches of a coarser one: (B, N, D).

    >>> patch_means(torch.arange(16.0).view(1, 16, 1), shape=(2, 2)).flatten().tolist()  # (0 + 1 + 4 + 5) / 4 ...
    [2.5, 4.5, 10.5, 12.5]

    Raises:
        InputError: if rows and columns of the fine grid are not multiples of `shape`, those of the coarser one.
    """
    (rows, columns), own = shape, map_shape(patches.shape[1], shape)
    if own[0] % rows or own[1] % columns:
        raise InputError(
            f"expected a grid that {own[0]} x {own[1]} patches of the model fit in, got {rows} x {columns}: set"
            " grid.patch_size"
        )
    blocks = patches.unflatten(1, (rows, own[0] // rows, columns, own[1] // columns))
    return blocks.mean((2, 4)).flatten(1, 2)


def select_explained(attributions: Tensor, rows: dict[str, Tensor]) -> Tensor:
    """Select the attributions to the class that a source of labels, such as `ShapleyLabels`, explains in each image.

    >>> attributions = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # of two patches to two classes
    >>> select_explained(attributions, {"explained": torch.tensor([1])}).tolist()
    [[2.0, 4.0]]

    Args:
        attributions: attributions to all classes, (B, N, K).
        rows: the rows of `ShapleyLabels`; without `explained` (B,), all classes are explained.
    """
    if "explained" not in rows:
        return attributions
    return attributions.take_along_dim(rows["explained"][:, None, None], -1)[..., 0]
