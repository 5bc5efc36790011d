"""Fixed heads: one projection computes logits from an image's embedding, and attributions from its patch embeddings.

A self-explaining model is trained with a fixed head. The backbone then holds all that is learned, so that arithmetic on
its weights can transfer it (Yoshikawa et al., 2025). Three functions compute the projection W (K, D) without training:
`simplex`, `prototypes` and `text_embeddings`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, default_collate

from explainers.errors import InputError, check_positive, checks_choices
from explainers.target import TargetModel

Reading = Literal["patch", "difference"]


class FixedHead(nn.Module):
    """Multiplies embeddings by a fixed projection W.

    >>> head = FixedHead(torch.eye(2), scale=10.0)
    >>> head(torch.tensor([[0.0, 4.0]])).tolist()  # the logits of one image
    [[0.0, 10.0]]
    >>> head.attributions(torch.tensor([[[0.0, 4.0]]]), torch.tensor([[1.0, 0.0]])).tolist()  # of one patch
    [[[0.0, 1.0]]]

    Args:
        weight: W, (K, D'). D' is the width of the embeddings after `projection`.
        projection: linear map before W, (D', D), such as CLIP's visual projection; `None` for none, and then D' = D.
        normalise: divide every embedding, after `projection`, by its length.
        scale: factor of the logits, such as CLIP's logit scale.
        bias: added to the logits, (K,), such as that of a model's own head; `None` for none.
        reading: how patches are read: `patch` as an image is, or `difference` from a blank image, without division by
            the length, so that a patch that contributes nothing need not have an embedding of its own.
        patch_scale: factor of the attributions.
    """

    weight: Tensor
    projection: Tensor | None
    bias: Tensor | None
    scale: Tensor
    patch_scale: Tensor

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
    ) -> None:
        super().__init__()
        check_positive(scale=scale)
        self.register_buffer("weight", weight)
        self.register_buffer("projection", projection)
        self.register_buffer("bias", bias)
        self.register_buffer("scale", torch.tensor(float(scale)))
        self.register_buffer("patch_scale", torch.tensor(float(patch_scale)))
        self.normalise, self.reading = normalise, reading

    @property
    def in_features(self) -> int:
        """D, the width of the embeddings."""
        return (self.weight if self.projection is None else self.projection).shape[1]

    @property
    def out_features(self) -> int:
        """K, the number of classes."""
        return len(self.weight)

    def extra_repr(self) -> str:
        """The options that the state dict does not hold."""
        return f"normalise={self.normalise}, reading={self.reading}"

    def read_as(self, other: "FixedHead") -> None:
        """Take over how patches are read from the head of another model."""
        self.reading = other.reading
        self.patch_scale.copy_(other.patch_scale)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Embeddings (..., D) → logits (..., K)."""
        logits = self.scale * F.linear(self._project(embeddings, self.normalise), self.weight)
        return logits if self.bias is None else logits + self.bias

    def attributions(self, patches: Tensor, embeddings: Tensor) -> Tensor:
        """Attributions of every patch to every class, (B, N, K).

        Args:
            patches: patch embeddings, or with the reading `difference` theirs minus that of a blank image, (B, N, D).
            embeddings: embeddings of the images, (B, D). With `difference`, attributions are parts of the logits, so
                they have the factor of the logits and are divided by the same length.
        """
        vectors = self.vectors(patches)
        if self.reading == "difference":
            vectors = self.scale * vectors
            if self.normalise:
                vectors = vectors / self._project(embeddings, False).norm(dim=-1)[:, None, None]
        return F.linear(vectors, self.weight)

    def vectors(self, patches: Tensor) -> Tensor:
        """Vectors c_z of patches, whose products with the rows of W are their attributions, (B, N, D')."""
        return self.patch_scale * self._project(patches, self.normalise and self.reading == "patch")

    def _project(self, embeddings: Tensor, normalise: bool) -> Tensor:
        if self.projection is not None:
            embeddings = F.linear(embeddings, self.projection)
        return F.normalize(embeddings, dim=-1) if normalise else embeddings


@checks_choices
def own_head(target: TargetModel, reading: Reading, patch_scale: float) -> FixedHead:
    """Fix the linear head of a model. Rows are relative to their mean, which changes no probability.

    Raises:
        InputError: for a model without a linear head.
    """
    if not isinstance(target.head, nn.Linear):
        raise InputError(
            f"expected a linear head to keep, got {type(target.head).__name__} of {target.name}: set"
            " explainer.projection, or fit a head with experiment=linear_head"
        )
    weight, bias = target.head.weight.detach(), target.head.bias
    centred = None if bias is None else bias.detach() - bias.detach().mean()
    return FixedHead(weight - weight.mean(0), normalise=False, bias=centred, reading=reading, patch_scale=patch_scale)


def simplex(num_classes: int, width: int, seed: int = 0) -> Tensor:
    """K unit vectors (K, D) with the same, largest possible angle between any two: cosine −1/(K − 1).

    >>> weight = simplex(num_classes=3, width=4)
    >>> (weight @ weight.mT).round(decimals=4).tolist()
    [[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]]

    Args:
        num_classes: K.
        width: D, the width of the embeddings.
        seed: seed of the random rotation of the vectors.

    Raises:
        InputError: if K < 2, or if K > D, because the random rotation starts from K orthonormal vectors.
    """
    if not 2 <= num_classes <= width:
        raise InputError(f"expected 2 classes to {width}, the width of the embeddings, got {num_classes}")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(width, num_classes, generator=generator)).Q  # (D, K), orthonormal
    return F.normalize((torch.eye(num_classes) - 1 / num_classes) @ directions.mT, dim=-1)


def prototypes(embeddings: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Unit vectors (K, D) from the average of the class means to the mean embedding of each class.

    >>> embeddings, labels = torch.tensor([[1.0, 0.0], [3.0, 0.0], [6.0, 0.0]]), torch.tensor([0, 0, 1])
    >>> prototypes(embeddings, labels, num_classes=2).tolist()  # from (4, 0) to (2, 0) and to (6, 0)
    [[-1.0, 0.0], [1.0, 0.0]]

    Args:
        embeddings: embeddings of images, (B, D).
        labels: classes of the images, (B,).
        num_classes: K.

    Raises:
        InputError: for a class without images, or a label that is not below K.
    """
    counts = labels.bincount(minlength=num_classes)
    if len(counts) > num_classes or not counts.all():
        raise InputError(
            f"expected images of each of {num_classes} classes, got {counts.tolist()} of them: take more images,"
            " or simplex_of, which needs none"
        )
    means = embeddings.new_zeros(num_classes, embeddings.shape[1]).index_add_(0, labels, embeddings) / counts[:, None]
    return F.normalize(means - means.mean(0), dim=-1)


def text_embeddings(model: str, pretrained: str, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """CLIP's mean text embedding of each class over all templates, as unit vectors (K, D').

    Args:
        model: open_clip's name of an architecture.
        pretrained: open_clip's name of its weights.
        classes: names of the classes.
        templates: prompts with `{}` in place of the name.

    Raises:
        InputError: if open_clip is not installed, or there are no templates.
    """
    if not templates:
        raise InputError("expected templates, one prompt or more with {} in place of the class, got none")
    try:
        import open_clip
    except ImportError as error:
        raise InputError("text heads need open_clip: pip install transferable-explainers[clip]") from error
    clip: Any = open_clip.create_model(model, pretrained=pretrained or None).eval()
    tokenise = open_clip.get_tokenizer(model)
    with torch.no_grad():
        prompts = [F.normalize(clip.encode_text(tokenise([t.format(c) for t in templates])), dim=-1) for c in classes]
    return F.normalize(torch.stack([embeddings.mean(0) for embeddings in prompts]), dim=-1)


ProjectionBuilder = Callable[[TargetModel, Any], Tensor]
"""Computes W from a base model and the datamodule of its classes."""


def simplex_of(target: TargetModel, data: Any, seed: int = 0) -> Tensor:
    """`simplex` for the classes of a datamodule."""
    return simplex(len(data.classes), target.embed_dim, seed)


@torch.no_grad()
def prototypes_of(target: TargetModel, data: Any, limit: int = 1000, batch_size: int = 32) -> Tensor:
    """`prototypes` of at most `limit` training images, evenly spaced in the data set."""
    check_positive(limit=limit, batch_size=batch_size)
    dataset = data.dataset("train")
    count = min(limit, len(dataset))
    images = Subset(dataset, [i * len(dataset) // count for i in range(count)])
    embeddings, labels = [], []
    for batch in DataLoader(images, batch_size, num_workers=data.num_workers, collate_fn=_readable):
        if batch is not None:
            embeddings.append(target.embed(target.normalise(batch["image"].to(target.mean.device))).float().cpu())
            labels.append(batch["label"])
    if not embeddings:
        raise InputError(f"expected readable training images for prototypes, got {count} that are all corrupt")
    return prototypes(torch.cat(embeddings), torch.cat(labels), len(data.classes))


def _readable(samples: list[dict[str, Any] | None]) -> dict[str, Tensor] | None:
    """The batch without corrupt images, which are `None`; `None` if all are corrupt."""
    readable = [sample for sample in samples if sample is not None]
    return default_collate(readable) if readable else None


def text_of(
    target: TargetModel,
    data: Any,
    model: str,
    pretrained: str,
    templates: Sequence[str],
    names: Sequence[str] | None = None,
) -> Tensor:
    """`text_embeddings` of the class `names`; `None` takes the names of the datamodule's classes."""
    if names is not None and len(names) != len(data.classes):
        raise InputError(f"expected names of the {len(data.classes)} classes {data.classes}, got {len(names)}")
    return text_embeddings(model, pretrained, names or data.classes, templates)
