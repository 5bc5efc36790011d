"""Lightning callbacks of a training: its checkpoint, progress, speed, profile, heatmaps and fidelity."""
