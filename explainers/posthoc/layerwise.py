"""PLUS, SkipPLUS and Rollout combine the maps of all layers into one heatmap (SkipPLUS, Mehri et al., CVPRW 2024)."""

from collections.abc import Callable, Sequence

from torch import Tensor

from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.white_box import Gradients, Output, Reads, WhiteBox
from explainers.transformer.blocks import layer_index
from explainers.transformer.recording import Record
from explainers.transformer.stages import check_stages


class Layerwise(WhiteBox):
    """Base class of methods that compute a map for each layer l, from its input x_l and the model from layer l on.

    One backward pass gives all maps. Without an aggregation, the heatmap is the map of one layer.

    Args:
        layer: index of the layer whose map is the heatmap; negative from the last.
    """

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit", layer: int = 0) -> None:
        super().__init__(target, grid, output)
        self.start = layer_index(target, layer, self.layers())
        if self.on_stages:  # raises an InputError now rather than in the first batch
            check_stages(self.target, grid.size, self.start)

    layer_options: tuple[str, ...] = ("layer",)
    """Names of the options that say which layer alone is the heatmap, and how; aggregations do without them."""

    def keep_signs(self) -> None:
        """Leave out a ReLU at the end of the maps, because PLUS sums maps with both signs."""

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        """Compute the maps (B, V, rows, columns) of the layers from `start` on."""
        raise NotImplementedError

    def plus(self, record: Record, gradients: Gradients, start: int) -> Tensor:
        """Sum the maps of the layers from `start` on, (B, V, rows, columns) (SkipPLUS, Equation 3)."""
        return add_maps(self.layer_maps(record, gradients, start))

    def heatmaps(self, record: Record, gradients: Gradients) -> Tensor:
        return self.layer_maps(record, gradients, self.start)[0]


def add_maps(maps: Sequence[Tensor]) -> Tensor:
    """Sum tensors of equal shape."""
    return sum(maps[1:], maps[0])


def rollout(matrices: Sequence[Tensor], row: Tensor, identity: float = 0.5, weight: float = 0.5) -> Tensor:
    """Compute row · Π_l (identity · I + weight · T_l), the last layer first (SkipPLUS, Equation 2): (B, V, T).

    Methods normalise the rows of T_l if their papers do. The whole product is never computed.

    Args:
        matrices: T_l from the first layer to the last, (B, V, T, T) each.
        row: the row of the result to compute, as weights of the output tokens: (T,) or (B, V, T).
        identity: weight of the skip connection.
        weight: weight of T_l.
    """
    state = row.to(matrices[-1].dtype).expand(*matrices[-1].shape[:-1][:2], -1)[:, :, None]
    for matrix in reversed(matrices):
        state = identity * state + weight * state @ matrix
    return state[:, :, 0]


class Transitions(Layerwise):
    """Base class of methods that compute a matrix T_l for each layer: what a token (row) receives from each (column).

    The map of a layer is the row of the class token, or the mean of the rows that the model pools. `identity` and
    `weight` are those of `rollout`.
    """

    reads = Reads(attention=True)
    identity, weight = 0.5, 0.5

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit", layer: int = -1) -> None:
        super().__init__(target, grid, output, layer)

    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        """Compute the matrices T_l (B, V, T, T) of the layers from `start` on."""
        raise NotImplementedError

    def layer_maps(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        matrices = self.transitions(record, gradients, start)
        return [self.on_grid(self.readout(matrix.shape[-1]).to(matrix.dtype) @ matrix) for matrix in matrices]

    def rollout(self, record: Record, gradients: Gradients, start: int) -> Tensor:
        """Multiply the matrices of the layers from `start` on and read the row of the output (Equation 2)."""
        matrices = self.transitions(record, gradients, start)
        return self.on_grid(rollout(matrices, self.readout(matrices[-1].shape[-1]), self.identity, self.weight))


class Aggregation(WhiteBox):
    """Base class of explainers that combine the layers of another method, under the rules of that method.

    Args:
        of: the method's class, or a function of `target` and `grid` that returns a method, such as
            `partial(DecompX, output="probability")`.
        start: index of the first layer that is included; negative from the last; `None` for the middle one.
    """

    method: Layerwise

    def __init__(
        self, target: TargetModel, grid: PatchGrid, of: Callable[..., Layerwise], start: int | None = 0
    ) -> None:
        method = of(target=target, grid=grid)
        method.keep_signs()
        super().__init__(method.target, grid, method.output)
        object.__setattr__(self, "method", method)  # no submodule: state_dict would contain the target twice
        self.on_stages = method.on_stages
        self.start = layer_index(target, start, self.layers())
        if self.on_stages:
            check_stages(self.target, grid.size, self.start)
        self.reads = method.reads
        self.rules = method.rules
        self.ignores_classes = method.ignores_classes
        self.signed = method.signed
        self.linear = method.linear


class PLUS(Aggregation):
    """Sums the maps of all layers from `start` on, with both signs (SkipPLUS, Equation 3)."""

    def heatmaps(self, record: Record, gradients: Gradients) -> Tensor:
        return self.method.plus(record, gradients, self.start)


class SkipPLUS(PLUS):
    """Sums the maps of the layers from the middle one on (SkipPLUS, Equation 4)."""

    def __init__(self, target: TargetModel, grid: PatchGrid, of: Callable[..., Layerwise]) -> None:
        super().__init__(target, grid, of, start=None)


class Rollout(Aggregation):
    """Multiplies the From-To matrices of all layers, see `rollout` (SkipPLUS, Equation 2; Abnar & Zuidema, 2020)."""

    method: Transitions

    def __init__(self, target: TargetModel, grid: PatchGrid, of: Callable[..., Transitions], start: int = 0) -> None:
        super().__init__(target, grid, of, start)
        self.linear = False  # a product of matrices

    def heatmaps(self, record: Record, gradients: Gradients) -> Tensor:
        return self.method.rollout(record, gradients, self.start)
