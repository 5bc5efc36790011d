"""Texts as functionals of a backbone's embedding: text towers, text heads, and explaining what texts describe."""

from explainers.text.explaining import TextExplainer
from explainers.text.fitting import fit_text_head
from explainers.text.heads import TextHead, clip_text_head, hugging_face_text_head, two_towers, zero_shot_head

__all__ = [
    "TextExplainer",
    "TextHead",
    "clip_text_head",
    "fit_text_head",
    "hugging_face_text_head",
    "two_towers",
    "zero_shot_head",
]
