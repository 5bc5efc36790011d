"""What train.py and eval.py share. The library imports none of it.

A command starts and ends in `program`: it locks the `folder` of its run and answers `signals`. It checks the `settings`
of its config, writes the `record` of the run, and starts its other `processes`; `trainer` builds Lightning's trainer.
`rows` says which numbers an evaluation measures again. `targets` hands Hydra a config of every short name and of every
model of timm that a command names.

On Ctrl-C or SIGTERM, a command first ends the processes that it has started, then exits with 128 + the number of the
signal (`signals`). Before that, a training finishes its step and writes `last.ckpt` (`callbacks/last_checkpoint.py`),
and an evaluation writes what it has measured (`callbacks/resume_test.py`). The same command then resumes from these
files, unless its config or its files of weights have changed (`record`). On SIGUSR1, a SLURM job is requeued.
"""
