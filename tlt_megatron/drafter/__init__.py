"""Training of the drafter: data, packed batches, objectives, optimizer steps, EAGLE folders."""
