"""The direct and put paths, which write straight into a peer's pages; the choice of the path; peer connections."""
