"""Training of the drafter: data, packed batches, unrolled attention, objectives, optimizer steps, checkpoints, publishing."""
