"""How things are computed: progress of long work, modes of PyTorch, and float64 where a device has it."""
