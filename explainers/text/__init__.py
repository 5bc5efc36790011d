"""Texts as functionals of a backbone's embedding: text towers, text heads, and explaining what texts describe."""

from explainers.text.explaining import TextExplainer
from explainers.text.fitting import fit_text_head, unseen_head, unseen_texts
from explainers.text.heads import TextHead, clip_text_head

__all__ = ["TextExplainer", "TextHead", "clip_text_head", "fit_text_head", "unseen_head", "unseen_texts"]
