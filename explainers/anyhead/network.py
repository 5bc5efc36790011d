"""The network that predicts one vector c_z of every patch, whose product with v attributes v · G(x)."""

import math
from collections.abc import Sequence

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from explainers.errors import check_positive, checks_choices
from explainers.learned.trunk import small_linear
from explainers.masking import PatchGrid, on_grid
from explainers.models import TargetModel
from explainers.transformer.direct_paths import check_direct
from explainers.transformer.path_flow import Paths, check_flow
from explainers.transformer.stage_paths import check_stage_paths


class AnyHeadNetwork(nn.Module):
    """Reads feature maps of the target at every patch, and compares each with its mean over the image.

    The relevance of a patch depends on the attention that it gets, which is a product of two features. So in every
    feature map a few heads score each patch by the product of its key with a query, which is read from the mean of the
    map; the scores are normalised over the patches like those of attention. They scale and shift the tokens that are
    read from the maps, and MLPs mix the channels. Nothing else mixes patches.

    The paths from each patch to the embedding (see `direct_paths` and `path_flow`) are added to what the network
    predicts, each with a weight for every patch. Before training they already point to the classes that the target sees
    in a patch, including classes that the training images do not show.

    Args:
        target: the model to explain.
        grid: the patches of an image.
        blocks: indices of the blocks whose outputs are read: transformer blocks, or the stages of Swin and ResNet.
        width: width of the tokens, in channels.
        depth: number of residual layers.
        heads: number of scores of each feature map.
        head_width: width of queries and keys, in channels.
        direct: indices of the blocks of a transformer whose paths are added, in ascending order, or of stages.
        paths: `direct` for direct paths; `flow` for paths through later MLPs and other patches, of the last blocks;
            `stages` for those of a model that averages its last feature map, see `stage_paths`.
    """

    scale: Tensor
    """Factor of all vectors, see `AnyHead.initialise`."""

    spread: Tensor
    """Standard deviation of the sum of all paths, which divides their weights, see `AnyHead.initialise`."""

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        blocks: Sequence[int],
        width: int = 256,
        depth: int = 2,
        heads: int = 3,
        head_width: int = 16,
        direct: Sequence[int] = (),
        paths: Paths = "direct",
    ) -> None:
        super().__init__()
        check_positive(width=width, depth=depth, heads=heads, head_width=head_width)
        if direct:
            if paths == "stages":
                check_stage_paths(target, direct, grid.size)
            else:
                (check_flow if paths == "flow" else check_direct)(target, direct)
            self.path_weight = nn.Linear(width, len(direct))
            nn.init.zeros_(self.path_weight.weight)
            nn.init.ones_(self.path_weight.bias)
        self.blocks = tuple(blocks)
        self.width = width
        self.depth = depth
        self.heads = heads
        self.head_width = head_width
        self.shape = grid.shape
        self.direct = tuple(direct)
        self.paths = paths if direct else "direct"  # without blocks, both are the same network
        channels = target.map_channels(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(c) for c in channels)
        self.queries = nn.ModuleList(nn.Sequential(nn.LayerNorm(c), nn.Linear(c, heads * head_width)) for c in channels)
        self.keys = nn.ModuleList(nn.Linear(c, heads * head_width, bias=False) for c in channels)
        self.read = nn.Linear(sum(channels), width)
        self.read_embedding = nn.Sequential(nn.LayerNorm(target.embed_dim), nn.Linear(target.embed_dim, width))
        self.position = nn.Parameter(torch.randn(grid.num_patches, width) * 0.02)
        self.gate, self.shift = (nn.Linear(heads * len(self.blocks), width) for _ in range(2))
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), Mlp(width, 2 * width)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.write = small_linear(width, target.embed_dim)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("spread", torch.ones(()))

    def forward(
        self,
        embeddings: Tensor,
        maps: list[Tensor],
        paths: Tensor | None = None,
        functionals: Tensor | None = None,
        blend: float = 0.0,
    ) -> Tensor:
        """Predict c_z of every patch, (B, N, D), or v · c_z for functionals, (B, N, V).

        Args:
            embeddings: embeddings of the whole images, (B, D).
            maps: feature maps of the `blocks`, (B, N', C) each.
            paths: those of the blocks `direct`, (B, L, N', D), or v · paths, (B, L, N', V).
            functionals: v, (B, V, D).
            blend: from 0 to 1: share of the sum of all paths, each with weight 1, as before training; the rest is what
                the network learned.
        """
        return self.write_vectors(self.read_tokens(embeddings, maps), paths, functionals, blend)

    def read_tokens(self, embeddings: Tensor, maps: list[Tensor]) -> Tensor:
        """Read a token of each patch, (B, N, width), with the arguments of `forward`."""
        maps = [norm(on_grid(each, self.shape)) for norm, each in zip(self.norms, maps, strict=True)]
        tokens = self.read(torch.cat(maps, -1)) + self.read_embedding(embeddings)[:, None] + self.position
        scores = torch.cat([self._scores(i, each) for i, each in enumerate(maps)], -1)
        tokens = tokens * (1 + self.gate(scores)) + self.shift(scores)
        for layer in self.layers:
            tokens = tokens + layer(tokens)
        return self.norm(tokens)

    def weigh_paths(self, tokens: Tensor, blend: float) -> Tensor:
        """The weights of the paths of patches, (B, N, L), by their tokens."""
        return (blend + (1 - blend) * self.path_weight(tokens)) / self.spread

    def write_vectors(
        self,
        tokens: Tensor,
        paths: Tensor | None = None,
        functionals: Tensor | None = None,
        blend: float = 0.0,
    ) -> Tensor:
        """Predict what `forward` does from the tokens of `read_tokens`, or from some of them if there are no paths."""
        vectors = (1 - (blend if self.direct else 0.0)) * self.write(tokens)
        if functionals is not None:
            with torch.autocast(vectors.device.type, enabled=False):  # sums of 16 bits would have ties
                vectors = vectors.float() @ functionals.float().mT
        if paths is not None:
            resampled = on_grid(paths.flatten(0, 1), self.shape).unflatten(0, paths.shape[:2])  # (B, L, N, D)
            vectors = vectors + (self.weigh_paths(tokens, blend).mT[..., None] * resampled).sum(1)
        return vectors * self.scale

    def _scores(self, i: int, feature_map: Tensor) -> Tensor:
        """Log-attention of the mean of feature map i to every patch, relative to the uniform one: (B, N, heads)."""
        query = self.queries[i](feature_map.mean(1)).unflatten(-1, (self.heads, -1))
        key = self.keys[i].get_parameter("weight").unflatten(0, (self.heads, -1))
        # Queries of channels are cheaper than keys of all patches, and give the same products
        scores = (feature_map @ torch.einsum("bhd,hdc->bch", query, key)).float() / self.head_width**0.5
        return scores.log_softmax(1) + math.log(scores.shape[1])
