"""Lightning callbacks for any module that explains: heatmap figures, and speed with memory use."""
