"""The exchange of tensors through shared memory: steps, waiting, failures, reductions, algorithms."""
