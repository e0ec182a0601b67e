"""Training the drafter: packed batches, the attention of an unrolled draft, three objectives, the step, the files."""
