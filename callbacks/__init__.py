"""Lightning callbacks of a training: its checkpoint, progress, speed, profile, and figures of heatmaps."""
