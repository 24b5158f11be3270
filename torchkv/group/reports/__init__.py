"""What a rank says of itself: dumps of its flight record, and metrics."""
