"""Our own examples in the shapes of the benchmarks' data; see `lm_eval_locos.sources.generate`."""
