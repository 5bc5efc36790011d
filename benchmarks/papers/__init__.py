"""Figures, studies and explainers of single papers, which only configs name."""
