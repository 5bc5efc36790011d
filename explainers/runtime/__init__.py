"""How things are computed: progress of long work, random numbers, modes of PyTorch, float64 where a device has it."""
