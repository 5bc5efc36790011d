"""Embeddings of masked images, and the least-squares fit of the embedding by a sum over visible patches."""

from typing import Literal

import torch
from torch import Tensor, nn

from explainers.decomposition.functionals import class_rows
from explainers.errors import check_positive, check_range, checks_choices
from explainers.identity import Identity, recipe
from explainers.masking import PatchGrid, Removal
from explainers.removal import masked_outputs
from explainers.sampling import shapley_coalitions, shapley_weights, stream
from explainers.shapley.module import efficient
from explainers.target import TargetModel

Fit = Literal["uniform", "shapley"]
POWERS = {"uniform": 0.0, "shapley": 0.5}


@checks_choices
def coalition_errors(vectors: Tensor, rows: dict[str, Tensor], fit: Fit) -> tuple[Tensor, Tensor]:
    """Compute G(x_S) − Σ_{z ∈ S} c_z for all coalitions S, and G(x_S) itself, both relative to the same constant.

    With the weights of `shapley`, the vectors that minimise the squared error over all coalitions are the Shapley
    values of the embedding (Charnes et al., 1988). Shapley values are linear in the game: v · c_z are those of v · G.

    Args:
        vectors: c_z, (B, N, D).
        rows: the rows of `Coalitions`.
        fit: `shapley`: c_z are first shifted to sum to G(x) − G(x_∅), and the constant is G(x_∅). `uniform`: the
            constant is the best one of each image.

    Returns:
        Errors, and embeddings, (B, M, D) each, times the square root of the weight of each coalition.
    """
    keep, seen = rows["keep"].to(vectors.dtype), rows["seen"]
    if fit == "shapley":
        vectors = efficient(vectors, rows["blank"], rows["whole"])
        seen = seen - rows["blank"][:, None]
        errors, root = seen - keep @ vectors, rows["weight"].sqrt()[..., None]
        return root * errors, root * seen
    errors = seen - keep @ vectors
    return errors - errors.mean(1, keepdim=True), seen - seen.mean(1, keepdim=True)


def coalition_loss(errors: Tensor, seen: Tensor, rows: Tensor, classes: Tensor) -> Tensor:
    """Compute the part of the variance of logits of masked images that is not explained: 1 for vectors of 0, `uniform`.

    It is the mean of two parts, of the logits of all classes and of the logit of one class of each image. Variances are
    summed over images and coalitions before they are compared: an image that no mask changes does not count.

    Args:
        errors: (B, M, D), see `coalition_errors`.
        seen: (B, M, D).
        rows: the functionals of the classes, relative to their mean, (K, D).
        classes: (B,).
    """
    sums = []
    for each in (errors, seen):
        squares = (each @ rows.mT).square()  # (B, M, K)
        sums.append(torch.stack([squares.sum(), squares[torch.arange(len(squares)), :, classes].sum()]))
    return (sums[0] / sums[1].clamp(min=1e-8)).mean()


class Coalitions:
    """A teacher: a source (see `sources`) of G(x_S), the embeddings of images with only a coalition S of patches.

    It needs no backward pass, and a backbone of any kind. One embedding teaches the attributions of all functionals.

    Rows: `keep` (B, M, N), coalitions, drawn anew every epoch; `seen` (B, M, D), their embeddings; `weight` (B, M), see
    `shapley_weights`; `blank` and `whole`, (B, D) each, the embeddings of no patch and of all patches.

    Args:
        target: the model whose backbone is G. The loss reads its head.
        grid: the patches.
        count: M, at least 2 coalitions of each image; the second of each pair is the complement of the first.
        fit: `uniform`: all sizes of coalitions are equally likely, as on the curves of Fidelity. `shapley`: they are
            weighed by the Shapley kernel.
        removal: what replaces the patches outside S, see `Removal`.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the draws.
    """

    provides = ("keep", "seen", "weight", "blank", "whole")
    entries = ("image",)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        count: int = 8,
        fit: Fit = "uniform",
        removal: Removal = "zero",
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        check_range(2, count=count)  # one has no variance
        check_positive(chunk_size=chunk_size)
        self.target, self.grid, self.count, self.fit, self.removal = target, grid, count, fit, removal
        self.chunk_size, self.seed = chunk_size, seed
        self.forward_passes = count + 1

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        seed, power = stream("coalitions", self.seed, epoch), POWERS[self.fit]
        keep = shapley_coalitions(batch["index"], self.grid.num_patches, self.count, seed, power=power)
        with torch.no_grad():
            normalised = self.target.normalise(batch["image"])
            seen = self._embed(normalised, torch.cat([keep, torch.ones_like(keep[:, :1])], 1))
            blank = self._embed(normalised[:1], torch.zeros_like(keep[:1, :1]))[0].expand(len(keep), -1)
        weight = shapley_weights(keep, power)
        return {"keep": keep, "seen": seen[:, :-1], "weight": weight, "blank": blank, "whole": seen[:, -1]}

    def _embed(self, normalised: Tensor, keep: Tensor) -> Tensor:
        outputs = masked_outputs(self.target, nn.Identity(), normalised, keep, self.grid, self.removal, self.chunk_size)
        return outputs.float()

    def loss(self, vectors: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The error of predicted vectors c_z (B, N, D), see `coalition_loss`; the class is the predicted one."""
        head = class_rows(self.target.head, self.target.embed_dim, vectors)
        classes = self.target.classify(rows["whole"]).argmax(-1)
        with torch.autocast(vectors.device.type, enabled=False):  # sums over all patches
            return coalition_loss(*coalition_errors(vectors.float(), rows, self.fit), head - head.mean(0), classes)

    def unit(self, rows: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the entries of c_z with which their sums vary as much as the embeddings."""
        return rows["seen"].std(1).mean() / self.grid.num_patches**0.5

    def key(self) -> Identity:
        own = {"source": "embeddings of coalitions", "target": self.target.backbone_identity()}
        return own | recipe(self, without=own)
