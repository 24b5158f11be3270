"""One rank at work: drives protocol, transfers and control, and its registration."""
