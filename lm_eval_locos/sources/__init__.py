"""Where the evaluation's data comes from: lookup, needles, haystacks, the bundled sample."""
