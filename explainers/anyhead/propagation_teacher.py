"""Attributions of random functionals by a white-box method: exact, and linear in the functional."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.anyhead.functionals import Functionals, random_functionals
from explainers.errors import InputError, check_positive, checks_choices
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.functionals import class_rows
from explainers.posthoc import build
from explainers.sampling import stream
from explainers.saved.identity import Identity, recipe

Objective = Literal["squared", "correlation"]
TINY = 1e-8  # least variance of attributions that is divided by


@checks_choices
def attribution_loss(
    vectors: Tensor, functionals: Tensor, attributions: Tensor, objective: Objective = "squared"
) -> Tensor:
    """Compare v · c_z with the attributions of a teacher, with equal weights for all functionals.

    `squared` is the mean of (v · c_z − a_z)² over patches, divided by the variance of a_z over patches: a constant
    map scores at least 1. `correlation` is 1 − Pearson's correlation over patches, which ignores scale and offset.

    Args:
        vectors: c_z, (B, N, D).
        functionals: v, (B, V, D).
        attributions: a_z(v), (B, V, N).
        objective: what is compared.

    >>> vectors, v = torch.tensor([[[1.0], [2.0], [6.0]]]), torch.tensor([[[2.0]]])
    >>> attribution_loss(vectors, v, torch.tensor([[[2.0, 4.0, 12.0]]])).item()
    0.0
    """
    with torch.autocast(vectors.device.type, enabled=False):
        predicted = functionals @ vectors.float().mT  # (B, V, N)
    wanted = attributions - attributions.mean(-1, keepdim=True)
    if objective == "squared":
        errors = (predicted - attributions).square().mean(-1)
        return (errors / wanted.square().mean(-1).clamp(min=TINY)).mean()
    predicted = predicted - predicted.mean(-1, keepdim=True)
    return 1 - F.cosine_similarity(predicted, wanted, dim=-1, eps=TINY).mean()


class PropagationTeacher:
    """A teacher: a source (see `sources`) of attributions of random functionals v · G(x), drawn anew every epoch.

    If the rules of the backward pass depend on forward activations alone, the attribution of a patch is v · c_z with a
    vector c_z of the image, which the student learns. The V functionals of an image share one forward pass.

    Rows: `functional` (B, V, D), and `attribution` (B, V, N), the heatmap of each of them.

    Args:
        target: the model whose backbone is G, a timm transformer. The rows of its head are used for functionals.
        grid: the patches.
        method: name of the white-box method, see `posthoc.build`, such as `DecompX-PLUS`.
        functionals: the kinds of the V functionals of an image, see `random_functionals`.
        objective: see `attribution_loss`.
        chunk_size: maximum number of images in memory.
        seed: seed of the draws.

    Raises:
        InputError: for a method that is not linear in v.
    """

    ratios = 1
    provides = ("functional", "attribution")
    entries = ("image",)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        method: str = "DecompX-PLUS",
        functionals: Functionals = ("predicted", "other", "difference", "mixture"),
        objective: Objective = "squared",
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
        self.objective = objective
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

    def loss(self, vectors: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The error of predicted vectors c_z (B, N, D), see `attribution_loss`."""
        return attribution_loss(vectors, rows["functional"], rows["attribution"], self.objective)

    def loss_sums(self, vectors: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, int]:
        """The sum of the errors of the images, and their number."""
        return self.loss(vectors, rows) * len(vectors), len(vectors)

    def unit(self, rows: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the entries of c_z that gives attributions the spread of the teacher's."""
        return rows["attribution"].std(-1).mean()

    def key(self) -> Identity:
        own = {"source": f"attributions by {self.method}", "target": self.target.identity()}
        return recipe(self, without=(*own, "objective")) | own
