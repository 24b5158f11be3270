"""Control messages between ranks, delivered in order and authenticated, and whether each peer is alive."""
