"""What train.py and eval.py share: Hydra, processes, signals, resuming, loggers. The library imports none of it."""
