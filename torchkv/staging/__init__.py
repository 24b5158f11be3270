"""The staged path: gather, one bulk put into the receiver's ring, scatter. See `torchkv.staging.transfer`."""
