"""The base class of TVE, AnyHead and Shapley, whose trained network explains a frozen target."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributed, nn

from explainers.errors import InputError
from explainers.learned.sources import Source
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.inputs import validate_classes
from explainers.saved.identity import Identity, is_rounded_copy, recipe, sketch_weights
from explainers.saved.weights import check_forms, check_identity, describe_tensors, read_weights, save_weights
from explainers.share import Pretrained

NetworkBuilder = Callable[[TargetModel, PatchGrid], Any]

NOT_IDENTITY = ("weights", "allow_finetuned_backbone", "surrogate")
"""Arguments of explainers that name files of weights, or say which are accepted; their content has an identity."""


class NetworkExplainer(nn.Module, Pretrained, ABC):
    """An explainer with a trained network and a frozen target; the network is saved alone.

    Its constructor says what it is: the network, and how heatmaps are read from what the network predicts.
    `ExplainerTraining` trains it; explaining images needs no Lightning.

    A subclass sets `reads`, and defines `predict` and `_heatmaps`. Its constructor also takes `weights`, the file of a
    trained network (see `export`), and ends with `load` if there is one; `allow_finetuned_backbone` accepts weights
    that were trained for other weights of the same backbone.

    Args:
        target: the model to explain. It is neither trained nor saved.
        grid: the patches that are explained.
        network: builds the network from the target and the grid. It keeps its arguments as attributes, see
            `identity.recipe`; those in its attribute `initial` choose initial weights alone.
    """

    READING: ClassVar[tuple[str, ...]] = ()
    """Arguments that change how heatmaps are computed from what the network predicts, and nothing else."""

    networks: ClassVar[tuple[type, ...]] = ()
    """Classes that a file may name as its network."""

    serves_every_head: ClassVar[bool] = True
    """Whether trained weights depend on the backbone alone, so that they explain every head on it."""

    allow_finetuned_backbone: bool = False

    untrained: bool = True
    """Whether the network has its initial weights, and none of a file."""

    signed: bool = True
    """See `Explainer`."""

    reads: Source
    """What the network reads."""

    def __init__(self, target: TargetModel, grid: PatchGrid, network: NetworkBuilder) -> None:
        super().__init__()
        target.check_grid(grid)
        self.target = target.requires_grad_(False).eval()
        self.grid = grid
        self.network = network(self.target, grid).float()  # torch.set_default_dtype may have another type

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the network; the target stays in eval mode, without dropout and stochastic depth."""
        super().train(mode)
        self.target.eval()
        return self

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted, in images (B, C, H, W): heatmaps (B, rows, columns)."""
        rows = self._rows(images)
        if classes is None:
            classes = self._logits(rows).argmax(-1)
        classes = validate_classes(classes, images, self.target.num_classes)
        return self._heatmaps(self.predict(rows), rows, classes)

    def all_classes(self, images: Tensor) -> Tensor:
        """Explain every class of uint8 images (B, C, H, W): heatmaps (B, K, rows, columns)."""
        rows = self._rows(images)
        return self._heatmaps(self.predict(rows), rows)

    def prepare(self, images: Tensor) -> Callable[[Tensor], Tensor]:
        """Apply target and network to images (B, C, H, W): a function of classes (B,) → heatmaps (B, rows, columns)."""
        rows = self._rows(images)
        predicted = self.predict(rows)
        kept = {"image": images, "embedding": self._embeddings(rows)}

        def heatmaps(classes: Tensor) -> Tensor:
            return self._heatmaps(predicted, kept, validate_classes(classes, images, self.target.num_classes))

        return heatmaps

    def _rows(self, images: Tensor) -> dict[str, Tensor]:
        """The images, and what the network reads of them."""
        self.grid.check(images)
        return {"image": images} | self.reads({"image": images})

    def _embeddings(self, rows: dict[str, Tensor]) -> Tensor:
        """The embeddings (B, D) of the images, computed if they are not among the rows."""
        return rows["embedding"] if "embedding" in rows else self.target.embed(self.target.normalise(rows["image"]))

    def _logits(self, rows: dict[str, Tensor]) -> Tensor:
        """The target's logits (B, K) of the images."""
        return self.target.classify(self._embeddings(rows))

    def _feature_maps(self, rows: dict[str, Tensor]) -> list[Tensor]:
        """The feature maps (B, N', C) that the network reads."""
        return [rows[f"map_{i}"] for i in range(len(self.network.blocks))]

    @abstractmethod
    def predict(self, rows: dict[str, Tensor]) -> Tensor:
        """Apply the network to rows of `reads`."""

    def build_loss(self, loss: Callable[..., Any]) -> Any:
        """Build the `Loss` of a training; a subclass may hand over more, as TVE its hops."""
        return loss(self.target, self.grid)

    def initialise(self, rows: dict[str, Tensor], loss: Any) -> None:
        """Take the scale of the data from the rows of the first training batch; a pretrained network may do nothing."""

    @abstractmethod
    def _heatmaps(self, predicted: Tensor, rows: dict[str, Tensor], classes: Tensor | None = None) -> Tensor:
        """Heatmaps of `classes` (B,): (B, rows, columns); or of every class: (B, K, rows, columns)."""

    def validation_metrics(self) -> dict[str, Any]:
        """Metrics of a validation besides the loss, by the prefix of their names; `measure` updates them."""
        return {}

    def measure(self, metrics: Mapping[str, Any], predicted: Tensor, rows: dict[str, Tensor]) -> None:
        """Update the `validation_metrics` by what `predict` returned for a batch with the rows of the loss."""

    def identity(self) -> Identity:
        """Everything that the weights of the network were trained for."""
        target = self.target.backbone_identity() if self.serves_every_head else self.target.identity()
        initial = getattr(self.network, "initial", ())
        own = {"target": target, "network": recipe(self.network, ("target", "grid", *initial))}
        return own | recipe(self, without=(*own, *NOT_IDENTITY, *self.READING))

    def check_identity(self, saved: Identity, path: str) -> None:
        """Raise an InputError unless weights with the identity `saved`, of a file, may be used by this explainer."""
        own = self.identity()
        if not self.serves_every_head:
            return check_identity(saved, own, path)
        target = saved.get("target", {})
        weights, trained = own["target"]["backbone_sha256"], str(target.get("backbone_sha256"))
        check_identity(saved | {"target": target | {"backbone_sha256": weights}}, own, path)
        if trained == weights or self.allow_finetuned_backbone:
            return
        if is_rounded_copy(self.target.backbone, saved.get("sketch")):
            warnings.warn(f"{self.target.name}: a rounded copy of the weights that {path} was trained on", stacklevel=2)
        else:
            raise InputError(
                f"{path} was trained on other weights of {own['target']['backbone']} (SHA-256 {trained[:12]}) than this"
                f" target's ({weights[:12]}): if those are fine-tuned ones, transfer it anyway (TVE-PT) with"
                " allow_finetuned_backbone=true, or fine-tune it with experiment=tve_finetune or anyhead"
            )

    def export(self, folder: Path) -> Path:
        """Write the trained network to `explainer.safetensors`, which `explainers.load` reads.

        Its header is the `identity`, the name of the model in timm, how heatmaps are read, and a sketch of the
        backbone, by which `load` knows a rounded copy.
        """
        reading = {name: getattr(self, name) for name in self.READING}
        header = self.identity() | {"model": self.target.timm_name, "reading": reading}
        if self.serves_every_head:
            header["sketch"] = sketch_weights(self.target.backbone)
        return save_weights(self.network.state_dict(), folder / "explainer.safetensors", header)

    def load(self, path: str) -> None:
        """Load a file that `export` wrote for the same identity, and explain from now on (eval mode)."""
        saved, weights = read_weights(path, keys={"target": "dictionary"})
        self.check_identity(saved, path)
        check_forms(path, describe_tensors(self.network.state_dict()))
        self.network.load_state_dict(weights)
        self.untrained = False
        self.eval()


def gather_processes(values: Tensor) -> Tensor:
    """Gather a tensor of all processes, with a new first dimension; in a single process, the tensor itself."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return values
    values = values.contiguous()
    parts = [torch.empty_like(values) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, values)
    return torch.stack(parts)
