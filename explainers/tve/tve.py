"""TVE: a transferable vision explainer that learns meta-attributions (Wang et al., ICML 2024)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_positive, check_range, checks_choices
from explainers.learned.network_explainer import NetworkBuilder, NetworkExplainer, gather_processes
from explainers.learned.sources import MeanLoss, network_inputs
from explainers.learned.trunk import Trunk, small_linear
from explainers.masking import PatchGrid, check_hops, masked_forward, neighbourhoods
from explainers.models import TargetModel
from explainers.models.scores import Score, check_probabilities, log_probabilities
from explainers.runtime.sampling import random_patches, stream, uniform
from explainers.saved.identity import Identity, recipe
from explainers.tve.paper_network import PaperNetwork

HeadScore = Literal["log_probability", "logit"]
Reduction = Literal["sum", "mean"]


def meta_attribution(
    embed: Callable[[Tensor], Tensor], images: Tensor, near: Tensor, grid: PatchGrid, chunk_size: int = 256
) -> Tensor:
    """Definition 1: the embedding of N(z) alone, and the embedding of all other patches.

    >>> images = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> near = torch.tensor([[[True, False, False, False]]])  # N(z) is the first of four patches
    >>> meta_attribution(lambda x: x.sum((2, 3)), images, near, PatchGrid(image_size=2, patch_size=1)).tolist()
    [[[[1.0], [9.0]]]]

    Args:
        embed: G, normalised images (B, C, H, W) → embeddings (B, D).
        images: normalised images, (B, C, H, W).
        near: N(z) of Z patches z of each image; boolean, (B, Z, N).
        grid: the patches.
        chunk_size: maximum number of masked images in memory.

    Returns:
        (B, Z, 2, D): g = G(N(z); x), then h = G(Z(x) \\ N(z); x).
    """
    keep = torch.stack([near, ~near], 2)  # (B, Z, 2, N)
    return masked_forward(embed, images, keep.flatten(1, 2), grid, chunk_size=chunk_size).unflatten(1, (-1, 2))


@checks_choices
def transfer(
    head: Callable[[Tensor], Tensor],
    meta: Tensor,
    h_weight: float = 1.0,
    score: HeadScore = "log_probability",
    classes: Tensor | None = None,
    outputs: Score = "softmax",
) -> Tensor:
    """Definition 2: φ(z) = log H(g; y) − log H(h; y), the attribution of every patch to every class y, or to one.

    >>> meta = torch.tensor([[[[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]]])  # g and h of one patch
    >>> phi = transfer(torch.log, meta)  # with this head, g and h are themselves the probabilities of three classes
    >>> phi.exp().round(decimals=3).tolist()  # their ratios
    [[[2.0], [1.0], [0.5]]]

    Args:
        head: the task's classifier H, embeddings (..., D) → logits (..., K).
        meta: g and h of every patch, (B, N, 2, D).
        h_weight: factor of the second term; the released code has 0.
        score: `log_probability` as in the paper, or `logit` as in the released code.
        classes: the class to explain in each image, (B,); `None` explains all classes.
        outputs: what the logits of H mean.

    Returns:
        (B, K, N), or with `classes` (B, N).
    """
    scores = head(meta).float()  # (B, N, 2, K)
    if score == "log_probability":
        scores = log_probabilities(scores, outputs)
    scores = scores.permute(0, 3, 1, 2) if classes is None else scores[torch.arange(scores.shape[0]), :, :, classes]
    return scores[..., 0] - h_weight * scores[..., 1]


class TVELoss(MeanLoss):
    """Equation 7, a loss (see `sources`): the squared error of the meta-attributions of random patches.

    The patches are drawn anew every epoch. Rows: their indices `patch` (B, Z), and their meta-attributions `meta`
    (B, Z, 2, D).

    Args:
        target: the model whose backbone is G.
        grid: the patches.
        hops: radii of N(z), in patches; of several radii, one is drawn for every patch.
        patches_per_image: Z, number of patches of each image; the released code has 1.
        reduction: reduction of the squared error over D: `sum` as in Equation 7, or `mean` as in the released code.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the draws of patches and radii.
    """

    provides = ("patch", "meta")
    entries = ("image",)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        hops: Sequence[int] = (2,),
        patches_per_image: int = 1,
        reduction: Reduction = "sum",
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        check_hops(hops)
        check_range(1, grid.num_patches, patches_per_image=patches_per_image)
        check_positive(chunk_size=chunk_size)
        self.target = target.eval()
        self.grid = grid
        self.hops = tuple(hops)
        self.patches_per_image = patches_per_image
        self.reduction = reduction
        self.chunk_size = chunk_size
        self.seed = seed
        self.forward_passes = 2 * patches_per_image
        self.near = torch.stack([neighbourhoods(grid, hop) for hop in hops])

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        images, index = batch["image"], batch["index"]
        self.near = self.near.to(images.device)
        seed = stream("patches", self.seed, epoch)
        patch = random_patches(index, self.grid.num_patches, self.patches_per_image, seed)
        counter = index[:, None] * self.grid.num_patches + patch
        hop = (uniform(counter, stream("hops", self.seed, epoch)) * len(self.hops)).long()  # (B, Z)
        normalised = self.target.normalise(images)
        with torch.no_grad():
            meta = meta_attribution(self.target.embed, normalised, self.near[hop, patch], self.grid, self.chunk_size)
        return {"patch": patch, "meta": meta}

    def compute(self, predicted: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The mean over images and their Z patches of the errors of g and h together, for predictions (B, Z, 2, D)."""
        errors = (predicted - rows["meta"]).float().square()
        return (errors.sum(-1) if self.reduction == "sum" else errors.mean(-1)).sum(-1).mean()

    def key(self) -> Identity:
        # Arguments of the loss alone are left out: stored rows stay valid when they change
        own = {"source": "meta-attributions", "target": self.target.backbone_identity()}
        return own | recipe(self, without=(*own, "reduction"))


class LightNetwork(Trunk):
    """A `Trunk`, whose arguments it has, and a linear layer: g and h of every patch from features of the target.

    One forward pass of the target gives both prediction and explanation. The network predicts corrections to trivial
    guesses of g and h: the mean g, and the embedding of the whole image for h. The unit of a correction is the standard
    deviation of g or h from its guess, for each channel (`initialise`).
    """

    mean_g: Tensor
    scale: Tensor

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        blocks: Sequence[int],
        hops: Sequence[int] = (2,),
        width: int = 256,
        depth: int = 2,
    ) -> None:
        super().__init__(target, grid, blocks, hops, width, depth)
        self.write = small_linear(width, 2 * target.embed_dim)
        self.register_buffer("mean_g", torch.zeros(target.embed_dim))
        self.register_buffer("scale", torch.ones(2, target.embed_dim))

    def forward(
        self, images: Tensor | None, embeddings: Tensor, maps: list[Tensor], patches: Tensor | None = None
    ) -> Tensor:
        """Predict meta-attributions, (B, N, 2, D), or (B, Z, 2, D) of given patches.

        Args:
            images: uint8, (B, C, H, W); not used, because every network of TVE is called with the same arguments.
            embeddings: embeddings of the whole images, (B, D).
            maps: feature maps of the `blocks`, (B, N', C) each.
            patches: indices of the patches to predict, (B, Z); `None` for all N.
        """
        tokens = self.tokens(embeddings, maps, patches)
        correction = self.write(tokens).unflatten(-1, (2, -1)) * self.scale  # (B, N or Z, 2, D)
        guess = torch.stack([self.mean_g.expand_as(embeddings), embeddings], 1)  # (B, 2, D)
        return guess[:, None] + correction

    @torch.no_grad()
    def initialise(self, meta: Tensor, embedding: Tensor) -> None:
        """Set the mean g and the units of the corrections from the rows of the first training batch."""
        g, h = meta.float().unbind(2)
        self.mean_g.copy_(g.mean((0, 1)))
        spread = torch.stack([g - self.mean_g, h - embedding[:, None]]).square().mean((1, 2)).sqrt()  # (2, D)
        self.scale.copy_(torch.where(spread > 0, spread, 1))  # with a scale of 0, the weights would get no gradient


class TVE(NetworkExplainer):
    """Predicts the meta-attribution of every patch in one forward pass. `TVELoss` trains it.

    For a target with a fine-tuned backbone (Section 6.3) there are three variants. Fine-tuning takes pre-trained
    `weights` and `allow_finetuned_backbone`. Learning from scratch takes no `weights`. TVE-PT takes the same arguments
    as fine-tuning and is not trained.

    Args:
        target: the model to explain; its `backbone` is G and its `head` is H.
        grid: the patches that are explained.
        network: builds E from the target and the grid: a module with the attribute `blocks` and the methods `forward`
            and `initialise` of `LightNetwork`.
        weights: see `NetworkExplainer`.
        allow_finetuned_backbone: see `NetworkExplainer`.
        hops: radii of N(z), in patches; of several, a training draws one for every patch.
        score: see `transfer`.
        h_weight: see `transfer`.
        pooling: side of the square window that averages the heatmap, in patches; 1 for none. A figure of the released
            code uses 5.
    """

    signed = False  # φ compares a neighbourhood with the rest of the image: below 0, the rest says more
    networks = (LightNetwork, PaperNetwork)
    READING = ("score", "h_weight", "pooling")

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        network: NetworkBuilder,
        weights: str | None = None,
        allow_finetuned_backbone: bool = False,
        hops: Sequence[int] = (2,),
        score: HeadScore = "log_probability",
        h_weight: float = 1.0,
        pooling: int = 1,
    ) -> None:
        check_hops(hops)
        if score == "log_probability":
            check_probabilities(target, "score=log_probability", "set score=logit", "score")
        if pooling < 1 or pooling % 2 == 0:
            raise InputError(f"expected an odd pooling, a window with a patch in its middle, got pooling={pooling}")
        super().__init__(target, grid, network)
        self.reads = network_inputs(target, self.network.blocks)
        self.hops = tuple(hops)
        self.score = score
        self.h_weight = h_weight
        self.pooling = pooling
        self.allow_finetuned_backbone = allow_finetuned_backbone
        if weights is not None:
            self.load(weights)

    def explain_tasks(self, images: Tensor, heads: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Explain the class that each of J classifiers on this backbone predicts, in one pass: (B, J, rows, columns).

        Args:
            images: uint8, (B, C, H, W).
            heads: J classifiers, embeddings (..., D) → logits (..., K); K may differ between them.
        """
        rows = self._rows(images)
        embeddings = self._embeddings(rows)
        meta = self.predict(rows).float()
        with torch.autocast(images.device.type, enabled=False):  # attributions are small differences of logits
            heatmaps = [self._transfer(head, meta, head(embeddings.float()).argmax(-1)) for head in heads]
        return torch.stack(heatmaps, 1)

    def predict(self, rows: dict[str, Tensor]) -> Tensor:
        """Predict g and h of the patches in the row `patch`, (B, Z, 2, D); without it of all of them, (B, N, 2, D)."""
        return self.network(rows.get("image"), rows.get("embedding"), self._feature_maps(rows), rows.get("patch"))

    def build_loss(self, loss: Callable[..., Any]) -> Any:
        return loss(self.target, self.grid, hops=self.hops)

    def initialise(self, rows: dict[str, Tensor], loss: Any) -> None:
        """Initialise an untrained network by the first batches of all processes, in all of them alike."""
        if not self.untrained:
            return
        own = {name: rows[name] for name in ("meta", "embedding") if name in rows}
        gathered = {name: gather_processes(row).view(-1, *row.shape[1:]) for name, row in own.items()}
        self.network.initialise(**gathered)

    def validation_metrics(self) -> dict[str, Any]:
        """The error of log-probabilities that Theorem 1 bounds, and its bound."""
        from explainers.metrics.error_bound import ErrorBound  # here, because explaining images needs no torchmetrics

        return {"theorem1": ErrorBound()}

    def measure(self, metrics: Mapping[str, Any], predicted: Tensor, rows: dict[str, Tensor]) -> None:
        """Update `validation_metrics`, for the predicted classes."""
        classes = self._logits(rows).argmax(-1)[:, None, None, None].expand(*predicted.shape[:3], 1)
        own, exact = (
            log_probabilities(self.target.classify(each), self.target.score).gather(-1, classes)[..., 0]
            for each in (predicted, rows["meta"])
        )
        metrics["theorem1"].update(own, exact)

    def _heatmaps(self, predicted: Tensor, rows: dict[str, Tensor], classes: Tensor | None = None) -> Tensor:
        return self._transfer(self.target.classify, predicted, classes, self.target.score)

    def _transfer(
        self, head: Callable[[Tensor], Tensor], meta: Tensor, classes: Tensor | None, outputs: Score = "softmax"
    ) -> Tensor:
        """Meta-attributions (B, N, 2, D) to heatmaps: of `classes` (B, rows, columns), or all (B, K, rows, columns)."""
        heatmaps = transfer(head, meta, self.h_weight, self.score, classes, outputs).unflatten(-1, self.grid.shape)
        if self.pooling > 1:
            heatmaps = F.avg_pool2d(heatmaps, self.pooling, 1, self.pooling // 2, count_include_pad=False)
        return heatmaps
