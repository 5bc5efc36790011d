"""Pairs of patches that make two images alike; what makes images similar to others; the nearest images of many."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers import Explainer, VectorExplainer
from explainers.errors import InputError, check_positive, checks_choices
from explainers.masking import map_shape
from explainers.models.functionals import Length, cosine_functionals
from explainers.models.heads import ConstantLengths, NoHead
from explainers.models.inputs import check_explains_functionals

CHUNK = 64  # number of functionals that a method explains at once


@dataclass(frozen=True)
class Likeness:
    """How similar pairs of images are, and which of their patches explain it.

    Args:
        similarity: the cosine of e − m and e' − m, for the embeddings e and e' of two images, (B,).
        pairs: c_z · c'_w / (|e − m| |e' − m|) for patch z of the first image (row) and w of the second, (B, N, N'). All
            pairs sum to the similarity.
        rest: what the explainer attributes to no patch of the first image, and of the second, (B, 2). The patches share
            it equally.
        shape: rows and columns of patches, of both images.
    """

    similarity: Tensor
    pairs: Tensor
    rest: Tensor
    shape: tuple[int, int]

    @property
    def of_first(self) -> Tensor:
        """What each patch of the first image contributes with all of the second: heatmaps (B, rows, columns)."""
        return self.pairs.sum(2).unflatten(1, self.shape)

    @property
    def of_second(self) -> Tensor:
        """What each patch of the second image contributes with all of the first: heatmaps (B, rows, columns)."""
        return self.pairs.sum(1).unflatten(1, self.shape)

    def take_row(self, row: int) -> "Likeness":
        """One of the pairs of images, on the CPU."""
        similarity, pairs, rest = (
            each[row : row + 1].cpu().clone() for each in (self.similarity, self.pairs, self.rest)
        )
        return Likeness(similarity, pairs, rest, self.shape)

    def strongest(self, count: int = 5, apart: int = 0) -> Tensor:
        """At most `count` pairs (z, w) with the largest products, the largest first, (B, count, 2).

        A patch is in one pair only, and so are all patches `apart` rows and columns or less from it.
        """
        left = self.pairs.clone()
        found: list[Tensor] = []
        while len(found) < count and (left.flatten(1).amax(1) > -torch.inf).all():
            best = left.flatten(1).argmax(1)
            pair = torch.stack([best // left.shape[2], best % left.shape[2]], 1)
            found.append(pair)
            near_first = _near(pair[:, 0], self.shape, apart)
            near_second = _near(pair[:, 1], self.shape, apart)
            left = left.masked_fill(near_first[:, :, None] | near_second[:, None], -torch.inf)
        return torch.stack(found, 1)


def subtract_centre(embeddings: Tensor, centre: Tensor | None = None) -> Tensor:
    """Embeddings (B, D) relative to `centre` (D,), in float32.

    What all images have in common makes all similarities large. The mean embedding of many images, or the embedding of
    a blank image, takes it away.
    """
    return embeddings.float() if centre is None else embeddings.float() - centre.float().to(embeddings.device)


def likeness(
    explainer: Explainer, first: Tensor, second: Tensor, centre: Tensor | None = None, chunk_size: int = CHUNK
) -> Likeness:
    """Explain the similarity of pairs of images by pairs of their patches, see `likeness_of_vectors`.

    Args:
        explainer: see `vectors_of`, as for `chunk_size`.
        first: uint8 or uint16, (B, C, H, W).
        second: uint8 or uint16, (B, C, H, W).
        centre: m, (D,), see `subtract_centre`; `None` for 0.
    """
    if len(first) != len(second):
        raise InputError(f"expected pairs of images, got {len(first)} and {len(second)}: give one for each")
    (vectors, embeddings), other = (vectors_of(explainer, images, chunk_size) for images in (first, second))
    return likeness_of_vectors((vectors, embeddings), other, map_shape(vectors.shape[1], first.shape[-2:]), centre)


def likeness_of_vectors(
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    shape: tuple[int, int],
    centre: Tensor | None = None,
) -> Likeness:
    """Explain the similarity of pairs of images by the vectors c_z of their patches.

    An embedding is the sum of vectors c_z of its patches, and of a rest that the explainer attributes to none. The
    patches share the rest and the centre equally, c_z + (e − m − Σ_z c_z) / N, so that the product of two embeddings is
    the sum over all pairs of patches.

    Args:
        first: what `vectors_of` returns for B images.
        second: the same for B other images; or for one, with which all are compared.
        shape: rows and columns of patches.
        centre: m, (D,), see `subtract_centre`; `None` for 0.
    """
    vectors, embeddings = first
    other_vectors, other_embeddings = second
    own, others = (subtract_centre(each, centre) for each in (embeddings, other_embeddings))
    size = (own.norm(dim=-1) * others.norm(dim=-1)).clamp(min=1e-12)
    similarity = (own * others).sum(-1) / size
    explained = [
        (vectors.sum(1) * others).sum(-1) / size,
        (other_vectors.sum(1) * own).sum(-1) / size,
    ]
    pairs = _whole(vectors, own) @ _whole(other_vectors, others).mT / size[:, None, None]
    return Likeness(similarity, pairs, similarity[:, None] - torch.stack(explained, 1), shape)


def vectors_of(
    explainer: Explainer, images: Tensor, chunk_size: int = CHUNK, layers: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """Compute vectors c_z, such that v · c_z is the heatmap of v · G(x).

    Explainers with vectors, such as AnyHead, need one pass. Other linear methods, such as DecompX-PLUS, explain every
    channel of the embedding: D backward passes.

    Args:
        explainer: a `VectorExplainer`, or a method whose attribute `linear` is True.
        images: uint8 or uint16, (B, C, H, W).
        chunk_size: number of functionals that a method explains at once; fewer take less memory and more time.
        layers: what the model computes of G(x), (B, D) → (B, D'), such as a projection: then the vectors are J c_z,
            for the Jacobian J of the layers at G(x), for `ConstantLengths`. `None` for those of `NoHead`.

    Returns:
        c_z (B, N, D), and the embeddings (B, D), float32; of D' with `layers`.
    """
    vectors, embeddings = _vectors_of_backbone(explainer, images, chunk_size)
    head = getattr(getattr(explainer, "target", None), "head", None)
    layers = head.layers if layers is None and isinstance(head, NoHead) else layers
    if layers is None or isinstance(layers, nn.Identity):
        return vectors, embeddings
    with torch.inference_mode(False), torch.enable_grad(), ConstantLengths():
        points = embeddings.clone().requires_grad_()
        outputs = layers(points)
        rows = [torch.autograd.grad(each, points, retain_graph=True)[0] for each in outputs.sum(0)]
    return vectors @ torch.stack(rows, -1), outputs.detach()


def _vectors_of_backbone(explainer: Explainer, images: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Compute c_z (B, N, D) and G(x), (B, D)."""
    if isinstance(explainer, VectorExplainer):
        vectors, embeddings = explainer.decompose(images)
        return vectors.detach().float(), embeddings.detach().float()
    if not getattr(explainer, "linear", False):
        raise InputError(
            f"expected an explainer that is linear in what it explains, got {type(explainer).__name__}: take AnyHead,"
            " or a method such as DecompX-PLUS or DirectPaths"
        )
    method: Any = explainer
    width = method.target.embed_dim
    seen: list[Tensor] = []

    def channels(start: int) -> Callable[[Tensor], Tensor]:
        def functionals(embeddings: Tensor) -> Tensor:
            seen.append(embeddings.detach().float())
            some = torch.eye(width, device=embeddings.device, dtype=torch.float32)[start : start + chunk_size]
            return some.expand(len(embeddings), -1, -1)

        return functionals

    maps = [method.explain(images, channels(start)) for start in range(0, width, chunk_size)]
    return torch.cat(maps, 1).flatten(2).mT.detach().float(), seen[0]


def _whole(vectors: Tensor, embeddings: Tensor) -> Tensor:
    """Vectors (B, N, D), to which the rest of the embeddings (B, D) is added in equal shares."""
    return vectors + ((embeddings - vectors.sum(1)) / vectors.shape[1])[:, None]


def _near(patches: Tensor, shape: tuple[int, int], apart: int) -> Tensor:
    """Which patches of a grid are within `apart` rows and columns of one of them, for each image: boolean (B, N)."""
    across = shape[1]
    places = torch.arange(shape[0] * across, device=patches.device)
    rows = (places // across - patches[:, None] // across).abs()
    columns = (places % across - patches[:, None] % across).abs()
    return (rows <= apart) & (columns <= apart)


@checks_choices
def similar_to(
    explainer: Any, images: Tensor, others: Tensor, centre: Tensor | None = None, length: Length = "constant"
) -> Tensor:
    """Explain what makes images similar to others: the cosine of e − m and e' − m, for embeddings e and e'.

    Args:
        explainer: an explainer of functionals, such as AnyHead, or a method that reads the inside of a transformer.
        images: uint8 or uint16, (B, C, H, W).
        others: e', embeddings of V other images for all, (V, D), or of V for each image, (B, V, D).
        centre: m, (D,), see `subtract_centre`; `None` for 0.
        length: see `cosine_functionals`.

    Returns:
        Heatmaps, (B, V, rows, columns).
    """
    check_explains_functionals(explainer)
    width = explainer.target.embed_dim
    if others.dim() not in (2, 3) or others.shape[-1] != width:
        raise InputError(
            f"expected embeddings of other images, of shape [V, {width}] or [{len(images)}, V, {width}], got"
            f" {list(others.shape)}: embed them with the same model"
        )
    directions = F.normalize(subtract_centre(others, centre), dim=-1)

    def functionals(embeddings: Tensor) -> Tensor:
        own = subtract_centre(embeddings.detach(), centre)
        return cosine_functionals(own, directions.to(own.device), length=length)

    return explainer.explain(images, functionals)


def nearest(embeddings: Tensor, queries: Tensor, k: int = 5, centre: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the k embeddings, of (M, D), that are most similar to each query (B, D), by the cosine relative to `centre`.

    Returns:
        Similarities and indices, (B, k), the most similar first; k is at most M.

    >>> similarities, indices = nearest(torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([[0.6, 0.8]]), k=1)
    >>> round(similarities.item(), 4), indices.tolist()
    (0.8, [[1]])
    """
    check_positive(k=k)
    known, asked = (F.normalize(subtract_centre(each, centre), dim=-1) for each in (embeddings, queries))
    found = (asked @ known.mT).topk(min(k, len(known)), dim=-1)
    return found.values, found.indices
