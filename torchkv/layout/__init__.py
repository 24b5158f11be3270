"""What each rank holds of a KV cache, and which bytes have to go where. No memory is touched and no I/O is done here.

Read in this order: `component` and `layout` (what one rank holds), `pair_plan` (what one writer owes one reader),
`plan_segment` (the parts of such a plan), then either `descriptors` (plans as lists of byte ranges), `kernel_geometry`
(plans as the parameters of a copy kernel) or `pieces` (plans cut to fit into stages of the staging ring).
"""
