"""AnyHead: one vector c_z of every patch, whose product with v attributes v · G(x)."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from explainers.anyhead.network import AnyHeadNetwork
from explainers.errors import check_positive, check_range
from explainers.learned.network_explainer import NetworkBuilder, NetworkExplainer, gather_processes
from explainers.learned.sources import Features, Loss
from explainers.learned.trunk import Decomposition, at_patches
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.functionals import choose_temperature, head_functionals
from explainers.models.inputs import Functionals, resolve_functionals, validate_classes
from explainers.transformer.path_flow import count_patches, prefer_sums, read_paths, sum_paths
from explainers.transformer.recording import Record
from explainers.transformer.stage_paths import StageRecord


class Teacher(Loss, Protocol):
    """A loss of predicted vectors c_z (B, N, D)."""

    def unit(self, rows: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the entries of c_z that an untrained network should predict."""
        ...


class AnyHead(NetworkExplainer):
    """Decomposes the embedding into vectors c_z of its patches, in one forward pass of the target.

    v · c_z attributes the linear functional v · G(x). So the vectors explain every class of every linear or cosine head
    on the backbone, including heads that did not exist in training. The teacher that a training has as its loss
    defines what c_z means.

    Args:
        target: the model to explain.
        grid: the patches that are explained.
        network: builds the network that predicts c_z, from the target and the grid.
        weights: see `NetworkExplainer`.
        allow_finetuned_backbone: see `NetworkExplainer`.
        temperature: t of the score z_y − t log Σ_{k ≠ y} exp(z_k / t) that is explained, for logits z. 1: the log-odds
            of the class; infinity: its logit relative to the mean of the others; `None`: its logit.
        blend: in eval mode, share of the untrained network, which adds all paths with weight 1, from 0 to 1; the errors
            of the two partly cancel (after WiSE-FT, Wortsman et al., 2022). Without paths it has no effect.
    """

    networks = (AnyHeadNetwork,)
    reads: Features
    READING = ("temperature", "blend")

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        network: NetworkBuilder,
        weights: str | None = None,
        allow_finetuned_backbone: bool = False,
        temperature: float | None = None,
        blend: float = 0.0,
    ) -> None:
        if temperature is not None:
            check_positive(temperature=temperature)
        check_range(0, 1, blend=blend)
        super().__init__(target, grid, network)
        self.temperature = temperature
        self.blend = blend
        self.reads = Features(target, self.network.blocks, self.network.direct, self.network.paths)
        self.allow_finetuned_backbone = allow_finetuned_backbone
        if weights is not None:
            self.load(weights)

    def decompose(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute c_z (B, N, D) and the embeddings (B, D) of uint8 images (B, C, H, W), in one pass."""
        rows = self._rows(images)
        return self.predict(rows), rows["embedding"]

    @torch.no_grad()
    def decompose_lazily(self, images: Tensor) -> Decomposition:
        """Decompose images as `decompose` does, but compute only what a caller asks for; few patches are faster."""
        self.grid.check(images)
        rows, record = self.reads.read(images)
        target, network, blend = self.target, self.network, self._blend
        tokens = network.read_tokens(rows["embedding"], self._feature_maps(rows))

        def products(functionals: Tensor) -> Tensor:
            paths = None if record is None else read_paths(target, record, functionals)
            return network.write_vectors(tokens, paths, functionals, blend).float().mT

        def vectors(patches: Tensor) -> Tensor:
            if record is not None and count_patches(target, record) != self.grid.num_patches:
                return at_patches(network.write_vectors(tokens, read_paths(target, record), blend=blend), patches)
            own = at_patches(tokens, patches)
            found = network.write_vectors(own, blend=blend)
            if record is None:
                return found
            return found + network.scale * sum_paths(target, record, patches, network.weigh_paths(own, blend))

        return rows["embedding"], products, vectors

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted, in images (B, C, H, W): heatmaps (B, rows, columns).

        For further classes of the same images, `prepare` of the base class computes all vectors c_z once.
        """

        def functionals_of(rows: dict[str, Tensor]) -> Tensor:
            wanted = self._logits(rows).argmax(-1) if classes is None else classes
            return self._functionals(rows, validate_classes(wanted, images, self.target.num_classes))[:, None]

        return self._explain_functionals(images, functionals_of)[:, 0]

    def all_classes(self, images: Tensor) -> Tensor:
        """Explain every class of uint8 images (B, C, H, W): heatmaps (B, K, rows, columns)."""
        return self._explain_functionals(images, self._functionals)

    def explain(self, images: Tensor, functionals: Functionals) -> Tensor:
        """Explain linear functionals v · G(x) of the embedding of uint8 images (B, C, H, W).

        Args:
            images: uint8, (B, C, H, W).
            functionals: v, (B, D): heatmaps (B, rows, columns); or (B, V, D), or a function of the embeddings (B, D) →
                (B, V, D): heatmaps (B, V, rows, columns).
        """
        self.grid.check(images)
        of_embeddings = resolve_functionals(functionals, images, self.target.embed_dim)
        heatmaps = self._explain_functionals(images, lambda rows: of_embeddings(rows["embedding"].float()))
        return heatmaps[:, 0] if isinstance(functionals, Tensor) and functionals.dim() == 2 else heatmaps

    def explain_tasks(self, images: Tensor, heads: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Explain the class that each of J classifiers on this backbone predicts, in one pass: (B, J, rows, columns).

        Args:
            images: uint8, (B, C, H, W).
            heads: J linear or cosine heads, embeddings (..., D) → logits (..., K); K may differ.
        """

        def functionals_of(rows: dict[str, Tensor]) -> Tensor:
            functionals = []
            with torch.autocast(images.device.type, enabled=False):
                for head in heads:
                    predicted = head(rows["embedding"].float()).argmax(-1)
                    functionals.append(head_functionals(head, rows["embedding"], self.temperature, predicted))
            return torch.stack(functionals, 1)

        return self._explain_functionals(images, functionals_of)

    def _explain_functionals(self, images: Tensor, functionals_of: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """Explain functionals (B, V, D) that depend on the rows: heatmaps (B, V, rows, columns).

        Few functionals, see `prefer_sums`, are explained without the vectors c_z, which is faster.
        """
        self.grid.check(images)
        rows, record = self.reads.read(images)
        functionals = functionals_of(rows)
        count = functionals.shape[1]
        few = count < self.target.embed_dim and not prefer_sums(self.target, record, self.grid.num_patches, count)
        if few and not functionals.requires_grad:  # paths have no gradients
            paths = None if record is None else read_paths(self.target, record, functionals)
            return self._run(rows, paths, functionals).float().mT.unflatten(-1, self.grid.shape)
        return self._attribute(self._predict_once(rows, record), functionals)

    def _predict_once(self, rows: dict[str, Tensor], record: Record | StageRecord | None) -> Tensor:
        """The vectors of `predict`, from a pass whose paths are not read yet."""
        if record is None:
            return self.predict(rows)
        if not prefer_sums(self.target, record, self.grid.num_patches, self.target.embed_dim):
            return self.predict(rows | {"direct": read_paths(self.target, record)})
        network = self.network
        tokens = network.read_tokens(rows["embedding"], self._feature_maps(rows))
        paths = sum_paths(self.target, record, None, network.weigh_paths(tokens, self._blend))
        return network.write_vectors(tokens, blend=self._blend) + network.scale * paths

    def predict(self, rows: dict[str, Tensor]) -> Tensor:
        """Predict c_z of every patch, (B, N, D), from the rows of `reads`."""
        return self._run(rows, rows["direct"] if self.network.direct else None)

    def _run(self, rows: dict[str, Tensor], paths: Tensor | None, functionals: Tensor | None = None) -> Tensor:
        return self.network(rows["embedding"], self._feature_maps(rows), paths, functionals, self._blend)

    @property
    def _blend(self) -> float:
        return 0.0 if self.training else self.blend

    @torch.no_grad()
    def initialise(self, rows: dict[str, Tensor], loss: Teacher) -> None:
        """Set the scale of the network's outputs from the first batches of all processes.

        A file's teacher may have had larger or smaller attributions, and paths have another scale. The squared error of
        α c_z is quadratic in α, so its values at −1, 0 and 1 give its minimum.
        """
        if self.untrained and not self.network.direct:
            self.network.scale.copy_(gather_processes(loss.unit(rows)).mean())
            return
        if self.untrained:
            self.network.spread.copy_(gather_processes(rows["direct"].float().sum(1).std()).mean())
        vectors = self.predict(rows)
        factor = gather_processes(loss.unit(rows) / vectors.std()).mean()
        losses = torch.stack([loss.compute(sign * factor * vectors, rows) for sign in (-1, 0, 1)])
        minus, none, plus = gather_processes(losses).view(-1, 3).mean(0)
        curvature = minus + plus - 2 * none
        descent = minus - plus
        if curvature > 1e-3 * none and descent > 0:  # the loss depends on the scale, and the sign is right
            self.network.scale *= factor * descent / (2 * curvature)

    def _heatmaps(self, predicted: Tensor, rows: dict[str, Tensor], classes: Tensor | None = None) -> Tensor:
        return self._attribute(predicted, self._functionals(rows, classes))

    def _functionals(self, rows: dict[str, Tensor], classes: Tensor | None = None) -> Tensor:
        """v of `classes` (B,): (B, D); or of every class: (B, K, D)."""
        temperature = choose_temperature(self.target.score, self.temperature)
        return head_functionals(self.target.head, self._embeddings(rows), temperature, classes)

    def _attribute(self, vectors: Tensor, functionals: Tensor) -> Tensor:
        """v · c_z of vectors (B, N, D): (B, rows, columns) for v (B, D), (B, V, rows, columns) for v (B, V, D)."""
        with torch.autocast(vectors.device.type, enabled=False):
            heatmaps = torch.einsum("b...d,bnd->b...n", functionals.float(), vectors.float())
        return heatmaps.unflatten(-1, self.grid.shape)
