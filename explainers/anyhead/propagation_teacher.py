"""Attributions of random functionals by a white-box method: exact, and linear in the functional."""

from typing import Any

import torch
from torch import Tensor

from explainers.anyhead.functionals import Functionals, random_functionals
from explainers.errors import InputError, check_positive, checks_choices
from explainers.learned.sources import MeanLoss
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.functionals import class_rows
from explainers.posthoc import build
from explainers.runtime.sampling import stream
from explainers.saved.identity import Identity, recipe


def attribution_loss(vectors: Tensor, functionals: Tensor, attributions: Tensor) -> Tensor:
    """Compare v · c_z with the attributions of a teacher, with equal weights for all functionals.

    The loss is the mean of (v · c_z − a_z)² over patches, divided by the variance of a_z over patches: a constant map
    scores at least 1.

    Args:
        vectors: c_z, (B, N, D).
        functionals: v, (B, V, D).
        attributions: a_z(v), (B, V, N).

    >>> vectors, v = torch.tensor([[[1.0], [2.0], [6.0]]]), torch.tensor([[[2.0]]])
    >>> attribution_loss(vectors, v, torch.tensor([[[2.0, 4.0, 12.0]]])).item()
    0.0
    """
    with torch.autocast(vectors.device.type, enabled=False):
        predicted = functionals @ vectors.float().mT  # (B, V, N)
    variance = (attributions - attributions.mean(-1, keepdim=True)).square().mean(-1)
    return ((predicted - attributions).square().mean(-1) / variance.clamp(min=1e-8)).mean()


class PropagationTeacher(MeanLoss):
    """A teacher: a source (see `sources`) of attributions of random functionals v · G(x), drawn anew every epoch.

    If the rules of the backward pass depend on forward activations alone, the attribution of a patch is v · c_z with a
    vector c_z of the image, which the network learns. The V functionals of an image share one forward pass.
    Rows: `functional` (B, V, D), and `attribution` (B, V, N), the heatmap of each of them.

    Args:
        target: the model whose backbone is G, a timm transformer. The rows of its head are used for functionals.
        grid: the patches.
        method: name of the white-box method, see `posthoc.build`, such as `DecompX-PLUS`.
        functionals: the kinds of the V functionals of an image, see `random_functionals`.
        chunk_size: maximum number of images in memory.
        seed: seed of the draws.

    Raises:
        InputError: for a method that is not linear in v.
    """

    provides = ("functional", "attribution")
    entries = ("image",)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        method: str = "DecompX-PLUS",
        functionals: Functionals = ("predicted", "other", "difference", "mixture"),
        chunk_size: int = 16,
        seed: int = 0,
    ) -> None:
        check_positive(chunk_size=chunk_size)
        if not functionals:
            raise InputError("expected at least one kind of functionals, got none")
        if target.num_classes < 2 and set(functionals) != {"isotropic"}:
            raise InputError(
                f"expected a head of at least 2 classes, whose rows are functionals, got {target.num_classes}: set"
                " functionals=[isotropic]"
            )
        self.teacher: Any = build(method, target.eval(), grid)
        if not getattr(self.teacher, "linear", False):
            raise InputError(
                f"expected a method whose heatmaps are linear in what they explain, such as DecompX-PLUS, got {method}"
            )
        self.target = target
        self.grid = grid
        self.method = method
        self.functionals = tuple(functionals)
        self.chunk_size = chunk_size
        self.seed = seed
        self.forward_passes = 1 + 2 * len(functionals)  # a backward pass costs about two forward passes

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        seed = stream("functionals", self.seed, epoch)
        rows = class_rows(self.target.head, self.target.embed_dim, self.target.mean, directions=True)
        functionals = []
        attributions = []
        for i in range(0, len(batch["index"]), self.chunk_size):
            index = batch["index"][i : i + self.chunk_size]

            def draw(embeddings: Tensor, index: Tensor = index) -> Tensor:
                logits = self.target.classify(embeddings.detach())
                functionals.append(random_functionals(self.functionals, rows, logits, index, seed))
                return functionals[-1]

            attributions.append(self.teacher.explain_all(batch["image"][i : i + self.chunk_size], draw).flatten(2))
        return {"functional": torch.cat(functionals), "attribution": torch.cat(attributions)}

    def compute(self, predicted: Tensor, rows: dict[str, Tensor]) -> Tensor:
        return attribution_loss(predicted, rows["functional"], rows["attribution"])

    def unit(self, rows: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the entries of c_z that gives attributions the spread of the teacher's."""
        return rows["attribution"].std(-1).mean()

    def key(self) -> Identity:
        own = {"source": f"attributions by {self.method}", "target": self.target.identity()}
        return recipe(self, without=own) | own
