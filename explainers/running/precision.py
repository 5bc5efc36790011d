"""The precision that a run computes in."""

from typing import Any

import torch

from explainers.errors import InputError


def fastest_precision(accelerator: str) -> str:
    """Lightning's precision: bf16 autocast if the hardware computes it, else float32.

    Emulated bf16 is ten times slower than float32.

    Args:
        accelerator: Lightning's name of the device, such as auto, cpu or gpu.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    cpu = accelerator in ("auto", "cpu") and hasattr(torch.cpu, "get_capabilities")
    features = torch.cpu.get_capabilities() if cpu else {}
    return "bf16-mixed" if features.get("amx_bf16") or features.get("avx512_bf16") else "32-true"


def check_precision(precision: Any) -> None:
    """Raise an InputError for a precision whose weights are no float32, as normalised images are.

    >>> check_precision("bf16-mixed")
    """
    if str(precision) not in ("32-true", "32", "bf16-mixed", "bf16", "16-mixed", "16"):
        raise InputError(
            f"expected trainer.precision 32-true, bf16-mixed or 16-mixed, got {precision}: images are"
            " normalised in float32, which weights have to be in as well"
        )
