"""TVE: a transferable vision explainer that learns meta-attributions (Wang et al., ICML 2024)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, check_range, checks_choices
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.training.network_explainer import NetworkExplainer
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.processes import of_all_processes
from explainers.training.sources import network_inputs
from explainers.tve.light_network import LightNetwork
from explainers.tve.meta_attribution import MetaAttributions, transfer
from explainers.tve.paper_network import PaperNetwork


class TVE(NetworkExplainer):
    """Learns to predict the meta-attribution of every patch in one forward pass.

    For a target with a fine-tuned backbone (Section 6.3) there are three variants. Fine-tuning takes pre-trained
    `weights` and `allow_finetuned_backbone`. Learning from scratch takes no `weights`. TVE-PT takes the same arguments
    as fine-tuning and is not trained.

    Args:
        target: the model to explain; its `backbone` is G and its `head` is H. It is neither trained nor saved.
        grid: the patches that are explained.
        network: builds E from the target and the grid: a module with the attribute `blocks` and the methods `forward`
            and `calibrate` of `LightNetwork`. It keeps its arguments as attributes, see `identity.recipe`.
        optimizer: builds the optimiser from the parameters to train.
        scheduler: builds the schedule from the optimiser and the number of steps.
        weights: file of a trained network (see `export`) to start from.
        allow_finetuned_backbone: accept `weights` that were trained for other weights of the same backbone.
        hops: radii of N(z), in patches, see `MetaAttributions`.
        patches_per_image: patches of each image in a training step; the released code has 1.
        reduction: reduction of the squared error over D: `sum` as in Equation 7, or `mean` as in the released code.
        min_crop: area of the smallest random crop of a training image, as a fraction; `None` for whole images.
        score: see `transfer`.
        h_weight: see `transfer`.
        pooling: side of the square window that averages the heatmap, in patches; 1 for none. A figure of the released
            code uses 5.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the draws of patches and crops.
    """

    signed = False  # φ compares a neighbourhood with the rest of the image: below 0, the rest says more
    networks = (LightNetwork, PaperNetwork)
    TRAINING = {
        **NetworkExplainer.TRAINING,
        "allow_finetuned_backbone": "allows a difference",
        "patches_per_image": "how many patches a step learns from",
        "reduction": "scale of the loss",
    }
    READING = {
        "score": "reads another attribution from the same meta-attributions",
        "h_weight": "reads another attribution from the same meta-attributions",
        "pooling": "averages the heatmap",
    }

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        network: Callable[[TargetModel, PatchGrid], Any],
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
        weights: str | None = None,
        allow_finetuned_backbone: bool = False,
        hops: Sequence[int] = (2,),
        patches_per_image: int = 1,
        reduction: Literal["sum", "mean"] = "sum",
        min_crop: float | None = None,
        score: Literal["log_probability", "logit"] = "log_probability",
        h_weight: float = 1.0,
        pooling: int = 1,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        check_range(1, grid.num_patches, patches_per_image=patches_per_image)
        if pooling < 1 or pooling % 2 == 0:
            raise InputError(f"expected an odd pooling, a window with a patch in its middle, got pooling={pooling}")
        super().__init__(target, grid, network, optimizer, scheduler, min_crop, seed)
        self.meta = MetaAttributions(target, grid, hops, patches_per_image, chunk_size, seed)
        self.reads = network_inputs(target, self.network.blocks)
        self.sources = (self.meta, self.reads)
        self.hops = tuple(hops)
        self.reduction = reduction
        self.score = score
        self.h_weight = h_weight
        self.pooling = pooling
        self.allow_finetuned_backbone = allow_finetuned_backbone
        self.uncalibrated = weights is None
        if weights is not None:
            self.load(weights)

    def explain_tasks(self, images: Tensor, heads: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Explain the class that each of J classifiers on this backbone predicts, in one pass of the network.

        Args:
            images: uint8, (B, C, H, W).
            heads: J classifiers, embeddings (..., D) → logits (..., K); K may differ between them.

        Returns:
            Heatmaps, (B, J, P, P).
        """
        rows = self._rows(images)
        embeddings = self._embeddings(rows)
        meta = self.predict(rows).float()
        with torch.autocast(images.device.type, enabled=False):  # attributions are small differences of logits
            heatmaps = [self._transferred(head, meta, head(embeddings.float()).argmax(-1)) for head in heads]
        return torch.stack(heatmaps, 1)

    def predict(self, rows: dict[str, Tensor]) -> Tensor:
        """Predict meta-attributions with E.

        Args:
            rows: the rows of `reads`, and `patch` (B, Z), the patches to predict for; all of them without that row.

        Returns:
            g and h of the patches, (B, Z, 2, D), or (B, N, 2, D).
        """
        return self.network(rows.get("image"), rows.get("embedding"), self._feature_maps(rows), rows.get("patch"))

    def loss(self, predicted: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Equation 7 over Z patches of each image, whose exact meta-attributions are `meta` (B, Z, 2, D)."""
        errors = (predicted - rows["meta"]).float().square()
        return (errors.sum(-1) if self.reduction == "sum" else errors.mean(-1)).sum(-1).mean()

    def calibrate(self, rows: dict[str, Tensor]) -> None:
        """Calibrate the network on the first batches of all processes, so that all of them get the same result."""
        own = {name: rows[name] for name in ("meta", "embedding") if name in rows}
        gathered = {name: of_all_processes(row).view(-1, *row.shape[1:]) for name, row in own.items()}
        self.network.calibrate(**gathered)

    def validation_metrics(self) -> dict[str, Any]:
        """The error of log-probabilities, and its bound."""
        from explainers.metrics.error_bound import ErrorBound  # here, because explaining images needs no torchmetrics

        return {"theorem1": ErrorBound()}

    def measure(self, metrics: Mapping[str, Any], predicted: Tensor, rows: dict[str, Tensor]) -> None:
        """Measure the error of log-probabilities that Theorem 1 bounds, for the predicted classes."""
        classes = self._logits(rows).argmax(-1)[:, None, None, None].expand(*predicted.shape[:3], 1)
        log_probabilities = [
            self.target.classify(meta).log_softmax(-1).gather(-1, classes)[..., 0] for meta in (predicted, rows["meta"])
        ]
        metrics["theorem1"].update(*log_probabilities)

    def _heatmaps(self, predicted: Tensor, rows: dict[str, Tensor], classes: Tensor | None = None) -> Tensor:
        return self._transferred(self.target.classify, predicted, classes)

    def _transferred(self, head: Callable[[Tensor], Tensor], meta: Tensor, classes: Tensor | None) -> Tensor:
        """Meta-attributions (B, N, 2, D) → heatmaps of `classes` (B,): (B, P, P); or of every class: (B, K, P, P)."""
        heatmaps = transfer(head, meta, self.h_weight, self.score, classes).unflatten(-1, (self.grid.side, -1))
        if self.pooling > 1:
            heatmaps = F.avg_pool2d(heatmaps, self.pooling, 1, self.pooling // 2, count_include_pad=False)
        return heatmaps
