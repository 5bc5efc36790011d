"""Learning the last blocks of a backbone alone."""

from explainers.errors import check_range
from explainers.models import TargetModel
from explainers.transformer.blocks import blocks_of


def learn_last_blocks(target: TargetModel, count: int | None) -> None:
    """Freeze the backbone, except for its last blocks and what follows them.

    An explainability vector is then 0 in the frozen part. It takes less time to learn, and changes predictions less.

    >>> import timm
    >>> target = TargetModel(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=2))
    >>> learn_last_blocks(target, 1)
    >>> sorted({name.split(".")[0] for name, each in target.backbone.named_parameters() if each.requires_grad})
    ['blocks', 'norm']

    Args:
        target: a transformer of timm, which registers its parts in the order of the computation.
        count: number of the last blocks that learn; `None` freezes nothing.

    Raises:
        InputError: for a model without blocks, or with fewer blocks.
    """
    if count is None:
        return
    blocks = blocks_of(target)
    check_range(1, len(blocks), last_blocks=count)
    first = next(blocks[-count].parameters())
    learns = False
    for parameter in target.backbone.parameters():
        learns = learns or parameter is first
        parameter.requires_grad_(learns)
