"""Detection: head rankings from one pass of ordinary generation.

capture   keeps queries, outputs and references to keys and values while a model generates
batches   trials, and which of them run together
prefix    one prefill for all prompts that begin alike
generate  the engine: greedy decoding of batches, and every head's scores
steps     when to stop, which steps are answer steps, which trials pass
reader    from what was captured to a trial's scores
scores    the equations, as pure functions
cri       causal patching, on request
"""
