"""TVE: a transferable vision explainer that learns meta-attributions (Wang et al., ICML 2024)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, checks_choices
from explainers.masking import PatchGrid, check_hops
from explainers.models import TargetModel
from explainers.training.network_explainer import NetworkBuilder, NetworkExplainer, of_all_processes
from explainers.training.sources import network_inputs
from explainers.tve.light_network import LightNetwork
from explainers.tve.meta_attribution import Score, transfer
from explainers.tve.paper_network import PaperNetwork


class TVE(NetworkExplainer):
    """Predicts the meta-attribution of every patch in one forward pass. `TVELoss` trains it.

    For a target with a fine-tuned backbone (Section 6.3) there are three variants. Fine-tuning takes pre-trained
    `weights` and `allow_finetuned_backbone`. Learning from scratch takes no `weights`. TVE-PT takes the same arguments
    as fine-tuning and is not trained.

    Args:
        target: the model to explain; its `backbone` is G and its `head` is H.
        grid: the patches that are explained.
        network: builds E from the target and the grid: a module with the attribute `blocks` and the methods `forward`
            and `calibrate` of `LightNetwork`.
        weights: file of a trained network (see `export`).
        allow_finetuned_backbone: accept `weights` that were trained for other weights of the same backbone.
        hops: radii of N(z), in patches; of several, a training draws one for every patch.
        score: `log_probability` of the class as in Definition 2, or `logit` as in the released code.
        h_weight: factor of the second term of Definition 2; the released code has 0.
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
        score: Score = "log_probability",
        h_weight: float = 1.0,
        pooling: int = 1,
    ) -> None:
        check_hops(hops)
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

    def build_loss(self, loss: Callable[..., Any]) -> Any:
        return loss(self.target, self.grid, self.hops)

    def calibrate(self, rows: dict[str, Tensor], loss: Any) -> None:
        """Calibrate an untrained network on the first batches of all processes, with the same result in all of them."""
        if not self.untrained:
            return
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
