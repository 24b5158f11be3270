"""``python -m torchkv.bench``: measured rates of every host path, as ratios to a limit measured in the same run."""
