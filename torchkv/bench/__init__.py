"""``python -m torchkv.bench``: transfer rates of every path, each as a ratio to a limit measured in the same run."""
