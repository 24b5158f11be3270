"""What users call: the process group and its verbs."""
