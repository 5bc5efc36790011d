"""captum's rescale rule, in a file of its own, because captum is not installed everywhere."""

import captum.attr
from torch import nn


class RescaleRule(captum.attr.DeepLift):
    """captum's DeepLift without its rule for softmax modules (Swin has them), which mixes the images of a batch."""

    def _is_non_linear(self, module: nn.Module) -> bool:
        return not isinstance(module, nn.Softmax) and super()._is_non_linear(module)
