"""Fixed heads: one projection that reads classes from an image's embedding, and their attributions from its patches'.

A self-explaining model learns with such a head in place, so that all its skill is in the backbone, where arithmetic on
weights can move it (Yoshikawa et al., 2025). Three ways to find the projection W (K, D) without training: `simplex`,
`prototypes` and `text_embeddings`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, default_collate

from explainers.errors import InputError
from explainers.target import TargetModel


class FixedHead(nn.Module):
    """W, and how embeddings meet it. Nothing here is ever trained.

    Args:
        weight: W, (K, D'); D' is D, or, with a `projection`, the width of that.
        projection: (D', D), what comes before W, as CLIP's visual projection; `None` for nothing.
        normalise: divide every embedding by its length first.
        scale: of the logits, as CLIP's logit scale.
        scale_patches: of the attributions, too.
    """

    weight: Tensor
    projection: Tensor | None
    scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        projection: Tensor | None = None,
        normalise: bool = True,
        scale: float = 1.0,
        scale_patches: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("projection", projection)
        self.register_buffer("scale", torch.tensor(float(scale)))
        self.normalise, self.scale_patches = normalise, scale_patches

    @property
    def in_features(self) -> int:
        """D."""
        return (self.weight if self.projection is None else self.projection).shape[1]

    @property
    def out_features(self) -> int:
        """K."""
        return len(self.weight)

    def extra_repr(self) -> str:
        """What its weights do not tell."""
        return f"normalise={self.normalise}, scale_patches={self.scale_patches}"

    def forward(self, embeddings: Tensor) -> Tensor:
        """Embeddings (..., D) → logits (..., K)."""
        return self.scale * self._project(embeddings)

    def attributions(self, patches: Tensor) -> Tensor:
        """Embeddings of patches (B, N, D) → attributions of every patch to every class, (B, N, K)."""
        projected = self._project(patches)
        return self.scale * projected if self.scale_patches else projected

    def _project(self, embeddings: Tensor) -> Tensor:
        if self.projection is not None:
            embeddings = F.linear(embeddings, self.projection)
        return F.linear(F.normalize(embeddings, dim=-1) if self.normalise else embeddings, self.weight)


def simplex(num_classes: int, width: int, seed: int = 0) -> Tensor:
    """An equiangular frame: K unit vectors (K, D), every two at the same angle, the widest there is (cos = −1/(K − 1)).

    Raises:
        InputError: for one class, and where D < K: the frame that is turned at random has no place for it.
    """
    if not 2 <= num_classes <= width:
        raise InputError(f"expected 2 classes to {width}, the width of the embeddings, got {num_classes}")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(width, num_classes, generator=generator)).Q  # (D, K), orthonormal
    return F.normalize((torch.eye(num_classes) - 1 / num_classes) @ directions.mT, dim=-1)


def prototypes(embeddings: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Unit vectors (K, D) from the mean of all classes to the mean of each.

    Args:
        embeddings: of images, (B, D). labels: their classes, (B,).

    Raises:
        InputError: for a class without images.
    """
    counts = labels.bincount(minlength=num_classes)
    if len(counts) > num_classes or not counts.all():
        raise InputError(
            f"expected images of each of {num_classes} classes, got {counts.tolist()} of them: take more images,"
            " or simplex_of, which needs none"
        )
    means = torch.zeros(num_classes, embeddings.shape[1]).index_add_(0, labels, embeddings) / counts[:, None]
    return F.normalize(means - means.mean(0), dim=-1)


def text_embeddings(model: str, pretrained: str, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """CLIP's mean text embedding of each class over all templates, as unit vectors (K, D').

    Args:
        model, pretrained: open_clip's names of an architecture and its weights.
        classes: their names. templates: prompts with `{}` where the name goes.

    Raises:
        InputError: without open_clip.
    """
    try:
        import open_clip
    except ImportError as error:
        raise InputError("text heads need open_clip: pip install transferable-explainers[clip]") from error
    clip: Any = open_clip.create_model(model, pretrained=pretrained or None).eval()
    tokenise = open_clip.get_tokenizer(model)
    with torch.no_grad():
        prompts = [F.normalize(clip.encode_text(tokenise([t.format(c) for t in templates])), dim=-1) for c in classes]
    return F.normalize(torch.stack([each.mean(0) for each in prompts]), dim=-1)


ProjectionBuilder = Callable[[TargetModel, Any], Tensor]
"""W of a base model, and of the datamodule whose classes it shall tell apart."""


def simplex_of(target: TargetModel, data: Any, seed: int = 0) -> Tensor:
    """See `simplex`."""
    return simplex(len(data.classes), target.embed_dim, seed)


@torch.no_grad()
def prototypes_of(target: TargetModel, data: Any, limit: int = 1000, batch_size: int = 32) -> Tensor:
    """See `prototypes`, of at most `limit` training images, spread evenly over the data set."""
    dataset = data.dataset("train")
    count = min(limit, len(dataset))
    chosen = Subset(dataset, [i * len(dataset) // count for i in range(count)])
    embeddings, labels = [], []
    for batch in DataLoader(chosen, batch_size, num_workers=data.num_workers, collate_fn=_readable):
        embeddings.append(target.embed(target.normalise(batch["image"].to(target.mean.device))).float().cpu())
        labels.append(batch["label"])
    return prototypes(torch.cat(embeddings), torch.cat(labels), len(data.classes))


def _readable(samples: list[dict[str, Any] | None]) -> dict[str, Tensor]:
    """A batch of those that are no corrupt images."""
    return default_collate([sample for sample in samples if sample is not None])


def text_of(
    target: TargetModel,
    data: Any,
    model: str,
    pretrained: str,
    templates: Sequence[str],
    names: Sequence[str] | None = None,
) -> Tensor:
    """See `text_embeddings`. `names` are those of the data set's classes; `None` takes what it calls them itself."""
    if names is not None and len(names) != len(data.classes):
        raise InputError(f"expected names of the {len(data.classes)} classes {data.classes}, got {len(names)}")
    return text_embeddings(model, pretrained, names or data.classes, templates)
