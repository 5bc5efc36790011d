"""How things are computed: progress of long work, random numbers, modes of PyTorch, and float64 where a device has it."""
