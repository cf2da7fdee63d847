"""How ranks exchange tensors through shared memory: steps, waiting, failure, reductions, algorithms."""
