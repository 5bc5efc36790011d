"""Lightning callbacks of a training: its checkpoint, progress, speed, heatmaps and fidelity."""
