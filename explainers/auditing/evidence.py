"""Evidence: what the strongest patches of every image add to its class, from one pass for each image."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Evidence:
    """What the strongest patches of some images add to classes.

    A patch's evidence for class y is v_y · c_z, with v_y of `head_functionals` at temperature infinity: the logit of
    the class relative to the mean of the others. The strongest patches are those with the most evidence for the
    predicted class or, in a mistake, for that or the label, whichever is more.

    Args:
        numbers: places of the images in the list of photos, (B,).
        labels: their classes, (B,); −1 where it is not known.
        predicted: the classes that the model predicts, (B,).
        embeddings: float16, (B, D).
        totals: the sum of the positive evidence of all patches for the predicted class, float32, (B,).
        patches: numbers of the strongest patches, int16, (B, P), the strongest first.
        vectors: their vectors c_z, float16, (B, P, D).
    """

    numbers: Tensor
    labels: Tensor
    predicted: Tensor
    embeddings: Tensor
    totals: Tensor
    patches: Tensor
    vectors: Tensor
