"""A target as other libraries call models: normalised float images go in, logits come out, and gradients flow."""

from torch import Tensor, nn

from explainers.errors import InputError
from explainers.models import TargetModel


class NormalisedModel(nn.Module):
    """The view of a target that captum, Quantus and pytorch-grad-cam want: normalised images → logits.

    It shares the weights of the target. Layers are found under `target.backbone`, as in timm:
    `GradCAM(model=view, target_layers=[view.target.backbone.layer4])` of pytorch-grad-cam.

    Args:
        target: the model.

    >>> import timm, torch
    >>> target = TargetModel(timm.create_model("test_resnet", num_classes=2)).eval()
    >>> images = torch.zeros(1, 3, 160, 160, dtype=torch.uint8)
    >>> torch.equal(NormalisedModel(target)(target.normalise(images)), target(images))
    True
    """

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        if not isinstance(target, TargetModel):
            raise InputError(
                f"expected a TargetModel, got {type(target).__name__}: take explainer.target, or"
                " explainers.models.as_target(model)"
            )
        self.target = target
        self.eval()  # which Quantus checks

    def forward(self, inputs: Tensor) -> Tensor:
        """Classify images (B, C, H, W), normalised as `target.normalise` does → logits (B, K).

        Raises:
            InputError: for images that are not floating point, which nobody has normalised.
        """
        if not inputs.is_floating_point():
            raise InputError(
                f"expected normalised images, floating point, got {str(inputs.dtype).removeprefix('torch.')}: give"
                " target.normalise(images), or call the target itself with uint8 images"
            )
        return self.target.classify(self.target.embed(inputs))
