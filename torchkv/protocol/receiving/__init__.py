"""What a rank receives, by the rules: requests, the leases of their pages, and the staging ring."""
