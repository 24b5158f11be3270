"""Host-side primitives: compiled copies and checksums, shared memory, processes, network interfaces."""
