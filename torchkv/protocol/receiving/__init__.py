"""What a rank receives, by the rules: requests, the leases of their pages, and the staging ring.

Open `receiver` first. `request` is one request's record, `open_receives` all whose leases have not ended, `endings` how
they succeed, fail and end. `leases` says which pages may be granted. `stages` is the receiver's side of the staged
path; `staging_credits` and `stage_allocator` say who may write where in the ring.
"""
