"""Heads of targets: taken off a timm model, linear ones in files, and those that compare embeddings with directions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timm.data
import torch
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from explainers.errors import InputError, check_positive
from explainers.models.probes import TOLERANCE, compare_outputs, count_channels, draw_probes
from explainers.runtime.modes import ordinary_tensors
from explainers.saved.identity import Identity
from explainers.saved.weights import check_forms, check_keys, read_weights, save_weights

LINEAR = {"weight": "floats K D", "bias": "floats K"}
COSINES = {"weight": "floats K E", "scale": "floats", "projection?": "floats E D", "bias?": "floats K"}
"""Contents of the file of a linear head, and of a head of cosines."""

EMBEDS = "without classes, compare(image, other, model) explains images, and target= numbers of their embeddings"
"""What to do with a model that only embeds."""


class DistilledHead(nn.Module):
    """DeiT's two linear heads, on the class and the distillation token, the halves of the embedding; logits are means.

    >>> DistilledHead(nn.Identity(), nn.Identity())(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist()
    [[2.0, 3.0]]
    """

    def __init__(self, head: nn.Module, head_dist: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.head_dist = head_dist

    def forward(self, embeddings: Tensor) -> Tensor:
        """Classify embeddings (..., 2·width) → logits (..., K)."""
        class_token, distillation_token = embeddings.chunk(2, -1)
        return (self.head(class_token) + self.head_dist(distillation_token)) / 2


class NoHead(nn.Module):
    """Stands for the head of a model without one, such as DINOv2: such a model embeds images, and does not classify.

    Args:
        layers: what the model computes of the embedding G(x), such as a projection; the identity for a model that
            returns G(x) itself.
    """

    def __init__(self, layers: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = layers or nn.Identity()

    def forward(self, embeddings: Tensor) -> Tensor:
        raise InputError(
            "expected a model with a classification layer, got one without: fit one with `python train.py"
            f" experiment=linear_head`, and give its file, or a layer, as head=; {EMBEDS}",
            "head",
        )


def has_single_logit(head: nn.Module) -> bool:
    """Whether a head is linear with a single output."""
    if isinstance(head, DistilledHead):
        return has_single_logit(head.head)
    return isinstance(head, nn.Linear) and head.out_features == 1


class TextProjection(nn.Linear):
    """Projects embeddings of images (..., D) to those of texts, (..., D'): its outputs are no classes.

    Args:
        weight: (D', D).
        bias: (D',); `None` for zeros.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], dtype=torch.float32)
        self.load_state_dict({"weight": weight, "bias": torch.zeros(len(weight)) if bias is None else bias})


def split_single_logit(head: Any) -> nn.Module:
    """Convert a linear head of a single logit z, whose probability is sigmoid(z), to the head of two logits ∓ z / 2.

    Their softmax is (1 − sigmoid(z), sigmoid(z)), so their cross entropy is the binary cross entropy of z. The
    attributions of class 0 are those of class 1 with the other sign.

    >>> sigmoid = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(sigmoid.weight, 4.0)
    >>> split_single_logit(sigmoid)(torch.tensor([[1.0]])).tolist()
    [[-2.0, 2.0]]
    """
    if isinstance(head, DistilledHead):
        return DistilledHead(split_single_logit(head.head), split_single_logit(head.head_dist))
    linear = nn.Linear(head.in_features, 2, head.bias is not None).to(head.weight)
    linear.load_state_dict({name: torch.cat([-one, one]) / 2 for name, one in head.state_dict().items()})
    return linear.requires_grad_(head.weight.requires_grad)


class Inseparable(InputError):
    """A model of timm is more than one layer on its embedding; `reason` says why."""

    def __init__(self, model: Any, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"expected a model with one layer from embeddings to logits, got {type(model).__name__}: {reason}: explain"
            " it as it is, with explainers.models.as_target(model), or give a head to train, as in TargetModel(model,"
            f" head=torch.nn.Linear({model.head_hidden_size}, classes))"
        )


def take_head(model: Any) -> nn.Module:
    """Take the classification layer off a timm model: the layer is H, and what remains of the model is G.

    The model, of timm, is changed in place. A 1 × 1 convolution of pooled maps, as in DPN and BiT, becomes a linear
    layer; `NoHead` stands for none (num_classes=0). `Inseparable` is raised if the model has several layers from
    embeddings to logits, or if its own logits of probe images differ.
    """
    weights = set(model.parameters())
    training = [part for part in model.modules() if part.training]
    images = _draw_probes(model.eval())
    expected = _run(model, images)
    layer = _take_layer(model, weights)

    def classify(images: Tensor) -> Tensor:
        features = model.forward_features(images)
        joined = isinstance(layer, DistilledHead)
        embeddings = features[:, :2].flatten(1) if joined else model.forward_head(features, pre_logits=True)
        return embeddings if isinstance(layer, NoHead) else layer(embeddings)

    if reason := _tell_apart(expected, _run(classify, images)):
        raise Inseparable(model, reason)
    for part in training:
        part.training = True
    return layer


def _draw_probes(model: Any) -> Tensor:
    """Draw two probe images for a model of timm, of the type and on the device of its weights."""
    weight = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = size or timm.data.resolve_model_data_config(model)["input_size"][1:]
    return draw_probes(count_channels(model), tuple(size), weight.detach())[1::2]  # two tell enough


def _run(function: Callable[[Tensor], Any], images: Tensor) -> Any:
    """Compute outputs of images; an exception is returned, because only the author of a module knows what it means."""
    try:
        with ordinary_tensors(), torch.autocast(images.device.type, enabled=False):
            return function(images)
    except Exception as error:
        return error


def _tell_apart(expected: Any, found: Any) -> str:
    """Say how a model's own outputs differ from those of its parts; nothing where neither has finite ones."""
    fine = [isinstance(each, Tensor) and not each.is_meta and bool(each.isfinite().all()) for each in (expected, found)]
    if not any(fine):
        return ""  # which is refused elsewhere
    if getattr(expected, "shape", None) != getattr(found, "shape", None):
        own, parts = map(_describe_outputs, (expected, found))
        return f"it returns {own}, its parts {parts}"
    difference = compare_outputs(found, expected)
    return f"its own outputs differ by {difference:.1g} from those of its parts" * (not difference < TOLERANCE)


def _describe_outputs(outputs: Any) -> str:
    """The shape of outputs, their type, or the exception in their place."""
    if isinstance(outputs, Exception):
        return " ".join(repr(outputs).split())[:120]
    return str(list(outputs.shape)) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"


def _take_layer(model: Any, weights: set[nn.Parameter]) -> Any:
    """Take the classification layer off a timm model with these weights, see `take_head`."""
    layer: Any = model.get_classifier()
    if any(part is None or isinstance(part, nn.Identity) for part in (layer if isinstance(layer, tuple) else [layer])):
        return NoHead()
    if isinstance(model, VisionTransformerDistilled):
        layer = DistilledHead(*layer)
    model.reset_classifier(0)
    one = isinstance(layer, nn.Module) and not isinstance(layer, nn.ModuleList)
    if not one or weights.difference(model.parameters()) != set(layer.parameters()):
        raise Inseparable(model, "it has several layers from embeddings to logits")
    if not isinstance(layer, nn.Conv2d):
        return layer
    linear = nn.Linear(layer.in_channels, layer.out_channels, layer.bias is not None, dtype=layer.weight.dtype)
    linear.load_state_dict({name: weight.reshape(weight.shape[:2]) for name, weight in layer.state_dict().items()})
    return linear


def load_head(path: str | Path) -> tuple[nn.Module, Identity]:
    """Load a head from a safetensors file: a linear one of `weight` (K, D) and `bias` (K,), or one of cosines.

    A head of cosines has `weight` (K, D') and `scale`, perhaps `projection` (D', D) and `bias`, see `ProjectedHead`.

    Returns:
        The head, and its identity as `save_head` wrote it; the identity is empty if another program wrote the file.
    """
    if not Path(path).is_file():
        raise InputError(f"no head at {path}: fit one first, with `python train.py experiment=linear_head`")
    identity, read = read_weights(path, "a linear head")
    check_forms(path, COSINES if "scale" in read else LINEAR)
    weights: dict[str, Any] = {name: value.float() for name, value in read.items()}
    count, width = weights["weight"].shape
    if identity:
        check_keys(identity, {"target": "dictionary", "classes": "texts"}, path)
        check_count(identity["classes"], count, path)
    if "scale" not in weights:
        head = nn.Linear(width, count, dtype=torch.float32)
        head.load_state_dict(weights)
        return head, identity
    scale = weights.pop("scale").item()
    check_keys({"scale": scale}, {"scale": "positive number"}, path)
    return ProjectedHead(**weights, scale=scale), identity


def check_count(classes: Sequence[str], count: int, path: str | Path) -> None:
    """Raise an InputError unless a file names each of its classes, or none."""
    if len(classes) not in (0, count, max(2, count)):  # two names of a single logit
        raise InputError(f"{path}: expected names of {count} classes, got {len(classes)}: give another file")


def check_head_gives_logits(head: nn.Module, embed_dim: int) -> None:
    """Raise an InputError for a head of several layers whose outputs stay in [0, 1] for embeddings of any size."""
    embeddings = torch.randn(4, embed_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    weight = next(head.parameters(), embeddings)
    with torch.no_grad():
        outputs = head(1e3 * embeddings.to(weight))
    if ((outputs >= 0) & (outputs <= 1)).all() and (outputs != outputs[:1]).any():
        raise InputError(
            "head= gives probabilities, but logits are explained: leave out its last softmax or sigmoid; for a sigmoid"
            " then give score=sigmoid"
        )


def save_head(head: nn.Module, path: Path, target: Identity, classes: Sequence[str]) -> Path:
    """Write a linear head, or one of cosines, to a safetensors file, and return the path of the file.

    Args:
        head: the head, as `load_head` reads it.
        path: the file to write.
        target: identity of the backbone on which the head was fitted.
        classes: names of the classes, in the order of the logits; empty if they are not known.
    """
    return save_weights(head.state_dict(), path, {"target": target, "classes": list(classes)})


LENGTHS = {"norm", "linalg_norm", "linalg_vector_norm"}
KEPT = {"clamp", "clamp_min", "maximum", "add", "__add__", "unsqueeze", "expand_as", "view", "reshape", "__getitem__"}
DIVISIONS = {"div", "true_divide", "__truediv__", "div_", "__itruediv__"}
"""Names of functions that compute lengths of vectors, that return a length with a bound or in another shape, and that
divide by one."""


class ConstantLengths(TorchFunctionMode):
    """Inside this context, gradients leave the lengths by which vectors are divided as they are.

    Then a patch is explained by its share of the embedding, and not by how it changes the length of the sum. All heads
    of cosines are explained alike: `ProjectedHead`, and those that a module computes in its own words.

    >>> embedding = torch.tensor([[3.0, 4.0]], requires_grad=True)
    >>> with ConstantLengths():
    ...     cosine = (embedding / embedding.norm(dim=1, keepdim=True))[0, 0]
    >>> torch.autograd.grad(cosine, embedding)[0].tolist()
    [[0.20000000298023224, 0.0]]
    """

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if function is F.normalize:
            return _normalise(*args, **kwargs)
        if function is F.cosine_similarity and len(args) == 2:
            return (_normalise(args[0], **kwargs) * _normalise(args[1], **kwargs)).sum(kwargs.get("dim", 1))
        found = [any(value is length for length in self.lengths) for value in args]
        if name in DIVISIONS and found[1:2] == [True]:
            args = (args[0], args[1].detach(), *args[2:])
        output = function(*args, **kwargs)
        if name in LENGTHS or name in KEPT and any(found):
            self.lengths.append(output)
        return output


def _normalise(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """`F.normalize`, for a constant length."""
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps).detach()


class ProjectedHead(nn.Module):
    """Multiplies embeddings by a fixed projection W.

    >>> head = ProjectedHead(torch.eye(2), scale=10.0)
    >>> head(torch.tensor([[0.0, 4.0]])).tolist()  # the logits of one image
    [[0.0, 10.0]]

    Args:
        weight: W, (K, D'). D' is the width of the embeddings after `projection`.
        projection: linear map before W, (D', D), such as CLIP's visual projection; `None` for none, and then D' = D.
        normalise: divide every embedding, after `projection`, by its length.
        scale: factor of the logits, such as CLIP's logit scale; above 0.
        bias: added to the logits, (K,), such as the bias of a model's own head; `None` for none.
    """

    weight: Tensor
    projection: Tensor | None
    bias: Tensor | None
    scale: Tensor
    class_names: tuple[str, ...] = ()
    """Names of the classes, in the order of the logits; empty if they are not known."""

    def __init__(
        self,
        weight: Tensor,
        projection: Tensor | None = None,
        normalise: bool = True,
        scale: float = 1.0,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_positive(scale=scale)
        self.register_buffer("weight", weight)
        self.register_buffer("projection", projection)
        self.register_buffer("bias", bias)
        self.register_buffer("scale", torch.tensor(float(scale)))
        self.normalise = normalise

    @property
    def in_features(self) -> int:
        """D, the width of the embeddings."""
        return (self.weight if self.projection is None else self.projection).shape[1]

    @property
    def out_features(self) -> int:
        """K, the number of classes."""
        return len(self.weight)

    def extra_repr(self) -> str:
        """The option that the state dict does not hold."""
        return f"normalise={self.normalise}"

    def forward(self, embeddings: Tensor) -> Tensor:
        """Compute logits (..., K) from embeddings of images (..., D)."""
        logits = self.scale * F.linear(self.project(embeddings, self.normalise), self.weight)
        return logits if self.bias is None else logits + self.bias

    def directions(self) -> Tensor:
        """The functionals of the classes, (K, D), without the division by the length of the embedding."""
        return self.weight if self.projection is None else self.weight @ self.projection

    def project(self, embeddings: Tensor, normalise: bool) -> Tensor:
        """Embeddings (..., D) after the projection, (..., D'), divided by their length if `normalise`."""
        if self.projection is not None:
            embeddings = F.linear(embeddings, self.projection)
        return F.normalize(embeddings, dim=-1) if normalise else embeddings
