"""Makes the small models and tasks of quickstart, benchmarks and tests."""
