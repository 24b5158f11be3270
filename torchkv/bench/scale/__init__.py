"""What a request costs in a large cluster: the real state machines of up to thousands of ranks, on a virtual clock."""
