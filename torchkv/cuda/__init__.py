"""CUDA driver objects: device memory that peers map, events, streams, and words that streams and the host share."""
