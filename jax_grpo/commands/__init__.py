"""The commands: flags and configs become objects here and nowhere else."""
